"""silu_and_mul, sigmoid_mul."""

import pytest
import torch
from torch import Tensor
from torch_kda.ops.activations import sigmoid_mul, silu_and_mul
from torch_kda.tests.checks import assert_close_as_torch, assert_same

# steps in the dtype: exp, sum, quotient, product; in bf16 all but the last are fp32
ROUNDINGS = {torch.float32: 4, torch.bfloat16: 1}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
SHAPES = pytest.mark.parametrize("shape", [(0, 16), (1, 1), (37, 20), (3, 1500)], ids=str)


def composed(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


@DTYPES
@SHAPES
def test_silu_and_mul(shape: tuple[int, int], dtype: torch.dtype, device: str, nan_memory) -> None:
    gate, up = (3 * torch.randn(shape, device=device).to(dtype) for _ in range(2))
    y = silu_and_mul(torch.cat([gate, up], dim=1))
    true = composed(gate.double(), up.double())
    by_torch = composed(gate, up)
    assert_close_as_torch("y", y, true, by_torch, roundings=ROUNDINGS[dtype])


@DTYPES
@SHAPES
def test_sigmoid_mul(shape: tuple[int, int], dtype: torch.dtype, device: str, nan_memory) -> None:
    x, gate = (3 * torch.randn(shape, device=device).to(dtype) for _ in range(2))
    true = x.double() * gate.double().sigmoid()
    y, by_torch = sigmoid_mul(x, gate), x * gate.sigmoid()
    assert_close_as_torch("y", y, true, by_torch, roundings=ROUNDINGS[dtype])


def test_silu_rounds_before_the_product(device: str) -> None:
    """In bf16, SiLU(1) is 0.73046875, and that is what is multiplied."""
    up = torch.arange(1, 257, dtype=torch.bfloat16, device=device)[None]
    gate = torch.ones_like(up)
    assert_same("y", silu_and_mul(torch.cat([gate, up], dim=1)), 0.73046875 * up)
    assert_same("gated", sigmoid_mul(up, gate), 0.73046875 * up)
    at_once = (up.float() * torch.sigmoid(torch.ones((), device=device))).to(torch.bfloat16)
    assert (at_once != 0.73046875 * up).any(), "the test says nothing"


def test_extreme_gates(device: str) -> None:
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=device)
    up = torch.full_like(gate, 2.0)
    expected = torch.tensor([[0.0, 0.0, 0.0, 200.0, 2e4]], device=device)
    y = silu_and_mul(torch.cat([gate, up], dim=1))
    torch.testing.assert_close(y, expected, atol=1e-30, rtol=0.0)
    gated = sigmoid_mul(up, gate)
    expected = torch.tensor([[0.0, 0.0, 1.0, 2.0, 2.0]], device=device)
    torch.testing.assert_close(gated, expected, atol=1e-30, rtol=0.0)


@DTYPES
def test_bits_and_strides(dtype: torch.dtype, device: str) -> None:
    """A row has the same bits alone, among others, and as a slice of a wider row."""
    wide = torch.randn(9, 100, device=device).to(dtype)
    x, gate = wide[:, 4:64], wide[:, 40:]
    y, gated = silu_and_mul(x.contiguous()), sigmoid_mul(x.contiguous(), gate)
    strided = (silu_and_mul(x), sigmoid_mul(x, gate))
    for name, a, b in zip(("silu", "sigmoid"), strided, (y, gated), strict=True):
        assert_same(f"strided {name}", a, b)
        assert a.is_contiguous()
    for i in range(9):
        row = slice(i, i + 1)
        assert_same(f"silu of row {i}", silu_and_mul(x[row]), y[row])
        assert_same(f"sigmoid of row {i}", sigmoid_mul(x[row], gate[row]), gated[row])
