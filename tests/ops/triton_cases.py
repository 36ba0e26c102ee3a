"""Cases of one shape with other lengths and slots for each seed: what a captured graph replays."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch_kda.tests.ops.cases import Case, decode_case, ints


def lengths_of(total: int, count: int, rng: torch.Generator) -> list[int]:
    """`count` lengths, some 0, that sum up to `total` at most."""
    cuts = torch.randint(0, total + 1, (count - 1,), generator=rng).sort().values.tolist()
    ends = [*cuts, int(torch.randint(total // 2, total + 1, (), generator=rng))]
    return [max(0, e - b) for b, e in zip([0, *cuts], ends, strict=True)]


def starts_of(lengths: Sequence[int], capacity: int) -> list[int]:
    """cu_seqlens of `capacity` sequences; those that are missing are empty."""
    starts = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    return starts + starts[-1:] * (capacity - len(lengths))


def conv_case(
    lengths: Sequence[int], rows: int, C: int, *, dtype: torch.dtype, device: str, seed: int = 0
) -> Case:
    """Sequence n reads slot n (-1 for every third) and writes it, or slot N + n for even n.

    Two sequences of padding; exports at 16, at the last multiple of 16, and some that are skipped.
    """
    rng = torch.Generator().manual_seed(seed)
    N = len(lengths)
    exports = [sorted({16, n // 16 * 16}) if n >= 16 else [16] for n in lengths]
    exports[-1] += [20, 0, 9999]
    indptr = [sum(len(e) for e in exports[:n]) for n in range(N + 1)]
    offsets = [offset for e in exports for offset in e]
    spare = 3 * N + 8 - len(offsets)
    slots = list(range(2 * N, 2 * N + len(offsets)))
    slots[0] = -1

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng).to(device, dtype)

    return {
        "x": randn(rows, C),
        "weight": randn(C, 4),
        "conv_pool": randn(5 * N + 8, 3, C),
        "cu_seqlens": ints(starts_of(lengths, N + 2), device),
        "initial_slots": ints([-1 if n % 3 == 2 else n for n in range(N)] + [-1, -1], device),
        "final_slots": ints([N + n if n % 2 == 0 else n for n in range(N)] + [-1, -1], device),
        "checkpoint_indptr": ints(indptr + indptr[-1:] * 2, device),
        # entries past indptr[-1] would write slot 0
        "checkpoint_offsets": ints(offsets + [16] * spare, device),
        "checkpoint_slots": ints(slots + [0] * spare, device),
    }


def paged_case(
    seq_lens: Sequence[int],
    W: int,
    *,
    dtype: torch.dtype,
    device: str,
    rng: torch.Generator,
    block_size: int = 16,
    max_blocks: int | None = None,
) -> Case:
    """A pool with the tokens of each sequence in blocks out of order; all else in it is NaN."""
    most = max(-(-n // block_size) for n in seq_lens) + 1
    max_blocks = max_blocks or most
    N = len(seq_lens)
    blocks = torch.randperm(N * max_blocks + 2, generator=rng)
    table = blocks[: N * max_blocks].reshape(N, max_blocks)
    pool = torch.full((len(blocks), block_size, W), float("nan"), dtype=dtype)
    for n, length in enumerate(seq_lens):
        place = torch.arange(length)
        values = torch.randn(length, W, generator=rng).to(dtype)
        pool[table[n, place // block_size], place % block_size] = values
    for n, length in enumerate(seq_lens):
        table[n, -(-length // block_size) :] = 2**30  # never looked up
    return {
        "kv_pool": pool.to(device),
        "block_table": table.to(device, torch.int32),
        "seq_lens": ints(list(seq_lens), device),
    }


def mla_decode_case(
    seq_lens: Sequence[int],
    M: int,
    heads: int,
    *,
    R: int,
    P: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    **sizes: int,
) -> Case:
    rng = torch.Generator().manual_seed(seed)
    paged = paged_case(seq_lens, R + P, dtype=dtype, device=device, rng=rng, **sizes)
    q = torch.randn(len(seq_lens) * M, heads, R + P, generator=rng).to(device, dtype)
    numbers = {"scale": (R + P) ** -0.5, "kv_lora_rank": R, "num_tokens_per_row": M}
    return {"q": q, **paged, **numbers}


def mla_prefill_case(
    lengths: Sequence[int],
    seq_lens: Sequence[int],
    heads: int,
    *,
    R: int,
    P: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    rows: int | None = None,
    **sizes: int,
) -> Case:
    rng = torch.Generator().manual_seed(seed)
    paged = paged_case(seq_lens, R + P, dtype=dtype, device=device, rng=rng, **sizes)
    T = sum(lengths) + 5 if rows is None else rows
    q = torch.randn(T, heads, K + P, generator=rng)
    weight = torch.randn(heads * (K + V), R, generator=rng) / R**0.5
    return {
        "q": q.to(device, dtype),
        "kv_b_weight": weight.to(device, dtype),
        "cu_seqlens": ints(starts_of(lengths, len(lengths)), device),
        **paged,
        "scale": (K + P) ** -0.5,
        "v_head_dim": V,
    }


def moe_case(
    M: int,
    *,
    E: int,
    k: int,
    dim: int,
    F: int,
    dtype: torch.dtype,
    device: str,
    num_shared: int = 0,
    seed: int = 0,
) -> Case:
    """Every row but one chooses k of E experts; the first choice of one does not exist."""
    rng = torch.Generator().manual_seed(seed)
    count = E + num_shared
    sizes = {"x": (M, dim), "w13": (count, 2 * F, dim), "w2": (count, dim, F)}
    tensors = {n: torch.randn(*s, generator=rng) / s[-1] ** 0.5 for n, s in sizes.items()}
    tensors["x"] *= dim**0.5
    ids = torch.rand(M, E, generator=rng).argsort(1)[:, :k].to(torch.int32)
    ids[M // 2] = -1
    ids[M // 3, 0] = E
    return {
        **{name: x.to(device, dtype) for name, x in tensors.items()},
        "topk_ids": ids.to(device),
        "topk_weights": torch.rand(M, k, generator=rng).to(device),
        "num_shared": num_shared,
    }


def drafts_case(D: int, M: int, *, seed: int = 0, **sizes: object) -> Case:
    """`decode_case` with slots in any order, rows of padding, and fewer real tokens than rows."""
    rng = torch.Generator().manual_seed(seed)
    case = decode_case(D, M, seed=seed, **sizes)  # pyright: ignore[reportArgumentType]
    slots = torch.randperm(D + D * M, generator=rng).to(torch.int32)
    src, dst = slots[:D].clone(), slots[D:].reshape(D, M).clone()
    dst[0, 0] = src[0]  # in place
    src[D // 2] = -1
    dst[D - 1, M - 1] = -1
    device = case["qkv"].device
    case["src_slots"], case["dst_slots"] = src.to(device), dst.to(device)
    count = torch.randint(0, M + 1, (D,), generator=rng)
    count[0] = M
    return case | {"num_tokens": count.to(device, torch.int32)}
