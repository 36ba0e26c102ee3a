"""The router of a mixture of experts: fp32 logits from bf16 products, and the choice of each row.

An fp32 weight is the sum of three bf16 parts, and a product of two bf16 values is exact in fp32:
three products on tensor cores lose no more than one in fp32. A row's bits don't depend on the other
rows as long as the call takes the same tile.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .functions import sigmoid


class Tile(NamedTuple):
    """What a program of the logits kernel computes."""

    experts: int
    rows: int
    block: int  # channels of a step
    depth: int  # channels of a program, at least; a multiple of block. 0: all
    warps: int
    stages: int


# up to so many rows; few experts and channels a program, so that all processors read the weights
TILES = (
    (16, Tile(32, 16, 64, 128, 4, 3)),
    (64, Tile(16, 64, 64, 256, 4, 5)),
    (2048, Tile(64, 64, 64, 576, 4, 3)),
)
MANY_TILE = Tile(128, 128, 64, 0, 8, 3)
FP32_TILE = Tile(32, 32, 32, 256, 4, 2)  # no tensor core takes fp32: it adds in registers


def moe_route(
    x: Tensor,
    weight: Tensor,
    choice_bias: Tensor,
    num_choices: int,
    *,
    renormalize: bool,
    scaling_factor: float,
    is_real: Tensor | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """`ops.moe.moe_route`, in bf16 or fp32."""
    M, E = x.shape[0], weight.shape[0]
    ids = torch.empty(M, num_choices, dtype=torch.int32, device=x.device)
    weights = torch.empty(M, num_choices, dtype=torch.float32, device=x.device)
    if M == 0:
        return ids, weights
    logits = _logits(x, weight, tile or _tile(x))
    _choose_kernel[(M,)](
        *(logits, choice_bias, ids if is_real is None else is_real, ids, weights),
        *(M, E, scaling_factor),
        CHOICES=num_choices,
        PARTS=logits.shape[0],
        HAS_REAL=is_real is not None,
        RENORMALIZE=renormalize,
        BLOCK_E=triton.next_power_of_2(E),
        num_warps=1,
    )
    return ids, weights


def _tile(x: Tensor) -> Tile:
    if x.dtype == torch.float32:
        return FP32_TILE
    return next((tile for rows, tile in TILES if x.shape[0] <= rows), MANY_TILE)


def _logits(x: Tensor, weight: Tensor, tile: Tile) -> Tensor:
    """Parts [P, M, E] fp32 whose sum over P is x weight^T."""
    (M, dim), E = x.shape, weight.shape[0]
    depth = tile.depth or triton.cdiv(dim, tile.block) * tile.block
    parts = triton.cdiv(dim, depth)
    logits = torch.empty(parts, M, E, dtype=torch.float32, device=x.device)
    grid = (triton.cdiv(E, tile.experts), triton.cdiv(M, tile.rows), parts)
    _logits_kernel[grid](
        *(x, weight, logits, M, E, dim),
        IS_BF16=x.dtype == torch.bfloat16,
        DEPTH=depth,
        BLOCK_E=tile.experts,
        TILE=tile.rows,
        BLOCK_K=tile.block,
        STAGES=tile.stages,
        num_warps=tile.warps,
    )
    return logits


@triton.jit(do_not_specialize=["M"])
def _logits_kernel(
    x,
    weight,
    logits,
    M,
    E,
    dim,
    IS_BF16: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A block of experts times a tile of rows, over a part of the channels.

    The weights are the left operand: a tensor core wants 64 rows there, but takes 16 columns.
    """
    e = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    part = tl.program_id(2)
    x_at = x + row.to(tl.int64)[None, :] * dim
    w_at = weight + e.to(tl.int64)[:, None] * dim
    acc = tl.full((BLOCK_E, TILE), 0.0, tl.float32)
    for k0 in tl.range(0, DEPTH, BLOCK_K, num_stages=STAGES):
        k = part * DEPTH + k0 + tl.arange(0, BLOCK_K)
        w = tl.load(w_at + k[None, :], mask=(e < E)[:, None] & (k < dim)[None, :], other=0.0)
        value = tl.load(x_at + k[:, None], mask=(row < M)[None, :] & (k < dim)[:, None], other=0.0)
        # a sum of its own for each block: a tensor core truncates what it adds, here is rounding
        if IS_BF16:
            acc += _dot_in_parts(w, value)
        else:
            acc += tl.dot(w, value, input_precision="ieee")
    to = logits + (part * M + row).to(tl.int64)[None, :] * E + e[:, None]
    tl.store(to, acc, mask=(e < E)[:, None] & (row < M)[None, :])


@triton.jit
def _dot_in_parts(w, value):
    """w value for fp32 w and bf16 value, the small parts of w first."""
    high = w.to(tl.bfloat16)
    rest = w - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    total = tl.dot(low, value)
    total = tl.dot(middle, value, acc=total)
    return tl.dot(high, value, acc=total)


@triton.jit(do_not_specialize=["M", "scaling_factor"])
def _choose_kernel(
    logits,
    choice_bias,
    is_real,
    ids,
    weights,
    M,
    E,
    scaling_factor,
    CHOICES: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_REAL: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Scores of a row, and CHOICES times the best expert that is left.

    One warp, so that nothing waits. Scores are compared and passed on as int32: a warp has an
    instruction for the largest of those. Choice j stands in lane j of the experts.
    """
    row, e = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_E)
    is_expert = e < E
    logit = tl.full((BLOCK_E,), 0.0, tl.float32)
    for part in tl.static_range(PARTS):
        logit += tl.load(logits + (part * M + row) * E + e, mask=is_expert, other=0.0)
    score = sigmoid(logit)
    bits = score.to(tl.int32, bitcast=True)
    left = _ordered(score + tl.load(choice_bias + e, mask=is_expert, other=0.0))
    left = tl.where(is_expert, left, -0x80000000)
    chosen = tl.full((BLOCK_E,), -1, tl.int32)
    chosen_bits = tl.full((BLOCK_E,), 0, tl.int32)
    for j in range(CHOICES):
        expert = tl.min(tl.where(left == tl.max(left, axis=0), e, BLOCK_E), axis=0)
        expert_bits = tl.max(tl.where(e == expert, bits, -0x80000000), axis=0)
        left = tl.where(e == expert, -0x80000000, left)
        chosen = tl.where(e == j, expert, chosen)
        chosen_bits = tl.where(e == j, expert_bits, chosen_bits)
    value = chosen_bits.to(tl.float32, bitcast=True)
    if RENORMALIZE:
        value = value / (tl.sum(value, axis=0) + 1e-20)
    if HAS_REAL:
        chosen = tl.where(tl.load(is_real + row) != 0, chosen, -1)
    to = row * CHOICES + e
    tl.store(ids + to, chosen, mask=e < CHOICES)
    tl.store(weights + to, value * scaling_factor, mask=e < CHOICES)


@triton.jit
def _ordered(x):
    """fp32 to int32 of the same order, above the smallest int32; NaN is the largest."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x == x, bits, 0x7FFFFFFF)
