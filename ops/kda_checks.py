"""What the KDA ops ask of their arguments."""

import torch
from torch import Tensor

from .library import (
    FLOATS,
    INT,
    check_apart,
    check_csr,
    check_device,
    check_eps,
    check_inner,
    check_number,
    check_tensor,
    require,
    wide_dtype,
)

MAX_SEQUENCES = 4096  # of a call on CUDA: one CTA puts all of them in order


def check_prefill(
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
    checkpoint_indptr: Tensor | None,
    checkpoint_offsets: Tensor | None,
    checkpoint_slots: Tensor | None,
    *,
    lower_bound: float | None,
    scale: float | None,
) -> None:
    """Raises what `kda_prefill` says it raises; the one below likewise."""
    op, dims = "kda_prefill", {}
    check_tensor(op, "q", q, "T H K", FLOATS, dims)
    dtype, wide = q.dtype, wide_dtype(q)
    check_tensor(op, "k", k, "T H K", dtype, dims)
    check_tensor(op, "v", v, "T HV V", dtype, dims)
    check_tensor(op, "g_raw", g_raw, "T HV K", dtype, dims)
    check_tensor(op, "beta_logit", beta_logit, "T HV", dtype, dims)
    check_tensor(op, "A_log", A_log, "HV", wide, dims)
    check_tensor(op, "dt_bias", dt_bias, "HV K", wide, dims)
    check_tensor(op, "state_pool", state_pool, "slots HV V K", wide, dims)
    check_tensor(op, "initial_slots", initial_slots, "N", INT, dims)
    check_tensor(op, "final_slots", final_slots, "N", INT, dims)
    check_tensor(op, "cu_seqlens", cu_seqlens, "N+1", INT, dims)
    csr = check_csr(op, checkpoint_indptr, checkpoint_offsets, checkpoint_slots, dims)
    require(dims["H"] >= 1, op, "q", "[T, H, K] with H >= 1", list(q.shape))
    require(dims["HV"] % dims["H"] == 0, op, "v", f"of HV % H={dims['H']} == 0", dims["HV"])
    rows = {"q": q, "k": k, "v": v, "g_raw": g_raw}
    for name, x in rows.items():
        check_inner(op, name, x, 2)
    small = {"A_log": A_log, "dt_bias": dt_bias}
    lists = {"cu_seqlens": cu_seqlens, "initial_slots": initial_slots, "final_slots": final_slots}
    for name, x in (small | lists | csr).items():
        if x is not None:
            check_inner(op, name, x, x.ndim)
    check_inner(op, "beta_logit", beta_logit, 1)
    check_inner(op, "state_pool", state_pool, 3)
    check_apart(op, "state_pool", state_pool)
    pool = {"beta_logit": beta_logit, "state_pool": state_pool}
    check_device(op, rows | pool | small | lists | csr)
    _check_numbers(op, lower_bound, scale)
    if q.is_cuda:
        _check_cuda(op, dims["K"], dims["V"], q.dtype)
        _check_sequences(op, dims["N"])
        for name, x in rows.items():
            _check_aligned(op, name, x, 8)
        _check_aligned(op, "state_pool", state_pool, 4)


def check_decode(
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
    num_tokens: Tensor | None,
    *,
    lower_bound: float | None,
    scale: float | None,
    eps: float,
) -> None:
    op, dims = "kda_decode", {}
    check_tensor(op, "qkv", qkv, "D*M C", FLOATS, dims)
    dtype, wide = qkv.dtype, wide_dtype(qkv)
    check_tensor(op, "dst_slots", dst_slots, "D M", INT, dims)
    check_tensor(op, "src_slots", src_slots, "D", INT, dims)
    dims["D*M"] = dims["D"] * dims["M"]
    check_tensor(op, "qkv", qkv, "D*M C", dtype, dims)
    check_tensor(op, "state_pool", state_pool, "slots HV V K", wide, dims)
    check_tensor(op, "g_raw", g_raw, "D*M HV K", dtype, dims)
    check_tensor(op, "beta_logit", beta_logit, "D*M HV", dtype, dims)
    check_tensor(op, "gate", gate, "D*M HV V", dtype, dims)
    check_tensor(op, "conv_weight", conv_weight, "C 4", dtype, dims)
    check_tensor(op, "A_log", A_log, "HV", wide, dims)
    check_tensor(op, "dt_bias", dt_bias, "HV K", wide, dims)
    check_tensor(op, "norm_weight", norm_weight, "V", dtype, dims)
    check_tensor(op, "conv_pool", conv_pool, "slots 3 C", dtype, dims)
    if num_tokens is not None:
        check_tensor(op, "num_tokens", num_tokens, "D", INT, dims)
    C, HV, V, K = (dims[letter] for letter in ("C", "HV", "V", "K"))
    H = (C - HV * V) // (2 * K)
    fits = H > 0 and C == 2 * H * K + HV * V and HV % H == 0
    require(fits, op, "qkv", f"[D*M, 2*H*K + HV*V] with {HV=}, {V=}, {K=}, HV % H == 0", f"C={C}")
    weights = {"conv_weight": conv_weight, "A_log": A_log, "dt_bias": dt_bias}
    weights |= {"norm_weight": norm_weight}
    lists = {"src_slots": src_slots, "dst_slots": dst_slots, "num_tokens": num_tokens}
    for name, x in (weights | lists).items():
        if x is not None:
            check_inner(op, name, x, x.ndim)
    rows = {"qkv": qkv, "g_raw": g_raw, "beta_logit": beta_logit, "gate": gate}
    pools = {"state_pool": state_pool, "conv_pool": conv_pool}
    for name, x in (rows | pools).items():
        check_inner(op, name, x, x.ndim - 1)
    for name, x in pools.items():
        check_apart(op, name, x)
    check_device(op, rows | weights | pools | lists)
    _check_numbers(op, lower_bound, scale)
    check_eps(op, eps)
    if qkv.is_cuda:
        _check_cuda(op, K, V, qkv.dtype)


def _check_numbers(op: str, lower_bound: float | None, scale: float | None) -> None:
    if lower_bound is not None:
        expected = "in [-5, 0) or None"
        check_number(op, "lower_bound", lower_bound, expected)
        require(-5 <= lower_bound < 0, op, "lower_bound", expected, lower_bound)
    if scale is not None:
        check_number(op, "scale", scale)


def _check_cuda(op: str, K: int, V: int, dtype: torch.dtype) -> None:
    if K != 128 or V != 128 or dtype != torch.bfloat16:
        got = f"K={K}, V={V} in {str(dtype).removeprefix('torch.')}"
        raise NotImplementedError(f"{op}: on CUDA K = V = 128 in bfloat16 is built, got {got}")


def _check_sequences(op: str, N: int) -> None:
    if N > MAX_SEQUENCES:
        expected = f"on CUDA up to {MAX_SEQUENCES} sequences are built"
        raise NotImplementedError(f"{op}: {expected}, got cu_seqlens for {N}; split the call")


def _check_aligned(op: str, name: str, x: Tensor, elements: int) -> None:
    """16-byte loads of rows: strides of whole loads, and a base that is no odd slice."""
    is_aligned = x.stride(0) % elements == 0 and x.storage_offset() % elements == 0
    got = f"row stride {x.stride(0)}, offset {x.storage_offset()}"
    expected = f"16-byte aligned in each row (multiples of {elements} elements)"
    require(is_aligned, op, name, expected, got)
