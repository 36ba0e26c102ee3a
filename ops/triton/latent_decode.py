"""Decode of latent attention: the cached tokens of a row are split over programs, then joined."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .latents import attend, block_dim, even_parts, num_processors

SPLIT_TOKENS = 512  # of a part, where there are rows enough for all processors
MAX_SPLITS = 64  # parts of a row: at 128K tokens they have 2048
WORKSPACE_BYTES = 512 << 20  # of the parts' results; rows beyond it wait for a second launch
BLOCK_ITEMS = 256  # rows of one launch at most
BLOCK_N = 64


def mla_decode(
    q: Tensor,
    kv_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
    num_tokens_per_row: int,
    split_tokens: int = SPLIT_TOKENS,
    block_n: int = BLOCK_N,
    num_warps: int | None = None,
    num_stages: int = 2,
    programs_per_processor: int = 1,
) -> Tensor:
    """`ops.attention.mla_decode`.

    Rows are cut into parts of `split_tokens`; few rows into smaller ones, as long as every part
    has a processor of its own. A part's length follows from its row's length and the number of
    rows, so a row's bits don't depend on what the other rows hold. Parts of all rows are numbered
    on the device and dealt to as many programs as run at once.
    """
    D, M, R = seq_lens.shape[0], num_tokens_per_row, kv_lora_rank
    out = q.new_empty(q.shape[0], q.shape[1], R)
    rows = M * q.shape[1]
    if out.numel() == 0:
        return out
    capacity = block_table.shape[1] * kv_pool.shape[1]
    num_programs = num_processors(q.device) * programs_per_processor
    share = num_programs // D  # parts of a row that find a processor at once
    most = max(triton.cdiv(capacity, split_tokens), min(triton.cdiv(capacity, block_n), share))
    max_splits = min(MAX_SPLITS, most)
    step = max(1, min(BLOCK_ITEMS, WORKSPACE_BYTES // (4 * max_splits * rows * (R + 2))))
    size = min(step, D) * max_splits * rows
    parts = q.new_empty(size, R, dtype=torch.float32)
    sums = q.new_empty(size, 2, dtype=torch.float32)
    block_rows = min(64, block_dim(rows))
    splits = {"MAX_SPLITS": max_splits, "SPLIT_TOKENS": split_tokens, "BLOCK_N": block_n}
    for first in range(0, D, step):
        count = min(step, D - first)
        _part_kernel[(num_programs,)](
            *(q, kv_pool, block_table, seq_lens, out, parts, sums, q.stride(0), first, count),
            *(block_table.shape[1], share, scale * math.log2(math.e)),
            HEADS=q.shape[1],
            ROWS=rows,
            R=R,
            P=q.shape[2] - R,
            BLOCK_SIZE=kv_pool.shape[1],
            BLOCK_ITEMS=BLOCK_ITEMS,
            BLOCK_ROWS=block_rows,
            BLOCK_R=block_dim(R),
            BLOCK_P=block_dim(q.shape[2] - R),
            STAGES=num_stages,
            num_warps=num_warps or (4 if block_rows < 32 else 8),
            **splits,
        )
        _join_kernel[(rows, count)](
            *(seq_lens, out, parts, sums, first, share),
            ROWS=rows,
            R=R,
            BLOCK_R=triton.next_power_of_2(R),
            BLOCK_SPLITS=triton.next_power_of_2(max_splits),
            num_warps=4,
            **splits,
        )
    return out


@triton.jit
def _splits(
    length, share, MAX_SPLITS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Number of parts of a row, and tokens of each but the last, a multiple of BLOCK_N."""
    count = tl.minimum(tl.cdiv(length, BLOCK_N), share)
    count = tl.minimum(tl.maximum(count, tl.cdiv(length, SPLIT_TOKENS)), MAX_SPLITS)
    return even_parts(length, count, BLOCK_N)


@triton.jit(do_not_specialize=["first_row", "num_rows", "max_blocks", "share"])
def _part_kernel(
    q,
    kv_pool,
    block_table,
    seq_lens,
    out,
    parts,
    sums,
    q_row,
    first_row,
    num_rows,
    max_blocks,
    share,
    scale_log2,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ITEMS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    TILES: tl.constexpr = (ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    M: tl.constexpr = ROWS // HEADS
    d = tl.arange(0, BLOCK_ITEMS)
    lengths = tl.load(seq_lens + first_row + d, mask=d < num_rows, other=0)
    counts, sizes = _splits(lengths, share, MAX_SPLITS, SPLIT_TOKENS, BLOCK_N)
    ends = tl.cumsum(counts, axis=0)
    num_items = tl.sum(counts, axis=0) * TILES
    r, p = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_P)[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        part, tile = item // TILES, item % TILES
        row = tl.sum((ends <= part).to(tl.int32), axis=0)
        part -= tl.sum(tl.where(d < row, counts, 0), axis=0)
        length = tl.load(seq_lens + first_row + row)
        count, size = _splits(length, share, MAX_SPLITS, SPLIT_TOKENS, BLOCK_N)
        # rows of the tile: (token, head) of this row of the batch
        i = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        is_query = (i < ROWS)[:, None]
        query = (first_row + row).to(tl.int64) * M + i // HEADS
        at = q + (query * q_row + i % HEADS * (R + P))[:, None]
        latent_q = tl.load(at + r, mask=is_query & (r < R), other=0.0)
        shared_q = tl.load(at + R + p, mask=is_query & (p < P), other=0.0)
        acc, top, total = attend(
            latent_q,
            shared_q,
            length - M + i // HEADS,
            part * size,
            tl.minimum(part * size + size, length),
            kv_pool,
            block_table + (first_row + row).to(tl.int64) * max_blocks,
            scale_log2,
            R,
            P,
            BLOCK_SIZE,
            BLOCK_ROWS,
            BLOCK_N,
            BLOCK_R,
            BLOCK_P,
            STAGES,
        )
        if count == 1:
            acc = acc / tl.where(total == 0, 1.0, total)[:, None]
            to = (first_row + row).to(tl.int64) * ROWS + i
            value = acc.to(out.dtype.element_ty)
            tl.store(out + to[:, None] * R + r, value, mask=is_query & (r < R))
        else:
            to = (row.to(tl.int64) * MAX_SPLITS + part) * ROWS + i
            tl.store(parts + to[:, None] * R + r, acc, mask=is_query & (r < R))
            tl.store(sums + to * 2, top, mask=i < ROWS)
            tl.store(sums + to * 2 + 1, total, mask=i < ROWS)


@triton.jit(do_not_specialize=["first_row", "share"])
def _join_kernel(
    seq_lens,
    out,
    parts,
    sums,
    first_row,
    share,
    ROWS: tl.constexpr,
    R: tl.constexpr,
    BLOCK_R: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    SPLIT_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    """Adds the parts of a (token, head); a row without tokens becomes 0."""
    i, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(seq_lens + first_row + row)
    count, _ = _splits(length, share, MAX_SPLITS, SPLIT_TOKENS, BLOCK_N)
    r, s = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_SPLITS)
    if count != 1:
        first = row.to(tl.int64) * (MAX_SPLITS * ROWS) + i
        at = sums + (first + s * ROWS) * 2
        tops = tl.load(at, mask=s < count, other=float("-inf"))
        totals = tl.load(at + 1, mask=s < count, other=0.0)
        top = tl.max(tops, axis=0)
        top = tl.where(top == float("-inf"), 0.0, top)
        total = tl.sum(tl.exp2(tops - top) * totals, axis=0)
        acc = tl.full((BLOCK_R,), 0.0, tl.float32)
        for k in range(count):
            part = first + k * ROWS
            weight = tl.exp2(tl.load(sums + part * 2) - top)
            acc += weight * tl.load(parts + part * R + r, mask=r < R, other=0.0)
        value = (acc / tl.where(total == 0, 1.0, total)).to(out.dtype.element_ty)
        at = ((first_row + row).to(tl.int64) * ROWS + i) * R
        tl.store(out + at + r, value, mask=r < R)
