"""What a waiting request needs, is worth waiting for, and should leave in the cache."""

from collections.abc import Mapping, Sequence

from ..cache.policy import Kind, checkpoint_positions
from ..cache.prefix_cache import PrefixCache
from .holdings import Announced
from .live import LiveRequest


def blocks_to_admit(running: Sequence[LiveRequest], live: LiveRequest, cache: PrefixCache) -> int:
    """KV blocks that have to be available: for the whole prompt, and for prompts admitted before.

    Requests after `live` in the order don't count: they give way.
    """
    size = cache.block_size
    cached = cache.num_cached_units(live.keys) * cache.blocks_per_unit
    blocks = -(-len(live.token_ids) // size) - cached
    for other in running:
        if other.order > live.order:
            break
        if other.scheduled_end < other.prefill_end:
            blocks += -(-other.prefill_end // size) - len(other.table)
    return blocks


def find_writer(
    announced: Mapping[bytes, Announced], live: LiveRequest, hit: int, max_units: int
) -> tuple[str, bytes] | None:
    """Who is about to make a hit deeper than `hit` units possible, and the key to wait for.

    A step in flight has announced it. Each writer is waited for once, for one key.
    """
    found = None
    for key, by in announced.items():
        if hit < by.depth <= max_units and live.keys[by.depth - 1] == key:
            awaited = live.deferred_to.get(by.writer, key)
            if awaited == key:
                hit, found = by.depth, (by.writer, key)
    return found


def wanted_states(
    live: LiveRequest, cache: PrefixCache, start: int, kv_cached: int, every: int
) -> dict[int, Kind]:
    """States to keep of a prefill from `start`, the most valuable first, as many as a path may
    have.
    """
    # with draft layers a hit is always one unit short of the KV, which makes no junction
    is_shared = kv_cached > start + cache.drop
    positions = checkpoint_positions(
        start,
        len(live.token_ids),
        cache.unit,
        drop=cache.drop,
        junction=kv_cached if is_shared else 0,
        named=live.request.checkpoint_positions,
        every=every,
    )
    return dict(positions[: cache.max_states_per_path])
