"""The main job: a prompt and a follow-up in one pass and in two, checked against no cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .build import load_model
from .config import EngineConfig, ModelConfig
from .presets import model_preset
from .recording import RequestRun, Session
from .timeline import Lane
from .tokenizer import Tokenizer

NEW_TOKENS = 24
MIN_DISTINCT = 8  # fewer different greedy tokens would make their equality worth little
# longer than a unit, so that the follow-up has a boundary of its own to keep
FOLLOW_UP = """

That was the beginning. Now take the part above once more: say in other words what it does, name
the three places in which a newcomer would most likely go wrong, and for each of them tell how a
test could have found the mistake before anybody else did.
"""
GPU_PRESET, GPU_LAYERS = "kimi-linear-48b-a3b", 4  # 12 GB of bf16 weights
GPU_POOL_BYTES = 4 << 30
MAX_LEN = 32768  # of both models: a million tokens would only reserve memory
NEAR_TIE = 4.0  # times the largest logit difference seen: tokens so close may change places

# what differs from the demo's EngineConfig; the reference comes first
MODES: dict[str, dict[str, Any]] = {
    "no cache": {"enable_prefix_caching": False},
    "single pass": {},
    "two passes": {"num_prefill_checkpoint_blocks": 0},
}
NUM_STAGES = 1 + 2 * len(MODES)

Report = Callable[[str], None]  # takes a line about what comes next


@dataclass(frozen=True, slots=True)
class Comparison:
    """Greedy tokens of one run against those of another, with the same weights and prompt."""

    is_equal: bool
    max_logit_diff: float  # over the positions before which the tokens agree
    gap: float | None  # where they part: the reference's lead of its first token over its second

    @property
    def is_near_tie(self) -> bool:
        """Whether the two tokens were so close that rounding may decide."""
        return self.gap is not None and self.gap < NEAR_TIE * self.max_logit_diff


def compare(reference: RequestRun, other: RequestRun) -> Comparison:
    """How far two runs of one prompt agree; behind a differing token nothing is comparable."""
    pairs = list(zip(reference.token_ids, other.token_ids, strict=True))
    parting = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    same = slice(None if parting is None else parting + 1)
    logits = zip(reference.logits[same], other.logits[same], strict=True)
    difference = max(float((a - b).abs().max()) for a, b in logits)
    if parting is None:
        return Comparison(True, difference, None)
    first, second = reference.logits[parting].topk(2).values.tolist()
    return Comparison(False, difference, first - second)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Both requests under both ways of running them, and what the runs without a cache say."""

    model_config: ModelConfig
    config: EngineConfig
    single_pass: tuple[RequestRun, RequestRun]  # first request, follow-up
    two_pass: tuple[RequestRun, RequestRun]
    comparisons: dict[str, Comparison]  # by what was compared

    @property
    def tokens_equal(self) -> bool:
        """Whether every comparison found equal tokens."""
        return all(found.is_equal for found in self.comparisons.values())

    @property
    def max_logit_diff(self) -> float:
        """The largest of all comparisons."""
        return max(found.max_logit_diff for found in self.comparisons.values())

    @property
    def deepest_boundary(self) -> int:
        """Where the follow-up can resume at best: the last unit boundary that has been computed."""
        first, follow_up = self.single_pass
        unit = self.config.prefix_match_unit
        known = len(first.prompt) + len(first.token_ids) - 1  # the last token was only drawn
        return min(known, len(follow_up.prompt) - 1) // unit * unit

    def failures(self) -> list[str]:
        """Every promise that was not kept, as a sentence."""
        first, follow_up = self.single_pass
        is_exact = self.model_config.dtype == "float32" and self.config.device == "cpu"
        found = [
            f"{name}: greedy tokens differ"
            for name, one in self.comparisons.items()
            if not one.is_equal and (is_exact or not one.is_near_tie)
        ]
        distinct = len(set(first.token_ids))
        if distinct < MIN_DISTINCT:
            found.append(f"only {distinct} distinct greedy tokens: their equality shows little")
        for name, run in (("first request", first), ("follow-up", follow_up)):
            if len(run.prefills) != 1:
                found.append(f"{name}: {len(run.prefills)} forwards instead of 1")
        if follow_up.num_cached_tokens != self.deepest_boundary:
            found.append(
                f"follow-up: {follow_up.num_cached_tokens} tokens from the cache, but the deepest "
                f"boundary is {self.deepest_boundary}"
            )
        return found

    def as_json(self) -> dict[str, Any]:
        """What `torch-kda demo --json` prints."""
        return {
            "single_pass": _figures(self.single_pass),
            "two_pass": _figures(self.two_pass),
            "tokens_equal": self.tokens_equal,
            "max_logit_diff": self.max_logit_diff,
        }

    def panels(self) -> dict[str, list[Lane]]:
        """What `timeline.draw_timeline` draws."""
        titles = (
            f"first request: {len(self.single_pass[0].prompt):,} tokens",
            f"follow-up: {len(self.single_pass[1].prompt):,} tokens",
        )
        return {
            title: [one.lane("single pass"), two.lane("two passes")]
            for title, one, two in zip(titles, self.single_pass, self.two_pass, strict=True)
        }


def _figures(runs: Sequence[RequestRun]) -> dict[str, list[Any]]:
    return {
        "forwards": [len(run.prefills) for run in runs],
        "exports": [run.num_exports for run in runs],
        "tokens_computed": [run.num_computed_tokens for run in runs],
        "tokens_cached": [run.num_cached_tokens for run in runs],
        "ttft_s": [round(run.ttft_s, 6) for run in runs],
    }


def run_demo(text: str, num_tokens: int, *, device: str, seed: int, say: Report) -> DemoResult:
    """Run both requests without a cache, then in a single pass, then in two passes.

    The runs without a cache come first and also warm the machine up for the timed ones.

    Args:
        text: its first `num_tokens` tokens, one a byte, are the prompt.
        device: "cpu": a tiny model in fp32; "cuda": one with the geometry of Kimi-Linear, in bf16.
        seed: of the weights.
        say: is told what comes next, NUM_STAGES times.

    Raises:
        ValueError: the prompt is too short to show anything, or too long for the model. Raised
            before the model is made.
    """
    tokenizer = Tokenizer.byte_level()
    prompt = tokenizer.encode(text)[:num_tokens]
    config = demo_config(len(prompt), device, seed)
    _check_length(len(prompt), config.prefix_match_unit)
    preset = model_preset("tiny")
    if device != "cpu":
        preset = model_preset(GPU_PRESET, num_hidden_layers=GPU_LAYERS)
    model_config = config.resolve(preset)
    say(f"random weights for {model_config.name}, {model_config.num_hidden_layers} layers")
    model = load_model(model_config, config, None)

    runs: dict[str, tuple[RequestRun, RequestRun]] = {}
    for name, changes in MODES.items():
        session = Session(model, replace(config, **changes))
        say(f"{name}: first request, {len(prompt):,} tokens")
        first = session.run(prompt, NEW_TOKENS)
        # all modes get one follow-up, also if their tokens should differ
        answer = runs["no cache"][0].token_ids if runs else first.token_ids
        follow_up = [*prompt, *answer, *tokenizer.encode(FOLLOW_UP)]
        say(f"{name}: follow-up, {len(follow_up):,} tokens")
        runs[name] = (first, session.run(follow_up, NEW_TOKENS))
    reference = runs.pop("no cache")
    comparisons = {
        f"{name}, {request}": compare(reference[i], pair[i])
        for name, pair in runs.items()
        for i, request in enumerate(("first request", "follow-up"))
    }
    return DemoResult(
        model_config=model_config,
        config=config,
        single_pass=runs["single pass"],
        two_pass=runs["two passes"],
        comparisons=comparisons,
    )


def prompt_limits(unit: int) -> tuple[int, int]:
    """The shortest prompt of which a state is kept on the way, its last token being computed
    always; and the longest with whose follow-up the model can deal.
    """
    return unit + 1, MAX_LEN - 2 * NEW_TOKENS - len(FOLLOW_UP.encode())


def _check_length(num_tokens: int, unit: int) -> None:
    least, most = prompt_limits(unit)
    if num_tokens < least:
        raise ValueError(
            f"demo: the prompt must have >= {least:,} tokens, got {num_tokens:,}: states are kept "
            f"every {unit:,} tokens, and a shorter prompt takes one forward either way"
        )
    if num_tokens > most:
        raise ValueError(
            f"demo: the prompt must have <= {most:,} tokens, got {num_tokens:,}: with its "
            f"follow-up it has to fit into the {MAX_LEN:,} that the model holds"
        )


def demo_config(num_tokens: int, device: str, seed: int) -> EngineConfig:
    """Room for both requests, each in one forward if the kernels can."""
    longest = num_tokens + NEW_TOKENS + len(FOLLOW_UP.encode())
    return EngineConfig(
        device=device,
        seed=seed,
        max_num_seqs=1,
        max_num_batched_tokens=max(256, -(-longest // 16) * 16),
        max_model_len=MAX_LEN,
        memory_bytes=None if device == "cpu" else GPU_POOL_BYTES,
        expected_context=longest + NEW_TOKENS,
    )


def repository_text() -> str:
    """The text of this package as installed: its documents, then its sources, in order of name."""
    root = Path(__file__).resolve().parent.parent
    rooms = ("kda", "ops", "scheduler", "cache", "cute_kernels")
    files = [
        *sorted(root.glob("*.md")),
        *(f for r in rooms for f in sorted((root / r).rglob("*.py"))),
    ]
    return "\n".join(path.read_text(encoding="utf-8") for path in files)


def describe_result(result: DemoResult) -> list[str]:
    """What the figures say, in lines for people."""
    (first, follow_up), (two_first, _) = result.single_pass, result.two_pass
    unit = result.config.prefix_match_unit
    lines = [
        f"first request: {len(first.prefills)} forward where two passes take "
        f"{len(two_first.prefills)}",
        f"follow-up: {follow_up.num_cached_tokens:,} of {len(follow_up.prompt):,} tokens from the "
        f"cache; the deepest boundary of {unit} tokens is {result.deepest_boundary:,}",
        f"greedy tokens with and without cache: {'equal' if result.tokens_equal else 'not equal'}, "
        f"{len(set(first.token_ids))} distinct of {len(first.token_ids)}; "
        f"largest logit difference {result.max_logit_diff:.1e}",
    ]
    lines += [
        f"{name}: tokens part where the first leads by {one.gap:.1e}, less than {NEAR_TIE:g} times "
        f"the largest logit difference: a near tie"
        for name, one in result.comparisons.items()
        if one.is_near_tie
    ]
    return lines
