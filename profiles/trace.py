"""Traces of single-pass and two-pass prefill: `torch-kda profile` records them and reads them.

Each way of running is traced twice: eagerly, with a range for each layer and each op, and as the
engine runs, compiled and replayed, where such ranges do not exist.
"""

import argparse
import csv
import gzip
import json
import random
import shlex
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..kda.build import build_engine, load_model
from ..kda.command import clear_errors, make_folder
from ..kda.config import MAX_LAYERS, EngineConfig
from ..kda.mixers import KDAMixer
from ..kda.model import Block, KDAForCausalLM
from ..kda.presets import model_preset
from ..kda.runner import LaunchedStep, ModelRunner, StepResult
from ..scheduler.batch import ScheduledBatch
from .options import MAX_TOKENS, Parser, integer
from .workloads import Client, StandIn

DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
OUR_OPS = "torch_kda::"
SUFFIX = ".pt.trace.json.gz"  # what TensorBoard's plug-in looks for
MODES = {"single-pass": {}, "two-pass": {"num_prefill_checkpoint_blocks": 0}}


class Event(NamedTuple):
    """One range of a trace, in us."""

    name: str
    kind: str  # "kernel", "cpu_op", "user_annotation", ...
    start: float
    us: float
    thread: Any
    correlation: int | None  # of a kernel and of the call that launched it

    @property
    def end(self) -> float:
        return self.start + self.us


class Recording:
    """A trace that is being, or has been, recorded."""

    def __init__(self, profiler: profile) -> None:
        self._profiler = profiler

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._profiler.export_chrome_trace(str(path))

    def events(self) -> list[Event]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f"trace{SUFFIX}"
            self.save(path)
            return load_events(path)


@contextmanager
def recording(device: str) -> Iterator[Recording]:
    """Records what happens inside."""
    activities = [ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with profile(activities=activities) as profiler:
        yield Recording(profiler)
        if device != "cpu":
            torch.cuda.synchronize()


def load_events(path: Path) -> list[Event]:
    """The ranges of a trace file, by start."""
    with gzip.open(path, "rt") as file:
        content = json.load(file)
    events = [
        Event(
            item["name"],
            item.get("cat", ""),
            float(item["ts"]),
            float(item["dur"]),
            item.get("tid"),
            item.get("args", {}).get("correlation"),
        )
        for item in content["traceEvents"]
        if item.get("ph") == "X"
    ]
    return sorted(events, key=lambda event: event.start)


def device_events(events: Sequence[Event]) -> list[Event]:
    """What kept the device busy; on a CPU the outermost ops of the thread that computed."""
    found = [event for event in events if event.kind in DEVICE_KINDS]
    if found:
        return found
    outermost, end = [], float("-inf")
    for event in events:
        if event.kind == "cpu_op" and event.start >= end:
            outermost.append(event)
            end = event.end
    return outermost


def busy_us(events: Sequence[Event]) -> float:
    """Time in which at least one of the events ran."""
    total, end = 0.0, float("-inf")
    for event in events:
        total += max(0.0, event.end - max(event.start, end))
        end = max(end, event.end)
    return total


def span_us(events: Sequence[Event]) -> float:
    """From the first one's start to the last one's end."""
    return max(event.end for event in events) - events[0].start if events else 0.0


def forwards(events: Sequence[Event]) -> list[Event]:
    """The ranges of the model's forwards, as `TracedRunner` labels them."""
    found = [event for event in events if event.name.startswith("ProfilerStep#")]
    # torch repeats host ranges on the device's time line
    return [event for event in found if event.kind == "user_annotation"]


def idle_share(events: Sequence[Event]) -> float:
    """Share of the time from the device's first work to its last in which it does nothing."""
    found = device_events(events)
    span = span_us(found)
    return 1 - busy_us(found) / span if span > 0 else 0.0


def gaps_us(events: Sequence[Event]) -> list[float]:
    """Times in which none of the events ran, between the first and the last."""
    gaps, end = [], None
    for event in events:
        if end is not None and event.start > end:
            gaps.append(event.start - end)
        end = event.end if end is None else max(end, event.end)
    return gaps


def op_of_kernels(events: Sequence[Event]) -> dict[int, str]:
    """By correlation, the op of ours that launched a kernel; others are not in it."""
    ops = [event for event in events if event.kind == "cpu_op" and event.name.startswith(OUR_OPS)]
    starts = [op.start for op in ops]
    found: dict[int, str] = {}
    for event in events:
        if event.correlation is None or event.kind in DEVICE_KINDS:
            continue
        at = bisect_right(starts, event.start) - 1
        if at >= 0 and event.start < ops[at].end and event.thread == ops[at].thread:
            found[event.correlation] = ops[at].name.removeprefix(OUR_OPS)
    return found


class TracedRunner(StandIn):
    """A runner whose steps are labelled for people and, as steps, for TensorBoard."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._num_steps = 0

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        self.on_launch(batch)
        rows = batch.prefill_rows
        parts = [f"[{row.start}, {row.end})" for row in rows]
        kept = [str(position) for row in rows for position, _ in row.exports]
        label = f"prefill {' '.join(parts)}" + (f", keeps {' '.join(kept)}" if kept else "")
        with record_function(f"ProfilerStep#{self._num_steps}"), record_function(label):
            launched = self.runner.launch(batch)
        self._num_steps += 1
        return launched

    def finish(self, launched: LaunchedStep) -> StepResult:
        with record_function("wait for the device"):
            return self.runner.finish(launched)


@contextmanager
def labelled_layers(model: KDAForCausalLM) -> Iterator[None]:
    """A range around each half of each layer; for eager steps."""
    handles = []
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        mixer = "KDA" if isinstance(block.mixer, KDAMixer) else "MLA"
        for module, label in ((block.mixer, mixer), (block.mlp, type(block.mlp).__name__)):
            handles += _label(module, f"layer {i} {label}")
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _label(module: torch.nn.Module, label: str) -> list[Any]:
    open_ranges: list[record_function] = []

    def begin(*_: object) -> None:
        open_ranges.append(record_function(label))
        open_ranges[-1].__enter__()

    def end(*_: object) -> None:
        open_ranges.pop().__exit__(None, None, None)

    return [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One prompt under both ways of running it."""

    runner: ModelRunner
    config: EngineConfig
    num_tokens: int
    facts: dict[str, str | None]  # what the report says of the run: commit and command

    def write(self, out: Path) -> Iterator[Path]:
        """Traces, kernels.csv and the report; gives each file as it is written."""
        from .report import write_report

        traces: dict[str, list[Event]] = {}
        ways = {"eager": True} | ({"replay": False} if self.runner.is_compiled else {})
        for way, is_eager in ways.items():
            with self._way(is_eager=is_eager):
                self.warm_up()
                for mode in MODES:
                    path = out / mode / f"{way}{SUFFIX}"
                    self.record(mode, path)
                    traces[f"{mode} {way}"] = load_events(path)
                    yield path
        write_kernels(out / "kernels.csv", traces)
        yield out / "kernels.csv"
        yield from write_report(traces, self, out)

    @contextmanager
    def _way(self, *, is_eager: bool) -> Iterator[None]:
        if not is_eager:
            yield
            return
        with self.runner.eager(), labelled_layers(self.runner.model):
            yield

    def warm_up(self) -> None:
        """Record every mode and throw it away.

        The first recordings of a process take longer than those after them, and the profiler has a
        part in it: on a CPU 10 ms of 80, which made the mode that came first look slow.
        """
        for mode in MODES:
            self.prefill(mode, seed=0)

    def record(self, mode: str, path: Path) -> None:
        """Trace the prefill of a cold prompt to a file."""
        self.prefill(mode, seed=1).save(path)

    def prefill(self, mode: str, *, seed: int) -> Recording:
        """The recording of one cold prompt."""
        config = replace(self.config, **MODES[mode])
        # before it starts: to make an engine may take a full collection of garbage
        client = self._client(config, seed)
        with recording(config.device) as found:
            while client.engine.has_work:
                client.step()
        return found

    def _client(self, config: EngineConfig, seed: int) -> Client:
        vocab = self.runner.model.config.vocab_size
        rng = random.Random(seed)
        client = Client(build_engine(TracedRunner(self.runner), config, None), num_new=1)  # type: ignore[arg-type]
        client.submit(rng.choices(range(vocab), k=self.num_tokens))
        return client


def write_kernels(path: Path, traces: dict[str, list[Event]]) -> None:
    """kernels.csv: what ran on the device, by trace and name, the longest first."""
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["trace", "op", "kernel", "calls", "us", "share"])
        for trace, events in traces.items():
            for row in kernel_rows(events):
                table.writerow([trace, *row])


def kernel_rows(events: Sequence[Event]) -> list[tuple[str, str, int, float, float]]:
    """(op of ours or "", kernel, calls, us, share of the busy time), the longest first."""
    found = device_events(events)
    ops = op_of_kernels(events)
    sums: dict[tuple[str, str], list[float]] = {}
    for event in found:
        op = ops.get(event.correlation or -1, "")
        if event.name.startswith(OUR_OPS):
            op = event.name.removeprefix(OUR_OPS)
        entry = sums.setdefault((op, event.name), [0, 0.0])
        entry[0] += 1
        entry[1] += event.us
    busy = busy_us(found) or 1.0
    longest = sorted(sums.items(), key=lambda item: -item[1][1])
    return [
        (op, name, int(calls), round(us, 1), round(us / busy, 5))
        for (op, name), (calls, us) in longest
    ]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Checked options; a wrong one ends the program with what is right."""
    parser = Parser(
        prog="torch-kda profile", description="Trace single-pass and two-pass prefill of a prompt."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for traces and report")
    parser.add_argument("--commit", help="what is traced (default: git's HEAD)")
    parser.add_argument("--model", help="a preset (default: tiny on a CPU, else Kimi-Linear)")
    parser.add_argument("--layers", type=integer(1, MAX_LAYERS), help="of the stack (default: all)")
    parser.add_argument(
        "--tokens", type=integer(2, MAX_TOKENS), help="of the prompt (default: 8000; 500 on a CPU)"
    )
    parser.add_argument(
        "--unit", type=integer(1, MAX_TOKENS), help="prefix_match_unit (default: 1536; 96 on a CPU)"
    )
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    compiled = parser.add_mutually_exclusive_group()
    compiled.add_argument("--compile-cache", type=Path, help="folder of kept compilations")
    compiled.add_argument("--no-compile", action="store_true", help="eager traces only")
    options = parser.parse_args(arguments)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    is_cpu = options.device == "cpu"
    if is_cpu:
        parser.refuse(options, ["compile_cache"], "a CPU, where traces are eager")
    options.model = options.model or ("tiny" if is_cpu else "kimi-linear-48b-a3b")
    options.tokens = options.tokens or (500 if is_cpu else 8000)
    options.unit = options.unit or (96 if is_cpu else 1536)
    if options.tokens <= options.unit:
        parser.error(
            f"argument --tokens: expected more than --unit {options.unit:,}, got {options.tokens}: "
            "a shorter prompt takes one forward either way"
        )
    return options


def scenario(options: argparse.Namespace) -> Scenario:
    """The model, loaded and, if wanted, compiled and recorded for the steps of this prompt."""
    tokens, unit = options.tokens, options.unit
    overrides = {} if options.layers is None else {"num_hidden_layers": options.layers}
    budget = -(-tokens // 16) * 16 + 32
    last = (tokens - 1) // unit * unit
    sizes = {-(-size // 16) * 16 for size in (tokens, last, tokens - last) if size > 0}
    config = EngineConfig(
        device=options.device,
        max_num_seqs=2,
        max_num_batched_tokens=budget,
        max_model_len=budget + 64,
        prefix_match_unit=unit,
        kv_block_size=16 if unit % 64 else 64,
        num_state_slots=16,
        num_kv_blocks=4 * -(-(budget + 64) // 16),
        decode_buckets=(2,),
        prefill_buckets=tuple(sorted(sizes)),
        compile=options.device != "cpu" and not options.no_compile,
        compile_cache=str(options.compile_cache) if options.compile_cache else None,
    )
    model_config = config.resolve(model_preset(options.model, **overrides))
    runner = ModelRunner(load_model(model_config, config, None), config)
    facts = {"commit": options.commit, "command": None}
    return Scenario(runner, config, tokens, facts)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Writes traces, kernels.csv, report.md and report.html."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.device == "cpu":
        torch.set_num_threads(
            1
        )  # more of them wait for each other on a busy machine: 1 s for 80 ms
    make_folder(options.out)
    found = scenario(options)
    found.facts["command"] = shlex.join(["torch-kda", "profile", *arguments])
    for file in found.write(options.out):
        print(file, flush=True)


if __name__ == "__main__":
    with clear_errors():
        main()
