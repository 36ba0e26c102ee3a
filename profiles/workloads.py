"""Streams of requests against an engine, and when everything happened."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ..kda.buckets import Shape, exact_shape
from ..kda.engine import Engine
from ..kda.handover import Turn
from ..kda.runner import LaunchedStep, ModelRunner, StepResult
from ..scheduler.batch import ScheduledBatch
from ..scheduler.request import SamplingParams


@dataclass(slots=True)
class StepRecord:
    """One step, as the host saw it. Seconds on one clock."""

    shape: Shape  # what it was padded to
    num_rows: int
    num_tokens: int  # of the prefill segment
    launched: float
    wait: float = 0.0  # the host waited for the device
    end: float = 0.0  # its tokens were on the host
    seconds: float = 0.0  # of the device: from the end of the step before, or from the launch


class StandIn:
    """Stands where an engine expects a runner, and tells somebody of each launch."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.on_launch: Callable[[ScheduledBatch], None] = lambda batch: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def shape_of(self, batch: ScheduledBatch) -> Shape:
        """What the runner pads the batch to."""
        rows, tokens = batch.num_decode_rows, batch.num_prefill_tokens
        recorded = self.runner.graphs and self.runner.graphs.find(rows, tokens)
        return recorded or exact_shape(rows, tokens)


class TimedRunner(StandIn):
    """A runner with a record for each step."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.steps: list[StepRecord] = []
        self._flying: list[StepRecord] = []
        self._last_end = 0.0

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        self.on_launch(batch)
        counts = (batch.num_decode_rows, batch.num_prefill_tokens)
        record = StepRecord(self.shape_of(batch), *counts, time.perf_counter())
        launched = self.runner.launch(batch)
        self._flying.append(record)
        return launched

    def finish(self, launched: LaunchedStep) -> StepResult:
        record = self._flying.pop(0)
        start = time.perf_counter()
        launched.turn.wait()
        record.end = time.perf_counter()
        record.wait = record.end - start
        record.seconds = record.end - max(self._last_end, record.launched)
        self._last_end = record.end
        self.steps.append(record)
        return self.runner.finish(launched)


class Clock(Protocol):
    """Tells the time in seconds: the wall's, or a simulation's."""

    def now(self) -> float: ...


class WallClock:
    def now(self) -> float:
        return time.perf_counter()


@dataclass(slots=True)
class RequestRecord:
    """One request. Seconds on the clock of the run."""

    submitted: float
    first_token: float = 0.0
    finished: float = 0.0
    num_prefills: int = 0  # forwards that computed tokens of its prompt
    scheduled: float | None = None  # launch of the first of them

    @property
    def ttft(self) -> float:
        return self.first_token - self.submitted

    @property
    def queued(self) -> float:
        assert self.scheduled is not None, "its prompt was never computed"
        return self.scheduled - self.submitted


class Client:
    """Submits to an engine, which runs on a stand-in, and notes what comes back."""

    def __init__(self, engine: Engine, *, num_new: int, clock: Clock | None = None) -> None:
        self.engine = engine
        self.records: dict[str, RequestRecord] = {}
        self._clock = clock or WallClock()
        self._sampling = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
        assert isinstance(engine.runner, StandIn)
        engine.runner.on_launch = self._note

    def _note(self, batch: ScheduledBatch) -> None:
        now = self._clock.now()
        for row in batch.prefill_rows:
            record = self.records.get(row.request_id)
            if record is not None:
                record.num_prefills += 1
                record.scheduled = now if record.scheduled is None else record.scheduled

    def submit(self, prompt: Sequence[int]) -> str:
        record = RequestRecord(self._clock.now())
        request_id = self.engine.submit(prompt, self._sampling)
        self.records[request_id] = record
        return request_id

    def step(self) -> list[str]:
        """One step of the engine; the requests that finished with it.

        Raises:
            RuntimeError: a request failed.
        """
        finished = []
        updates = self.engine.step()
        now = self._clock.now()
        for update in updates:
            if update.error:
                raise RuntimeError(f"{update.request_id} failed: {update.error}")
            record = self.records[update.request_id]
            record.first_token = record.first_token or now
            if update.finish_reason is not None:
                record.finished = now
                finished.append(update.request_id)
        return finished


def closed_loop(
    client: Client, prompts: Sequence[Sequence[Sequence[int]]], *, num_warm: int = 1
) -> list[RequestRecord]:
    """Each stream sends its next prompt when the one before is answered.

    Args:
        prompts: of each stream.
        num_warm: of each stream's first requests, which are not in the result.
    """
    left = [list(reversed(stream)) for stream in prompts]
    owner: dict[str, int] = {}
    measured: list[RequestRecord] = []
    counts = [0] * len(left)

    def send(stream: int) -> None:
        request_id = client.submit(left[stream].pop())
        owner[request_id] = stream
        if counts[stream] >= num_warm:
            measured.append(client.records[request_id])
        counts[stream] += 1

    for stream in range(len(left)):
        send(stream)
    while client.engine.has_work:
        for request_id in client.step():
            stream = owner[request_id]
            if left[stream]:
                send(stream)
    return measured


def bursts(
    client: Client, prompts: Sequence[Sequence[Sequence[int]]], *, num_warm: int = 1
) -> list[RequestRecord]:
    """All streams send at once, and again when all are answered."""
    measured: list[RequestRecord] = []
    for i, wave in enumerate(zip(*prompts, strict=True)):
        ids = [client.submit(prompt) for prompt in wave]
        while client.engine.has_work:
            client.step()
        if i >= num_warm:
            measured += [client.records[request_id] for request_id in ids]
    return measured


@dataclass(slots=True)
class StepModel:
    """Seconds of a step by its shape, learnt from steps that ran."""

    medians: dict[Shape, float] = field(default_factory=dict)

    @classmethod
    def learn(cls, steps: Sequence[StepRecord]) -> "StepModel":
        found: dict[Shape, list[float]] = {}
        for step in steps:
            found.setdefault(step.shape, []).append(step.seconds)
        return cls({shape: statistics.median(seconds) for shape, seconds in found.items()})

    def seconds(self, shape: Shape) -> float:
        """The shape's own median, else that of the nearest shape, scaled by tokens."""
        if shape in self.medians:
            return self.medians[shape]
        nearest = min(
            self.medians, key=lambda s: (bool(s.T) != bool(shape.T), abs(sum(s) - sum(shape)))
        )
        return self.medians[nearest] * max(sum(shape), 1) / max(sum(nearest), 1)


class SimulatedRunner(StandIn):
    """A runner that computes nothing and takes the time that a model of steps says.

    Its own clock: a step begins when the one before has ended, and `finish` waits for its end.
    """

    def __init__(self, runner: ModelRunner, steps: StepModel) -> None:
        super().__init__(runner)
        self._steps = steps
        self._now = self._free = 0.0
        self._ends: list[float] = []
        self._no_turn = Turn(torch.empty(0), memoryview(b""), None)

    def now(self) -> float:
        return self._now

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        self.on_launch(batch)
        self._free = max(self._free, self._now) + self._steps.seconds(self.shape_of(batch))
        self._ends.append(self._free)
        return LaunchedStep(batch, self._no_turn)

    def finish(self, launched: LaunchedStep) -> StepResult:
        self._now = self._ends.pop(0)
        samples = launched.batch.columns.samples
        return StepResult([[0] if is_new else [] for is_new in samples], [[] for _ in samples])


def random_prompts(
    rng: random.Random, num_streams: int, num_each: int, num_tokens: int, vocab_size: int
) -> list[list[list[int]]]:
    """Prompts that share nothing: of each stream, of each request, so many ids."""
    return [
        [rng.choices(range(vocab_size), k=num_tokens) for _ in range(num_each)]
        for _ in range(num_streams)
    ]
