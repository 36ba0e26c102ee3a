"""The timer: what it needs, how many inputs it rotates over, and on a device what it measures."""

import pytest
import torch
from torch_kda.profiles import timing

MIB = 2**20


@pytest.mark.parametrize(
    ("set_bytes", "free", "sets"),
    [
        (9 * MIB, 2**36, 27),  # 60 MiB of L2 four times
        (240 * MIB, 2**36, 2),
        (2**30, 2**36, 2),
        (9 * MIB, 100 * MIB, 11),
        (1, 2**36, 64),
    ],
)
def test_num_input_sets(set_bytes: int, free: int, sets: int) -> None:
    assert timing.num_input_sets(set_bytes, 60 * MIB, free) == sets


def test_num_input_sets_without_room() -> None:
    with pytest.raises(RuntimeError, match=r"2 input sets of 4\.0 GiB do not fit"):
        timing.num_input_sets(2**32, 60 * MIB, 2**32)


def test_summarise() -> None:
    found = timing.summarise([float(x) for x in range(100, -1, -1)], 7.0)
    assert found == timing.Timing(50.0, 10.0, 90.0, 7.0)
    assert timing.summarise([3.0]) == timing.Timing(3.0, 3.0, 3.0)


def test_require_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="the bench needs a CUDA device"):
        timing.require_cuda("the bench")


@pytest.mark.gpu
def test_time_calls() -> None:
    """Ten times the bytes take about ten times as long; a call that syncs can't be captured."""
    small, large = (torch.ones(n * 2**24, device="cuda") for n in (1, 10))
    calls = {"small": [lambda: small + 1] * 2, "large": [lambda: large + 1] * 2}
    found = timing.time_calls(calls, rounds=10)
    assert 5 < found["large"].median_us / found["small"].median_us < 20
    for one in found.values():
        assert one.p10_us <= one.median_us <= one.p90_us and one.eager_us is not None
    with pytest.raises(RuntimeError, match="sync can't be captured"):
        timing.time_calls({"sync": [lambda: small.sum().item()]})
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_copy_bytes_per_second() -> None:
    assert 1e11 < timing.copy_bytes_per_second(torch.device("cuda", 0)) < 1e13
