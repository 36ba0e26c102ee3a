"""State slots as numbers: who may read or write each of them now."""

from enum import IntEnum


class SlotStatus(IntEnum):
    """Where a slot stands in its life."""

    FREE = 0
    RUNNING = 1  # one request reads and writes it; never found by others
    RESERVED = 2  # a step in flight writes the state that is to be kept
    WRITTEN = 3  # that step has retired; not visible yet
    READY = 4  # keyed: requests may read it, nobody writes it
    DOOMED = 5  # to be freed as soon as the steps that read it have retired


class StatePool:
    """Slots of states and conv windows. A number means the same place in every KDA layer.

    FREE -> RUNNING -> FREE for a request's own slot; FREE -> RESERVED -> WRITTEN -> READY -> FREE
    for a kept state. A request's own slot may become a kept one (RUNNING -> RESERVED, WRITTEN). A
    position is set when the slot is reserved and never changes until it is free.
    """

    __slots__ = ("_free", "num_evictable", "num_slots", "pins", "position", "status", "step")

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"StatePool: num_slots must be >= 1, got {num_slots}")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))  # taken from the end
        self.status = [SlotStatus.FREE] * num_slots
        self.position = [-1] * num_slots  # tokens; -1: none, or a running slot
        self.step = [-1] * num_slots  # step that writes a RESERVED or WRITTEN slot
        self.pins = [0] * num_slots  # steps in flight that read the slot
        self.num_evictable = 0  # READY and without pins

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """FREE -> RUNNING; the caller has made sure that a slot is free."""
        slot = self._free.pop()
        self.status[slot] = SlotStatus.RUNNING
        return slot

    def reserve(self, slot: int, position: int, step: int) -> None:
        """RUNNING -> RESERVED: step `step` leaves the state after `position` tokens here."""
        assert self.status[slot] is SlotStatus.RUNNING, f"{slot=} {self.status[slot]!r}"
        self.status[slot] = SlotStatus.RESERVED
        self.position[slot] = position
        self.step[slot] = step

    def mark_written(self, slot: int) -> None:
        """RESERVED -> WRITTEN: the step retired without error."""
        assert self.status[slot] is SlotStatus.RESERVED, f"{slot=} {self.status[slot]!r}"
        self.status[slot] = SlotStatus.WRITTEN

    def mark_ready(self, slot: int) -> None:
        """WRITTEN -> READY: the state has a key from now on."""
        assert self.status[slot] is SlotStatus.WRITTEN, f"{slot=} {self.status[slot]!r}"
        self.status[slot] = SlotStatus.READY
        self.num_evictable += not self.pins[slot]

    def pin(self, slot: int) -> None:
        """A step that is about to be in flight reads the slot."""
        assert self.status[slot] not in (SlotStatus.FREE, SlotStatus.DOOMED), f"{slot=}"
        if self.pins[slot] == 0 and self.status[slot] is SlotStatus.READY:
            self.num_evictable -= 1
        self.pins[slot] += 1

    def unpin(self, slot: int) -> None:
        """The step has retired. The last one frees a DOOMED slot."""
        assert self.pins[slot] > 0, f"{slot=} is not pinned"
        self.pins[slot] -= 1
        if self.pins[slot] == 0:
            if self.status[slot] is SlotStatus.READY:
                self.num_evictable += 1
            elif self.status[slot] is SlotStatus.DOOMED:
                self._free_now(slot)

    def release(self, slot: int) -> None:
        """Any status -> FREE, or DOOMED while a step in flight still reads the slot."""
        assert self.status[slot] not in (SlotStatus.FREE, SlotStatus.DOOMED), (
            f"{slot=} {self.status[slot]!r}"
        )
        if self.pins[slot]:
            self.status[slot] = SlotStatus.DOOMED
            return
        if self.status[slot] is SlotStatus.READY:
            self.num_evictable -= 1
        self._free_now(slot)

    def _free_now(self, slot: int) -> None:
        self.status[slot] = SlotStatus.FREE
        self.position[slot] = -1
        self.step[slot] = -1
        self._free.append(slot)

    def check_integrity(self) -> None:
        """Asserts that the free list, status, pins and counts agree."""
        assert len(set(self._free)) == len(self._free), "a slot is free twice"
        free = {slot for slot, status in enumerate(self.status) if status is SlotStatus.FREE}
        assert free == set(self._free), f"{free=} listed={self._free}"
        assert all(self.pins[slot] == 0 and self.position[slot] == -1 for slot in free)
        evictable = sum(
            status is SlotStatus.READY and not pins
            for status, pins in zip(self.status, self.pins, strict=True)
        )
        assert evictable == self.num_evictable, f"{evictable=} {self.num_evictable=}"
        doomed = [slot for slot, status in enumerate(self.status) if status is SlotStatus.DOOMED]
        assert all(self.pins[slot] for slot in doomed), f"{doomed=} hold slots without a reader"
