"""In what order the prefix cache gives up states and KV."""

from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from .node import Node


class Serial(Protocol):
    """What an `EvictionQueue` can hold."""

    serial: int  # unique, so that equal ranks have one order


Item = TypeVar("Item", bound=Serial)


class EvictionQueue(Generic[Item]):
    """Items by rank, lowest first, then by serial number. Membership changes in O(log n)."""

    __slots__ = ("_heap", "_members")

    def __init__(self) -> None:
        self._members: dict[int, tuple[int, Item]] = {}  # serial -> rank, item
        self._heap: list[tuple[int, int]] = []  # rank, serial; also of what has left since

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, item: Item) -> bool:
        return item.serial in self._members

    def put(self, item: Item, rank: int) -> None:
        """Adds the item, or moves it to another rank."""
        entry = (rank, item.serial)
        if self._is_current(entry):
            return
        self._members[item.serial] = (rank, item)
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [(rank, serial) for serial, (rank, _) in self._members.items()]
            heapify(self._heap)

    def discard(self, item: Item) -> None:
        """Takes the item out; nothing happens if it is not a member."""
        self._members.pop(item.serial, None)

    def first(self) -> Item | None:
        """The member that goes next; it stays a member."""
        while self._heap and not self._is_current(self._heap[0]):
            heappop(self._heap)
        return self._members[self._heap[0][1]][1] if self._heap else None

    def ordered(self) -> list[Item]:
        """All members, the next to go first."""
        members = self._members
        return [members[s][1] for s in sorted(members, key=lambda s: (members[s][0], s))]

    def _is_current(self, entry: tuple[int, int]) -> bool:
        member = self._members.get(entry[1])
        return member is not None and member[0] == entry[0]


class EvictionOrder:
    """What may go now, states and KV apart. A node is queued wherever its present condition says.

    States: spent ones first, then all by their last hit. KV: leaves without a state first, by their
    last use, then leaves with one, by its last hit.
    """

    __slots__ = ("_bare_leaves", "_spent_states", "_state_leaves", "_states")

    def __init__(self) -> None:
        self._bare_leaves: EvictionQueue[Node] = EvictionQueue()
        self._state_leaves: EvictionQueue[Node] = EvictionQueue()
        self._spent_states: EvictionQueue[Node] = EvictionQueue()
        self._states: EvictionQueue[Node] = EvictionQueue()

    def next_state(self, *, spent_only: bool = False) -> Node | None:
        """The node whose state goes next."""
        node = self._spent_states.first()
        return node if node is not None or spent_only else self._states.first()

    def next_kv(self) -> Node | None:
        """The leaf whose KV goes next."""
        return self._bare_leaves.first() or self._state_leaves.first()

    def update(self, node: Node, *, is_read: bool) -> None:
        """Looks at the node again; `is_read`: a step in flight reads its state."""
        has_state = node.slot >= 0
        is_leaf = node.depth > 0 and not node.references and not node.children
        _put(self._bare_leaves, node, node.last_used, is_leaf and not has_state)
        _put(self._state_leaves, node, node.last_hit, is_leaf and has_state)
        is_free = has_state and not is_read
        _put(self._states, node, node.last_hit, is_free)
        _put(self._spent_states, node, node.last_hit, is_free and node.is_spent)

    def discard(self, node: Node) -> None:
        """The node is gone: takes it out of every queue."""
        for queue in self._queues():
            queue.discard(node)

    def members(self) -> dict[str, set[int]]:
        """Serial numbers by queue."""
        names = ("bare_leaves", "state_leaves", "spent_states", "states")
        return {
            name: {node.serial for node in queue.ordered()}
            for name, queue in zip(names, self._queues(), strict=True)
        }

    def _queues(self) -> tuple[EvictionQueue[Node], ...]:
        return (self._bare_leaves, self._state_leaves, self._spent_states, self._states)


def _put(queue: EvictionQueue[Node], node: Node, rank: int, belongs: bool) -> None:
    if belongs:
        queue.put(node, rank)
    else:
        queue.discard(node)
