"""Tile configurations of the kernels, and the choice by shape; it changes no bit of a result."""

import functools
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ScanTile:
    """How `KdaScanSm90` cuts the 128 V rows of one (sequence, head)."""

    rows: int  # V rows a CTA
    stages: int  # records in flight
    parts: int  # products that an update is cut into


# Few chains are latency-bound, and 64 rows have the shorter step: 0.33 us against 0.54 at H=12.
# With more CTAs than SMs, 128 rows read each record once: 0.57 us against 0.73 at H=96.
# H200, profiles/results/kda_design.md
SCAN_TILES = (
    (ScanTile(rows=64, stages=8, parts=1), 1.0),
    (ScanTile(rows=128, stages=7, parts=2), 1e9),
)


@functools.cache  # asked in every call
def choose_scan_tile(num_sequences: int, num_heads: int, num_sms: int) -> int:
    """Index into SCAN_TILES: the first whose CTAs an SM stay within its limit."""
    chains = num_sequences * num_heads
    for i, (tile, max_ctas_per_sm) in enumerate(SCAN_TILES):
        if chains * (128 // tile.rows) <= max_ctas_per_sm * num_sms:
            return i
    return len(SCAN_TILES) - 1
