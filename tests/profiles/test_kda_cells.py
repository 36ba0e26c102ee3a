"""Cells, inputs and truth of the prefill bench."""

from dataclasses import replace

import pytest
import torch
from torch_kda.ops.reference import kda_recurrent_ref
from torch_kda.profiles import kda_cells
from torch_kda.profiles.kda_cells import CELLS, Cell, Result
from torch_kda.profiles.kda_peers import torch_kda

CPU = torch.device("cpu")
TINY = Cell(3, (40, 17, 96))


def test_cells() -> None:
    """All of the table that the project measures itself against."""
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == 16
    for name in ("H12-1x512", "H12-1x32768", "H12-64x128", "H12-mixed", "H12-4x8192", "H48-1x8192"):
        assert name in names
    assert set(kda_cells.QUICK) <= set(names)


@pytest.mark.parametrize(
    ("name", "floor_us"),
    [("H12-1x512", 2.2), ("H12-1x8192", 30), ("H12-64x128", 53), ("H96-8x1024", 259)],
)
def test_io_bytes(name: str, floor_us: float) -> None:
    """The floors that were published with 4.28 TB/s."""
    (cell,) = kda_cells.select_cells([name])
    assert cell.io_bytes(0) / 4.28e12 * 1e6 == pytest.approx(floor_us, rel=0.02)
    assert cell.io_bytes(1) - cell.io_bytes(0) == len(cell.lens) * cell.heads * 65536


def test_exports() -> None:
    cell = Cell(1, (128, 8192, 20, 9))
    assert cell.exports(0) == [[], [], [], []]
    assert cell.exports(1) == [[64], [4096], [], []]
    sixteen = cell.exports(16)
    assert sixteen[0] == [*range(16, 129, 16)] and sixteen[1] == [*range(512, 8193, 512)]
    assert sixteen[2:] == [[16], []]
    for cell in CELLS:
        for offsets, most, length in zip(cell.exports(1), cell.exports(16), cell.lens, strict=True):
            assert set(offsets) <= set(most)
            assert all(0 < x <= length and x % 16 == 0 for x in most)


def test_select_cells() -> None:
    assert [cell.name for cell in kda_cells.select_cells(["H12-1x*2", "H96-mixed"])] == [
        *("H12-1x512", "H12-1x8192"),
        "H96-mixed",
    ]
    with pytest.raises(ValueError, match=r"'H13-\*' fits no cell; there are H12-1x512"):
        kda_cells.select_cells(["H12-*", "H13-*"])


@pytest.mark.parametrize("gates", kda_cells.GATES)
def test_make_inputs(gates: str) -> None:
    """The same whatever is exported; another seed gives others."""
    none, some = (kda_cells.make_inputs(TINY, gates, c, 0, CPU) for c in (0, 16))
    for name in (*kda_cells.ROWS, "A_log", "dt_bias", "initial_state"):
        assert torch.equal(getattr(none, name), getattr(some, name)), name
    assert none.checkpoint_offsets is None and some.checkpoint_offsets is not None
    assert some.checkpoint_offsets.tolist() == [16, 32, 16, 16, 32, 48, 64, 80, 96]
    assert some.state_pool.shape[0] == 2 * 3 + 9
    other = kda_cells.make_inputs(TINY, gates, 0, 1, CPU)
    assert not torch.equal(other.q, none.q)


def test_truth() -> None:
    """Of the first and last head: what the token recurrence says; ours is within its limits."""
    inputs = kda_cells.make_inputs(TINY, "slow", 16, 0, CPU)
    got = kda_cells.truth(inputs)
    heads = kda_cells.truth_heads(TINY)
    pool = inputs.state_pool[:, heads].double()
    rows = [getattr(inputs, name)[:, heads].double() for name in kda_cells.ROWS]
    out = kda_recurrent_ref(
        *rows,
        inputs.A_log[heads].double(),
        inputs.dt_bias[heads].double(),
        *(pool, inputs.cu_seqlens, inputs.initial_slots, inputs.final_slots),
        *(inputs.checkpoint_indptr, inputs.checkpoint_offsets, inputs.checkpoint_slots),
        lower_bound=inputs.lower_bound,
    )
    assert heads == [0, 2] and got.checkpoints is not None
    assert torch.allclose(got.out, out, rtol=1e-10, atol=1e-12)
    assert torch.allclose(torch.cat([got.states, got.checkpoints]), pool[3:], rtol=1e-10)
    (call,) = torch_kda([inputs])
    result = call()
    errs = kda_cells.errors(result, got, heads)
    assert 1e-4 < errs[0] < 4.5e-3 and errs[1] < 3.5e-3
    worse = replace(result, checkpoints=1.01 * result.checkpoints)
    assert kda_cells.errors(worse, got, heads)[1] == pytest.approx(0.01, rel=0.1)
    broken = replace(result, out=result.out.clone())
    broken.out[0, 0, 0] = float("nan")
    assert kda_cells.errors(broken, got, heads)[0] == float("inf")


def test_with_exports() -> None:
    inputs = kda_cells.make_inputs(TINY, "slow", 16, 0, CPU)
    full = kda_cells.truth(inputs)
    for count in (0, 1):
        expected = kda_cells.truth(kda_cells.make_inputs(TINY, "slow", count, 0, CPU))
        got = kda_cells.with_exports(full, TINY, 16, count)
        assert torch.equal(got.out, expected.out) and torch.equal(got.states, expected.states)
        assert (got.checkpoints is None) == (count == 0)
        if got.checkpoints is not None and expected.checkpoints is not None:
            assert torch.equal(got.checkpoints, expected.checkpoints)
    bare = Result(full.out, full.states)
    assert kda_cells.with_exports(bare, TINY, 0, 0) == bare
