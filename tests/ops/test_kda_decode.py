"""kda_decode: against its parts, which have truths of their own; contract, and bits."""

import pytest
import torch
from einops import rearrange
from torch import Tensor
from torch_kda.ops.kda import kda_decode
from torch_kda.ops.reference import (
    causal_conv_prefill_ref,
    gated_rms_norm_ref,
    kda_decode_ref,
    kda_recurrent_ref,
)
from torch_kda.tests.checks import assert_rms, assert_same
from torch_kda.tests.ops.cases import BOUNDS, GATES, Case, decode_case, ints, run, sizes, to


def decode_from_parts(case: Case, d: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Row d in float64: a conv, the recurrence by token and the norm, run for 1, 2, .. M tokens."""
    M, case = case["dst_slots"].shape[1], to(case, torch.float64)
    HV, V, K = case["state_pool"].shape[1:]
    qk = (case["qkv"].shape[1] - HV * V) // 2
    states, windows, out = [], [], torch.empty(0)
    for m in range(1, M + 1):
        rows = slice(d * M, d * M + m)
        src = int(case["src_slots"][d])
        meta = (ints([0, m]), ints([0]), ints([1]))
        conv_pool = torch.stack([case["conv_pool"][src]] * 2)
        y = causal_conv_prefill_ref(case["qkv"][rows], case["conv_weight"], conv_pool, *meta)
        q, k, v = y.split([qk, qk, HV * V], dim=1)
        q, k = (rearrange(x, "t (h k) -> t h k", k=K) for x in (q, k))
        state_pool = torch.stack([case["state_pool"][src]] * 2)
        out = kda_recurrent_ref(
            *(q, k, rearrange(v, "t (h v) -> t h v", v=V)),
            *(case["g_raw"][rows], case["beta_logit"][rows], case["A_log"], case["dt_bias"]),
            *(state_pool, *meta),
            lower_bound=case["lower_bound"],
        )
        out = gated_rms_norm_ref(out, case["gate"][rows], case["norm_weight"], eps=1e-5)
        states.append(state_pool[1])
        windows.append(conv_pool[1])
    return out.flatten(1), states, windows


@pytest.mark.parametrize("M", [1, 4])
@pytest.mark.parametrize("gates", GATES)
def test_kda_decode(gates: str, M: int, device: str) -> None:
    case = decode_case(3, M, **sizes(device), gates=gates)
    out, state_pool, conv_pool = run(kda_decode, case)
    bound = BOUNDS[case["qkv"].dtype]
    for d in range(3):
        true_out, states, windows = decode_from_parts(case, d)
        assert_rms(f"out {d}", out[d * M : (d + 1) * M], true_out, bound)
        for j in range(M):
            slot = int(case["dst_slots"][d, j])
            assert_rms(f"state {d}, {j}", state_pool[slot], states[j], bound)
            expected = windows[j].to(conv_pool.dtype).to(device)
            assert_same(f"window {d}, {j}", conv_pool[slot], expected)
    assert_same("sources", state_pool[:3], case["state_pool"][:3])
    assert_same("sources", conv_pool[:3], case["conv_pool"][:3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bf16"])
def test_kda_decode_dtypes(dtype: torch.dtype) -> None:
    case = decode_case(2, 2, H=1, HV=3, K=5, V=7, dtype=dtype)
    out, state_pool, _ = run(kda_decode, case)
    assert out.dtype == dtype
    for d in range(2):
        true_out, states, _ = decode_from_parts(case, d)
        assert_rms("out", out[2 * d : 2 * d + 2], true_out, BOUNDS[dtype])
        assert_rms("state", state_pool[int(case["dst_slots"][d, 1])], states[1], BOUNDS[dtype])


def test_kda_decode_in_place(device: str) -> None:
    case = decode_case(3, 1, **sizes(device))
    out, state_pool, conv_pool = run(kda_decode, case)
    in_place = case["src_slots"][:, None].clone()
    same_out, same_state, same_conv = run(kda_decode, case, dst_slots=in_place)
    assert_same("out", same_out, out)
    assert_same("state", same_state[:3], state_pool[3:6])
    assert_same("window", same_conv[:3], conv_pool[3:6])
    assert_same("not written", same_state[3:], case["state_pool"][3:])


@pytest.mark.parametrize("bad", [-1, -9, 1_000_000], ids=["minus1", "minus9", "beyond"])
def test_kda_decode_padding_rows(bad: int, device: str, nan_memory: None) -> None:
    case = decode_case(4, 2, **sizes(device))
    out, state_pool, conv_pool = run(kda_decode, case)
    for name in ("qkv", "g_raw", "beta_logit", "gate"):
        case[name] = case[name].clone()
        case[name][2:4] = float("nan")
    case["src_slots"] = ints([0, bad, 2, 3], device)
    padded, padded_state, padded_conv = run(kda_decode, case)
    assert_same("padding", padded[2:4], torch.zeros_like(padded[2:4]))
    keep = [0, 1, 4, 5, 6, 7]
    assert_same("others", padded[keep], out[keep])
    written = [4, 5, 8, 9, 10, 11]
    assert_same("states", padded_state[written], state_pool[written])
    assert_same("windows", padded_conv[written], conv_pool[written])
    assert_same("not written", padded_state[6:8], case["state_pool"][6:8])
    assert_same("not written", padded_conv[6:8], case["conv_pool"][6:8])


def test_kda_decode_all_rows_are_padding(device: str) -> None:
    case = decode_case(2, 2, **sizes(device))
    case["src_slots"] = ints([-1, -1], device)
    out, state_pool, conv_pool = run(kda_decode, case)
    assert_same("out", out, torch.zeros_like(out))
    assert_same("states", state_pool, case["state_pool"])
    assert_same("windows", conv_pool, case["conv_pool"])


def test_kda_decode_no_rows(device: str) -> None:
    case = decode_case(0, 2, **sizes(device))
    out, state_pool, _ = run(kda_decode, case)
    assert out.shape == (0, 4 * case["norm_weight"].shape[0])
    assert_same("states", state_pool, case["state_pool"])


@pytest.mark.parametrize("bad", [-1, 1_000_000], ids=["minus1", "beyond"])
def test_kda_decode_destinations_out_of_range(bad: int, device: str) -> None:
    case = decode_case(2, 3, **sizes(device))
    out, state_pool, conv_pool = run(kda_decode, case)
    dst = case["dst_slots"].clone()
    dst[0, 0] = dst[1, 2] = bad
    skipped, skipped_state, skipped_conv = run(kda_decode, case, dst_slots=dst)
    assert_same("out", skipped, out)
    for slot in range(state_pool.shape[0]):
        is_skipped = slot in (2, 7)
        source = (case["state_pool"], case["conv_pool"]) if is_skipped else (state_pool, conv_pool)
        assert_same(f"state {slot}", skipped_state[slot], source[0][slot])
        assert_same(f"window {slot}", skipped_conv[slot], source[1][slot])


def test_kda_decode_num_tokens(device: str) -> None:
    case = decode_case(4, 3, **sizes(device))
    out, state_pool, conv_pool = run(kda_decode, case)
    counts = [3, 0, 1, 2]
    some, some_state, some_conv = run(kda_decode, case, num_tokens=ints(counts, device))
    for d, count in enumerate(counts):
        for j in range(3):
            row, slot, is_real = 3 * d + j, 4 + 3 * d + j, j < count
            assert_same(f"out {d}, {j}", some[row], out[row] if is_real else 0 * out[row].abs())
            pools = (state_pool, conv_pool) if is_real else (case["state_pool"], case["conv_pool"])
            assert_same(f"state {d}, {j}", some_state[slot], pools[0][slot])
            assert_same(f"window {d}, {j}", some_conv[slot], pools[1][slot])


def test_kda_decode_bits_of_a_row_in_a_batch(device: str) -> None:
    case = decode_case(7, 2, **sizes(device))
    out, state_pool, _ = run(kda_decode, case)
    for d in range(7):
        rows = ("qkv", "g_raw", "beta_logit", "gate")
        alone = {name: case[name][2 * d : 2 * d + 2] for name in rows}
        alone |= {name: case[name][d : d + 1] for name in ("src_slots", "dst_slots")}
        alone_out, alone_state, _ = run(kda_decode, case | alone)
        assert_same(f"out {d}", alone_out, out[2 * d : 2 * d + 2])
        dst = case["dst_slots"][d].long()
        assert_same(f"state {d}", alone_state[dst], state_pool[dst])


def test_kda_decode_bits_of_tokens_one_by_one(device: str) -> None:
    D, M = 2, 4
    case = decode_case(D, M, **sizes(device))
    out, state_pool, conv_pool = run(kda_decode, case)
    # the same tokens in M calls, each from the slots that the one before wrote
    pools = {name: case[name].clone() for name in ("state_pool", "conv_pool")}
    src = case["src_slots"]
    for j in range(M):
        rows = {name: case[name][j::M] for name in ("qkv", "g_raw", "beta_logit", "gate")}
        dst = case["dst_slots"][:, j : j + 1].contiguous()
        step = kda_decode(**(case | rows | pools | {"src_slots": src, "dst_slots": dst}))
        assert_same(f"out {j}", step, out[j::M])
        src = dst[:, 0].contiguous()
    assert_same("states", pools["state_pool"], state_pool)
    assert_same("windows", pools["conv_pool"], conv_pool)


def test_kda_decode_strided_rows(device: str) -> None:
    case = decode_case(3, 2, **sizes(device))
    expected = run(kda_decode, case)
    for name in ("qkv", "g_raw", "beta_logit", "gate"):
        case[name] = torch.cat([case[name][:, None]] * 2, dim=1)[:, 0]
        assert case[name].stride(0) == 2 * case[name][0].numel()
    for name, a, b in zip(("out", "state", "window"), run(kda_decode, case), expected, strict=True):
        assert_same(name, a, b)


def test_kda_decode_ref_is_the_cpu_implementation() -> None:
    case = decode_case(3, 2, **sizes("cpu"))
    for a, b in zip(run(kda_decode, case), run(kda_decode_ref, case), strict=True):
        assert_same("kda_decode", a, b)


@pytest.mark.parametrize(
    ("src", "dst", "message"),
    [
        ([0, 1], [[2, 3], [4, 3]], "^kda_decode: dst_slots must be distinct, got slot 3 twice"),
        (
            [0, 1],
            [[2, 1], [4, 5]],
            "^kda_decode: dst_slots must not .*, got slot 1, written by 0",
        ),
        (
            [0, 0],
            [[0, 3], [4, 5]],
            "^kda_decode: dst_slots must not .*, got slot 0, written by 0",
        ),
    ],
    ids=["twice", "of another", "shared"],
)
def test_kda_decode_refuses_slots_that_clash(
    src: list[int], dst: list[list[int]], message: str
) -> None:
    case = decode_case(2, 2, **sizes("cpu"))
    with pytest.raises(ValueError, match=message):
        run(kda_decode, case, src_slots=ints(src), dst_slots=ints(dst))
