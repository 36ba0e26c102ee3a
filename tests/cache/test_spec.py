import dataclasses

import pytest
from torch_kda.cache.spec import KDASpec, MLASpec, common_spec, split_memory

# Kimi-K3 on one of 8 ranks
K3 = KDASpec(num_value_heads=12, head_k_dim=128, head_v_dim=128, conv_channels=3 * 12 * 128)


def test_slot_bytes():
    assert K3.slot_bytes == 814_080
    assert dataclasses.replace(K3, state_dtype="bfloat16").slot_bytes == 420_864
    one_rank = dataclasses.replace(K3, num_value_heads=96, conv_channels=3 * 96 * 128)
    assert one_rank.slot_bytes == 6_512_640


def test_max_memory_usage_bytes():
    spec = dataclasses.replace(K3, num_prefill_checkpoint_blocks=4, num_speculative_blocks=3)
    # read 1, write 1 + K, export 4
    assert spec.max_memory_usage_bytes == (1 + 1 + 3 + 4) * spec.slot_bytes


def test_common_spec():
    assert common_spec({"0": K3, "1": K3}) is K3
    assert KDASpec.is_uniform_with_collection({"0": K3, "1": K3})
    with pytest.raises(ValueError, match="no KDA layer"):
        common_spec({})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_prefill_checkpoint_blocks", 0),
        ("checkpoint_alignment", 64),
        ("num_speculative_blocks", 2),
        ("state_dtype", "bfloat16"),
        ("num_value_heads", 24),
    ],
)
def test_common_spec_names_the_layer_that_differs(field, value):
    specs = {"layers.0": K3, "layers.1": K3, "layers.2": dataclasses.replace(K3, **{field: value})}
    assert not KDASpec.is_uniform_with_collection(specs)
    with pytest.raises(ValueError, match=rf"layers\.0 and layers\.2 differ in {field}"):
        common_spec(specs)


@pytest.mark.parametrize(
    "bad", [{"state_dtype": "int3"}, {"num_value_heads": -1}, {"checkpoint_alignment": 0}]
)
def test_spec_errors(bad):
    with pytest.raises(ValueError, match=f"KDASpec: {next(iter(bad))}"):
        dataclasses.replace(K3, **bad)
    with pytest.raises(ValueError, match="MLASpec: dtype"):
        MLASpec(kv_lora_rank=512, qk_rope_head_dim=64, dtype="int3")


def test_split_memory():
    kv = MLASpec(kv_lora_rank=512, qk_rope_head_dim=64)
    slot_bytes, block_bytes = 69 * K3.slot_bytes, 24 * 128 * kv.token_bytes
    total = 64 * 2**30
    split = split_memory(
        total,
        slot_bytes=slot_bytes,
        block_bytes=block_bytes,
        block_size=128,
        expected_context=32_000,
        max_num_seqs=64,
    )
    used = split.num_slots * slot_bytes + split.num_blocks * block_bytes
    assert total - slot_bytes < used <= total
    assert split.running_slots == 65
    # both pools end at the same number of contexts
    assert split.num_blocks // 250 == int(split.contexts)
    assert (split.num_slots - split.running_slots) // 2 == int(split.contexts)
    text = str(split)
    assert f"{split.num_slots:,} states = " in text and "KV tokens = " in text
    assert "32,000 tokens" in text
    shorter = split_memory(
        total,
        slot_bytes=slot_bytes,
        block_bytes=block_bytes,
        block_size=128,
        expected_context=2_000,
        max_num_seqs=64,
    )
    assert shorter.num_slots > split.num_slots and shorter.num_blocks < split.num_blocks


def test_split_memory_errors():
    good = dict(slot_bytes=10, block_bytes=1, block_size=1, expected_context=10, max_num_seqs=1)
    with pytest.raises(ValueError, match="expected_context"):
        split_memory(1000, **{**good, "expected_context": 0})
    # 2 running slots and one context of 10 blocks and 2 slots
    assert split_memory(50, **good).num_blocks == 10
    with pytest.raises(RuntimeError, match="lower max_num_seqs or expected_context"):
        split_memory(49, **good)
