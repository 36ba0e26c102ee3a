"""Compares what the caches hold, and what came out, with the same computed alone."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch_kda.cache.node import Node
from torch_kda.cache.prefix_cache import PrefixCache
from torch_kda.cache.storage import Pools
from torch_kda.kda.config import CONV_WIDTH
from torch_kda.kda.runner import TokenLogprobs
from torch_kda.profiles.greedy import Mismatch
from torch_kda.tests.soak.recompute import GRID, Recompute, Recomputed, relative_rms
from torch_kda.tests.soak.witness import KeyBook

TOLERANCE = 1e-2  # relative RMS of a layer
WRONG = 0.1  # what a wrong position shows as, at least
SHIFT_EVERY = 8  # samples between two that also look one token before
TAIL = 48  # last tokens that tell whether a text repeats itself


@dataclass(slots=True)
class Findings:
    """What all comparisons gave."""

    num_slots: int = 0  # samples of READY slots
    slots: set[tuple[int, int]] = field(default_factory=set)  # different ones: unit's serial, slot
    num_kv_prefixes: int = 0  # their KV, and that of prefixes without a state
    num_tokens: int = 0  # recomputed
    worst: dict[str, float] = field(default_factory=dict)  # by kind and layer
    smallest_wrong: dict[str, float] = field(default_factory=dict)  # by kind and wrong position
    num_wrong: dict[str, int] = field(default_factory=dict)  # how often it was looked at
    num_answers: int = 0
    num_greedy_tokens: int = 0
    largest_difference: float = 0.0  # of log probabilities where the tokens agree
    worst_answer: float = 0.0  # relative RMS of an answer's log probabilities
    partings: list[tuple[str, int, float]] = field(default_factory=list)  # request, position, gap
    violations: list[str] = field(default_factory=list)

    def mismatches(self) -> list[tuple[str, Mismatch]]:
        noise = self.largest_difference
        return [
            (name, Mismatch(i, position, gap, noise))
            for i, (name, position, gap) in enumerate(self.partings)
        ]


class Judge:
    """Holds caches and answers against a plain forward of the same tokens."""

    def __init__(
        self, recompute: Recompute, pools: Pools, cache: PrefixCache, book: KeyBook
    ) -> None:
        self.recompute, self.pools, self.cache, self.book = recompute, pools, cache, book
        self.found = Findings()

    # caches

    @torch.inference_mode()
    def check_prefix(self, node: Node) -> None:
        """The KV of the path down to a cached unit, and the state of the unit if it has one."""
        found = self.found
        tokens = self.book.find(node.key)
        if tokens is None or len(tokens) != node.depth * self.cache.unit:
            found.violations.append(f"{node!r}: nobody had tokens with its key")
            return
        truth = self.recompute.prefix(tokens)
        found.num_tokens += len(tokens)
        errors = self._kv_errors(node, truth)
        wrong = {"kv, 1 token": [relative_rms(x.roll(1, 0), x) for x in truth.latents]}
        found.num_kv_prefixes += 1
        if node.slot >= 0:
            states, windows = ([x[node.slot] for x in kind] for kind in self._slots())
            errors |= _errors("state", states, truth.states) | _errors(
                "conv", windows, truth.windows
            )
            if truth.earlier is not None and _has_moved(tokens, GRID):
                wrong |= _wrong(f"{GRID} tokens", (states, windows), truth.earlier)
            # before the next forward overwrites what `truth` shows
            errors, wrong = _on_host(errors, wrong)
            if found.num_slots % SHIFT_EVERY == 0 and _has_moved(tokens, 1):
                before = self.recompute.prefix(tokens[:-1])
                shifted = _wrong("1 token", (states, windows), (before.states, before.windows))
                wrong |= _on_host({}, shifted)[1]
            found.num_slots += 1
            found.slots.add((node.serial, node.slot))
        else:
            errors, wrong = _on_host(errors, wrong)
        self._note(node, errors, wrong)

    def _slots(self) -> tuple[list[Tensor], list[Tensor]]:
        return self.pools.state, self.pools.conv

    def _kv_errors(self, node: Node, truth: Recomputed) -> dict[str, Tensor]:
        """The worst unit of each layer: one wrong unit must not hide in a long prefix."""
        blocks: list[int] = []
        step: Node | None = node
        while step is not None:
            blocks[:0] = step.blocks
            step = step.parent
        errors = {}
        for i, (pool, latents) in enumerate(zip(self.pools.kv, truth.latents, strict=True)):
            cached = pool[blocks].view(node.depth, -1)
            errors[f"kv {i}"] = relative_rms(cached, latents.reshape(node.depth, -1), 1).max()
        return errors

    def _note(self, node: Node, errors: dict[str, float], wrong: dict[str, float]) -> None:
        found = self.found
        for name, error in errors.items():
            found.worst[name] = max(found.worst.get(name, 0.0), error)
            if not error <= TOLERANCE:
                found.violations.append(
                    f"{node!r} of {node.depth * self.cache.unit} tokens: {name} is off by "
                    f"{error:.2e} relative RMS, allowed {TOLERANCE}"
                )
        for name, error in wrong.items():
            found.smallest_wrong[name] = min(found.smallest_wrong.get(name, error), error)
            found.num_wrong[name] = found.num_wrong.get(name, 0) + 1

    # answers

    @torch.inference_mode()
    def check_answer(
        self,
        name: str,
        prompt: Sequence[int],
        answer: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
    ) -> None:
        """Greedy tokens against those of a run without a cache, up to where they part.

        That run sees the answer's own tokens, so each of its choices is made behind an equal text.
        """
        found = self.found
        truth = self.recompute.logprobs([*prompt, *answer[:-1]], len(prompt) - 1)
        chosen = truth.argmax(-1).tolist()
        pairs = zip(answer, chosen, strict=True)
        parting = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        found.num_answers += 1
        found.num_greedy_tokens += len(answer) if parting is None else parting
        if parting is not None:
            first, second = truth[parting].topk(2).values.tolist()
            found.partings.append((name, parting, first - second))
        if logprobs[:parting]:
            self._note_logprobs(name, truth[:parting], logprobs[:parting])

    def _note_logprobs(self, name: str, truth: Tensor, logprobs: Sequence[TokenLogprobs]) -> None:
        ids = torch.tensor([[i for i, _ in one.top] for one in logprobs], device=truth.device)
        ours = torch.tensor([[x for _, x in one.top] for one in logprobs], device=truth.device)
        difference = (ours - truth.gather(-1, ids)).nan_to_num(nan=float("inf")).abs()
        spread = truth.std(-1).mean()
        error = (difference.square().mean().sqrt() / spread).item()
        found = self.found
        found.largest_difference = max(found.largest_difference, difference.max().item())
        found.worst_answer = max(found.worst_answer, error)
        # else an answer from a wrong state would excuse itself
        if not error <= WRONG:
            found.violations.append(f"{name}: its log probabilities are off by {error:.2e}")

    def conclude(self) -> None:
        """What only the whole run can tell."""
        found = self.found
        for name, one in found.mismatches():
            if not one.is_near_tie:
                found.violations.append(
                    f"{name}: greedy tokens part at {one.position}, where the lead is "
                    f"{one.gap:.3g} and the largest difference seen {one.noise:.3g}"
                )
        for name, error in found.smallest_wrong.items():
            # a state one token further may differ by less; its window shows it
            if error <= WRONG and name != "state, 1 token":
                found.violations.append(f"a wrong position only shows as {error:.2e} ({name})")


def _has_moved(tokens: Sequence[int], distance: int) -> bool:
    """Whether the text looks different so much before its end: greedy answers may go in circles."""
    tail = tokens[-TAIL:]
    ends = (tokens[-i] != tokens[-i - distance] for i in range(1, CONV_WIDTH))
    is_long = len(tokens) >= distance + CONV_WIDTH
    return is_long and 2 * len(set(tail)) >= len(tail) and all(ends)


def _errors(kind: str, cached: Sequence[Tensor], truth: Sequence[Tensor]) -> dict[str, Tensor]:
    pairs = zip(cached, truth, strict=True)
    return {f"{kind} {i}": relative_rms(x, y) for i, (x, y) in enumerate(pairs)}


def _wrong(
    position: str,
    cached: tuple[list[Tensor], list[Tensor]],
    truth: tuple[list[Tensor], list[Tensor]],
) -> dict[str, list[Tensor]]:
    return {
        f"{kind}, {position}": [relative_rms(x, y) for x, y in zip(ours, theirs, strict=True)]
        for kind, ours, theirs in zip(("state", "conv"), cached, truth, strict=True)
    }


def _on_host(
    errors: dict[str, Tensor], wrong: dict[str, list[Tensor]]
) -> tuple[dict[str, float], dict[str, float]]:
    """In one transfer; of the layers of a wrong position the one that shows it least."""
    least = [torch.stack(layers).min() for layers in wrong.values()]
    values = torch.stack([*errors.values(), *least]).tolist()
    split = len(errors)
    return (
        dict(zip(errors, values[:split], strict=True)),
        dict(zip(wrong, values[split:], strict=True)),
    )
