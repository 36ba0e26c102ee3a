"""Finding a place in a list of starts, on the device."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

import triton
import triton.language as tl


@triton.jit
def first_above(values, count, x):
    """Index of the first of ascending values that is larger than x; count if there is none.

    For each of a block x, or for a number.
    """
    low, high = 0 * x, 0 * x + count
    width = count
    while width > 0:
        middle = (low + high) // 2
        is_open = low < high
        is_above = tl.load(values + middle, mask=is_open, other=0) > x
        high = tl.where(is_open & is_above, middle, high)
        low = tl.where(is_open & ~is_above, middle + 1, low)
        width = width // 2
    return low
