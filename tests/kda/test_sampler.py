"""Sampling: greedy, filters, random streams and log probabilities."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch_kda.kda.sampler import (
    SamplingPlan,
    SamplingRows,
    exponentials,
    sample,
    stream_keys,
    stream_starts,
)
from torch_kda.scheduler.request import SamplingParams

CPU = torch.device("cpu")


def pack(
    params: Sequence[SamplingParams],
    indices: Sequence[int],
    num_rows: int,
    device: torch.device = CPU,
) -> SamplingRows:
    """Those rows, and padding up to `num_rows`."""
    plan = SamplingPlan(params)
    temperature = torch.zeros(num_rows)
    temperature[: len(params)] = torch.from_numpy(plan.temperature)
    keys = torch.full((num_rows,), -1)
    keys[: len(params)] = torch.from_numpy(plan.keys(indices))
    return SamplingRows.pack(plan, temperature.to(device), keys.to(device))


def rows_of(*params: SamplingParams, indices: list[int] | None = None) -> SamplingRows:
    return pack(params, indices or [0] * len(params), len(params))


def keys_of(seeds: Sequence[int], indices: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(stream_keys(stream_starts(seeds), indices))


def draws(logits: torch.Tensor, params: SamplingParams, count: int) -> torch.Tensor:
    """The first `count` tokens that one seed draws from the same logits."""
    rows = pack([params] * count, range(count), count)
    return sample(logits.expand(count, -1), rows).token_ids


def test_sample_greedy():
    logits = torch.randn(5, 1000)
    out = sample(logits, rows_of(*[SamplingParams(temperature=0)] * 5))
    assert out.token_ids.tolist() == logits.argmax(-1).tolist()
    assert out.logprobs is None and out.top_ids is None


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0], ids="temperature{}".format)
def test_sample_distribution(temperature: float):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -torch.inf])
    expected = (logits / temperature).softmax(-1)
    count = 40_000
    seen = draws(logits, SamplingParams(temperature=temperature, seed=7), count).bincount(
        minlength=5
    )
    assert seen[4] == 0
    error = (seen[:4] - count * expected[:4]) / (count * expected[:4] * (1 - expected[:4])).sqrt()
    assert error.abs().max() < 4.5  # standard deviations; the seed is fixed


def test_sample_top_k():
    logits = torch.randn(200)
    seen = draws(logits, SamplingParams(top_k=3, temperature=5.0, seed=1), 2000).unique()
    assert set(seen.tolist()) == set(logits.topk(3).indices.tolist())


def test_sample_top_k_ties():
    """Equal logits: still exactly k tokens, the lowest ids."""
    seen = draws(torch.zeros(50), SamplingParams(top_k=4, seed=1), 2000).unique()
    assert seen.tolist() == [0, 1, 2, 3]


def test_sample_top_p():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    cases = [(0.05, {1}), (0.4, {1}), (0.5, {1, 3}), (0.75, {1, 2, 3}), (1.0, {0, 1, 2, 3})]
    for top_p, kept in cases:
        seen = draws(logits, SamplingParams(top_p=top_p, seed=3), 2000).unique()
        assert set(seen.tolist()) == kept, top_p


def test_sample_top_p_of_a_flat_vocabulary():
    """100,000 rounded probabilities: top_p = 1 beside a filtered row keeps the last token."""
    params = (SamplingParams(top_k=1, seed=1), SamplingParams(top_p=1.0, seed=2))
    winner = exponentials(keys_of([2], [0]), 100_000).argmin()
    logits = torch.zeros(2, 100_000)
    logits[:, winner] = -1e-6  # the last in order, and still the winner
    assert sample(logits, rows_of(*params)).token_ids[1] == winner


def test_sample_row_alone_as_in_a_batch():
    """A row's token depends on its logits, seed and sample index, not on place or neighbours."""
    logits = torch.randn(6, 500)
    params = [
        SamplingParams(temperature=0),
        SamplingParams(seed=1),
        SamplingParams(seed=1, top_k=20),
        SamplingParams(seed=2, top_p=0.8, temperature=0.7),
        SamplingParams(seed=-5, temperature=3.0, logprobs=2),
        SamplingParams(seed=2**70 + 3),
    ]
    indices = [0, 1, 2, 3, 4, 5]
    together = sample(logits, rows_of(*params, indices=indices)).token_ids
    for r in range(6):
        alone = sample(logits[r : r + 1], rows_of(params[r], indices=[indices[r]])).token_ids
        assert alone[0] == together[r], r
    order = [5, 3, 1, 0, 4, 2]
    moved = sample(
        logits[order], rows_of(*[params[i] for i in order], indices=[indices[i] for i in order])
    )
    assert moved.token_ids.tolist() == together[order].tolist()


def test_sample_streams_differ():
    logits = torch.zeros(1000)
    a = draws(logits, SamplingParams(seed=0), 64)
    b = draws(logits, SamplingParams(seed=1), 64)
    assert len(set(a.tolist())) > 50 and (a != b).sum() > 60
    # seed and index are not interchangeable: (0, 1) is another stream than (1, 0)
    assert keys_of([0], [1]) != keys_of([1], [0])


def test_sample_logprobs():
    logits = torch.randn(3, 100)
    params = [
        SamplingParams(temperature=0, logprobs=0),
        SamplingParams(temperature=0.3, seed=5, logprobs=4),
        SamplingParams(temperature=0),
    ]
    out = sample(logits, rows_of(*params))
    assert out.logprobs is not None and out.top_ids is not None and out.top_logprobs is not None
    truth = logits.double().log_softmax(-1)  # of the model: the temperature does not enter
    for r in range(3):
        assert math.isclose(out.logprobs[r], truth[r, out.token_ids[r]], abs_tol=1e-5)
        assert out.top_ids[r].tolist() == logits[r].topk(4).indices.tolist()
        torch.testing.assert_close(out.top_logprobs[r].double(), truth[r].topk(4).values)


@pytest.mark.parametrize("top_k", [0, 5], ids="top_k{}".format)
def test_sampling_rows_padding(top_k: int):
    rows = pack([SamplingParams(seed=1, top_k=top_k)], [0], 16)
    assert (rows.top_k is None) == (top_k == 0)
    logits = torch.randn(16, 40)
    out = sample(logits, rows)
    assert out.token_ids.shape == (16,)
    assert out.token_ids[1:].tolist() == logits[1:].argmax(-1).tolist()


def test_sampling_plan():
    """Only rows that draw make a step draw or filter; a log probability may come from any."""
    greedy, drawn = SamplingParams(temperature=0, top_k=3), SamplingParams()
    filtered, asking = SamplingParams(top_p=0.5), SamplingParams(temperature=0, logprobs=2)
    for params, is_greedy, is_filtered, num_logprobs in (
        ([], True, False, None),
        ([greedy, greedy], True, False, None),
        ([greedy, drawn], False, False, None),
        ([drawn, filtered], False, True, None),
        ([greedy, asking], True, False, 2),
        ([asking, SamplingParams(logprobs=5)], False, False, 5),
    ):
        plan = SamplingPlan(params)
        assert (plan.is_greedy, plan.is_filtered) == (is_greedy, is_filtered)
        assert plan.num_logprobs == num_logprobs
        assert plan.takes_argmax == (is_greedy and num_logprobs is None)
        assert plan.is_plain == (not is_filtered and num_logprobs is None)


def test_sampling_plan_temperature_beyond_fp32():
    """Too large for fp32: any token; too small: the likeliest one."""
    logits = torch.tensor([5.0, 4.0, 3.0])
    assert len(draws(logits, SamplingParams(temperature=1e300, seed=1), 100).unique()) == 3
    assert not draws(logits, SamplingParams(temperature=1e-300, seed=1), 100).any()


def test_exponentials_moments():
    keys = keys_of(range(50), [3] * 50)
    e = exponentials(keys, 20_000).double()
    assert e.min() > 0 and torch.isfinite(e).all()
    assert abs(e.mean() - 1) < 0.005 and abs(e.var() - 1) < 0.02
    # neither neighbouring tokens nor neighbouring seeds are correlated
    c = e - e.mean()
    assert abs((c[:, 1:] * c[:, :-1]).mean()) < 0.005
    assert abs((c[1:] * c[:-1]).mean()) < 0.005


@pytest.mark.gpu
def test_sample_gpu():
    """The device draws the same tokens as the CPU, and the call never waits for it."""
    logits = torch.randn(8, 5000)
    params = [SamplingParams(seed=s, top_k=50 * (s % 2), top_p=0.9) for s in range(8)]
    device = torch.device("cuda")
    on_device, rows = logits.to(device), pack(params, range(8), 8, device)
    sample(on_device, rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        # the copy of the filters is in it
        out = sample(
            on_device, SamplingRows.pack(SamplingPlan(params), rows.temperature, rows.keys)
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = sample(logits, pack(params, range(8), 8))
    assert out.token_ids.tolist() == expected.token_ids.tolist()


def test_sampling_plan_temperature_of_next_to_nothing():
    """Logits divided by it would be infinite: it is greedy, beside rows that draw too."""
    logits = torch.tensor([[3.0, 5.0, 4.0]] * 2)
    for temperature in (5e-324, 1e-40, 9e-7):
        small = SamplingParams(temperature=temperature, top_k=1, seed=1)
        drawn = SamplingParams(seed=1)
        assert sample(logits, rows_of(small, small)).token_ids.tolist() == [1, 1]
        assert sample(logits, rows_of(drawn, small)).token_ids[1] == 1
