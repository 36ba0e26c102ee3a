"""The ops in plain PyTorch, a formula a line: the truth for tests, and what runs on a CPU.

Computed in fp32, or in float64 where the inputs are. The recurrence has two forms: by token
(`kda_recurrent_ref`) and by chunks of 16 tokens, arranged as the kernels are (`kda_prefill_ref`): a
prepare over all chunks, then a serial scan.

Bits do not depend on what else is in the batch: work is laid out in tiles of 16 rows of one
sequence, products are batched over whole tiles and heads only, and every pointwise function used
gives an element the same bits wherever it stands in a tensor. torch's CPU sigmoid, SiLU and
softplus don't (their vectors and tails differ); exp and log1p do.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor

CHUNK = 16  # tokens of a chunk; states can be exported at its multiples
SUB = 4  # rows of a sub-block of a chunk
PREPARE_TILES = 64  # chunks prepared at once, to bound memory; any number gives the same bits

# exp of less than this is 0: cutting log decays here changes nothing, and keeps infinity out
_LOG_ZERO = {torch.float32: -104.0, torch.float64: -746.0}


def kda_prefill_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_raw: Tensor,
    beta_logit: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_pool: Tensor,
    cu_seqlens: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    checkpoint_indptr: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """`kda_prefill` in chunks of 16 tokens; cu_seqlens is read on the host."""
    out = v.new_zeros(v.shape)
    if q.shape[0] == 0:
        return out
    csr = (checkpoint_indptr, checkpoint_offsets, checkpoint_slots)
    slots = (initial_slots, final_slots)
    sequences = _sequences("kda_prefill", cu_seqlens, *slots, csr, state_pool.shape[0])
    for sequence in sequences:
        if sequence.length == 0:
            _write_slot(state_pool, sequence.final, _read_slot(state_pool, sequence.initial))
    tiles = [
        (sequence, begin) for sequence in sequences for begin in range(0, sequence.length, CHUNK)
    ]
    state = state_pool.new_zeros(state_pool.shape[1:])
    for first in range(0, len(tiles), PREPARE_TILES):
        block = tiles[first : first + PREPARE_TILES]
        rows, is_row = _tile_rows(block, q.device)
        chunks = _prepare(
            *(_gather(q, rows, is_row), _gather(k, rows, is_row), _gather(v, rows, is_row)),
            *(_gather(g_raw, rows, is_row), _gather(beta_logit, rows, is_row)),
            *(is_row, A_log, dt_bias, lower_bound, scale),
        )
        o = chunks.v.new_empty(chunks.v.shape)
        for t, (sequence, begin) in enumerate(block):
            if begin == 0:
                state = _read_slot(state_pool, sequence.initial)
            o[t], state = _scan_step(state, Chunks(*(x[t] for x in chunks)))
            _export(state_pool, sequence, begin + CHUNK, state)
        out[rows[is_row]] = rearrange(o, "n h t v -> n t h v")[is_row].to(out.dtype)
    return out


class Chunks(NamedTuple):
    """What the scan reads of n chunks; rows past a sequence's end are zero and change nothing."""

    k_in: Tensor  # [n, HV, 16, K] keys, decayed from the chunk's start
    q_in: Tensor  # [n, HV, 16, K] scaled queries, decayed from the chunk's start
    mq: Tensor  # [n, HV, 16, 16] how much of each residual a row's output sees, lower triangular
    k_out: Tensor  # [n, HV, 16, K] what each residual adds to the state at the chunk's end
    decay: Tensor  # [n, HV, 1, K] of the state over the chunk
    v: Tensor  # [n, HV, 16, V]


def _prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_raw: Tensor,
    beta_logit: Tensor,
    is_row: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    scale: float | None,
) -> Chunks:
    """The part of the chunks that needs no state: [n, 16, heads, ..] tensors to `Chunks`."""
    HV = v.shape[2]
    q, k = (_heads_first(x, HV) for x in (l2_norm(q), l2_norm(k)))
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    g = log_decay(g_raw, A_log, dt_bias, lower_bound)
    g = _heads_first(torch.where(is_row[..., None, None], g, 0), HV)
    beta = rearrange(sigmoid(beta_logit), "n t h -> n h t")
    kk, qk = _decayed_products(torch.stack([k, q]), k, g)
    # (I + L) U = diag(beta) R gives the corrections U from the residuals R
    L = (beta[..., None] * kk).tril(-1)
    eye = torch.eye(CHUNK, dtype=L.dtype, device=L.device).expand_as(L)
    inverse = torch.linalg.solve_triangular(L, eye, upper=False, unitriangular=True)
    inverse_beta = inverse * beta[..., None, :]
    from_start = g.cumsum(-2)
    return Chunks(
        k_in=k * from_start.exp(),
        q_in=q * from_start.exp(),
        mq=qk.tril() @ inverse_beta,
        k_out=inverse_beta.mT @ (k * _sum_after(g).exp()),
        decay=from_start[..., -1:, :].exp(),
        v=_heads_first(v, HV),
    )


def _decayed_products(x: Tensor, k: Tensor, g: Tensor) -> Tensor:
    """sum_d x[i, d] k[j, d] exp(sum of g[j+1..i, d]) for j <= i; above the diagonal: anything.

    x is [2, n, HV, 16, K], k and g are [n, HV, 16, K]. Sub-blocks on the diagonal sum pair by pair,
    those below it meet at the sub-block's first row. So no exponent is positive, whatever the gate,
    and none is a difference of sums, which would lose small decays behind a large one.
    """
    out = x.new_zeros(*x.shape[:-1], CHUNK)
    for i in range(0, CHUNK, SUB):
        here = slice(i, i + SUB)
        pair = g.new_zeros(*g.shape[:-2], SUB, SUB, g.shape[-1])
        for r in range(1, SUB):
            pair[..., r, :r, :] = pair[..., r - 1, :r, :] + g[..., i + r, None, :]
        decayed = k[..., None, here, :] * pair.exp()
        out[..., here, here] = (x[..., here, None, :] * decayed).sum(-1)
        if i > 0:
            left = x[..., here, :] * g[..., here, :].cumsum(-2).exp()
            right = k[..., :i, :] * _sum_after(g[..., :i, :]).exp()
            out[..., here, :i] = left @ right.mT
    return out


def _sum_after(g: Tensor) -> Tensor:
    """Sum of the rows after each row, [.., R, K]."""
    total = g.flip(-2).cumsum(-2).flip(-2)
    return torch.cat([total[..., 1:, :], torch.zeros_like(g[..., :1, :])], dim=-2)


def _scan_step(state: Tensor, chunk: Chunks) -> tuple[Tensor, Tensor]:
    """One chunk of one sequence: [HV, V, K] state to (o [HV, 16, V], state)."""
    residual = chunk.v - chunk.k_in @ state.mT
    o = chunk.q_in @ state.mT + chunk.mq @ residual
    return o, state * chunk.decay + residual.mT @ chunk.k_out


def kda_recurrent_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_raw: Tensor,
    beta_logit: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_pool: Tensor,
    cu_seqlens: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    checkpoint_indptr: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
    *,
    lower_bound: float | None = None,
    scale: float | None = None,
) -> Tensor:
    """`kda_prefill` token by token; in float64 it is the truth for every other form."""
    out = v.new_zeros(v.shape)
    if q.shape[0] == 0:
        return out
    csr = (checkpoint_indptr, checkpoint_offsets, checkpoint_slots)
    slots = (initial_slots, final_slots)
    for sequence in _sequences("kda_prefill", cu_seqlens, *slots, csr, state_pool.shape[0]):
        state = _read_slot(state_pool, sequence.initial)
        if sequence.length == 0:
            _write_slot(state_pool, sequence.final, state)
        for p in range(sequence.length):
            t = slice(sequence.start + p, sequence.start + p + 1)
            g = log_decay(_work(g_raw[t]), A_log, dt_bias, lower_bound)
            beta = sigmoid(_work(beta_logit[t]))
            qn, kn = l2_norm(_work(q[t])), l2_norm(_work(k[t]))
            o, state = _token_step(state[None], qn, kn, _work(v[t]), g, beta, scale)
            out[t], state = o.to(out.dtype), state[0]
            _export(state_pool, sequence, p + 1, state)
    return out


def _token_step(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None
) -> tuple[Tensor, Tensor]:
    """One token of each row; q and k are normalised, g is the log decay.

    [B, HV, V, K] state to (o [B, HV, V], state).
    """
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    q, k = (repeat(x, "b h k -> b (h r) 1 k", r=v.shape[1] // x.shape[1]) for x in (q, k))
    state = state * g.exp()[..., None, :]
    u = beta[..., None] * (v - (state * k).sum(-1))
    state = state + u[..., None] * k
    return (state * q).sum(-1), state


def kda_decode_ref(
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
    lower_bound: float | None = None,
    scale: float | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`kda_decode`, one token of all rows at a time. No host sync on CUDA."""
    (D, M), (_, HV, V, K) = dst_slots.shape, state_pool.shape
    if D == 0:
        return qkv.new_zeros(0, HV * V)
    num_slots = state_pool.shape[0]
    if state_pool.is_cpu:
        rows = (src_slots.tolist(), dst_slots.tolist())
        _check_slots("kda_decode: dst_slots", *rows, num_slots, num_own=M)
    has_src = (src_slots >= 0) & (src_slots < num_slots)
    src = torch.where(has_src, src_slots, 0).long()
    state, window = state_pool[src], conv_pool[src]
    qkv, g_raw, beta_logit, gate = (
        x.unflatten(0, (D, M)).transpose(0, 1) for x in (qkv, g_raw, beta_logit, gate)
    )
    out = qkv.new_zeros(D, M, HV * V)
    qk_size = (qkv.shape[-1] - HV * V) // 2
    for j in range(M):
        is_real = has_src if num_tokens is None else has_src & (j < num_tokens)
        taps = torch.cat([window, qkv[j][:, None]], dim=1)
        y = _conv_taps(_work(taps), _work(conv_weight))[:, 0]
        q, k = (l2_norm(rearrange(x, "d (h k) -> d h k", k=K)) for x in _pair(y, qk_size))
        v = rearrange(y[:, 2 * qk_size :], "d (h v) -> d h v", v=V)
        g = log_decay(_work(g_raw[j]), A_log, dt_bias, lower_bound)
        o, state = _token_step(state, q, k, v, g, sigmoid(_work(beta_logit[j])), scale)
        o = gated_rms_norm_ref(o, _work(gate[j]), _work(norm_weight), eps=eps)
        window = taps[:, 1:]
        dst = torch.where(is_real, dst_slots[:, j], -1)
        _write_slots(state_pool, dst, state)
        _write_slots(conv_pool, dst, window)
        out[:, j] = torch.where(is_real[:, None], o.flatten(1), 0).to(out.dtype)
    return out.flatten(0, 1)


def causal_conv_prefill_ref(
    x: Tensor,
    weight: Tensor,
    conv_pool: Tensor,
    cu_seqlens: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    checkpoint_indptr: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
) -> Tensor:
    """`causal_conv_prefill`, a sequence at a time."""
    out = x.new_zeros(x.shape)
    if x.shape[0] == 0:
        return out
    csr = (checkpoint_indptr, checkpoint_offsets, checkpoint_slots)
    slots = (initial_slots, final_slots)
    for sequence in _sequences("causal_conv_prefill", cu_seqlens, *slots, csr, conv_pool.shape[0]):
        rows = slice(sequence.start, sequence.start + sequence.length)
        taps = torch.cat([_read_slot(conv_pool, sequence.initial), x[rows]])
        if sequence.length > 0:
            out[rows] = _conv_taps(_work(taps)[None], _work(weight))[0].to(out.dtype)
        for offset, slot in sequence.exports:
            _write_slot(conv_pool, slot, taps[offset : offset + 3])
        _write_slot(conv_pool, sequence.final, taps[sequence.length :])
    return out


def _conv_taps(taps: Tensor, weight: Tensor) -> Tensor:
    """[B, 3 + T, C] inputs, oldest first, to SiLU of the width-4 causal conv [B, T, C]."""
    T = taps.shape[1] - 3
    y = taps[:, :T] * weight[:, 0]
    for j in range(1, 4):
        y = y + taps[:, j : j + T] * weight[:, j]
    return y * sigmoid(y)


def gated_rms_norm_ref(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """`gated_rms_norm`."""
    y = _work(x)
    y = y / (y.square().mean(-1, keepdim=True) + eps).sqrt()
    return (y * _work(weight) * sigmoid(_work(gate))).to(x.dtype)


def rms_norm_ref(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """`rms_norm`."""
    y = _work(x).contiguous()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype)


def add_rms_norm_ref(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm`."""
    total = (x + residual).contiguous()
    return total, rms_norm_ref(total, weight, eps=eps)


def silu_and_mul_ref(x: Tensor) -> Tensor:
    """`silu_and_mul`."""
    gate, up = x.chunk(2, dim=-1)
    gate = _work(gate)
    return ((gate / (1 + (-gate).exp())).to(x.dtype) * up).contiguous()


def sigmoid_mul_ref(x: Tensor, gate: Tensor) -> Tensor:
    """`sigmoid_mul`."""
    return (x * sigmoid(_work(gate)).to(x.dtype)).contiguous()


def mla_store_ref(latent: Tensor, kv_pool: Tensor, slot_mapping: Tensor) -> None:
    """`mla_store`."""
    _write_slots(kv_pool.flatten(0, 1), slot_mapping, latent)


def mla_decode_ref(
    q: Tensor,
    kv_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
    num_tokens_per_row: int = 1,
) -> Tensor:
    """`mla_decode`, a row at a time."""
    out = q.new_zeros(*q.shape[:2], kv_lora_rank)
    M = num_tokens_per_row
    for d, length in enumerate(seq_lens.tolist()):
        if length > 0:
            latents = _latents(kv_pool, block_table[d], length)
            rows = slice(d * M, (d + 1) * M)
            out[rows] = _attend(
                _work(q[rows]), latents[:, None], latents[:, None, :kv_lora_rank], length - M, scale
            ).to(out.dtype)
    return out


def mla_prefill_ref(
    q: Tensor,
    kv_pool: Tensor,
    kv_b_weight: Tensor,
    cu_seqlens: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    v_head_dim: int,
) -> Tensor:
    """`mla_prefill`, a sequence at a time, its queries in blocks of 128."""
    T, Hq, key_dim = q.shape
    rank = kv_b_weight.shape[1]
    nope_dim = key_dim - (kv_pool.shape[2] - rank)
    out = q.new_zeros(T, Hq, v_head_dim)
    cu = cu_seqlens.tolist()
    for n, length in enumerate(seq_lens.tolist()):
        begin, end = cu[n], cu[n + 1]
        if begin == end:
            continue
        latents = _latents(kv_pool, block_table[n], length)
        kv = latents[:, :rank] @ _work(kv_b_weight).mT
        kv = kv.unflatten(-1, (Hq, nope_dim + v_head_dim))  # told, as Hq may be 0
        k_nope, v = kv.split([nope_dim, v_head_dim], dim=-1)
        k_pe = repeat(latents[:, rank:], "s p -> s h p", h=Hq)
        k = torch.cat([k_nope, k_pe], dim=-1)
        for i in range(begin, end, 128):
            rows = slice(i, min(i + 128, end))
            first = length - (end - i)
            seen = length - (end - rows.stop)
            o = _attend(_work(q[rows]), k[:seen], v[:seen], first, scale)
            out[rows] = o.to(out.dtype)
    return out


def _latents(kv_pool: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first `length` cached rows of a sequence, [length, R + P]."""
    num_blocks = -(-length // kv_pool.shape[1])
    return _work(kv_pool[blocks[:num_blocks].long()].flatten(0, 1)[:length])


def _attend(q: Tensor, k: Tensor, v: Tensor, first: int, scale: float) -> Tensor:
    """Causal attention of q [L, Hq, Q] at positions first.. over k, v [S, Hq or 1, ..]."""
    scores = scale * (q.transpose(0, 1) @ k.permute(1, 2, 0))  # [Hq, L, S]
    positions = torch.arange(first, first + q.shape[0], device=q.device)
    is_later = torch.arange(k.shape[0], device=q.device) > positions[:, None]
    weights = scores.masked_fill(is_later, float("-inf")).softmax(-1)
    return (weights @ v.transpose(0, 1)).transpose(0, 1)


def moe_ref(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    num_shared: int = 0,
) -> Tensor:
    """`moe`, an expert at a time."""
    out, num_experts = _work(x).new_zeros(x.shape), w13.shape[0] - num_shared
    for expert in range(w13.shape[0]):
        if expert < num_experts:
            row, choice = (topk_ids == expert).nonzero(as_tuple=True)
            weight = topk_weights[row, choice, None]
        else:
            row = ((topk_ids[:, 0] >= 0) & (topk_ids[:, 0] < num_experts)).nonzero()[:, 0]
            weight = topk_weights.new_ones(len(row), 1)
        if row.numel() == 0:
            continue
        gate, up = (_work(x)[row] @ _work(w13[expert]).mT).chunk(2, dim=-1)
        y = (gate * sigmoid(gate) * up) @ _work(w2[expert]).mT
        out.index_add_(0, row, y * weight.to(y.dtype))
    return out.to(x.dtype)


def moe_route_ref(
    x: Tensor,
    weight: Tensor,
    choice_bias: Tensor,
    num_choices: int,
    *,
    renormalize: bool,
    scaling_factor: float,
    is_real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`moe_route`."""
    scores = sigmoid(_work(x) @ _work(weight).mT)
    order = (scores + choice_bias).sort(dim=-1, descending=True, stable=True).indices
    ids = order[:, :num_choices]
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    if is_real is not None:
        ids = torch.where(is_real[:, None], ids, -1)
    return ids.to(torch.int32, memory_format=torch.contiguous_format), weights * scaling_factor


def log_decay(g_raw: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay of each key channel, <= 0: [.., HV, K] raw gates to the same shape."""
    a, x = A_log.exp()[:, None], g_raw + dt_bias
    g = -a * softplus(x) if lower_bound is None else lower_bound * sigmoid(a * x)
    return g.clamp(min=_LOG_ZERO[g.dtype])


def l2_norm(x: Tensor) -> Tensor:
    """Rows of unit length; eps 1e-6 inside the root."""
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), with bits that don't depend on the place in the tensor."""
    return 1 / (1 + (-x).exp())


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), with bits that don't depend on the place in the tensor."""
    return x.clamp(min=0) + (-x.abs()).exp().log1p()


def _work(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _pair(y: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return y[:, :size], y[:, size : 2 * size]


def _heads_first(x: Tensor, HV: int) -> Tensor:
    """[n, 16, H or HV, d] to [n, HV, 16, d]; value head h reads query/key head h // (HV / H)."""
    return repeat(x, "n t h d -> n (h r) t d", r=HV // x.shape[2]).contiguous()


class _Sequence(NamedTuple):
    """One sequence of a packed prefill, with ids that are out of range turned into -1."""

    start: int  # its first row
    length: int  # tokens
    initial: int  # slot read; -1: zeros
    final: int  # slot written; -1: none
    exports: list[tuple[int, int]]  # valid checkpoints, (tokens from the start, slot)


def _sequences(
    op: str,
    cu_seqlens: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    csr: tuple[Tensor | None, Tensor | None, Tensor | None],
    num_slots: int,
) -> list[_Sequence]:
    cu, initial, final = cu_seqlens.tolist(), initial_slots.tolist(), final_slots.tolist()
    indptr, offsets, slots = ([] if x is None else x.tolist() for x in csr)
    result = []
    for n in range(len(initial)):
        length = cu[n + 1] - cu[n]
        entries = slice(indptr[n], indptr[n + 1]) if indptr else slice(0)
        exports = _valid_exports(offsets[entries], slots[entries], length, num_slots)
        reads, writes = (s if 0 <= s < num_slots else -1 for s in (initial[n], final[n]))
        result.append(_Sequence(cu[n], length, reads, writes, exports))
    writes = [[s.final, *(slot for _, slot in s.exports)] for s in result]
    names = f"{op}: final_slots and checkpoint_slots"
    _check_slots(names, [s.initial for s in result], writes, num_slots, num_own=1)
    return result


def _valid_exports(
    offsets: Sequence[int], slots: Sequence[int], length: int, num_slots: int
) -> list[tuple[int, int]]:
    """The checkpoints that are written; an offset below one before it is not."""
    result, highest = [], 0
    for offset, slot in zip(offsets, slots, strict=True):
        is_inside = 0 < offset <= length and offset % CHUNK == 0 and offset >= highest
        if is_inside and 0 <= slot < num_slots:
            result.append((offset, slot))
        highest = max(highest, offset)
    return result


def _check_slots(
    names: str,
    reads: Sequence[int],
    writes: Sequence[Sequence[int]],
    num_slots: int,
    *,
    num_own: int,
) -> None:
    """Refuses a call that writes a slot twice, or one that it also reads.

    The first `num_own` writes of a sequence may be its own initial slot if nobody else reads that.
    A message begins with `names`, those of the op and of the arguments with the writes.
    """
    readers, seen = Counter(reads), set()
    for n, row in enumerate(writes):
        for i, slot in enumerate(row):
            if not 0 <= slot < num_slots:
                continue
            if slot in seen:
                raise ValueError(f"{names} must be distinct, got slot {slot} twice")
            seen.add(slot)
            is_own = i < num_own and slot == reads[n] and readers[slot] == 1
            if slot in readers and not is_own:
                raise ValueError(
                    f"{names} must not be read in the same call, got slot {slot}, written "
                    f"by {n} and also read"
                )


def _tile_rows(
    tiles: Sequence[tuple[_Sequence, int]], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rows of each tile [n, 16], and which of them belong to its sequence."""
    first = torch.tensor([[s.start + begin] for s, begin in tiles], device=device)
    count = torch.tensor([[s.length - begin] for s, begin in tiles], device=device)
    row = torch.arange(CHUNK, device=device)
    return first + row, row < count


def _gather(x: Tensor, rows: Tensor, is_row: Tensor) -> Tensor:
    """Tiles [n, 16, ..] of packed rows; no row of the sequence: 0, whatever lies there."""
    tiles = _work(x[rows.clamp(max=x.shape[0] - 1)])
    return torch.where(is_row[(..., *(None,) * (x.ndim - 1))], tiles, 0)


def _read_slot(pool: Tensor, slot: int) -> Tensor:
    return pool[slot] if slot >= 0 else pool.new_zeros(pool.shape[1:])


def _write_slot(pool: Tensor, slot: int, value: Tensor) -> None:
    if slot >= 0:
        pool[slot] = value


def _export(pool: Tensor, sequence: _Sequence, done: int, state: Tensor) -> None:
    """Writes what is due after `done` tokens: the checkpoints there, and the final state."""
    for offset, slot in sequence.exports:
        if offset == done:
            _write_slot(pool, slot, state)
    if done >= sequence.length:
        _write_slot(pool, sequence.final, state)


def _write_slots(pool: Tensor, slots: Tensor, values: Tensor) -> None:
    """pool[slots] = values where the slot exists."""
    if not pool.is_cpu:
        write_slots_unread(pool, slots, values)
        return
    is_slot = (slots >= 0) & (slots < pool.shape[0])
    pool[slots[is_slot].long()] = values[is_slot].to(pool.dtype)


def write_slots_unread(pool: Tensor, slots: Tensor, values: Tensor) -> None:
    """pool[slots] = values where the slot exists, without reading the device.

    The others repeat the first write that is valid; where none is, slot 0 gets its own value back.
    """
    if slots.numel() == 0:
        return
    is_slot = (slots >= 0) & (slots < pool.shape[0])
    first = is_slot.int().argmax(0, keepdim=True)  # an index of one dim: one of none would be read
    has_one = is_slot[first]
    spare_slot = torch.where(has_one, slots[first], 0)
    wide, values = (..., *(None,) * (pool.ndim - 1)), values.to(pool.dtype)
    spare = torch.where(has_one[wide], values[first], pool[spare_slot.long()])
    target = torch.where(is_slot, slots, spare_slot).long()
    pool.index_put_((target,), torch.where(is_slot[wide], values, spare))
