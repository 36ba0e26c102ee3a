"""Which state or unit of KV has to be the one that was evicted."""

from typing import TYPE_CHECKING

from torch_kda.cache.node import Node
from torch_kda.cache.policy import Kind
from torch_kda.tests.modelcheck.invariants import Before

if TYPE_CHECKING:
    from torch_kda.tests.modelcheck.world import World


def check_evict_state(world: "World", before: Before) -> None:
    """Spent states go first, then the least recently hit; no KV goes (I12)."""
    assert len(world.cache._nodes) == len(before.nodes)
    nodes = before.nodes.values()
    gone = [node for node in nodes if node.slot != before.slots[node.key]]
    assert len(gone) == 1, f"{gone}"
    victim = gone[0]
    pins = world.cache.state_pool.pins
    assert not pins[before.slots[victim.key]], "a step reads it (I05)"
    others = [n for n in nodes if before.slots[n.key] >= 0 and not pins[before.slots[n.key]]]
    spent = [node for node in others if is_spent(node, before)]
    candidates = spent or others
    assert victim is min(candidates, key=lambda node: node.last_hit), f"{victim!r} {candidates}"


def is_spent(node: Node, before: Before) -> bool:
    """Whether a state that was there before is transient, never hit, and has a deeper one."""
    if node.kind < Kind.PERIODIC or node.was_hit:
        return False
    step = node
    while len(step.children) == 1:
        (step,) = step.children.values()
        if before.slots[step.key] >= 0:
            return True
    return False


def check_evict_kv(world: "World", before: Before) -> None:
    """A leaf that nobody uses goes: one without a state if there is any, and the least recent."""
    gone = [node for key, node in before.nodes.items() if world.cache.find(key) is not node]
    assert len(gone) == 1 and len(world.cache._nodes) == len(before.nodes) - 1, f"{gone}"
    victim = gone[0]
    assert not victim.references and not victim.children, f"{victim!r}"
    leaves = [
        node
        for node in before.nodes.values()
        if not node.references and not node.children and node is not victim.parent
    ]
    leaves += [] if victim in leaves else [victim]
    bare = [node for node in leaves if before.slots[node.key] < 0]
    if bare:
        assert victim is min(bare, key=lambda node: node.last_used), f"{victim!r} {bare}"
    else:
        assert victim is min(leaves, key=lambda node: node.last_hit), f"{victim!r} {leaves}"
