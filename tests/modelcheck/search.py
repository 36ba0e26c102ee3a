"""Every order of actions in a scope: depth first over distinct canonical states.

A transition is one action on one distinct canonical state. After each, everything is checked.
"""

import pickle
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch_kda.tests.modelcheck.canonical import digest
from torch_kda.tests.modelcheck.scope import Act, Action, Scope
from torch_kda.tests.modelcheck.world import World, make_world

DRAIN_EVERY = 32  # of the new states, so many are run to the end
REPLAY_EVERY = 512  # of the new states, so many are reached a second time from the start
SAVE_SECONDS = 120.0

# the actions that led to a world, newest first; worlds share what is older
Trace = tuple["Trace", Action] | None


class Violation(AssertionError):
    """An invariant doesn't hold after these actions."""

    transitions = 0  # of the search until then

    def __init__(self, scope: Scope, actions: Sequence[Action], error: BaseException) -> None:
        self.scope, self.actions, self.error = scope, list(actions), error
        steps = " ".join(describe(action) for action in actions)
        super().__init__(f"{scope.name}: after {steps}: {error!r}")


@dataclass(slots=True)
class Counts:
    """What a search has done so far."""

    states: int = 1
    transitions: int = 0
    by_action: dict[str, int] = field(default_factory=dict)
    drained: int = 0  # states from which all requests were run to their end
    replayed: int = 0  # states that were reached again from the start, with one result (I26)
    longest: int = 0  # actions from the start
    cpu_seconds: float = 0.0
    is_complete: bool = False


@dataclass(slots=True)
class _State:
    """All that a search needs to go on."""

    counts: Counts
    seen: set[int]
    stack: list[tuple[World, Trace, int]]  # world, how it was reached, number of actions


def search(
    scope: Scope,
    *,
    limit: int | None = None,
    file: Path | None = None,
    drain_every: int = DRAIN_EVERY,
    report: Callable[[Counts], None] | None = None,
) -> Counts:
    """Goes through a scope; `is_complete` says that nothing of it is left.

    Args:
        scope: what to search.
        limit: transitions after which to stop; None: none.
        file: the state is kept here from time to time, and a search that finds one goes on from it.
        drain_every: a new state in so many is run to the end.
        report: called now and then.

    Raises:
        Violation: an invariant doesn't hold.
    """
    state = _load(file) if file and file.exists() else _start(scope)
    counts = state.counts
    clock, saved = time.process_time() - counts.cpu_seconds, time.monotonic()
    while state.stack and (limit is None or counts.transitions < limit):
        try:
            _expand(scope, state, drain_every)
        except Violation as violation:
            violation.transitions = counts.transitions
            raise
        counts.states = len(state.seen)
        counts.cpu_seconds = time.process_time() - clock
        if report is not None:
            report(counts)
        if file and time.monotonic() - saved > SAVE_SECONDS:
            _save(file, state)
            saved = time.monotonic()
    counts.is_complete = not state.stack
    if file:
        _save(file, state)
    return counts


def _expand(scope: Scope, state: _State, drain_every: int) -> None:
    """Every action on the newest state."""
    counts, seen = state.counts, state.seen
    world, trace, length = state.stack.pop()
    actions = world.actions()
    for index, action in enumerate(actions, 1):
        following = world.copy() if index < len(actions) else world
        path = (trace, action)
        counts.transitions += 1
        name = action[0].name
        counts.by_action[name] = counts.by_action.get(name, 0) + 1
        _act(scope, following, action, path)
        number = digest(following)
        if number in seen:
            continue
        seen.add(number)
        counts.longest = max(counts.longest, length + 1)
        state.stack.append((following, path, length + 1))
        _look_closer(scope, following, path, number, counts, drain_every)


def replay(scope: Scope, actions: Sequence[Action]) -> World:
    """The world after these actions; those that are not possible are passed over.

    Raises:
        Violation: an invariant doesn't hold.
    """
    world, done = make_world(scope), list[Action]()
    for action in actions:
        if action in world.actions():
            done.append(action)
            try:
                world.act(action)
            except Exception as error:
                raise Violation(scope, done, error) from error
    return world


def shrink(violation: Violation) -> Violation:
    """A violation in the same scope after fewer actions, none of which can be left out."""
    best = violation
    index = 0
    while index < len(best.actions):
        try:
            replay(best.scope, best.actions[:index] + best.actions[index + 1 :])
            index += 1
        except Violation as shorter:
            best = shorter
    return best


def describe(action: Action) -> str:
    act, index = action
    has_index = act in (Act.COMMIT, Act.ABORT, Act.FINISH, Act.PREEMPT)
    return f"{act.name.lower()}({index})" if has_index else act.name.lower()


def actions_of(trace: Trace) -> list[Action]:
    actions = []
    while trace is not None:
        trace, action = trace
        actions.append(action)
    return actions[::-1]


def _start(scope: Scope) -> _State:
    world = make_world(scope)
    return _State(Counts(), {digest(world)}, [(world, None, 0)])


def _act(scope: Scope, world: World, action: Action, path: Trace) -> None:
    try:
        world.act(action)
    except Exception as error:  # also a KeyError of a broken book is a find
        raise Violation(scope, actions_of(path), error) from error


def _look_closer(
    scope: Scope, world: World, path: Trace, number: int, counts: Counts, drain_every: int
) -> None:
    """Some states are run to the end, and some are reached a second time from the start."""
    if number % drain_every == 0:
        end = world.copy()
        try:
            end.drain()
        except Exception as error:
            raise Violation(scope, actions_of(path), error) from error
        counts.drained += 1
    if number % REPLAY_EVERY == 1:
        again = replay(scope, actions_of(path))
        if digest(again) != number:
            error = AssertionError("the same actions lead to another state (I26)")
            raise Violation(scope, actions_of(path), error)
        counts.replayed += 1


def _save(file: Path, state: _State) -> None:
    # a trace is a chain, and too long a one for pickle
    stack = [(world, actions_of(trace)) for world, trace, _ in state.stack]
    seen = array("Q", state.seen)
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_suffix(".new")
    with fresh.open("wb") as out:
        pickle.dump((state.counts, seen, stack), out, protocol=5)
    fresh.replace(file)


def _load(file: Path) -> _State:
    with file.open("rb") as data:
        counts, seen, stack = pickle.load(data)
    return _State(counts, set(seen), [(world, _trace(path), len(path)) for world, path in stack])


def _trace(actions: Sequence[Action]) -> Trace:
    trace: Trace = None
    for action in actions:
        trace = (trace, action)
    return trace
