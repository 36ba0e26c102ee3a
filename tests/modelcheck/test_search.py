"""Small scopes gone through to their end, and the search itself."""

import pytest
from torch_kda.tests.modelcheck import search as search_module
from torch_kda.tests.modelcheck.faults import applied
from torch_kda.tests.modelcheck.scope import Act, Scope
from torch_kda.tests.modelcheck.scopes import SCOPES, quick, zeros
from torch_kda.tests.modelcheck.search import Violation, describe, replay, search, shrink
from torch_kda.tests.modelcheck.seeded_faults import FAULTS
from torch_kda.tests.modelcheck.world import World

BY_NAME = {scope.name: scope for scope in SCOPES}
SMALL = quick(BY_NAME["unit 2, block 1"])


@pytest.mark.parametrize("scope", SCOPES, ids=[scope.name for scope in SCOPES])
def test_scope(scope: Scope) -> None:
    """Every order of actions with one disturbance; `make modelcheck` goes on from here."""
    counts = search(quick(scope), drain_every=16)
    assert counts.is_complete and counts.states > 30
    assert counts.drained > 0


def test_scopes_are_small() -> None:
    for scope in SCOPES:
        assert scope.unit in (1, 2, 4) and scope.num_slots <= 8 and len(scope.requests) <= 3
        assert all(len(t.prompt) + t.max_tokens <= 13 for t in scope.requests)
    assert len({scope.name for scope in SCOPES}) == len(SCOPES)
    acts = {act for scope in SCOPES for act in scope.disturbances}
    assert acts == set(Act) - {Act.SUBMIT, Act.SCHEDULE, Act.COMMIT}


def test_all_actions_are_met() -> None:
    counts = search(SMALL)
    assert counts.by_action.keys() == {act.name for act in Act}
    assert sum(counts.by_action.values()) == counts.transitions


def test_search_goes_on(tmp_path) -> None:
    """An interrupted search that finds its state ends with the counts of one in one go."""
    whole = search(SMALL)
    file = tmp_path / "state.pickle"
    for limit in (300, 301, 900, None):
        counts = search(SMALL, limit=limit, file=file)
    assert counts.is_complete
    assert (counts.states, counts.transitions, counts.by_action, counts.drained) == (
        *(whole.states, whole.transitions, whole.by_action, whole.drained),
    )


def test_search_saves_while_it_runs(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(search_module, "SAVE_SECONDS", 0)
    file = tmp_path / "state.pickle"
    seen = []
    search(SMALL, limit=50, file=file, report=lambda counts: seen.append(file.exists()))
    assert seen[0] is False and all(seen[1:])


def test_shrink() -> None:
    """What is found is told in as few actions as show it."""
    fault = next(fault for fault in FAULTS if fault.name.startswith("source not pinned"))
    with applied(fault):
        with pytest.raises(Violation) as raised:
            search(SMALL)
        violation = shrink(raised.value)
        assert len(violation.actions) < len(raised.value.actions)
        for index in range(len(violation.actions)):
            replay(SMALL, violation.actions[:index] + violation.actions[index + 1 :])
        with pytest.raises(Violation, match="unit 2, block 1: after submit"):
            replay(SMALL, violation.actions)
    replay(SMALL, violation.actions)


def test_describe() -> None:
    assert describe((Act.PREEMPT, 2)) == "preempt(2)"
    assert describe((Act.EVICT_KV, 0)) == "evict_kv"


def test_replay_passes_over_what_is_not_possible() -> None:
    world = replay(SMALL, [(Act.COMMIT, 0), (Act.SUBMIT, 0), (Act.ABORT, 1), (Act.SCHEDULE, 0)])
    assert len(world.in_flight) == 1 and world.num_disturbed == 0


def test_drain_notices_a_standstill(monkeypatch) -> None:
    world = replay(Scope(name="one", requests=(zeros(5),)), [(Act.SUBMIT, 0)])
    monkeypatch.setattr(World, "act", lambda self, action: None)
    with pytest.raises(AssertionError, match="still not done"):
        world.drain()


# what searches have found, in as few actions as show it: scope, disturbances, actions
FINDS = [
    # a decode state that another request had come to count on was forgotten by its maker
    (
        "decode states",
        "submit schedule commit schedule commit schedule commit schedule commit submit schedule "
        "preempt(1) commit schedule commit",
    ),
    # a request was passed over for a state that then got no slot
    (
        "periodic",
        "submit abort(0) submit schedule preempt(0) commit evict_kv evict_kv schedule commit "
        "submit schedule",
    ),
]


@pytest.mark.parametrize(("name", "words"), FINDS, ids=[name for name, _ in FINDS])
def test_finds(name: str, words: str) -> None:
    actions = []
    for word in words.split():
        act, _, index = word.rstrip(")").partition("(")
        actions.append((Act[act.upper()], int(index or 0)))
    world = replay(BY_NAME[name], actions)
    world.drain()
