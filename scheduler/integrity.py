"""Compares the scheduler's books with each other. For tests."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..cache.state_pool import SlotStatus
from .holdings import Holdings
from .live import LiveRequest
from .queues import Queues, order_of
from .request import RequestStatus

if TYPE_CHECKING:
    from .scheduler import Scheduler


_COUNTERS = (
    "num_computed",
    "scheduled_end",
    "num_proven",
    "num_in_flight",
    "last_step",
    "last_row",
)


@contextmanager
def settled(queues: Queues) -> Iterator[None]:
    """Inside, the counters of requests in a run are true. Afterwards they are as they were: who
    looks must not mend what it looks at.
    """
    lives = queues.run.requests if queues.run is not None else []
    before = [[getattr(live, name) for name in _COUNTERS] for live in lives]
    queues.write_back()
    yield
    for live, values in zip(lives, before, strict=True):
        for name, value in zip(_COUNTERS, values, strict=True):
            setattr(live, name, value)


def check_scheduler(scheduler: "Scheduler") -> None:
    """Raises AssertionError if a block, slot, pin or request has no owner, or two."""
    with settled(scheduler.queues):
        _check_all(scheduler)


def _check_all(scheduler: "Scheduler") -> None:
    holdings, lives = scheduler.holdings, list(scheduler.queues.lives.values())
    scheduler.cache.check_integrity()
    _check_queues(scheduler, lives)
    for live in lives:
        _check_live(scheduler, live)
    _check_blocks(holdings, lives)
    _check_slots(holdings, lives)
    steps = {flight.batch.step for flight in holdings.flights}
    assert all(by.step in steps for by in holdings.announced.values()), "a writer is not in flight"
    if not lives:
        pools = scheduler.cache
        assert pools.num_available_blocks == pools.block_pool.num_blocks
        assert pools.num_available_slots == pools.state_pool.num_slots


def _check_queues(scheduler: "Scheduler", lives: list[LiveRequest]) -> None:
    queues = scheduler.queues
    draining = sorted(queues.draining.values(), key=order_of)
    for queue, statuses in (
        (queues.running, {RequestStatus.RUNNING}),
        (queues.waiting, {RequestStatus.WAITING}),
        (draining, {RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    ):
        expected = [live for live in lives if live.request.status in statuses]
        assert sorted(expected, key=order_of) == queue, f"{statuses}: {expected} and {queue}"
    assert len(queues.running) <= scheduler.limits.max_num_seqs


def _check_live(scheduler: "Scheduler", live: LiveRequest) -> None:
    name, status = live.request_id, live.request.status
    flights = [f for f in scheduler.holdings.flights if live in f.requests]
    assert len(flights) == live.num_in_flight, f"{name}: {len(flights)=} {live.num_in_flight=}"
    if status in (RequestStatus.PREEMPTED, RequestStatus.FINISHED):
        assert flights, f"{name} drains, but nothing of it is in flight"
    if status is RequestStatus.WAITING:
        assert not live.slots and not live.kept and not len(live.table) and live.node is None
        assert not live.is_discarded
        return
    assert len(live.slots) == scheduler.limits.row_tokens, f"{name}: {live.slots=}"
    assert live.scheduled_end <= len(live.table) * scheduler.cache.block_size
    if status is RequestStatus.RUNNING:
        assert not live.is_discarded
        assert live.num_computed <= live.scheduled_end
        assert flights or live.num_computed == live.scheduled_end
        samples = sum(f.batch.columns.samples[f.requests.index(live)] for f in flights)
        # what a row gives is its next one's input; with drafts it gives one token at least
        most = scheduler.limits.num_speculative_tokens
        ahead = live.scheduled_end + 1 - len(live.token_ids)
        assert not live.is_decoding or samples <= ahead <= samples * (1 + most), f"{name}: {ahead=}"


def _check_blocks(holdings: Holdings, lives: Iterable[LiveRequest]) -> None:
    cache, width = holdings.cache, holdings.cache.blocks_per_unit
    owned = [block for flight in holdings.flights for block in flight.freed_blocks]
    references: dict[bytes, int] = {}
    for live in lives:
        node = live.node
        if node is None:
            continue
        ids = live.table.tolist()
        owned += ids[node.depth * width :]
        while node.parent is not None:
            assert ids[(node.depth - 1) * width : node.depth * width] == list(node.blocks)
            assert live.keys[node.depth - 1] == node.key
            references[node.key] = references.get(node.key, 0) + 1
            node = node.parent
    for node in cache.nodes():
        owned += node.blocks
        assert node.references == references.get(node.key, 0), f"{node!r}"
    pool = cache.block_pool
    assert len(set(owned)) == len(owned), "a block has two owners"
    assert len(owned) + pool.num_free == pool.num_blocks, (
        f"{len(owned)} blocks are owned, {pool.num_free} free, of {pool.num_blocks}"
    )


def _check_slots(holdings: Holdings, lives: Iterable[LiveRequest]) -> None:
    states = holdings.cache.state_pool
    steps = {flight.batch.step for flight in holdings.flights}
    kept = [k for live in lives for k in live.kept]
    kept += [k for flight in holdings.flights for row in flight.exports for k in row]
    pins = [0] * states.num_slots
    for flight in holdings.flights:
        for slot in flight.pinned_slots:
            pins[slot] += 1
    assert pins == states.pins, f"{pins=} {states.pins=}"
    expected = {
        SlotStatus.RUNNING: [slot for live in lives for slot in live.slots],
        SlotStatus.RESERVED: [k.slot for k in kept if k.step in steps],
        SlotStatus.WRITTEN: [k.slot for k in kept if k.step not in steps],
    }
    for status, slots in expected.items():
        actual = [slot for slot, s in enumerate(states.status) if s is status]
        assert sorted(slots) == actual, f"{status!r}: owned {sorted(slots)}, marked {actual}"
    assert all(states.position[k.slot] == k.position for k in kept)
