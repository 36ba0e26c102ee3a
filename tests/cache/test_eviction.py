"""The queue of what goes next, against a sorted list."""

from dataclasses import dataclass
from random import Random

from torch_kda.cache.eviction import EvictionQueue


@dataclass
class Item:
    serial: int


def test_eviction_queue_against_a_list():
    """Any mix of put, move and discard leaves the order that sorting gives."""
    rng = Random(0)
    queue: EvictionQueue[Item] = EvictionQueue()
    items = [Item(serial) for serial in range(20)]
    ranks: dict[int, int] = {}
    for _ in range(5000):
        item = rng.choice(items)
        if rng.random() < 0.6:
            ranks[item.serial] = rng.randrange(8)
            queue.put(item, ranks[item.serial])
        else:
            ranks.pop(item.serial, None)
            queue.discard(item)
        expected = sorted(ranks, key=lambda serial: (ranks[serial], serial))
        first = queue.first()
        assert (first.serial if first else None) == (expected[0] if expected else None)
        assert len(queue) == len(expected) and (item in queue) == (item.serial in ranks)
    assert [item.serial for item in queue.ordered()] == expected


def test_eviction_queue_forgets_what_has_left():
    queue: EvictionQueue[Item] = EvictionQueue()
    item = Item(0)
    for rank in range(10_000):
        queue.put(item, rank)
    assert len(queue._heap) < 200
