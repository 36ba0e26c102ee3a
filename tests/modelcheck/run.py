"""The full search: scopes, random walks and seeded faults, in several processes.

Each task leaves its result in a folder, and a search its state from time to time, so that a run
that was interrupted goes on where it was. Results of other sources are thrown away.
"""

import json
import multiprocessing
import queue
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from multiprocessing.queues import Queue
from pathlib import Path
from random import Random
from typing import Any

from torch_kda.tests.modelcheck.faults import Fault, applied
from torch_kda.tests.modelcheck.scopes import SCOPES, quick
from torch_kda.tests.modelcheck.search import Counts, Violation, describe, search, shrink
from torch_kda.tests.modelcheck.seeded_faults import FAULTS
from torch_kda.tests.scheduler.walk import ACTIONS, Walk, make_world

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("cache/*.py", "scheduler/*.py", "tests/scheduler/*.py", "tests/modelcheck/*.py")
WALKS, WALK_ACTIONS, WALKS_A_TASK = 1200, 600, 100
FAULT_LIMIT = 60_000  # transitions of one scope in which a fault has to be found

Result = dict[str, Any]  # of one task; as JSON
Say = Callable[[int], None]  # how many transitions or steps are done

_messages: Any = None  # queue of a child process


@dataclass(frozen=True, slots=True)
class Task:
    kind: str  # "scope", "walks", "faults"; "quick": a scope with few disturbances
    name: str

    @property
    def file(self) -> str:
        return f"{self.kind} {self.name}".replace(",", "").replace(" ", "-") + ".json"


def all_tasks(only: str = "") -> list[Task]:
    tasks = [Task("scope", scope.name) for scope in SCOPES]
    tasks += [Task("walks", f"{first}") for first in range(0, WALKS, WALKS_A_TASK)]
    tasks.append(Task("faults", "all"))
    return [task for task in tasks if only in f"{task.kind} {task.name}"]


def run_all(
    tasks: list[Task], folder: Path, processes: int, progress: Callable[[dict[str, int]], None]
) -> Iterator[tuple[Task, Result]]:
    """Yields tasks with their results as they finish; those of an earlier run at once."""
    _forget_other_sources(folder)
    todo = []
    for task in tasks:
        if (folder / task.file).exists():
            yield task, json.loads((folder / task.file).read_text())
        else:
            todo.append(task)
    context = multiprocessing.get_context("spawn")
    messages = context.Queue()
    running: dict[str, int] = {}
    with ProcessPoolExecutor(processes, context, _start_process, (messages,)) as pool:
        futures = {pool.submit(run_task, task, folder): task for task in todo}
        try:
            while futures:
                _read(messages, running)
                progress(running)
                for future in [future for future in futures if future.done()]:
                    task = futures.pop(future)
                    running.pop(task.name, None)
                    yield task, future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _read(messages: Queue, running: dict[str, int]) -> None:
    try:
        while True:
            name, done = messages.get(timeout=0.5)
            running[name] = done
    except queue.Empty:
        return


def _start_process(messages: Queue) -> None:
    global _messages
    _messages = messages


def run_task(task: Task, folder: Path) -> Result:
    """Runs one task and leaves its result in the folder."""
    last = 0.0

    def say(done: int) -> None:
        nonlocal last
        if _messages is not None and time.monotonic() - last > 1:
            last = time.monotonic()
            _messages.put((task.name, done))

    runs = {"scope": _run_scope, "quick": _run_scope, "walks": _run_walks, "faults": _run_faults}
    run = runs[task.kind]
    result = run(task, folder, say)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / task.file).write_text(json.dumps(result))
    return result


def _run_scope(task: Task, folder: Path, say: Say) -> Result:
    (scope,) = (scope for scope in SCOPES if scope.name == task.name)
    scope = quick(scope) if task.kind == "quick" else scope
    state = (folder / task.file).with_suffix(".pickle")
    try:
        counts = search(scope, file=state, report=lambda counts: say(counts.transitions))
    except Violation as violation:
        return {"violation": explain(shrink(violation))}
    state.unlink()
    return asdict(counts)


def explain(violation: Violation) -> str:
    steps = " ".join(describe(action) for action in violation.actions)
    return f"{violation.scope.name}: {steps}: {violation.error!r}"


def _run_walks(task: Task, folder: Path, say: Say) -> Result:
    del folder
    steps, started = 0, time.process_time()
    first = int(task.name)
    for seed in range(first, first + WALKS_A_TASK):
        try:
            steps += walk(seed, WALK_ACTIONS)
        except Exception as error:
            return {"violation": f"random walk of seed {seed}: {error!r}"}
        say(steps)
    return {"walks": WALKS_A_TASK, "steps": steps, "cpu_seconds": time.process_time() - started}


def walk(seed: int, num_actions: int) -> int:
    """A random walk at larger sizes, checked after every step. Returns the number of steps."""
    rng = Random(seed)
    world = Walk(make_world(rng))
    steps = 0
    for action in rng.choices(list(ACTIONS), list(ACTIONS.values()), k=num_actions):
        if world.can(action):
            world.act(action, rng)
            steps += 1
    world.drain()
    return steps


def _run_faults(task: Task, folder: Path, say: Say) -> Result:
    del task, folder
    found = []
    for number, fault in enumerate(FAULTS):
        found.append(find_fault(fault))
        say(number + 1)
    return {"faults": found}


def find_fault(fault: Fault, limit: int = FAULT_LIMIT, most: int = 3) -> Result:
    """Searches the scope of a fault with 1, then with more disturbances; says what caught it."""
    (scope,) = (scope for scope in SCOPES if scope.name == fault.scope)
    transitions = 0
    with applied(fault):
        for disturbances in range(1, most + 1):
            narrow = replace(scope, max_disturbances=disturbances)
            try:
                counts = search(narrow, limit=limit, drain_every=8)
            except Violation as violation:
                transitions += violation.transitions
                return {
                    "name": fault.name,
                    "where": fault.where,
                    "scope": scope.name,
                    "by": witness(violation.error),
                    "transitions": transitions,
                    "actions": len(violation.actions),
                }
            transitions += counts.transitions
    return {"name": fault.name, "where": fault.where, "scope": scope.name, "by": None}


def witness(error: BaseException) -> str:
    """Who noticed: the rules of the checker, the ghost, the books, or an assert of the product."""
    trace = error.__traceback__
    files = []
    while trace is not None:
        files.append(Path(trace.tb_frame.f_code.co_filename))
        trace = trace.tb_next
    innermost = files[-1]
    if any(file.name == "integrity.py" for file in files):
        return "integrity"
    if innermost.name == "ghost.py":
        return "ghost"
    return (
        "rules" if innermost.parent.name == "modelcheck" else f"assert in {innermost.parent.name}"
    )


def fingerprint() -> str:
    """Of the sources that a result depends on."""
    digest = sha256()
    for pattern in SOURCES:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _forget_other_sources(folder: Path) -> None:
    mark = folder / "sources.txt"
    if mark.exists() and mark.read_text() != fingerprint():
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mark.write_text(fingerprint())


__all__ = ["Counts", "Task", "all_tasks", "find_fault", "fingerprint", "run_all", "run_task"]
