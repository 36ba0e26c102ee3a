"""What the kernels of latent attention share: storing, and attention of a tile of queries."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

STORE_ROWS = 8


def mla_store(latent: Tensor, kv_pool: Tensor, slot_mapping: Tensor) -> None:
    """`ops.attention.mla_store`."""
    M, W = latent.shape
    if M == 0:
        return
    num_places = kv_pool.shape[0] * kv_pool.shape[1]
    _store_kernel[(triton.cdiv(M, STORE_ROWS),)](
        *(latent, kv_pool, slot_mapping, latent.stride(0), M, num_places),
        W=W,
        BLOCK_ROWS=STORE_ROWS,
        BLOCK_W=triton.next_power_of_2(W),
        num_warps=4,
    )


def block_dim(size: int) -> int:
    """Width of a tile that a tensor core takes."""
    return max(16, triton.next_power_of_2(size))


@functools.cache
def num_processors(device: torch.device) -> int:
    if device.type == "cpu":
        return 3  # the interpreter's
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit(do_not_specialize=["M", "num_places"])
def _store_kernel(
    latent,
    kv_pool,
    slot_mapping,
    latent_row,
    M,
    num_places,
    W: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    place = tl.load(slot_mapping + row, mask=row < M, other=-1).to(tl.int64)
    w = tl.arange(0, BLOCK_W)
    mask = ((place >= 0) & (place < num_places))[:, None] & (w < W)[None, :]
    value = tl.load(latent + row.to(tl.int64)[:, None] * latent_row + w[None, :], mask=mask)
    tl.store(kv_pool + place[:, None] * W + w[None, :], value, mask=mask)


@triton.jit
def even_parts(length, count, BLOCK_N: tl.constexpr):
    """Parts of a context cut into `count` at most, and tokens of each but the last, a multiple of
    BLOCK_N.
    """
    size = tl.cdiv(tl.cdiv(length, tl.maximum(count, 1)), BLOCK_N) * BLOCK_N
    return tl.cdiv(length, tl.maximum(size, 1)), size


@triton.jit
def attend(
    q,
    q_shared,
    last,
    low,
    high,
    kv_pool,
    table,
    scale_log2,
    R: tl.constexpr,
    P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Attention of a tile of queries over the cached tokens low .. high - 1 of one sequence.

    q is [BLOCK_ROWS, BLOCK_R], q_shared [BLOCK_ROWS, BLOCK_P], zero where padded; low is a multiple
    of BLOCK_N. Row i sees the tokens up to last[i].

    Returns:
        The weighted sum of latents, not normalised, the largest score times log2(e), and the sum of
        weights. A row that sees nothing has -inf and 0 there.
    """
    r, p = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_P)[None, :]
    n = tl.arange(0, BLOCK_N)
    acc = tl.full((BLOCK_ROWS, BLOCK_R), 0.0, tl.float32)
    top = tl.full((BLOCK_ROWS,), float("-inf"), tl.float32)
    total = tl.full((BLOCK_ROWS,), 0.0, tl.float32)
    for first in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        token = first + n
        is_token = token < high
        if BLOCK_SIZE % BLOCK_N == 0:
            block = tl.load(table + first // BLOCK_SIZE)
            place = block.to(tl.int64) * BLOCK_SIZE + first % BLOCK_SIZE + n
        else:
            block = tl.load(table + token // BLOCK_SIZE, mask=is_token, other=0)
            place = block.to(tl.int64) * BLOCK_SIZE + token % BLOCK_SIZE
        row = kv_pool + place[:, None] * (R + P)
        latent = tl.load(row + r, mask=is_token[:, None] & (r < R), other=0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        if P > 0:
            shared = tl.load(row + R + p, mask=is_token[:, None] & (p < P), other=0.0)
            scores = tl.dot(q_shared, tl.trans(shared), acc=scores, input_precision="ieee")
        is_seen = (token[None, :] <= last[:, None]) & is_token[None, :]
        scores = tl.where(is_seen, scores * scale_log2, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        # a row that has seen nothing yet: all its weights are 0, not exp2(nan)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(top - base)
        total = total * fade + tl.sum(weights, axis=1)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(latent.dtype), latent, acc=acc, input_precision="ieee")
        top = new_top
    return acc, top, total
