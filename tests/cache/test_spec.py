"""What a layer keeps: bytes, and which layers may share a slot number."""

import dataclasses

import pytest
from torch_kda.cache.spec import KDASpec, MLASpec, common_spec

# Kimi-K3 on one of 8 ranks
K3 = KDASpec(num_value_heads=12, head_k_dim=128, head_v_dim=128, conv_channels=3 * 12 * 128)


def test_slot_bytes():
    assert K3.slot_bytes == K3.state_bytes + K3.conv_bytes == 814_080
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
