"""Tile configurations of the kernels, and the choice by shape; it changes no bit of a result."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScanTile:
    """How `KdaScanSm90` cuts the 128 V rows of one (sequence, head)."""

    rows: int  # V rows a CTA
    m_tiles: int  # 16-row MMA tiles a warp: each operand fragment is read once for all of them
    stages: int  # records in flight


# From the most CTAs to the fewest, with the most CTAs an SM. A chain of steps is latency-bound, so
# it is split as far as there are SMs for; with more chains, wider CTAs read a record fewer times.
SCAN_TILES = (
    (ScanTile(rows=16, m_tiles=1, stages=6), 1.0),
    (ScanTile(rows=32, m_tiles=1, stages=6), 1.0),
    (ScanTile(rows=64, m_tiles=1, stages=6), 1e9),
)


def choose_scan_tile(num_sequences: int, num_heads: int, num_sms: int) -> int:
    """Index into SCAN_TILES: the first whose CTAs an SM stay within its limit."""
    chains = num_sequences * num_heads
    for i, (tile, max_ctas_per_sm) in enumerate(SCAN_TILES):
        if chains * (128 // tile.rows) <= max_ctas_per_sm * num_sms:
            return i
    return len(SCAN_TILES) - 1
