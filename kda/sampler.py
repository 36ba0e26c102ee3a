"""Logits to next token ids, on the device and without a host sync."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from ..scheduler.request import MIN_TEMPERATURE, SamplingParams

# splitmix64: a counter plus this step, mixed by the two multipliers, is a good 64-bit random stream
_STEP, _MIX_1, _MIX_2 = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Sampled(NamedTuple):
    """What a step drew, on the device. Log probabilities are the model's, before temperature."""

    token_ids: torch.Tensor  # [R] int64
    logprobs: torch.Tensor | None  # [R] fp32, of the token drawn; None: not asked
    top_ids: torch.Tensor | None  # [R, n] int64, the n likeliest
    top_logprobs: torch.Tensor | None  # [R, n] fp32


class SamplingPlan:
    """What the rows of a step ask for. Steps of the same rows share it: all but their keys is here.

    Each `seed` is set; a row's draws depend on (seed, sample index) alone.
    """

    def __init__(self, params: Sequence[SamplingParams]) -> None:
        drawing = [p for p in params if p.temperature >= MIN_TEMPERATURE]
        asked = [p.logprobs for p in params if p.logprobs is not None]
        self.params = params
        self.is_greedy = not drawing  # every row is
        self.is_filtered = any([p.top_k or p.top_p < 1 for p in drawing])  # a row that draws is
        self.num_logprobs = max(asked) if asked else None  # the most that any row asks for

    @property
    def takes_argmax(self) -> bool:
        """Whether the greedy tokens are all that the rows want."""
        return self.is_greedy and self.num_logprobs is None

    @property
    def is_plain(self) -> bool:
        """Whether temperature and keys are all that a draw reads, and tokens all that it gives."""
        return not self.is_filtered and self.num_logprobs is None

    @cached_property
    def temperature(self) -> np.ndarray:
        """[R] fp32; 0 is greedy."""
        with np.errstate(over="ignore"):  # infinite: each token is as likely as any other
            values = [p.temperature for p in self.params]
            values = [value if value >= MIN_TEMPERATURE else 0.0 for value in values]
            return np.array(values, dtype=np.float32)

    @cached_property
    def _starts(self) -> np.ndarray:
        return stream_starts([p.seed or 0 for p in self.params])

    def keys(self, sample_indices: Sequence[int]) -> np.ndarray:
        """[R] int64, the start of each row's random stream."""
        return stream_keys(self._starts, sample_indices)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """How R rows are sampled: values as tensors, what decides the work as host numbers."""

    temperature: torch.Tensor  # [R] fp32; 0 is greedy
    keys: torch.Tensor  # [R] int64, start of each row's random stream
    top_p: torch.Tensor | None = None  # [R] fp32; None: no row that draws has a filter
    top_k: torch.Tensor | None = None  # [R] int64; 0 keeps all
    is_greedy: bool = False  # every row is
    num_logprobs: int | None = None  # n: the most that any row asks for

    @classmethod
    def pack(
        cls, plan: SamplingPlan, temperature: torch.Tensor, keys: torch.Tensor
    ) -> "SamplingRows":
        """The filters, if there are some, take one copy. Rows past the plan's are padding."""
        top_p = top_k = None
        if plan.is_filtered:
            packed = np.zeros((2, len(keys)), dtype=np.int64)
            count = len(plan.params)
            packed[0, :count] = [p.top_k for p in plan.params]
            packed.view(np.float64)[1, :count] = [p.top_p for p in plan.params]
            host = torch.from_numpy(packed)
            if keys.device.type == "cuda":
                # fresh each step: the copy of the step before may still be under way
                host = host.pin_memory()
            on_device = host.to(keys.device, non_blocking=True)
            top_k, top_p = on_device[0], on_device[1].view(torch.float64).float()
        return cls(
            temperature=temperature,
            keys=keys,
            top_p=top_p,
            top_k=top_k,
            is_greedy=plan.is_greedy,
            num_logprobs=plan.num_logprobs,
        )


def sample(logits: torch.Tensor, rows: SamplingRows) -> Sampled:
    """The next token of each row.

    A draw is the winner of an exponential race: argmax of logit / temperature - log E, with
    E ~ Exp(1) made from (row's key, token id). There is no sum over the vocabulary whose rounding
    could depend on the other rows.

    Args:
        logits: [R, vocab] fp32.
        rows: R rows.
    """
    token_ids = logits.argmax(dim=-1)
    if not rows.is_greedy:
        greedy = rows.temperature == 0
        scaled = logits / torch.where(greedy, 1.0, rows.temperature)[:, None]
        drawn = _race(scaled, rows)
        token_ids = torch.where(greedy, token_ids, drawn)
    if rows.num_logprobs is None:
        return Sampled(token_ids, None, None, None)
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.topk(min(rows.num_logprobs, logits.shape[-1]), dim=-1)
    own = logprobs.gather(-1, token_ids[:, None])[:, 0]
    return Sampled(token_ids, own, top.indices, top.values)


def _race(scaled: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """[R] winners of the race among the tokens that top-k and top-p keep."""
    scores = scaled - exponentials(rows.keys, scaled.shape[-1]).log_()
    if rows.top_p is None or rows.top_k is None:
        return scores.argmax(dim=-1)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs  # probability of all likelier tokens
    rank = torch.arange(scaled.shape[-1], device=scaled.device)
    # top_p = 1 keeps all, whatever the rounding of the sum
    keep = (before < rows.top_p[:, None]) | (rows.top_p == 1)[:, None]
    keep &= (rank < rows.top_k[:, None]) | (rows.top_k == 0)[:, None]
    keep[:, 0] = True
    winner = scores.gather(-1, order).masked_fill_(~keep, -torch.inf).argmax(dim=-1)
    return order.gather(-1, winner[:, None])[:, 0]


def stream_starts(seeds: Sequence[int]) -> np.ndarray:
    """[R] uint64: what a seed of any size adds to the keys of its stream."""
    starts = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF for seed in seeds], dtype=np.uint64)
    return _mix_host(starts + _STEP)


def stream_keys(starts: np.ndarray, sample_indices: Sequence[int]) -> np.ndarray:
    """[R] int64: one starting point a (seed, sample index), far apart for neighbours of either."""
    indices = np.array(sample_indices, dtype=np.uint64)
    return _mix_host(starts + indices * _STEP).view(np.int64)


def exponentials(keys: torch.Tensor, num_ids: int) -> torch.Tensor:
    """[R, num_ids] fp32 draws of Exp(1): element (r, i) is a function of keys[r] and i alone."""
    ids = torch.arange(1, num_ids + 1, device=keys.device)
    x = keys[:, None] + (ids * _signed(_STEP))[None, :]
    x = (x ^ _shift_right(x, 30)).mul_(_signed(_MIX_1))
    x = (x ^ _shift_right(x, 27)).mul_(_signed(_MIX_2))
    x = _shift_right(x ^ _shift_right(x, 31), 32)
    # half steps keep it off 0, the limit off 1 after rounding: the logarithm is finite and not 0
    uniform = ((x.float() + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()  # small values, the winners, are exact to 2**-33


def _mix_host(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> 30)) * _MIX_1
    x = (x ^ (x >> 27)) * _MIX_2
    return x ^ (x >> 31)


def _signed(value: np.uint64) -> int:
    """The int64 with the bits of an unsigned constant: torch has no uint64 arithmetic."""
    return int(value.view(np.int64))


def _shift_right(x: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift of int64: zeros come in at the top."""
    return (x >> count) & ((1 << (64 - count)) - 1)
