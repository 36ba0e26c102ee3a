"""The tree of cached prefixes: what a prompt finds, what becomes visible, what goes."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from .block_pool import BlockPool
from .eviction import EvictionOrder
from .integrity import check_prefix_cache
from .node import NO_SLOT, Node, leads_to_state, max_states_below, worthlessness
from .policy import Kind
from .state_pool import SlotStatus, StatePool


@dataclass(slots=True)
class Match:
    """What a prompt finds; pinned until `cancel`, or `release` (KV) and `unpin` (source)."""

    node: Node  # deepest unit of KV
    source: Node | None  # carries the deepest usable state
    blocks: list[int]  # KV blocks of [0, node.depth * unit)


@dataclass(slots=True)
class CacheCounters:
    """Since start. queried = hit + lost + missed, in tokens."""

    queried_tokens: int = 0
    hit_tokens: int = 0  # KV and state were there
    lost_tokens: int = 0  # KV was there, but no state so deep
    missed_tokens: int = 0
    evictions_for_states: int = 0  # states dropped because a slot was needed
    evictions_for_kv: int = 0  # units of KV dropped because blocks were needed
    states_lost_with_kv: int = 0  # states dropped with their KV
    states_over_path_cap: int = 0
    duplicate_states: int = 0  # written, but the key was READY already
    published_states: dict[str, int] = field(default_factory=dict)  # by kind


class PrefixCache:
    """Finds, pins, publishes and evicts prefixes. Owns both pools.

    A state is only kept while every unit of KV above it is: KV goes from the leaves, and takes the
    state of its unit along.

    Args:
        num_blocks, block_size: KV blocks, and tokens of each.
        num_slots: state slots.
        unit: tokens of a key, a multiple of block_size.
        root: key of the empty prefix (`hashing.root_key`).
        lookahead: tokens after a position that its cached KV depends on (draft layers); 0 without.
        max_states_per_path: states kept from the root to any leaf.
    """

    __slots__ = (
        "_node_of_slot",
        "_nodes",
        "_num_referenced",
        "_order",
        "_serial",
        "_tick",
        "block_pool",
        "block_size",
        "blocks_per_unit",
        "counters",
        "lookahead",
        "max_states_per_path",
        "root",
        "root_key",
        "state_pool",
        "unit",
    )

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        unit: int,
        root: bytes = b"",
        lookahead: int = 0,
        max_states_per_path: int = 32,
    ) -> None:
        if block_size < 1 or unit < 1 or unit % block_size:
            raise ValueError(
                f"PrefixCache: unit must be a multiple of block_size, got {unit} and {block_size}"
            )
        if not 0 <= lookahead <= unit:
            raise ValueError(f"PrefixCache: lookahead must be in [0, unit={unit}], got {lookahead}")
        if max_states_per_path < 1:
            raise ValueError(
                f"PrefixCache: max_states_per_path must be >= 1, got {max_states_per_path}"
            )
        self.block_pool = BlockPool(num_blocks)
        self.state_pool = StatePool(num_slots)
        self.block_size = block_size
        self.unit = unit
        self.blocks_per_unit = unit // block_size
        self.root_key = root
        self.lookahead = lookahead
        self.max_states_per_path = max_states_per_path
        self.counters = CacheCounters()
        self.root = Node(root, None, (), 0)
        self._nodes: dict[bytes, Node] = {}
        self._node_of_slot: list[Node | None] = [None] * num_slots
        self._num_referenced = 0  # nodes with references
        self._serial = 0
        self._tick = 0
        self._order = EvictionOrder()

    @property
    def drop(self) -> int:
        """Tokens that a hit is short of its KV because of draft layers."""
        return self.unit if self.lookahead else 0

    @property
    def num_available_blocks(self) -> int:
        """Blocks that are free or can be made free at once."""
        unpinned = len(self._nodes) - self._num_referenced
        return self.block_pool.num_free + unpinned * self.blocks_per_unit

    @property
    def num_available_slots(self) -> int:
        """Slots that are free or can be made free at once."""
        return self.state_pool.num_free + self.state_pool.num_evictable

    @property
    def num_cached_states(self) -> int:
        return self.state_pool.num_slots - self._node_of_slot.count(None)

    # lookup

    def match(self, keys: list[bytes], max_units: int) -> Match:
        """Finds the longest cached KV along `keys` and the deepest state on it, and pins both.

        The state lies at most `max_units` deep: a request has to compute its last token.
        """
        path = self._path_of(keys)
        node = path[0] if path else self.root
        source = None
        for step in path:
            if step.references == 0:
                self._num_referenced += 1
            step.references += 1
            if source is None and step.slot >= 0 and step.depth <= max_units:
                source = step
        blocks = [block for step in reversed(path) for block in step.blocks]
        self._requeue(node)
        if source is not None:
            self.pin(source.slot)
        return Match(node, source, blocks)

    def cancel(self, match: Match) -> None:
        """Takes a match back, as if it had not been."""
        if match.source is not None:
            self.unpin(match.source.slot)
        self._unreference(match.node)

    def accept(self, match: Match, num_tokens: int, max_units: int) -> None:
        """The request runs from this match: counts its tokens, and marks what it uses as recent."""
        hit = match.source.depth if match.source else 0
        known = min(match.node.depth, max_units)
        self.counters.queried_tokens += num_tokens
        self.counters.hit_tokens += hit * self.unit
        self.counters.lost_tokens += (known - hit) * self.unit
        self.counters.missed_tokens += num_tokens - known * self.unit
        self._tick += 1
        match.node.last_used = self._tick
        if match.source is not None:
            match.source.last_hit = self._tick
            match.source.was_hit = True
            self._refresh(match.source)

    def release(self, node: Node) -> None:
        """A request that had pinned the path down to `node` no longer uses it."""
        self._tick += 1
        node.last_used = self._tick
        self._unreference(node)

    def pin(self, slot: int) -> None:
        """A step in flight reads the slot: it is neither evicted nor freed before `unpin`."""
        self.state_pool.pin(slot)
        self._requeue_slot(slot)

    def unpin(self, slot: int) -> None:
        """The step that read the slot has retired."""
        self.state_pool.unpin(slot)
        self._requeue_slot(slot)

    def has_state(self, key: bytes) -> bool:
        """Whether a state with this key is visible."""
        node = self._nodes.get(key)
        return node is not None and node.slot >= 0

    def promote(self, key: bytes, kind: Kind) -> None:
        """Somebody wants the state of this key for `kind`: from now on it counts as that."""
        node = self._nodes.get(key)
        if node is not None and node.slot >= 0:
            self._promote(node, kind)

    def num_cached_units(self, keys: list[bytes]) -> int:
        """How many units of KV along `keys` are there. Cheap: pins nothing, walks nothing."""
        # KV goes from the leaves, so what is there is a prefix
        nodes = self._nodes
        low, high = 0, len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in nodes:
                low = middle
            else:
                high = middle - 1
        return low

    def find(self, key: bytes) -> Node | None:
        """The cached unit with this key."""
        return self._nodes.get(key)

    def nodes(self) -> Iterable[Node]:
        """All cached units, in the order of their publication."""
        return self._nodes.values()

    # publishing: only what a retired step has written

    def extend(self, node: Node, key: bytes, blocks: tuple[int, ...]) -> Node:
        """Makes the unit after `node` known under `key`, and extends the caller's pin to it.

        The blocks belong to the cache from now on. If the key was known, its older node is returned
        instead, and the caller keeps the blocks.
        """
        child = self._nodes.get(key)
        if child is None:
            self._serial += 1
            self._tick += 1
            child = Node(key, node, blocks, self._serial)
            child.last_used = self._tick
            self._nodes[key] = child
            node.children[key] = child
            if len(node.children) == 2:
                self._refresh_from(node)
        assert child.parent is node, f"{child!r} is not below {node!r}"
        if child.references == 0:
            self._num_referenced += 1
        child.references += 1
        self._requeue(child)
        return child

    def publish(self, node: Node, slot: int, kind: Kind) -> bool:
        """Gives a WRITTEN slot the key of `node`. Returns whether it did.

        If the node has a state, or the path has its number of them, the slot is freed instead.
        NOTE: the caller holds a pin on `node` (holdings.py), so that its KV is there.
        """
        assert self.state_pool.position[slot] == node.depth * self.unit, (
            f"{slot=} holds position {self.state_pool.position[slot]}, {node!r}"
        )
        if node.slot >= 0:
            self.counters.duplicate_states += 1
            self.state_pool.release(slot)
            self._promote(node, kind)
            return False
        if not self._make_path_room(node, kind):
            self.counters.states_over_path_cap += 1
            self.state_pool.release(slot)
            return False
        self._tick += 1
        self.state_pool.mark_ready(slot)
        node.slot = slot
        node.kind = kind
        node.last_hit = self._tick
        node.was_hit = False
        self._node_of_slot[slot] = node
        self._refresh(node)
        if node.parent is not None:
            self._refresh_from(node.parent)
        published = self.counters.published_states
        published[kind.name] = published.get(kind.name, 0) + 1
        return True

    # room

    def allocate_slot(self, kind: Kind | None = None) -> int | None:
        """A slot for a running request, or for a state of some kind; None if none is to be had.

        A transient state only takes the place of a spent one.
        """
        if self.state_pool.num_free == 0 and not self.evict_state(
            spent_only=kind is not None and kind.is_transient
        ):
            return None
        return self.state_pool.allocate()

    def allocate_blocks(self, count: int) -> list[int] | None:
        """KV blocks, made free as needed; None, and nothing evicted, if there are not enough."""
        if count > self.num_available_blocks:
            return None
        while self.block_pool.num_free < count:
            evicted = self.evict_kv()
            assert evicted, f"{count=} {self.num_available_blocks=}"
        return self.block_pool.allocate(count)

    def evict_state(self, *, spent_only: bool = False) -> bool:
        """Frees the slot of a spent state, else of the least recently hit one, if there is one."""
        node = self._order.next_state(spent_only=spent_only)
        if node is None:
            return False
        self.counters.evictions_for_states += 1
        self._drop_state(node)
        return True

    def evict_kv(self) -> bool:
        """Frees one unit: KV below all states first, then the leaf that was hit longest ago."""
        node = self._order.next_kv()
        if node is None:
            return False
        self.counters.evictions_for_kv += 1
        self._remove(node)
        return True

    def forget(self, node: Node, slot: int) -> None:
        """Drops a decode state that its maker has newer ones for, unless others want it."""
        is_own = node.slot == slot and node.kind is Kind.DECODE and not node.was_hit
        if is_own and not self.state_pool.pins[slot]:
            self._drop_state(node)

    def clear(self) -> None:
        """Drops everything that no request uses."""
        while (node := self._order.next_kv()) is not None:
            self._remove(node)
        while (node := self._order.next_state()) is not None:
            self._drop_state(node)

    # tree

    def _path_of(self, keys: list[bytes]) -> list[Node]:
        """The cached nodes of `keys`, deepest first."""
        depth = self.num_cached_units(keys)
        path = []
        node = self._nodes[keys[depth - 1]] if depth else None
        while node is not None and node.depth:
            path.append(node)
            node = node.parent
        return path

    def _unreference(self, node: Node) -> None:
        step: Node | None = node
        while step is not None and step.depth:
            step.references -= 1
            if step.references == 0:
                self._num_referenced -= 1
            step = step.parent
        self._requeue(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and not node.references and not node.children, f"{node!r}"
        had_state = node.slot >= 0
        if had_state:
            self.counters.states_lost_with_kv += 1
            self._free_state(node)
        self._order.discard(node)
        del self._nodes[node.key]
        del parent.children[node.key]
        parent.last_used = max(parent.last_used, node.last_used)
        self.block_pool.release(node.blocks)
        if had_state or len(parent.children) == 1:
            self._refresh_from(parent)
        self._requeue(parent)

    def _drop_state(self, node: Node) -> None:
        self._free_state(node)
        self._requeue(node)
        if node.parent is not None:
            self._refresh_from(node.parent)

    def _free_state(self, node: Node) -> None:
        slot = node.slot
        assert self.state_pool.status[slot] is SlotStatus.READY and not self.state_pool.pins[slot]
        self.state_pool.release(slot)
        self._node_of_slot[slot] = None
        node.slot = NO_SLOT
        node.is_spent = False

    def _promote(self, node: Node, kind: Kind) -> None:
        if kind < node.kind:
            node.kind = kind
            self._refresh(node)

    def _refresh_from(self, node: Node) -> None:
        """Something below changed: looks again at the nearest state at or above `node`."""
        step: Node | None = node
        while step is not None and step.slot < 0:
            step = step.parent
        if step is not None:
            self._refresh(step)

    def _refresh(self, node: Node) -> None:
        node.is_spent = node.kind.is_transient and not node.was_hit and leads_to_state(node)
        self._requeue(node)

    def _requeue_slot(self, slot: int) -> None:
        node = self._node_of_slot[slot]
        if node is not None:
            self._requeue(node)

    def _requeue(self, node: Node) -> None:
        is_read = node.slot >= 0 and self.state_pool.pins[node.slot] > 0
        self._order.update(node, is_read=is_read)

    def _make_path_room(self, node: Node, kind: Kind) -> bool:
        """Drops the least valuable of a full path; False if that is the new state itself."""
        above = []
        step = node.parent
        while step is not None:
            if step.slot >= 0:
                above.append(step)
            step = step.parent
        below = max_states_below(node)
        while len(above) + 1 + below > self.max_states_per_path:
            victims = [n for n in above if not self.state_pool.pins[n.slot]]
            victim = max(victims, key=worthlessness, default=None)
            # the deepest state of a path always stays, so the new one only gives way if there is a
            # deeper one
            if victim is None or (below and kind > victim.kind):
                return False
            above.remove(victim)
            self.counters.states_over_path_cap += 1
            self._drop_state(victim)
        return True

    def eviction_members(self) -> dict[str, set[int]]:
        """Serial numbers of the nodes that may go, by the queue they stand in."""
        return self._order.members()

    def check_integrity(self) -> None:
        """Compares what is kept at hand with the tree. For tests; raises AssertionError."""
        check_prefix_cache(self)
