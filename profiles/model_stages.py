"""The stages of the model bench, all on one runner."""

import argparse
import json
import random
import shlex
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from ..kda.build import build_engine, describe, load_model
from ..kda.command import make_folder
from ..kda.compilation import num_compilations, num_graph_breaks
from ..kda.config import EngineConfig
from ..kda.engine import Engine
from ..kda.presets import model_preset
from ..kda.runner import ModelRunner
from ..scheduler.request import SamplingParams
from . import trace
from .decode_op import time_kda_decode
from .floors import Floors, counting_experts
from .greedy import compare_greedy
from .model_report import markdown
from .provenance import origin
from .timing import copy_bytes_per_second, on_each_core, time_calls
from .workloads import (
    Client,
    RequestRecord,
    SimulatedRunner,
    StepModel,
    StepRecord,
    TimedRunner,
    bursts,
    closed_loop,
    random_prompts,
)

MODES = {"single_pass": {}, "two_pass": {"num_prefill_checkpoint_blocks": 0}}
STAGES = ("closed", "prefill", "turns", "decode", "burst", "greedy", "idle", "profile", "warm")
HOST_CORES = 8  # that measured decode steps are spread over, if there are as many
SETTLING = 2  # first steps on a core, in whose caches nothing of ours is yet


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the bench runs."""

    prompt: int  # tokens of a prompt of the streams
    new: int  # tokens generated for each
    unit: int  # prefix_match_unit: two passes part the prompt at its last multiple
    budget: int  # tokens of a step
    streams: tuple[int, ...]
    requests: int  # of a stream, after one to warm up
    burst_new: int
    prefill: tuple[int, ...]
    turns: tuple[int, ...]  # tokens of a context that is cached
    turn: int  # new tokens behind it
    batches: tuple[int, ...]  # of decode
    context: int  # tokens before decode
    decode_steps: int  # measured
    greedy: tuple[int, int, int]  # prompts, tokens of each, tokens generated
    kv_block: int
    num_slots: int
    num_blocks: int
    prefill_buckets: tuple[int, ...]


@dataclass(slots=True)
class Run:
    """One workload in one mode."""

    requests: list[RequestRecord]
    steps: list[StepRecord]
    predicted_ms: float  # mean TTFT that a simulation with this run's step times gives

    @property
    def ttft_ms(self) -> float:
        return 1e3 * statistics.mean(request.ttft for request in self.requests)

    @property
    def num_forwards(self) -> float:
        """Forwards for one prompt, the mean."""
        return statistics.mean(request.num_prefills for request in self.requests)

    def detail(self) -> dict[str, Any]:
        """Figures behind the mean."""
        ttft = sorted(1e3 * request.ttft for request in self.requests)
        steps = [step for step in self.steps if step.num_tokens]
        decode = [step for step in self.steps if not step.num_tokens]
        found = {
            "ttft_ms_mean": self.ttft_ms,
            "ttft_ms_p50": statistics.median(ttft),
            "ttft_ms_p90": ttft[min(len(ttft) - 1, int(0.9 * len(ttft)))],
            "queue_ms_mean": 1e3 * statistics.mean(r.queued for r in self.requests),
            "requests": len(ttft),
            "steps": len(self.steps),
            "prefill_steps": len(steps),
            "prefill_step_ms_p50": _median([1e3 * step.seconds for step in steps]),
            "decode_step_ms_p50": _median([1e3 * step.seconds for step in decode]),
            "model_ttft_ms_mean": self.predicted_ms,
        }
        return {key: _short(value) for key, value in found.items()}


@dataclass(slots=True)
class Bench:
    """The stages, on one runner."""

    options: argparse.Namespace
    arguments: Sequence[str]
    data: dict[str, Any] = field(init=False)
    runner: ModelRunner = field(init=False)
    config: EngineConfig = field(init=False)
    started: float = field(init=False)
    copy_rate: float | None = None  # bytes read and written a second
    matmul_rate: float | None = None  # bf16 operations a second

    def __post_init__(self) -> None:
        self.started = time.perf_counter()
        self.data = {
            "meta": {},
            "ttft": [],
            "prefill": [],
            "decode": [],
            "compile": {"graph_breaks": None, "recompiles": None, "cold_s": None, "warm_s": None},
            "idle_share": None,
            "greedy_equal_share": None,
        }

    @property
    def sizes(self) -> Sizes:
        return self.options.sizes

    def run(self) -> list[Path]:
        """All stages that the time allows; what is measured is written after each, to files that
        are returned.
        """
        with tempfile.TemporaryDirectory() as scratch:
            self.start(Path(scratch))
            stages: dict[str, Callable[[], None]] = {
                "closed": lambda: self.streams("closed", closed_loop, self.sizes.new),
                "prefill": self.prefill,
                "turns": self.turns,
                "decode": self.decode,
                "burst": lambda: self.streams("burst", bursts, self.sizes.burst_new),
                "greedy": self.greedy,
                "idle": self.idle,
                "profile": self.profile,
                "warm": self.warm,
            }
            for name in STAGES:
                if name not in self.options.stages:
                    continue
                if self.minutes > self.options.minutes:
                    self.say(f"{name}: no time left")
                    self.data["meta"].setdefault("skipped", []).append(name)
                    continue
                begun = self.minutes
                stages[name]()
                self.count_recompiles()
                self.say(f"{name}: {60 * (self.minutes - begun):.0f} s")
                self.write()
        return self.write()

    @property
    def command(self) -> list[str]:
        return ["torch-kda", "bench", "model", *self.arguments]

    @property
    def minutes(self) -> float:
        return (time.perf_counter() - self.started) / 60

    def say(self, line: str) -> None:
        print(f"[{60 * self.minutes:5.0f} s] {line}", flush=True)

    def start(self, scratch: Path) -> None:
        """Weights, compilation, graphs, and what the machine can do."""
        options, sizes = self.options, self.sizes
        overrides = {} if options.layers is None else {"num_hidden_layers": options.layers}
        longest = max(*sizes.prefill, sizes.prompt + sizes.new, sum(sizes.greedy[1:])) + 64
        self.config = EngineConfig(
            device=options.device,
            seed=options.seed,
            max_num_seqs=max(*sizes.batches, *sizes.streams),
            max_num_batched_tokens=sizes.budget,
            max_model_len=longest,
            prefix_match_unit=sizes.unit,
            kv_block_size=sizes.kv_block,
            num_state_slots=sizes.num_slots,
            num_kv_blocks=max(sizes.num_blocks, -(-longest // sizes.kv_block)),
            decode_buckets=tuple(sorted({*sizes.batches, 2, 4, 8, 16})),
            prefill_buckets=sizes.prefill_buckets,
            compile=not options.no_compile,
            compile_cache=None if options.no_compile else str(options.compile_cache or scratch),
        )
        model_config = self.config.resolve(model_preset(options.model, **overrides))
        model = load_model(model_config, self.config, None)
        self.say(f"{model_config.name}: {model_config.num_hidden_layers} layers of weights")
        if options.device != "cpu":
            device = torch.device(options.device)
            self.copy_rate = copy_bytes_per_second(device)
            self.matmul_rate = measured_matmul_rate(device)
            torch.cuda.empty_cache()
        self.runner = ModelRunner(model, self.config)
        self.data["compile"] |= {
            "graph_breaks": num_graph_breaks(),
            "recompiles": 0,
            "warm_s" if self.runner.is_warm_start else "cold_s": _short(
                self.runner.compile_seconds
            ),
        }
        if options.no_compile:
            self.data["compile"] |= {"graph_breaks": None, "recompiles": None, "cold_s": None}
        self._compiled = num_compilations()
        self.data["meta"] = self.meta()
        for line in self.data["meta"]["engine"]:
            self.say(line)
        self.write()

    _compiled: int = 0

    def meta(self) -> dict[str, Any]:
        """What a number depends on."""
        options, runner = self.options, self.runner
        model, config = runner.model, runner.model.config
        return self.data["meta"] | {
            **origin(torch.device(options.device), options.commit, self.command),
            "model": config.name,
            "layers": config.num_hidden_layers,
            "dtype": config.dtype,
            "weights_gib": _short(sum(w.nbytes for w in model.parameters()) / 2**30),
            "pools_gib": _short(runner.plan.total_bytes / 2**30),
            "graphs": str(runner.captured) if runner.captured else None,
            "engine": describe(self.engine("single_pass")),
            "copy_tb_s": _short(self.copy_rate and self.copy_rate / 1e12),
            "matmul_tflop_s": _short(self.matmul_rate and self.matmul_rate / 1e12),
            "workload": f"{self.sizes.prompt} tokens in, {self.sizes.new} out, "
            f"{self.sizes.requests} requests a stream after one to warm up, budget "
            f"{self.sizes.budget}, unit {self.sizes.unit}, cache cold for each prompt",
            "decode_context": self.sizes.context,
            "ttft_detail": {},
        }

    def engine(self, mode: str, runner: Any = None) -> Engine:
        """A cold engine over the one runner, or over what stands in for it."""
        config = replace(self.config, **MODES[mode])
        return build_engine(runner or self.runner, config, None)

    # stages

    def streams(self, name: str, drive: Callable[..., list[RequestRecord]], num_new: int) -> None:
        """Both modes, at each number of streams, on the same prompts."""
        for count in self.sizes.streams:
            runs = {mode: self.one_run(mode, count, drive, num_new) for mode in MODES}
            single, two = runs["single_pass"], runs["two_pass"]
            self.data["ttft"].append(
                {
                    "workload": name,
                    "tokens": self.sizes.prompt,
                    "concurrency": count,
                    "single_pass_ms": _short(single.ttft_ms),
                    "two_pass_ms": _short(two.ttft_ms),
                    "single_forwards": _short(single.num_forwards),
                    "two_forwards": _short(two.num_forwards),
                    "eager_fla_ms": self.peer_value("prefill_ms", self.sizes.prompt)
                    if count == 1
                    else None,
                }
            )
            details = self.data["meta"]["ttft_detail"]
            details[f"{name} {count}"] = {mode: run.detail() for mode, run in runs.items()}
            self.say(
                f"{name}, {count} streams: single pass {single.ttft_ms:.1f} ms, two passes "
                f"{two.ttft_ms:.1f} ms ({1 - single.ttft_ms / two.ttft_ms:.1%} less), by its "
                f"step times {two.predicted_ms:.1f} ms ({two.predicted_ms / two.ttft_ms - 1:+.1%})"
            )

    def one_run(
        self, mode: str, count: int, drive: Callable[..., list[RequestRecord]], num_new: int
    ) -> Run:
        vocab = self.runner.model.config.vocab_size
        rng = random.Random(f"{self.options.seed} {count}")
        num_each = self.sizes.requests + 1
        prompts = random_prompts(rng, count, num_each, self.sizes.prompt, vocab)
        timed = TimedRunner(self.runner)
        requests = drive(Client(self.engine(mode, timed), num_new=num_new), prompts)
        simulated = SimulatedRunner(self.runner, StepModel.learn(timed.steps))
        client = Client(self.engine(mode, simulated), num_new=num_new, clock=simulated)
        predicted = statistics.mean(request.ttft for request in drive(client, prompts))
        return Run(requests, timed.steps, 1e3 * predicted)

    def prefill(self) -> None:
        """One prompt alone, from submission to its first token."""
        floors = Floors.of(self.runner)
        rng = random.Random(self.options.seed)
        for tokens in self.sizes.prefill:
            rounds = 3 if tokens <= 32768 else 1
            ms = _median([self.prompt_ms(rng, tokens) for _ in range(rounds + 1)][1:])
            share = None
            if self.matmul_rate is not None and ms is not None:
                share = floors.prefill_flops(tokens) / (ms / 1e3) / self.matmul_rate
            row = {"tokens": tokens, "ms": _short(ms), "matmul_share": _short(share)}
            self.data["prefill"].append(row)
            self.say(f"prefill: {_fields(row)}")
        with self.runner.eager():
            ms = [self.prompt_ms(rng, self.sizes.prompt) for _ in range(3)]
        self.data["meta"]["eager_prefill_ms"] = {str(self.sizes.prompt): _short(_median(ms[1:]))}

    def prompt_ms(self, rng: random.Random, tokens: int) -> float:
        return 1e3 * self.first_token(self.client(), self.prompt(rng, tokens)).ttft

    def turns(self) -> None:
        """A prompt that goes on from one whose states and KV are cached."""
        rng, rows = random.Random(self.options.seed), []
        for context in self.sizes.turns:
            client, prompt = self.client(), self.prompt(rng, context)
            alone = self.first_token(client, prompt)
            counters = client.engine.scheduler.cache.counters
            found, before = [], counters.hit_tokens
            for _ in range(4):
                turn = [*prompt, *self.prompt(rng, self.sizes.turn)]
                found.append(self.first_token(client, turn))
            row = {
                "context": context,
                "new": self.sizes.turn,
                "cached": (counters.hit_tokens - before) // len(found),
                "context_ms": _short(1e3 * alone.ttft),
                "ms": _short(_median([1e3 * record.ttft for record in found[1:]])),
                "forwards": statistics.mean(record.num_prefills for record in found),
            }
            rows.append(row)
            self.say(f"turn: {_fields(row)}")
        self.data["meta"]["turns"] = rows

    def client(self) -> Client:
        """Of an engine with an empty cache."""
        return Client(self.engine("single_pass", TimedRunner(self.runner)), num_new=1)

    def prompt(self, rng: random.Random, tokens: int) -> list[int]:
        return rng.choices(range(self.runner.model.config.vocab_size), k=tokens)

    def first_token(self, client: Client, prompt: Sequence[int]) -> RequestRecord:
        """Of a prompt that is alone."""
        request_id = client.submit(prompt)
        while client.engine.has_work:
            client.step()
        return client.records[request_id]

    def decode(self) -> None:
        """Steps of decode rows alone."""
        floors = Floors.of(self.runner)
        eager: dict[str, float | None] = {}
        hosts: dict[str, dict[str, float | None]] = {}
        for batch in self.sizes.batches:
            timed = TimedRunner(self.runner)
            engine = self.decoding(timed, batch)
            step_us, host = self.decode_us(engine, timed)
            hosts[str(batch)] = {key: _short(value) for key, value in host.items()}
            with self.runner.eager(), counting_experts() as experts:
                engine.step()
                engine.step()
            if batch in (1, 64):
                with self.runner.eager():
                    eager[str(batch)] = _short(self.decode_us(engine, timed, steps=8)[0])
            floor = None
            if self.copy_rate is not None:
                num_experts = statistics.mean(experts) if experts else 0
                moved = floors.decode_bytes(batch, self.sizes.context, num_experts)
                floor = 1e6 * moved / self.copy_rate
            kda_floor = self.copy_rate and 1e6 * floors.kda_decode_bytes(batch) / self.copy_rate
            row = {
                "batch": batch,
                "step_us": step_us,
                "floor_us": floor,
                "host_us": host["least_us"],
                "kda_us": time_kda_decode(self.runner, batch) if self.copy_rate else None,
                "kda_floor_us": kda_floor,
                "eager_fla_step_us": self.peer_value("decode_us", batch),
            }
            self.data["decode"].append({key: _short(value) for key, value in row.items()})
            self.say(f"decode: {_fields(self.data['decode'][-1])}")
        self.data["meta"] |= {"eager_decode_us": eager, "host_detail": hosts}

    def decoding(self, timed: TimedRunner, batch: int) -> Engine:
        """An engine in which so many requests decode and nothing else happens."""
        sizes = self.sizes
        rng = random.Random(batch)
        engine = self.engine("single_pass", timed)
        sampling = SamplingParams(temperature=0, max_tokens=4 * sizes.unit, ignore_eos=True)
        for _ in range(batch):
            engine.submit(self.prompt(rng, sizes.context), sampling)
        while not (timed.steps and timed.steps[-1].num_rows == batch):
            engine.step()
        return engine

    def decode_us(
        self, engine: Engine, timed: TimedRunner, steps: int | None = None
    ) -> tuple[float, dict[str, float]]:
        """The median step; and of the host's work for one, without its wait for the device, the
        medians on several cores: the least, their median and the greatest.
        """
        steps = steps or self.sizes.decode_steps
        rounds = max(min(HOST_CORES, steps // 2), 1)
        for _ in range(3):
            engine.step()
        first = len(timed.steps)
        hosts: dict[int | None, list[float]] = defaultdict(list)
        with closing(on_each_core(rounds)) as cores:
            for core in cores:
                for step in range(SETTLING + steps // rounds):
                    start = time.perf_counter()
                    engine.step()
                    seconds = time.perf_counter() - start - timed.steps[-1].wait
                    if step >= SETTLING:
                        hosts[core].append(1e6 * seconds)
        step_us = 1e6 * statistics.median(step.seconds for step in timed.steps[first:])
        medians = [statistics.median(us) for us in hosts.values()]
        return step_us, {
            "cores": sum(core is not None for core in hosts),  # none where they can't be chosen
            "least_us": min(medians),
            "median_us": statistics.median(medians),
            "most_us": max(medians),
        }

    def greedy(self) -> None:
        """Greedy tokens as the engine runs, against the same engine run eagerly."""
        prompts, length, new = self.sizes.greedy
        rng = random.Random(self.options.seed)
        ids = [self.prompt(rng, length) for _ in range(prompts)]
        found = compare_greedy(self.runner, lambda: self.engine("single_pass"), ids, new)
        self.data["greedy_equal_share"] = _short(found.equal_share)
        self.data["meta"]["greedy"] = found.as_json()
        self.say(f"greedy: {found.equal_share:.1%} of {prompts} prompts equal over {new} tokens")

    def idle(self) -> None:
        """How much of a prefill step the device does nothing."""
        if self.options.device == "cpu":
            return
        rng = random.Random(self.options.seed)
        self.prompt_ms(rng, self.sizes.prompt)
        shares = []
        for _ in range(3):
            with trace.recording(self.options.device) as recorded:
                self.prompt_ms(rng, self.sizes.prompt)
            shares.append(trace.idle_share(recorded.events()))
        self.data["idle_share"] = _short(_median(shares))
        self.say(f"idle share of a prefill: {self.data['idle_share']}")

    def profile(self) -> None:
        """What `torch-kda profile` writes, without another start, into a folder of its name."""
        facts = {"commit": self.options.commit, "command": shlex.join(self.command)}
        scenario = trace.Scenario(self.runner, self.config, self.sizes.prompt, facts)
        for file in scenario.write(self.options.out / "profile"):
            self.say(str(file))

    def warm(self) -> None:
        """Compile again with what was kept, and nothing else."""
        if not self.runner.is_compiled or self.runner.is_warm_start:
            return
        from torch._inductor.utils import fresh_cache

        torch._dynamo.reset()
        with torch.inference_mode(), fresh_cache():
            self.runner.compile_steps(self.config)
        assert self.runner.is_warm_start, "nothing was kept"
        self.data["compile"]["warm_s"] = _short(self.runner.compile_seconds)
        self._compiled = num_compilations()

    def count_recompiles(self) -> None:
        if self.runner.is_compiled:
            self.data["compile"]["recompiles"] += num_compilations() - self._compiled
            self.data["compile"]["graph_breaks"] = num_graph_breaks()
            self._compiled = num_compilations()

    def peer_value(self, kind: str, size: int) -> float | None:
        peer = self.data["meta"].get("peer")
        return _short(peer[kind].get(str(size))) if peer else None

    def write(self) -> list[Path]:
        return write(self.data, self.options.out)


def write(data: dict[str, Any], out: Path) -> list[Path]:
    """model.json and its page; returns what was written."""
    make_folder(out)
    results, page = out / "model.json", out / "model.md"
    results.write_text(json.dumps(data, indent=1) + "\n")
    page.write_text(markdown(data))
    return [results, page]


def measured_matmul_rate(device: torch.device, size: int = 8192) -> float:
    """bf16 operations a second of a large square product of random numbers."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    (timing,) = time_calls({"matmul": [lambda: a @ b] * 2}, rounds=10).values()
    return 2 * size**3 / (timing.median_us * 1e-6)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _fields(row: dict[str, float | None]) -> str:
    """What was measured, as a line for people."""
    return ", ".join(f"{name} {value:,}" for name, value in row.items() if value is not None)


def _short(value: float | None) -> float | None:
    """Four digits; counts as they are."""
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")
