"""Scalar functions that the kernels share; fp32 in and out."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    """x * sigmoid(x), for |x| < 8 within a relative error of 1e-6.

    Half the instructions of sigmoid: its division takes five, a root and a square two; `tl.exp`
    takes four, `tl.exp2` one. Where exp2 is inf, the root is 0.
    """
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return x * (root * root)


@triton.jit
def softplus(x):
    """log(1 + exp(x)), with small relative error also where it is small."""
    e = tl.exp(-tl.abs(x))
    # log1p(e) = 2 atanh(s) with s <= 1/3: nine terms of the series leave 2e-10
    s = e / (2.0 + e)
    s2 = s * s
    series = 1.0 / 17
    series = tl.fma(series, s2, 1.0 / 15)
    series = tl.fma(series, s2, 1.0 / 13)
    series = tl.fma(series, s2, 1.0 / 11)
    series = tl.fma(series, s2, 1.0 / 9)
    series = tl.fma(series, s2, 1.0 / 7)
    series = tl.fma(series, s2, 1.0 / 5)
    series = tl.fma(series, s2, 1.0 / 3)
    series = tl.fma(series, s2, 1.0)
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def decay(x, a, lower_bound, IS_BOUNDED: tl.constexpr):
    """exp of the log decay; x: raw gate and bias, a: exp(A_log)."""
    g = lower_bound * sigmoid(a * x) if IS_BOUNDED else -a * softplus(x)
    return tl.exp(g)


@triton.jit
def silu_taps(w0, w1, w2, w3, x0, x1, x2, x3):
    """SiLU of a width-4 conv, the oldest input first; fp32 weights, raw inputs.

    Explicit fma: all who call it round alike.
    """
    y = w0 * x0.to(tl.float32)
    y = tl.fma(w1, x1.to(tl.float32), y)
    y = tl.fma(w2, x2.to(tl.float32), y)
    y = tl.fma(w3, x3.to(tl.float32), y)
    return silu(y)


@triton.jit
def slot_or_none(slot, num_slots):
    """-1 for an id outside the pool."""
    return tl.where((slot >= 0) & (slot < num_slots), slot, -1)
