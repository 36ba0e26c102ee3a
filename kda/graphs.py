"""Steps recorded once and launched again as a whole: CUDA graphs, and who holds them."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .buckets import Buckets, Shape

Launch = Callable[[], None]

log = logging.getLogger("torch_kda.graphs")


class Recorder(Protocol):
    """Records launches on fixed addresses, so that they can be repeated."""

    def record(self, launch: Launch) -> Launch:
        """What repeats `launch`. May call it; the caller's buffers then hold padding only."""
        ...

    @property
    def num_bytes(self) -> int:
        """Device memory that the recordings hold."""
        ...


class CudaRecorder:
    """CUDA graphs over one memory pool: recordings reuse each other's scratch memory.

    So only one may run at a time, and what it returns must lie outside of the pool.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._free_before = torch.cuda.mem_get_info(device)[0]

    def record(self, launch: Launch) -> Launch:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            # kernels are loaded and algorithms chosen now: nothing of that may happen in a capture
            launch()
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            launch()
        self._graphs.append(graph)
        return graph.replay

    @property
    def num_bytes(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return max(0, self._free_before - torch.cuda.mem_get_info(self._device)[0])


@dataclass(frozen=True, slots=True)
class CaptureSummary:
    """What recording took."""

    num_shapes: int
    seconds: float
    num_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.num_shapes} graphs, {self.num_bytes / 2**30:.2f} GiB, recorded in "
            f"{self.seconds:.1f} s"
        )


class StepGraphs:
    """A recorded step for each of some shapes."""

    def __init__(self, recorder: Recorder, buckets: Buckets) -> None:
        self.buckets = buckets
        self._recorder = recorder
        self._steps: dict[Shape, Launch] = {}
        self._draws: dict[int, Launch] = {}

    def capture(
        self, step: Callable[[Shape], None], draw: Callable[[int], None], num_logits: Sequence[int]
    ) -> CaptureSummary:
        """Record all shapes, and the drawing of tokens for all numbers of logits.

        Args:
            step: launches a step of that shape on the static buffers.
            draw: draws from so many rows of the static logits.

        Raises:
            RuntimeError: a step can't be recorded; the message names it and the way out.
        """
        started = time.perf_counter()
        shapes = self.buckets.shapes
        with _progress(len(shapes) + len(num_logits)) as advance:
            for shape in shapes:
                advance(f"D={shape.D}, T={shape.T:,}")
                self._steps[shape] = self._record(f"{shape}", step, shape)
            for count in sorted(num_logits, reverse=True):
                advance(f"sampling {count} rows")
                self._draws[count] = self._record(f"sampling of {count} rows", draw, count)
        seconds = time.perf_counter() - started
        summary = CaptureSummary(len(shapes), seconds, self._recorder.num_bytes)
        log.info("%s", summary)
        return summary

    def find(self, num_rows: int, num_tokens: int) -> Shape | None:
        """The recorded shape for a step; None: there is none."""
        return self.buckets.find(num_rows, num_tokens)

    def replay(self, shape: Shape) -> None:
        self._steps[shape]()

    def draw(self, num_logits: int) -> None:
        self._draws[num_logits]()

    def _record(self, name: str, launch: Callable[[Any], None], argument: Any) -> Launch:
        try:
            return self._recorder.record(lambda: launch(argument))
        except RuntimeError as error:
            raise RuntimeError(
                f"CUDA graphs: {name} can't be recorded: {error}; cuda_graphs=False runs without"
            ) from error


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on stderr if that is a terminal; takes what comes next."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    bar = Progress(
        TextColumn("CUDA graphs"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    with bar:
        task = bar.add_task("", total=total)
        done = 0

        def advance(description: str) -> None:
            nonlocal done
            bar.update(task, description=description, completed=done)
            done += 1

        yield advance
        bar.update(task, description="done", completed=total)
