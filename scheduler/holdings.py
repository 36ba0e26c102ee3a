"""What requests hold of the two pools, and how it passes to the cache or back."""

from collections import deque

from ..cache.hashing import extend_keys
from ..cache.policy import Kind
from ..cache.prefix_cache import PrefixCache
from ..cache.state_pool import SlotStatus
from .live import BlockTable, Flight, KeptState, LiveRequest


class Holdings:
    """Publishes, keeps and releases for the scheduler. Knows steps in flight, but no order and no
    budget.

    Of a request's block table, the first `node.depth` units are the cache's own blocks, pinned by
    the path down to `node`; what follows belongs to the request.
    """

    def __init__(self, cache: PrefixCache, *, num_decode_states: int) -> None:
        self.cache = cache
        self.num_decode_states = num_decode_states
        self.flights: deque[Flight] = deque()  # oldest first

    def extend_keys(self, live: LiveRequest) -> None:
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
        """Key of the first `position` tokens; None if they aren't all known yet."""
        index = position // self.cache.unit - 1
        if index >= len(live.keys):
            self.extend_keys(live)
        return live.keys[index] if index < len(live.keys) else None

    def fork(self, live: LiveRequest, position: int, kind: Kind) -> int | None:
        """Keeps the running state, which is the one after `position` tokens, and goes on in a fresh
        slot.

        Returns the slot to read in this row, pinned; None if there is no fresh slot to be had.
        """
        fresh = self.cache.allocate_slot(kind)
        if fresh is None:
            return None
        running = live.slots[0]
        live.slots[0] = fresh
        self._keep(live, running, position, kind)
        self.cache.pin(running)
        return running

    def keep_scratch(self, live: LiveRequest, position: int, slot: int) -> None:
        """Keeps a verified state that lies in a scratch slot, if a fresh one can take its place."""
        fresh = self.cache.allocate_slot(Kind.DECODE)
        if fresh is None:
            return
        live.slots[live.slots.index(slot)] = fresh
        self._keep(live, slot, position, Kind.DECODE)

    def _keep(self, live: LiveRequest, slot: int, position: int, kind: Kind) -> None:
        states = self.cache.state_pool
        states.reserve(slot, position, live.last_step)
        if live.num_in_flight == 0:
            states.mark_written(slot)
        live.kept.append(KeptState(position, slot, kind, live.last_step))

    def publish(self, live: LiveRequest, step: int) -> None:
        """Makes visible what is complete after `step` has retired: full units of KV, and kept
        states.
        """
        self._publish_kv(live)
        if live.kept:
            states = self.cache.state_pool
            rest = []
            for kept in live.kept:
                if kept.step <= step and states.status[kept.slot] is SlotStatus.RESERVED:
                    states.mark_written(kept.slot)
                if kept.step <= step and kept.position <= live.num_proven:
                    self._publish_state(live, kept)
                else:
                    rest.append(kept)
            live.kept = rest

    def _publish_kv(self, live: LiveRequest) -> None:
        cache, node = self.cache, live.node
        units = live.num_proven // cache.unit
        assert node is not None
        if node.depth >= units:
            return
        if len(live.keys) < units:
            self.extend_keys(live)
        width = cache.blocks_per_unit
        while node.depth < units:
            first = node.depth * width
            own = tuple(live.table.ids[first : first + width].tolist())
            node = cache.extend(node, live.keys[node.depth], own)
            if node.blocks is not own:
                # another request was first: from now on both use its blocks
                live.table.replace(first, node.blocks)
                self._free_blocks(live, own)
        live.node = node

    def _free_blocks(self, live: LiveRequest, blocks: tuple[int, ...]) -> None:
        if live.num_in_flight:
            # the newest flight is the last that can read them
            self.flights[-1].freed_blocks.extend(blocks)
        else:
            self.cache.block_pool.release(blocks)

    def _publish_state(self, live: LiveRequest, kept: KeptState) -> None:
        node = self.cache.find(live.keys[kept.position // self.cache.unit - 1])
        assert node is not None, f"{kept} has no KV"
        if not self.cache.publish(node, kept.slot, kept.kind) or kept.kind is not Kind.DECODE:
            return
        live.decode_states.append((node, kept.slot))
        if len(live.decode_states) > self.num_decode_states:
            self.cache.forget(*live.decode_states.pop(0))

    def release(self, live: LiveRequest) -> None:
        """Gives back all that a request holds whose steps have all retired.

        Its running state becomes a cache entry if it lies on the grid and can be trusted.
        """
        assert live.num_in_flight == 0 and live.node is not None
        states = self.cache.state_pool
        if live.is_dirty:
            for kept in live.kept:
                states.release(kept.slot)
        else:
            self._keep_last(live)
            self.publish(live, live.last_step)
            for kept in live.kept:
                states.release(kept.slot)
        for slot in live.slots:
            states.release(slot)
        own = live.table.ids[live.node.depth * self.cache.blocks_per_unit :].tolist()
        self.cache.block_pool.release(own)
        self.cache.release(live.node)
        live.node = None
        live.table = BlockTable()
        live.slots, live.kept, live.decode_states = [], [], []
        live.grid_state = None
        live.plan = {}
        live.drafts = ()
        live.is_dirty = live.is_discarded = False

    def _keep_last(self, live: LiveRequest) -> None:
        if live.grid_state is not None:
            position, slot = live.grid_state
            live.slots.remove(slot)
            self._keep(live, slot, position, Kind.DECODE)
        position = live.request.num_computed_tokens
        if position and position % self.cache.unit == 0 and position <= live.num_proven:
            key = self.key_at(live, position)
            if key is not None and not self.cache.has_state(key):
                self._keep(live, live.slots.pop(0), position, Kind.DECODE)

    def check_integrity(self, lives: list[LiveRequest]) -> None:
        """Every block and slot has exactly one owner, every pin a reader. Slow; for tests."""
        cache = self.cache
        cache.check_integrity()
        self._check_blocks(lives)
        self._check_slots(lives)

    def _check_blocks(self, lives: list[LiveRequest]) -> None:
        cache, width = self.cache, self.cache.blocks_per_unit
        owned = [block for flight in self.flights for block in flight.freed_blocks]
        references: dict[bytes, int] = {}
        for live in lives:
            node = live.node
            if node is None:
                assert not len(live.table) and not live.slots and not live.kept
                continue
            ids = live.table.ids.tolist()
            owned += ids[node.depth * width :]
            while node.depth:
                assert ids[(node.depth - 1) * width : node.depth * width] == list(node.blocks)
                assert live.keys[node.depth - 1] == node.key
                references[node.key] = references.get(node.key, 0) + 1
                assert node.parent is not None
                node = node.parent
        for node in cache.nodes():
            owned += node.blocks
            assert node.references == references.get(node.key, 0), f"{node!r} {references=}"
        assert len(set(owned)) == len(owned), "a block has two owners"
        assert len(owned) + cache.block_pool.num_free == cache.block_pool.num_blocks, (
            f"{len(owned)} blocks are owned and {cache.block_pool.num_free} free, "
            f"of {cache.block_pool.num_blocks}"
        )

    def _check_slots(self, lives: list[LiveRequest]) -> None:
        states = self.cache.state_pool
        running = [slot for live in lives for slot in live.slots]
        kept = [k for live in lives for k in live.kept]
        kept += [k for flight in self.flights for row in flight.exports for k in row]
        pins = [0] * states.num_slots
        for flight in self.flights:
            for slot in flight.pinned_slots:
                pins[slot] += 1
        assert pins == states.pins, f"{pins=} {states.pins=}"
        expected = {
            SlotStatus.RUNNING: running,
            SlotStatus.RESERVED: [k.slot for k in kept if self._is_in_flight(k.step)],
            SlotStatus.WRITTEN: [k.slot for k in kept if not self._is_in_flight(k.step)],
        }
        for status, slots in expected.items():
            actual = [slot for slot, s in enumerate(states.status) if s is status]
            assert sorted(slots) == actual, f"{status!r}: owned {sorted(slots)}, marked {actual}"
        assert all(states.position[k.slot] == k.position for k in kept)

    def _is_in_flight(self, step: int) -> bool:
        return any(flight.batch.step == step for flight in self.flights)
