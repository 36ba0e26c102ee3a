"""Tiles and the order of sequences: the rule in PyTorch, and the PTX of prepare on the CPU."""

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from torch_kda.cute_kernels.kda_prefill import PREFILL
from torch_kda.tests.checks import assert_same
from torch_kda.tests.cute_kernels import mirror, ptx_machine
from torch_kda.tests.cute_kernels.conftest import Built
from torch_kda.tests.cute_kernels.test_kda_prepare import (
    LENGTHS,
    RESERVED,
    Case,
    Written,
    check_padding,
    make_case,
    prepare_resources,
    run_ptx,
)

NUM_SAMPLED = 6  # of the tiles of a kind, where all would take minutes


@pytest.fixture
def built(objects: Callable[[str], Built]) -> Built:
    return objects("sm_90a")


@pytest.fixture
def run(built: Built) -> Callable[..., Written]:
    """Some blocks of prepare, the warps in the given order."""
    program = ptx_machine.Program(built.ptx[PREFILL["bounded"].name].read_text(), "kda_prepare")
    shared_bytes = prepare_resources(built, "bounded")["shared_bytes"] - RESERVED

    def run(case: Case, blocks: list[int], order: tuple[int, int] = (0, 1)) -> Written:
        return run_ptx(program, case, order, shared_bytes, blocks)

    return run


def random_lengths(N: int, seed: int) -> list[int]:
    """Many empty ones, at both ends too; lengths about a border of tiles, and some long."""
    rng = random.Random(seed)
    lengths = [rng.choice([0, 0, 1, 15, 16, 17, 31, 32, 33, rng.randrange(700)]) for _ in range(N)]
    for i in rng.sample([0, N // 2, N - 1], rng.randrange(4)):
        lengths[i] = 0
    return lengths


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("N", [1, 2, 30, 31, 32, 33, 1000, 4096])
def test_tiles(N: int, seed: int) -> None:
    """Each row is in one tile, tiles are whole from a sequence's start on, and all fit."""
    cu = [*accumulate(random_lengths(N, seed), initial=0)]
    T = cu[-1] + [0, 1, 37, 16, 500][seed]
    table = mirror.find_tiles(cu, T).tolist()
    used = {i for i, (_, rows) in enumerate(table) if rows != 0}
    for n, (start, end) in enumerate(pairwise(cu)):
        want = [(row, min(16, end - row)) for row in range(start, end, 16)]
        first = start // 16 + n
        assert [tuple(x) for x in table[first : first + len(want)]] == want
        used -= set(range(first, first + len(want)))
    rest = [(row, -min(16, T - row)) for row in range(cu[-1], T, 16)]
    first = cu[-1] // 16 + N
    assert [tuple(x) for x in table[first : first + len(rest)]] == rest
    assert used == set(range(first, first + len(rest)))


@pytest.mark.parametrize("N", [1, 31, 300, 4096])
def test_order(N: int) -> None:
    """Every sequence once; longest first by classes: none is 1.5 times as long as one before it."""
    lengths = random_lengths(N, N)
    cu = [*accumulate(lengths, initial=0)]
    table = mirror.order_sequences(cu).tolist()
    assert sorted(table) == [[n, cu[n], lengths[n], cu[n] // 16 + n] for n in range(N)]
    counts = [-(-entry[2] // 16) for entry in table]
    for count, least in zip(counts, accumulate(counts, min), strict=True):
        assert count < max(1.5 * least, 1) or count <= least


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_kda_prepare_finds_its_tile(lengths: list[int], run: Callable[..., Written]) -> None:
    """Tiles with rows, without any, and with rows of no sequence: the first, the last, some; and
    those of sequences about the ends of what a round of the search tells apart.
    """
    case = make_case(lengths, spare_rows=37)
    rows = case.tiles[:, 1]
    borders = [n for n in (30, 31, 32, 61, 62, 63, 1021, 1022) if n < len(lengths)]
    border_tiles = {case.cu_seqlens[n] // 16 + n for n in borders}
    kinds = [torch.nonzero(kind).flatten().tolist() for kind in (rows > 0, rows == 0, rows < 0)]
    rng = random.Random(0)
    picked = [x if len(x) < NUM_SAMPLED else [x[0], x[-1], *rng.sample(x, 4)] for x in kinds[:2]]
    tiles = {*picked[0], *picked[1], *kinds[2], *border_tiles}
    got = run(case, [1 + tile for tile in tiles])
    written = sorted(tile for tile in tiles if rows[tile] > 0)
    assert torch.nonzero((got.records != 0xFF).any(1)).flatten().tolist() == written
    want = mirror.pack_records(case.records())
    for tile in written:
        # Et alone tells the tiles apart; its fields are compared in test_kda_prepare.py
        x, y = (image[tile, 12800:].view(torch.float32) for image in (got.records, want))
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-30)
    check_padding(case, torch.full_like(got.records, 0xFF), got.o)


ORDERS = {
    "empty": [0],
    "16": [16],
    "17-0-32-5": [17, 0, 32, 5],
    "long-among-short": [40, 1, 5000, 40, 0, 300, 299],
    "64x128": [128] * 64,
    "65": [(7 * n) % 130 for n in range(65)],
    "300": [(7 * n) % 130 for n in range(300)],
    "4096": [(37 * n) % 61 for n in range(4096)],
}


@pytest.mark.parametrize("lengths", ORDERS.values(), ids=ORDERS)
def test_kda_prepare_orders(lengths: list[int], run: Callable[..., Written]) -> None:
    """What one warp writes, another reads only after a barrier: either may come first."""
    case = make_case(lengths, spare_rows=1)
    for order in ((0, 1), (1, 0)):
        got = run(case, [0], order)
        assert_same("order", got.order, case.sequences)
        assert (got.records == 0xFF).all() and got.o.isnan().all()


@pytest.mark.parametrize("cu", [[0, 50, 90], [0, 50, 20, 40], [-7, 20, 1000], [30, 3]], ids=str)
def test_kda_prepare_wrong_lengths(cu: list[int], run: Callable[..., Written]) -> None:
    """A caller's mistake leads to no access outside the tensors, in prepare or in the scan."""
    case = make_case([40])
    N, TC = len(cu) - 1, 3 + len(cu) - 1
    table = torch.zeros(TC, 2, dtype=torch.int32)
    case = replace(case, cu_seqlens=cu, tiles=table, sequences=torch.zeros(N, 4))
    for row in run(case, list(range(1 + TC))).order.tolist():
        n, first, length, tile = row
        assert 0 <= n < N and length >= 0 and first >= 0 and first + length <= 40
        assert tile >= 0 and tile + -(-length // 16) <= TC
