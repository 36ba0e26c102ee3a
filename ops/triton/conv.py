"""The causal conv of prefill, and the windows it leaves behind, in one kernel."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

import triton
import triton.language as tl
from torch import Tensor

from .functions import silu_taps, slot_or_none
from .search import BLOCK, first_above

# fastest of 512 and 1024 channels, 2 and 4 warps, 64 to 128 registers and 4 to 60 tokens on H200
BLOCK_C, NUM_WARPS, MAX_REGISTERS = 512, 4, 64
SHARE = 16  # exports of a program: most of the list is padding, and costs a program each


def causal_conv_prefill(
    x: Tensor,
    weight: Tensor,
    conv_pool: Tensor,
    cu_seqlens: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    checkpoint_indptr: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    *,
    block_t: int | None = None,
    block_c: int = BLOCK_C,
    num_warps: int = NUM_WARPS,
    maxnreg: int | None = MAX_REGISTERS,
) -> Tensor:
    """`ops.conv.causal_conv_prefill`; block_t is a multiple of 4, 60 at most.

    Three kinds of programs. One for each sequence reads its first window, makes the tokens that see
    it and writes its last window: so a slot may be both, and no other program touches it. One for
    some exports copies three rows of x for each. One for each tile of tokens makes all others.
    """
    T, C = x.shape
    y = x.new_empty(T, C)
    if y.numel() == 0:
        return y
    N, E = initial_slots.shape[0], 0
    if checkpoint_slots is not None:
        E = checkpoint_slots.shape[0]
    csr = (checkpoint_indptr, checkpoint_offsets, checkpoint_slots) if E else (cu_seqlens,) * 3
    if block_t is None:
        block_t = 8 if T <= 512 else 16
    num_groups = triton.cdiv(C, block_c)
    num_sharers = triton.cdiv(E, SHARE)
    items = N + num_sharers + triton.cdiv(T, block_t)
    _conv_kernel[(items * num_groups,)](
        *(x, weight, conv_pool, cu_seqlens, initial_slots, final_slots, *csr, y),
        *(x.stride(0), conv_pool.stride(0), T, N, E, C, conv_pool.shape[0]),
        *(block_t, num_sharers),
        BLOCK_C=block_c,
        num_warps=num_warps,
        maxnreg=maxnreg,
    )
    return y


# block_t is an argument, not a constant: one binary for all
@triton.jit(do_not_specialize=["T", "N", "E", "num_slots", "block_t", "num_sharers"])
def _conv_kernel(
    x,
    weight,
    conv_pool,
    cu_seqlens,
    initial_slots,
    final_slots,
    indptr,
    offsets,
    slots,
    y,
    x_row,
    slot_size,
    T,
    N,
    E,
    C,
    num_slots,
    block_t,
    num_sharers,
    BLOCK_C: tl.constexpr,
):
    num_groups = tl.cdiv(C, BLOCK_C)
    item = tl.program_id(0) // num_groups
    channel = tl.program_id(0) % num_groups * BLOCK_C + tl.arange(0, BLOCK_C)
    x += channel
    y += channel
    conv_pool += channel
    weight += channel * 4
    is_channel = channel < C
    if item < N:
        pool = (conv_pool, slot_size, num_slots)
        lists = (cu_seqlens, initial_slots, final_slots)
        _sequence(item, x, weight, pool, lists, y, x_row, C, is_channel)
    elif item < N + num_sharers:
        pool = (conv_pool, slot_size, num_slots)
        csr = (indptr, offsets, slots)
        end = tl.minimum(tl.load(indptr + N), E)
        # the real entries come first in the list: this gives all programs as many
        for e in range(item - N, end, num_sharers):
            _export(e, x, pool, cu_seqlens, csr, x_row, N, C, is_channel)
    else:
        first = (item - N - num_sharers) * block_t
        end = tl.minimum(first + block_t, T)
        _tile(first, end, x, weight, cu_seqlens, y, x_row, N, C, is_channel)


@triton.jit
def _sequence(n, x, weight, pool, lists, y, x_row, C, is_channel):
    """The first three tokens, the only ones that see the initial window; and the final window."""
    conv_pool, slot_size, num_slots = pool
    cu_seqlens, initial_slots, final_slots = lists
    begin = tl.load(cu_seqlens + n)
    end = tl.load(cu_seqlens + n + 1)
    source = slot_or_none(tl.load(initial_slots + n), num_slots)
    final = slot_or_none(tl.load(final_slots + n), num_slots)
    length = end - begin
    if (length > 0) | (final >= 0):
        window = conv_pool + tl.where(source >= 0, source, 0).to(tl.int64) * slot_size
        is_read = is_channel & (source >= 0)
        h0 = tl.load(window, mask=is_read, other=0.0)
        h1 = tl.load(window + C, mask=is_read, other=0.0)
        h2 = tl.load(window + 2 * C, mask=is_read, other=0.0)
        x0 = _row(x, begin, end, x_row, is_channel)
        x1 = _row(x, begin + 1, end, x_row, is_channel)
        x2 = _row(x, begin + 2, end, x_row, is_channel)
        # input i of the final window is input length + i of (initial window, tokens)
        is_long = is_channel & (length >= 3) & (final >= 0)
        l0 = tl.where(length == 0, h0, tl.where(length == 1, h1, h2))
        l1 = tl.where(length == 0, h1, tl.where(length == 1, h2, x0))
        l2 = tl.where(length == 0, h2, tl.where(length == 1, x0, x1))
        l0 = tl.where(length >= 3, _row(x, end - 3, end, x_row, is_long), l0)
        l1 = tl.where(length >= 3, _row(x, end - 2, end, x_row, is_long), l1)
        l2 = tl.where(length >= 3, _row(x, end - 1, end, x_row, is_long), l2)
        w0, w1, w2, w3 = _split(_load_weights(weight, is_channel))
        _put(y, silu_taps(w0, w1, w2, w3, h0, h1, h2, x0), begin, end, C, is_channel)
        _put(y, silu_taps(w0, w1, w2, w3, h1, h2, x0, x1), begin + 1, end, C, is_channel)
        _put(y, silu_taps(w0, w1, w2, w3, h2, x0, x1, x2), begin + 2, end, C, is_channel)
        if final >= 0:
            # in place, no thread may write what another one has still to read
            tl.debug_barrier()
            window = conv_pool + final.to(tl.int64) * slot_size
            tl.store(window, l0, mask=is_channel)
            tl.store(window + C, l1, mask=is_channel)
            tl.store(window + 2 * C, l2, mask=is_channel)


@triton.jit
def _export(e, x, pool, cu_seqlens, csr, x_row, N, C, is_channel):
    """The window at a checkpoint: three rows of x, since it is at 16 tokens or later."""
    conv_pool, slot_size, num_slots = pool
    indptr, offsets, slots = csr
    slot = slot_or_none(tl.load(slots + e), num_slots)
    offset = tl.load(offsets + e)
    n = first_above(indptr, N + 1, e) - 1
    begin = tl.load(cu_seqlens + n)
    length = tl.load(cu_seqlens + n + 1) - begin
    # an entry below one before it is skipped
    index = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for base in range(tl.load(indptr + n), e, BLOCK):
        before = tl.maximum(before, tl.load(offsets + base + index, mask=base + index < e, other=0))
    is_valid = (slot >= 0) & (offset > 0) & (offset <= length) & (offset % 16 == 0)
    if is_valid & (offset >= tl.max(before, axis=0)):
        row = x + (begin + offset - 3).to(tl.int64) * x_row
        x0 = tl.load(row, mask=is_channel)
        x1 = tl.load(row + x_row, mask=is_channel)
        x2 = tl.load(row + 2 * x_row, mask=is_channel)
        window = conv_pool + slot.to(tl.int64) * slot_size
        tl.store(window, x0, mask=is_channel)
        tl.store(window + C, x1, mask=is_channel)
        tl.store(window + 2 * C, x2, mask=is_channel)


@triton.jit
def _tile(first, end, x, weight, cu_seqlens, y, x_row, N, C, is_channel):
    """Tokens first to end, except those that see a window; rows of no sequence become 0.

    Four rows are on their way at any time. Each row is made fp32 once, and before it is the next
    one's turn: of other orders the compiler keeps more in registers.
    """
    x += first.to(tl.int64) * x_row
    y += first.to(tl.int64) * C
    rest = y
    is_early = is_channel & (first > 0)
    x0 = _fp32(tl.load(x - 3 * x_row, mask=is_early, other=0.0))
    x1 = _fp32(tl.load(x - 2 * x_row, mask=is_early, other=0.0))
    x2 = _fp32(tl.load(x - x_row, mask=is_early, other=0.0))
    left = end - first
    c0, x = _next_row(x, x_row, left > 0, is_channel)
    c1, x = _next_row(x, x_row, left > 1, is_channel)
    c2, x = _next_row(x, x_row, left > 2, is_channel)
    c3, x = _next_row(x, x_row, left > 3, is_channel)
    taps = _load_weights(weight, is_channel)
    # in this order all wait for memory together
    total = tl.minimum(tl.load(cu_seqlens + N), end)
    near = _near_start(cu_seqlens, N, first)
    w0, w1, w2, w3 = _split(taps)
    for t in range(first, total, 4):
        left, real = end - t - 4, total - t
        x3 = _fp32(c0)
        c0, x = _next_row(x, x_row, left > 0, is_channel)
        value = silu_taps(w0, w1, w2, w3, x0, x1, x2, x3)
        y = _put_next(y, value, C, (near & 1) == 0, is_channel)
        x4 = _fp32(c1)
        c1, x = _next_row(x, x_row, left > 1, is_channel)
        value = silu_taps(w0, w1, w2, w3, x1, x2, x3, x4)
        y = _put_next(y, value, C, ((near & 2) == 0) & (real > 1), is_channel)
        x5 = _fp32(c2)
        c2, x = _next_row(x, x_row, left > 2, is_channel)
        value = silu_taps(w0, w1, w2, w3, x2, x3, x4, x5)
        y = _put_next(y, value, C, ((near & 4) == 0) & (real > 2), is_channel)
        x6 = _fp32(c3)
        c3, x = _next_row(x, x_row, left > 3, is_channel)
        value = silu_taps(w0, w1, w2, w3, x3, x4, x5, x6)
        y = _put_next(y, value, C, ((near & 8) == 0) & (real > 3), is_channel)
        x0, x1, x2 = x4, x5, x6
        near >>= 4
    nothing = tl.zeros_like(x0)
    for t in range(tl.maximum(first, total), end):
        _put(rest, nothing, t - first, end - first, C, is_channel)


@triton.jit
def _next_row(x, x_row, is_row, is_channel):
    return tl.load(x, mask=is_channel & is_row, other=0.0), x + x_row


@triton.jit
def _put_next(y, value, C, is_row, is_channel):
    tl.store(y, value.to(y.dtype.element_ty), mask=is_channel & is_row)
    return y + C


@triton.jit
def _fp32(x):
    """x.to(tl.float32), in one instruction where that one takes two."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _row(x, t, end, x_row, mask):
    return tl.load(x + t.to(tl.int64) * x_row, mask=mask & (t < end), other=0.0)


@triton.jit
def _put(y, value, t, end, C, mask):
    value = value.to(y.dtype.element_ty)
    tl.store(y + t.to(tl.int64) * C, value, mask=mask & (t < end))


@triton.jit
def _near_start(cu_seqlens, N, first):
    """Bit i: token first + i is one of the first three of its sequence; for i < 60."""
    index = tl.arange(0, BLOCK)
    starts = tl.zeros((BLOCK,), tl.int64)
    one = tl.full((), 1, tl.int64)
    for base in range(0, N, BLOCK):
        n = base + index
        start = tl.load(cu_seqlens + n, mask=n < N, other=0)
        stop = tl.load(cu_seqlens + n + 1, mask=n < N, other=0)
        # an empty sequence starts where another one does: a bit is set once
        place = start - first + 2
        is_here = (start < stop) & (place >= 0) & (place < 62)
        starts += tl.where(is_here, one << tl.where(is_here, place, 0).to(tl.int64), 0)
    bits = tl.sum(starts, axis=0)
    return bits | (bits >> 1) | (bits >> 2)


@triton.jit
def _load_weights(weight, is_channel):
    return tl.load(weight[:, None] + tl.arange(0, 4)[None, :], mask=is_channel[:, None], other=0.0)


@triton.jit
def _split(taps):
    """[BLOCK_C, 4] weights, a tap at a time, in fp32."""
    even, odd = tl.split(tl.reshape(taps.to(tl.float32), [taps.shape[0], 2, 2]))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return _anew(w0), _anew(w1), _anew(w2), _anew(w3)


@triton.jit
def _anew(x):
    """x through shared memory, free to take the layout of what it is used with.

    Else the compiler may choose to move every row of x to the layout of the weights.
    """
    return tl.gather(x, tl.arange(0, x.shape[0]), 0)
