"""What the prefill bench runs: its cells, their inputs, and the float64 truth of two heads."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import accumulate

import torch
from torch import Tensor

from ..ops.reference import kda_prefill_ref

DIM = 128  # K = V
LOWER_BOUND = -5.0
GATES = ("slow", "fast", "softplus")
CHECKPOINTS = (0, 1, 16)
MAX_CHECKPOINTS = 2048  # of a sequence: the longest has no more multiples of 16
MIXED = (1300, 547, 2048, 963, 271, 3063)
ROWS = ("q", "k", "v", "g_raw", "beta_logit")


@dataclass(frozen=True, slots=True)
class Cell:
    """One shape: H heads of packed sequences."""

    heads: int
    lens: tuple[int, ...]

    @property
    def name(self) -> str:
        """As in "H12-1x8192" and "H96-mixed"."""
        is_mixed = len(set(self.lens)) > 1
        return f"H{self.heads}-" + ("mixed" if is_mixed else f"{len(self.lens)}x{self.lens[0]}")

    @property
    def num_tokens(self) -> int:
        return sum(self.lens)

    def io_bytes(self, num_checkpoints: int) -> int:
        """Inputs, output, states in and out, and the checkpoints, each moved once."""
        token_heads = self.num_tokens * self.heads
        state = self.heads * DIM * DIM * 4
        exported = sum(len(offsets) for offsets in self.exports(num_checkpoints))
        return token_heads * (5 * DIM * 2 + 2) + (2 * len(self.lens) + exported) * state

    def exports(self, num_checkpoints: int) -> list[list[int]]:
        """Offsets of each sequence: evenly spread multiples of 16, fewer where it is short.

        One checkpoint is at half of the length, as it is for the peer that has one.
        """
        c = num_checkpoints
        spread = [1 / 2] if c == 1 else [(i + 1) / c for i in range(c)]
        return [sorted({int(length * x) // 16 * 16 for x in spread} - {0}) for length in self.lens]


CELLS = (
    *(Cell(12, (length,)) for length in (512, 1024, 2048, 8192, 32768)),
    *(Cell(12, lens) for lens in ((128,) * 64, (1024,) * 8, MIXED, (8192,) * 4)),
    *(Cell(heads, (8192,)) for heads in (24, 32, 48, 64, 96)),
    *(Cell(96, lens) for lens in ((1024,) * 8, MIXED)),
)
# a minute instead of ten: both ends of either axis
QUICK = ("H12-1x512", "H12-1x8192", "H12-64x128", "H96-1x8192", "H96-mixed")


def select_cells(patterns: Sequence[str]) -> list[Cell]:
    """Cells whose name fits one of the patterns ("H12-*"); ValueError for one that fits none."""
    for pattern in patterns:
        if not any(fnmatch(cell.name, pattern) for cell in CELLS):
            names = ", ".join(cell.name for cell in CELLS)
            raise ValueError(f"--cells: {pattern!r} fits no cell; there are {names}")
    return [cell for cell in CELLS if any(fnmatch(cell.name, p) for p in patterns)]


@dataclass(frozen=True, slots=True)
class Inputs:
    """Arguments of one call. Sequence n reads slot n and writes slot N + n; exports come after."""

    cell: Cell
    q: Tensor  # [T, H, K] bf16; so k, v and g_raw
    k: Tensor
    v: Tensor
    g_raw: Tensor
    beta_logit: Tensor  # [T, H] bf16
    A_log: Tensor  # [H] fp32
    dt_bias: Tensor  # [H, K] fp32
    lower_bound: float | None
    state_pool: Tensor  # [2 N + E, H, V, K] fp32
    cu_seqlens: Tensor  # [N + 1] int32
    initial_slots: Tensor  # [N] int32
    final_slots: Tensor  # [N] int32
    checkpoint_indptr: Tensor | None  # [N + 1] int32
    checkpoint_offsets: Tensor | None  # [E] int32
    checkpoint_slots: Tensor | None  # [E] int32

    @property
    def initial_state(self) -> Tensor:
        return self.state_pool[: len(self.cell.lens)]

    def tensors(self) -> tuple[Tensor | None, ...]:
        """In the order of `kda_prefill`."""
        return (
            *(self.q, self.k, self.v, self.g_raw, self.beta_logit, self.A_log, self.dt_bias),
            *(self.state_pool, self.cu_seqlens, self.initial_slots, self.final_slots),
            *(self.checkpoint_indptr, self.checkpoint_offsets, self.checkpoint_slots),
        )


def make_inputs(
    cell: Cell, gates: str, num_checkpoints: int, seed: int, device: torch.device
) -> Inputs:
    """Random inputs of a cell; the same seed gives the same, whatever is exported."""
    rng = torch.Generator(device).manual_seed(seed)
    T, H, N = cell.num_tokens, cell.heads, len(cell.lens)
    exports = cell.exports(num_checkpoints)
    offsets = [offset for entry in exports for offset in entry]

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=device)

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    q, k, v = (randn(T, H, DIM).bfloat16() for _ in range(3))
    beta_logit, noise = randn(T, H).bfloat16(), randn(T, H, DIM)
    g_raw, A_log, dt_bias = gate_inputs(gates, noise, H, rng, device)
    pool = torch.zeros(2 * N + len(offsets), H, DIM, DIM, device=device)
    pool[:N] = 0.1 * randn(N, H, DIM, DIM)
    csr: tuple[Tensor | None, ...] = (None, None, None)
    if num_checkpoints > 0:
        indptr = ints([*accumulate(map(len, exports), initial=0)])
        csr = (indptr, ints(offsets), ints([2 * N + i for i in range(len(offsets))]))
    return Inputs(
        *(cell, q, k, v, g_raw, beta_logit, A_log, dt_bias),
        None if gates == "softplus" else LOWER_BOUND,
        *(pool, ints([*accumulate(cell.lens, initial=0)])),
        *(ints(range(N)), ints(range(N, 2 * N)), *csr),
    )


def gate_inputs(
    gates: str, noise: Tensor, H: int, rng: torch.Generator, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """g_raw, A_log and dt_bias.

    slow: log decays from -2 to -1e-4 a token by channel, as long-memory channels of trained models
    have. fast: random gates, every channel forgets within a chunk. softplus: the unbounded gate, as
    FLA's layer initialises it.
    """

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return torch.empty(*shape, device=device).uniform_(low, high, generator=rng)

    if gates == "slow":
        share = uniform(math.log(1e-4), math.log(2.0), H, DIM).exp() / -LOWER_BOUND
        return (0.3 * noise).bfloat16(), torch.zeros(H, device=device), (share / (1 - share)).log()
    if gates == "fast":
        return noise.bfloat16(), uniform(0, 1, H), uniform(0, 1, H, DIM)
    step = uniform(math.log(1e-3), math.log(0.1), H, DIM).exp()
    return noise.bfloat16(), uniform(1, 16, H).log(), step + (-torch.expm1(-step)).log()


@dataclass(frozen=True, slots=True)
class Result:
    """Of one implementation, for all heads or those of the truth."""

    out: Tensor  # [T, H, V]
    states: Tensor  # [N, H, V, K], final
    checkpoints: Tensor | None = None  # [E, H, V, K]


def truth_heads(cell: Cell) -> list[int]:
    """Heads that `truth` computes."""
    return sorted({0, cell.heads - 1})


def truth(inputs: Inputs) -> Result:
    """The first and the last head in float64, at full length, by chunks."""
    heads = truth_heads(inputs.cell)
    rows = {name: getattr(inputs, name)[:, heads].double() for name in ROWS}
    pool = inputs.state_pool[:, heads].double()
    out = kda_prefill_ref(
        **rows,
        A_log=inputs.A_log[heads].double(),
        dt_bias=inputs.dt_bias[heads].double(),
        state_pool=pool,
        cu_seqlens=inputs.cu_seqlens,
        initial_slots=inputs.initial_slots,
        final_slots=inputs.final_slots,
        checkpoint_indptr=inputs.checkpoint_indptr,
        checkpoint_offsets=inputs.checkpoint_offsets,
        checkpoint_slots=inputs.checkpoint_slots,
        lower_bound=inputs.lower_bound,
    )
    N = len(inputs.cell.lens)
    has_exports = inputs.checkpoint_slots is not None
    return Result(out, pool[N : 2 * N], pool[2 * N :] if has_exports else None)


def with_exports(full: Result, cell: Cell, of: int, num_checkpoints: int) -> Result:
    """The truth of `of` checkpoints a sequence, for a call that exports fewer of them."""
    if num_checkpoints == 0 or full.checkpoints is None:
        return Result(full.out, full.states)
    wanted, place = cell.exports(num_checkpoints), []
    index = 0
    for offsets, kept in zip(cell.exports(of), wanted, strict=True):
        place += [index + offsets.index(offset) for offset in kept]
        index += len(offsets)
    return Result(full.out, full.states, full.checkpoints[place])


def errors(result: Result, expected: Result, heads: list[int]) -> tuple[float, float]:
    """Relative RMS errors of output and states; the worse of final states and checkpoints."""
    states = [_error(result.states[:, heads], expected.states)]
    if result.checkpoints is not None and expected.checkpoints is not None:
        states.append(_error(result.checkpoints[:, heads], expected.checkpoints))
    return _error(result.out[:, heads], expected.out), max(states)


def _error(x: Tensor, expected: Tensor) -> float:
    if not torch.isfinite(x).all():
        return math.inf
    return ((x.double() - expected).norm() / expected.norm()).item()
