"""The causal conv of prefill, and the windows it leaves behind, in one kernel."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

import triton
import triton.language as tl
from torch import Tensor

from .functions import silu_taps, slot_or_none
from .search import first_above

BLOCK_T = 16
BLOCK_C = 1024  # 16 bytes a thread and row
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
    each export copies three rows of x. One for each tile of tokens makes all other tokens.
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
    _conv_kernel[((N + E + triton.cdiv(T, block_t)) * num_groups,)](
        *(x, weight, conv_pool, cu_seqlens, initial_slots, final_slots, *csr, y),
        *(x.stride(0), conv_pool.stride(0), T, N, E, C, conv_pool.shape[0]),
        BLOCK_T=block_t,
        BLOCK_C=block_c,
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
    elif item < N + E:
        pool = (conv_pool, slot_size, num_slots)
        csr = (indptr, offsets, slots)
        _export(item - N, x, pool, cu_seqlens, csr, x_row, N, C, is_channel)
    else:
        first = (item - N - E) * BLOCK_T
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
def _export(e, x, pool, cu_seqlens, csr, x_row, N, C, is_channel):
    """The window at a checkpoint: three rows of x, since a checkpoint is at 16 tokens or later."""
    conv_pool, slot_size, num_slots = pool
    indptr, offsets, slots = csr
    slot = slot_or_none(tl.load(slots + e), num_slots)
    if (slot >= 0) & (e < tl.load(indptr + N)):
        n = first_above(indptr, N + 1, e) - 1
        begin = tl.load(cu_seqlens + n)
        length = tl.load(cu_seqlens + n + 1) - begin
        offset = tl.load(offsets + e)
        highest = 0
        for i in range(tl.load(indptr + n), e):
            highest = tl.maximum(highest, tl.load(offsets + i))
        is_valid = (offset > 0) & (offset <= length) & (offset % 16 == 0) & (offset >= highest)
        mask = is_channel & is_valid
        row = x + (begin + offset - 3).to(tl.int64) * x_row
        window = conv_pool + slot.to(tl.int64) * slot_size
        for i in tl.static_range(3):
            tl.store(window + i * C, tl.load(row + i * x_row, mask=mask, other=0.0), mask=mask)


@triton.jit
def _tile(first, x, weight, cu_seqlens, y, x_row, T, N, C, is_channel, BLOCK_T: tl.constexpr):
    """BLOCK_T tokens, except those that see a window; rows of no sequence become 0."""
    rows = ()
    for i in tl.static_range(BLOCK_T + 3):
        t = first + i - 3
        is_row = is_channel & (t >= 0) & (t < T)
        rows = rows + (tl.load(x + t.to(tl.int64) * x_row, mask=is_row, other=0.0),)
    w0, w1, w2, w3 = _weights(weight, is_channel)
    total = tl.load(cu_seqlens + N)
    sees_window = _near_start(cu_seqlens, N, first, tl.minimum(first + BLOCK_T, total))
    for i in tl.static_range(BLOCK_T):
        t = first + i
        value = silu_taps(w0, w1, w2, w3, rows[i], rows[i + 1], rows[i + 2], rows[i + 3])
        value = tl.where(t < total, value, 0.0)
        is_ours = (t < T) & (((sees_window >> i) & 1) == 0)
        tl.store(y + t.to(tl.int64) * C, value, mask=is_channel & is_ours)


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
