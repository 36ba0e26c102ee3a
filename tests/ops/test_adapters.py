"""Other projects' names for the prefill, against the token recurrence."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch_kda.ops.adapters import chunk_kda, flash_kda_fwd
from torch_kda.ops.kda import kda_prefill
from torch_kda.ops.reference import kda_recurrent_ref
from torch_kda.tests.checks import assert_rms, assert_same
from torch_kda.tests.ops.cases import BOUNDS, Case, ints, prefill_case, run, sizes, to

SWITCHES = dict.fromkeys(
    (
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
    ),
    True,
)
FLA_NAMES = {"q": "q", "k": "k", "v": "v", "g_raw": "g", "beta_logit": "beta"}
CSR = ("checkpoint_indptr", "checkpoint_offsets", "checkpoint_slots")


def bare_case(lengths: list[int], device: str, **changes: Any) -> Case:
    """Sequence n reads slot n and writes slot N + n; no checkpoints."""
    case = prefill_case(lengths, **(sizes(device) | changes), rows=sum(lengths))
    N = len(lengths)
    case["initial_slots"] = ints(range(N), device)
    return case | dict.fromkeys(CSR)


def truth(case: Case) -> tuple[Tensor, Tensor]:
    """o, and the final states [N, HV, V, K], in float64."""
    out, pool = run(kda_recurrent_ref, to(case, torch.float64, "cpu"))
    return out, pool[case["final_slots"].long().cpu()]


def call_chunk_kda(case: Case, B: int = 1, **changes: Any) -> tuple[Tensor, Tensor | None]:
    N = case["cu_seqlens"].shape[0] - 1
    arguments = {
        **{theirs: case[ours].unflatten(0, (B, -1)) for ours, theirs in FLA_NAMES.items()},
        **{name: case[name] for name in ("A_log", "dt_bias", "lower_bound")},
        "initial_state": case["state_pool"][:N].clone(),
        "output_final_state": True,
        "state_v_first": True,
        "cu_seqlens": case["cu_seqlens"].long(),
        **SWITCHES,
    }
    return chunk_kda(**(arguments | changes))


@pytest.mark.parametrize("gates", ["mixed", "softplus"])
def test_chunk_kda(gates: str, device: str) -> None:
    case = bare_case([20, 0, 37], device, gates=gates)
    o, states = call_chunk_kda(case, safe_gate=gates == "mixed")
    true_o, true_states = truth(case)
    bound = BOUNDS[case["q"].dtype]
    assert o.shape == (1, 57, *true_o.shape[1:]) and states is not None
    assert_rms("o", o[0], true_o, bound)
    assert_rms("states", states, true_states, bound)


def test_chunk_kda_k_first(device: str) -> None:
    """FLA's default layout: the same states, transposed; the caller's are not changed."""
    case = bare_case([20, 37], device)
    o, states = call_chunk_kda(case)
    before = case["state_pool"][:2].mT.contiguous()
    initial = before.clone()
    o_k, states_k = call_chunk_kda(case, state_v_first=False, initial_state=initial)
    assert states is not None and states_k is not None
    assert_same("o", o_k, o)
    assert_same("states", states_k, states.mT.contiguous())
    assert_same("initial", initial, before)


def test_chunk_kda_rows(device: str) -> None:
    """Without cu_seqlens each row of the batch is a sequence."""
    case = bare_case([19, 19, 19], device)
    packed, packed_states = call_chunk_kda(case)
    o, states = call_chunk_kda(case, B=3, cu_seqlens=None)
    assert states is not None and packed_states is not None
    assert_same("o", o.flatten(0, 1), packed[0])
    assert_same("states", states, packed_states)


def test_chunk_kda_defaults(device: str) -> None:
    """No states in or out, no gate parameters, a scale of one's own."""
    case = bare_case([20, 37], device)
    none = {"initial_state": None, "output_final_state": False, "A_log": None, "dt_bias": None}
    o, states = call_chunk_kda(case, **none, scale=0.3)
    zeros = {name: torch.zeros_like(case[name]) for name in ("A_log", "dt_bias", "state_pool")}
    assert states is None
    assert_rms("o", o[0], truth(case | zeros | {"scale": 0.3})[0], BOUNDS[case["q"].dtype])
    flat = call_chunk_kda(case, dt_bias=case["dt_bias"].flatten())[0]
    assert_same("flat dt_bias", flat, call_chunk_kda(case)[0])


def test_chunk_kda_indifferent(device: str) -> None:
    """Hints that change nothing here."""
    case = bare_case([20, 37], device)
    hints = {"use_graph": True, "max_num_seqs": 2, "chunk_size": 32}
    hints["cu_seqlens_cpu"] = case["cu_seqlens"].cpu()
    assert_same("o", call_chunk_kda(case, **hints)[0], call_chunk_kda(case)[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_qk_l2norm_in_kernel", False),
        ("use_gate_in_kernel", False),
        ("use_beta_sigmoid_in_kernel", False),
        ("allow_neg_eigval", True),
        ("disable_recompute", True),
        ("return_intermediate_states", True),
        ("cp_context", object()),
        ("lower_bound", -6.0),
    ],
)
def test_chunk_kda_not_built(name: str, value: Any) -> None:
    case = bare_case([20], "cpu")
    with pytest.raises(NotImplementedError, match=f"chunk_kda: {name}.* is not built"):
        call_chunk_kda(case, **{name: value})


@pytest.mark.parametrize("adapter", ["chunk_kda", "flash_kda_fwd"])
def test_adapters_in_a_graph(adapter: str, device: str) -> None:
    def call(case: Case) -> Tensor:
        is_fla = adapter == "chunk_kda"
        return call_chunk_kda(case)[0] if is_fla else call_flash_kda(case)["out"]

    case = bare_case([20, 37], device)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same("o", compiled(case), call(case))


def test_chunk_kda_bound_not_built() -> None:
    """Its message speaks of the bound alone."""
    message = r"^chunk_kda: lower_bound below -5 is not built, got -6.0; built is \[-5, 0\)$"
    with pytest.raises(NotImplementedError, match=message):
        call_chunk_kda(bare_case([20], "cpu"), lower_bound=-6.0)


NO_TENSORS = {"None": None, "list": [1.0], "ndarray": np.zeros(3, np.float32)}
RAW = ("q", "k", "v", "g", "beta")
OPTIONAL = ("cu_seqlens", "initial_state")


def no_tensors(needed: tuple[str, ...], optional: tuple[str, ...]) -> list[tuple[str, str]]:
    cases = [(name, kind) for name in needed + optional for kind in NO_TENSORS]
    return [(name, kind) for name, kind in cases if name in needed or kind != "None"]


@pytest.mark.parametrize(("name", "kind"), no_tensors(RAW, (*OPTIONAL, "A_log", "dt_bias")))
def test_chunk_kda_no_tensor(name: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"^chunk_kda: {name} must be a Tensor, got "):
        call_chunk_kda(bare_case([20, 20], "cpu"), **{name: NO_TENSORS[kind]})


@pytest.mark.parametrize(
    ("name", "kind"),
    no_tensors((*RAW, "A_log", "dt_bias", "out"), (*OPTIONAL, "final_state")),
)
def test_flash_kda_fwd_no_tensor(name: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"^flash_kda_fwd: {name} must be a Tensor, got "):
        call_flash_kda(bare_case([20, 20], "cpu"), **{name: NO_TENSORS[kind]})


def test_chunk_kda_refuses_gradients() -> None:
    case = bare_case([20], "cpu")
    case["q"].requires_grad_()
    with pytest.raises(NotImplementedError, match="chunk_kda: a gradient is not built"):
        call_chunk_kda(case)
    with torch.no_grad():
        call_chunk_kda(case)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"safe_gate": True, "lower_bound": None}, "lower_bound must be given"),
        ({"A_log": None, "lower_bound": None}, "A_log must be given"),
        ({"lower_bound": 0.5}, r"lower_bound must be in \[-5, 0\)"),
        ({"max_num_seqs": 7}, "max_num_seqs must be N=2"),
        ({"chunk_size": 16}, "chunk_size must be 32 or 64"),
        (
            {"initial_state": torch.zeros(2, 4, 8, 12)},
            r"initial_state must be \[N=2, HV=4, V",
        ),
        ({"initial_state": torch.zeros(2, 4, 12, 8).half()}, "initial_state must be .*float32"),
        ({"q": torch.zeros(40, 2, 8)}, r"q must be \[B, T, H, K\]"),
        ({"q": torch.zeros(2, 20, 2, 8)}, "q must be one row with cu_seqlens"),
        ({"g": torch.zeros(1, 40, 4, 8).double()}, "g must be"),
        ({"cu_seqlens": torch.tensor([0.0, 20.5, 40.0])}, "cu_seqlens must be .* float32"),
        ({"cu_seqlens": ints([])}, "cu_seqlens must be .*, got no entry"),
        ({"lower_bound": "-6"}, r"lower_bound must be in \[-5, 0\) or None, got str"),
        ({"A_log": torch.zeros(3)}, r"A_log must be \[HV=4\]"),
        ({"dt_bias": torch.zeros(31)}, r"dt_bias must be \[HV\*K=32\]"),
        ({"k": torch.zeros(40)}, r"k must be \[B=1, T=40, H=2, K=8\]"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_chunk_kda_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call_chunk_kda(bare_case([20, 20], "cpu"), **changes)


def call_flash_kda(case: Case, B: int = 1, **changes: Any) -> dict[str, Any]:
    """Calls with fp32 states in and out; returns the arguments after the call."""
    N = case["cu_seqlens"].shape[0] - 1
    states = case["state_pool"][:N]
    arguments = {
        **{theirs: case[ours].unflatten(0, (B, -1)) for ours, theirs in FLA_NAMES.items()},
        **{name: case[name] for name in ("A_log", "dt_bias", "lower_bound")},
        "scale": case["q"].shape[-1] ** -0.5,
        "out": torch.full_like(case["v"], 7.0).unflatten(0, (B, -1)),
        "workspace": None,
        "initial_state": states.clone(),
        "final_state": torch.full_like(states, 7.0),
        "cu_seqlens": case["cu_seqlens"],
    }
    arguments |= changes
    flash_kda_fwd(**arguments)
    return arguments


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_flash_kda_fwd(index: torch.dtype, device: str) -> None:
    """Out, final states and one checkpoint a sequence; offsets that fit no tile leave theirs."""
    lengths, offsets = [40, 64, 20, 33, 50], [32, 64, 0, 40, 64]
    case = bare_case(lengths, device)
    states = case["state_pool"][:5]
    got = call_flash_kda(
        case,
        cu_seqlens=case["cu_seqlens"].to(index),
        checkpoint_offsets=ints(offsets, device).to(index),
        checkpoint_state=torch.full_like(states, 7.0),
    )
    true_o, true_states = truth(case)
    bound = BOUNDS[case["q"].dtype]
    assert_rms("out", got["out"][0], true_o, bound)
    assert_rms("final", got["final_state"], true_states, bound)
    assert_same("initial", got["initial_state"], states)
    # the state after a prefix is the final state of the prefix alone
    begin = case["cu_seqlens"][0]
    prefix = case | {"cu_seqlens": ints([begin, begin + 32], device)}
    prefix |= {"initial_slots": ints([0], device), "final_slots": ints([5], device)}
    assert_same("checkpoint 0", got["checkpoint_state"][0], run(kda_prefill, prefix)[1][5])
    assert_same("checkpoint 1", got["checkpoint_state"][1], got["final_state"][1])
    untouched = got["checkpoint_state"][2:]
    assert_same("unwritten", untouched, torch.full_like(untouched, 7.0))


def test_flash_kda_fwd_leaves_rows_past_the_end(device: str) -> None:
    case = bare_case([20, 17, 9], device)
    short = case["cu_seqlens"].clone()
    short[-1] = short[-2]
    out = call_flash_kda(case, cu_seqlens=short)["out"][0]
    end = int(short[-1])
    assert_same("rows", out[:end], call_flash_kda(case)["out"][0][:end])
    assert_same("past the end", out[end:], torch.full_like(out[end:], 7.0))


def test_flash_kda_fwd_bf16_states(device: str) -> None:
    """Read exactly, rounded once when written."""
    case = bare_case([20, 35], device)
    rounded = case["state_pool"][:2].bfloat16()
    states = {
        "initial_state": rounded,
        "final_state": torch.zeros_like(rounded),
        "checkpoint_state": torch.zeros_like(rounded),
        "checkpoint_offsets": ints([16, 32], device),
    }
    wide = {name: x.float() if "state" in name else x for name, x in states.items()}
    got, expected = call_flash_kda(case, **states), call_flash_kda(case, **wide)
    assert_same("out", got["out"], expected["out"])
    for name in ("final_state", "checkpoint_state"):
        assert_same(name, got[name], expected[name].bfloat16())


def test_flash_kda_fwd_in_place_and_rows(device: str) -> None:
    """The final state may be the initial one; without cu_seqlens rows are sequences."""
    case = bare_case([19, 19], device)
    expected = call_flash_kda(case)
    states = case["state_pool"][:2].clone()
    got = call_flash_kda(case, B=2, cu_seqlens=None, initial_state=states, final_state=states)
    assert_same("out", got["out"].flatten(0, 1), expected["out"][0])
    assert_same("states", states, expected["final_state"])


def test_flash_kda_fwd_without_states(device: str) -> None:
    case = bare_case([20, 37], device)
    got = call_flash_kda(case, initial_state=None, final_state=None)
    zeros = case | {"state_pool": torch.zeros_like(case["state_pool"])}
    assert_rms("out", got["out"][0], truth(zeros)[0], BOUNDS[case["q"].dtype])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_offsets": ints([16, 16])}, "checkpoint_state must be given with"),
        ({"checkpoint_state": torch.zeros(2, 4, 12, 8)}, "checkpoint_state must be given with"),
        (
            {
                "checkpoint_state": torch.zeros(2, 4, 12, 8),
                "checkpoint_offsets": ints([16, 16]).long(),
            },
            "checkpoint_offsets must be",
        ),
        ({"final_state": torch.zeros(2, 4, 12, 8).half()}, "final_state must be .* of one dtype"),
        ({"initial_state": torch.zeros(1, 4, 12, 8)}, "initial_state must be"),
        ({"out": torch.zeros(1, 39, 4, 12)}, r"out must be \[B=1, T=40, HV=4, V=12\]"),
        ({"lower_bound": -5.5}, r"lower_bound must be in \[-5, 0\)"),
        ({"lower_bound": None}, r"^flash_kda_fwd: lower_bound must be in \[-5, 0\), got None"),
        ({"scale": None}, "^flash_kda_fwd: scale must be a finite number, got None"),
        ({"q": torch.zeros(2, 20, 2, 8)}, "q must be one row with cu_seqlens"),
        ({"cu_seqlens": torch.tensor([0.0, 20.5, 40.0])}, "cu_seqlens must be .* float32"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_flash_kda_fwd_errors(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call_flash_kda(bare_case([20, 20], "cpu"), **changes)
