"""An order in which nodes of the prefix cache may go."""

from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar


class Serial(Protocol):
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
