"""The small modules against their formulas and against transformers' own."""

import pytest
import torch
from torch_kda.kda.layers import GatedMLP, Linear, MoE, RMSNorm
from torch_kda.tests.checks import assert_same
from torch_kda.tests.kda.oracle import SIZES, linear_attn_config
from transformers import KimiLinearConfig
from transformers.models.kimi_linear import modeling_kimi_linear as hf


def config(**sizes) -> KimiLinearConfig:
    linear = linear_attn_config(2, [2])
    return KimiLinearConfig(**{**SIZES, **sizes}, num_hidden_layers=2, linear_attn_config=linear)


def randomized(module: torch.nn.Module) -> torch.nn.Module:
    for weight in [*module.parameters(), *module.buffers()]:
        weight.data.copy_(torch.randn_like(weight) * 0.3)
    return module.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm(dtype: torch.dtype, eps: float) -> None:
    """Bit for bit transformers' norm, small rows (where eps counts) included."""
    theirs = randomized(hf.KimiLinearRMSNorm(64, eps)).to(dtype)
    ours = RMSNorm(64, eps, dtype=dtype)
    ours.weight.copy_(theirs.weight)
    x = (torch.randn(5, 3, 64) * torch.logspace(-4, 1, 5)[:, None, None]).to(dtype).flatten(0, 1)
    assert_same("rms_norm", ours(x), theirs(x))
    row = x[7].float()
    wanted = ours.weight * (row / (row.square().mean() + eps).sqrt()).to(dtype)
    torch.testing.assert_close(ours(x)[7], wanted)
    total, y = ours.add(x, x.flip(0))
    assert_same("sum", total, x + x.flip(0))
    assert_same("norm of the sum", y, theirs(x + x.flip(0)))
    total, y = ours.add(x, None)
    assert_same("no sum", total, x)
    assert_same("its norm", y, theirs(x))


def test_gated_mlp() -> None:
    theirs = randomized(hf.KimiLinearMLP(config()))
    ours = GatedMLP(64, 96, dtype=torch.float32)
    ours.gate_up.weight.copy_(torch.cat([theirs.gate_proj.weight, theirs.up_proj.weight]))
    ours.down.weight.copy_(theirs.down_proj.weight)
    x = torch.randn(7, 64)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-5, rtol=1e-5)


def test_linear_has_no_bias() -> None:
    layer = Linear(8, 4, dtype=torch.float32)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    layer.weight.fill_(0.5)
    assert_same("linear", layer(torch.ones(2, 8)), torch.full((2, 4), 4.0))


@pytest.mark.parametrize("num_shared", [0, 1, 2])
@pytest.mark.parametrize("renormalize", [True, False])
def test_moe(num_shared: int, renormalize: bool) -> None:
    sizes = {"n_shared_experts": max(1, num_shared), "norm_topk_prob": renormalize}
    theirs = randomized(hf.KimiLinearMoE(config(**sizes)))
    ours = MoE(
        64,
        32,
        num_experts=8,
        num_experts_per_token=2,
        num_shared_experts=num_shared,
        renormalize=renormalize,
        scaling_factor=2.446,
        dtype=torch.float32,
    )
    ours.router.weight.copy_(theirs.gate.weight)
    ours.choice_bias.copy_(theirs.gate.e_score_correction_bias)
    ours.w13[:8].copy_(theirs.experts.gate_up_proj)
    ours.w2[:8].copy_(theirs.experts.down_proj)
    x = torch.randn(50, 64)
    expected = theirs(x[None])[0]
    shared = theirs.shared_experts
    if num_shared == 0:
        expected = expected - shared(x)
    for s in range(num_shared):
        part = slice(32 * s, 32 * (s + 1))
        gate, up = shared.gate_proj.weight[part], shared.up_proj.weight[part]
        ours.w13[8 + s].copy_(torch.cat([gate, up]))
        ours.w2[8 + s].copy_(shared.down_proj.weight[:, part])
    torch.testing.assert_close(ours(x), expected, atol=2e-5, rtol=1e-5)


def test_moe_router_is_fp32() -> None:
    """Two experts whose logits bf16 cannot tell apart are told apart in a bf16 layer."""
    layer = MoE(
        8,
        16,
        num_experts=2,
        num_experts_per_token=1,
        num_shared_experts=0,
        renormalize=True,
        scaling_factor=1.0,
        dtype=torch.bfloat16,
    )
    layer.choice_bias.zero_()
    layer.router.weight.fill_(0.125)
    layer.router.weight[1] += 1e-4
    ids, weights = layer.route(torch.ones(3, 8, dtype=torch.bfloat16))
    assert ids.flatten().tolist() == [1, 1, 1]
    assert weights.dtype == torch.float32
