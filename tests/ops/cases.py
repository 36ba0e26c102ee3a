"""Inputs for the KDA ops, as keyword arguments, and how to run an op without losing its pools."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

Case = dict[str, Any]

# lower_bound, A_log, offset and spread of g_raw; "mixed" and "extreme" add offsets by channel
GATES = {
    "weak": (-5.0, 0.0, -8.0, 1.0),
    "strong": (-5.0, 0.5, 0.0, 2.0),
    "mixed": (-5.0, 0.0, -4.0, 1.0),
    "saturated": (-5.0, 3.0, 20.0, 1.0),
    "softplus": (None, 0.0, -2.0, 1.0),
    "extreme": (None, 2.5, 0.0, 1.0),
}
BOUNDS = {torch.float32: 1e-6, torch.bfloat16: 4.5e-3, torch.float64: 1e-13}
POOLS = ("state_pool", "conv_pool", "kv_pool")


def sizes(device: str) -> Case:
    """Small dims on a CPU, the ones that are built on CUDA."""
    if device == "cuda":
        return {"H": 2, "HV": 4, "K": 128, "V": 128, "dtype": torch.bfloat16, "device": "cuda"}
    return {"H": 2, "HV": 4, "K": 8, "V": 12, "dtype": torch.float32, "device": "cpu"}


def ints(values: Sequence[int] | Sequence[Sequence[int]], device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def gate_tensors(gates: str, rows: int, HV: int, K: int, rng: torch.Generator) -> Case:
    lower_bound, a, offset, spread = GATES[gates]
    g_raw = torch.randn(rows, HV, K, generator=rng) * spread + offset
    if gates == "mixed":
        # log decays from -5 to -1e-4 a token, by channel
        g_raw += torch.linspace(-6, 6, K)
    if gates == "extreme":
        # a few tokens and channels forget by thousands, the others hardly at all
        is_large = torch.rand(rows, HV, K, generator=rng) < 0.2
        g_raw += torch.where(is_large, 250.0, -8.0)
    A_log = a + 0.2 * torch.randn(HV, generator=rng)
    return {
        "g_raw": g_raw,
        "A_log": A_log,
        "dt_bias": 0.1 * torch.randn(HV, K, generator=rng),
        "lower_bound": lower_bound,
    }


def prefill_case(
    lengths: Sequence[int],
    *,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    device: str = "cpu",
    gates: str = "mixed",
    seed: int = 0,
    exports: Sequence[Sequence[int]] | None = None,
    rows: int | None = None,
) -> Case:
    """Arguments of `kda_prefill`, packed as in `packing`.

    exports: offsets for each sequence. Default: 16 and the last multiple of 16.
    rows: T, default: the sum of lengths and 3 padding rows.
    """
    rng = torch.Generator().manual_seed(seed)
    N, T = len(lengths), sum(lengths) + 3 if rows is None else rows

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    if exports is None:
        exports = [sorted({16, n // 16 * 16}) if n >= 16 else [] for n in lengths]
    state = {
        "q": randn(T, H, K),
        "k": randn(T, H, K),
        "v": randn(T, HV, V),
        "beta_logit": randn(T, HV),
        "state_pool": randn(2 * N + sum(map(len, exports)) + 2, HV, V, K),
        **gate_tensors(gates, T, HV, K, rng),
    }
    return to(state | packing(lengths, exports), dtype, device)


def packing(lengths: Sequence[int], exports: Sequence[Sequence[int]], device: str = "cpu") -> Case:
    """Metadata of a prefill. Sequence n reads slot n (-1 for every third), writes slot N + n.

    exports: offsets for each sequence, into slots from 2 N on.
    """
    N = len(lengths)
    offsets = [offset for entry in exports for offset in entry]
    return {
        "cu_seqlens": ints([*accumulate(lengths, initial=0)], device),
        "initial_slots": ints([-1 if n % 3 == 2 else n for n in range(N)], device),
        "final_slots": ints([N + n for n in range(N)], device),
        "checkpoint_indptr": ints([*accumulate(map(len, exports), initial=0)], device),
        "checkpoint_offsets": ints(offsets, device),
        "checkpoint_slots": ints([2 * N + i for i in range(len(offsets))], device),
    }


def decode_case(
    D: int,
    M: int,
    *,
    H: int,
    HV: int,
    K: int,
    V: int,
    dtype: torch.dtype,
    device: str = "cpu",
    gates: str = "mixed",
    seed: int = 0,
) -> Case:
    """Arguments of `kda_decode`. Row d reads slot d and writes D + d * M + j."""
    rng = torch.Generator().manual_seed(seed)
    C, slots = 2 * H * K + HV * V, D + D * M + 2

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng)

    tensors = {
        "qkv": randn(D * M, C),
        "beta_logit": randn(D * M, HV),
        "gate": randn(D * M, HV, V),
        "conv_weight": 0.5 * randn(C, 4),
        "norm_weight": 1 + 0.1 * randn(V),
        "state_pool": randn(slots, HV, V, K),
        "conv_pool": randn(slots, 3, C),
        **gate_tensors(gates, D * M, HV, K, rng),
        "src_slots": ints(list(range(D))),
        "dst_slots": ints([[D + d * M + j for j in range(M)] for d in range(D)]).reshape(D, M),
    }
    return to(tensors, dtype, device)


def to(case: Case, dtype: torch.dtype, device: str = "cpu") -> Case:
    """The case in a dtype (states and gate parameters in the wide one) on a device."""
    kept = ("A_log", "dt_bias", "state_pool")
    return {
        name: x
        if not isinstance(x, Tensor)
        else x.to(
            device, (wide(dtype) if name in kept else dtype) if x.is_floating_point() else None
        )
        for name, x in case.items()
    }


def run(op: Callable[..., Tensor], case: Case, **changes: Any) -> tuple[Tensor, ...]:
    """Output, then the pools after the call; the case's own pools stay as they were."""
    case = {n: x.clone() if n in POOLS else x for n, x in (case | changes).items()}
    out = op(**case)
    return out, *(case[n] for n in POOLS if n in case)


def truth(op: Callable[..., Tensor], case: Case, **changes: Any) -> tuple[Tensor, ...]:
    """The same in float64 on the CPU."""
    return run(op, to(case | changes, torch.float64, "cpu"))
