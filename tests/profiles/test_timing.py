"""The timer: what it needs, how many inputs it rotates over, and on a device what it measures."""

import os
from collections.abc import Sequence
from contextlib import closing

import pytest
import torch
from torch_kda.profiles import timing
from torch_kda.profiles.timing import Call

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


def test_time_calls_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who can't be captured is named and left out, or ends it all if nobody takes the error."""

    def capture(name: str, calls: Sequence[Call], passes: int) -> tuple[str, list[object]]:
        assert passes == {3: 6, 2: 8}[len(calls)]  # 16 calls and more
        return name, [call() for call in calls]

    def fails() -> None:
        raise TypeError("no such argument")

    monkeypatch.setattr(timing, "_capture", capture)
    monkeypatch.setattr(timing, "_replay_us", lambda name: {"a": 36.0, "c": 64.0}[name])
    monkeypatch.setattr(timing, "time_eager", lambda calls, rounds: float(len(calls)))
    # the last call of b fails, not its first
    calls: dict[str, list[Call]] = {"a": [int] * 3, "b": [int, int, fails], "c": [int] * 2}
    failed = []
    found = timing.time_calls(calls, on_failure=lambda name, error: failed.append((name, error)))
    assert [(name, found[name].median_us, found[name].eager_us) for name in found] == [
        ("a", 2.0, 3.0),
        ("c", 4.0, 2.0),
    ]
    assert [(name, str(error)) for name, error in failed] == [("b", "no such argument")]
    with pytest.raises(TypeError, match="no such argument"):
        timing.time_calls(calls)
    assert timing.time_calls({}) == {}


@pytest.mark.gpu
def test_time_calls() -> None:
    """Ten times the bytes take about ten times as long; a call that syncs can't be captured."""
    small, large = (torch.ones(n * 2**24, device="cuda") for n in (1, 10))
    calls = {"small": [lambda: small + 1] * 2, "large": [lambda: large + 1] * 2}
    found = timing.time_calls(calls, rounds=10)
    assert 5 < found["large"].median_us / found["small"].median_us < 20
    for one in found.values():
        assert one.p10_us <= one.median_us <= one.p90_us and one.eager_us is not None
    syncs: list[Call] = [lambda: small + 1, lambda: small.sum().item()]
    with pytest.raises(RuntimeError, match="sync can't be captured"):
        timing.time_calls({"sync": syncs})
    stream, failed = torch.cuda.current_stream(), []
    found = timing.time_calls(
        {"small": calls["small"], "sync": syncs, "large": calls["large"]},
        rounds=10,
        on_failure=lambda name, _: failed.append(name),
    )
    assert failed == ["sync"] and torch.cuda.current_stream() == stream
    assert 5 < found["large"].median_us / found["small"].median_us < 20


@pytest.mark.gpu
def test_copy_bytes_per_second() -> None:
    assert 1e11 < timing.copy_bytes_per_second(torch.device("cuda", 0)) < 1e13


class FakeCores:
    """A machine's cores, and where the thread may run now."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: set[int]) -> None:
        self.now = allowed
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(self.now), raising=False)
        monkeypatch.setattr(os, "sched_setaffinity", self.move, raising=False)

    def move(self, pid: int, cores: set[int]) -> None:
        assert pid == 0 and cores
        self.now = set(cores)


@pytest.mark.parametrize(
    ("allowed", "rounds", "cores"),
    [
        (range(16), 8, [0, 2, 4, 6, 8, 10, 12, 14]),
        (range(8), 8, [0, 1, 2, 3, 4, 5, 6, 7]),
        ((3, 17, 40), 2, [3, 17]),
        ((3, 17), 4, [3, 3, 17, 17]),
        ((5,), 3, [5, 5, 5]),
    ],
)
def test_on_each_core(
    allowed: Sequence[int], rounds: int, cores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = FakeCores(monkeypatch, set(allowed))
    found = []
    for core in timing.on_each_core(rounds):
        assert machine.now == {core}
        found.append(core)
    assert found == cores
    assert machine.now == set(allowed)


def test_cores_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may run where it might before, whatever ends the rounds."""
    machine = FakeCores(monkeypatch, {1, 2, 3})
    with pytest.raises(KeyboardInterrupt), closing(timing.on_each_core(3)) as cores:
        next(cores)
        next(cores)
        assert machine.now == {2}
        raise KeyboardInterrupt
    assert machine.now == {1, 2, 3}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores can't be chosen here")
def test_real_cores() -> None:
    allowed = os.sched_getaffinity(0)
    for core in timing.on_each_core(len(allowed)):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == allowed


def test_cores_that_cannot_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    assert list(timing.on_each_core(3)) == [None] * 3
