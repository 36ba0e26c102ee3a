"""Mixture of experts around two grouped products, with all counts on the device.

Choices (a row and one of its experts) are laid out by expert, in the order in which they come. Few
choices for each expert: kernels of ours, whose tiles hold about as many, so that the time is that
of reading the weights; the fewest stay where they are, a tile each, since to sort them would take
longer. Many: torch's grouped matmul. A row's bits don't depend on the other rows as long as the
call takes one of our ways, or torch's.

Shared experts are choices of each row where choices stay where they are. Otherwise they are dense
products of torch's, which take all rows at once as no other expert has them, and whose bits depend
on how many there are.
"""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activations import silu_and_mul
from .functions import sigmoid
from .latents import num_processors

# choices for each expert on average, and the tile that is the fastest up to there on H200: the
# weights of 256 experts are read in 0.86 ms, 1,024 rows of 8 choices take 1.0 and a grouped matmul
# 1.26. Above the last one the grouped matmul wins.
TILES = (
    (12, (16, 64, 128, 4, 3)),
    (24, (32, 64, 64, 4, 5)),
    (48, (64, 128, 64, 4, 4)),
    (128, (128, 128, 64, 8, 4)),
)
FEW_CHOICES = TILES[-1][0]
# so few choices, those of two rows, leave a processor one block of the first weights: more of it on
# its way at a time, 21.5 us for 23.4 at one row of 8 choices on H200
FEWEST_CHOICES, FEWEST_TILE = 20, (16, 64, 128, 4, 4)
# as many as its shared memory lets a processor hold: the first product has twice the weights
SWIGLU_PROGRAMS, PROGRAMS = 2, 3
BLOCK = 1024
ONE_KERNEL_CHOICES = 8192  # routed by one kernel, in which every expert reads all choices


def moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    num_shared: int = 0,
    few_choices: int = FEW_CHOICES,
    fewest_choices: int = FEWEST_CHOICES,
    tile: tuple[int, int, int, int, int] | None = None,
) -> Tensor:
    """`ops.moe.moe`; tile: choices, columns, depth, warps, stages. None: chosen by M."""
    (M, dim), E, k = x.shape, w2.shape[0] - num_shared, topk_ids.shape[1]
    y = x.new_empty(M, dim)
    if y.numel() == 0:
        return y
    if k == 0:
        return y.zero_()
    is_sorted = M * (k + num_shared) > min(fewest_choices, few_choices * E)
    # by expert, or each choice where it stands
    place, token, ends = _route(topk_ids, E) if is_sorted else (topk_ids, topk_ids, topk_ids)
    if M * k <= few_choices * E:
        usual = next((t for most, t in TILES if M * k <= most * E), TILES[-1][1])
        first = usual if is_sorted else FEWEST_TILE
        few = partial(_few, token=token, ends=ends, num_shared=num_shared, is_sorted=is_sorted)
        hidden = few(x, w13, tile=tile or first, is_swiglu=True)
        expert_y = few(hidden, w2, tile=tile or usual, is_swiglu=False)
    else:
        hidden = _many(x, w13[:E], place, ends)
        expert_y = torch._grouped_mm(hidden, w2[:E].mT, offs=ends)
    shared_y = expert_y
    if is_sorted and num_shared > 0:
        shared_y = _shared(x, w13[E:], w2[E:])
    _combine_kernel[(M, triton.cdiv(dim, BLOCK))](
        *(expert_y, shared_y, place, topk_weights, y, M, dim, E),
        CHOICES=k,
        NUM_SHARED=num_shared,
        IS_SORTED=is_sorted,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return y


def _route(
    topk_ids: Tensor, E: int, *, one_kernel_choices: int = ONE_KERNEL_CHOICES
) -> tuple[Tensor, Tensor, Tensor]:
    """Place of each choice (-1: an expert that does not exist), row at each place, ends [E]."""
    num_choices, k = topk_ids.numel(), topk_ids.shape[1]
    place = topk_ids.new_empty(num_choices, dtype=torch.int32)
    token = topk_ids.new_empty(num_choices, dtype=torch.int32)
    ends = topk_ids.new_empty(E, dtype=torch.int32)
    if num_choices <= one_kernel_choices:
        is_small = num_choices <= 512
        _route_kernel[(E + 1,)](
            *(topk_ids, place, token, ends, num_choices, k, E),
            BLOCK=512 if is_small else 4096,
            num_warps=4 if is_small else 8,
        )
        return place, token, ends
    block_e = triton.next_power_of_2(E)
    block = max(16, min(64, 16384 // block_e))
    num_chunks = triton.cdiv(num_choices, block)
    counts = topk_ids.new_empty(num_chunks, E, dtype=torch.int32)
    totals = topk_ids.new_empty(E, dtype=torch.int32)
    sizes = {"BLOCK": block, "BLOCK_E": block_e, "num_warps": 8}
    _count_kernel[(num_chunks,)](topk_ids, place, counts, num_choices, E, **sizes)
    _offset_kernel[(E,)](counts, totals, num_chunks, E, BLOCK=BLOCK, num_warps=8)
    _place_kernel[(num_chunks,)](
        topk_ids, place, token, counts, totals, ends, num_choices, k, E, **sizes
    )
    return place, token, ends


def _many(x: Tensor, w13: Tensor, place: Tensor, ends: Tensor) -> Tensor:
    """SwiGLU of all choices, by a grouped matmul over rows that were copied to their places."""
    (M, dim), num_choices, F = x.shape, place.shape[0], w13.shape[1] // 2
    rows = x.new_empty(num_choices, dim)
    _spread_kernel[(M, triton.cdiv(dim, BLOCK))](
        *(x, place, rows, dim), CHOICES=num_choices // M, BLOCK=BLOCK, num_warps=4
    )
    both = torch._grouped_mm(rows, w13.mT, offs=ends)
    hidden = x.new_empty(num_choices, F)
    _swiglu_kernel[(num_choices, triton.cdiv(F, BLOCK))](
        *(both, hidden, ends, ends.shape[0], F), BLOCK=BLOCK, num_warps=4
    )
    return hidden


def _shared(x: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """[S, M, dim]: each of S experts on all rows."""
    S, (M, dim) = w13.shape[0], x.shape
    both = torch.bmm(x.expand(S, M, dim), w13.mT)
    hidden = silu_and_mul(both.view(S * M, -1))
    return torch.bmm(hidden.view(S, M, -1), w2.mT)


def _few(
    x: Tensor,
    weight: Tensor,
    *,
    token: Tensor,
    ends: Tensor,
    num_shared: int,
    tile: tuple[int, int, int, int, int],
    is_swiglu: bool,
    is_sorted: bool,
) -> Tensor:
    """x weight[e]^T for the choices of each expert e; for the first product x has a row of several
    choices, for the second one of each.

    token, ends: as from `_route`; if not is_sorted, both are the ids [M, k] of each row, which has
    the shared experts after those.
    """
    E, columns, depth = weight.shape[0] - num_shared, *weight.shape[1:]
    columns = columns // 2 if is_swiglu else columns
    num_choices, k = token.numel(), token.shape[-1]
    if not is_sorted:
        num_choices += token.shape[0] * num_shared
    out = x.new_empty(num_choices, columns)
    block_m, block_n, block_k, num_warps, num_stages = tile
    programs = SWIGLU_PROGRAMS if is_swiglu else PROGRAMS
    _few_kernel[(num_processors(x.device) * programs,)](
        *(x, weight, token, ends, out, columns, depth, num_choices, k),
        E=E,
        NUM_SHARED=num_shared,
        BLOCK_E=triton.next_power_of_2(E),
        IS_SORTED=is_sorted,
        IS_SWIGLU=is_swiglu,
        TILE=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        STAGES=num_stages,
        num_warps=num_warps,
    )
    return out


@triton.jit(do_not_specialize=["num_choices", "k", "E"])
def _route_kernel(topk_ids, place, token, ends, num_choices, k, E, BLOCK: tl.constexpr):
    """Program e places the choices of expert e, after those of all before it."""
    e = tl.program_id(0)
    begin, count = 0, 0
    for first in range(0, num_choices, BLOCK):
        i = first + tl.arange(0, BLOCK)
        expert = tl.load(topk_ids + i, mask=i < num_choices, other=-1)
        begin += tl.sum(((expert >= 0) & (expert < e)).to(tl.int32), axis=0)
    for first in range(0, num_choices, BLOCK):
        i = first + tl.arange(0, BLOCK)
        expert = tl.load(topk_ids + i, mask=i < num_choices, other=-1)
        if e < E:
            is_ours = (expert == e).to(tl.int32)
            at = begin + count + tl.cumsum(is_ours, axis=0) - is_ours
            tl.store(place + i, at, mask=is_ours > 0)
            tl.store(token + at, i // k, mask=is_ours > 0)
            count += tl.sum(is_ours, axis=0)
        else:
            is_none = (expert < 0) | (expert >= E)
            tl.store(place + i, -1 + 0 * i, mask=is_none & (i < num_choices))
    if e < E:
        tl.store(ends + e, begin + count)


@triton.jit(do_not_specialize=["num_choices", "E"])
def _count_kernel(
    topk_ids, rank, counts, num_choices, E, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr
):
    """Of a chunk: how many choices of its expert come before each choice, and how many each has."""
    chunk = tl.program_id(0)
    lane, e = tl.arange(0, BLOCK), tl.arange(0, BLOCK_E)
    i = chunk * BLOCK + lane
    expert = tl.load(topk_ids + i, mask=i < num_choices, other=-1)
    # the same ids once more, as a row
    j = chunk * BLOCK + lane[None, :]
    other = tl.load(topk_ids + j, mask=j < num_choices, other=-1)
    is_before = (expert[:, None] == other) & (lane[None, :] < lane[:, None])
    tl.store(rank + i, tl.sum(is_before.to(tl.int32), axis=1), mask=i < num_choices)
    count = tl.sum((expert[:, None] == e[None, :]).to(tl.int32), axis=0)
    tl.store(counts + chunk * E + e, count, mask=e < E)


@triton.jit(do_not_specialize=["num_chunks", "E"])
def _offset_kernel(counts, totals, num_chunks, E, BLOCK: tl.constexpr):
    """Counts of an expert in each chunk to their sum over the chunks before."""
    e = tl.program_id(0)
    total = 0
    for first in range(0, num_chunks, BLOCK):
        chunk = first + tl.arange(0, BLOCK)
        at = counts + chunk * E + e
        count = tl.load(at, mask=chunk < num_chunks, other=0)
        tl.store(at, total + tl.cumsum(count, axis=0) - count, mask=chunk < num_chunks)
        total += tl.sum(count, axis=0)
    tl.store(totals + e, total)


@triton.jit(do_not_specialize=["num_choices", "k", "E"])
def _place_kernel(
    topk_ids,
    place,
    token,
    offsets,
    totals,
    ends,
    num_choices,
    k,
    E,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Rank in the chunk to place among all choices."""
    chunk = tl.program_id(0)
    i, e = chunk * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_E)
    expert = tl.load(topk_ids + i, mask=i < num_choices, other=-1)
    total = tl.load(totals + e, mask=e < E, other=0)
    begin = tl.sum(tl.where(e[None, :] < expert[:, None], total[None, :], 0), axis=1)
    is_expert = (expert >= 0) & (expert < E)
    offset = tl.load(offsets + chunk * E + expert, mask=is_expert, other=0)
    rank = tl.load(place + i, mask=i < num_choices, other=0)
    at = begin + offset + rank
    tl.store(token + at, i // k, mask=is_expert)
    tl.store(place + i, tl.where(is_expert, at, -1), mask=i < num_choices)
    if chunk == 0:
        tl.store(ends + e, tl.cumsum(total, axis=0), mask=e < E)


@triton.jit
def _spread_kernel(x, place, rows, dim, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """Row m of x to the places of its choices."""
    m = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + m * dim + column, mask=column < dim, other=0.0)
    for j in tl.static_range(CHOICES):
        at = tl.load(place + m * CHOICES + j).to(tl.int64)
        tl.store(rows + at * dim + column, value, mask=(column < dim) & (at >= 0))


@triton.jit(do_not_specialize=["E"])
def _swiglu_kernel(both, hidden, ends, E, F, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (column < F) & (row < tl.load(ends + E - 1))
    gate = tl.load(both + row * (2 * F) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(both + row * (2 * F) + F + column, mask=mask, other=0.0).to(tl.float32)
    value = gate * sigmoid(gate) * up
    tl.store(hidden + row * F + column, value.to(hidden.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M", "E"])
def _combine_kernel(
    expert_y,
    shared_y,
    place,
    topk_weights,
    y,
    M,
    dim,
    E,
    CHOICES: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    IS_SORTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the choices of a row in their order, then its shared experts: no atomics, always the
    same bits.
    """
    m = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.full((BLOCK,), 0.0, tl.float32)
    first = m * (CHOICES + NUM_SHARED)  # of the row's choices where they stayed
    for j in tl.static_range(CHOICES):
        at = tl.load(place + m * CHOICES + j).to(tl.int64)
        if not IS_SORTED:  # it is the expert
            at = tl.where((at >= 0) & (at < E), first + j, -1)
        weight = tl.load(topk_weights + m * CHOICES + j)
        mask = (column < dim) & (at >= 0)
        value = tl.load(expert_y + at * dim + column, mask=mask, other=0.0).to(tl.float32)
        total += tl.where(at >= 0, weight, 0.0) * value
    if NUM_SHARED > 0:
        named = tl.load(place + m * CHOICES)
        is_real = (named >= 0) & (IS_SORTED | (named < E))
        for s in tl.static_range(NUM_SHARED):
            at = s * M + m if IS_SORTED else first + CHOICES + s
            mask = (column < dim) & is_real
            total += tl.load(shared_y + at * dim + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + m * dim + column, total.to(y.dtype.element_ty), mask=column < dim)


@triton.jit(do_not_specialize=["num_choices", "k"])
def _few_kernel(
    x,
    weight,
    token,
    ends,
    out,
    columns,
    depth,
    num_choices,
    k,
    E: tl.constexpr,
    NUM_SHARED: tl.constexpr,
    BLOCK_E: tl.constexpr,
    IS_SORTED: tl.constexpr,
    IS_SWIGLU: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile of choices of an expert times a block of its weights, dealt to all programs.

    The weights are the left operand: a tensor core wants 64 rows there, but takes 16 columns.
    """
    if IS_SORTED:
        e = tl.arange(0, BLOCK_E)
        end = tl.load(ends + e, mask=e < E, other=0)
        begin = tl.load(ends + e - 1, mask=(e > 0) & (e < E), other=0)
        tiles = tl.where(e < E, (end - begin + TILE - 1) // TILE, 0)
        tile_ends = tl.cumsum(tiles, axis=0)
        num_tiles = tl.sum(tiles, axis=0)
    else:
        num_tiles = num_choices
    num_blocks = tl.cdiv(columns, BLOCK_N)
    lane, lane_k = tl.arange(0, TILE), tl.arange(0, BLOCK_K)
    for item in range(tl.program_id(0), num_tiles * num_blocks, tl.num_programs(0)):
        tile, block = item // num_blocks, item % num_blocks
        if IS_SORTED:
            expert = tl.sum((tile_ends <= tile).to(tl.int32), axis=0)
            tile -= tl.sum(tl.where(e < expert, tiles, 0), axis=0)
            first = tl.sum(tl.where(e == expert, begin, 0), axis=0)
            last = tl.sum(tl.where(e == expert, end, 0), axis=0)
            choice = first + tile * TILE + lane
            is_choice = choice < last
            end_k = depth
        else:
            of_row = tile % (k + NUM_SHARED)
            # a shared expert where the row's first id is one
            named = tl.where(of_row < k, of_row, 0)
            expert = tl.load(ends + tile // (k + NUM_SHARED) * k + named)
            is_expert = (expert >= 0) & (expert < E)
            expert = tl.where(of_row < k, expert, E + of_row - k)
            choice = tile + lane
            is_choice = (lane == 0) & is_expert
            end_k = tl.where(is_expert, depth, 0)  # without an expert nothing is read
        row = choice
        if IS_SWIGLU:
            if IS_SORTED:
                row = tl.load(token + choice, mask=is_choice, other=0)
            else:
                row = choice // (k + NUM_SHARED)
        column = block * BLOCK_N + tl.arange(0, BLOCK_N)
        x_at = x + row.to(tl.int64)[None, :] * depth
        rows = 2 * columns if IS_SWIGLU else columns
        w_at = weight + expert.to(tl.int64) * rows * depth + column[:, None] * depth
        acc = tl.full((BLOCK_N, TILE), 0.0, tl.float32)
        up = tl.full((BLOCK_N, TILE), 0.0, tl.float32)
        for k0 in tl.range(0, end_k, BLOCK_K, num_stages=STAGES):
            at_k = k0 + lane_k
            is_weight = (column < columns)[:, None] & (at_k < depth)[None, :]
            value = tl.load(
                x_at + at_k[:, None], mask=is_choice[None, :] & (at_k < depth)[:, None], other=0.0
            )
            w = tl.load(w_at + at_k[None, :], mask=is_weight, other=0.0)
            acc = tl.dot(w, value, acc=acc, input_precision="ieee")
            if IS_SWIGLU:
                w = tl.load(w_at + columns * depth + at_k[None, :], mask=is_weight, other=0.0)
                up = tl.dot(w, value, acc=up, input_precision="ieee")
        if IS_SWIGLU:
            acc = acc * sigmoid(acc) * up
        to = out + choice.to(tl.int64)[None, :] * columns + column[:, None]
        mask = (column < columns)[:, None] & is_choice[None, :]
        tl.store(to, acc.to(out.dtype.element_ty), mask=mask)
