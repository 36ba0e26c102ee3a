"""Prefill cases at full size, made on the device, with their float64 truth."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor
from torch_kda.ops.kda import kda_prefill
from torch_kda.ops.reference import kda_prefill_ref
from torch_kda.tests.ops.cases import Case, ints, packing, run, to

DEVICE = "cuda"
K = 128
GATES = ("weak", "fla", "fla-bounded", "strong", "saturated", "mixed", "kimi")
# relative RMS errors that are allowed: output, states
BOUNDS = dict.fromkeys(GATES, (4.5e-3, 3.5e-3)) | {"saturated": (5e-3, 4e-3)}


def gate_case(gates: str, T: int, HV: int, rng: torch.Generator) -> Case:
    """g_raw and its parameters. Log decays a token, natural log:

    weak: about -1.7e-3. strong: about -2.5, a chunk forgets all before it. saturated: all -5.
    mixed: by channel from -5 to -1e-4. fla: its layer's initialisation, softplus or bounded.
    kimi: softplus, exp(A_log) up to 201 and log decays down to -2661, others keep nearly all.
    """

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=DEVICE)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(*shape, device=DEVICE).uniform_(low, high, generator=rng)

    g_raw, A_log, dt_bias = randn(T, HV, K), torch.zeros(HV, device=DEVICE), randn(HV, K) * 0.1
    lower_bound = None if gates in ("fla", "kimi") else -5.0
    if gates == "weak":
        g_raw = 0.3 * g_raw - 8
    elif gates == "strong":
        A_log = uniform(0, 1, HV)
    elif gates == "saturated":
        g_raw, A_log = g_raw + 20, A_log + 3
    elif gates == "mixed":
        target = uniform(math.log(1e-4), math.log(4.9), HV, K).exp() / 5
        g_raw, dt_bias = 0.3 * g_raw, (target / (1 - target)).log()
    elif gates.startswith("fla"):
        A_log = uniform(1, 16, HV).log()
        step = uniform(math.log(1e-3), math.log(0.1), HV, K).exp()
        g_raw, dt_bias = 0.5 * g_raw, step + (-torch.expm1(-step)).log()
    else:
        A_log = torch.linspace(math.log(201.0), math.log(0.05), max(HV, 2), device=DEVICE)[:HV]
        is_large = torch.rand(T, HV, K, generator=rng, device=DEVICE) < 0.02
        g_raw = torch.where(is_large, 2661 / 201, 3 * g_raw - 4).clamp(max=2661 / 201)
        dt_bias = dt_bias.clamp(max=0)
    return {
        "g_raw": g_raw.bfloat16(),
        "A_log": A_log,
        "dt_bias": dt_bias,
        "lower_bound": lower_bound,
    }


def every(step: int, lengths: Sequence[int]) -> list[list[int]]:
    """Offsets of checkpoints at each multiple of `step`."""
    return [[*range(step, length + 1, step)] for length in lengths]


def make(
    lengths: Sequence[int],
    gates: str = "mixed",
    *,
    H: int = 2,
    HV: int = 2,
    exports: Sequence[Sequence[int]] | None = None,
    padding: int = 3,
    seed: int = 0,
) -> Case:
    """Arguments of `kda_prefill`, packed as in `cases.packing`.

    exports: offsets of checkpoints for each sequence. Default: none.
    padding: rows of no sequence at the end.
    """
    rng = torch.Generator(DEVICE).manual_seed(seed)
    N, T = len(lengths), sum(lengths) + padding
    exports = [[]] * N if exports is None else exports

    def rows(heads: int) -> Tensor:
        return torch.randn(T, heads, K, generator=rng, device=DEVICE).bfloat16()

    def states(slots: int) -> Tensor:
        return 0.5 * torch.randn(slots, HV, K, K, generator=rng, device=DEVICE)

    # in two draws, and the exports' last: all else is the same whatever is exported
    first, last = states(2 * N), states(1)
    return {
        "q": rows(H),
        "k": rows(H),
        "v": rows(HV),
        "beta_logit": torch.randn(T, HV, generator=rng, device=DEVICE).bfloat16(),
        **gate_case(gates, T, HV, rng),
        "state_pool": torch.cat([first, states(sum(map(len, exports))), last]),
        **packing(lengths, exports, DEVICE),
    }


def truth_of(case: Case) -> tuple[Tensor, ...]:
    """Output and pool in float64, on the device, by chunks: minutes by token become seconds."""
    return run(kda_prefill_ref, to(case, torch.float64, DEVICE))


def prefill(case: Case, **changes: object) -> tuple[Tensor, ...]:
    """Output, and the pool after the call."""
    return run(kda_prefill, case, **changes)


@cache
def long_case(gates: str) -> tuple[Case, tuple[Tensor, ...]]:
    """65537 tokens with a state every 1024, and the truth; shared by the tests of a session."""
    case = make([65537], gates, H=1, exports=every(1024, [65537]))
    return case, truth_of(case)


def error(x: Tensor, truth: Tensor) -> float:
    """Relative RMS error; infinite where x is not finite."""
    if not torch.isfinite(x).all():
        return math.inf
    return ((x.double() - truth).norm() / truth.norm()).item()


def select(case: Case, rows: Tensor, lengths: Sequence[int], **changes: object) -> Case:
    """The case with other rows, packed as sequences of these lengths, without checkpoints."""
    by_row = {name: case[name][rows] for name in ("q", "k", "v", "g_raw", "beta_logit")}
    bare = dict.fromkeys(("checkpoint_indptr", "checkpoint_offsets", "checkpoint_slots"))
    cu = ints([*accumulate(lengths, initial=0)], DEVICE)
    return case | by_row | bare | {"cu_seqlens": cu} | changes
