"""What must hold after every action, and what an action found before it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING

from torch_kda.cache.node import Node
from torch_kda.cache.state_pool import SlotStatus
from torch_kda.scheduler.holdings import Announced
from torch_kda.scheduler.integrity import settled
from torch_kda.scheduler.live import LiveRequest
from torch_kda.scheduler.request import RequestOutput, RequestStatus
from torch_kda.tests.modelcheck.scope import END, GOOD

if TYPE_CHECKING:
    from torch_kda.tests.modelcheck.world import World


def on_settled(rule: Callable) -> Callable:
    """The rule, or whatever looks at a world, sees true counters of requests in a run."""

    @wraps(rule)
    def look(world: "World", *args):
        with settled(world.scheduler.queues):
            return rule(world, *args)

    return look


@dataclass(slots=True)
class LiveBefore:
    status: RequestStatus
    num_in_flight: int
    num_computed: int
    num_proven: int
    is_discarded: bool
    num_blocks: int
    deferred_to: dict[str, bytes]


@dataclass(slots=True)
class Before:
    """What an action found."""

    nodes: dict[bytes, Node]  # all cached units
    slots: dict[bytes, int]  # their states
    lives: dict[str, LiveBefore]
    num_flights: int
    has_draining: bool
    tick: int  # of the cache
    announced: dict[bytes, Announced]
    evictions: int
    over_cap: int
    preemptions: int

    @staticmethod
    @on_settled
    def of(world: "World") -> "Before":
        scheduler, counters = world.scheduler, world.cache.counters
        nodes = {node.key: node for node in world.cache.nodes()}
        lives = {
            name: LiveBefore(
                live.request.status,
                live.num_in_flight,
                live.num_computed,
                live.num_proven,
                live.is_discarded,
                len(live.table),
                dict(live.deferred_to),
            )
            for name, live in scheduler.queues.lives.items()
        }
        return Before(
            nodes,
            {key: node.slot for key, node in nodes.items()},
            lives,
            len(scheduler.holdings.flights),
            bool(scheduler.queues.draining),
            world.cache._tick,
            dict(scheduler.holdings.announced),
            counters.evictions_for_kv + counters.evictions_for_states,
            counters.states_over_path_cap,
            scheduler.counters.preemptions,
        )


@on_settled
def check(world: "World") -> None:
    """Books agree (I06, I07, I25, I27); what is visible is right (I01, I14), and what runs too."""
    world.scheduler.check_integrity()
    world.ghost.check_visible()
    for live in world.scheduler.queues.lives.values():
        if live.request.status is RequestStatus.RUNNING:
            _check_running(world, live)
        # what runs past the end of a request counts for nothing (I02)
        assert live.is_discarded or live.request_id not in world.ended, f"{live.request_id}"
    states = world.cache.state_pool
    for flight in world.scheduler.holdings.flights:
        for row in flight.batch.rows:
            # a source is not given away before its reader has retired (I05)
            assert row.src_slot < 0 or states.status[row.src_slot] is not SlotStatus.FREE, f"{row}"

    _check_announcements(world)


def _check_announcements(world: "World") -> None:
    """What requests wait for is being written by the step that is said to write it."""
    holdings, unit = world.scheduler.holdings, world.cache.unit
    for by in holdings.announced.values():
        (flight,) = (f for f in holdings.flights if f.batch.step == by.step)
        (row,) = (row for row in flight.batch.rows if row.request_id == by.writer)
        position = by.depth * unit
        is_kept = row.start == position and (row.is_decode or not world.scope.exports)
        is_exported = any(p == position for p, _ in row.exports)
        # in two passes the next row keeps what this one ends with
        assert is_exported or is_kept or (row.end == position and not world.scope.exports), f"{by}"


def _check_running(world: "World", live: LiveRequest) -> None:
    """State and KV of the tokens that count as computed are there (I15)."""
    ghost, cache, done = world.ghost, world.cache, live.num_computed
    hashes, size = ghost.truths[live.request_id].hashes, cache.block_size
    assert live.node is not None
    if not live.num_in_flight:
        state = ghost.states[live.slots[0]]
        assert state == (done, hashes[done]), f"{live.request_id} goes on from {state}, not {done}"
    ids = live.table.tolist()
    for position in range(live.node.depth * cache.unit, done):
        place = ids[position // size] * size + position % size
        assert ghost.kv[place] == hashes[position + 1], f"{live.request_id}: KV of {position}"


def check_output(world: "World", output: RequestOutput, got: list[int]) -> None:
    """Tokens are those of the model without a cache (I24)."""
    index = int(output.request_id[1:]) % len(world.scope.requests)
    most = world.scope.requests[index].max_tokens
    assert all(token == GOOD for token in got[:-1]), f"{got}"
    match output.finish_reason:
        case "stop":
            assert got[-1] == END
        case "length":
            assert got[-1] == GOOD and len(got) == most
        case None:
            assert got[-1] == GOOD and len(got) < most


def check_all_free(world: "World") -> None:
    """Nothing is left of requests that are gone (I07)."""
    cache, scheduler = world.cache, world.scheduler
    assert cache.block_pool.num_free == cache.block_pool.num_blocks
    assert cache.state_pool.num_free == cache.state_pool.num_slots
    assert not scheduler.queues.lives and not scheduler.holdings.announced
    assert all(pins == 0 for pins in cache.state_pool.pins)
