"""kda_prefill: accuracy, contract, and bits."""

import pytest
import torch
from torch_kda.ops.kda import kda_prefill
from torch_kda.ops.reference import kda_prefill_ref, kda_recurrent_ref
from torch_kda.tests.checks import assert_rms, assert_same
from torch_kda.tests.ops.cases import BOUNDS, GATES, Case, ints, prefill_case, run, sizes, truth

LENGTHS = {
    "1to17": list(range(1, 18)),
    "37": [37],
    "97": [97],
    "1000": [1000],
    "empty-5-empty-33-empty": [0, 5, 0, 33, 0],
}


def assert_matches_truth(case: Case, bound: float) -> None:
    (out, pool), (true_out, true_pool) = run(kda_prefill, case), truth(kda_recurrent_ref, case)
    assert torch.isfinite(out).all() and torch.isfinite(pool).all()
    assert_rms("out", out, true_out, bound)
    for slot in range(pool.shape[0]):
        assert_rms(f"slot {slot}", pool[slot], true_pool[slot], bound)


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("gates", GATES)
def test_kda_prefill(gates: str, lengths: list[int], device: str) -> None:
    case = prefill_case(lengths, **sizes(device), gates=gates)
    bound = BOUNDS[case["q"].dtype]
    # saturated gates leave little of a state, so its rounding weighs more
    assert_matches_truth(case, 5e-3 if device == "cuda" and gates == "saturated" else bound)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bf16"])
@pytest.mark.parametrize("gates", ["weak", "extreme"])
def test_kda_prefill_dtypes(gates: str, dtype: torch.dtype) -> None:
    case = prefill_case([50, 21], H=1, HV=3, K=5, V=7, dtype=dtype, gates=gates)
    assert_matches_truth(case, BOUNDS[dtype])
    assert kda_prefill(**case).dtype == dtype


@pytest.mark.parametrize("same", [0.0, 0.05], ids=["identical", "nearly"])
def test_kda_prefill_collinear_keys(same: float, device: str) -> None:
    # L is then nearly all ones below the diagonal: the inverse's hardest case
    case = prefill_case([200], **sizes(device), gates="weak")
    case["k"] = case["k"][:1] + same * case["k"]
    case["beta_logit"] = case["beta_logit"] + 6
    assert_matches_truth(case, 4 * BOUNDS[case["q"].dtype])


def test_kda_prefill_scale(device: str) -> None:
    case = prefill_case([20], **sizes(device))
    case["scale"] = 0.37
    assert_matches_truth(case, BOUNDS[case["q"].dtype])


def test_kda_prefill_against_token_form_without_checkpoints(device: str) -> None:
    case = prefill_case([40, 3], **sizes(device))
    with_csr = run(kda_prefill, case)[0]
    for name in ("checkpoint_indptr", "checkpoint_offsets", "checkpoint_slots"):
        case[name] = None
    assert_same("out", run(kda_prefill, case)[0], with_csr)
    assert_matches_truth(case, BOUNDS[case["q"].dtype])


def test_kda_prefill_empty_sequences(device: str) -> None:
    case = prefill_case([0, 20, 0, 0], **sizes(device))
    out, pool = run(kda_prefill, case)
    N, before = 4, case["state_pool"]
    assert case["initial_slots"].tolist() == [0, 1, -1, 3]
    assert_same("copied", pool[N + 0], before[0])
    assert_same("zeros", pool[N + 2], torch.zeros_like(before[0]))
    assert_same("copied", pool[N + 3], before[3])
    assert_same("the other", out[:20], run(kda_prefill, solo(case, 1))[0][:20])


def test_kda_prefill_no_tokens(device: str) -> None:
    case = prefill_case([0, 0], **sizes(device), rows=0)
    out, pool = run(kda_prefill, case)
    assert out.shape == (0, 4, case["v"].shape[2])
    assert_same("pool", pool, case["state_pool"])


def test_kda_prefill_shared_initial_slot(device: str) -> None:
    case = prefill_case([20, 35, 16], **sizes(device))
    case["initial_slots"] = ints([1, 1, 1], device)
    out, pool = run(kda_prefill, case)
    for n in range(3):
        alone, alone_pool = run(kda_prefill, solo(case, n))
        begin, end = case["cu_seqlens"][n : n + 2].tolist()
        assert_same(f"out {n}", out[begin:end], alone[: end - begin])
        assert_same(f"state {n}", pool[3 + n], alone_pool[3 + n])
    assert_same("source", pool[1], case["state_pool"][1])


def test_kda_prefill_in_place(device: str) -> None:
    case = prefill_case([20, 37], **sizes(device))
    apart, apart_pool = run(kda_prefill, case)
    out, pool = run(kda_prefill, case, final_slots=case["initial_slots"])
    assert_same("out", out, apart)
    assert_same("states", pool[:2], apart_pool[2:4])
    assert_same("not written", pool[2:4], case["state_pool"][2:4])


@pytest.mark.parametrize("bad", [-1, -7, 1_000_000], ids=["minus1", "minus7", "beyond"])
def test_kda_prefill_ids_out_of_range(bad: int, device: str) -> None:
    case = prefill_case([20, 35], **sizes(device))
    case["initial_slots"] = ints([bad, 1], device)
    case["final_slots"] = ints([2, bad], device)
    case["checkpoint_slots"] = ints([4, bad, 6], device)
    zeros = case | {"state_pool": case["state_pool"].clone()}
    zeros["state_pool"][0] = 0
    zeros["initial_slots"] = ints([0, 1], device)
    (out, pool), (out_zeros, pool_zeros) = run(kda_prefill, case), run(kda_prefill, zeros)
    assert_same("out", out, out_zeros)
    assert_same("written", pool[[2, 4, 6]], pool_zeros[[2, 4, 6]])
    others = [s for s in range(pool.shape[0]) if s not in (2, 4, 6)]
    assert_same("not written", pool[others], case["state_pool"][others])


@pytest.mark.parametrize(
    ("offsets", "written"),
    [
        ([0, 16, 40], [1]),
        ([-16, 8, 32], [2]),
        ([16, 24, 48], [0, 2]),
        ([32, 16, 64], [0]),
        ([80, 16, 32], []),
        ([33, 47, 48], [2]),
    ],
    ids=str,
)
def test_kda_prefill_invalid_checkpoints(
    offsets: list[int], written: list[int], device: str
) -> None:
    # the sequence has 50 tokens; slots 3, 4, 5 are named, one of another sequence follows
    case = prefill_case([50, 16], **sizes(device), exports=[offsets, [16]])
    out, pool = run(kda_prefill, case)
    for i in range(3):
        slot = 4 + i
        if i in written:
            prefix = solo(case, 0, offsets[i])
            assert_same(f"entry {i}", pool[slot], run(kda_prefill, prefix)[1][2])
        else:
            assert_same(f"entry {i}", pool[slot], case["state_pool"][slot])
    assert_same("the other's", pool[7], pool[3])
    assert_same("out", out, run(kda_prefill, case, **NO_EXPORTS)[0])


NO_EXPORTS = {"checkpoint_indptr": None, "checkpoint_offsets": None, "checkpoint_slots": None}


def test_kda_prefill_entries_past_the_end_are_ignored(device: str) -> None:
    case = prefill_case([32], **sizes(device), exports=[[16, 32]])
    case["checkpoint_indptr"] = ints([0, 1], device)
    out, pool = run(kda_prefill, case)
    assert_same("past the end", pool[3], case["state_pool"][3])


def test_kda_prefill_padding(device: str, nan_memory: None) -> None:
    case = prefill_case([20, 3], **sizes(device), rows=32)
    out, pool = run(kda_prefill, case)
    assert_same("rows of no sequence", out[23:], torch.zeros_like(out[23:]))
    for name in ("q", "k", "v", "g_raw", "beta_logit"):
        case[name] = case[name].clone()
        case[name][23:] = float("nan")
    repeated = case["cu_seqlens"][-1:].expand(3)
    case["cu_seqlens"] = torch.cat([case["cu_seqlens"], repeated])
    for name in ("initial_slots", "final_slots"):
        case[name] = torch.cat([case[name], ints([-1, -1, -1], device)])
    case["checkpoint_indptr"] = torch.cat(
        [case["checkpoint_indptr"], case["checkpoint_indptr"][-1:].expand(3)]
    )
    case["checkpoint_offsets"] = torch.cat([case["checkpoint_offsets"], ints([16], device)])
    case["checkpoint_slots"] = torch.cat([case["checkpoint_slots"], ints([0], device)])
    padded, padded_pool = run(kda_prefill, case)
    assert_same("out", padded, out)
    assert_same("pool", padded_pool, pool)


def test_kda_prefill_nan_stays_in_its_sequence(device: str) -> None:
    case = prefill_case([20, 17, 20], **sizes(device))
    out, pool = run(kda_prefill, case)
    for name in ("q", "k", "v", "g_raw", "beta_logit"):
        case[name] = case[name].clone()
        case[name][20:37] = float("nan")
    bad, bad_pool = run(kda_prefill, case)
    assert torch.isnan(bad[20:37]).all()
    assert_same("before", bad[:20], out[:20])
    assert_same("after", bad[37:], out[37:])
    slots = [s for s in range(pool.shape[0]) if not torch.isnan(bad_pool[s]).any()]
    # two of the slots are the second sequence's: its final state, its checkpoint at 16
    assert len(slots) == pool.shape[0] - 2
    assert_same("pool", bad_pool[slots], pool[slots])


def test_kda_prefill_strided_rows(device: str) -> None:
    case = prefill_case([20, 17], **sizes(device))
    expected, expected_pool = run(kda_prefill, case)
    T, H, K = case["q"].shape
    packed = torch.cat([case[name].flatten(1) for name in ("q", "k", "v", "g_raw")], dim=1)
    packed = torch.cat([packed, torch.full_like(packed[:, :8], float("nan"))], dim=1)
    widths = [case[name][0].numel() for name in ("q", "k", "v", "g_raw")]
    for name, part in zip(("q", "k", "v", "g_raw"), packed[:, :-8].split(widths, 1), strict=True):
        case[name] = part.unflatten(1, case[name].shape[1:])
        assert case[name].stride(0) == packed.shape[1]
    case["beta_logit"] = torch.cat([case["beta_logit"], case["beta_logit"]], dim=1)[:, :4]
    slots = case["state_pool"].shape[0]
    case["state_pool"] = torch.cat([case["state_pool"][:, None]] * 2, dim=1)[:, 0]
    assert case["state_pool"].stride(0) == 2 * case["state_pool"][0].numel() and slots > 1
    # clone() would make the pool contiguous, so the op writes into the case's own
    out = kda_prefill(**case)
    assert_same("out", out, expected)
    assert_same("pool", case["state_pool"], expected_pool)


def solo(case: Case, n: int, length: int | None = None) -> Case:
    """Sequence n alone (its first `length` tokens), with its slots, in tensors of its own size."""
    begin, end = case["cu_seqlens"][n : n + 2].tolist()
    end = end if length is None else begin + length
    device = str(case["q"].device)
    alone = {name: case[name][begin:end] for name in ("q", "k", "v", "g_raw", "beta_logit")}
    slots = {name: case[name][n : n + 1] for name in ("initial_slots", "final_slots")}
    return case | alone | slots | NO_EXPORTS | {"cu_seqlens": ints([0, end - begin], device)}


@pytest.mark.parametrize("gates", ["weak", "mixed", "saturated", "extreme"])
def test_kda_prefill_bits_of_checkpoints_and_resumption(gates: str, device: str) -> None:
    n = 165
    every = list(range(16, n + 1, 16))
    case = prefill_case([n], **sizes(device), gates=gates, exports=[every])
    out, pool = run(kda_prefill, case)
    assert_same("more checkpoints", run(kda_prefill, case, **NO_EXPORTS)[0], out)
    assert_same("two runs", run(kda_prefill, case)[1], pool)
    for i, p in enumerate(every):
        prefix, prefix_pool = run(kda_prefill, solo(case, 0, p))
        assert_same(f"out until {p}", prefix, out[:p])
        assert_same(f"checkpoint {p} is the prefix' final state", prefix_pool[1], pool[2 + i])
        rest = {name: case[name][p:] for name in ("q", "k", "v", "g_raw", "beta_logit")}
        rest |= NO_EXPORTS | {"cu_seqlens": ints([0, n - p], device), "state_pool": pool}
        rest["initial_slots"] = ints([2 + i], device)
        resumed, resumed_pool = run(kda_prefill, case | rest)
        assert_same(f"resumed at {p}", resumed[: n - p], out[p:n])
        assert_same(f"resumed at {p}, final state", resumed_pool[1], pool[1])


@pytest.mark.parametrize("gates", ["weak", "mixed", "extreme"])
def test_kda_prefill_bits_of_a_sequence_in_a_batch(gates: str, device: str) -> None:
    lengths = [1, 130, 16, 0, 77, 1100, 31, 5]
    case = prefill_case(lengths, **sizes(device), gates=gates)
    out, pool = run(kda_prefill, case)
    for n, length in enumerate(lengths):
        begin = int(case["cu_seqlens"][n])
        if length:
            alone, alone_pool = run(kda_prefill, solo(case, n))
            assert_same(f"out {n}", alone, out[begin : begin + length])
            assert_same(f"state {n}", alone_pool[8 + n], pool[8 + n])


def test_kda_prefill_forms_agree_in_float64() -> None:
    case = prefill_case([100, 7], H=2, HV=2, K=16, V=16, dtype=torch.float64)
    (a, a_pool), (b, b_pool) = run(kda_prefill_ref, case), run(kda_recurrent_ref, case)
    assert_rms("out", a, b, 1e-13)
    assert_rms("pool", a_pool, b_pool, 1e-13)


@pytest.mark.parametrize(
    ("initial", "final", "checkpoints", "message"),
    [
        ([0, 1], [2, 2], [4, 5], "^kda_prefill: .* must be distinct, got slot 2 twice"),
        ([0, 1], [2, 3], [3, 5], "^kda_prefill: .* must be distinct, got slot 3 twice"),
        (
            [0, 1],
            [1, 3],
            [4, 5],
            "^kda_prefill: .* must not be read .*, got slot 1, written by 0",
        ),
        (
            [0, 0],
            [0, 3],
            [4, 5],
            "^kda_prefill: .* must not be read .*, got slot 0, written by 0",
        ),
        (
            [0, 1],
            [2, 3],
            [4, 0],
            "^kda_prefill: .* must not be read .*, got slot 0, written by 1",
        ),
        (
            [0, 1],
            [2, 3],
            [0, 5],
            "^kda_prefill: .* must not be read .*, got slot 0, written by 0",
        ),
    ],
    ids=lambda value: str(value).replace(" ", "_"),
)
def test_kda_prefill_refuses_slots_that_clash(
    initial: list[int], final: list[int], checkpoints: list[int], message: str
) -> None:
    case = prefill_case([16, 16], **sizes("cpu"))
    slots = {"initial_slots": initial, "final_slots": final, "checkpoint_slots": checkpoints}
    with pytest.raises(ValueError, match=message):
        run(kda_prefill, case, **{name: ints(value) for name, value in slots.items()})


def test_kda_prefill_under_inference_mode(device: str) -> None:
    case = prefill_case([20], **sizes(device))
    out, pool = run(kda_prefill, case)
    with torch.inference_mode():
        inferred, inferred_pool = run(kda_prefill, prefill_case([20], **sizes(device)))
    assert_same("out", inferred, out)
    assert_same("pool", inferred_pool, pool)
