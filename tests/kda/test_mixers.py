"""The two mixers: a layer against transformers' layer, and the layout that the kernels need."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch_kda.kda import mixers
from torch_kda.kda.mixers import AttentionMixer, KDAMixer
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.presets import PRESETS, model_preset
from torch_kda.scheduler.batch import ScheduledBatch
from torch_kda.tests.kda.oracle import Driver, hf_model, ours, row, tokens


def prefill_inputs(driver: Driver, length: int):
    only = row(tokens(length), 0, src=-1, dst=0, blocks=driver.blocks(length))
    return driver.load(ScheduledBatch.of(0, (only,)))


@torch.inference_mode()
def test_kda_mixer(tmp_path) -> None:
    """One KDA layer alone on large inputs, where gates and norms are far from linear."""
    hf = hf_model(mla=[2], num_layers=2)
    driver = Driver(ours(hf, tmp_path))
    inputs = prefill_inputs(driver, 40)
    x = 3 * torch.randn(48, 64)
    mixer = driver.model.blocks[0].mixer
    assert isinstance(mixer, KDAMixer)
    out = mixer(x, inputs, driver.pools.state[0], driver.pools.conv[0])
    expected = hf.model.layers[0].self_attn(x[None, :40])[0]
    torch.testing.assert_close(out[:40], expected, atol=1e-5, rtol=1e-5)
    assert (out[40:] == 0).all()  # padding tokens: the op's output is 0 there


@torch.inference_mode()
def test_attention_mixer_absorbs(tmp_path) -> None:
    """Decode in latent space gives what prefill gives with expanded keys and values."""
    driver = Driver(ours(hf_model(mla=[1], num_layers=1), tmp_path))
    mixer, pool = driver.model.blocks[0].mixer, driver.pools.kv[0]
    assert isinstance(mixer, AttentionMixer)
    inputs = prefill_inputs(driver, 33)
    x = 3 * torch.randn(48, 64)
    prefilled = mixer(x, inputs, pool)
    last = row([0], 32, src=0, dst=0, blocks=inputs.block_table[0].clone().numpy(), decode=True)
    step = driver.load(ScheduledBatch.of(0, (last,)))
    decoded = mixer(x[32:33], step, pool)
    torch.testing.assert_close(decoded[0], prefilled[32], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_kda_mixer_rows_are_aligned(name: str) -> None:
    """Slices of the fused projection start and step on 16 bytes, in every preset's width."""
    config = replace(model_preset(name), dtype="bfloat16")
    with torch.device("meta"):
        mixer = KDAMixer(config, dtype=torch.bfloat16)
        rows = mixer._project(torch.empty(4, config.hidden_size, dtype=torch.bfloat16))
    for x in (rows.qkv, rows.g_raw, rows.gate):
        assert x.stride(0) % 8 == 0 and x.storage_offset() % 8 == 0
        assert x.stride(-1) == 1
    assert rows.qkv.shape == (4, config.conv_dim)
    assert rows.beta_logit.shape == (4, config.linear_num_heads)
    assert rows.gate.shape == (4, config.linear_num_heads, config.linear_head_dim)


def test_mixers_see_both_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode rows and prefill tokens reach their ops cut at the right row, with their metadata."""
    config = model_preset("tiny", num_hidden_layers=2, mla_layers=(1,))
    model = KDAForCausalLM(config)
    model.random_init(0)
    driver, seen = Driver(model, draft_tokens=1), {}
    for op in ("kda_decode", "causal_conv_prefill", "kda_prefill", "mla_decode", "mla_prefill"):
        real = getattr(mixers, op)

        def spy(*args, real=real, op=op, **kwargs):
            seen[op] = (args, kwargs)
            return real(*args, **kwargs)

        monkeypatch.setattr(mixers, op, spy)
    blocks = driver.blocks(20)
    driver.run(row(tokens(10), 0, src=-1, dst=0, blocks=blocks))
    driver.run(
        row([5, 6], 10, src=0, dst=(1, 2), blocks=blocks, decode=True),
        row(tokens(7), 0, src=-1, dst=3, blocks=driver.blocks(7)),
        D=3,
        T=32,
    )
    assert seen["kda_decode"][0][0].shape == (6, config.conv_dim)
    assert seen["kda_prefill"][0][0].shape == (32, 4, 32)
    assert seen["causal_conv_prefill"][0][0].shape == (32, config.conv_dim)
    assert seen["mla_decode"][1]["num_tokens_per_row"] == 2
    assert seen["mla_decode"][0][3].tolist() == [12, 0, 0]
    assert seen["mla_prefill"][0][5].tolist() == [7, 0, 0, 0, 0, 0]
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    assert seen["mla_decode"][1]["scale"] == seen["mla_prefill"][1]["scale"] == scale


def test_kda_mixer_passes_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = []
    for op in ("kda_decode", "kda_prefill"):
        real = getattr(mixers, op)

        def spy(*args, real=real, lower_bound, **kwargs):
            bounds.append(lower_bound)
            return real(*args, lower_bound=lower_bound, **kwargs)

        monkeypatch.setattr(mixers, op, spy)
    model = KDAForCausalLM(model_preset("tiny", num_hidden_layers=1, gate_lower_bound=-2.5))
    model.random_init(0)
    driver = Driver(model)
    driver.run(row(tokens(10), 0, src=-1, dst=0, blocks=driver.blocks(11)))
    driver.run(row([1], 10, src=0, dst=0, blocks=driver.blocks(11), decode=True))
    assert bounds == [-2.5, -2.5]


def test_kda_mixer_has_no_bias() -> None:
    """FLA's own KDA layer has one on the output gate; Kimi-Linear has none anywhere."""
    with torch.device("meta"):
        mixer: nn.Module = KDAMixer(model_preset("tiny"), dtype=torch.float32)
    biases = [name for name, _ in mixer.named_parameters() if "bias" in name]
    assert biases == ["dt_bias"]
