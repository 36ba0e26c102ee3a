"""The prefix tree: what is found, what is kept, and what goes first."""

from array import array
from collections.abc import Sequence

import pytest
from torch_kda.cache.hashing import extend_keys
from torch_kda.cache.policy import Kind
from torch_kda.cache.prefix_cache import Node, PrefixCache
from torch_kda.cache.state_pool import SlotStatus

UNIT = 4


def make_cache(*, num_blocks: int = 32, num_slots: int = 8, block_size: int = UNIT, **options):
    return PrefixCache(
        num_blocks=num_blocks, block_size=block_size, num_slots=num_slots, unit=UNIT, **options
    )


def keys_of(tokens: Sequence[int], cache: PrefixCache) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, array("i", tokens), cache.root_key, cache.unit, lookahead=cache.lookahead)
    return keys


def publish(
    cache: PrefixCache, tokens: Sequence[int], states: dict[int, Kind], *, release: bool = True
) -> Node:
    """What a request does that computes these tokens and keeps these states."""
    keys = keys_of(tokens, cache)
    match = cache.match(keys, 0)
    node = match.node
    while node.depth < len(keys):
        blocks = cache.allocate_blocks(cache.blocks_per_unit)
        assert blocks is not None
        own = tuple(blocks)
        node = cache.extend(node, keys[node.depth], own)
        if node.blocks is not own:
            cache.block_pool.release(own)
    for position, kind in states.items():
        slot = cache.allocate_slot()
        assert slot is not None
        cache.state_pool.reserve(slot, position, step=0)
        cache.state_pool.mark_written(slot)
        found = cache.find(keys[position // UNIT - 1])
        assert found is not None
        cache.publish(found, slot, kind)
    if release:
        cache.release(node)
    cache.check_integrity()
    return node


def positions(cache: PrefixCache, tokens: Sequence[int]) -> list[int]:
    keys = keys_of(tokens, cache)
    return [i * UNIT for i, key in enumerate(keys, 1) if cache.has_state(key)]


def stream(first: int, count: int = 16) -> list[int]:
    return [first] + list(range(count - 1))


def test_match_pins_kv_and_source():
    cache = make_cache()
    publish(cache, stream(1), {8: Kind.REPLAY, 16: Kind.END})
    keys = keys_of(stream(1), cache)
    match = cache.match(keys, max_units=3)
    assert match.node.depth == 4 and match.source is not None and match.source.depth == 2
    assert len(match.blocks) == 4
    # nothing of the path can go, nor the state that is to be read; the other state can
    while cache.evict_state():
        pass
    assert not cache.evict_kv()
    assert positions(cache, stream(1)) == [8]
    cache.check_integrity()
    cache.cancel(match)
    cache.clear()
    cache.check_integrity()
    assert cache.num_available_blocks == 32 == cache.block_pool.num_free
    assert cache.state_pool.num_free == 8


def test_match_of_nothing():
    cache = make_cache()
    match = cache.match([], 0)
    assert match.node is cache.root and match.source is None and match.blocks == []
    cache.accept(match, 3, 0)
    cache.release(match.node)
    assert cache.counters.missed_tokens == 3
    cache.check_integrity()


def test_accept_counts():
    """queried = hit + lost + missed (I27)."""
    cache = make_cache()
    publish(cache, stream(1), {8: Kind.REPLAY})
    tokens = [*stream(1, 14), 99, 99, 99]
    match = cache.match(keys_of(tokens, cache), max_units=4)
    cache.accept(match, len(tokens), 4)
    counters = cache.counters
    assert (counters.queried_tokens, counters.hit_tokens) == (17, 8)
    assert (counters.lost_tokens, counters.missed_tokens) == (4, 5)


def test_extend_keeps_the_older_unit():
    cache = make_cache()
    older = publish(cache, stream(1, 4), {})
    keys = keys_of(stream(1, 4), cache)
    blocks = cache.allocate_blocks(1)
    assert blocks is not None
    node = cache.extend(cache.root, keys[0], tuple(blocks))
    assert node is older and node.blocks != tuple(blocks)
    cache.block_pool.release(blocks)
    cache.release(node)
    cache.check_integrity()


def test_publish_keeps_the_older_state():
    cache = make_cache()
    publish(cache, stream(1), {8: Kind.REPLAY})
    node = cache.find(keys_of(stream(1), cache)[1])
    assert node is not None
    slot = node.slot
    publish(cache, stream(1), {8: Kind.DECODE})
    assert node.slot == slot and node.kind is Kind.REPLAY
    assert cache.counters.duplicate_states == 1
    assert cache.state_pool.num_free == 7


def test_promote():
    """A state that somebody wants for a better reason is no longer spent."""
    cache = make_cache()
    publish(cache, stream(1), {8: Kind.DECODE, 16: Kind.END})
    key = keys_of(stream(1), cache)[1]
    node = cache.find(key)
    assert node is not None and node.is_spent
    cache.promote(key, Kind.PERIODIC)
    assert node.is_spent and node.kind is Kind.PERIODIC
    cache.promote(key, Kind.NAMED)
    assert not node.is_spent and node.kind is Kind.NAMED
    cache.promote(key, Kind.DECODE)
    assert node.kind is Kind.NAMED
    cache.promote(b"no such key", Kind.NAMED)
    publish(cache, stream(1), {8: Kind.JUNCTION})
    assert node.kind is Kind.JUNCTION
    cache.check_integrity()


def test_publish_checks_the_position():
    """A slot has one position, and no other key than that of this position (I14)."""
    cache = make_cache()
    node = publish(cache, stream(1), {}, release=False)
    slot = cache.allocate_slot()
    assert slot is not None
    cache.state_pool.reserve(slot, 12, step=0)
    cache.state_pool.mark_written(slot)
    with pytest.raises(AssertionError, match="position 12"):
        cache.publish(node, slot, Kind.REPLAY)


def test_evict_kv_order():
    """KV below all states first, from the leaves; then the leaf hit longest ago and its state."""
    cache = make_cache(num_blocks=16)
    publish(cache, stream(1), {8: Kind.REPLAY})
    publish(cache, stream(2, 8), {8: Kind.END})
    publish(cache, stream(3, 8), {4: Kind.REPLAY})
    order = []
    while cache.block_pool.num_free < 16:
        before = {node.key for node in cache.nodes()}
        assert cache.evict_kv()
        (gone,) = before - {node.key for node in cache.nodes()}
        order.append(
            next(
                (first, keys_of(stream(first), cache).index(gone) + 1)
                for first in (1, 2, 3)
                if gone in keys_of(stream(first), cache)
            )
        )
        cache.check_integrity()
    assert order == [(1, 4), (1, 3), (3, 2), (1, 2), (1, 1), (2, 2), (2, 1), (3, 1)]
    assert not cache.evict_kv()
    assert cache.counters.evictions_for_kv == 8 and cache.counters.states_lost_with_kv == 3


def test_evict_state_order():
    """Spent states first, oldest first, then whatever was hit longest ago."""
    cache = make_cache(num_slots=8)
    publish(cache, stream(1), {4: Kind.NAMED, 8: Kind.PERIODIC, 12: Kind.DECODE, 16: Kind.END})
    publish(cache, stream(2), {8: Kind.PERIODIC, 16: Kind.REPLAY})
    match = cache.match(keys_of(stream(1), cache), max_units=1)
    cache.accept(match, 16, 1)
    cache.cancel(match)
    order = []
    while cache.num_cached_states:
        before = {first: positions(cache, stream(first)) for first in (1, 2)}
        assert cache.evict_state()
        order += [
            (first, position)
            for first in (1, 2)
            for position in before[first]
            if position not in positions(cache, stream(first))
        ]
        cache.check_integrity()
    assert order == [(1, 8), (1, 12), (2, 8), (1, 16), (2, 16), (1, 4)]
    assert not cache.evict_state() and cache.counters.evictions_for_states == 6


def test_spent_states():
    """A hit or a fork makes a transient state worth keeping; losing what is deeper does too."""
    cache = make_cache()

    def spent() -> list[int]:
        return sorted(n.depth * UNIT for n in cache.nodes() if n.is_spent)

    publish(cache, stream(1), {4: Kind.PERIODIC, 8: Kind.PERIODIC})
    assert spent() == [4]
    publish(cache, stream(1), {16: Kind.REPLAY})
    assert spent() == [4, 8]
    fork = [*stream(1, 8), 50, 51, 52, 53]
    publish(cache, fork, {})
    assert spent() == [4]
    assert cache.evict_kv()  # the fork's leaf has no state below: it goes first
    assert spent() == [4, 8]
    match = cache.match(keys_of(stream(1), cache), max_units=1)
    cache.accept(match, 16, 1)
    cache.cancel(match)
    assert spent() == [8]
    while cache.evict_kv():
        assert spent() in ([8], [])
    cache.check_integrity()


def test_allocate_slot_by_class():
    """A transient state takes the place of a spent one only; others take any that is not in use."""
    cache = make_cache(num_slots=3)
    publish(cache, stream(1), {4: Kind.PERIODIC, 8: Kind.REPLAY, 12: Kind.END})
    assert cache.allocate_slot(Kind.DECODE) is not None  # that at 4, which is spent
    assert positions(cache, stream(1)) == [8, 12]
    assert cache.allocate_slot(Kind.PERIODIC) is None
    assert cache.allocate_slot(Kind.NAMED) is not None
    assert positions(cache, stream(1)) == [12]
    node = cache.find(keys_of(stream(1), cache)[2])
    assert node is not None
    cache.pin(node.slot)
    assert cache.allocate_slot() is None
    cache.unpin(node.slot)
    assert cache.allocate_slot() is not None
    assert cache.allocate_slot() is None


def test_allocate_blocks_is_all_or_nothing():
    cache = make_cache(num_blocks=4)
    publish(cache, stream(1, 12), {12: Kind.END})
    assert cache.num_available_blocks == 4
    assert cache.allocate_blocks(5) is None
    assert positions(cache, stream(1, 12)) == [12]
    blocks = cache.allocate_blocks(2)
    assert blocks is not None and positions(cache, stream(1, 12)) == []
    assert cache.num_available_blocks == 2


def test_path_cap():
    """So many states from the root to any leaf, and the deepest always among them (I25)."""
    cache = make_cache(max_states_per_path=2)
    publish(cache, stream(1), {4: Kind.PERIODIC, 8: Kind.NAMED})
    publish(cache, stream(1), {12: Kind.PERIODIC})
    assert positions(cache, stream(1)) == [8, 12]  # the deepest stays, whatever its kind
    publish(cache, stream(1), {16: Kind.REPLAY})
    assert positions(cache, stream(1)) == [8, 16]
    publish(cache, stream(1), {4: Kind.DECODE})
    assert positions(cache, stream(1)) == [8, 16]  # a worse one above doesn't come in
    publish(cache, stream(1), {12: Kind.JUNCTION})
    assert positions(cache, stream(1)) == [12, 16]
    assert cache.counters.states_over_path_cap == 4
    one = make_cache(max_states_per_path=1)
    publish(one, stream(1), {4: Kind.REPLAY})
    publish(one, stream(1), {8: Kind.DECODE})
    assert positions(one, stream(1)) == [8]


def test_path_cap_looks_below():
    """A state in the middle counts for the fullest path through it."""
    cache = make_cache(max_states_per_path=2)
    publish(cache, stream(1, 8), {})
    publish(cache, [*stream(1, 8), 50, 51, 52, 53], {12: Kind.END})
    publish(cache, stream(1), {12: Kind.REPLAY, 16: Kind.END})
    publish(cache, stream(1), {8: Kind.DECODE})
    assert positions(cache, stream(1)) == [12, 16]


def test_forget():
    cache = make_cache()
    publish(cache, stream(1), {8: Kind.DECODE, 12: Kind.DECODE, 16: Kind.DECODE})
    nodes = [cache.find(key) for key in keys_of(stream(1), cache)[1:]]
    first, second, third = (node for node in nodes if node is not None)
    match = cache.match(keys_of(stream(1), cache), max_units=3)
    cache.accept(match, 16, 3)
    cache.forget(second, second.slot)  # it is being read
    cache.cancel(match)
    cache.forget(second, second.slot)  # it was of use
    cache.forget(third, third.slot + 1)  # it is another state by now
    cache.forget(first, first.slot)
    assert positions(cache, stream(1)) == [12, 16]
    cache.check_integrity()


def test_freed_slots_order():
    """Free slots go first, before any entry is given up (I12)."""
    cache = make_cache(num_slots=2)
    publish(cache, stream(1), {16: Kind.END})
    slot = cache.allocate_slot()
    assert slot is not None and positions(cache, stream(1)) == [16]
    assert cache.state_pool.status[slot] is SlotStatus.RUNNING


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 3}, "unit must be a multiple of block_size, got 4 and 3"),
        ({"lookahead": 5}, r"lookahead must be in \[0, unit=4\], got 5"),
        ({"max_states_per_path": 0}, "max_states_per_path must be >= 1"),
        ({"num_blocks": 0}, "num_blocks must be >= 1"),
        ({"num_slots": 0}, "num_slots must be >= 1"),
    ],
)
def test_prefix_cache_errors(options, message):
    with pytest.raises(ValueError, match=message):
        make_cache(**options)
