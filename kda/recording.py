"""An engine whose forwards are remembered: when they ran, what they computed, their logits."""

import time
from collections import deque
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..scheduler.batch import ScheduledBatch
from ..scheduler.request import SamplingParams
from .build import build_engine
from .config import EngineConfig
from .engine import Engine
from .model import KDAForCausalLM
from .runner import LaunchedStep, ModelRunner, StepResult
from .step import StepInputs
from .timeline import Forward, Lane
from .tokenizer import Tokenizer


@dataclass(slots=True)
class RequestRun:
    """What one request did in one session."""

    prompt: list[int]
    forwards: list[Forward] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # [vocab] fp32 of each generated token
    token_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0
    ttft_s: float = 0.0

    @property
    def prefills(self) -> list[Forward]:
        return [forward for forward in self.forwards if not forward.is_decode]

    @property
    def num_exports(self) -> int:
        """States that forwards wrote for the cache beside their final one."""
        return sum(len(forward.exports) for forward in self.prefills)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens of the prompt that went through the model."""
        return sum(forward.num_tokens for forward in self.prefills)

    def lane(self, name: str) -> Lane:
        return Lane(
            name=name,
            forwards=self.forwards,
            num_cached_tokens=self.num_cached_tokens,
            ttft_s=self.ttft_s,
        )


class RecordingRunner(ModelRunner):
    """A runner, eager, that remembers when each step ran and what logits it gave."""

    def __init__(self, model: KDAForCausalLM, config: EngineConfig) -> None:
        super().__init__(model, replace(config, compile=False, cuda_graphs=False))
        self.steps: list[tuple[float, float, ScheduledBatch, Tensor]] = []
        self._started = deque[tuple[float, Tensor]]()
        self._last_logits = torch.empty(0)

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        start = time.perf_counter()
        launched = super().launch(batch)
        self._started.append((start, self._last_logits))
        return launched

    def finish(self, launched: LaunchedStep) -> StepResult:
        result = super().finish(launched)
        start, logits = self._started.popleft()
        self.steps.append((start, time.perf_counter(), launched.batch, logits))
        return result

    def forward(self, inputs: StepInputs) -> Tensor:
        self._last_logits = super().forward(inputs)
        return self._last_logits


class Session:
    """One engine, cold at first; requests run one after the other."""

    def __init__(self, model: KDAForCausalLM, config: EngineConfig) -> None:
        self.runner = RecordingRunner(model, config)
        self.engine: Engine = build_engine(self.runner, config, Tokenizer.byte_level())

    def run(self, prompt: list[int], num_new_tokens: int) -> RequestRun:
        """Answer a prompt greedily, past any end of text.

        Raises:
            ValueError: the engine refuses the prompt.
            RuntimeError: a forward failed.
        """
        run = RequestRun(prompt)
        self.runner.steps.clear()
        submitted = time.perf_counter()
        sampling = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True)
        self.engine.submit(prompt, sampling)
        while self.engine.has_work:
            for update in self.engine.step():
                if update.error:
                    raise RuntimeError(f"the forward failed: {update.error}")
                if not run.token_ids:
                    run.ttft_s = time.perf_counter() - submitted
                run.token_ids += update.token_ids
                run.num_cached_tokens = update.num_cached_tokens
        for start, end, batch, logits in self.runner.steps:
            for i, row in enumerate(batch.rows):
                run.forwards.append(
                    Forward(
                        start_s=start - submitted,
                        end_s=end - submitted,
                        first_token=row.start,
                        num_tokens=row.end - row.start,
                        is_decode=row.is_decode,
                        exports=tuple(position for position, _ in row.exports),
                    )
                )
                if row.samples:
                    run.logits.append(logits[i].cpu())
        return run
