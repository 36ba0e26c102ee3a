"""The references against an implementation that no one here wrote, and their gate functions."""

import pytest
import torch
from einops import repeat
from torch_kda.ops.kda import kda_prefill
from torch_kda.ops.reference import (
    kda_recurrent_ref,
    log_decay,
    sigmoid,
    softplus,
    write_slots_unread,
)
from torch_kda.tests.checks import assert_rms, assert_same
from torch_kda.tests.ops.cases import GATES, ints, prefill_case, run, sizes
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention


@pytest.mark.parametrize("op", [kda_recurrent_ref, kda_prefill], ids=["token", "chunk"])
@pytest.mark.parametrize("gates", GATES)
def test_kda_prefill_ref_agrees_with_transformers(gates: str, op) -> None:
    lengths = [70, 0, 13, 1]
    case = prefill_case(lengths, **sizes("cpu"), gates=gates)
    out, pool = run(op, case)
    groups = case["v"].shape[1] // case["q"].shape[1]
    for n, length in enumerate(lengths):
        if length == 0:
            continue
        begin = int(case["cu_seqlens"][n])
        rows = slice(begin, begin + length)
        slot = int(case["initial_slots"][n])
        state = case["state_pool"][slot] if slot >= 0 else torch.zeros_like(case["state_pool"][0])
        q, k = (repeat(case[x][rows], "t h k -> 1 t (h r) k", r=groups) for x in ("q", "k"))
        parameters = (case["A_log"], case["dt_bias"], case["lower_bound"])
        true_out, true_state = recurrent_kimi_delta_attention(
            *(q, k, case["v"][None, rows]),
            g=log_decay(case["g_raw"][rows], *parameters)[None],
            beta=case["beta_logit"][None, rows].sigmoid(),
            initial_state=state.mT[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        assert_rms(f"out {n}", out[rows], true_out[0], 1e-6)
        assert_rms(f"state {n}", pool[int(case["final_slots"][n])], true_state[0].mT, 1e-6)


@pytest.mark.parametrize("lower_bound", [None, -5.0, -0.5], ids=str)
def test_log_decay(lower_bound: float | None) -> None:
    g_raw = torch.tensor([-1e4, -3.0, 0.0, 2.0, 1e4]).reshape(5, 1, 1)
    A_log, dt_bias = torch.tensor([0.7]), torch.tensor([[0.3]])
    x, a = g_raw.double() + 0.3, torch.tensor(0.7).double().exp()
    if lower_bound is None:
        expected = (-a * torch.nn.functional.softplus(x)).clamp(min=-104)
    else:
        expected = lower_bound * torch.sigmoid(a * x)
    g = log_decay(g_raw, A_log, dt_bias, lower_bound)
    torch.testing.assert_close(g.double(), expected, rtol=1e-6, atol=1e-7)


def test_log_decay_is_cut_where_exp_is_zero() -> None:
    for dtype, cut in ((torch.float32, -104.0), (torch.float64, -746.0)):
        assert torch.tensor(cut, dtype=dtype).exp() == 0
        g = log_decay(
            torch.full((1, 1, 1), 1e30, dtype=dtype), *torch.ones(2, 1, 1, dtype=dtype), None
        )
        assert g.item() == cut


@pytest.mark.parametrize("f", [sigmoid, softplus])
def test_pointwise_bits_do_not_depend_on_the_place(f) -> None:
    x = torch.linspace(-120, 120, 4099)
    whole = f(x)
    pieces = torch.cat([f(x[i : i + 7].clone()) for i in range(0, x.numel(), 7)])
    assert_same("in pieces", pieces, whole)
    expected = (
        torch.sigmoid(x.double()) if f is sigmoid else torch.nn.functional.softplus(x.double())
    )
    torch.testing.assert_close(whole.double(), expected, rtol=3e-7, atol=1e-38)


@pytest.mark.parametrize(
    "slots", [[3, -1, 0, 9, -5], [-1, 9, 2, -1, 4], [-1] * 5, [4, 3, 2, 1, 0], []], ids=str
)
def test_write_slots_unread(slots: list[int], device: str) -> None:
    pool, values = torch.randn(5, 2, 3, device=device), torch.randn(len(slots), 2, 3, device=device)
    expected = pool.clone()
    for i, slot in enumerate(slots):
        if 0 <= slot < 5:
            expected[slot] = values[i]
    write_slots_unread(pool, ints(slots, device), values)
    assert_same("pool", pool, expected)
