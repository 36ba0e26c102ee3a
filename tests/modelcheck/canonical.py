"""A state without what makes no difference: names of slots, blocks, steps and requests are replaced
by the order of their first use, times by their rank, and what only counts is left out.

Two worlds with one canonical form behave alike; test_canonical.py holds their successors against
each other. Contents of slots and blocks are part of it, so that a wrong one is never taken for a
right one that was seen before.
"""

from collections.abc import Iterable
from hashlib import blake2b
from marshal import dumps
from typing import TYPE_CHECKING

from torch_kda.cache.node import Node
from torch_kda.scheduler.live import Flight, KeptState, LiveRequest
from torch_kda.scheduler.request import RequestStatus
from torch_kda.scheduler.run import Run
from torch_kda.tests.modelcheck.invariants import on_settled

if TYPE_CHECKING:
    from torch_kda.tests.modelcheck.world import World

STATUSES = {status: index for index, status in enumerate(RequestStatus)}


class _Names(dict[int, int]):
    """Numbers in the order of their first use."""

    def __missing__(self, key: int) -> int:
        name = self[key] = len(self)
        return name


def digest(world: "World") -> int:
    """64 bits of a hash of the canonical form.

    Of n states, two have one digest with a chance of n * n / 2 ** 65: one in a million for 6 M.
    """
    # version 2 knows no references, so equal values give equal bytes
    return int.from_bytes(blake2b(dumps(canonical(world), 2), digest_size=8).digest(), "little")


@on_settled
def canonical(world: "World") -> tuple:
    """Nested tuples of numbers and bytes."""
    scheduler, cache, ghost = world.scheduler, world.cache, world.ghost
    slots, blocks = _Names(), _Names()
    lives = world.lives
    names = {live.request_id: index for index, live in enumerate(lives)}
    flights = list(scheduler.holdings.flights)
    steps = {flight.batch.step: index for index, flight in enumerate(flights)}
    requests = tuple([_live(live, names, slots, blocks, steps, world) for live in lives])
    in_flight = tuple([_flight(flight, names, slots, blocks, steps) for flight in flights])
    nodes = _tree(sorted(cache.nodes(), key=_key_of), slots, blocks)
    announced = tuple(
        sorted(
            (key, names[by.writer], steps[by.step])
            for key, by in scheduler.holdings.announced.items()
        )
    )
    prev: tuple = ()
    if flights and any(row.prev_row >= 0 for row in flights[0].batch.rows):
        prev = tuple(map(tuple, ghost.prev_tokens[1]))
    states = cache.state_pool
    held = tuple(
        [
            (int(states.status[slot]), states.position[slot], states.pins[slot])
            + (steps.get(states.step[slot], -1), *ghost.states[slot])
            for slot in slots
        ]
    )
    size = cache.block_size
    kv = tuple([tuple(ghost.kv[b * size : b * size + size]) for b in blocks])
    draft_kv: tuple = ()
    if cache.lookahead:
        draft_kv = tuple([tuple(ghost.draft_kv[b * size : b * size + size]) for b in blocks])
    counts = (world.num_submitted, world.num_disturbed, cache.block_pool.num_free)
    run = _run(scheduler.queues.run)
    return (counts, requests, in_flight, nodes, announced, prev, held, kv, draft_kv, run)


def _run(run: Run | None) -> tuple:
    return () if run is None else (True, *sorted(run.moved))


def _live(
    live: LiveRequest,
    names: dict[str, int],
    slots: _Names,
    blocks: _Names,
    steps: dict[int, int],
    world: "World",
) -> tuple:
    request, cache = live.request, world.cache
    head = (
        int(request.request_id[1:]) % len(world.scope.requests),
        STATUSES[request.status],
        live.num_computed,
        live.token_ids.tobytes(),
        # whom it waited for matters as long as that one is there
        tuple(sorted((names[w], key) for w, key in live.deferred_to.items() if w in names)),
    )
    if live.node is None:
        return head
    decode_states = [
        (node.key, cache.find(node.key) is node, slots[slot]) for node, slot in live.decode_states
    ]
    return (
        *head,
        world.ghost.truths[request.request_id].tokens.tobytes(),
        tuple(live.drafts),
        live.node.key,
        tuple([blocks[block] for block in live.table.tolist()]),
        tuple([slots[slot] for slot in live.slots]),
        live.grid_state and (live.grid_state[0], slots[live.grid_state[1]]),
        _kept(live.kept, slots, steps),
        tuple(decode_states),
        tuple([(position, int(kind)) for position, kind in live.plan.items()]),
        live.prefill_end,
        live.kv_cached,
        live.scheduled_end,
        live.num_proven,
        live.num_in_flight,
        steps.get(live.last_step, -1),
        live.last_row if live.num_in_flight else -1,
        live.is_discarded,
    )


def _kept(states: Iterable[KeptState], slots: _Names, steps: dict[int, int]) -> tuple:
    return tuple([(k.position, slots[k.slot], int(k.kind), steps.get(k.step, -1)) for k in states])


def _flight(
    flight: Flight, names: dict[str, int], slots: _Names, blocks: _Names, steps: dict[int, int]
) -> tuple:
    rows = [
        (
            names[row.request_id],
            row.is_decode,
            row.start,
            row.end,
            bytes(row.token_ids),
            row.prev_row,
            row.src_slot if row.src_slot < 0 else slots[row.src_slot],
            tuple([slots[slot] for slot in row.dst_slots]),
            tuple([blocks[block] for block in row.block_table.tolist()]),
            row.kv_start,
            row.samples,
            row.sample_index,
            bytes(row.next_token_ids),
            _kept(kept, slots, steps),
        )
        for row, kept in zip(flight.batch.rows, flight.exports, strict=True)
    ]
    pinned = sorted([slots[slot] for slot in flight.pinned_slots])
    freed = sorted([blocks[block] for block in flight.freed_blocks])
    return (flight.has_failed, tuple(rows), tuple(pinned), tuple(freed))


def _key_of(node: Node) -> bytes:
    return node.key


def _tree(nodes: list[Node], slots: _Names, blocks: _Names) -> tuple:
    """Cached units by key; of times only the order is told."""
    used = {n.key: i for i, n in enumerate(sorted(nodes, key=lambda n: (n.last_used, n.serial)))}
    with_state = [node for node in nodes if node.slot >= 0]
    hit = {n.key: i for i, n in enumerate(sorted(with_state, key=lambda n: (n.last_hit, n.serial)))}
    return tuple(
        [
            (
                node.key,
                node.references,
                used[node.key],
                tuple([blocks[block] for block in node.blocks]),
                (slots[node.slot], int(node.kind), node.was_hit, hit[node.key])
                if node.slot >= 0
                else (),
            )
            for node in nodes
        ]
    )
