"""Prefill of latent attention over the paged cache.

A sequence takes one of two ways. Wide: its latents are expanded to keys and values in a workspace,
by one product, and each head attends to those. Short, with few rows, or where the workspace has no
room for its context: each head attends to the latents themselves, with W_uk absorbed into its
queries and W_uv applied to its result; 3.4 times the arithmetic of wide attention, but nothing is
expanded. A long context is cut into parts, which other programs take, and the parts are joined.

The bits of a sequence depend on its own lengths, and on others only if its context is longer than
MAX_RATIO times its rows: then on whether those before it leave it room.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .latents import attend, block_dim, even_parts, num_processors
from .search import first_above

MIN_ROWS = 128  # of a wide sequence; with fewer, expanding takes as long as it saves
MAX_RATIO = 16  # tokens for each row of the call that the workspace holds
MIN_ROOM = 1 << 17  # tokens that it holds at least: one long context for the rows of a turn
WIDE_ROWS, WIDE_TOKENS = 128, 64  # tile of queries and of keys
SHORT_ROWS, SHORT_TOKENS = 64, 64
PART_TOKENS = 2048  # of a part at most, up to so many parts; each multiplies by W_uk and W_uv anew
PART_PROGRAMS = 128  # programs of a tile at most, heads times parts: bounds the parts' results
PIECE = 64  # of a head's key or value channels
PACK_ROWS = 64
KV_BYTES = 1 << 31  # keys and values at a time; above it heads go in groups
PLAN_HEAD = 4  # numbers before the lists of a plan: wide tokens, wide tiles, short parts, joins


def mla_prefill(
    q: Tensor,
    kv_pool: Tensor,
    kv_b_weight: Tensor,
    cu_seqlens: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    v_head_dim: int,
    min_rows: int = MIN_ROWS,
    min_room: int = MIN_ROOM,
    part_tokens: int = PART_TOKENS,
    wide: tuple[int, int, int, int] | None = None,
    short: tuple[int, int, int, int] = (SHORT_ROWS, SHORT_TOKENS, 8, 2),
) -> Tensor:
    """`ops.attention.mla_prefill`; R and the cache's rows are multiples of 8 bf16.

    wide and short: rows, tokens, warps and stages of a tile.
    """
    T, heads = q.shape[:2]
    R, N = kv_b_weight.shape[1], seq_lens.shape[0]
    if wide is None:
        # three stages of keys and values if they fit into shared memory
        wide = (WIDE_ROWS, WIDE_TOKENS, 8, 3 if q.shape[2] + v_head_dim <= 384 else 2)
    out = q.new_zeros(T, heads, v_head_dim)
    if out.numel() == 0 or N == 0:
        return out
    cut = {
        "PART_TOKENS": part_tokens,
        "MAX_PARTS": max(1, PART_PROGRAMS // heads),
        "BLOCK_N": short[1],
    }
    room = max(MAX_RATIO * T, min_room)
    plan = _make_plan(cu_seqlens, seq_lens, T, room, min_rows, wide[0], short[0], cut)
    P = kv_pool.shape[2] - R
    K, V = q.shape[2] - P, v_head_dim
    shape = {"HEADS": heads, "R": R, "P": P, "K": K, "V": V}
    shape |= {"BLOCK_K": block_dim(K), "BLOCK_P": block_dim(P), "BLOCK_V": block_dim(V)}
    x = _Inputs(q, kv_pool, kv_b_weight, block_table, (cu_seqlens, seq_lens, plan.numbers), plan)
    scale_log2 = scale * math.log2(math.e)
    if min_rows <= T:
        _attend_wide(x, out, room, wide, scale_log2, shape)
    _attend_short(x, out, short, scale_log2, shape | cut)
    return out


class _Plan(NamedTuple):
    numbers: Tensor  # int32, on the device: PLAN_HEAD, starts of N + 1 sequences, tables of tiles
    num_wide: int  # room for tiles of queries; how many there are is in the numbers
    wide_tiles: int  # where the tables of tiles begin
    short_tiles: int


class _Inputs(NamedTuple):
    q: Tensor
    kv_pool: Tensor
    kv_b_weight: Tensor
    block_table: Tensor
    sequences: tuple[Tensor, Tensor, Tensor]  # cu_seqlens, seq_lens, numbers of the plan
    plan: _Plan


def _attend_wide(
    x: _Inputs,
    out: Tensor,
    room: int,
    tile: tuple[int, int, int, int],
    scale_log2: float,
    shape: dict[str, int],
) -> None:
    heads, width, plan = shape["HEADS"], shape["K"] + shape["V"], x.plan
    packed = _pack(x.kv_pool, x.block_table, plan, room)
    group = _heads_at_once(packed.shape[0], heads, width)
    for first in range(0, heads, group):
        rows = slice(first * width, (first + group) * width)
        kv = _expand(packed[:, : shape["R"]], x.kv_b_weight[rows], plan.numbers)
        _wide_kernel[(plan.num_wide * group,)](
            *(x.q, packed, kv, out, *x.sequences, plan.wide_tiles, x.q.stride(0), plan.num_wide),
            *(first, kv.stride(0), scale_log2),
            PLAN_HEAD=PLAN_HEAD,
            BLOCK_ROWS=tile[0],
            BLOCK_N=tile[1],
            STAGES=tile[3],
            num_warps=tile[2],
            **shape,
        )


def _attend_short(
    x: _Inputs,
    out: Tensor,
    tile: tuple[int, int, int, int],
    scale_log2: float,
    shape: dict[str, int],
) -> None:
    q, R, max_parts = x.q, shape["R"], shape["MAX_PARTS"]
    results = (max_parts, q.shape[0] if max_parts > 1 else 0, shape["HEADS"])
    parts = q.new_empty(*results, shape["V"], dtype=torch.float32)
    sums = q.new_empty(*results, 2, dtype=torch.float32)
    num_programs = num_processors(q.device)
    queries = q.new_empty(num_programs, tile[0], block_dim(R))
    where = (*x.sequences, x.plan.short_tiles, q.shape[0])
    _short_kernel[(num_programs,)](
        *(q, x.kv_pool, x.kv_b_weight, x.block_table, out, parts, sums, queries, *where),
        *(q.stride(0), x.block_table.shape[1], scale_log2),
        BLOCK_R=block_dim(R),
        BLOCK_SIZE=x.kv_pool.shape[1],
        BLOCK_ROWS=tile[0],
        PIECE=min(PIECE, shape["BLOCK_K"], shape["BLOCK_V"]),
        STAGES=tile[3],
        num_warps=tile[2],
        **shape,
    )
    if max_parts > 1:
        names = ("HEADS", "V", "BLOCK_V", "PART_TOKENS", "MAX_PARTS", "BLOCK_N")
        _join_kernel[(num_programs,)](
            *(out, parts, sums, *where),
            BLOCK_ROWS=tile[0],
            num_warps=8,
            **{name: shape[name] for name in names},
        )


def _make_plan(
    cu_seqlens: Tensor,
    seq_lens: Tensor,
    T: int,
    room: int,
    min_rows: int,
    wide_rows: int,
    short_rows: int,
    cut: dict[str, int],
) -> _Plan:
    """Wide and short sequences, where the tokens of wide ones lie, and tiles of (sequence, row,
    part).
    """
    N = seq_lens.shape[0]
    num_wide, num_short = T // wide_rows + T // min_rows, T // short_rows + N
    wide_tiles = PLAN_HEAD + N + 1
    short_tiles = wide_tiles + 3 * num_wide
    numbers = cu_seqlens.new_empty(short_tiles + 3 * num_short * cut["MAX_PARTS"])
    _plan_kernel[(N,)](
        *(cu_seqlens, seq_lens, numbers, N, room, wide_tiles, short_tiles),
        MIN_ROWS=min_rows,
        MAX_RATIO=MAX_RATIO,
        WIDE_ROWS=wide_rows,
        SHORT_ROWS=short_rows,
        PLAN_HEAD=PLAN_HEAD,
        BLOCK=128,
        num_warps=4,
        **cut,
    )
    return _Plan(numbers, num_wide, wide_tiles, short_tiles)


def _pack(kv_pool: Tensor, block_table: Tensor, plan: _Plan, room: int) -> Tensor:
    """The latents of all wide sequences, one after the other; rows past them: anything."""
    packed = kv_pool.new_empty(room, kv_pool.shape[2])
    _pack_kernel[(triton.cdiv(packed.shape[0], PACK_ROWS),)](
        *(kv_pool, block_table, plan.numbers, packed, block_table.shape[0], block_table.shape[1]),
        W=kv_pool.shape[2],
        BLOCK_W=triton.next_power_of_2(kv_pool.shape[2]),
        BLOCK_SIZE=kv_pool.shape[1],
        BLOCK_ROWS=PACK_ROWS,
        PLAN_HEAD=PLAN_HEAD,
        num_warps=8,
    )
    return packed


def _heads_at_once(tokens: int, heads: int, width: int) -> int:
    group = heads
    while group % 2 == 0 and 2 * tokens * group * width > KV_BYTES:
        group //= 2
    return group


def _expand(latent: Tensor, weight: Tensor, numbers: Tensor) -> Tensor:
    """latent weight^T; only as many rows as the plan says are computed."""
    return torch._grouped_mm(latent, weight[None].mT, offs=numbers[:1])


@triton.jit
def _cut(tokens, PART_TOKENS: tl.constexpr, MAX_PARTS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Parts of a context, and tokens of each but the last."""
    return even_parts(tokens, tl.minimum(tl.cdiv(tokens, PART_TOKENS), MAX_PARTS), BLOCK_N)


@triton.jit
def _wide_tokens(cu_seqlens, seq_lens, n, mask, MIN_ROWS: tl.constexpr, MAX_RATIO: tl.constexpr):
    """Rows and tokens of sequence n; the tokens that there is always room for, and those for which
    there may be.
    """
    begin = tl.load(cu_seqlens + n, mask=mask, other=0)
    rows = tl.load(cu_seqlens + n + 1, mask=mask, other=0) - begin
    tokens = tl.load(seq_lens + n, mask=mask, other=0)
    is_many = rows >= MIN_ROWS
    sure = tl.where(is_many & (tokens <= MAX_RATIO * rows), tokens, 0)
    maybe = tl.where(is_many & (tokens > MAX_RATIO * rows), tokens, 0)
    return rows, tokens, sure, maybe


@triton.jit(do_not_specialize=["N", "room", "wide_tiles", "short_tiles"])
def _plan_kernel(
    cu_seqlens,
    seq_lens,
    numbers,
    N,
    room,
    wide_tiles,
    short_tiles,
    MIN_ROWS: tl.constexpr,
    MAX_RATIO: tl.constexpr,
    WIDE_ROWS: tl.constexpr,
    SHORT_ROWS: tl.constexpr,
    PART_TOKENS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PLAN_HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program n counts what comes before its sequence and writes what belongs to it."""
    n = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    for first in range(0, N, BLOCK):
        m = first + lane
        _, _, sure, _ = _wide_tokens(cu_seqlens, seq_lens, m, m < N, MIN_ROWS, MAX_RATIO)
        room -= tl.sum(sure, axis=0)
    most = room
    # before sequence n, and of itself: tokens to expand, wide tiles, parts of short tiles, joins
    expanded, wide, short, joins = 0, 0, 0, 0
    own_expanded, own_wide, own_short, own_parts = 0, 0, 0, 0
    for first in range(0, n + 1, BLOCK):
        m = first + lane
        rows, tokens, sure, maybe = _wide_tokens(
            cu_seqlens, seq_lens, m, m <= n, MIN_ROWS, MAX_RATIO
        )
        maybe = tl.where(maybe <= most, maybe, 0)  # who fits into no room takes none from others
        fits = (maybe > 0) & (tl.cumsum(maybe, axis=0) <= room)
        room -= tl.sum(maybe, axis=0)
        e = tl.where(fits, maybe, sure)
        w = tl.where(e > 0, (rows + WIDE_ROWS - 1) // WIDE_ROWS, 0)
        s = tl.where(e > 0, 0, (rows + SHORT_ROWS - 1) // SHORT_ROWS)
        parts, _ = _cut(tokens, PART_TOKENS, MAX_PARTS, BLOCK_N)
        expanded += tl.sum(tl.where(m < n, e, 0), axis=0)
        wide += tl.sum(tl.where(m < n, w, 0), axis=0)
        short += tl.sum(tl.where(m < n, s * parts, 0), axis=0)
        joins += tl.sum(tl.where((m < n) & (parts > 1), s, 0), axis=0)
        own_expanded += tl.sum(tl.where(m == n, e, 0), axis=0)
        own_wide += tl.sum(tl.where(m == n, w, 0), axis=0)
        own_short += tl.sum(tl.where(m == n, s, 0), axis=0)
        own_parts += tl.sum(tl.where(m == n, parts, 0), axis=0)
    tl.store(numbers + PLAN_HEAD + n, expanded)
    if n == N - 1:
        tl.store(numbers, expanded + own_expanded)
        tl.store(numbers + 1, wide + own_wide)
        tl.store(numbers + 2, short + own_short * own_parts)
        tl.store(numbers + 3, joins + tl.where(own_parts > 1, own_short, 0))
        tl.store(numbers + PLAN_HEAD + N, expanded + own_expanded)
    # the last rows first: they see the most
    _write_tiles(numbers + wide_tiles + 3 * wide, n, own_wide, 1, WIDE_ROWS, BLOCK)
    _write_tiles(numbers + short_tiles + 3 * short, n, own_short, own_parts, SHORT_ROWS, BLOCK)


@triton.jit
def _write_tiles(table, n, count, parts, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    for first in range(0, count * parts, BLOCK):
        i = first + tl.arange(0, BLOCK)
        is_own = i < count * parts
        tl.store(table + 3 * i, n + 0 * i, mask=is_own)
        tl.store(table + 3 * i + 1, (count - 1 - i // parts) * ROWS, mask=is_own)
        tl.store(table + 3 * i + 2, i % parts, mask=is_own)


@triton.jit(do_not_specialize=["N", "max_blocks"])
def _pack_kernel(
    kv_pool,
    block_table,
    numbers,
    packed,
    N,
    max_blocks,
    W: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PLAN_HEAD: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    first = tl.program_id(0) * BLOCK_ROWS
    end = tl.minimum(first + BLOCK_ROWS, tl.load(numbers))
    w = tl.arange(0, BLOCK_W)[None, :]
    starts = numbers + PLAN_HEAD
    if first < end:
        n = first_above(starts, N + 1, first) - 1
        start = tl.load(starts + n)
        while start < end:
            stop = tl.load(starts + n + 1)
            is_row = (row >= start) & (row < stop)
            token = row - start
            at = block_table + n.to(tl.int64) * max_blocks + token // BLOCK_SIZE
            block = tl.load(at, mask=is_row, other=0).to(tl.int64)
            place = block * BLOCK_SIZE + token % BLOCK_SIZE
            mask = is_row[:, None] & (w < W)
            value = tl.load(kv_pool + place[:, None] * W + w, mask=mask)
            tl.store(packed + row.to(tl.int64)[:, None] * W + w, value, mask=mask)
            n += 1
            start = stop


@triton.jit(do_not_specialize=["wide_tiles", "num_tiles", "first_head"])
def _wide_kernel(
    q,
    packed,
    kv,
    out,
    cu_seqlens,
    seq_lens,
    numbers,
    wide_tiles,
    q_row,
    num_tiles,
    first_head,
    kv_row,
    scale_log2,
    PLAN_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of rows of a head, over expanded keys and values."""
    tile, head = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
    if tile < tl.load(numbers + 1):
        n = tl.load(numbers + wide_tiles + 3 * tile)
        first = tl.load(numbers + wide_tiles + 3 * tile + 1)
        begin = tl.load(cu_seqlens + n)
        rows = tl.load(cu_seqlens + n + 1) - begin
        tokens = tl.load(seq_lens + n)
        start = tl.load(numbers + PLAN_HEAD + n).to(tl.int64)
        k, p, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
        i = first + tl.arange(0, BLOCK_ROWS)
        is_row = (i < rows)[:, None]
        row = (begin + i).to(tl.int64)[:, None]
        at = q + row * q_row + (first_head + head) * (K + P)
        q_own = tl.load(at + k[None, :], mask=is_row & (k < K)[None, :], other=0.0)
        q_shared = tl.load(at + K + p[None, :], mask=is_row & (p < P)[None, :], other=0.0)
        state = (
            tl.full((BLOCK_ROWS, BLOCK_V), 0.0, tl.float32),
            tl.full((BLOCK_ROWS,), float("-inf"), tl.float32),
            tl.full((BLOCK_ROWS,), 0.0, tl.float32),
        )
        keys = kv + start * kv_row + head * (K + V)
        shared = packed + start * (R + P) + R
        last = tokens - rows + i
        # tokens that all rows see, then those that need the mask
        seen = (tokens - rows + first + 1) // BLOCK_N * BLOCK_N
        end = tl.minimum(tokens, tokens - rows + first + BLOCK_ROWS)
        state = _wide_steps(
            state,
            q_own,
            q_shared,
            keys,
            shared,
            kv_row,
            0,
            seen,
            last,
            scale_log2,
            R,
            P,
            K,
            V,
            BLOCK_K,
            BLOCK_P,
            BLOCK_V,
            BLOCK_N,
            STAGES,
            False,
        )
        state = _wide_steps(
            state,
            q_own,
            q_shared,
            keys,
            shared,
            kv_row,
            seen,
            end,
            last,
            scale_log2,
            R,
            P,
            K,
            V,
            BLOCK_K,
            BLOCK_P,
            BLOCK_V,
            BLOCK_N,
            STAGES,
            True,
        )
        acc, _, total = state
        value = (acc / total[:, None]).to(out.dtype.element_ty)
        at = out + (row * HEADS + first_head + head) * V
        tl.store(at + v[None, :], value, mask=is_row & (v < V)[None, :])


@triton.jit
def _wide_steps(
    state,
    q_own,
    q_shared,
    keys,
    shared,
    kv_row,
    low,
    high,
    last,
    scale_log2,
    R: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    acc, top, total = state
    k, p, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    for first in tl.range(low, high, BLOCK_N, num_stages=STAGES):
        token = first + n
        row = token.to(tl.int64)
        key = _rows(
            keys + row[None, :] * kv_row + k[:, None],
            k[:, None] < K,
            token[None, :] < high,
            BLOCK_K == K,
            IS_MASKED,
        )
        scores = tl.dot(q_own, key, input_precision="ieee")
        if P > 0:
            part = _rows(
                shared + row[None, :] * (R + P) + p[:, None],
                p[:, None] < P,
                token[None, :] < high,
                BLOCK_P == P,
                IS_MASKED,
            )
            scores = tl.dot(q_shared, part, acc=scores, input_precision="ieee")
        scores *= scale_log2
        if IS_MASKED:
            is_seen = (token[None, :] <= last[:, None]) & (token < high)[None, :]
            scores = tl.where(is_seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, axis=1)
        value = _rows(
            keys + K + row[:, None] * kv_row + v[None, :],
            v[None, :] < V,
            token[:, None] < high,
            BLOCK_V == V,
            IS_MASKED,
        )
        acc = tl.dot(
            weights.to(value.dtype), value, acc=acc * fade[:, None], input_precision="ieee"
        )
        top = new_top
    return acc, top, total


@triton.jit
def _rows(at, is_channel, is_token, IS_WHOLE: tl.constexpr, IS_MASKED: tl.constexpr):
    """A tile of keys or values; masks only where they are needed."""
    if IS_MASKED and IS_WHOLE:
        x = tl.load(at, mask=is_token, other=0.0)
    elif IS_MASKED:
        x = tl.load(at, mask=is_token & is_channel, other=0.0)
    elif IS_WHOLE:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=is_channel, other=0.0)
    return x


@triton.jit(do_not_specialize=["short_tiles", "num_rows", "max_blocks"])
def _short_kernel(
    q,
    kv_pool,
    kv_b_weight,
    block_table,
    out,
    parts,
    sums,
    queries,
    cu_seqlens,
    seq_lens,
    numbers,
    short_tiles,
    num_rows,
    q_row,
    max_blocks,
    scale_log2,
    HEADS: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PART_TOKENS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PIECE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Tiles of rows of a head, over latents of a part; dealt to as many programs as run at once."""
    p, r, lane = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_R), tl.arange(0, PIECE)
    num_items = tl.load(numbers + 2) * HEADS
    own = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    own = queries + own[:, None] * BLOCK_R + r[None, :]
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tile, head = item // HEADS, item % HEADS
        n = tl.load(numbers + short_tiles + 3 * tile)
        first = tl.load(numbers + short_tiles + 3 * tile + 1)
        part = tl.load(numbers + short_tiles + 3 * tile + 2)
        begin = tl.load(cu_seqlens + n)
        rows = tl.load(cu_seqlens + n + 1) - begin
        tokens = tl.load(seq_lens + n)
        count, size = _cut(tokens, PART_TOKENS, MAX_PARTS, BLOCK_N)
        i = first + tl.arange(0, BLOCK_ROWS)
        is_row = (i < rows)[:, None]
        row = (begin + i).to(tl.int64)[:, None]
        at = q + row * q_row + head * (K + P)
        q_shared = tl.load(at + K + p[None, :], mask=is_row & (p < P)[None, :], other=0.0)
        weight = kv_b_weight + head * ((K + V) * R)
        # both products in pieces: a head's weights don't fit beside the tiles of the cache
        q_latent = tl.full((BLOCK_ROWS, BLOCK_R), 0.0, tl.float32)
        for piece in tl.range(0, BLOCK_K, PIECE, num_stages=1):
            k = piece + lane
            q_own = tl.load(at + k[None, :], mask=is_row & (k < K)[None, :], other=0.0)
            is_weight = (k < K)[:, None] & (r < R)[None, :]
            w_uk = tl.load(weight + k[:, None] * R + r[None, :], mask=is_weight, other=0.0)
            q_latent = tl.dot(q_own, w_uk, acc=q_latent, input_precision="ieee")
        # the result of a product stays in registers, where it leaves too few for the next one; what
        # is loaded goes to shared memory
        tl.store(own, q_latent.to(q_shared.dtype))
        tl.debug_barrier()
        end = tl.minimum(tokens, tokens - rows + first + BLOCK_ROWS)
        acc, top, total = attend(
            tl.load(own),
            q_shared,
            tokens - rows + i,
            part * size,
            tl.minimum(end, part * size + size),
            kv_pool,
            block_table + n.to(tl.int64) * max_blocks,
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
        latent = (acc / tl.where(total == 0, 1.0, total)[:, None]).to(q_shared.dtype)
        to = (row * HEADS + head) * V
        result = ((part.to(tl.int64) * num_rows + begin + i) * HEADS + head)[:, None]
        for piece in tl.range(0, BLOCK_V, PIECE, num_stages=1):
            v = piece + lane
            is_weight = (v < V)[None, :] & (r < R)[:, None]
            w_uv = tl.load(weight + (K + v[None, :]) * R + r[:, None], mask=is_weight, other=0.0)
            value = tl.dot(latent, w_uv, input_precision="ieee")
            is_value = is_row & (v < V)[None, :]
            if count == 1:
                tl.store(out + to + v[None, :], value.to(out.dtype.element_ty), mask=is_value)
            else:
                tl.store(parts + result * V + v[None, :], value, mask=is_value)
        if count > 1:
            tl.store(sums + result * 2, top[:, None], mask=is_row)
            tl.store(sums + result * 2 + 1, total[:, None], mask=is_row)


@triton.jit(do_not_specialize=["short_tiles", "num_rows"])
def _join_kernel(
    out,
    parts,
    sums,
    cu_seqlens,
    seq_lens,
    numbers,
    short_tiles,
    num_rows,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PART_TOKENS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The mean of a tile's parts by the sums of their weights, where there are several."""
    v = tl.arange(0, BLOCK_V)[None, :]
    num_items = tl.where(tl.load(numbers + 3) > 0, tl.load(numbers + 2) * HEADS, 0)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        tile, head = item // HEADS, item % HEADS
        n = tl.load(numbers + short_tiles + 3 * tile)
        count, _ = _cut(tl.load(seq_lens + n), PART_TOKENS, MAX_PARTS, BLOCK_N)
        is_first = tl.load(numbers + short_tiles + 3 * tile + 2) == 0
        if is_first & (count > 1):
            begin = tl.load(cu_seqlens + n)
            rows = tl.load(cu_seqlens + n + 1) - begin
            i = tl.load(numbers + short_tiles + 3 * tile + 1) + tl.arange(0, BLOCK_ROWS)
            is_row = (i < rows)[:, None]
            row = ((begin + i).to(tl.int64) * HEADS + head)[:, None]
            step = num_rows.to(tl.int64) * HEADS
            top = tl.full((BLOCK_ROWS, 1), float("-inf"), tl.float32)
            for k in range(count):
                part = sums + (row + k * step) * 2
                top = tl.maximum(top, tl.load(part, mask=is_row, other=0.0))
            acc = tl.full((BLOCK_ROWS, BLOCK_V), 0.0, tl.float32)
            total = tl.full((BLOCK_ROWS, 1), 0.0, tl.float32)
            for k in range(count):
                result = row + k * step
                weight = tl.exp2(tl.load(sums + result * 2, mask=is_row, other=0.0) - top)
                weight *= tl.load(sums + result * 2 + 1, mask=is_row, other=1.0)
                value = tl.load(parts + result * V + v, mask=is_row & (v < V), other=0.0)
                acc += weight * value
                total += weight
            value = (acc / total).to(out.dtype.element_ty)
            tl.store(out + row * V + v, value, mask=is_row & (v < V))
