"""The call of the compiled prefill, with a stand-in for what was compiled: no device is needed."""

import inspect
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_kda.cute_kernels import jit, kda_prefill
from torch_kda.ops import kda, kda_checks
from torch_kda.tests.ops.cases import Case, ints, prefill_case

NAMES = [
    *("q", "k", "v", "g_raw", "beta_logit", "A_log", "dt_bias", "state_pool"),
    *("cu_seqlens", "initial_slots", "final_slots"),
    *("checkpoint_indptr", "checkpoint_offsets", "checkpoint_slots"),
]
CPU = torch.empty(0).get_device()


class Recorder:
    """Stands for a compiled host function."""

    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.error = error

    def __call__(self, *arguments: Any) -> None:
        self.calls.append(arguments)
        if self.error is not None:
            raise self.error


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Recorder]]:
    """By gate; tensors of the CPU count as those of a device of 132 SMs."""
    functions = {gate: Recorder() for gate in kda_prefill.GATES}
    none = torch.zeros(1, dtype=torch.int32)
    indptr = torch.zeros(kda_prefill.MAX_SEQUENCES + 1, dtype=torch.int32)
    no_bytes = torch.empty(0, dtype=torch.uint8)
    here = kda_prefill._Device(132, (indptr, none, none), no_bytes)
    loaded = {(gate, CPU): (function, here) for gate, function in functions.items()}
    monkeypatch.setattr(kda_prefill, "_FUNCTIONS", loaded)
    yield functions


def make_case(lengths: list[int], **changes: Any) -> Case:
    case = prefill_case(lengths, H=2, HV=4, K=128, V=128, dtype=torch.bfloat16)
    return case | {"scale": 0.5} | changes


def call(case: Case) -> Tensor:
    """As the dispatcher calls it on CUDA."""
    keywords = {"lower_bound": case["lower_bound"], "scale": case["scale"]}
    return kda._kda_prefill_cuda(*(case[name] for name in NAMES), **keywords)


def host_parameters() -> list[str]:
    host = pytest.importorskip("torch_kda.cute_kernels.kda_host", exc_type=ImportError)
    return list(inspect.signature(host.KdaPrefill.__call__).parameters)[1:-1]


def test_kda_prefill_arguments(compiled: dict[str, Recorder]) -> None:
    """Every argument arrives where the host function has its name."""
    case = make_case([20, 35])
    out = call(case)
    (got,) = compiled["bounded"].calls
    by_name = dict(zip(host_parameters(), got, strict=True))
    tensors = {
        **{"mQ": "q", "mK": "k", "mV": "v", "mG": "g_raw", "mBeta": "beta_logit"},
        **{"mALog": "A_log", "mDtBias": "dt_bias", "mPool": "state_pool"},
        **{"mCuSeqlens": "cu_seqlens", "mInitial": "initial_slots", "mFinal": "final_slots"},
        **{"mIndptr": "checkpoint_indptr", "mOffsets": "checkpoint_offsets"},
        "mSlots": "checkpoint_slots",
    }
    for parameter, name in tensors.items():
        assert by_name.pop(parameter) is case[name], parameter
    assert by_name.pop("mO") is out and out.shape == case["v"].shape and out.is_contiguous()
    T, N = case["q"].shape[0], 2
    records = by_name.pop("mRecords")
    assert records.dtype == torch.uint8
    assert records.shape == (kda_prefill.workspace_bytes(T, N, 4),)
    assert by_name.pop("lower_bound") == -5.0 and by_name.pop("scale") == 0.5
    assert by_name.pop("stages") == 3 and by_name.pop("scan_tile") == 0
    assert not by_name


def test_kda_prefill_variants(compiled: dict[str, Recorder]) -> None:
    call(make_case([20], lower_bound=None, **dict.fromkeys(NAMES[-3:])))
    (got,) = compiled["softplus"].calls
    by_name = dict(zip(host_parameters(), got, strict=True))
    assert by_name["mIndptr"].shape[0] >= 2 and not by_name["mIndptr"].any()
    assert by_name["lower_bound"] == 0.0
    assert compiled["bounded"].calls == []


def test_kda_prefill_no_tokens(compiled: dict[str, Recorder]) -> None:
    case = make_case([0])
    rows = {name: case[name][:0] for name in ("q", "k", "v", "g_raw", "beta_logit")}
    assert call(case | rows).shape == (0, 4, 128)
    assert all(function.calls == [] for function in compiled.values())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("cu_seqlens", ints([0, 20]), "cu_seqlens must be"),
        ("checkpoint_indptr", ints([0, 1]), "checkpoint_indptr must be"),
        ("checkpoint_indptr", None, "must be given together"),
        ("lower_bound", -5.5, r"lower_bound must be in \[-5, 0\)"),
        ("lower_bound", 0.0, r"lower_bound must be in \[-5, 0\)"),
        ("q", torch.zeros(58, 3, 128, dtype=torch.bfloat16), "v must be of HV % H=3 == 0"),
        ("q", torch.zeros(58), "q must be"),
        ("v", torch.zeros(58, 4), "v must be"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_kda_prefill_refuses(
    compiled: dict[str, Recorder], name: str, value: Any, message: str
) -> None:
    """What the compiled signature can't see is refused before the call, in the op's words."""
    case = make_case([20, 35], **{name: value})
    if name == "q" and value.ndim == 3:
        case["k"] = value
    if name == "checkpoint_indptr" and value is None:
        # the compiled function wants a tensor here
        compiled["bounded"].error = TypeError("expected Tensor")
    with pytest.raises(ValueError, match=message):
        call(case)


def test_kda_prefill_explains_refusals(compiled: dict[str, Recorder]) -> None:
    """What the compiled function refuses is said in the op's words too."""
    compiled["bounded"].error = ValueError("Mismatched Tensor on argument #1")
    case = make_case([20, 35])
    case["k"] = case["k"].float()
    with pytest.raises(ValueError, match="kda_prefill: k must be .* bfloat16"):
        call(case)
    with pytest.raises(ValueError, match="Mismatched Tensor"):
        call(make_case([20, 35]))


def test_too_many_sequences(compiled: dict[str, Recorder]) -> None:
    N = kda_prefill.MAX_SEQUENCES + 1
    case = make_case([20]) | {"cu_seqlens": ints([0] * (N + 1)), **dict.fromkeys(NAMES[-3:])}
    case["initial_slots"] = case["final_slots"] = ints([-1] * N)
    keywords = {"lower_bound": -5.0, "scale": 0.5}
    with pytest.raises(ValueError, match="do not fit"):
        kda_prefill.kda_prefill(*(case[name] for name in NAMES), **keywords)
    with pytest.raises(NotImplementedError, match=r"up to 4096 sequences .* got .* for 4097"):
        kda_checks._check_sequences("kda_prefill", N)


@pytest.mark.parametrize(("T", "N", "HV"), [(1, 1, 1), (16, 3, 2), (8192, 1, 96), (17, 4096, 12)])
def test_workspace_bytes(T: int, N: int, HV: int) -> None:
    records = (-(-T // 16) + N) * HV
    assert kda_prefill.workspace_bytes(T, N, HV) == 13312 * records + 16 * N


def test_constants() -> None:
    """Written twice, because the ops run without the kernels."""
    from torch_kda.ops.reference import CHUNK

    assert kda_prefill.TILE == CHUNK
    assert kda_prefill.MAX_SEQUENCES == kda_checks.MAX_SEQUENCES


def test_load_during_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(jit, "load", None)
    with pytest.raises(RuntimeError, match=r"bounded is not on the device yet.*prepare first"):
        kda_prefill._load("bounded", 0)


def test_prepare_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="prepare needs a CUDA device"):
        kda_prefill.prepare()


def test_host_cost(compiled: dict[str, Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Our Python in an eager call stays far below the 20 us of the whole: it takes 4 to 8."""
    case = make_case([20, 35])
    arguments = [case[name] for name in NAMES]
    _, here = kda_prefill._FUNCTIONS["bounded", CPU]
    kda_prefill._FUNCTIONS["bounded", CPU] = lambda *_: None, here

    def batch() -> float:
        started = time.perf_counter()
        for _ in range(200):
            kda._kda_prefill_cuda(*arguments, lower_bound=-5.0, scale=0.5)
        return (time.perf_counter() - started) / 200 * 1e6

    with torch.inference_mode():
        best = min(batch() for _ in range(20))
    assert best < 15, f"{best:.1f} us"


@pytest.mark.gpu
def test_prepare() -> None:
    """On the device: everything is loaded, then a capture needs nothing more."""
    kda_prefill.prepare("cuda")
    here = torch.cuda.current_device()
    assert {(gate, here) for gate in kda_prefill.GATES} <= kda_prefill._FUNCTIONS.keys()
