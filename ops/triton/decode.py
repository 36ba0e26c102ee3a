"""Decode of KDA in one kernel: conv, gate, recurrence and gated norm of a head of a row."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

import triton
import triton.language as tl
from torch import Tensor

from .functions import decay, sigmoid, silu_taps, slot_or_none

K_INNER = 32  # channels of a key that lie side by side in the tile of a state
WINDOW_BLOCK = 512
NUM_WARPS = 4  # faster than 8 at D=1..256 on H200, with any number of registers


def kda_decode(
    qkv: Tensor,
    g_raw: Tensor,
    beta_logit: Tensor,
    gate: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    state_pool: Tensor,
    conv_pool: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    num_tokens: Tensor | None = None,
    *,
    lower_bound: float | None,
    scale: float,
    eps: float,
    num_warps: int = NUM_WARPS,
) -> Tensor:
    """`ops.kda.kda_decode`; K and V are powers of two, K a multiple of 32.

    One program has a head of a row: its state stays in registers over the row's tokens.
    """
    (D, M), (num_slots, HV, V, K) = dst_slots.shape, state_pool.shape
    out = qkv.new_empty(D * M, HV * V)
    if out.numel() == 0:
        return out
    C = qkv.shape[1]
    H = (C - HV * V) // (2 * K)
    counts = src_slots if num_tokens is None else num_tokens
    _decode_kernel[(HV, D)](
        *(qkv, g_raw, beta_logit, gate, conv_weight, A_log, dt_bias, norm_weight),
        *(state_pool, conv_pool, src_slots, dst_slots, counts, out),
        *(qkv.stride(0), g_raw.stride(0), beta_logit.stride(0), gate.stride(0)),
        *(state_pool.stride(0), conv_pool.stride(0), num_slots, H, HV // H),
        *(0.0 if lower_bound is None else lower_bound, scale, eps),
        M=M,
        K=K,
        V=V,
        K_INNER=K_INNER,
        IS_BOUNDED=lower_bound is not None,
        HAS_COUNTS=num_tokens is not None,
        OWNS_QK=HV == H,
        num_warps=num_warps,
        # of a b + c d the compiler would fuse either product, and not the same one for every M: a
        # row's bits must not depend on how many tokens come with it
        enable_fp_fusion=False,
    )
    if HV != H:
        # several heads read a query/key window: it is written when all of them are done
        _qk_windows_kernel[(triton.cdiv(2 * H * K, WINDOW_BLOCK), D)](
            *(qkv, conv_pool, src_slots, dst_slots, counts),
            *(qkv.stride(0), conv_pool.stride(0), num_slots, 2 * H * K, C),
            M=M,
            HAS_COUNTS=num_tokens is not None,
            BLOCK=WINDOW_BLOCK,
            num_warps=4,
        )
    return out


@triton.jit(do_not_specialize=["num_slots", "H", "group"])
def _decode_kernel(
    qkv,
    g_raw,
    beta_logit,
    gate,
    conv_weight,
    A_log,
    dt_bias,
    norm_weight,
    state_pool,
    conv_pool,
    src_slots,
    dst_slots,
    counts,
    out,
    qkv_row,
    g_row,
    beta_row,
    gate_row,
    state_slot,
    conv_slot,
    num_slots,
    H,
    group,
    lower_bound,
    scale,
    eps,
    M: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    K_INNER: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    OWNS_QK: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1)
    HV = tl.num_programs(0)
    C = 2 * H * K + HV * V
    src = slot_or_none(tl.load(src_slots + row), num_slots)
    count = tl.load(counts + row) if HAS_COUNTS else M
    count = tl.where(src >= 0, count, 0)
    is_row = count > 0
    slot = tl.where(is_row, src, 0).to(tl.int64)

    # A tile of the state is [V, K / K_INNER, K_INNER]: loads are 128-byte pieces of rows, and
    # three quarters of a sum over K stay in a thread.
    v_in = tl.arange(0, V)[:, None, None]
    k_out = tl.arange(0, K // K_INNER)[None, :, None]
    k_in = tl.arange(0, K_INNER)[None, None, :]
    in_state = v_in * K + k_out * K_INNER + k_in
    state_base = state_pool + head * (V * K)
    state = tl.load(state_base + slot * state_slot + in_state, mask=is_row, other=0.0)
    state = state.to(tl.float32)

    lane, v_lane = tl.arange(0, K), tl.arange(0, V)
    q_channel = head // group * K + lane
    k_channel = H * K + q_channel
    v_channel = 2 * H * K + head * V + v_lane
    window = conv_pool + slot * conv_slot
    q0, q1, q2 = _load_window(window, q_channel, C, is_row)
    k0, k1, k2 = _load_window(window, k_channel, C, is_row)
    v0, v1, v2 = _load_window(window, v_channel, C, is_row)
    norm = tl.load(norm_weight + v_lane).to(tl.float32)
    a = tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head * K + lane).to(tl.float32)

    for j in range(M):
        token = (row * M + j).to(tl.int64)
        is_real = j < count
        dst = slot_or_none(tl.load(dst_slots + row * M + j), num_slots)
        is_written = is_real & (dst >= 0)
        slot = tl.where(is_written, dst, 0).to(tl.int64)
        x = qkv + token * qkv_row
        q3 = tl.load(x + q_channel, mask=is_real, other=0.0)
        k3 = tl.load(x + k_channel, mask=is_real, other=0.0)
        v3 = tl.load(x + v_channel, mask=is_real, other=0.0)
        z = tl.load(gate + token * gate_row + head * V + v_lane, mask=is_real, other=0.0)
        g = tl.load(g_raw + token * g_row + head * K + lane, mask=is_real, other=0.0)
        beta = tl.load(beta_logit + token * beta_row + head, mask=is_real, other=0.0)
        # in place, no thread may write a window that another one has still to read; every load of
        # this token is on its way before anything waits
        tl.debug_barrier()

        q = silu_conv(conv_weight, q_channel, q0, q1, q2, q3)
        k = silu_conv(conv_weight, k_channel, k0, k1, k2, k3)
        q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * scale)
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        qk = tl.sum(q * k, axis=0)
        g = decay(g.to(tl.float32) + bias, a, lower_bound, IS_BOUNDED)
        beta = sigmoid(beta.to(tl.float32))
        q_tile, k_tile = _over_tile(q, K, K_INNER), _over_tile(k, K, K_INNER)

        state = state * _over_tile(g, K, K_INNER)
        v = _anew(silu_conv(conv_weight, v_channel, v0, v1, v2, v3))
        # what key and query see before the correction, in one pass
        seen = tl.sum(tl.sum(state * k_tile, axis=1), axis=1)
        o = tl.sum(tl.sum(state * q_tile, axis=1), axis=1)
        u = beta * (v - seen)
        state = tl.fma(u[:, None, None], k_tile, state)
        tl.store(state_base + slot * state_slot + in_state, state, mask=is_written)
        o = _anew(o + u * qk)
        o = o * tl.rsqrt(tl.sum(o * o, axis=0) / V + eps) * norm * sigmoid(z.to(tl.float32))
        o = tl.where(is_real, o, 0.0).to(out.dtype.element_ty)
        tl.store(out + token * (HV * V) + head * V + v_lane, o)

        q0, q1, q2 = q1, q2, q3
        k0, k1, k2 = k1, k2, k3
        v0, v1, v2 = v1, v2, v3
        window = conv_pool + slot * conv_slot
        if OWNS_QK:
            _store_window(window, q_channel, C, q0, q1, q2, is_written)
            _store_window(window, k_channel, C, k0, k1, k2, is_written)
        _store_window(window, v_channel, C, v0, v1, v2, is_written)


@triton.jit
def _over_tile(x, K: tl.constexpr, K_INNER: tl.constexpr):
    """[K] to [1, K / K_INNER, K_INNER]."""
    return tl.reshape(_anew(x), [1, K // K_INNER, K_INNER])


@triton.jit
def _anew(x):
    """x through shared memory, so that it may have another layout than what it is made of.

    Without this the compiler makes x in the layout in which it is used: each thread many channels,
    and most threads the same ones.
    """
    return tl.gather(x, tl.arange(0, x.shape[0]), 0)


@triton.jit(do_not_specialize=["num_slots", "num_channels", "C"])
def _qk_windows_kernel(
    qkv,
    conv_pool,
    src_slots,
    dst_slots,
    counts,
    qkv_row,
    conv_slot,
    num_slots,
    num_channels,
    C,
    M: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Windows of the query and key channels after each token."""
    row = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_channel = channel < num_channels
    src = slot_or_none(tl.load(src_slots + row), num_slots)
    count = tl.load(counts + row) if HAS_COUNTS else M
    count = tl.where(src >= 0, count, 0)
    slot = tl.where(src >= 0, src, 0).to(tl.int64)
    _, x1, x2 = _load_window(conv_pool + slot * conv_slot, channel, C, is_channel & (count > 0))
    tl.debug_barrier()
    for j in range(M):
        token = (row * M + j).to(tl.int64)
        x3 = tl.load(qkv + token * qkv_row + channel, mask=is_channel & (j < count), other=0.0)
        dst = slot_or_none(tl.load(dst_slots + row * M + j), num_slots)
        is_written = (j < count) & (dst >= 0)
        window = conv_pool + tl.where(is_written, dst, 0).to(tl.int64) * conv_slot
        _store_window(window, channel, C, x1, x2, x3, is_channel & is_written)
        x1, x2 = x2, x3


@triton.jit
def _load_window(window, channel, C, mask):
    x0 = tl.load(window + channel, mask=mask, other=0.0)
    x1 = tl.load(window + C + channel, mask=mask, other=0.0)
    x2 = tl.load(window + 2 * C + channel, mask=mask, other=0.0)
    return x0, x1, x2


@triton.jit
def _store_window(window, channel, C, x0, x1, x2, mask):
    tl.store(window + channel, x0, mask=mask)
    tl.store(window + C + channel, x1, mask=mask)
    tl.store(window + 2 * C + channel, x2, mask=mask)


@triton.jit
def silu_conv(weight, channel, x0, x1, x2, x3):
    w = weight + channel * 4
    w0 = tl.load(w).to(tl.float32)
    w1 = tl.load(w + 1).to(tl.float32)
    w2 = tl.load(w + 2).to(tl.float32)
    w3 = tl.load(w + 3).to(tl.float32)
    return silu_taps(w0, w1, w2, w3, x0, x1, x2, x3)
