"""What `bench_around` times: inputs of the ops around prefill, at the sizes of real models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import activations, attention, conv, kda, moe, norms, reference

Inputs = dict[str, Any]

HEADS = 32  # Kimi-Linear, unless a cell says otherwise
RANK, SHARED, KEY, VALUE = 512, 64, 128, 128  # of its latent attention
BLOCK_SIZE = 64
MAX_TOKENS = 131072  # room in a block table
EXPERTS, CHOICES, HIDDEN, EXPERT_HIDDEN = 256, 8, 2304, 1024


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    op: str
    name: str
    make: Callable[[torch.Generator], Inputs]
    num_bytes: Callable[[Inputs], float]  # that must move, each once
    flops: float = 0.0  # of tensor cores, without what is recomputed


@dataclass(frozen=True)
class Op:
    """An op, its reference, and the relative RMS error against float64 up to which it is timed."""

    call: Callable[..., Tensor | None]
    reference: Callable[..., Tensor | None]
    limit: float


# the attention and the experts also round weights and hidden channels to bf16 on their way
OPS = {
    "kda_decode": Op(kda.kda_decode, reference.kda_decode_ref, 4.5e-3),
    "causal_conv_prefill": Op(conv.causal_conv_prefill, reference.causal_conv_prefill_ref, 3e-3),
    "gated_rms_norm": Op(norms.gated_rms_norm, reference.gated_rms_norm_ref, 3e-3),
    "rms_norm": Op(norms.rms_norm, reference.rms_norm_ref, 3e-3),
    "add_rms_norm": Op(
        lambda **inputs: norms.add_rms_norm(**inputs)[1],
        lambda **inputs: reference.add_rms_norm_ref(**inputs)[1],
        4.5e-3,
    ),
    "silu_and_mul": Op(activations.silu_and_mul, reference.silu_and_mul_ref, 3e-3),
    "mla_store": Op(attention.mla_store, reference.mla_store_ref, 0.0),
    "mla_decode": Op(attention.mla_decode, reference.mla_decode_ref, 8e-3),
    "mla_prefill": Op(attention.mla_prefill, reference.mla_prefill_ref, 8e-3),
    "moe": Op(moe.moe, reference.moe_ref, 8e-3),
    # weights alone: without a bias a near tie is one of weights too, whoever is chosen
    "moe_route": Op(
        lambda **inputs: moe.moe_route(**inputs)[1],
        lambda **inputs: reference.moe_route_ref(**inputs)[1],
        1e-6,
    ),
}
POOLS = ("state_pool", "conv_pool", "kv_pool")


def randn(rng: torch.Generator, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Normal values on the device of `rng`."""
    return torch.randn(*shape, generator=rng, device=rng.device).to(dtype)


def ints(rng: torch.Generator, values: Sequence[int]) -> Tensor:
    """int32 on the device of `rng`."""
    return torch.tensor(values, dtype=torch.int32, device=rng.device)


def decode_cell(D: int, heads: int = HEADS, M: int = 1, lower_bound: float | None = -5.0) -> Cell:
    """In place for one token; a fresh slot for each of several."""

    def make(rng: torch.Generator) -> Inputs:
        C, slots = 3 * heads * 128, D if M == 1 else D * (1 + M)
        src = torch.arange(D, device=rng.device, dtype=torch.int32)
        dst = src if M == 1 else torch.arange(D, slots, device=rng.device, dtype=torch.int32)
        return {
            "qkv": randn(rng, D * M, C),
            "g_raw": randn(rng, D * M, heads, 128),
            "beta_logit": randn(rng, D * M, heads),
            "gate": randn(rng, D * M, heads, 128),
            "conv_weight": randn(rng, C, 4),
            "A_log": randn(rng, heads, dtype=torch.float32),
            "dt_bias": randn(rng, heads, 128, dtype=torch.float32),
            "norm_weight": randn(rng, 128),
            "state_pool": randn(rng, slots, heads, 128, 128, dtype=torch.float32),
            "conv_pool": randn(rng, slots, 3, C),
            "src_slots": src,
            "dst_slots": dst.view(D, M),
            "lower_bound": lower_bound,
        }

    state, window, token = 4 * 128 * 128, 2 * 3 * 3 * 128, 2 * (3 + 1 + 1 + 1) * 128
    num_bytes = D * heads * ((1 + M) * (state + window) + M * token)
    gate = "softplus" if lower_bound is None else "bounded"
    name = f"D{D} M{M} H{heads} {gate}"
    return Cell("kda_decode", name, make, lambda _: num_bytes)


def conv_cell(T: int, heads: int = HEADS, num_sequences: int = 16, entries: int = 256) -> Cell:
    """Two sequences in metadata of full capacity; rows are slices of a wider projection."""

    def make(rng: torch.Generator) -> Inputs:
        C, N = 3 * heads * 128, num_sequences
        first = T // 3 // 16 * 16
        offsets = [16 * (i + 1) for i in range(min(8, first // 16))]
        count = len(offsets)
        return {
            "x": randn(rng, T, C + 192)[:, :C],
            "weight": randn(rng, C, 4),
            "conv_pool": randn(rng, 2 + 2 * count, 3, C),
            "cu_seqlens": ints(rng, [0, first] + [T] * (N - 1)),
            "initial_slots": ints(rng, [0, 1] + [-1] * (N - 2)),
            "final_slots": ints(rng, [0, 1] + [-1] * (N - 2)),
            "checkpoint_indptr": ints(rng, [0, count] + [2 * count] * (N - 1)),
            "checkpoint_offsets": ints(rng, offsets * 2 + [0] * (entries - 2 * count)),
            "checkpoint_slots": ints(
                rng, list(range(2, 2 + 2 * count)) + [-1] * (entries - 2 * count)
            ),
        }

    return Cell("causal_conv_prefill", f"T{T} H{heads}", make, lambda x: 2 * x["x"].numel() * 2)


def norm_cell(T: int, heads: int = HEADS) -> Cell:
    """Norm after the recurrence, of T tokens."""

    def make(rng: torch.Generator) -> Inputs:
        x, gate = (randn(rng, T, heads, 128) for _ in range(2))
        return {"x": x, "gate": gate, "weight": randn(rng, 128), "eps": 1e-5}

    return Cell("gated_rms_norm", f"T{T} H{heads}", make, lambda x: 3 * x["x"].nbytes)


def row_norm_cell(M: int, *, has_residual: bool = False) -> Cell:
    """Norm of M rows of the residual stream, or of its sum with what a layer gave."""

    def make(rng: torch.Generator) -> Inputs:
        rows = {"x": randn(rng, M, HIDDEN)}
        if has_residual:
            rows["residual"] = randn(rng, M, HIDDEN)
        return rows | {"weight": randn(rng, HIDDEN), "eps": 1e-5}

    def num_bytes(x: Inputs) -> float:
        return (4 if has_residual else 2) * x["x"].nbytes + x["weight"].nbytes

    return Cell("add_rms_norm" if has_residual else "rms_norm", f"M{M}", make, num_bytes)


def silu_cell(M: int) -> Cell:
    """Middle of an expert that all M rows take."""

    def make(rng: torch.Generator) -> Inputs:
        return {"x": randn(rng, M, 2 * EXPERT_HIDDEN)}

    return Cell("silu_and_mul", f"M{M}", make, lambda x: 1.5 * x["x"].nbytes)


def store_cell(M: int) -> Cell:
    """Latents of M tokens, into places in any order."""

    def make(rng: torch.Generator) -> Inputs:
        pool = randn(rng, -(-2 * M // BLOCK_SIZE), BLOCK_SIZE, RANK + SHARED)
        places = torch.randperm(pool.shape[0] * BLOCK_SIZE, generator=rng, device=rng.device)
        latent = randn(rng, M, RANK + SHARED)
        return {"latent": latent, "kv_pool": pool, "slot_mapping": places[:M].int()}

    return Cell("mla_store", f"M{M}", make, lambda x: 2 * x["latent"].nbytes)


def paged(rng: torch.Generator, seq_lens: Sequence[int], capacity: int) -> Inputs:
    """A pool with the tokens of all sequences, its blocks in any order."""
    counts = [-(-n // BLOCK_SIZE) for n in seq_lens]
    pool = randn(rng, sum(counts), BLOCK_SIZE, RANK + SHARED)
    blocks = torch.randperm(sum(counts), generator=rng, device=rng.device).int()
    table = blocks.new_zeros(len(counts), -(-capacity // BLOCK_SIZE))
    for row, part in zip(table, blocks.split(counts), strict=True):
        row[: len(part)] = part
    return {"kv_pool": pool, "block_table": table, "seq_lens": ints(rng, seq_lens)}


def mla_decode_cell(D: int, length: int, heads: int = HEADS, M: int = 1) -> Cell:
    """D rows of M tokens, each at the end of `length` tokens."""

    def make(rng: torch.Generator) -> Inputs:
        return {
            "q": randn(rng, D * M, heads, RANK + SHARED),
            **paged(rng, [length] * D, MAX_TOKENS),
            "scale": (KEY + SHARED) ** -0.5,
            "kv_lora_rank": RANK,
            "num_tokens_per_row": M,
        }

    width = RANK + SHARED
    num_bytes = 2 * D * (length * width + M * heads * (width + RANK))
    flops = 2.0 * D * M * heads * length * (width + RANK)
    name = f"D{D} M{M} {length} tokens H{heads}"
    return Cell("mla_decode", name, make, lambda _: num_bytes, flops)


def mla_prefill_cell(
    name: str, lengths: Sequence[int], seq_lens: Sequence[int], num_sequences: int = 16
) -> Cell:
    """`lengths` new tokens, of sequences that hold `seq_lens` with them; the rest is empty."""
    padding = [0] * (num_sequences - len(lengths))

    def make(rng: torch.Generator) -> Inputs:
        starts = torch.tensor([0, *lengths, *padding]).cumsum(0).tolist()
        weight = randn(rng, HEADS * (KEY + VALUE), RANK) / RANK**0.5
        return {
            "q": randn(rng, -(-sum(lengths) // 16) * 16, HEADS, KEY + SHARED),
            "kv_b_weight": weight,
            "cu_seqlens": ints(rng, starts),
            **paged(rng, [*seq_lens, *padding], MAX_TOKENS),
            "scale": (KEY + SHARED) ** -0.5,
            "v_head_dim": VALUE,
        }

    pairs = sum(n * (s - n) + n * (n + 1) / 2 for n, s in zip(lengths, seq_lens, strict=True))
    flops = 2.0 * HEADS * (KEY + SHARED + VALUE) * pairs
    num_bytes = 2 * (
        sum(seq_lens) * (RANK + SHARED) + sum(lengths) * HEADS * (KEY + SHARED + VALUE)
    )
    return Cell("mla_prefill", name, make, lambda _: num_bytes, flops)


def moe_cell(M: int) -> Cell:
    """M rows, each to random experts."""

    def make(rng: torch.Generator) -> Inputs:
        scores = torch.rand(M, EXPERTS, generator=rng, device=rng.device)
        return {
            "x": randn(rng, M, HIDDEN),
            "w13": randn(rng, EXPERTS, 2 * EXPERT_HIDDEN, HIDDEN) / HIDDEN**0.5,
            "w2": randn(rng, EXPERTS, HIDDEN, EXPERT_HIDDEN) / EXPERT_HIDDEN**0.5,
            "topk_ids": scores.argsort(1)[:, :CHOICES].int().contiguous(),
            "topk_weights": torch.rand(M, CHOICES, generator=rng, device=rng.device),
        }

    def num_bytes(x: Inputs) -> float:
        touched = x["topk_ids"].unique().numel()
        return touched * 3 * EXPERT_HIDDEN * HIDDEN * 2 + 2 * x["x"].nbytes

    return Cell("moe", f"M{M}", make, num_bytes, 2.0 * M * CHOICES * 3 * HIDDEN * EXPERT_HIDDEN)


def route_cell(M: int) -> Cell:
    """Choice of experts for M rows; its products are counted as the three that bf16 takes."""

    def make(rng: torch.Generator) -> Inputs:
        weight = randn(rng, EXPERTS, HIDDEN, dtype=torch.float32) / HIDDEN**0.5
        return {
            "x": randn(rng, M, HIDDEN),
            "weight": weight,
            "choice_bias": torch.zeros(EXPERTS, device=rng.device),
            "num_choices": CHOICES,
            "renormalize": True,
            "scaling_factor": 2.446,
            "is_real": torch.ones(M, dtype=torch.bool, device=rng.device),
        }

    def num_bytes(x: Inputs) -> float:
        return x["x"].nbytes + x["weight"].nbytes + M * CHOICES * 8

    return Cell("moe_route", f"M{M}", make, num_bytes, 3 * 2.0 * M * EXPERTS * HIDDEN)


CELLS = (
    *(decode_cell(D) for D in (1, 8, 64, 256)),
    decode_cell(64, lower_bound=None),
    *(decode_cell(64, heads) for heads in (12, 16, 24, 48, 64, 96)),
    decode_cell(16, M=4),
    *(conv_cell(T) for T in (512, 1024, 8192)),
    *(norm_cell(T) for T in (512, 8192)),
    *(row_norm_cell(M) for M in (1, 64, 8192)),
    row_norm_cell(8192, has_residual=True),
    silu_cell(8192),
    store_cell(8192),
    *(mla_decode_cell(D, n) for D, n in ((1, 8192), (16, 8192), (64, 8192), (256, 1024))),
    mla_decode_cell(1, MAX_TOKENS),
    *(mla_decode_cell(64, 8192, heads) for heads in (12, 64, 96)),
    mla_decode_cell(16, 8192, M=4),
    mla_prefill_cell("1K", [1024], [1024]),
    mla_prefill_cell("8K", [8192], [8192]),
    mla_prefill_cell("16 x 512", [512] * 16, [512] * 16),
    mla_prefill_cell("8K after 24K", [8192], [32768]),
    mla_prefill_cell("100 after 20K", [100], [20100]),
    mla_prefill_cell("16 x 100", [100] * 16, [100] * 16),
    *(moe_cell(M) for M in (1, 16, 64, 256, 1024, 8192)),
    *(route_cell(M) for M in (1, 64, 8192)),
)
