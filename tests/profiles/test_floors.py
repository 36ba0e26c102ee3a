"""Byte and operation counts against counts by hand."""

import pytest
import torch
from torch_kda.kda.buckets import Shape
from torch_kda.kda.config import EngineConfig
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.presets import model_preset
from torch_kda.kda.runner import ModelRunner
from torch_kda.profiles.floors import Floors, counting_experts
from torch_kda.scheduler.batch import ScheduledBatch


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    config = EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, num_state_slots=9)
    model = KDAForCausalLM(config.resolve(model_preset("tiny", max_model_len=256)))
    model.random_init(0)
    return ModelRunner(model, config)


def test_decode_bytes(runner: ModelRunner) -> None:
    floors = Floors.of(runner)
    weights = sum(weight.nbytes for weight in runner.model.parameters())
    embedding = runner.model.embed.nbytes
    # with all 8 experts and no row, everything but the embedding is read
    assert floors.decode_bytes(0, 0, 8) == weights - embedding
    expert = 3 * 64 * 128 * 4
    assert floors.decode_bytes(0, 0, 8) - floors.decode_bytes(0, 0, 7) == 3 * expert
    state, window, latent = 4 * 32 * 32 * 4, 3 * 3 * 128 * 4, 64 * 4
    row = 2 * 3 * (state + window) + 101 * latent
    assert floors.decode_bytes(2, 100, 5) - floors.decode_bytes(0, 0, 5) == 2 * row


def test_kda_decode_bytes(runner: ModelRunner) -> None:
    values = (3 * 128) + 3 * 128 + 4  # qkv; gate, output gate, output; beta
    expected = 2 * 4 * 32 * 32 * 4 + 2 * 3 * 3 * 128 * 4 + values * 4
    assert Floors.of(runner).kda_decode_bytes(5) == 5 * expected


def test_prefill_flops(runner: ModelRunner) -> None:
    """The matrices that each token meets, and what grows with the square of the length."""
    floors = Floors.of(runner)
    model = runner.model
    linear = sum(
        module.weight.numel()
        for module in model.modules()
        if type(module).__name__ == "Linear" and module is not model.lm_head
    )
    others = ("conv_weight", "gates_b")
    rest = sum(x.numel() for name, x in model.named_parameters() if name.endswith(others))
    assert floors.dense_weights == linear + rest
    few, many = floors.prefill_flops(100), floors.prefill_flops(200)
    assert 2 * few < many < 4 * few  # attention grows with the square


def test_counting_experts(runner: ModelRunner) -> None:
    with counting_experts() as counts, torch.inference_mode():
        runner.buffers.fill(ScheduledBatch.of(0, ()), 4, 0)
        runner._step(Shape(4, 0))
    assert counts == [0, 0, 0]  # padding wakes none
