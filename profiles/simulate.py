"""What the scheduler and the cache make of a workload, without a model: `torch-kda bench simulate`.

The scheduler and the cache are the real ones; the worker is a stub that says the same token each
time. Also runs as `python -m torch_kda.profiles.simulate`.
"""

import argparse
import json
import random
import shlex
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ..cache.prefix_cache import PrefixCache
from ..kda.command import check_picture, clear_errors
from ..scheduler.request import Request, SamplingParams
from ..scheduler.scheduler import Scheduler
from .options import MAX_TOKENS, Parser, check_count
from .simulate_report import LOST, TWO_PASSES, can_draw, draw, print_table, write_report

DESCRIPTIONS = {
    "growing-prefix": "streams that grow by --step tokens a round; all of a round are sent "
    "together. Prompts of --start tokens come before the first round and are not counted "
    "(defaults: 120000 and 2000 tokens)",
    "eight-k": "unrelated prompts of --start tokens, one a stream and round (default: 8000)",
    "shared-prefix": "prompts of --start shared tokens and --step of their own, one a stream and "
    "round, from a cold cache on (defaults: 8000 and 1000)",
}
# rounds, start, step
SIZES = {
    "growing-prefix": (22, 120_000, 2_000),
    "eight-k": (8, 8_000, 0),
    "shared-prefix": (8, 8_000, 1_000),
}
NUMBERS = {
    "rounds": "how often (default: 22 times for growing-prefix, else 8)",
    "start": "tokens to begin with, see below",
    "step": "tokens that are added, see below",
    "streams": "requests that are sent together (default: 1)",
    "outputs": "tokens that a request generates (default: 1)",
    "unit": "tokens of a cache key (default: 128)",
    "kv_block": "tokens of a KV block, which divides the unit (default: 128)",
    "budget": "tokens of a forward (default: 8192)",
    "slots": "states, running ones included (default: 64)",
    "kv_tokens": "room for KV (default: for all that is sent)",
}
FLAGS = {
    "two_pass": "num_prefill_checkpoint_blocks=0, as a baseline",
    "draft_layer": "with draft-layer KV",
    "json": "one JSON object on stdout, no plot",
}
# least and most; together they take a gigabyte at worst
LIMITS = {
    "rounds": (1, 10_000),
    "start": (1, MAX_TOKENS),
    "step": (0, MAX_TOKENS),
    "streams": (1, 1_000),
    "outputs": (1, MAX_TOKENS),
    "unit": (1, MAX_TOKENS),
    "kv_block": (1, MAX_TOKENS),
    "budget": (1, MAX_TOKENS),
    "slots": (1, 1_000_000),
    "kv_tokens": (0, MAX_TOKENS),
}
VOCABULARY = 163_840
ALIGNMENT = 16  # of the kernel's exports, in tokens
PICTURE = Path("torch-kda-simulate.png")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is sent, and to what. Raises ValueError on construction, naming the option."""

    name: str
    rounds: int
    start: int  # tokens
    step: int  # tokens
    streams: int = 1
    outputs: int = 1  # tokens that each request generates
    unit: int = 128
    kv_block: int = 128
    budget: int = 8192  # tokens of a forward
    slots: int = 64  # states, running ones included
    kv_tokens: int = 0  # room for KV; 0: for all that is sent
    has_exports: bool = True  # False: num_prefill_checkpoint_blocks=0, the two-pass baseline
    has_draft_layer: bool = False  # with KV that depends on the next token

    def __post_init__(self) -> None:
        for field, (least, most) in LIMITS.items():
            check_count(f"simulate: {_option(field)}", getattr(self, field), least, most)
        if self.unit % ALIGNMENT:
            raise ValueError(f"simulate: --unit must be a multiple of {ALIGNMENT}, got {self.unit}")
        if self.unit % self.kv_block:
            raise ValueError(
                f"simulate: --kv-block must divide --unit {self.unit}, got {self.kv_block}"
            )
        if self.name == "eight-k" and self.step:
            raise ValueError(f"simulate: --step must be 0 for eight-k, got {self.step}")
        if self.sent_tokens > MAX_TOKENS:
            raise ValueError(
                "simulate: --streams, --rounds, --start, --step, --outputs, --unit must together "
                f"take <= {MAX_TOKENS:,} tokens of KV, got {self.sent_tokens:,}"
            )

    @property
    def longest(self) -> int:
        """Tokens of the longest request, its output included."""
        growth = {"growing-prefix": self.rounds * self.step, "shared-prefix": self.step}
        return self.start + growth.get(self.name, 0) + self.outputs

    @property
    def sent_tokens(self) -> int:
        """Room that all requests take when nothing is ever evicted."""
        if self.name == "growing-prefix":
            return self.streams * (self.longest + self.rounds * (self.outputs + self.unit))
        return self.streams * (self.rounds + 1) * (self.longest + self.unit)


class Round(NamedTuple):
    """What one round took."""

    prompt_tokens: int
    forwards: int
    tokens_computed: int  # anew, for whatever reason
    tokens_cached: int  # found: KV and state
    # computed again though their KV was found, for want of a state so deep: never of a cold prompt
    tokens_lost: int
    evictions: int  # of states and of units of KV, for want of room


@dataclass(frozen=True, slots=True)
class Outcome:
    """All rounds of a workload; what came before the first is not counted."""

    workload: Workload
    rounds: list[Round]
    slots_peak: int  # states held at once, running and cached

    def as_json(self) -> dict[str, int]:
        def total(field: str) -> int:
            return sum(getattr(a_round, field) for a_round in self.rounds)

        return {
            "rounds": len(self.rounds),
            "forwards": total("forwards"),
            "tokens_computed": total("tokens_computed"),
            "tokens_cached": total("tokens_cached"),
            "tokens_lost": total("tokens_lost"),
            "slots_peak": self.slots_peak,
            "evictions": total("evictions"),
        }


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def make_workload(name: str, **options: Any) -> Workload:
    """A workload with its own sizes but for those that are given and not None.

    Raises:
        ValueError: there is no such workload; an option is out of range.
    """
    if name not in SIZES:
        raise ValueError(f"simulate: WORKLOAD must be one of {', '.join(SIZES)}, got {name!r}")
    given = {key: value for key, value in options.items() if value is not None}
    sizes = dict(zip(("rounds", "start", "step"), SIZES[name], strict=True))
    return Workload(name=name, **{**sizes, **given})


def simulate(workload: Workload) -> Outcome:
    """Runs all rounds. The first prompts of growing streams are prefilled before.

    Raises:
        ValueError: sizes don't go together; a request doesn't fit.
    """
    scheduler = _make_scheduler(workload)
    prompts = _prompts(workload)
    _run(scheduler, next(prompts), workload.outputs)
    rounds = [_run(scheduler, sent, workload.outputs) for sent in prompts]
    return Outcome(workload, rounds, scheduler.counters.slots_peak)


def _make_scheduler(workload: Workload) -> Scheduler:
    tokens = workload.kv_tokens or workload.sent_tokens
    cache = PrefixCache(
        num_blocks=-(-tokens // workload.kv_block) + 1,
        block_size=workload.kv_block,
        num_slots=workload.slots,
        unit=workload.unit,
        lookahead=int(workload.has_draft_layer),
    )
    return Scheduler(
        cache,
        max_num_seqs=workload.streams,
        max_num_batched_tokens=workload.budget,
        max_model_len=workload.longest + 1,
        alignment=ALIGNMENT,
        num_prefill_checkpoint_blocks=16 if workload.has_exports else 0,
    )


def _prompts(workload: Workload) -> Iterator[list[array]]:
    """What is sent together; first what is not counted."""
    rng = random.Random(0)

    def tokens(count: int) -> array:
        return array("i", rng.choices(range(VOCABULARY), k=count))

    streams, start, step = range(workload.streams), workload.start, workload.step
    if workload.name == "growing-prefix":
        whole = [tokens(start + workload.rounds * step) for _ in streams]
        for index in range(workload.rounds + 1):
            yield [stream[: start + index * step] for stream in whole]
    elif workload.name == "shared-prefix":
        shared = tokens(start)
        yield []
        for _ in range(workload.rounds):
            yield [shared + tokens(step) for _ in streams]
    else:
        yield []
        for _ in range(workload.rounds):
            yield [tokens(start) for _ in streams]


def _run(scheduler: Scheduler, prompts: Sequence[array], num_outputs: int) -> Round:
    """Sends prompts together and runs them to their end."""
    counters, cache = scheduler.counters, scheduler.cache.counters
    sampling = SamplingParams(max_tokens=num_outputs)
    for index, prompt in enumerate(prompts):
        scheduler.enqueue(Request(f"{counters.steps}-{index}", prompt, sampling))
    steps, hit, lost = counters.steps, cache.hit_tokens, cache.lost_tokens
    evictions = cache.evictions_for_states + cache.evictions_for_kv
    computed = 0
    while scheduler.has_work:
        batch = scheduler.schedule()
        computed += sum(row.end - row.start for row in batch.rows)
        scheduler.commit(batch, [[0] if row.samples else [] for row in batch.rows])
    return Round(
        sum(map(len, prompts)),
        counters.steps - steps,
        computed,
        cache.hit_tokens - hit,
        cache.lost_tokens - lost,
        cache.evictions_for_states + cache.evictions_for_kv - evictions,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parse(arguments)
    if options.workload == "report":
        _report(options, arguments)
        return
    workload = make_workload(
        options.workload,
        **{name: getattr(options, name) for name in NUMBERS},
        has_exports=not options.two_pass,
        has_draft_layer=options.draft_layer,
    )
    if options.json:
        print(json.dumps(simulate(workload).as_json()))
        return
    picture = options.picture or PICTURE
    if can_draw():
        check_picture(picture)
    outcomes = [simulate(workload)]
    if workload.has_exports:
        outcomes.append(simulate(replace(workload, has_exports=False)))
    print_table(outcomes)
    print(draw(outcomes, picture))


def _report(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    if options.out is None:
        raise ValueError("simulate: report needs --out, a folder for the results")
    from .provenance import head_commit

    origin = {
        "command": shlex.join(["torch-kda", "bench", "simulate", *arguments]),
        "commit": options.commit or head_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
    for path in write_report(simulate, options.out, origin):
        print(path)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="torch-kda bench simulate",
        description="Forwards, cached and computed tokens of a workload on the real scheduler and "
        "cache, without a model.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="\n".join(f"{name}: {text}" for name, text in DESCRIPTIONS.items())
        + "\nreport: the published workloads, both ways, into --out; of the options it takes --out "
        f"and --commit.\n\n{LOST}\n{TWO_PASSES}",
    )
    parser.add_argument("workload", choices=[*SIZES, "report"], metavar="WORKLOAD")
    for name, text in NUMBERS.items():
        parser.add_argument(_option(name), type=int, metavar="N", help=text)
    for name, text in FLAGS.items():
        parser.add_argument(_option(name), action="store_true", help=text)
    parser.add_argument("--picture", type=Path, help=f"where the plot goes (default: {PICTURE})")
    parser.add_argument("--out", type=Path, help="folder for the results of report")
    parser.add_argument("--commit", help="what report is made with (default: git's HEAD)")
    options = parser.parse_args(arguments)
    if options.workload == "report":
        why = "report, which runs the published workloads and writes into --out"
        parser.refuse(options, (*NUMBERS, *FLAGS, "picture"), why)
    else:
        parser.refuse(options, ("out", "commit"), "one workload, which writes a --picture")
    if options.json:
        parser.refuse(options, ["picture"], "--json, which draws nothing")
    return options


if __name__ == "__main__":
    with clear_errors():
        main()
