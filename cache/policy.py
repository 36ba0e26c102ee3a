"""Which states of a prefill are worth keeping. Nothing else decides it."""

from collections.abc import Iterable
from enum import IntEnum


class Kind(IntEnum):
    """Why a state is kept; a lower value is more valuable and is dropped later."""

    REPLAY = 0  # deepest position at which an identical request can resume
    END = 1  # exact end of a prefill that lies on the grid: an extension resumes there
    JUNCTION = 2  # KV is cached down to here, but no state: evidence of a shared prefix
    NAMED = 3  # asked for by the caller
    PERIODIC = 4  # every N tokens
    DECODE = 5  # left behind while generating, or by a request that ended

    @property
    def is_transient(self) -> bool:
        """Whether a deeper state makes this one nearly worthless."""
        return self >= Kind.PERIODIC


def replay_boundary(num_tokens: int, unit: int, drop: int = 0) -> int:
    """Deepest position at which a resend of `num_tokens` tokens can resume; 0 if there is none.

    One token has to be left to compute, for its logits. With draft-layer KV (`drop` = unit) a whole
    unit is given up instead: the draft KV before a boundary depends on tokens after it.
    """
    return max((num_tokens - (drop == 0)) // unit * unit - drop, 0)


def checkpoint_positions(
    start: int,
    num_tokens: int,
    unit: int,
    *,
    drop: int = 0,
    junction: int = 0,
    named: Iterable[int] = (),
    every: int = 0,
) -> list[tuple[int, Kind]]:
    """States to export in a prefill: (position, kind), the most valuable first.

    Args:
        start: tokens that have a state already; only positions above it are returned.
        num_tokens: prompt, and for a resumed request its outputs too.
        unit: the grid; every position is a multiple of it.
        drop: unit if draft-layer KV is cached, else 0.
        junction: deepest position with cached KV where the joint hit was shallower; 0 if none.
        named: positions from the caller; rounded down to the grid, those outside the prefill are
            ignored.
        every: distance of periodic states, a multiple of unit; 0 for none.
    """
    replay = replay_boundary(num_tokens, unit, drop)
    deepest = replay if drop else num_tokens // unit * unit
    wanted = [(replay, Kind.REPLAY)]
    if num_tokens == deepest:
        wanted.append((num_tokens, Kind.END))
    if junction:
        wanted.append((min(junction, deepest), Kind.JUNCTION))
    # of one kind, the deeper one saves more tokens
    wanted += sorted({(p // unit * unit, Kind.NAMED) for p in named}, reverse=True)
    if every:
        wanted += [(p, Kind.PERIODIC) for p in range(deepest // every * every, start, -every)]
    best: dict[int, Kind] = {}
    for position, kind in wanted:
        if start < position <= deepest:
            best.setdefault(position, kind)
    return list(best.items())
