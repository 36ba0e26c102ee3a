"""gated_rms_norm."""

import pytest
import torch
from torch import Tensor
from torch_kda.ops.norms import gated_rms_norm
from torch_kda.tests.checks import assert_close_as_torch, assert_same


def composed(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    y = torch.nn.functional.rms_norm(x, weight.shape, weight, eps)
    return y * torch.sigmoid(gate)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(0, 4, 16), (1, 1), (37, 3, 128), (5, 7)], ids=str)
def test_gated_rms_norm(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    x, gate = (3 * torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    weight = torch.randn(shape[-1], dtype=dtype, device=device)
    out = gated_rms_norm(x, gate, weight, eps=1e-5)
    true = composed(x.double(), gate.double(), weight.double(), 1e-5)
    assert_close_as_torch("y", out, true, composed(x, gate, weight, 1e-5))


def test_gated_rms_norm_eps_and_zeros(device: str) -> None:
    x = torch.zeros(2, 8, device=device)
    out = gated_rms_norm(x, torch.ones_like(x), torch.ones(8, device=device), eps=1e-5)
    assert_same("zeros", out, torch.zeros_like(out))
    small = gated_rms_norm(
        x + 1e-3, torch.full_like(x, 100.0), torch.ones(8, device=device), eps=3e-6
    )
    true, as_torch = (torch.full((2, 8), value, device=device) for value in (0.5, 0.5 + 1e-7))
    assert_close_as_torch("small", small, true, as_torch)


def test_gated_rms_norm_extreme_gates(device: str) -> None:
    x = torch.ones(2, 8, device=device)
    gate = torch.tensor([[-1e4] * 8, [1e4] * 8], device=device)
    out = gated_rms_norm(x, gate, torch.ones(8, device=device), eps=1e-5)
    assert_same("closed", out[0], torch.zeros(8, device=device))
    assert torch.isfinite(out).all() and (out[1] > 0.99).all()


def test_gated_rms_norm_bits_and_strides(device: str) -> None:
    x, gate = (torch.randn(9, 3, 20, device=device) for _ in range(2))
    weight = torch.randn(20, device=device)
    out = gated_rms_norm(x, gate, weight, eps=1e-5)
    for i in range(9):
        assert_same(f"row {i}", gated_rms_norm(x[i], gate[i], weight, eps=1e-5), out[i])
    strided = torch.cat([x, x], dim=-1)[..., :20]
    y = gated_rms_norm(strided, gate, weight, eps=1e-5)
    assert_same("strided", y, out)
    assert y.is_contiguous()
