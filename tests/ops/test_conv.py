"""causal_conv_prefill: against torch's conv1d, windows in and out, contract, and bits."""

import pytest
import torch
from torch import Tensor
from torch_kda.ops.conv import causal_conv_prefill
from torch_kda.tests.checks import assert_close_as_torch, assert_same
from torch_kda.tests.ops.cases import Case, ints, prefill_case, run, sizes


def conv_case(
    lengths: list[int], device: str, exports: list[list[int]] | None = None, C: int = 24
) -> Case:
    """The metadata of a prefill, with inputs and windows of C channels."""
    dims = sizes(device)
    case = prefill_case(lengths, **dims, exports=exports)
    names = ("cu_seqlens", "initial_slots", "final_slots")
    csr = ("checkpoint_indptr", "checkpoint_offsets", "checkpoint_slots")
    T, slots = case["q"].shape[0], case["state_pool"].shape[0]
    rng = torch.Generator().manual_seed(1)
    x, weight, pool = (torch.randn(*s, generator=rng) for s in ((T, C), (C, 4), (slots, 3, C)))
    tensors = {"x": x, "weight": weight, "conv_pool": pool}
    tensors = {name: t.to(device, dims["dtype"]) for name, t in tensors.items()}
    return tensors | {name: case[name] for name in names + csr}


def taps(case: Case, n: int) -> Tensor:
    """The initial window of sequence n and its inputs."""
    begin, end = case["cu_seqlens"][n : n + 2].tolist()
    slot = int(case["initial_slots"][n])
    pool = case["conv_pool"]
    window = pool[slot] if 0 <= slot < pool.shape[0] else torch.zeros_like(pool[0])
    return torch.cat([window, case["x"][begin:end]])


def conv1d(x: Tensor, weight: Tensor) -> Tensor:
    y = torch.nn.functional.conv1d(x.T, weight[:, None], groups=weight.shape[0])
    return torch.nn.functional.silu(y).T


@pytest.mark.parametrize("lengths", [list(range(1, 18)), [0, 5, 0, 97, 0], [1000]], ids=str)
def test_causal_conv_prefill(lengths: list[int], device: str) -> None:
    case = conv_case(lengths, device)
    out, pool = run(causal_conv_prefill, case)
    exports = case["checkpoint_indptr"].tolist()
    for n, length in enumerate(lengths):
        begin, inputs = int(case["cu_seqlens"][n]), taps(case, n)
        if length:
            true = conv1d(inputs.double().cpu(), case["weight"].double().cpu())
            torch_out = conv1d(inputs, case["weight"])
            assert_close_as_torch(f"y {n}", out[begin : begin + length], true, torch_out)
        assert_same(f"window {n}", pool[int(case["final_slots"][n])], inputs[length:])
        for e in range(exports[n], exports[n + 1]):
            offset = int(case["checkpoint_offsets"][e])
            slot = int(case["checkpoint_slots"][e])
            assert_same(f"export {n}", pool[slot], inputs[offset : offset + 3])


@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_causal_conv_prefill_window_reaches_into_the_initial_one(length: int, device: str) -> None:
    case = conv_case([length, 20], device)
    _, pool = run(causal_conv_prefill, case)
    kept, given = case["conv_pool"][0, length:], case["x"][:length]
    assert_same("window", pool[2], torch.cat([kept, given]))


def test_causal_conv_prefill_in_place(device: str) -> None:
    case = conv_case([2, 20], device)
    out, pool = run(causal_conv_prefill, case)
    same, same_pool = run(causal_conv_prefill, case, final_slots=case["initial_slots"])
    assert_same("y", same, out)
    assert_same("windows", same_pool[:2], pool[2:4])


def test_causal_conv_prefill_padding_and_bad_ids(device: str, nan_memory: None) -> None:
    case = conv_case([20, 17], device, exports=[[16], [8, 16]])
    case["x"][37:] = float("nan")
    case["initial_slots"] = ints([-1, 1_000_000], device)
    case["final_slots"] = ints([-5, 3], device)
    case["checkpoint_slots"] = ints([1_000_000, 5, 6], device)
    out, pool = run(causal_conv_prefill, case)
    assert_same("rows of no sequence", out[37:], torch.zeros_like(out[37:]))
    assert torch.isfinite(out).all()
    true = conv1d(taps(case, 1).double().cpu(), case["weight"].double().cpu())
    assert_close_as_torch("y", out[20:37], true, conv1d(taps(case, 1), case["weight"]))
    written = [3, 6]
    others = [s for s in range(pool.shape[0]) if s not in written]
    assert_same("not written", pool[others], case["conv_pool"][others])
    assert_same("export", pool[6], case["x"][33:36])


def test_causal_conv_prefill_nan_stays_in_its_sequence(device: str) -> None:
    case = conv_case([20, 5, 20], device)
    out, pool = run(causal_conv_prefill, case)
    case["x"] = case["x"].clone()
    case["x"][20:25] = float("nan")
    bad, bad_pool = run(causal_conv_prefill, case)
    assert_same("before", bad[:20], out[:20])
    assert_same("after", bad[25:], out[25:])
    assert_same("window after", bad_pool[5], pool[5])


def test_causal_conv_prefill_without_checkpoints(device: str) -> None:
    case = conv_case([40, 3], device)
    out, pool = run(causal_conv_prefill, case)
    names = ("checkpoint_indptr", "checkpoint_offsets", "checkpoint_slots")
    bare, bare_pool = run(causal_conv_prefill, case, **dict.fromkeys(names))
    assert_same("y", bare, out)
    assert_same("windows", bare_pool[:4], pool[:4])
    assert_same("not written", bare_pool[4:], case["conv_pool"][4:])


def test_causal_conv_prefill_no_tokens(device: str) -> None:
    case = conv_case([0], device)
    case["x"] = case["x"][:0]
    out, pool = run(causal_conv_prefill, case)
    assert out.shape == (0, 24)
    assert_same("windows", pool, case["conv_pool"])


@pytest.mark.parametrize("C", [1, 24, 37])
def test_causal_conv_prefill_bits(C: int) -> None:
    # odd widths put an element at other places of a vector: alone, in a batch, resumed
    case = conv_case([7, 48, 33], "cpu", C=C)
    out, pool = run(causal_conv_prefill, case)
    for n, (begin, end) in enumerate([(0, 7), (7, 55), (55, 88)]):
        one = {"x": case["x"][begin:end], "cu_seqlens": ints([0, end - begin])}
        one |= {"initial_slots": case["initial_slots"][n : n + 1], "final_slots": ints([-1])}
        one |= dict.fromkeys(("checkpoint_indptr", "checkpoint_offsets", "checkpoint_slots"))
        assert_same(f"alone {n}", run(causal_conv_prefill, case | one)[0], out[begin:end])
    export = int(case["checkpoint_slots"][0])
    rest = one | {"x": case["x"][23:55], "cu_seqlens": ints([0, 32]), "conv_pool": pool}
    resumed = run(causal_conv_prefill, case | rest, initial_slots=ints([export]))[0]
    assert_same("resumed", resumed, out[23:55])


def test_causal_conv_prefill_strided_rows(device: str) -> None:
    case = conv_case([20, 3], device)
    expected = run(causal_conv_prefill, case)
    case["x"] = torch.cat([case["x"], case["x"]], dim=1)[:, :24]
    for name, a, b in zip(("y", "pool"), run(causal_conv_prefill, case), expected, strict=True):
        assert_same(name, a, b)
