"""Runs steps on one device: batch in, token ids out."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..cache.storage import Pools
from ..scheduler.batch import ScheduledBatch
from .buckets import MIN_ROWS, Buckets, Shape, exact_shape
from .compilation import CompileCache, compile_model
from .config import EngineConfig
from .graphs import CaptureSummary, CudaRecorder, Recorder, StepGraphs
from .memory import MemoryPlan, plan_memory
from .model import KDAForCausalLM
from .sampler import Sampled, SamplingRows, sample
from .step import StepBuffers, StepInputs, mark_sizes

# pools on a CPU: the tiny model keeps 100 conversations in it, and filling it takes 0.1 s
CPU_POOL_BYTES = 256 << 20
NUM_IN_FLIGHT = 2  # steps launched and not finished, at most

Reported = tuple[Tensor | None, Tensor | None, Tensor | None]  # Sampled's, but for its tokens
NOT_ASKED: Reported = (None, None, None)

log = logging.getLogger("torch_kda.runner")


class TokenLogprobs(NamedTuple):
    """Log probabilities at one position, of the model before temperature and filters."""

    logprob: float  # of the token that was chosen
    top: tuple[tuple[int, float], ...]  # the likeliest (id, log probability), best first


class StepResult(NamedTuple):
    """What a step gave, a place for each row of the batch; empty where the row samples nothing."""

    token_ids: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[TokenLogprobs]]  # empty too where the request asks for none


class LaunchedStep(NamedTuple):
    """A step that is on its way on the device."""

    batch: ScheduledBatch
    host: Sampled  # what it drew, on the host; complete once `copied` has happened
    copied: torch.cuda.Event | None  # None on a CPU


class ModelRunner:
    """A model with its caches and step buffers on one device.

    `run` is `launch` then `finish`; launching the next step before finishing this one keeps the
    device busy. Nothing is derived here: slots, blocks and exports are the batch's.

    A step runs eagerly, or as a compiled graph, or as the replay of a recording of either. In each
    case the tokens it drew lie in one buffer on the device, from which the next step may take them.
    """

    def __init__(
        self,
        model: KDAForCausalLM,
        config: EngineConfig,
        *,
        recorder: Recorder | None = None,
        backend: str | Callable[..., Any] = "inductor",
    ) -> None:
        """Compiles and records what the config asks for, which takes from seconds to minutes.

        Args:
            model: with weights, on its device; its config is `config.resolve`d.
            recorder: of steps, if the config asks for graphs. None: CUDA graphs.
            backend: of torch.compile.

        Raises:
            ValueError: the memory holds no request of full length.
            NotImplementedError: draft tokens are asked for.
            RuntimeError: a step can't be recorded.
        """
        if config.num_speculative_tokens:
            raise NotImplementedError(
                "ModelRunner: num_speculative_tokens must be 0; there is no drafter yet"
            )
        self.model = model
        self.device = model.embed.device
        self.is_compiled = config.is_compiled
        self._model_call = compile_model(model, backend) if self.is_compiled else model
        if self.device.type == "cuda":
            _load_kernels(model, self.device)
        with torch.inference_mode():
            self.buffers = self._make_buffers(config)
            rows = self.buffers.max_decode_rows + self.buffers.max_prefill_rows
            # drawn by the step launched last, by its rows
            self.tokens = torch.zeros(rows, dtype=torch.int64, device=self.device)
            self.plan: MemoryPlan = plan_memory(model.config, config, self._bytes_for_pools(config))
            self.pools = self._make_pools(
                config, self.plan.num_state_slots, self.plan.num_kv_blocks
            )
            is_cuda = self.device.type == "cuda"
            # for each step in flight: its tokens on the host, and when they are there
            self._hosts = [
                (
                    torch.zeros(rows, dtype=torch.int64, pin_memory=is_cuda),
                    torch.cuda.Event() if is_cuda else None,
                )
                for _ in range(NUM_IN_FLIGHT)
            ]
            self._turn = 0
            self.graphs: StepGraphs | None = None
            # written by recorded steps, outside of the graphs' pool: good until the next one
            self._logits = torch.empty(0, device=self.device)
            self.captured: CaptureSummary | None = None
            self.compile_seconds = 0.0
            self.is_warm_start = False
            if self.is_compiled:
                self.compile_steps(config)
            if config.has_graphs or recorder is not None:
                self._capture(config, recorder or CudaRecorder(self.device), rows)

    def run(self, batch: ScheduledBatch) -> StepResult:
        """One step from start to end, with the step's one wait for the device."""
        return self.finish(self.launch(batch))

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Queue a step. A row with `prev_row` takes its token from the launch before this."""
        num_rows, num_tokens = batch.num_decode_rows, batch.num_prefill_tokens
        recorded = self.graphs.find(num_rows, num_tokens) if self.graphs else None
        shape = recorded or exact_shape(num_rows, num_tokens)
        self.buffers.fill(batch, *shape)
        if self.graphs and recorded:
            self.graphs.replay(recorded)
            logits = self._logits
        else:
            takes = any(row >= 0 for row in batch.columns.prev_row)
            logits = self._step(shape, takes_tokens=takes)
        asked, num_logits = self.buffers.sampling, self._num_logits(shape)
        reported = NOT_ASKED
        if self.graphs and recorded and asked.is_plain:
            if not asked.is_greedy:
                self.graphs.draw(num_logits)
        elif not asked.takes_argmax:
            reported = self._draw_others(logits[:num_logits])
        return self._copy_out(batch, reported)

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Wait for a launched step and read its tokens."""
        if launched.copied is not None:
            launched.copied.synchronize()
        samples = launched.batch.columns.samples
        ids = launched.host.token_ids.tolist()
        tokens = [(token,) if is_new else () for token, is_new in zip(ids, samples, strict=True)]
        return StepResult(tokens, _logprobs(launched))

    @contextmanager
    def eager(self) -> Iterator[None]:
        """For comparisons: inside, steps run neither compiled nor recorded."""
        before = self.graphs, self.is_compiled, self._model_call
        self.graphs, self.is_compiled, self._model_call = None, False, self.model
        try:
            yield
        finally:
            self.graphs, self.is_compiled, self._model_call = before

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits [R, vocab] fp32 of one step, not replayed."""
        if self.is_compiled:
            mark_sizes(inputs)
        pools = self.pools
        return self._model_call(inputs, pools.state, pools.conv, pools.kv)

    def _step(self, shape: Shape, *, takes_tokens: bool) -> Tensor:
        """The step that the buffers hold: logits, and the greedy tokens in their place."""
        inputs, prev_rows = self.buffers.layout(*shape)
        if takes_tokens:
            self.buffers.take_tokens(inputs, prev_rows, self.tokens)
        logits = self.forward(inputs)
        torch.argmax(logits, dim=-1, out=self.tokens[: logits.shape[0]])
        return logits

    def _draw_others(self, logits: Tensor) -> Reported:
        """Tokens of rows that are not greedy, and log probabilities where they are asked for."""
        buffers, count = self.buffers, len(logits)
        rows = SamplingRows.pack(
            buffers.sampling, buffers.temperature[:count], buffers.keys[:count]
        )
        drawn = sample(logits, rows)
        self.tokens[:count].copy_(drawn.token_ids)
        return drawn.logprobs, drawn.top_ids, drawn.top_logprobs

    def _copy_out(self, batch: ScheduledBatch, reported: Reported) -> LaunchedStep:
        count = batch.num_rows
        host, copied = self._hosts[self._turn]
        host = host[:count]
        self._turn = (self._turn + 1) % len(self._hosts)
        host.copy_(self.tokens[:count], non_blocking=True)
        if copied is None:
            return LaunchedStep(batch, Sampled(host, *reported), None)
        rest = (x if x is None else _to_host(x) for x in reported)
        copied.record()
        self.buffers.mark_end(copied)
        return LaunchedStep(batch, Sampled(host, *rest), copied)

    # start

    def _make_buffers(self, config: EngineConfig) -> StepBuffers:
        return StepBuffers(
            max_decode_rows=max(config.max_num_seqs, MIN_ROWS),
            max_prefill_tokens=config.max_num_batched_tokens,
            max_prefill_rows=config.max_num_seqs,
            max_checkpoints=config.max_num_checkpoints,
            max_blocks=-(-self.model.config.max_model_len // config.kv_block_size),
            block_size=config.kv_block_size,
            device=self.device,
        )

    def _make_pools(self, config: EngineConfig, num_slots: int, num_blocks: int) -> Pools:
        dtype = getattr(torch, self.model.config.dtype)
        return Pools.allocate(
            self.model.config, num_slots, num_blocks, config.kv_block_size, dtype, self.device
        )

    def _bytes_for_pools(self, config: EngineConfig) -> int:
        """Free memory less what the largest step takes; the weights are there already."""
        if self.device.type != "cuda":
            return CPU_POOL_BYTES
        step = self._bytes_of_step(config)
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0]
        return int((free - step) * config.memory_fraction)

    def _bytes_of_step(self, config: EngineConfig) -> int:
        """Memory of the largest step, run eagerly over padding alone."""
        self.pools = self._make_pools(config, 1, 1)
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        shape = exact_shape(0, config.max_num_batched_tokens)
        inputs = self.buffers.fill(ScheduledBatch.of(0, ()), *shape)
        self.model(inputs, self.pools.state, self.pools.conv, self.pools.kv)
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_allocated(self.device) - before

    def compile_steps(self, config: EngineConfig) -> None:
        """One call of each kind of step, over padding alone; with what was kept, if there is."""
        cache = None
        if config.compile_cache is not None:
            model, engine = self.model.config, config
            sizes = (self.plan, engine.max_num_seqs, engine.max_num_checkpoints)
            cache = CompileCache(config.compile_cache, self.device, model, *sizes)
            self.is_warm_start = cache.load()
        started = time.perf_counter()
        D = max(MIN_ROWS, min(16, self.buffers.max_decode_rows))
        T = min(1024, self.buffers.max_prefill_tokens)
        for shape in (Shape(0, T), Shape(D, 0), Shape(D, T)):
            self._fill_padding(shape)
            self._step(shape, takes_tokens=False)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.compile_seconds = time.perf_counter() - started
        log.info("compiled in %.1f s", self.compile_seconds)
        if cache is not None:
            cache.save()

    def _capture(self, config: EngineConfig, recorder: Recorder, rows: int) -> None:
        chosen = Buckets.up_to(config.max_num_seqs, config.max_num_batched_tokens)
        limits = (self.buffers.max_decode_rows, self.buffers.max_prefill_tokens)
        given = (config.decode_buckets, config.prefill_buckets)
        least = (MIN_ROWS, 1)
        sizes = [
            default if sizes is None else tuple(s for s in sizes if low <= s <= most)
            for default, sizes, low, most in zip(
                (chosen.rows, chosen.tokens), given, least, limits, strict=True
            )
        ]
        vocab = self.model.config.vocab_size
        self._logits = torch.empty(rows, vocab, device=self.device)
        graphs = StepGraphs(recorder, Buckets(*sizes))
        # all capacity is padding now, so any shape is
        self._fill_padding(Shape(*limits))
        num_logits = {self._num_logits(shape) for shape in graphs.buckets.shapes}
        self.captured = graphs.capture(self._recorded_step, self._recorded_draw, list(num_logits))
        self.graphs = graphs

    def _recorded_step(self, shape: Shape) -> None:
        logits = self._step(shape, takes_tokens=True)
        self._logits[: logits.shape[0]].copy_(logits)

    def _recorded_draw(self, num_logits: int) -> None:
        temperature, keys = self.buffers.temperature[:num_logits], self.buffers.keys[:num_logits]
        rows = SamplingRows(temperature=temperature, keys=keys)
        drawn = sample(self._logits[:num_logits], rows)
        self.tokens[:num_logits].copy_(drawn.token_ids)

    def _num_logits(self, shape: Shape) -> int:
        return shape.D + (self.buffers.max_prefill_rows if shape.T else 0)

    def _fill_padding(self, shape: Shape) -> None:
        self.buffers.fill(ScheduledBatch.of(0, ()), *shape)


def _load_kernels(model: KDAForCausalLM, device: torch.device) -> None:
    """Onto the device, before a capture that could not."""
    if not model.config.kda_layers:
        return
    from ..cute_kernels.kda_prefill import prepare

    gate = "softplus" if model.config.gate_lower_bound is None else "bounded"
    prepare(device, (gate,))


def _to_host(x: Tensor) -> Tensor:
    # torch allocates pinned memory for this, so the copy really is asynchronous
    return x.to("cpu", non_blocking=True)


def _logprobs(launched: LaunchedStep) -> Sequence[Sequence[TokenLogprobs]]:
    batch, host = launched.batch, launched.host
    found: list[Sequence[TokenLogprobs]] = [()] * batch.num_rows
    if host.logprobs is None or host.top_ids is None or host.top_logprobs is None:
        return found
    own, ids, values = host.logprobs.tolist(), host.top_ids.tolist(), host.top_logprobs.tolist()
    for i, row in enumerate(batch.rows):
        count = row.sampling.logprobs
        if row.samples and count is not None:
            top = tuple(zip(ids[i][:count], values[i][:count], strict=True))
            found[i] = (TokenLogprobs(own[i], top),)
    return found
