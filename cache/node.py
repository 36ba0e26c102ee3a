"""A node of the prefix tree, and questions to the tree below it."""

from .policy import Kind

NO_SLOT = -1


class Node:
    """A cached unit of KV: tokens [(depth - 1) * unit, depth * unit), those above before them."""

    __slots__ = (
        "blocks",
        "children",
        "depth",
        "is_spent",
        "key",
        "kind",
        "last_hit",
        "last_used",
        "parent",
        "references",
        "serial",
        "slot",
        "was_hit",
    )

    def __init__(
        self, key: bytes, parent: "Node | None", blocks: tuple[int, ...], serial: int
    ) -> None:
        self.key = key
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 0  # units
        self.blocks = blocks
        self.children: dict[bytes, Node] = {}
        self.references = 0  # requests whose KV includes this unit
        self.last_used = 0  # tick of the cache; also of descendants that are gone
        self.serial = serial
        self.slot = NO_SLOT  # READY state after depth * unit tokens
        self.kind = Kind.REPLAY
        self.last_hit = 0  # tick at which the state was published or last hit
        self.was_hit = False
        self.is_spent = False  # transient, never hit, and on a forkless path to a deeper state

    def __repr__(self) -> str:
        state = f" {self.kind.name}@slot{self.slot}" if self.slot >= 0 else ""
        return f"<Node depth={self.depth} references={self.references}{state}>"


def worthlessness(node: Node) -> tuple[int, bool, int, int]:
    """Order in which states leave a path that has too many: the largest first."""
    return (node.kind, len(node.children) < 2, -node.last_hit, -node.depth)


def leads_to_state(node: Node) -> bool:
    """Whether the path down from the node reaches a state before it forks or ends."""
    while len(node.children) == 1:
        (node,) = node.children.values()
        if node.slot >= 0:
            return True
    return False


def max_states_below(node: Node) -> int:
    """Most states on one path down from the node, its own not counted."""
    most = 0
    stack = [(child, 0) for child in node.children.values()]
    while stack:
        child, count = stack.pop()
        count += child.slot >= 0
        most = max(most, count)
        stack.extend((grandchild, count) for grandchild in child.children.values())
    return most


def descendants(node: Node) -> list[Node]:
    """All nodes below."""
    found: list[Node] = []
    stack = list(node.children.values())
    while stack:
        child = stack.pop()
        found.append(child)
        stack.extend(child.children.values())
    return found
