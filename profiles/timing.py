"""The one timer: calls on rotating inputs, replayed from CUDA graphs, interleaved, in medians."""

import os
import statistics
import time
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

Call = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)  # names what is timed, in messages by its str

L2_SHARE = 4  # inputs of one variant fill the L2 cache this many times, so none is found there
MIN_SETS = 2
GRAPH_CALLS = 16  # in a graph, at least: its own launch takes 10 us, which all calls share
MAX_SETS = 64
WARM_UP = 2


@dataclass(frozen=True, slots=True)
class Timing:
    """Time of one call, in us."""

    median_us: float
    p10_us: float
    p90_us: float
    eager_us: float | None = None  # wall clock of an eager call, host work included


def require_cuda(what: str) -> torch.device:
    """The current CUDA device; RuntimeError where there is none."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"{what} needs a CUDA device, and torch sees none; run it on a GPU")
    return torch.device("cuda", torch.cuda.current_device())


def num_input_sets(set_bytes: int, l2_bytes: int, free_bytes: int) -> int:
    """How many input sets of `set_bytes` to rotate over: as much as L2 needs and memory allows."""
    wanted = -(-L2_SHARE * l2_bytes // max(set_bytes, 1))
    fitting = free_bytes // max(set_bytes, 1)
    if fitting < MIN_SETS:
        gib = set_bytes / 2**30
        raise RuntimeError(f"{MIN_SETS} input sets of {gib:.1f} GiB do not fit into free memory")
    return int(min(max(wanted, MIN_SETS), fitting, MAX_SETS))


def l2_bytes(device: torch.device) -> int:
    """Size of the L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def _raise(_: object, error: Exception) -> None:
    raise error


def time_calls(
    variants: Mapping[Name, Sequence[Call]],
    *,
    rounds: int = 30,
    eager_rounds: int = 5,
    on_failure: Callable[[Name, Exception], None] = _raise,
) -> dict[Name, Timing]:
    """Times each variant's calls, one for each input set, and gives the time of one call.

    Every variant becomes one CUDA graph of all its calls, in as many passes as a graph of some
    length takes. Each round replays all variants in turn, so that a drift of the clock meets all of
    them alike.

    Args:
        variants: captured in their order, each with the results of a pass beside those of the one
            before, and of the variants before.
        on_failure: gets a variant that doesn't run or can't be captured, and why; the variant is
            then left out. Default: the error is raised.
    """
    graphs = {}
    passes = {name: -(-GRAPH_CALLS // max(len(calls), 1)) for name, calls in variants.items()}
    for name, calls in variants.items():
        try:
            graphs[name] = _capture(name, calls, passes[name])
        except Exception as error:
            on_failure(name, error)
    times: dict[Name, list[float]] = {name: [] for name in graphs}
    for turn in range(WARM_UP + rounds):
        for name, (graph, _) in graphs.items():
            us = _replay_us(graph) / (passes[name] * len(variants[name]))
            if turn >= WARM_UP:
                times[name].append(us)
    graphs.clear()
    return {
        name: summarise(us, time_eager(variants[name], rounds=eager_rounds))
        for name, us in times.items()
    }


def summarise(us: Sequence[float], eager_us: float | None = None) -> Timing:
    """Median and the tenth and ninetieth percentile."""
    if len(us) == 1:
        return Timing(us[0], us[0], us[0], eager_us)
    cuts = statistics.quantiles(us, n=10, method="inclusive")
    return Timing(statistics.median(us), cuts[0], cuts[-1], eager_us)


def time_eager(calls: Sequence[Call], *, rounds: int = 5) -> float:
    """Wall clock of one eager call in a row of them, in us."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(rounds):
        for call in calls:
            call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / (rounds * len(calls)) * 1e6


def time_host(call: Call, *, rounds: int = 200) -> float:
    """Host time of one eager call in us: what it takes to issue it, the device still at work."""
    for _ in range(WARM_UP):
        call()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(10):
        started = time.perf_counter()
        for _ in range(rounds // 10):
            call()
        best = min(best, (time.perf_counter() - started) / (rounds // 10))
        torch.cuda.synchronize()
    return best * 1e6


def on_each_core(rounds: int) -> Generator[int | None, None, None]:
    """Each round has this thread on another core, spread evenly over the allowed ones.

    Gives the core's number, None where cores can't be chosen; of fewer cores than rounds, each in
    several. Close it (`contextlib.closing`), and the thread may run where it might before.

    The cores of a lent machine do other people's work beside ours, unseen, which may empty their
    caches while we wait. What that costs no small loop tells, only the code that is to be timed.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield from [None] * rounds
        return
    allowed = os.sched_getaffinity(0)
    cores = sorted(allowed)
    try:
        for turn in range(rounds):
            core = cores[turn * len(cores) // rounds]
            os.sched_setaffinity(0, {core})
            yield core
    finally:
        os.sched_setaffinity(0, allowed)


def copy_bytes_per_second(device: torch.device) -> float:
    """Bytes read and written a second by a kernel that turns 4 GiB into as many.

    Not by `copy_`: in a graph that is a copy node, which an H200 runs at 2.8 of its 4.3 TB/s.
    """
    source = torch.empty(2**30, dtype=torch.int32, device=device).fill_(1)
    target = torch.empty_like(source)
    (timing,) = time_calls(
        {"copy": [lambda: torch.bitwise_not(source, out=target)] * 2}, rounds=10
    ).values()
    return 2 * source.nbytes / (timing.median_us * 1e-6)


def _capture(
    name: Hashable, calls: Sequence[Call], passes: int
) -> tuple[torch.cuda.CUDAGraph, list[object]]:
    """One graph of all calls; the results of a pass are kept until the next one is over, so that
    none writes over another's while that may be in a cache.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # the outer one: where a capture doesn't even end, torch would stay on its stream
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            results: list[object] = []
            for _ in range(passes):
                results = [call() for call in calls]
    except RuntimeError as error:
        raise RuntimeError(f"{name} can't be captured in a CUDA graph: {error}") from error
    return graph, results


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
