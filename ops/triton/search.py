"""Finding a place in a list of starts, on the device."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

import triton
import triton.language as tl


@triton.jit
def first_above(values, count, x):
    """Index of the first of ascending values that is larger than x; count if there is none."""
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if tl.load(values + middle) > x:
            high = middle
        else:
            low = middle + 1
    return low
