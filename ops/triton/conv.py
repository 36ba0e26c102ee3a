"""The causal conv of prefill, and the windows it leaves behind, in one kernel."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

import triton
import triton.language as tl
from torch import Tensor

from .functions import silu_taps, slot_or_none
from .search import first_above

BLOCK_T = 32
BLOCK_C = 1024  # 16 bytes a thread and row
BLOCK_E = 8  # exports of a program: most of the list is padding, and costs a program each
NUM_WARPS = 4


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
    block_t: int = BLOCK_T,
    block_c: int = BLOCK_C,
    num_warps: int = NUM_WARPS,
) -> Tensor:
    """`ops.conv.causal_conv_prefill`.

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
    num_groups = triton.cdiv(C, block_c)
    items = N + triton.cdiv(E, BLOCK_E) + triton.cdiv(T, block_t)
    _conv_kernel[(items * num_groups,)](
        *(x, weight, conv_pool, cu_seqlens, initial_slots, final_slots, *csr, y),
        *(x.stride(0), conv_pool.stride(0), T, N, E, C, conv_pool.shape[0]),
        BLOCK_T=block_t,
        BLOCK_C=block_c,
        BLOCK_E=BLOCK_E,
        num_warps=num_warps,
    )
    return y


@triton.jit(do_not_specialize=["T", "N", "E", "num_slots"])
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
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_E: tl.constexpr,
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
    elif item < N + tl.cdiv(E, BLOCK_E):
        pool = (conv_pool, slot_size, num_slots)
        csr = (indptr, offsets, slots)
        first = (item - N) * BLOCK_E
        _exports(first, x, pool, cu_seqlens, csr, x_row, N, E, C, is_channel, BLOCK_E)
    else:
        first = (item - N - tl.cdiv(E, BLOCK_E)) * BLOCK_T
        _tile(first, x, weight, cu_seqlens, y, x_row, T, N, C, is_channel, BLOCK_T)


@triton.jit
def _sequence(n, x, weight, pool, lists, y, x_row, C, is_channel):
    """The first three tokens, the only ones that see the initial window; and the final window."""
    conv_pool, slot_size, num_slots = pool
    cu_seqlens, initial_slots, final_slots = lists
    begin = tl.load(cu_seqlens + n)
    length = tl.load(cu_seqlens + n + 1) - begin
    source = slot_or_none(tl.load(initial_slots + n), num_slots)
    final = slot_or_none(tl.load(final_slots + n), num_slots)
    if (length > 0) | (final >= 0):
        window = conv_pool + tl.where(source >= 0, source, 0).to(tl.int64) * slot_size
        is_read = is_channel & (source >= 0)
        h0 = tl.load(window, mask=is_read, other=0.0)
        h1 = tl.load(window + C, mask=is_read, other=0.0)
        h2 = tl.load(window + 2 * C, mask=is_read, other=0.0)
        row = x + begin.to(tl.int64) * x_row
        x0 = tl.load(row, mask=is_channel & (length > 0), other=0.0)
        x1 = tl.load(row + x_row, mask=is_channel & (length > 1), other=0.0)
        x2 = tl.load(row + 2 * x_row, mask=is_channel & (length > 2), other=0.0)
        w0, w1, w2, w3 = _weights(weight, is_channel)
        out = y + begin.to(tl.int64) * C
        y0 = silu_taps(w0, w1, w2, w3, h0, h1, h2, x0)
        y1 = silu_taps(w0, w1, w2, w3, h1, h2, x0, x1)
        y2 = silu_taps(w0, w1, w2, w3, h2, x0, x1, x2)
        tl.store(out, y0, mask=is_channel & (length > 0))
        tl.store(out + C, y1, mask=is_channel & (length > 1))
        tl.store(out + 2 * C, y2, mask=is_channel & (length > 2))
        if final >= 0:
            # in place, no thread may write what another one has still to read
            tl.debug_barrier()
            window = conv_pool + final.to(tl.int64) * slot_size
            for i in tl.static_range(3):
                # input i of the window is input length + i of (initial window, tokens)
                at = length + i
                value = tl.where(at == 0, h0, tl.where(at == 1, h1, h2))
                token = begin.to(tl.int64) + at - 3
                late = tl.load(x + token * x_row, mask=is_channel & (at >= 3), other=0.0)
                value = tl.where(at >= 3, late, value)
                tl.store(window + i * C, value, mask=is_channel)


@triton.jit
def _exports(first, x, pool, cu_seqlens, csr, x_row, N, E, C, is_channel, BLOCK_E: tl.constexpr):
    """Windows at checkpoints: three rows of x each, since they are at 16 tokens or later."""
    conv_pool, slot_size, num_slots = pool
    indptr, offsets, slots = csr
    end = tl.minimum(tl.load(indptr + N), E)
    if first < end:
        e = first + tl.arange(0, BLOCK_E)
        is_entry = e < end
        slot = slot_or_none(tl.load(slots + e, mask=is_entry, other=-1), num_slots)
        n = first_above(indptr, N + 1, e) - 1
        begin = tl.load(cu_seqlens + n, mask=is_entry, other=0)
        length = tl.load(cu_seqlens + n + 1, mask=is_entry, other=0) - begin
        offset = tl.load(offsets + e, mask=is_entry, other=0)
        # an entry below one before it is skipped
        num_before = tl.where(is_entry, e - tl.load(indptr + n, mask=is_entry, other=0), 0)
        highest = tl.full((BLOCK_E,), 0, tl.int32)
        for i in range(1, tl.max(num_before, axis=0) + 1):
            before = tl.load(offsets + e - i, mask=i <= num_before, other=0)
            highest = tl.maximum(highest, before)
        is_valid = (slot >= 0) & (offset > 0) & (offset <= length)
        is_valid = is_valid & (offset % 16 == 0) & (offset >= highest)
        mask = is_valid[:, None] & is_channel[None, :]
        row = x[None, :] + (begin + offset - 3).to(tl.int64)[:, None] * x_row
        window = conv_pool[None, :] + tl.where(is_valid, slot, 0).to(tl.int64)[:, None] * slot_size
        for i in tl.static_range(3):
            tl.store(window + i * C, tl.load(row + i * x_row, mask=mask, other=0.0), mask=mask)


@triton.jit
def _tile(first, x, weight, cu_seqlens, y, x_row, T, N, C, is_channel, BLOCK_T: tl.constexpr):
    """BLOCK_T tokens, except those that see a window; rows of no sequence become 0.

    Four tokens at a time, while the next four are on their way.
    """
    end = tl.minimum(first + BLOCK_T, T)
    x0 = _row(x, first - 3, end, x_row, is_channel)
    x1 = _row(x, first - 2, end, x_row, is_channel)
    x2 = _row(x, first - 1, end, x_row, is_channel)
    x3 = _row(x, first, end, x_row, is_channel)
    x4 = _row(x, first + 1, end, x_row, is_channel)
    x5 = _row(x, first + 2, end, x_row, is_channel)
    x6 = _row(x, first + 3, end, x_row, is_channel)
    w0, w1, w2, w3 = _weights(weight, is_channel)
    total = tl.load(cu_seqlens + N)
    near = _near_start(cu_seqlens, N, first, tl.minimum(end, total))
    for step in range(0, BLOCK_T, 4):
        t = first + step
        x7 = _row(x, t + 4, end, x_row, is_channel)
        x8 = _row(x, t + 5, end, x_row, is_channel)
        x9 = _row(x, t + 6, end, x_row, is_channel)
        x10 = _row(x, t + 7, end, x_row, is_channel)
        y0 = silu_taps(w0, w1, w2, w3, x0, x1, x2, x3)
        y1 = silu_taps(w0, w1, w2, w3, x1, x2, x3, x4)
        y2 = silu_taps(w0, w1, w2, w3, x2, x3, x4, x5)
        y3 = silu_taps(w0, w1, w2, w3, x3, x4, x5, x6)
        _put(y, y0, t, end, total, near, C, is_channel)
        _put(y, y1, t + 1, end, total, near >> 1, C, is_channel)
        _put(y, y2, t + 2, end, total, near >> 2, C, is_channel)
        _put(y, y3, t + 3, end, total, near >> 3, C, is_channel)
        x0, x1, x2, x3, x4, x5, x6 = x4, x5, x6, x7, x8, x9, x10
        near >>= 4


@triton.jit
def _row(x, t, end, x_row, is_channel):
    return tl.load(x + t.to(tl.int64) * x_row, mask=is_channel & (t >= 0) & (t < end), other=0.0)


@triton.jit
def _put(y, value, t, end, total, near, C, is_channel):
    value = tl.where(t < total, value, 0.0).to(y.dtype.element_ty)
    mask = is_channel & (t < end) & ((near & 1) == 0)
    tl.store(y + t.to(tl.int64) * C, value, mask=mask)


@triton.jit
def _near_start(cu_seqlens, N, first, end):
    """Bit i: token first + i < end is one of the first three of its sequence."""
    n = first_above(cu_seqlens, N + 1, first - 3)
    bits = tl.full((), 0, tl.int64)
    seven = tl.full((), 7, tl.int64)
    start = tl.load(cu_seqlens + n, mask=n <= N, other=end)
    while start < end:
        # an empty sequence starts where the next one does
        shift = (start - first).to(tl.int64)
        bits |= tl.where(shift >= 0, seven << tl.maximum(shift, 0), seven >> tl.maximum(-shift, 0))
        n += 1
        start = tl.load(cu_seqlens + n, mask=n <= N, other=end)
    return bits


@triton.jit
def _weights(weight, is_channel):
    """[BLOCK_C, 4] weights, a tap at a time, in fp32."""
    taps = tl.load(weight[:, None] + tl.arange(0, 4)[None, :], mask=is_channel[:, None], other=0.0)
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
