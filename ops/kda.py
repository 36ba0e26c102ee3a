"""Kimi Delta Attention: prefill of packed sequences in chunks, and decode of one step's rows."""

import functools
import math
from typing import Any

from torch import Tensor

from . import reference
from .kda_checks import check_decode, check_prefill
from .library import check_starts, define_op, is_traced


def kda_prefill(
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
    """Runs N packed sequences through the recurrence; states come from and go to slots of a pool.

        S <- S diag(exp(g))
        S <- S + beta (v - S k) k^T
        o  = scale S q

    with q, k L2-normalised, beta = sigmoid(beta_logit) and the log decay g, [HV, K] a token, by one
    of two gates: lower_bound * sigmoid(exp(A_log) * (g_raw + dt_bias)), or without a lower_bound
    -exp(A_log) * softplus(g_raw + dt_bias).

    T rows, N sequences, H query/key heads, HV value heads (HV % H == 0), K key dim, V value dim,
    E checkpoint entries. N, E and T are capacities: padding is told by the values below.

    Args:
        q, k: [T, H, K] bf16. After conv and SiLU, not normalised. Last two dims contiguous, any
            stride between rows; on CUDA each row 16-byte aligned.
        v: [T, HV, V] bf16, likewise.
        g_raw: [T, HV, K] bf16, likewise. Gate before bias and activation.
        beta_logit: [T, HV] bf16. Before the sigmoid. Last dim contiguous.
        A_log: [HV] fp32.
        dt_bias: [HV, K] fp32.
        state_pool: [slots, HV, V, K] fp32, V first, each slot contiguous; slots don't overlap,
            which on CUDA nobody checks. Written at final_slots and checkpoint_slots.
        cu_seqlens: [N+1] int32. Start of each sequence, and the end <= T; its last may repeat.
            Sequences may be empty: their final state is their initial state.
        initial_slots: [N] int32. State read. -1: zeros. Sequences may share one.
        final_slots: [N] int32. State written after the last token. -1: none. May be the sequence's
            own initial slot; else the slots written in a call are distinct, and not read in it.
        checkpoint_indptr: [N+1] int32. Entries of sequence n are indptr[n]..indptr[n+1].
        checkpoint_offsets: [E] int32. Tokens from the sequence's start in this call: multiples of
            16 in 1..length, none below the one before. Of equal ones each writes its slot. Any
            other entry is skipped.
        checkpoint_slots: [E] int32. State written after that many tokens. -1: skipped.
        lower_bound: Floor of g, in [-5, 0). None: the softplus gate, which has none.
        scale: Of q, finite. Default: K ** -0.5.

    A slot outside [0, slots) acts as -1. The three checkpoint tensors come together or not at all.
    On a CPU all bf16 may be fp32, or all tensors of floats float64, and K and V are free.

    For inference: there is no gradient. An eager call on CUDA returns an o that requires none;
    elsewhere torch records a graph on o and the pool whose backward warns, fails or brings nothing.
    Call it under `torch.no_grad()` where an argument requires a gradient.

    Returns:
        o: [T, HV, V] of q's dtype. Rows from cu_seqlens[-1] on are 0.

    Raises:
        ValueError: a shape, dtype, stride, device or number is not as above, or no Tensor comes
            where one must; on a CPU also cu_seqlens, checkpoint_indptr, or slots that clash.
        NotImplementedError: on CUDA, K or V other than 128, a dtype other than bf16, or more than
            4096 sequences.

    Source: Kimi Linear (arXiv 2510.26692). Reference: `ops.reference.kda_prefill_ref`.
    """
    # on CUDA the compiled call checks, at no cost; these come when it has found something
    if not ((isinstance(q, Tensor) and q.is_cuda) or is_traced()):
        check_prefill(
            q, k, v, g_raw, beta_logit, A_log, dt_bias, state_pool,
            cu_seqlens, initial_slots, final_slots,
            checkpoint_indptr, checkpoint_offsets, checkpoint_slots,
            lower_bound=lower_bound, scale=scale,
        )  # fmt: skip
    return _kda_prefill(
        q, k, v, g_raw, beta_logit, A_log, dt_bias, state_pool,
        cu_seqlens, initial_slots, final_slots,
        checkpoint_indptr, checkpoint_offsets, checkpoint_slots,
        lower_bound=lower_bound, scale=scale,
    )  # fmt: skip


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
    lower_bound: float | None = None,
    scale: float | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """One or a few tokens of each row: conv, recurrence, gated norm; each token's slot is written.

        q, k, v = SiLU(conv(qkv))
        S, o    = the step of `kda_prefill`
        out     = RMSNorm(o) * norm_weight * sigmoid(gate)

    D rows of M tokens each, M = 1 + number of draft tokens; the M tokens of a row are consecutive.
    H query/key heads, HV value heads (HV % H == 0), K key dim, V value dim, C = 2 H K + HV V.

    Args:
        qkv: [D*M, C] bf16. Projections before the conv, packed q|k|v. Last dim contiguous.
        g_raw: [D*M, HV, K] bf16. Gate before bias and activation. Last two dims contiguous.
        beta_logit: [D*M, HV] bf16. Before the sigmoid. Last dim contiguous.
        gate: [D*M, HV, V] bf16. Output gate before the sigmoid. Last two dims contiguous.
        conv_weight: [C, 4] bf16, the oldest input's first.
        A_log: [HV] fp32.
        dt_bias: [HV, K] fp32.
        norm_weight: [V] bf16.
        state_pool: [slots, HV, V, K] fp32, V first, each slot contiguous; slots don't overlap.
            Written at dst_slots.
        conv_pool: [slots, 3, C] bf16, oldest first, raw inputs, each slot contiguous. Likewise.
        src_slots: [D] int32. State and window read. -1 is a padding row: nothing is read or
            written, its output is 0.
        dst_slots: [D, M] int32. Slot written after each token. -1: none. May be the row's own
            source; else the slots written in a call are distinct, and not read in it.
        num_tokens: [D] int32. Tokens of the row that are real, the first ones; the others write
            nothing and their output is 0. None: all.
        lower_bound, scale: As in `kda_prefill`.
        eps: Of the norm, > 0.

    A slot outside [0, slots) acts as -1. On a CPU all bf16 may be fp32, or all tensors of floats
    float64, and K and V are free. There is no gradient: as `kda_prefill` says.

    Returns:
        out: [D*M, HV*V] of qkv's dtype.

    Raises:
        ValueError: a shape, dtype, stride, device or number is not as above, or no Tensor comes
            where one must; on a CPU also slots that clash.
        NotImplementedError: on CUDA, K or V other than 128, or a dtype other than bf16.

    Source: Kimi Linear (arXiv 2510.26692). Reference: `ops.reference.kda_decode_ref`.
    """
    tensors = (
        *(qkv, g_raw, beta_logit, gate, conv_weight, A_log, dt_bias, norm_weight),
        *(state_pool, conv_pool, src_slots, dst_slots, num_tokens),
    )
    if not is_traced():
        check_decode(*tensors, lower_bound=lower_bound, scale=scale, eps=eps)
    scale = state_pool.shape[-1] ** -0.5 if scale is None else scale
    return _kda_decode(*tensors, lower_bound=lower_bound, scale=scale, eps=eps)


def _kda_prefill_cpu(*tensors: Any, lower_bound: float | None, scale: float | None) -> Tensor:
    check_starts("kda_prefill", "cu_seqlens", tensors[8], tensors[0].shape[0])
    if (indptr := tensors[11]) is not None:
        check_starts("kda_prefill", "checkpoint_indptr", indptr, tensors[13].shape[0])
    return reference.kda_prefill_ref(*tensors, lower_bound=lower_bound, scale=scale)


def _kda_prefill_cuda(*tensors: Any, lower_bound: float | None, scale: float | None) -> Tensor:
    try:
        if scale is None:
            scale = tensors[0].shape[-1] ** -0.5
        elif not math.isfinite(scale):
            raise ValueError("kda_prefill: scale is not finite")
        return _cuda().kda_prefill(*tensors, lower_bound=lower_bound, scale=scale)
    except (ValueError, TypeError, AttributeError, IndexError, ArithmeticError):
        # says what was wrong in the op's words
        check_prefill(*tensors, lower_bound=lower_bound, scale=scale)
        raise


@functools.cache
def _cuda() -> Any:
    from ..cute_kernels import kda_prefill

    return kda_prefill


def _kda_decode_cuda(*tensors: Any, lower_bound: float | None, scale: float, eps: float) -> Tensor:
    from .triton.decode import kda_decode

    return kda_decode(*tensors, lower_bound=lower_bound, scale=scale, eps=eps)


def _kda_prefill_fake(*tensors: Any, lower_bound: float | None, scale: float | None) -> Tensor:
    check_prefill(*tensors, lower_bound=lower_bound, scale=scale)
    v = tensors[2]
    return v.new_empty(v.shape)


def _kda_decode_fake(*tensors: Any, lower_bound: float | None, scale: float, eps: float) -> Tensor:
    check_decode(*tensors, lower_bound=lower_bound, scale=scale, eps=eps)
    qkv, gate = tensors[0], tensors[3]
    return qkv.new_empty(qkv.shape[0], gate.shape[1] * gate.shape[2])


_kda_prefill = define_op(
    "kda_prefill(Tensor q, Tensor k, Tensor v, Tensor g_raw, Tensor beta_logit, Tensor A_log, "
    "Tensor dt_bias, Tensor(a!) state_pool, Tensor cu_seqlens, Tensor initial_slots, "
    "Tensor final_slots, Tensor? checkpoint_indptr, Tensor? checkpoint_offsets, "
    "Tensor? checkpoint_slots, *, float? lower_bound, float? scale) -> Tensor",
    cpu=_kda_prefill_cpu,
    cuda=_kda_prefill_cuda,
    fake=_kda_prefill_fake,
)
_kda_decode = define_op(
    "kda_decode(Tensor qkv, Tensor g_raw, Tensor beta_logit, Tensor gate, Tensor conv_weight, "
    "Tensor A_log, Tensor dt_bias, Tensor norm_weight, Tensor(a!) state_pool, "
    "Tensor(b!) conv_pool, Tensor src_slots, Tensor dst_slots, Tensor? num_tokens, *, "
    "float? lower_bound, float scale, float eps) -> Tensor",
    cpu=reference.kda_decode_ref,
    cuda=_kda_decode_cuda,
    fake=_kda_decode_fake,
)
