"""Where a prefill chunk ends."""

from collections.abc import Iterable


def plan_chunk(
    start: int,
    num_tokens: int,
    available: int,
    *,
    budget: int,
    unit: int,
    alignment: int,
    stops: Iterable[int] = (),
) -> int:
    """End of the chunk that begins at `start`; `start` itself if nothing can run in this step.

    A chunk takes what it can get. An end inside the prefill is a multiple of `alignment`, and lies
    on the unit grid if that costs no further forward, so that the state left there can be found
    again.

    Args:
        start: tokens computed so far; a multiple of `alignment`.
        num_tokens: length of the whole prefill.
        available: tokens that this step has left.
        budget: tokens that a later step offers to a request that is alone.
        unit: grid of the cache keys, a multiple of `alignment`.
        alignment: what the kernel asks of an export's offset.
        stops: positions at which a chunk has to end. Empty when the kernel can export states;
            without that, a state is only had where a forward ends (the two-pass baseline).
    """
    end = min(num_tokens, start + available)
    if end < num_tokens:
        end -= (end - start) % alignment
        on_grid = end // unit * unit
        if on_grid > start and _num_forwards(num_tokens - on_grid, budget) == _num_forwards(
            num_tokens - end, budget
        ):
            end = on_grid
    return min((stop for stop in stops if start < stop < end), default=end)


def _num_forwards(num_tokens: int, budget: int) -> int:
    return -(-num_tokens // budget)
