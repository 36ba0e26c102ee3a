"""Whether two ways of running a model choose the same tokens, and if not, how near the tie was."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..kda.engine import Engine
from ..kda.runner import ModelRunner, TokenLogprobs
from ..scheduler.request import SamplingParams

NEAR_TIE = 4.0  # times the largest difference of log probabilities where the tokens agree


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first token at which two answers part."""

    prompt: int
    position: int  # tokens that agree before
    gap: float  # by how much the reference preferred its token to the next one, in log probability
    noise: float  # largest difference of log probabilities before, over all answers

    @property
    def is_near_tie(self) -> bool:
        return self.gap <= NEAR_TIE * self.noise


@dataclass(frozen=True, slots=True)
class GreedyComparison:
    num_prompts: int
    num_tokens: int
    mismatches: list[Mismatch]

    @property
    def equal_share(self) -> float:
        """Prompts whose whole answers are equal."""
        return 1 - len(self.mismatches) / self.num_prompts

    def as_json(self) -> dict[str, Any]:
        return {
            "prompts": self.num_prompts,
            "tokens": self.num_tokens,
            "mismatches": [
                {
                    "prompt": one.prompt,
                    "position": one.position,
                    "gap": float(f"{one.gap:.3g}"),
                    "noise": float(f"{one.noise:.3g}"),
                    "is_near_tie": one.is_near_tie,
                }
                for one in self.mismatches
            ],
        }


def compare_greedy(
    runner: ModelRunner,
    make_engine: Callable[[], Engine],
    prompts: Sequence[Sequence[int]],
    num_new: int,
) -> GreedyComparison:
    """Answers of the runner as it is against those of its eager steps, in the same batches."""
    ours = _answers(make_engine(), prompts, num_new)
    with runner.eager():
        reference = _answers(make_engine(), prompts, num_new)
    partings = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if _id(x) != _id(y)), None)
        for a, b in zip(ours, reference, strict=True)
    ]
    noise = max(
        (
            abs(x.logprob - y.logprob)
            for a, b, parting in zip(ours, reference, partings, strict=True)
            for x, y in list(zip(a, b, strict=True))[:parting]
        ),
        default=0.0,
    )
    mismatches = [
        Mismatch(i, parting, _gap(reference[i][parting]), noise)
        for i, parting in enumerate(partings)
        if parting is not None
    ]
    return GreedyComparison(len(prompts), num_new, mismatches)


def _answers(
    engine: Engine, prompts: Sequence[Sequence[int]], num_new: int
) -> list[list[TokenLogprobs]]:
    sampling = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True, logprobs=2)
    answers = {engine.submit(prompt, sampling): [] for prompt in prompts}
    while engine.has_work:
        for update in engine.step():
            if update.error:
                raise RuntimeError(f"greedy: {update.error}")
            answers[update.request_id] += update.logprobs
    return list(answers.values())


def _id(token: TokenLogprobs) -> int:
    return token.top[0][0]


def _gap(token: TokenLogprobs) -> float:
    (_, first), (_, second) = token.top
    return first - second
