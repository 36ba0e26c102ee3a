"""From configs to a running engine: weights, caches, and what the kernels can do."""

import gc
import logging
import os
import weakref
from pathlib import Path

import torch

from .. import __version__
from ..cache.hashing import root_key
from ..cache.prefix_cache import PrefixCache
from ..cache.spec import common_spec
from ..cache.storage import GIB
from ..scheduler.scheduler import Scheduler
from .config import EngineConfig, ModelConfig
from .engine import Engine
from .memory import kda_spec
from .model import KDAForCausalLM
from .runner import ModelRunner
from .tokenizer import Tokenizer
from .weights import load_checkpoint

LAYOUT_VERSION = 1  # of what a state slot and a KV block hold

log = logging.getLogger("torch_kda.build")


def load_model(config: ModelConfig, engine: EngineConfig, folder: Path | None) -> KDAForCausalLM:
    """A model with weights on the engine's device.

    Args:
        config: as `EngineConfig.resolve` returns it.
        folder: of a checkpoint. None: random weights by the engine's seed.

    Raises:
        ValueError: the checkpoint is broken or another model's.
        RuntimeError: the device is not there, or its memory can't hold the weights.
    """
    if engine.device != "cpu" and not torch.cuda.is_available():
        raise RuntimeError(f"device {engine.device!r}: torch finds no CUDA device; use 'cpu'")
    with torch.inference_mode():
        model = _allocate(config, engine.device)
        if folder is None:
            model.random_init(engine.seed)
        else:
            load_checkpoint(model, folder)
    return model


def _allocate(config: ModelConfig, device: str) -> KDAForCausalLM:
    """A model without content.

    A CPU is asked before: it hands out more memory than there is, and the process dies of the
    first use.
    """
    needed = sum(weight.nbytes for weight in KDAForCausalLM(config, "meta").parameters())
    there = _memory_bytes(device)
    message = (
        f"load_model: {config.name} with {config.num_hidden_layers} layers in {config.dtype} needs "
        f"{needed / GIB:,.1f} GiB for its weights, and {device} has room for {there / GIB:,.1f}; "
        "take fewer layers, a smaller model or another device"
    )
    if needed > there:
        raise RuntimeError(message)
    # torch raises OutOfMemoryError, a RuntimeError, on a GPU and plain RuntimeError on a CPU
    try:
        return KDAForCausalLM(config, device)
    except RuntimeError as error:
        raise RuntimeError(message) from error


def _memory_bytes(device: str) -> int:
    """What is free on a GPU, torch's own reserve included; all that a CPU has."""
    if device == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserve


def build_engine(
    runner: ModelRunner,
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    *,
    weights: str = "",
) -> Engine:
    """An engine over a runner, its scheduler made for what the runner holds and can do.

    If the runner has been warmed up (compiled, recorded), Python's garbage collector passes over
    all that exists now for as long as the engine lives.

    Args:
        runner: made with the same config.
        weights: names the weights, for the keys of the cache.
    """
    model, plan = runner.model.config, runner.plan
    spec = common_spec({f"layers.{i}": kda_spec(model, config) for i in model.kda_layers})
    is_caching = config.enable_prefix_caching
    cache = PrefixCache(
        num_blocks=plan.num_kv_blocks,
        block_size=plan.block_size,
        num_slots=plan.num_state_slots,
        unit=config.prefix_match_unit,
        root=root_key(
            weights=weights or f"{model} {config.seed}",
            kv_dtype=model.dtype,
            state_dtype=spec.state_dtype,
            gate="softplus" if model.gate_lower_bound is None else "bounded",
            gate_lower_bound=model.gate_lower_bound,
            unit=config.prefix_match_unit,
            layout=LAYOUT_VERSION,
            tp_rank=0,
        ),
    )
    scheduler = Scheduler(
        cache,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        num_speculative_tokens=config.num_speculative_tokens,
        alignment=spec.checkpoint_alignment,
        num_prefill_checkpoint_blocks=spec.num_prefill_checkpoint_blocks,
        max_exports_per_step=config.max_num_checkpoints if is_caching else 0,
        export_every=config.checkpoint_interval,
        num_decode_states=2 if is_caching else 0,
    )
    engine = Engine(
        runner,
        scheduler,
        tokenizer,
        seed=config.seed,
        shares_prefixes=is_caching,
        max_steps_in_flight=config.max_steps_in_flight,
    )
    if runner.is_compiled or runner.captured:
        _freeze(engine)
    for line in describe(engine):
        log.info(line)
    return engine


def _freeze(engine: Engine) -> None:
    """Warm-up ends here. It leaves some 200,000 objects behind, most of them from imports and
    compilers, and a full collection that looks at each of them once more stops a step of a few ms
    for 10 to 40 (seen). Frozen, they are not looked at.
    """
    gc.collect()  # what is garbage already must not stay
    gc.freeze()
    holder = object()
    _FREEZE_HOLDERS.add(holder)
    weakref.finalize(engine, _unfreeze, holder).atexit = False


_FREEZE_HOLDERS: set[object] = set()  # one for each engine that lives and froze


def _unfreeze(holder: object) -> None:
    """What is garbage by now, such as the engine's graphs, can only go once it is looked at."""
    _FREEZE_HOLDERS.remove(holder)
    if not _FREEZE_HOLDERS:  # there is one heap for all engines
        gc.unfreeze()


def describe(engine: Engine) -> list[str]:
    """What runs, in lines for people."""
    model, runner, scheduler = engine.model_config, engine.runner, engine.scheduler
    layers = f"{model.num_kda_layers} KDA + {model.num_mla_layers} MLA layers"
    exports = scheduler.limits.num_prefill_checkpoint_blocks
    prefill = f"single pass, up to {exports} states exported a forward"
    if not engine.shares_prefixes:
        prefill = "no prefix caching"
    elif exports == 0:
        prefill = "two passes: a forward ends wherever a state is to be kept"
    compiled = "runs eagerly"
    if runner.is_compiled:
        start = "warm" if runner.is_warm_start else "cold"
        compiled = f"compiled in {runner.compile_seconds:.1f} s ({start} start)"
    return [
        f"torch-kda {__version__}: {model.name}, {layers}, {model.dtype} on {runner.device}",
        f"prefill: {prefill}; unit {scheduler.cache.unit}, budget "
        f"{scheduler.limits.max_num_batched_tokens:,} tokens a step",
        f"memory: {runner.plan}",
        f"model: {compiled}" + (f"; {runner.captured}" if runner.captured else ""),
    ]
