"""The choice of the scan's tile."""

from torch_kda.cute_kernels.tiles import SCAN_TILES, choose_scan_tile


def test_choose_scan_tile() -> None:
    """One chain is split as far as can be; the more chains, the wider the CTAs, never narrower."""
    rows = [
        SCAN_TILES[choose_scan_tile(N, H, 132)][0].rows
        for N, H in [(1, 1), (1, 12), (1, 32), (1, 96), (8, 96), (4096, 96)]
    ]
    assert rows == sorted(rows) and rows[0] == SCAN_TILES[0][0].rows
    assert rows[-1] == SCAN_TILES[-1][0].rows
    assert choose_scan_tile(1, 32, 16) > choose_scan_tile(1, 32, 1024)


def test_scan_tiles() -> None:
    """CTAs fill the 128 V rows; the last tile takes whatever the others do not."""
    assert all(128 % tile.rows == 0 for tile, _ in SCAN_TILES)
    limits = [limit for _, limit in SCAN_TILES]
    assert limits == sorted(limits) and limits[-1] >= 4096 * 1024
