"""Compares what the prefix cache keeps at hand with what its tree says. For tests."""

from typing import TYPE_CHECKING

from .node import Node, descendants, leads_to_state, max_states_below
from .state_pool import SlotStatus

if TYPE_CHECKING:
    from .prefix_cache import PrefixCache


def check_prefix_cache(cache: "PrefixCache") -> None:
    """Raises AssertionError if a count, an index or a queue is not what the tree says."""
    cache.block_pool.check_integrity()
    cache.state_pool.check_integrity()
    nodes = descendants(cache.root)
    indexed = list(cache.nodes())
    assert {id(node) for node in nodes} == {id(node) for node in indexed}, "tree and index differ"
    assert all(cache.find(node.key) is node for node in nodes), "tree and index differ"
    _check_kv(cache, nodes)
    _check_states(cache, nodes)
    _check_order(cache, nodes)
    assert max_states_below(cache.root) <= cache.max_states_per_path
    c = cache.counters
    assert c.queried_tokens == c.hit_tokens + c.lost_tokens + c.missed_tokens, f"{c}"


def _check_kv(cache: "PrefixCache", nodes: list[Node]) -> None:
    pool, owned = cache.block_pool, set[int]()
    for node in nodes:
        assert node.parent is not None and node.parent.children[node.key] is node
        assert node.depth == node.parent.depth + 1
        # who uses a unit uses those above it
        assert node.references >= sum(c.references for c in node.children.values())
        assert len(node.blocks) == cache.blocks_per_unit and owned.isdisjoint(node.blocks)
        assert not any(map(pool.is_free, node.blocks)), f"{node!r} has a free block"
        owned.update(node.blocks)
    unpinned = sum(not node.references for node in nodes) * cache.blocks_per_unit
    assert cache.num_available_blocks == pool.num_free + unpinned


def _check_states(cache: "PrefixCache", nodes: list[Node]) -> None:
    pool = cache.state_pool
    keyed = sorted(node.slot for node in nodes if node.slot >= 0)
    ready = [slot for slot, status in enumerate(pool.status) if status is SlotStatus.READY]
    assert keyed == ready, f"{keyed=} {ready=}"
    assert cache.num_cached_states == len(keyed)
    for node in nodes:
        if node.slot >= 0:
            assert pool.position[node.slot] == node.depth * cache.unit, f"{node!r}"
            assert node.references or not pool.pins[node.slot], f"{node!r} is read, its KV is not"


def _check_order(cache: "PrefixCache", nodes: list[Node]) -> None:
    expected = {name: set[int]() for name in ("bare_leaves", "state_leaves", "states")}
    spent = set[int]()
    for node in nodes:
        has_state = node.slot >= 0
        if not node.references and not node.children:
            expected["state_leaves" if has_state else "bare_leaves"].add(node.serial)
        is_spent = (
            has_state and node.kind.is_transient and not node.was_hit and leads_to_state(node)
        )
        assert node.is_spent == is_spent, f"{node!r} {is_spent=}"
        if has_state and not cache.state_pool.pins[node.slot]:
            expected["states"].add(node.serial)
            if is_spent:
                spent.add(node.serial)
    assert cache.eviction_members() == {**expected, "spent_states": spent}
