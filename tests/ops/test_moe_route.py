"""moe_route: the op against float64, and its kernels, interpreted on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch_kda.ops.moe import moe_route
from torch_kda.tests.checks import assert_same
from torch_kda.tests.ops.cases import Case
from torch_kda.tests.ops.interpreted import kernels

NEAR = 1e-5  # sums closer than that may change places
DTYPES = [torch.bfloat16, torch.float32]
NAMES = ["bf16", "fp32"]


def route_case(
    M: int,
    dtype: torch.dtype,
    device: str,
    *,
    E: int = 40,
    k: int = 3,
    dim: int = 72,
    seed: int = 0,
) -> Case:
    """Logits of about 1, a bias that decides some choices, and every third row not real."""
    rng = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(M, dim, generator=rng).to(device, dtype),
        "weight": (torch.randn(E, dim, generator=rng) / dim**0.5).to(device),
        "choice_bias": (torch.randn(E, generator=rng) / 10).to(device),
        "num_choices": k,
        "renormalize": True,
        "scaling_factor": 2.446,
        "is_real": (torch.arange(M) % 3 != 2).to(device),
    }


def check(case: Case, out: tuple[Tensor, Tensor]) -> None:
    """Ids are float64's where they are clear, and weights are those of the ids, to fp32."""
    ids, weights = (x.cpu() for x in out)
    M, k = case["x"].shape[0], case["num_choices"]
    assert ids.shape == weights.shape == (M, k)
    assert (ids.dtype, weights.dtype) == (torch.int32, torch.float32)
    x, weight, bias = (case[n].cpu().double() for n in ("x", "weight", "choice_bias"))
    scores = torch.sigmoid(x @ weight.T)
    falling, order = (scores + bias).sort(dim=-1, descending=True, stable=True)
    is_real = case["is_real"].cpu() if case["is_real"] is not None else torch.ones(M).bool()
    assert (ids[~is_real] == -1).all()
    ids = torch.where(is_real[:, None], ids, order[:, :k])
    # a place is clear if both of its neighbours are far
    far = torch.nn.functional.pad(falling[:, :-1] - falling[:, 1:], (1, 1), value=1.0) > NEAR
    is_clear = (far[:, :-1] & far[:, 1:])[:, :k]
    assert (ids == order[:, :k])[is_clear].all()
    assert is_clear.double().mean() > 0.9 or M == 0
    # the others are as good, and no expert is there twice
    got = (scores + bias).gather(-1, ids.long())
    assert ((got - falling[:, :k]).abs() <= NEAR).all()
    assert all(len(set(row)) == k for row in ids.tolist())
    expected = scores.gather(-1, ids.long())
    if case["renormalize"]:
        expected = expected / (expected.sum(-1, keepdim=True) + 1e-20)
    expected *= case["scaling_factor"]
    # of rows that are not real a near tie could be another expert's weight
    error = ((weights.double() - expected) / expected).abs()[is_real]
    assert not error.numel() or error.max() <= 2e-6, error.max()


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("M", [0, 1, 2, 65, 200])
@pytest.mark.parametrize(("E", "k"), [(5, 1), (5, 5), (256, 8)], ids=str)
def test_moe_route(E: int, k: int, M: int, dtype: torch.dtype, device: str, nan_memory) -> None:
    case = route_case(M, dtype, device, E=E, k=k)
    check(case, moe_route(**case))


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("has_real", [True, False], ids=["real", "all"])
@pytest.mark.parametrize("renormalize", [True, False], ids=["renormalized", "plain"])
def test_moe_route_options(
    renormalize: bool, has_real: bool, dtype: torch.dtype, device: str
) -> None:
    case = route_case(9, dtype, device) | {"renormalize": renormalize}
    case["is_real"] = case["is_real"] if has_real else None
    check(case, moe_route(**case))
    one = route_case(9, dtype, device) | {"scaling_factor": 1.0}
    if renormalize:
        total = moe_route(**one)[1].sum(-1)
        assert (total - 1).abs().max() <= 1e-6


def check_ties(op: Any, dtype: torch.dtype, device: str) -> None:
    """Of equal experts the lower id; also at infinity, and where all is NaN."""
    inf = float("inf")
    case = route_case(4, dtype, device, E=6, k=4) | {"is_real": None}
    case["weight"][:] = case["weight"][0]
    case["choice_bias"] = torch.tensor([0.0, -inf, 0.5, -inf, 0.0, 0.5], device=device)
    assert op(**case)[0].tolist() == [[2, 5, 0, 4]] * 4
    case["num_choices"] = 6
    assert op(**case)[0].tolist() == [[2, 5, 0, 4, 1, 3]] * 4
    case["choice_bias"].fill_(-7.0)
    expected = moe_route(**case)
    assert expected[0].tolist() == [[0, 1, 2, 3, 4, 5]] * 4
    case["x"][1, 3] = float("nan")
    case["x"][2, 3] = -case["x"][1, 3]
    ids, weights = op(**case)
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 4
    assert weights[[1, 2]].isnan().all() and not weights[[0, 3]].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_moe_route_ties(dtype: torch.dtype, device: str) -> None:
    check_ties(moe_route, dtype, device)


def check_nan_row(op: Any, M: int, dtype: torch.dtype, device: str) -> None:
    case = route_case(M, dtype, device)
    clean = op(**case)
    case["x"][M // 2] = float("nan")
    others = torch.arange(M) != M // 2
    for name, a, b in zip(("ids", "weights"), clean, op(**case), strict=True):
        assert_same(name, b[others.to(device)], a[others.to(device)])


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("M", [2, 65])
def test_moe_route_nan_row(M: int, dtype: torch.dtype, device: str) -> None:
    check_nan_row(moe_route, M, dtype, device)


@pytest.mark.parametrize("has_real", [True, False], ids=["real", "all"])
def test_moe_route_opcheck(has_real: bool, device: str) -> None:
    case = route_case(9, torch.float32, device)
    args = tuple(case.pop(n) for n in ("x", "weight", "choice_bias", "num_choices"))
    case["is_real"] = case["is_real"] if has_real else None
    torch.library.opcheck(torch.ops.torch_kda.moe_route.default, args, case)


@pytest.mark.parametrize("has_real", [True, False], ids=["real", "all"])
def test_moe_route_fullgraph(has_real: bool, device: str) -> None:
    case = route_case(9, torch.bfloat16, device)
    case["is_real"] = case["is_real"] if has_real else None
    torch._dynamo.reset()
    out = torch.compile(moe_route, fullgraph=True, backend="aot_eager")(**case)
    for name, a, b in zip(("ids", "weights"), out, moe_route(**case), strict=True):
        assert_same(name, a, b)


@pytest.fixture(name="router")
def _router(device: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = kernels(device, monkeypatch)["router"]
    if device == "cpu":
        interpret_bf16_products(monkeypatch)
    return module


def interpret_bf16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bf16 as uint16, and multiplies these."""
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype("uint32") << 16).view("float32"), tl.float32)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return create_dot(self, widened(a), widened(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


TILES = {
    "split": (16, 16, 16, 32, 4, 2),
    "one step": (16, 32, 128, 128, 4, 1),
    "whole depth": (32, 16, 32, 0, 4, 3),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
@pytest.mark.parametrize(("M", "E", "k", "dim"), [(1, 5, 1, 40), (2, 40, 8, 100), (17, 33, 3, 72)])
def test_router_kernels(router, device, M, E, k, dim, tile, dtype, nan_memory) -> None:
    case = route_case(M, dtype, device, E=E, k=k, dim=dim)
    tile = router.Tile(*tile)
    out = router.moe_route(**case, tile=tile)
    check(case, out)
    for m in {0, M // 2, M - 1}:
        row = case | {n: case[n][m : m + 1] for n in ("x", "is_real")}
        alone = router.moe_route(**row, tile=tile)
        for name, a, b in zip(("ids", "weights"), alone, out, strict=True):
            assert_same(f"{name} of {m} alone", a, b[m : m + 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("M", [0, 65])
def test_router_kernels_own_tile(router, device, M, dtype, nan_memory) -> None:
    case = route_case(M, dtype, device, E=256, k=8, dim=300) | {"renormalize": False}
    check(case, router.moe_route(**case))


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_router_kernels_ties_and_nan(router, device, dtype, nan_memory) -> None:
    check_ties(router.moe_route, dtype, device)
    check_nan_row(router.moe_route, 5, dtype, device)


def test_three_parts_are_a_weight(router, device) -> None:
    """With x one-hot the logits are the weights, bit by bit but for rounding of the last part."""
    weight = torch.randn(20, 16).to(device) * torch.logspace(-3, 3, 20)[:, None].to(device)
    x = torch.eye(16, dtype=torch.bfloat16, device=device)
    logits = router._logits(x, weight, router.Tile(16, 16, 16, 16, 4, 1)).sum(0).T
    assert ((logits - weight).abs() <= weight.abs() * 2**-23).all()


CUDA = {"dtype": torch.bfloat16, "device": "cuda", "E": 256, "k": 8, "dim": 2304}
# the least and the most rows of each tile
ROWS = [1, 16, 17, 64, 65, 2048, 2049, 8192]


@pytest.mark.gpu
@pytest.mark.parametrize("M", ROWS)
def test_moe_route_at_real_size(M: int, nan_memory) -> None:
    case = route_case(M, **CUDA)
    out = moe_route(**case)
    check(case, out)
    for name, a, b in zip(("ids", "weights"), moe_route(**case), out, strict=True):
        assert_same(f"{name} again", a, b)


@pytest.mark.gpu
@pytest.mark.parametrize(("many", "few"), [(16, 1), (64, 17), (2048, 65), (8192, 2049)])
def test_moe_route_rows_of_one_tile(many: int, few: int) -> None:
    """The same bits with other rows around, in other places of a tile."""
    case = route_case(many, **CUDA)
    rows = torch.arange(many, device="cuda")[-few:]
    part = case | {n: case[n][rows] for n in ("x", "is_real")}
    for name, a, b in zip(("ids", "weights"), moe_route(**part), moe_route(**case), strict=True):
        assert_same(name, a, b[rows])


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 64, 300, 3000])
def test_moe_route_replay(M: int) -> None:
    """A graph captured on one case gives the other's bits."""
    cases = [route_case(M, seed=seed, **CUDA) for seed in (0, 1)]
    static = {n: x.clone() if isinstance(x, Tensor) else x for n, x in cases[0].items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        moe_route(**static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe_route(**static)
    for case in (cases[1], cases[0]):
        for n, x in static.items():
            if isinstance(x, Tensor):
                x.copy_(case[n])
        graph.replay()
        for name, a, b in zip(("ids", "weights"), out, moe_route(**case), strict=True):
            assert_same(name, a, b)


@pytest.mark.gpu
def test_moe_route_does_not_compile_for_a_number_of_rows() -> None:
    from torch_kda.ops.triton import router

    def compiled() -> int:
        both = (router._logits_kernel, router._choose_kernel)
        return sum(len(cache[0]) for k in both for cache in k.device_caches.values())

    for M in (16, 64, 2048, 2049):
        moe_route(**route_case(M, **CUDA))
    before = compiled()
    for M in (1, 7, 33, 65, 129, 1000, 3001):
        moe_route(**route_case(M, **CUDA))
    assert compiled() == before
