"""moe."""

import pytest
import torch
from torch import Tensor
from torch_kda.ops.moe import moe
from torch_kda.tests.checks import assert_close_as_torch, assert_same
from torch_kda.tests.ops.cases import Case


def moe_case(
    M: int, dtype: torch.dtype, device: str, *, E: int = 5, k: int = 2, F: int = 24, dim: int = 16
) -> Case:
    x, w13, w2 = (torch.randn(*s) / s[-1] ** 0.5 for s in ((M, dim), (E, 2 * F, dim), (E, dim, F)))
    ids = torch.stack([torch.randperm(E)[:k] for _ in range(M)]) if M else torch.zeros(0, k)
    tensors = {"x": x, "w13": w13, "w2": w2}
    return {
        **{name: t.to(device, dtype) for name, t in tensors.items()},
        "topk_ids": ids.to(device, torch.int32),
        "topk_weights": torch.rand(M, k).to(device),
    }


def by_row(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    num_shared: int = 0,
) -> Tensor:
    out, num_experts = torch.zeros_like(x), len(w13) - num_shared
    for m in range(x.shape[0]):
        ids, weights = topk_ids[m].tolist(), topk_weights[m].to(x.dtype).tolist()
        pairs = [(e, w) for e, w in zip(ids, weights, strict=True) if 0 <= e < num_experts]
        if ids and 0 <= ids[0] < num_experts:
            pairs += [(e, 1.0) for e in range(num_experts, len(w13))]
        for e, weight in pairs:
            gate, up = (w13[e] @ x[m]).chunk(2)
            out[m] += weight * (w2[e] @ (torch.nn.functional.silu(gate) * up))
    return out


def in_another_order(case: Case, rng: torch.Generator) -> Case:
    """The same experts with the terms of each of their sums in another order."""
    x, w13, w2 = case["x"], case["w13"], case["w2"]
    dims, hidden = (torch.randperm(n, generator=rng) for n in (x.shape[1], w2.shape[2]))
    rows = torch.cat([hidden, hidden + len(hidden)])
    mixed = {"x": x[:, dims], "w13": w13[:, rows][:, :, dims], "w2": w2[:, :, hidden]}
    return case | {name: t.contiguous() for name, t in mixed.items()}


def check(case: Case) -> None:
    floats = ("x", "w13", "w2")
    on_cpu = {n: t.cpu() if isinstance(t, Tensor) else t for n, t in case.items()}
    true = by_row(**on_cpu | {n: on_cpu[n].double() for n in floats})
    # an fp32 sum is as good as its order: of a few values the worst of one order says little
    rng = torch.Generator().manual_seed(0)
    orders = [by_row(**case), *(by_row(**in_another_order(case, rng)) for _ in range(4))]
    errors = torch.stack([(y.double().cpu() - true).abs() for y in orders])
    worst = errors.argmax(0, keepdim=True).to(case["x"].device) if true.numel() else None
    by_torch = orders[0] if worst is None else torch.stack(orders).gather(0, worst)[0]
    assert_close_as_torch("y", moe(**case), true, by_torch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("M", [0, 1, 7, 65])
def test_moe(M: int, dtype: torch.dtype, device: str) -> None:
    check(moe_case(M, dtype, device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_moe_one_expert_takes_all(dtype: torch.dtype, device: str) -> None:
    case = moe_case(33, dtype, device, k=1)
    case["topk_ids"].fill_(3)
    check(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bad", [-1, 5, 1_000], ids=str)
def test_moe_ids_out_of_range(bad: int, dtype: torch.dtype, device: str, nan_memory: None) -> None:
    case = moe_case(9, dtype, device)
    case["topk_ids"][2] = bad
    case["topk_ids"][5, 0] = bad
    out = moe(**case)
    assert_same("no expert", out[2], torch.zeros_like(out[2]))
    # an id that is skipped is one of weight zero
    case["topk_weights"][5, 0] = case["topk_weights"][2, 0] = case["topk_weights"][2, 1] = 0
    case["topk_ids"].clamp_(0, 4)
    check(case)
    assert_same("the other choice", out[5], moe(**case)[5])


def test_moe_int64_ids(device: str) -> None:
    case = moe_case(9, torch.float32, device)
    as_int64 = case | {"topk_ids": case["topk_ids"].long()}
    assert_same("y", moe(**as_int64), moe(**case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_shared", [1, 2])
@pytest.mark.parametrize("M", [0, 1, 3, 65])
def test_moe_shared(M: int, num_shared: int, dtype: torch.dtype, device: str, nan_memory) -> None:
    """The last experts run on all rows whose first id exists, whatever ids say of them."""
    case = moe_case(M, dtype, device, E=6) | {"num_shared": num_shared}
    case["topk_ids"][1:2] = -1  # padding
    case["topk_ids"][2:3, 1] = 5  # a shared expert is nobody's choice
    check(case)
    y = moe(**case)
    assert_same("padding", y[1:2], torch.zeros_like(y[1:2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_shared", [0, 1, 2])
@pytest.mark.parametrize("bad", [-1, 3, 1_000], ids=str)
def test_moe_first_id_out_of_range(
    bad: int, num_shared: int, dtype: torch.dtype, device: str, nan_memory: None
) -> None:
    """The row has no shared experts, but its other ids add what they do in any row."""
    case: Case = moe_case(3, dtype, device, E=3 + num_shared) | {"num_shared": num_shared}
    case["topk_ids"].copy_(torch.tensor([[bad, 1], [bad, bad], [1, bad]]))
    check(case)
    y = moe(**case)
    assert_same("padding", y[1], torch.zeros_like(y[1]))
    routed: Case = case | {"w13": case["w13"][:3], "w2": case["w2"][:3], "num_shared": 0}
    expected = moe(**routed)
    assert_same("named", y[0], expected[0])
    assert y[0].abs().max() > 0.01, "nothing is added, the test says nothing"
    assert torch.equal(y[2], expected[2]) == (num_shared == 0)
