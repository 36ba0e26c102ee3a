"""What has to be visible, and what may be gone, when a step has retired or a request stopped."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch_kda.cache.node import Node
from torch_kda.cache.policy import Kind
from torch_kda.scheduler.batch import ScheduledRow
from torch_kda.scheduler.live import Flight, LiveRequest
from torch_kda.scheduler.request import RequestOutput, RequestStatus
from torch_kda.tests.modelcheck.invariants import Before, on_settled

if TYPE_CHECKING:
    from torch_kda.tests.modelcheck.world import World


@on_settled
def check_commit(
    world: "World", before: Before, flight: Flight, outputs: Sequence[RequestOutput]
) -> None:
    """What the step wrote is visible now, and nothing that was visible is lost but for a deeper
    state.
    """
    _check_kept(world, before)
    world.ghost.learn_keys()
    cache, lives = world.cache, world.scheduler.queues.lives
    assert len({output.request_id for output in outputs}) == len(outputs)
    for row, live in zip(flight.batch.rows, flight.requests, strict=True):
        was = before.lives[row.request_id]
        if was.is_discarded:
            continue
        is_over = lives.get(row.request_id) is not live or live.node is None
        for position, _ in row.exports:
            if not cache.lookahead:
                _check_has_state(world, before, live, position)
        if is_over:
            done = row.end if not row.is_decode else was.num_computed + _num_new(row, outputs)
            if was.num_in_flight == 1 and not cache.lookahead and done % cache.unit == 0:
                _check_has_state(world, before, live, done)
            continue
        assert live.node is not None
        if live.request.status is RequestStatus.RUNNING:
            known = max(live.num_proven, live.kv_cached)
            assert live.node.depth == known // cache.unit, f"{live.num_proven=}"
            if not cache.lookahead:
                assert live.num_proven == live.num_computed


def _num_new(row: ScheduledRow, outputs: Sequence[RequestOutput]) -> int:
    """Tokens that a decode row gave; 1 if its request had ended before."""
    return max((len(o.token_ids) for o in outputs if o.request_id == row.request_id), default=1)


@on_settled
def check_fail(
    world: "World", before: Before, flight: Flight, outputs: Sequence[RequestOutput]
) -> None:
    """All requests of the step end, and the steps after it count for nothing."""
    _check_kept(world, before)
    ended = {o.request_id for o in outputs if o.finish_reason == "error" and not o.token_ids}
    expected = {
        row.request_id
        for row in flight.batch.rows
        if before.lives[row.request_id].status is not RequestStatus.FINISHED
    }
    assert ended == expected and len(outputs) == len(ended), f"{outputs}"
    for later in world.scheduler.holdings.flights:
        assert later.has_failed
        for live in later.requests:
            assert live.request.status is not RequestStatus.RUNNING


@on_settled
def check_stop(world: "World", before: Before, live: LiveRequest) -> None:
    """A request that had nothing in flight leaves its state behind if that lies on the grid."""
    _check_kept(world, before)
    was = before.lives[live.request_id]
    # what is in flight counts unless the request has reached its end
    assert live.is_discarded == (was.is_discarded or live.request_id in world.ended) or (
        not was.num_in_flight
    )
    if was.status is not RequestStatus.RUNNING or was.num_in_flight or was.is_discarded:
        return
    if 0 < was.num_computed <= was.num_proven and was.num_computed % world.cache.unit == 0:
        _check_has_state(world, before, live, was.num_computed)


def _check_kept(world: "World", before: Before) -> None:
    """KV stays, and a state only goes if there is a deeper one on its path, and none above it is
    worth less (I25).
    """
    pins = world.cache.state_pool.pins
    for key, slot in before.slots.items():
        node = before.nodes[key]
        assert world.cache.find(key) is node, f"{node!r} is gone"
        if slot < 0 or node.slot == slot:
            continue
        assert _has_state_below(node), f"the deepest state of a path is gone: {node!r}"
        if world.cache.counters.states_over_path_cap == before.over_cap:
            # its maker has newer ones, and nobody else has use for it
            assert node.kind is Kind.DECODE and not node.was_hit, f"{node!r} is gone"
        for other in _states_above(node):
            is_new = before.slots.get(other.key) != other.slot
            assert is_new or pins[other.slot] or other.kind <= node.kind, f"{node!r} {other!r}"


def _states_above(node: Node) -> list[Node]:
    found, step = [], node.parent
    while step is not None:
        found += [step] if step.slot >= 0 else []
        step = step.parent
    return found


def _has_state_below(node: Node) -> bool:
    return any(child.slot >= 0 or _has_state_below(child) for child in node.children.values())


def _check_has_state(world: "World", before: Before, live: LiveRequest, position: int) -> None:
    """It is there; only where a path is full it may have made place for a deeper one (I25)."""
    if position == 0:
        return
    key = world.ghost.truths[live.request_id].keys[position // world.cache.unit - 1]
    if world.cache.has_state(key):
        return
    node = world.cache.find(key)
    assert node is not None, f"{live.request_id}: the KV before {position} was not kept"
    if before.slots.get(key, -1) >= 0 and _has_state_below(node):
        return  # it was there, and its maker has newer ones by now
    is_full = world.cache.counters.states_over_path_cap != before.over_cap
    pins = world.cache.state_pool.pins
    is_full = is_full and (
        _has_state_below(node) or any(pins[other.slot] for other in _states_above(node))
    )
    assert is_full, f"{live.request_id}: the state at {position} was not kept"
