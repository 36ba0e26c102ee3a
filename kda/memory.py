"""What the layers of a model keep, and how memory is split between states and KV."""

from typing import NamedTuple

from ..cache.spec import KDASpec, MLASpec
from .config import CHECKPOINT_ALIGNMENT, CONV_WIDTH, EngineConfig, ModelConfig

MIB = 1 << 20


def kda_spec(model: ModelConfig, engine: EngineConfig) -> KDASpec:
    """What one KDA layer keeps, and what its prefill can export."""
    return KDASpec(
        num_value_heads=model.linear_num_heads,
        head_k_dim=model.linear_head_dim,
        head_v_dim=model.linear_head_dim,
        conv_channels=model.conv_dim,
        conv_width=CONV_WIDTH,
        conv_dtype=model.dtype,
        num_prefill_checkpoint_blocks=engine.num_prefill_checkpoint_blocks,
        checkpoint_alignment=CHECKPOINT_ALIGNMENT,
        num_speculative_blocks=engine.num_speculative_tokens,
    )


def mla_spec(model: ModelConfig) -> MLASpec:
    """What one MLA layer keeps."""
    return MLASpec(
        kv_lora_rank=model.kv_lora_rank,
        qk_rope_head_dim=model.qk_rope_head_dim,
        dtype=model.dtype,
    )


class MemoryPlan(NamedTuple):
    """How many state slots and KV blocks there are, and what they weigh."""

    num_state_slots: int
    num_kv_blocks: int
    slot_bytes: int  # one slot, all KDA layers
    block_bytes: int  # one KV block, all MLA layers
    block_size: int  # tokens of a KV block

    @property
    def total_bytes(self) -> int:
        return self.num_state_slots * self.slot_bytes + self.num_kv_blocks * self.block_bytes

    def __str__(self) -> str:
        states = f"{self.num_state_slots * self.slot_bytes / MIB:,.1f} MiB"
        kv = f"{self.num_kv_blocks * self.block_bytes / MIB:,.1f} MiB"
        tokens = self.num_kv_blocks * self.block_size
        return f"{self.num_state_slots} states = {states}, {tokens:,} KV tokens = {kv}"


def plan_memory(model: ModelConfig, engine: EngineConfig, available_bytes: int) -> MemoryPlan:
    """Split memory between state slots and KV blocks by the declared workload.

    Running requests get their slots first. The rest goes to conversations of `expected_context`
    tokens with two checkpoints each: the end of the prompt and the end of the answer. A number
    that the engine's config names holds, and the rest goes to the other kind.

    Args:
        model: as `EngineConfig.resolve` returns it.
        available_bytes: for all pools; `engine.memory_bytes` goes before it.

    Raises:
        ValueError: one request of full length does not fit; the message says what to change.
    """
    budget = engine.memory_bytes or available_bytes
    size = engine.kv_block_size
    slot_bytes = model.num_kda_layers * kda_spec(model, engine).slot_bytes
    block_bytes = model.num_mla_layers * mla_spec(model).token_bytes * size
    # the running slot, the one written while it is read, and scratch for draft tokens
    slots_per_request = 2 + engine.num_speculative_tokens
    running_slots = engine.max_num_seqs * slots_per_request
    context_blocks = -(-engine.expected_context // size)

    slots, blocks = engine.num_state_slots, engine.num_kv_blocks
    if slots is None and blocks is None:
        rest = max(0, budget - running_slots * slot_bytes)
        contexts = rest / (2 * slot_bytes + context_blocks * block_bytes)
        slots, blocks = running_slots + int(2 * contexts), int(context_blocks * contexts)
    elif slots is None:
        slots = max(0, budget - (blocks or 0) * block_bytes) // max(1, slot_bytes)
    elif blocks is None:
        blocks = max(0, budget - slots * slot_bytes) // max(1, block_bytes)
    plan = MemoryPlan(slots, blocks or 0, slot_bytes, block_bytes, size)

    least_blocks = -(-model.max_model_len // size)
    if plan.num_state_slots < slots_per_request or plan.num_kv_blocks < least_blocks:
        raise ValueError(
            f"EngineConfig: no room for one request of {model.max_model_len:,} tokens: it needs "
            f"{slots_per_request} state slots and {least_blocks} KV blocks of {size}, but there "
            f"are {plan} in {budget / MIB:,.0f} MiB; lower max_model_len or max_num_seqs, "
            "or raise memory_bytes"
        )
    return plan
