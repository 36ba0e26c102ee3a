"""Pools: shapes, bytes, separate memory, and the message when there is none."""

import math
from dataclasses import replace

import pytest
import torch
from torch_kda.cache.storage import Pools
from torch_kda.kda.config import EngineConfig
from torch_kda.kda.memory import kda_spec, mla_spec
from torch_kda.kda.presets import model_preset

CONFIG = model_preset("tiny", num_hidden_layers=8)


def test_allocate() -> None:
    pools = Pools.allocate(CONFIG, 5, 7, 16, torch.bfloat16, "cpu")
    assert [len(group) for group in (pools.state, pools.conv, pools.kv)] == [6, 6, 2]
    assert {(x.shape, x.dtype) for x in pools.state} == {((5, 4, 32, 32), torch.float32)}
    assert {(x.shape, x.dtype) for x in pools.conv} == {((5, 3, 384), torch.bfloat16)}
    assert {(x.shape, x.dtype) for x in pools.kv} == {((7, 16, 64), torch.bfloat16)}
    assert all((x == 0).all() for x in (*pools.state, *pools.conv, *pools.kv))


def test_allocate_fill() -> None:
    pools = Pools.allocate(CONFIG, 2, 2, 16, torch.bfloat16, "cpu", fill=math.nan)
    assert all(x.isnan().all() for x in (*pools.state, *pools.conv, *pools.kv))


def test_allocate_gives_each_layer_its_own_memory() -> None:
    pools = Pools.allocate(CONFIG, 2, 2, 16, torch.float32, "cpu")
    tensors = (*pools.state, *pools.conv, *pools.kv)
    assert len({x.untyped_storage().data_ptr() for x in tensors}) == len(tensors)
    assert all(x.untyped_storage().nbytes() == x.nbytes and x.is_contiguous() for x in tensors)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_what_the_specs_say(dtype: str) -> None:
    config = replace(CONFIG, dtype=dtype)
    pools = Pools.allocate(config, 5, 7, 16, getattr(torch, dtype), "cpu")
    spec = kda_spec(config, EngineConfig())
    assert pools.state_bytes == 5 * 6 * spec.state_bytes
    assert pools.conv_bytes == 5 * 6 * spec.conv_bytes
    assert pools.kv_bytes == 7 * 16 * 2 * mla_spec(config).token_bytes
    assert pools.total_bytes == pools.state_bytes + pools.conv_bytes + pools.kv_bytes


@pytest.mark.parametrize("counts", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_allocate_checks(counts: tuple[int, int, int]) -> None:
    name = ("num_slots", "num_blocks", "block_size")[counts.index(0)]
    with pytest.raises(ValueError, match=f"Pools.allocate: {name} must be >= 1, got 0"):
        Pools.allocate(CONFIG, *counts, torch.float32, "cpu")


def test_allocate_without_memory() -> None:
    with pytest.raises(
        RuntimeError, match=r"2251799813685248 state slots .*do not fit on cpu; lower"
    ):
        Pools.allocate(CONFIG, 1 << 51, 4, 16, torch.float32, "cpu")
