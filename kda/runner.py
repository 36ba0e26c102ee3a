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
from .handover import Turn
from .memory import MemoryPlan, plan_memory
from .model import KDAForCausalLM
from .sampler import Sampled, SamplingRows, sample
from .step import StepBuffers, StepInputs, mark_sizes

# pools on a CPU: the tiny model keeps 100 conversations in it, and filling it takes 0.1 s
CPU_POOL_BYTES = 256 << 20

Reported = tuple[Tensor, ...]  # Sampled's log probabilities: logprobs, top_ids, top_logprobs

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
    turn: Turn
    reported: Reported | None = None  # on the host when the turn is over; None: not asked


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
            self.plan: MemoryPlan = plan_memory(model.config, config, self._bytes_for_pools(config))
            self.pools = self._make_pools(
                config, self.plan.num_state_slots, self.plan.num_kv_blocks
            )
            self.graphs: StepGraphs | None = None
            # written by recorded steps, outside of the graphs' pool: good until the next one
            self._logits = torch.empty(0, device=self.device)
            self.captured: CaptureSummary | None = None
            self.compile_seconds = 0.0
            self.is_warm_start = False
            if self.is_compiled:
                self.compile_steps(config)
            if config.has_graphs or recorder is not None:
                self._capture(config, recorder or CudaRecorder(self.device))

    def run(self, batch: ScheduledBatch) -> StepResult:
        """One step from start to end, with the step's one wait for the device."""
        return self.finish(self.launch(batch))

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Queue a step. A row with `prev_row` takes its token from the launch before this."""
        try:
            return self._launch(batch)
        except BaseException:
            self.buffers.handover.restart()
            raise

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Wait for a launched step and read its tokens."""
        launched.turn.wait()
        samples = launched.batch.columns.samples
        ids = launched.turn.tokens[: len(samples)].tolist()
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

    def _launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """No operation of torch in a step that is recorded: each would cost it 10 us and more."""
        num_rows, num_tokens = batch.num_decode_rows, batch.num_prefill_tokens
        recorded = self.graphs.find(num_rows, num_tokens) if self.graphs else None
        shape = recorded or exact_shape(num_rows, num_tokens)
        self.buffers.fill(batch, *shape)
        if self.graphs and recorded:
            self.graphs.replay(recorded)
            logits = self._logits
        else:
            logits = self._step(shape)
        asked, num_logits = self.buffers.sampling, self._num_logits(shape)
        reported = None
        if self.graphs and recorded and asked.is_plain:
            if not asked.is_greedy:
                self.graphs.draw(num_logits)
        elif not asked.takes_argmax:
            reported = self._draw(logits, num_logits)
        return LaunchedStep(batch, self.buffers.handover.end(), reported)

    @torch.inference_mode()
    def _step(self, shape: Shape) -> Tensor:
        """The step that was filled: logits, and the greedy tokens in their place and on the host.

        As it is recorded: all that differs between two steps of a shape is in the buffers.
        """
        logits = self.forward(self.buffers.fetch(*shape))
        count = logits.shape[0]
        torch.argmax(logits, dim=-1, out=self.buffers.handover.tokens[:count])
        self.buffers.handover.post(count)
        return logits

    @torch.inference_mode()
    def _draw(self, logits: Tensor, count: int) -> Reported | None:
        """Tokens of rows that are not greedy, and log probabilities where they are asked for."""
        buffers = self.buffers
        rows = SamplingRows.pack(
            buffers.sampling, buffers.temperature[:count], buffers.keys[:count]
        )
        drawn = self._sample(logits[:count], rows)
        if drawn.logprobs is None:
            return None
        return tuple(_to_host(x) for x in drawn[1:] if x is not None)

    def _sample(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        drawn, handover = sample(logits, rows), self.buffers.handover
        handover.tokens[: len(logits)].copy_(drawn.token_ids)
        handover.post(len(logits))
        return drawn

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
        self._fill_padding(shape)
        inputs = self.buffers.fetch(*shape)
        self.model(inputs, self.pools.state, self.pools.conv, self.pools.kv)
        self.buffers.handover.end()
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
            self._step(shape)
            self.buffers.handover.end()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.compile_seconds = time.perf_counter() - started
        log.info("compiled in %.1f s", self.compile_seconds)
        if cache is not None:
            cache.save()

    def _capture(self, config: EngineConfig, recorder: Recorder) -> None:
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
        handover, vocab = self.buffers.handover, self.model.config.vocab_size
        self._logits = torch.empty(len(handover.tokens), vocab, device=self.device)
        graphs = StepGraphs(recorder, Buckets(*sizes))
        # all capacity is padding then, in each turn, so any shape is
        for _ in handover.turns:
            self._fill_padding(Shape(*limits))
            self.buffers.fetch(*limits)
            handover.end()
        num_logits = {self._num_logits(shape) for shape in graphs.buckets.shapes}
        self.captured = graphs.capture(self._recorded_step, self._recorded_draw, list(num_logits))
        self.graphs = graphs
        handover.restart()

    @torch.inference_mode()
    def _recorded_step(self, shape: Shape) -> None:
        logits = self._step(shape)
        self._logits[: logits.shape[0]].copy_(logits)

    @torch.inference_mode()
    def _recorded_draw(self, num_logits: int) -> None:
        temperature, keys = self.buffers.temperature[:num_logits], self.buffers.keys[:num_logits]
        rows = SamplingRows(temperature=temperature, keys=keys)
        self._sample(self._logits[:num_logits], rows)

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
    batch = launched.batch
    found: list[Sequence[TokenLogprobs]] = [()] * batch.num_rows
    if launched.reported is None:
        return found
    own, ids, values = (x.tolist() for x in launched.reported)
    for i, row in enumerate(batch.rows):
        count = row.sampling.logprobs
        if row.samples and count is not None:
            top = tuple(zip(ids[i][:count], values[i][:count], strict=True))
            found[i] = (TokenLogprobs(own[i], top),)
    return found
