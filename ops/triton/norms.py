"""The norms: gated, after the recurrence of prefill; and plain ones of whole rows."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

import triton
import triton.language as tl
from torch import Tensor

from .functions import sigmoid

BLOCK_ROWS = 32  # 8..64 differ by 15 % at most on H200
NUM_WARPS = 4
ROW_VALUES = 16  # of a thread, in a norm of a whole row


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    eps: float,
    block_rows: int = BLOCK_ROWS,
    num_warps: int = NUM_WARPS,
) -> Tensor:
    """`ops.norms.gated_rms_norm`, in bf16 or fp32; computed in fp32."""
    out = x.new_empty(x.shape)
    if out.numel() == 0:
        return out
    (x, x_token, x_head), (gate, gate_token, gate_head) = _rows(x), _rows(gate)
    num_rows, heads, V = x.shape[0] * x.shape[1], x.shape[1], x.shape[2]
    _gated_rms_norm_kernel[(triton.cdiv(num_rows, block_rows),)](
        *(x, gate, weight, out, x_token, x_head, gate_token, gate_head, num_rows, heads, eps),
        V=V,
        BLOCK_ROWS=block_rows,
        BLOCK_V=triton.next_power_of_2(V),
        num_warps=num_warps,
    )
    return out


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, num_warps: int | None = None) -> Tensor:
    """`ops.norms.rms_norm`, in bf16 or fp32."""
    out = x.new_empty(x.shape)
    _norm_rows(x, None, weight, None, out, eps, num_warps)
    return out


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float, num_warps: int | None = None
) -> tuple[Tensor, Tensor]:
    """`ops.norms.add_rms_norm`, in bf16 or fp32."""
    total, out = x.new_empty(x.shape), x.new_empty(x.shape)
    _norm_rows(x, residual, weight, total, out, eps, num_warps)
    return total, out


def _norm_rows(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    total: Tensor | None,
    out: Tensor,
    eps: float,
    num_warps: int | None,
) -> None:
    """A program a row: its bits don't depend on how many there are, nor on the stride between them
    as long as each starts 16-byte aligned.
    """
    if out.numel() == 0:
        return
    (M, dim), block = x.shape, triton.next_power_of_2(x.shape[1])
    has_residual = residual is not None
    _rms_norm_kernel[(M,)](
        *(x, residual if has_residual else x, weight, total if has_residual else out, out),
        *(x.stride(0), residual.stride(0) if has_residual else 0, eps),
        dim=dim,
        HAS_RESIDUAL=has_residual,
        BLOCK=block,
        num_warps=num_warps or min(16, max(1, block // (32 * ROW_VALUES))),
    )


def _rows(x: Tensor) -> tuple[Tensor, int, int]:
    """x as [tokens, heads, V], and the strides of the first two."""
    x = x.reshape(1, -1, x.shape[-1]) if x.ndim < 3 else x.flatten(0, -3)
    return x, x.stride(0), x.stride(1)


@triton.jit(do_not_specialize=["num_rows", "heads"])
def _gated_rms_norm_kernel(
    x,
    gate,
    weight,
    out,
    x_token,
    x_head,
    gate_token,
    gate_head,
    num_rows,
    heads,
    eps,
    V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token, head = (row // heads).to(tl.int64), row % heads
    v = tl.arange(0, BLOCK_V)[None, :]
    mask = (row < num_rows)[:, None] & (v < V)
    x_at = (token * x_token + head * x_head)[:, None] + v
    gate_at = (token * gate_token + head * gate_head)[:, None] + v
    value = tl.load(x + x_at, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gate + gate_at, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + v, mask=v < V, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / V + eps)
    value = value * scale[:, None] * w * sigmoid(z)
    tl.store(out + row.to(tl.int64)[:, None] * V + v, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    total,
    out,
    x_row,
    residual_row,
    eps,
    dim: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < dim
    # read before the sum over the row, which it would have to wait for
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + row * residual_row + column
        value += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * dim + column, rounded, mask=mask)
        value = rounded.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, axis=0) / dim + eps)
    value = value.to(out.dtype.element_ty).to(tl.float32) * w
    tl.store(out + row * dim + column, value.to(out.dtype.element_ty), mask=mask)
