"""What a slot and a token weigh, and how many of each there are."""

from dataclasses import replace

import pytest
from torch_kda.kda.config import EngineConfig
from torch_kda.kda.memory import MIB, kda_spec, mla_spec, plan_memory
from torch_kda.kda.presets import model_preset


@pytest.mark.parametrize(
    "name,layers,states_mib,conv_mib,kv_bytes",
    [
        ("kimi-linear-48b-a3b", 27, 40, 1.4, 8064),
        ("glm-5.3-flash-kda", 45, 136, 4.8, 11264),
        ("kimi-k3-tp8", 93, 414 / 8, 14.6 / 8, 27648),
    ],
)
def test_preset_bytes(
    name: str, layers: int, states_mib: float, conv_mib: float, kv_bytes: int
) -> None:
    """At full depth the caches weigh what the models' publishers' figures say."""
    model = model_preset(name, num_hidden_layers=layers)
    spec = kda_spec(model, EngineConfig())
    assert model.num_kda_layers * spec.state_bytes == states_mib * MIB
    assert model.num_kda_layers * spec.conv_bytes / MIB == pytest.approx(conv_mib, abs=0.06)
    assert model.num_mla_layers * mla_spec(model).token_bytes == kv_bytes
    assert spec.slot_bytes == spec.state_bytes + spec.conv_bytes


@pytest.mark.parametrize("context", [1024, 16384, 262144])
def test_plan_memory_follows_the_workload(context: int) -> None:
    """Two checkpoints for each conversation's KV, all of the memory used and no more."""
    model = replace(model_preset("kimi-linear-48b-a3b"), max_model_len=262144)
    engine = EngineConfig(expected_context=context, max_num_seqs=16)
    plan = plan_memory(model, engine, available := 40 << 30)
    assert available - 2 * plan.slot_bytes - plan.block_bytes < plan.total_bytes <= available
    conversations = plan.num_kv_blocks * 64 / context
    assert plan.num_state_slots - 32 == pytest.approx(2 * conversations, abs=1.5)
    longer = plan_memory(model, replace(engine, expected_context=2 * context), available)
    assert longer.num_state_slots < plan.num_state_slots
    assert longer.num_kv_blocks > plan.num_kv_blocks


def test_plan_memory_holds_named_numbers() -> None:
    model = replace(model_preset("tiny"), max_model_len=1024)
    both = plan_memory(model, EngineConfig(num_state_slots=7, num_kv_blocks=16), 1)
    assert both[:2] == (7, 16)
    slots = plan_memory(model, EngineConfig(num_state_slots=7), 100 * MIB)
    assert slots.num_state_slots == 7
    assert 0 <= 100 * MIB - slots.total_bytes < slots.block_bytes
    blocks = plan_memory(model, EngineConfig(num_kv_blocks=16), 100 * MIB)
    assert blocks.num_kv_blocks == 16
    assert 0 <= 100 * MIB - blocks.total_bytes < blocks.slot_bytes
    fixed = plan_memory(model, EngineConfig(memory_bytes=50 * MIB), 100 * MIB)
    assert 49 * MIB < fixed.total_bytes <= 50 * MIB


def test_plan_memory_says_what_it_means() -> None:
    model = replace(model_preset("kimi-linear-48b-a3b"), max_model_len=8192)
    plan = plan_memory(model, EngineConfig(num_state_slots=512, num_kv_blocks=20480), 1)
    assert str(plan) == "512 states = 21,200.0 MiB, 1,310,720 KV tokens = 10,080.0 MiB"


@pytest.mark.parametrize("fields", [{}, {"num_state_slots": 1, "num_kv_blocks": 9999}])
def test_plan_memory_too_small(fields: dict) -> None:
    with pytest.raises(
        ValueError, match="no room for one request of 32,768 tokens: it needs 2 state"
    ):
        plan_memory(model_preset("tiny"), EngineConfig(**fields), 10 * MIB)
