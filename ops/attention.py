"""Multi-head latent attention (MLA) without rotation, over a paged cache of latents."""

from typing import Any

import torch
from torch import Tensor

from . import reference
from .library import (
    FLOATS,
    INT,
    check_count,
    check_device,
    check_inner,
    check_number,
    check_starts,
    check_tensor,
    define_op,
    is_traced,
    require,
)


def mla_store(latent: Tensor, kv_pool: Tensor, slot_mapping: Tensor) -> None:
    """Writes the latents of new tokens into the cache.

        kv_pool[slot_mapping[m] // block_size, slot_mapping[m] % block_size] = latent[m]

    M tokens, W = R + P: R latent channels (after their norm), then P shared key channels.

    Args:
        latent: [M, W] bf16, fp32 or float64. Last dim contiguous.
        kv_pool: [num_blocks, block_size, W] of the same dtype, contiguous. Written.
        slot_mapping: [M] int32. Distinct places; one outside the pool, such as -1: not written.

    Raises:
        ValueError: a shape, dtype, stride or device is not as above.

    Reference: `ops.reference.mla_store_ref`.
    """
    if not is_traced():
        _check_store(latent, kv_pool, slot_mapping)
    _mla_store(latent, kv_pool, slot_mapping)


def mla_decode(
    q: Tensor,
    kv_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
    num_tokens_per_row: int = 1,
) -> Tensor:
    """Attention of the last tokens of D rows, in the space of the latents.

        o = softmax(scale * q latents^T) latents[:, :R]

    D rows of M tokens, Hq heads, R = kv_lora_rank, W = R + P channels of the cache. Token j of a
    row is at position seq_len - M + j and sees what is not after it, itself included.

    Args:
        q: [D*M, Hq, W] bf16, fp32 or float64. Absorbed: q_nope W_uk | q_pe. Last two dims
            contiguous.
        kv_pool: [num_blocks, block_size, W] of the same dtype, contiguous. The M tokens are stored.
        block_table: [D, max_blocks] int32. Blocks of each row in order; unused ones: anything.
        seq_lens: [D] int32. Tokens of each row, the M included, <= max_blocks * block_size. 0 is a
            padding row: output 0.
        scale: Of the scores: (N + P) ** -0.5 with N the key channels that W_uk absorbed.
        kv_lora_rank: R.
        num_tokens_per_row: M.

    Returns:
        o: [D*M, Hq, R] of q's dtype; the caller applies W_uv.

    Raises:
        ValueError: a shape, dtype, stride, device or number is not as above; on a CPU also
            seq_lens, or a block that is used.

    Reference: `ops.reference.mla_decode_ref`.
    """
    if not is_traced():
        _check_decode(q, kv_pool, block_table, seq_lens, scale, kv_lora_rank, num_tokens_per_row)
    return _mla_decode(
        *(q, kv_pool, block_table, seq_lens),
        scale=scale,
        kv_lora_rank=kv_lora_rank,
        num_tokens_per_row=num_tokens_per_row,
    )


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
) -> Tensor:
    """Causal attention of N packed sequences; keys and values are made from their cached latents.

        k_nope, v = kv_b_weight latents[:, :R]
        o = softmax(scale * q [k_nope | latents[:, R:]]^T) v

    T rows, Hq heads, N_k unrotated key channels + P shared ones, Vh = v_head_dim. A sequence of L
    rows here and seq_len tokens in the cache has its rows at positions seq_len - L .. seq_len - 1.

    Args:
        q: [T, Hq, N_k+P] bf16, fp32 or float64. Last two dims contiguous.
        kv_pool: [num_blocks, block_size, R+P] of the same dtype, contiguous; all tokens are stored.
        kv_b_weight: [Hq*(N_k+Vh), R] of the same dtype; of a head: N_k key, then Vh value rows.
        cu_seqlens: [N+1] int32. Start of each sequence, and the end <= T; its last may repeat.
        block_table: [N, max_blocks] int32. Blocks of each sequence in order; unused ones: anything.
        seq_lens: [N] int32, >= the rows here, and <= max_blocks * block_size if there are any.
            Padding: 0.
        scale: Of the scores: (N_k + P) ** -0.5.
        v_head_dim: Vh.

    Returns:
        o: [T, Hq, Vh] of q's dtype. Rows from cu_seqlens[-1] on are 0.

    Raises:
        ValueError: a shape, dtype, stride, device or number is not as above; on a CPU also
            cu_seqlens, seq_lens, or a block that is used.

    Reference: `ops.reference.mla_prefill_ref`.
    """
    tensors = (q, kv_pool, kv_b_weight, cu_seqlens, block_table, seq_lens)
    if not is_traced():
        _check_prefill(*tensors, scale, v_head_dim)
    return _mla_prefill(*tensors, scale=scale, v_head_dim=v_head_dim)


def _check_store(latent: Tensor, kv_pool: Tensor, slot_mapping: Tensor) -> None:
    op, dims = "mla_store", {}
    check_tensor(op, "latent", latent, "M W", FLOATS, dims)
    check_tensor(op, "kv_pool", kv_pool, "num_blocks block_size W", latent.dtype, dims)
    check_tensor(op, "slot_mapping", slot_mapping, "M", INT, dims)
    check_inner(op, "latent", latent, 1)
    check_inner(op, "kv_pool", kv_pool, 3)
    check_inner(op, "slot_mapping", slot_mapping, 1)
    check_device(op, {"latent": latent, "kv_pool": kv_pool, "slot_mapping": slot_mapping})


def _check_decode(
    q: Tensor,
    kv_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_lora_rank: int,
    num_tokens_per_row: int,
) -> None:
    op, dims = "mla_decode", {}
    check_count(op, "num_tokens_per_row", num_tokens_per_row)
    require(num_tokens_per_row >= 1, op, "num_tokens_per_row", ">= 1", num_tokens_per_row)
    check_tensor(op, "seq_lens", seq_lens, "D", INT, dims)
    dims["D*M"] = dims["D"] * num_tokens_per_row
    check_tensor(op, "q", q, "D*M Hq W", FLOATS, dims)
    check_tensor(op, "kv_pool", kv_pool, "num_blocks block_size W", q.dtype, dims)
    check_tensor(op, "block_table", block_table, "D max_blocks", INT, dims)
    check_count(op, "kv_lora_rank", kv_lora_rank)
    is_right = 0 < kv_lora_rank <= dims["W"]
    require(is_right, op, "kv_lora_rank", f"in 1..W={dims['W']}", kv_lora_rank)
    check_number(op, "scale", scale)
    _check_layout(op, q, kv_pool, {"block_table": block_table, "seq_lens": seq_lens})


def _check_prefill(
    q: Tensor,
    kv_pool: Tensor,
    kv_b_weight: Tensor,
    cu_seqlens: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    v_head_dim: int,
) -> None:
    op, dims = "mla_prefill", {}
    check_tensor(op, "q", q, "T Hq N_k+P", FLOATS, dims)
    check_tensor(op, "kv_pool", kv_pool, "num_blocks block_size R+P", q.dtype, dims)
    check_tensor(op, "kv_b_weight", kv_b_weight, "Hq*(N_k+Vh) R", q.dtype, dims)
    check_tensor(op, "seq_lens", seq_lens, "N", INT, dims)
    check_tensor(op, "cu_seqlens", cu_seqlens, "N+1", INT, dims)
    check_tensor(op, "block_table", block_table, "N max_blocks", INT, dims)
    P = dims["R+P"] - dims["R"]
    N_k = dims["N_k+P"] - P
    require(P >= 0, op, "kv_b_weight", f"[.., R <= R+P={dims['R+P']}]", f"R={dims['R']}")
    require(N_k >= 0, op, "q", f"[T, Hq, N_k + P={P}]", list(q.shape))
    check_count(op, "v_head_dim", v_head_dim)
    check_number(op, "scale", scale)
    rows = dims["Hq"] * (N_k + v_head_dim)
    expected = f"[Hq*(N_k+Vh)={rows}, R]"
    require(kv_b_weight.shape[0] == rows, op, "kv_b_weight", expected, list(kv_b_weight.shape))
    lists = {"cu_seqlens": cu_seqlens, "block_table": block_table, "seq_lens": seq_lens}
    _check_layout(op, q, kv_pool, {"kv_b_weight": kv_b_weight} | lists)


def _check_layout(op: str, q: Tensor, kv_pool: Tensor, others: dict[str, Tensor]) -> None:
    check_inner(op, "q", q, 2)
    for name, x in ({"kv_pool": kv_pool} | others).items():
        check_inner(op, name, x, x.ndim)
    check_device(op, {"q": q, "kv_pool": kv_pool} | others)


def _check_cached(
    op: str,
    kv_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    rows: Tensor,
    *,
    padding: str = "",
) -> None:
    """Checks the values of seq_lens, and those of block_table that will be looked up.

    A sequence without rows looks up nothing. For the CPU implementations, as `check_starts`.

    padding: What else seq_lens may be, for the message.
    """
    (num_blocks, block_size), max_blocks = kv_pool.shape[:2], block_table.shape[1]
    capacity = max_blocks * block_size
    for n, (least, length) in enumerate(zip(rows.tolist(), seq_lens.tolist(), strict=True)):
        if length < least or (least > 0 and length > capacity):
            expected = f"{padding}>= the {least} rows here"
            if least > 0:
                expected += f" and <= max_blocks * block_size = {capacity}"
            raise ValueError(f"{op}: seq_lens must be {expected}, got seq_lens[{n}] = {length}")
    begins = block_size * torch.arange(max_blocks)
    is_used = begins < torch.where(rows > 0, seq_lens, 0)[:, None]
    is_wrong = is_used & ((block_table < 0) | (block_table >= num_blocks))
    if is_wrong.any():
        n, i = is_wrong.nonzero()[0].tolist()
        expected = f"in [0, num_blocks={num_blocks}) for the first {int(seq_lens[n])} tokens"
        got = f"block_table[{n}, {i}] = {int(block_table[n, i])}"
        raise ValueError(f"{op}: block_table must be {expected}, got {got}")


def mla_decode_padded(
    q: Tensor,
    kv_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    kv_lora_rank: int,
    num_tokens_per_row: int,
) -> Tensor:
    """`mla_decode` over the whole capacity of each row, so that no length is read on the host."""
    D, M = seq_lens.shape[0], num_tokens_per_row
    latents = kv_pool[block_table.clamp(0, kv_pool.shape[0] - 1).long()].flatten(1, 2)
    place = torch.arange(latents.shape[1], device=q.device)
    latents = torch.where((place < seq_lens[:, None])[..., None], latents.float(), 0)
    queries = q.float().unflatten(0, (D, M))
    scores = scale * torch.einsum("dmhw,dsw->dmhs", queries, latents)
    last = seq_lens[:, None] - M + torch.arange(M, device=q.device)
    is_later = place > last[..., None]
    weights = scores.masked_fill(is_later[:, :, None], float("-inf")).softmax(-1)
    o = torch.einsum("dmhs,dsr->dmhr", weights, latents[..., :kv_lora_rank])
    return torch.where((last >= 0)[..., None, None], o, 0).flatten(0, 1).to(q.dtype)


def _mla_store_cuda(latent: Tensor, kv_pool: Tensor, slot_mapping: Tensor) -> None:
    from .triton.latents import mla_store

    mla_store(latent, kv_pool, slot_mapping)


def _mla_decode_cpu(*tensors: Tensor, **sizes: Any) -> Tensor:
    _, kv_pool, block_table, seq_lens = tensors
    rows = sizes["num_tokens_per_row"] * (seq_lens != 0)  # none of a padding row
    _check_cached("mla_decode", kv_pool, block_table, seq_lens, rows, padding="0 or ")
    return reference.mla_decode_ref(*tensors, **sizes)


def _mla_decode_cuda(*tensors: Tensor, **sizes: Any) -> Tensor:
    if not _has_kernel(tensors[1], sizes["kv_lora_rank"]):
        return mla_decode_padded(*tensors, **sizes)
    from .triton.latent_decode import mla_decode

    return mla_decode(*tensors, **sizes)


def _mla_prefill_cpu(*tensors: Tensor, **sizes: Any) -> Tensor:
    q, kv_pool, _, cu_seqlens, block_table, seq_lens = tensors
    check_starts("mla_prefill", "cu_seqlens", cu_seqlens, q.shape[0])
    _check_cached("mla_prefill", kv_pool, block_table, seq_lens, cu_seqlens.diff())
    return reference.mla_prefill_ref(*tensors, **sizes)


def _mla_prefill_cuda(*tensors: Tensor, **sizes: Any) -> Tensor:
    if not _has_kernel(tensors[1], tensors[2].shape[1]):
        return reference.mla_prefill_ref(*tensors, **sizes)
    from .triton.latent_prefill import mla_prefill

    return mla_prefill(*tensors, **sizes)


def _has_kernel(kv_pool: Tensor, kv_lora_rank: int) -> bool:
    """bf16 in whole 16-byte pieces: Triton 3.6 took rows of 40 bytes for aligned, too."""
    is_aligned = kv_pool.shape[2] % 8 == 0 and kv_lora_rank % 8 == 0
    return kv_pool.dtype == torch.bfloat16 and is_aligned


def _mla_store_fake(latent: Tensor, kv_pool: Tensor, slot_mapping: Tensor) -> None:
    _check_store(latent, kv_pool, slot_mapping)


def _mla_decode_fake(
    *tensors: Tensor, scale: float, kv_lora_rank: int, num_tokens_per_row: int
) -> Tensor:
    q, kv_pool, block_table, seq_lens = tensors
    _check_decode(q, kv_pool, block_table, seq_lens, scale, kv_lora_rank, num_tokens_per_row)
    return q.new_empty(q.shape[0], q.shape[1], kv_lora_rank)


def _mla_prefill_fake(*tensors: Tensor, scale: float, v_head_dim: int) -> Tensor:
    q, kv_pool, kv_b_weight, cu_seqlens, block_table, seq_lens = tensors
    _check_prefill(q, kv_pool, kv_b_weight, cu_seqlens, block_table, seq_lens, scale, v_head_dim)
    return q.new_empty(q.shape[0], q.shape[1], v_head_dim)


_mla_store = define_op(
    "mla_store(Tensor latent, Tensor(a!) kv_pool, Tensor slot_mapping) -> ()",
    cpu=reference.mla_store_ref,
    cuda=_mla_store_cuda,
    fake=_mla_store_fake,
)
_mla_decode = define_op(
    "mla_decode(Tensor q, Tensor kv_pool, Tensor block_table, Tensor seq_lens, *, float scale, "
    "SymInt kv_lora_rank, SymInt num_tokens_per_row) -> Tensor",
    cpu=_mla_decode_cpu,
    cuda=_mla_decode_cuda,
    fake=_mla_decode_fake,
)
_mla_prefill = define_op(
    "mla_prefill(Tensor q, Tensor kv_pool, Tensor kv_b_weight, Tensor cu_seqlens, "
    "Tensor block_table, Tensor seq_lens, *, float scale, SymInt v_head_dim) -> Tensor",
    cpu=_mla_prefill_cpu,
    cuda=_mla_prefill_cuda,
    fake=_mla_prefill_fake,
)
