"""What requests hold of the two pools, and how it passes to the cache or back."""

from array import array
from collections import deque
from dataclasses import dataclass

from ..cache.hashing import extend_keys
from ..cache.policy import Kind
from ..cache.prefix_cache import PrefixCache
from ..cache.state_pool import SlotStatus
from .live import Flight, KeptState, LiveRequest


@dataclass(frozen=True, slots=True)
class Announced:
    """A state that a step in flight is about to make visible."""

    writer: str  # request_id
    step: int
    depth: int  # units


class Holdings:
    """Keeps, publishes and releases. Knows what is in flight, but neither order nor budget.

    Of a request's block table, the first `node.depth` units are the cache's own blocks, pinned by
    the path down to `node`; what follows belongs to the request.
    """

    def __init__(self, cache: PrefixCache, *, num_decode_states: int) -> None:
        self.cache = cache
        self.num_decode_states = num_decode_states
        self.flights: deque[Flight] = deque()  # oldest first
        self.announced: dict[bytes, Announced] = {}  # by key

    # keys

    def extend_keys(self, live: LiveRequest) -> None:
        """Keys of the units that have been filled since the last call."""
        cache = self.cache
        extend_keys(
            live.keys,
            live.token_ids,
            cache.root_key,
            cache.unit,
            lookahead=cache.lookahead,
            extras=live.extras,
        )

    def key_at(self, live: LiveRequest, position: int) -> bytes | None:
        """Key of the first `position` tokens; None if what it names isn't known yet."""
        index = position // self.cache.unit - 1
        if index >= len(live.keys):
            self.extend_keys(live)
        return live.keys[index] if index < len(live.keys) else None

    def announce(self, live: LiveRequest, position: int, step: int) -> None:
        """Others with this prefix may wait for `step` to retire."""
        key = self.key_at(live, position)
        if key is not None:
            self.announced[key] = Announced(live.request_id, step, position // self.cache.unit)

    def withdraw(self, live: LiveRequest, position: int) -> None:
        """Takes an announcement back."""
        key = self.key_at(live, position)
        if key is not None:
            self.announced.pop(key, None)

    def is_wanted(self, live: LiveRequest, position: int, kind: Kind) -> bool:
        """Whether nobody has kept, or is about to keep, the state after these tokens."""
        key = self.key_at(live, position)
        if key is None:
            return True
        self.cache.promote(key, kind)
        return not (key in self.announced or self.cache.has_state(key))

    # keeping: RUNNING -> RESERVED or WRITTEN

    def fork(self, live: LiveRequest, position: int, kind: Kind) -> int | None:
        """Keeps the running state, that after `position` tokens, and goes on in a fresh slot.

        Returns the slot to read in this row, pinned; None if there is no fresh slot to be had.
        """
        fresh = self.cache.allocate_slot(kind)
        if fresh is None:
            return None
        running = live.slots[0]
        live.slots = (fresh, *live.slots[1:])
        self._keep(live, running, position, kind)
        self.cache.pin(running)
        return running

    def keep_scratch(self, live: LiveRequest, position: int, slot: int) -> None:
        """Keeps a verified state that lies in a scratch slot, if a fresh one can take its place."""
        fresh = self.cache.allocate_slot(Kind.DECODE)
        if fresh is not None:
            live.slots = tuple([fresh if own == slot else own for own in live.slots])
            self._keep(live, slot, position, Kind.DECODE)

    def _keep(self, live: LiveRequest, slot: int, position: int, kind: Kind) -> None:
        states = self.cache.state_pool
        states.reserve(slot, position, live.last_step)
        if live.num_in_flight == 0:
            states.mark_written(slot)
        live.kept.append(KeptState(position, slot, kind, live.last_step))

    # publishing: WRITTEN -> READY

    def publish(self, live: LiveRequest, step: int) -> None:
        """Makes visible what is complete after `step` has retired: units of KV, and kept states."""
        node = live.node
        assert node is not None
        if live.num_proven >= (node.depth + 1) * self.cache.unit:
            self._publish_kv(live)
        if not live.kept:
            return
        states = self.cache.state_pool
        rest = []
        for kept in live.kept:
            # a step keeps what the one before it wrote, and exports are added when they retire
            assert kept.step <= step, f"{kept} has not been written after {step=}"
            if states.status[kept.slot] is SlotStatus.RESERVED:
                states.mark_written(kept.slot)
            if kept.position <= live.num_proven:
                self._publish_state(live, kept)
            else:
                rest.append(kept)
        live.kept = rest

    def _publish_kv(self, live: LiveRequest) -> None:
        cache, node = self.cache, live.node
        units = live.num_proven // cache.unit
        assert node is not None
        if len(live.keys) < units:
            self.extend_keys(live)
        width = cache.blocks_per_unit
        replaced: dict[int, tuple[int, ...]] = {}
        freed: list[int] = []
        while node.depth < units:
            first = node.depth * width
            own = tuple(live.table[first : first + width])
            node = cache.extend(node, live.keys[node.depth], own)
            if node.blocks is not own:
                # another request was first: from now on both use its blocks
                replaced[first] = node.blocks
                freed += own
        live.node = node
        if not replaced:
            return
        live.table = live.table[:]
        for first, blocks in replaced.items():
            live.table[first : first + width] = array("i", blocks)
        if live.num_in_flight:
            # the newest flight is the last that can read them
            self.flights[-1].freed_blocks += freed
        else:
            cache.block_pool.release(freed)

    def _publish_state(self, live: LiveRequest, kept: KeptState) -> None:
        node = self.cache.find(live.keys[kept.position // self.cache.unit - 1])
        assert node is not None, f"{kept} has no KV"
        if not self.cache.publish(node, kept.slot, kept.kind) or kept.kind is not Kind.DECODE:
            return
        live.decode_states.append((node, kept.slot))
        # one at least: a request that ends leaves its last state
        if len(live.decode_states) > max(self.num_decode_states, 1):
            self.cache.forget(*live.decode_states.pop(0))

    # giving back

    def release(self, live: LiveRequest) -> None:
        """Gives back all that a request holds whose steps have all retired.

        Its running state becomes a cache entry if it lies on the grid, unless the steps that wrote
        it don't count.
        """
        assert live.num_in_flight == 0 and live.node is not None
        if not live.is_discarded:
            self._keep_last(live)
            self.publish(live, live.last_step)
        for slot in (*live.slots, *(kept.slot for kept in live.kept)):
            self.cache.state_pool.release(slot)
        own = live.table[live.node.depth * self.cache.blocks_per_unit :]
        self.cache.block_pool.release(own)
        self.cache.release(live.node)
        live.node = None
        live.table = array("i")
        live.slots, live.kept, live.decode_states = (), [], []
        live.grid_state = None
        live.plan, live.drafts = {}, ()
        live.is_discarded = False

    def _keep_last(self, live: LiveRequest) -> None:
        if live.grid_state is not None:
            position, slot = live.grid_state
            live.slots = tuple([own for own in live.slots if own != slot])
            self._keep(live, slot, position, Kind.DECODE)
        position = live.num_computed
        if position and position % self.cache.unit == 0 and position <= live.num_proven:
            key = self.key_at(live, position)
            if key is not None and not self.cache.has_state(key):
                self._keep(live, live.slots[0], position, Kind.DECODE)
                live.slots = live.slots[1:]

    def retire(self, flight: Flight) -> None:
        """The step no longer reads anything, and nobody has to wait for it."""
        assert self.flights[0] is flight
        self.flights.popleft()
        for slot in flight.pinned_slots:
            self.cache.unpin(slot)
        self.cache.block_pool.release(flight.freed_blocks)
        step = flight.batch.step
        for key in [key for key, by in self.announced.items() if by.step == step]:
            del self.announced[key]
