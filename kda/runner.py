"""Runs steps on one device: batch in, token ids out."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cache.storage import Pools
from ..scheduler.batch import ScheduledBatch
from ..scheduler.request import SamplingParams
from .config import EngineConfig, MemoryPlan, plan_memory
from .model import KDAForCausalLM
from .sampler import Sampled, SamplingRows, sample
from .step import TOKEN_ALIGNMENT, StepBuffers, StepInputs, mark_token_dim

# pools on a CPU: the tiny model keeps 100 conversations in it, and filling it takes 0.1 s
CPU_POOL_BYTES = 256 << 20
GREEDY = SamplingParams(temperature=0)


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
    sampled: Sampled  # on the device; the step after may take its tokens from here
    host: Sampled  # its copy, complete once `copied` has happened
    copied: torch.cuda.Event | None  # None on a CPU


class Buckets(NamedTuple):
    """Sizes to which steps are padded, ascending, so that few compilations or graphs serve all.

    Above the last one, and with none given, a step has its own size (T in multiples of 16).
    """

    decode_rows: tuple[int, ...] = ()
    prefill_tokens: tuple[int, ...] = ()

    @classmethod
    def up_to(cls, max_decode_rows: int, max_prefill_tokens: int) -> "Buckets":
        """Steps of at most an eighth: padding costs little, and there are few sizes."""
        return cls(
            _sizes_up_to(max_decode_rows, 1), _sizes_up_to(max_prefill_tokens, TOKEN_ALIGNMENT)
        )

    def shape(self, num_decode_rows: int, num_prefill_tokens: int) -> tuple[int, int]:
        """(D, T) for a step. 0 stays 0: steps without one of the segments have their own graph."""
        D = _bucket(self.decode_rows, num_decode_rows)
        T = _bucket(self.prefill_tokens, num_prefill_tokens)
        return D, -(-T // TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT


def _sizes_up_to(limit: int, least: int) -> tuple[int, ...]:
    sizes, size = [], least
    while size < limit:
        sizes.append(size)
        # eighths of the power of two below, on the grid of `least`
        size += max(least, (1 << (size.bit_length() - 1)) // 8 // least * least)
    return (*sizes, -(-limit // least) * least)


def _bucket(sizes: tuple[int, ...], size: int) -> int:
    at = bisect_left(sizes, size)
    return sizes[at] if size and at < len(sizes) else size


class ModelRunner:
    """A model with its caches and step buffers on one device.

    `run` is `launch` then `finish`; launching the next step before finishing this one keeps the
    device busy. Nothing is derived here: slots, blocks and exports are the batch's.
    """

    def __init__(
        self, model: KDAForCausalLM, config: EngineConfig, *, compile: bool = False
    ) -> None:
        """
        Args:
            model: with weights, on its device; its config is `config.resolve`d.
            compile: run the model as one compiled graph, with D padded to few sizes.

        Raises:
            ValueError: the memory holds no request of full length.
            NotImplementedError: draft tokens are asked for.
        """
        if config.num_speculative_tokens:
            raise NotImplementedError(
                "ModelRunner: num_speculative_tokens must be 0; there is no drafter yet"
            )
        self.model = model
        self.device = model.embed.device
        self.plan: MemoryPlan = plan_memory(model.config, config, _free_bytes(self.device, config))
        with torch.inference_mode():
            self.pools = Pools.allocate(
                model.config,
                self.plan.num_state_slots,
                self.plan.num_kv_blocks,
                config.kv_block_size,
                getattr(torch, model.config.dtype),
                self.device,
            )
            self.buffers = StepBuffers(
                max_decode_rows=config.max_num_seqs,
                max_prefill_tokens=config.max_num_batched_tokens,
                max_prefill_rows=config.max_num_seqs,
                max_checkpoints=config.max_num_checkpoints,
                max_blocks=-(-model.config.max_model_len // config.kv_block_size),
                block_size=config.kv_block_size,
                device=self.device,
            )
        self.is_compiled = compile
        # T is the one dynamic size of the compiled graph: any multiple of 16 is served by it
        decode_sizes = _sizes_up_to(config.max_num_seqs, 1) if compile else ()
        self.buckets = Buckets(decode_sizes)
        self._model_call = torch.compile(model, fullgraph=True) if compile else model
        self._last_tokens: Tensor | None = None  # of the step launched last, by its rows

    def run(self, batch: ScheduledBatch) -> StepResult:
        """One step from start to end, with the step's one wait for the device."""
        return self.finish(self.launch(batch))

    @torch.inference_mode()
    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        """Queue a step. A row with `prev_row` takes its token from the launch before this."""
        shape = self.buckets.shape(batch.num_decode_rows, batch.num_prefill_tokens)
        inputs = self.buffers.fill(batch, *shape)
        if any(row.prev_row >= 0 for row in batch.rows):
            assert self._last_tokens is not None, "prev_row without a step before"
            self.buffers.take_tokens(inputs, self._last_tokens)
        logits = self.forward(inputs)
        sampled = sample(logits, self._sampling_rows(batch, logits.shape[0]))
        self._last_tokens = sampled.token_ids
        return self._copy_out(batch, sampled)

    def finish(self, launched: LaunchedStep) -> StepResult:
        """Wait for a launched step and read its tokens."""
        if launched.copied is not None:
            launched.copied.synchronize()
        rows = launched.batch.rows
        ids = launched.host.token_ids.tolist()
        tokens = [[ids[i]] if row.samples else [] for i, row in enumerate(rows)]
        return StepResult(tokens, _logprobs(launched))

    def forward(self, inputs: StepInputs) -> Tensor:
        """Logits [R, vocab] fp32 of one step; graph replay will be chosen here."""
        if self.is_compiled and inputs.input_ids.shape[0] > inputs.decode_dst_slots.numel():
            mark_token_dim(inputs)
        pools = self.pools
        return self._model_call(inputs, pools.state, pools.conv, pools.kv)

    def _sampling_rows(self, batch: ScheduledBatch, num_rows: int) -> SamplingRows:
        params = [row.sampling if row.samples else GREEDY for row in batch.rows]
        indices = [row.sample_index for row in batch.rows]
        return SamplingRows.pack(params, indices, num_rows, self.device)

    def _copy_out(self, batch: ScheduledBatch, sampled: Sampled) -> LaunchedStep:
        if self.device.type != "cuda":
            return LaunchedStep(batch, sampled, sampled, None)
        host = Sampled._make(x if x is None else _to_host(x) for x in sampled)
        copied = torch.cuda.Event()
        copied.record()
        return LaunchedStep(batch, sampled, host, copied)


def _to_host(x: Tensor) -> Tensor:
    # torch allocates pinned memory for this, so the copy really is asynchronous
    return x.to("cpu", non_blocking=True)


def _logprobs(launched: LaunchedStep) -> list[list[TokenLogprobs]]:
    rows, host = launched.batch.rows, launched.host
    if host.logprobs is None or host.top_ids is None or host.top_logprobs is None:
        return [[] for _ in rows]
    own, ids, values = host.logprobs.tolist(), host.top_ids.tolist(), host.top_logprobs.tolist()
    found: list[list[TokenLogprobs]] = []
    for i, row in enumerate(rows):
        count = row.sampling.logprobs
        if not row.samples or count is None:
            found.append([])
            continue
        top = tuple(zip(ids[i][:count], values[i][:count], strict=True))
        found.append([TokenLogprobs(own[i], top)])
    return found


def _free_bytes(device: torch.device, config: EngineConfig) -> int:
    """Memory for the pools, the weights being there already."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * config.memory_fraction)
    return CPU_POOL_BYTES
