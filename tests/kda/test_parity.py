"""Our model against transformers' kimi_linear, which no one here wrote: fp32 logits on a CPU."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MethodType

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.weights import load_checkpoint, load_config
from torch_kda.tests.kda.oracle import Driver, hf_model, ours, row, tokens
from transformers import KimiLinearForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear

ATOL = 1e-5  # logits here are up to 2; transformers differs from itself by 3e-6 between its forms
PROMPT, TOTAL = 37, 50  # tokens before and after decoding
CHUNKS = (13, 16, 8)

CASES = {
    "kda3-mla1": {"mla": [4]},
    "kda-only": {"mla": [], "num_layers": 3},
    "mla-only": {"mla": [1, 2], "num_layers": 2},
    "mla-first": {"mla": [1, 3], "num_layers": 4},
    "heads2x32": {"mla": [3], "num_layers": 3, "linear_heads": 2, "linear_dim": 32},
    "heads6x8-mla2": {
        **{"mla": [2], "num_layers": 2, "linear_heads": 6, "linear_dim": 8},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "qk_nope_head_dim": 24},
    },
    "q-lora": {"mla": [2], "num_layers": 2, "q_lora_rank": 24},
    "no-shared-key": {"mla": [2], "num_layers": 2, "qk_rope_head_dim": 0},
    "top3-raw-weights": {
        **{"mla": [2], "num_layers": 3, "norm_topk_prob": False, "num_experts_per_tok": 3},
        **{"n_shared_experts": 2, "routed_scaling_factor": 1.7},
    },
    "two-dense": {
        **{"mla": [2], "num_layers": 3, "mlp_layer_types": ["dense", "dense", "sparse"]},
        **{"num_local_experts": 5},
    },
}


def logits_of(hf: KimiLinearForCausalLM, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return hf(torch.tensor([ids]), use_cache=False).logits[0]


def assert_near(name: str, ours: Tensor, theirs: Tensor, atol: float = ATOL) -> None:
    error = (ours - theirs).abs().max().item()
    assert error <= atol, f"{name}: logits differ by {error:.2e}, allowed {atol:.0e}"


def assert_all_forms(hf: KimiLinearForCausalLM, model: KDAForCausalLM) -> None:
    """Full prefill, chunked prefill, and decode, against transformers' full forward."""
    ids = tokens(TOTAL)
    expected = logits_of(hf, ids)
    driver = Driver(model)
    whole = driver.run_all(row(ids, 0, src=-1, dst=0, blocks=driver.blocks(TOTAL)))
    assert_near("full prefill", whole, expected)
    blocks, start = driver.blocks(TOTAL), 0
    for size in CHUNKS:
        part = ids[start : start + size]
        src = 1 if start else -1
        chunk = driver.run_all(row(part, start, src=src, dst=1, blocks=blocks))
        assert_near(f"chunk at {start}", chunk, expected[start : start + size])
        start += size
    src = 1
    for position in range(PROMPT, TOTAL):
        dst = 2 + position % 2  # to another slot each time
        step = row([ids[position]], position, src=src, dst=dst, blocks=blocks, decode=True)
        assert_near(f"decode at {position}", driver.run(step), expected[position])
        src = dst


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_parity(case: dict, tmp_path: Path) -> None:
    hf = hf_model(**case)
    model = ours(hf, tmp_path)
    assert [i + 1 for i in model.config.mla_layers] == case["mla"]
    assert_all_forms(hf, model)


def test_parity_mixed_batch(tmp_path: Path) -> None:
    """Sequences side by side, in both segments and with padding, give what each gives alone."""
    hf = hf_model(mla=[2, 4])
    driver = Driver(ours(hf, tmp_path))
    prompts = [tokens(n, seed=n) for n in (20, 33, 5, 31, 1, 17)]
    expected = [logits_of(hf, ids)[-1] for ids in prompts]
    tables = [driver.blocks(len(ids)) for ids in prompts]
    # the last token of sequences 0..2 is decoded, 3 is continued, 4 and 5 start
    for i, computed in enumerate([19, 32, 4, 13]):
        driver.run(row(prompts[i][:computed], 0, src=-1, dst=i, blocks=tables[i]))
    rows = [
        row(prompts[i][-1:], len(prompts[i]) - 1, src=i, dst=6 + i, blocks=tables[i], decode=True)
        for i in range(3)
    ]
    rows += [
        row(prompts[i][start:], start, src=src, dst=i, blocks=tables[i])
        for i, start, src in ((3, 13, 3), (4, 0, -1), (5, 0, -1))
    ]
    logits = driver.run(*rows, D=5, T=64)
    for i, want in enumerate(expected):
        assert_near(f"sequence {i}", logits[i], want)


def test_parity_from_checkpoint(tmp_path: Path) -> None:
    """Resumed from a state that a longer prefill exported on its way: as if nothing was cached."""
    hf = hf_model(mla=[2, 4])
    driver = Driver(ours(hf, tmp_path))
    ids, other = tokens(53), tokens(50, seed=1)
    other[:32] = ids[:32]
    blocks = driver.blocks(53)
    exports = ((16, 5), (32, 6), (48, 7))
    first = driver.run_all(row(ids, 0, src=-1, dst=4, blocks=blocks, exports=exports))
    assert_near("exporting prefill", first, logits_of(hf, ids))
    before = [x[list(blocks)].clone() for x in driver.pools.kv]
    states = [x[6].clone() for x in driver.pools.state]
    shared = blocks[:2]
    resumed = driver.run_all(
        row(other[32:], 32, src=6, dst=8, blocks=shared + driver.blocks(18), kv_start=32)
    )
    assert_near("resumed at 32", resumed, logits_of(hf, other)[32:])
    # KV reaches further than the state: computed again, not written again
    deeper = driver.run_all(row(ids[16:], 16, src=5, dst=9, blocks=blocks, kv_start=48))
    assert_near("resumed at 16", deeper, logits_of(hf, ids)[16:])
    for pool, kept in zip(driver.pools.kv, before, strict=True):
        assert torch.equal(pool[list(blocks[:3])], kept[:3])
    for pool, kept in zip(driver.pools.state, states, strict=True):
        assert torch.equal(pool[6], kept)  # the source of a hit stays as it was


def test_parity_latent_norm_eps(tmp_path: Path) -> None:
    """The latent norm has eps 1e-6 whatever rms_norm_eps is; small latents show the difference."""
    hf = hf_model(mla=[1], num_layers=1)
    hf.model.layers[0].self_attn.kv_a_proj_with_mqa.weight.mul_(2e-3)
    model = ours(hf, tmp_path)
    assert_all_forms(hf, model)
    wrong = KDAForCausalLM(replace(model.config, latent_norm_eps=model.config.rms_norm_eps))
    wrong.load_state_dict(model.state_dict())
    ids = tokens(TOTAL)
    driver = Driver(wrong)
    logits = driver.run_all(row(ids, 0, src=-1, dst=0, blocks=driver.blocks(TOTAL)))
    assert (logits - logits_of(hf, ids)).abs().max() > 100 * ATOL


def with_gate(hf: KimiLinearForCausalLM, log_decay: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replace the form of transformers' forget gates: log_decay(exp(A_log), f) with bias in f."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        f = self.f_b_proj(self.f_a_proj(x)).float() + self.dt_bias.float()
        return log_decay(self.A_log.float().exp(), f.view(*x.shape[:2], -1, self.head_dim))

    for layer in hf.model.layers:
        if layer.block_type == "linear_attention":
            gate = layer.self_attn.forget_gate
            gate.forward = MethodType(forward, gate)


def with_bounded_gate(hf: KimiLinearForCausalLM, lower_bound: float) -> None:
    """As GLM-5.3 and K3 have it."""
    with_gate(hf, lambda rate, f: lower_bound * torch.sigmoid(rate * f))


@pytest.mark.parametrize("scale", [1.0, 20.0], ids=["wild", "extreme"])
def test_parity_strong_gates(scale: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Softplus gates as strong as a real checkpoint's, up to thousands of nats a token.

    Two of transformers' forms are too coarse for this and get their exact twins: log(1 + exp(f))
    rounds away decays below 1e-7 that exp(A_log) magnifies, and the chunked recurrence takes
    differences of sums of log decays, in which a small one behind a large one is lost.
    """
    recurrent = modeling_kimi_linear.recurrent_kimi_delta_attention
    monkeypatch.setattr(modeling_kimi_linear, "chunk_kimi_delta_attention", recurrent)
    hf = hf_model(mla=[4])
    for layer in hf.model.layers[:3]:
        gate = layer.self_attn.forget_gate
        gate.A_log.copy_(torch.linspace(-2, math.log(201), 4).view(1, 1, 4, 1))
        gate.dt_bias.copy_(torch.linspace(-8, 1, 64)[torch.randperm(64)] * scale)
        gate.f_b_proj.weight.mul_(scale)
    strongest = torch.linspace(-8, 1, 64)[-1] * scale * 201
    assert strongest > (200 if scale == 1 else 2661)
    model = ours(hf, tmp_path)
    with_gate(hf, lambda rate, f: -rate * nn.functional.softplus(f))
    assert_all_forms(hf, model)


def as_k3(hf: KimiLinearForCausalLM) -> dict[str, Tensor]:
    """Full-rank output gates, on attention too; returns the new tensors by their public names."""
    added = {}
    for i, layer in enumerate(hf.model.layers):
        attention, hidden = layer.self_attn, layer.hidden_size
        out = attention.o_proj.in_features
        gate = nn.Linear(hidden, out, bias=False).requires_grad_(False)
        added[f"model.layers.{i}.self_attn.g_proj.weight"] = gate.weight
        if layer.block_type == "linear_attention":
            attention.g_a_proj, attention.g_b_proj = gate, nn.Identity()
        else:
            seen: list[Tensor] = []
            attention.register_forward_pre_hook(
                lambda _, args, kwargs, seen=seen: seen.append(kwargs["hidden_states"]),
                with_kwargs=True,
            )
            attention.o_proj.register_forward_pre_hook(
                lambda _, args, seen=seen, gate=gate: args[0] * gate(seen.pop()).sigmoid()
            )
    return added


def rewrite(folder: Path, drop: str, added: dict[str, Tensor], **linear: object) -> None:
    """Change a saved checkpoint: its tensors, and linear_attn_config in its config."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: x for name, x in tensors.items() if drop not in name} | added
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["linear_attn_config"].update(linear)
    config["mla_use_output_gate"] = bool(added)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("lower_bound", [-5.0, -0.5])
@pytest.mark.parametrize("strength", [1.0, 30.0], ids=["mild", "saturated"])
def test_parity_bounded_gate(lower_bound: float, strength: float, tmp_path: Path) -> None:
    hf = hf_model(mla=[4])
    for layer in hf.model.layers[:3]:
        layer.self_attn.forget_gate.dt_bias.copy_(torch.randn(64) * strength)
    hf.save_pretrained(tmp_path)
    with_bounded_gate(hf, lower_bound)
    rewrite(tmp_path, "nothing", {}, gate_lower_bound=lower_bound)
    model = KDAForCausalLM(load_config(tmp_path))
    load_checkpoint(model, tmp_path)
    assert_all_forms(hf, model)


def test_parity_k3_gates(tmp_path: Path) -> None:
    """Bounded gate, full-rank output gates, gated attention, q-LoRA: the K3 layers."""
    hf = hf_model(mla=[2, 4], q_lora_rank=24)
    hf.save_pretrained(tmp_path)
    with_bounded_gate(hf, -5.0)
    added = as_k3(hf)
    keys = {"gate_lower_bound": -5.0, "use_full_rank_gate": True}
    rewrite(tmp_path, ".self_attn.g_", added, **keys)
    model = KDAForCausalLM(load_config(tmp_path))
    load_checkpoint(model, tmp_path)
    assert_all_forms(hf, model)
