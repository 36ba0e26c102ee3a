"""`make modelcheck`, or `python -m torch_kda.tests.modelcheck`."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch_kda.tests.modelcheck.report import write_report
from torch_kda.tests.modelcheck.run import ROOT, Result, Task, all_tasks, run_all


def main() -> None:
    options = _parse()
    tasks, started = all_tasks(options.only), time.monotonic()
    if not tasks:
        sys.exit(f"modelcheck: no task has {options.only!r} in its name")
    results: list[tuple[Task, Result]] = []
    with _progress(len(tasks)) as (say, finish):
        for task, result in run_all(tasks, options.folder, options.processes, say):
            results.append((task, result))
            finish(task, result)
    seconds = time.monotonic() - started
    if not options.only:
        write_report(options.report, results, seconds)
        print(f"written: {options.report}")
    failures = [result["violation"] for _, result in results if "violation" in result]
    failures += [
        f"not caught: {fault['name']}"
        for _, result in results
        for fault in result.get("faults", ())
        if fault["by"] is None
    ]
    for failure in failures:
        print(f"FAILED: {failure}")
    sys.exit(1 if failures else 0)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m torch_kda.tests.modelcheck", description=__doc__
    )
    parser.add_argument("--processes", type=int, default=2, help="at once (default: 2)")
    parser.add_argument("--only", default="", help="tasks with this in their names; no report")
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "build" / "modelcheck",
        help="results and states of searches; a run goes on from what is there",
    )
    parser.add_argument(
        "--report", type=Path, default=ROOT / "profiles" / "results" / "modelcheck.md"
    )
    return parser.parse_args()


@contextmanager
def _progress(
    num_tasks: int,
) -> Iterator[tuple[Callable[[dict[str, int]], None], Callable[[Task, Result], None]]]:
    """Two functions: one is told what runs, one what has finished."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    total = 0
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        line = bar.add_task("starting", total=num_tasks)

        def say(running: dict[str, int]) -> None:
            done = total + sum(running.values())
            names = ", ".join(running)
            bar.update(line, description=f"{done:,} transitions and steps; {names}")

        def finish(task: Task, result: Result) -> None:
            nonlocal total
            count = result.get("transitions", result.get("steps", 0))
            total += count
            verdict = "VIOLATION" if "violation" in result else f"{count:,}"
            bar.console.print(f"{task.kind} {task.name}: {verdict}", highlight=False)
            bar.update(line, advance=1)

        yield say, finish


if __name__ == "__main__":
    main()
