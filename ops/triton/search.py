"""Finding a place in a list of starts, on the device."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

import triton
import triton.language as tl

BLOCK = tl.constexpr(512)  # values of one load


@triton.jit
def first_above(values, count, x):
    """Index of the first of ascending values that is larger than the number x; count if none is.

    Counts them all: a search has as many loads that wait for each other as count has bits.
    """
    index = tl.arange(0, BLOCK)
    found = tl.zeros((BLOCK,), tl.int32)
    for base in range(0, count, BLOCK):
        is_value = base + index < count
        value = tl.load(values + base + index, mask=is_value, other=0)
        found += (is_value & (value <= x)).to(tl.int32)
    return tl.sum(found, axis=0)
