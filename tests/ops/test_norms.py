"""gated_rms_norm, rms_norm, add_rms_norm."""

import pytest
import torch
from torch import Tensor
from torch_kda.ops.norms import add_rms_norm, gated_rms_norm, rms_norm
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


def plain(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The root in fp32, all after it in x's dtype."""
    y = x if x.dtype == torch.float64 else x.float()
    return weight * (y / (y.square().mean(-1, keepdim=True) + eps).sqrt()).to(x.dtype)


SHAPES = [(0, 16), (1, 1), (3, 20), (37, 512), (2, 2304), (5, 8192)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype, device: str, nan_memory) -> None:
    x = 3 * torch.randn(shape, dtype=dtype, device=device)
    weight = torch.randn(shape[-1], dtype=dtype, device=device)
    true = plain(x.double(), weight.double(), 1e-5)
    y = rms_norm(x, weight, eps=1e-5)
    assert_close_as_torch("y", y, true, plain(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype, device: str, nan_memory) -> None:
    """torch's sum, and the norm of that sum as it was rounded."""
    x, residual = (3 * torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    weight = torch.randn(shape[-1], dtype=dtype, device=device)
    total, y = add_rms_norm(x, residual, weight, eps=1e-5)
    assert_same("sum", total, x + residual)
    assert_same("y", y, rms_norm(total, weight, eps=1e-5))
    true = plain(total.double(), weight.double(), 1e-5)
    assert_close_as_torch("y", y, true, plain(total, weight, 1e-5))


def test_rms_norm_eps_and_zeros(device: str) -> None:
    x, weight = torch.zeros(2, 8, device=device), torch.ones(8, device=device)
    assert_same("zeros", rms_norm(x, weight, eps=1e-5), x)
    small = rms_norm(x + 1e-3, weight, eps=3e-6)
    true, as_torch = (torch.full((2, 8), value, device=device) for value in (0.5, 0.5 + 1e-7))
    assert_close_as_torch("small", small, true, as_torch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_rms_norm_bits_and_strides(dtype: torch.dtype, device: str) -> None:
    """A row has the same bits alone, among others, and as a slice of a wider row."""
    x, residual = (torch.randn(9, 576, device=device).to(dtype) for _ in range(2))
    weight = torch.randn(512, device=device).to(dtype)
    latent, other = x[:, :512], residual[:, 64:]
    y = rms_norm(latent.contiguous(), weight, eps=1e-6)
    total, sum_y = add_rms_norm(latent.contiguous(), other.contiguous(), weight, eps=1e-6)
    assert_same("strided", rms_norm(latent, weight, eps=1e-6), y)
    strided = add_rms_norm(latent, other, weight, eps=1e-6)
    assert_same("strided sum", strided[0], total)
    assert_same("norm of it", strided[1], sum_y)
    assert all(out.is_contiguous() for out in strided)
    for i in range(9):
        row = slice(i, i + 1)
        assert_same(f"row {i}", rms_norm(latent[row], weight, eps=1e-6), y[row])
        alone = add_rms_norm(latent[row], other[row], weight, eps=1e-6)
        assert_same(f"sum {i}", alone[0], total[row])
        assert_same(f"norm of sum {i}", alone[1], sum_y[row])
