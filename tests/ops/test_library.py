"""define_op and the argument checks."""

import re

import pytest
import torch
from torch_kda.ops.library import (
    check_csr,
    check_device,
    check_inner,
    check_tensor,
    define_op,
    require,
)
from torch_kda.ops.norms import gated_rms_norm


def test_check_tensor_binds_letters() -> None:
    dims: dict[str, int] = {}
    check_tensor("f", "x", torch.zeros(3, 5), "T 5", torch.float32, dims)
    check_tensor("f", "y", torch.zeros(4), "T+1", (torch.float64, torch.float32), dims)
    assert dims == {"T": 3}


@pytest.mark.parametrize(
    ("x", "shape", "message"),
    [
        (torch.zeros(8), "B", "f: x must be [B=9] int32, got [8] float32"),
        (torch.zeros(9, 2), "B", "f: x must be [B=9] int32, got [9, 2] float32"),
        (torch.zeros(9), "B", "f: x must be [B=9] int32, got [9] float32"),
        (
            torch.zeros(9, 2, dtype=torch.int32),
            "B 4",
            "f: x must be [B=9, 4] int32, got [9, 2] int32",
        ),
        (torch.zeros(9, dtype=torch.int32), "B+1", "f: x must be [B+1=10] int32, got [9] int32"),
        (
            torch.zeros(7, 2, dtype=torch.int32),
            "B Q",
            "f: x must be [B=9, Q] int32, got [7, 2] int32",
        ),
    ],
    ids=["size", "rank", "dtype", "number", "plus-one", "unbound"],
)
def test_check_tensor(x: torch.Tensor, shape: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        check_tensor("f", "x", x, shape, torch.int32, {"B": 9})


def test_check_tensor_names_every_dtype() -> None:
    with pytest.raises(ValueError, match="must be .* bfloat16 or float32, got .* float64"):
        check_tensor("f", "x", torch.zeros(1).double(), "T", (torch.bfloat16, torch.float32), {})


def test_check_inner() -> None:
    x = torch.zeros(4, 6, 8)
    check_inner("f", "x", x, 3)
    check_inner("f", "x", x[:, :, :5], 1)
    check_inner("f", "x", x[::2], 2)
    check_inner("f", "x", x[:, :1, :5], 2)
    with pytest.raises(ValueError, match=r"f: x must have its last 2 dims contiguous, got strides"):
        check_inner("f", "x", x[:, :, :5], 2)
    with pytest.raises(ValueError, match=r"call \.contiguous\(\)"):
        check_inner("f", "x", x.mT, 1)


def test_check_device() -> None:
    here, nowhere = torch.zeros(1), torch.zeros(1, device="meta")
    check_device("f", {"a": here, "b": None, "c": here})
    with pytest.raises(ValueError, match="f: c must be on cpu, where a is, got meta"):
        check_device("f", {"a": here, "b": None, "c": nowhere})
    with pytest.raises(ValueError, match="f: a must be on cpu or cuda, got meta"):
        check_device("f", {"a": nowhere})


def test_check_csr() -> None:
    indptr, entries = torch.zeros(3, dtype=torch.int32), torch.zeros(5, dtype=torch.int32)
    assert set(check_csr("f", None, None, None, {"N": 2}).values()) == {None}
    check_csr("f", indptr, entries, entries, {"N": 2})
    with pytest.raises(ValueError, match="must be given together, got only .*indptr"):
        check_csr("f", indptr, None, None, {"N": 2})
    with pytest.raises(ValueError, match=r"checkpoint_slots must be \[E=5\]"):
        check_csr("f", indptr, entries, entries[:2], {"N": 2})
    with pytest.raises(ValueError, match=r"checkpoint_indptr must be \[N\+1=4\]"):
        check_csr("f", indptr, entries, entries, {"N": 3})


def test_require() -> None:
    require(True, "f", "x", "1", 2)
    with pytest.raises(ValueError, match="^f: x must be 1, got 2$"):
        require(False, "f", "x", "1", 2)


def test_define_op() -> None:
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    op = define_op(
        "test_scaled(Tensor x, float factor) -> Tensor",
        cpu=scaled,
        cuda=scaled,
        fake=lambda x, factor: x.new_empty(x.shape),
    )
    x = torch.randn(5)
    assert torch.equal(op(x, 2.0), 2 * x)
    compiled = torch.compile(lambda x: op(x, 3.0) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), 3 * x + 1)
    torch.library.opcheck(torch.ops.torch_kda.test_scaled.default, (x, 2.0))


def test_profiler_sees_our_ops(device: str) -> None:
    """A plain CUDA call goes past the dispatcher, which is what a profiler listens to."""
    x = torch.randn(3, 2, 16, device=device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        gated_rms_norm(x, x, torch.ones(16, device=device), eps=1e-5)
    assert "torch_kda::gated_rms_norm" in {event.key for event in profiler.key_averages()}
