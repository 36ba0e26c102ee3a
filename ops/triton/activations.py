"""Products of an activation of one half and another half, as eager torch rounds them."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
NUM_WARPS = 4


def silu_and_mul(x: Tensor, *, block: int = BLOCK, num_warps: int = NUM_WARPS) -> Tensor:
    """`ops.activations.silu_and_mul`, in bf16 or fp32."""
    gate, up = x.chunk(2, dim=1)
    return _gated(up, gate, block, num_warps, is_silu=True)


def sigmoid_mul(
    x: Tensor, gate: Tensor, *, block: int = BLOCK, num_warps: int = NUM_WARPS
) -> Tensor:
    """`ops.activations.sigmoid_mul`, in bf16 or fp32."""
    return _gated(x, gate, block, num_warps, is_silu=False)


def _gated(x: Tensor, gate: Tensor, block: int, num_warps: int, *, is_silu: bool) -> Tensor:
    M, dim = x.shape
    out = x.new_empty(M, dim)
    if out.numel() == 0:
        return out
    _gated_kernel[(M, triton.cdiv(dim, block))](
        *(x, gate, out, x.stride(0), gate.stride(0), dim),
        IS_SILU=is_silu,
        BLOCK=block,
        num_warps=num_warps,
    )
    return out


@triton.jit
def _gated_kernel(x, gate, out, x_row, gate_row, dim, IS_SILU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < dim
    value = tl.load(x + row * x_row + column, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(gate + row * gate_row + column, mask=mask, other=0.0).to(tl.float32)
    z = (z if IS_SILU else 1.0) / (1.0 + tl.exp(-z))
    z = z.to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * dim + column, (value * z).to(out.dtype.element_ty), mask=mask)
