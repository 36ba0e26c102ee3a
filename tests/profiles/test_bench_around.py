"""The bench of the ops around prefill: inputs, what it refuses to time, what it writes."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_kda.profiles import around_cells, bench_around
from torch_kda.profiles.around_cells import CELLS, OPS, Cell, Op
from torch_kda.profiles.timing import Timing

SMALL = {
    "kda_decode": lambda: around_cells.decode_cell(2, 1, M=2),
    "causal_conv_prefill": lambda: around_cells.conv_cell(64, 1),
    "gated_rms_norm": lambda: around_cells.norm_cell(5, 2),
    "rms_norm": lambda: around_cells.row_norm_cell(5),
    "add_rms_norm": lambda: around_cells.row_norm_cell(5, has_residual=True),
    "silu_and_mul": lambda: around_cells.silu_cell(5),
    "mla_store": lambda: around_cells.store_cell(70),
    "mla_decode": lambda: around_cells.mla_decode_cell(2, 70, heads=2),
    "mla_prefill": lambda: around_cells.mla_prefill_cell("two", [3, 20], [40, 20]),
    "moe": lambda: around_cells.moe_cell(3),
    "moe_route": lambda: around_cells.route_cell(3),
}


def fake_times(variants: Mapping[str, Sequence[Any]], rounds: int = 0) -> dict[str, Timing]:
    for calls in variants.values():
        for call in calls:
            call()
    return {name: Timing(10.0, 9.0, 12.0, 20.0) for name in variants}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU in the place of a GPU, with a clock that always says the same, and few experts."""
    for name, size in {"EXPERTS": 16, "HIDDEN": 32, "EXPERT_HIDDEN": 16, "HEADS": 2}.items():
        monkeypatch.setattr(around_cells, name, size)
    monkeypatch.setattr(around_cells, "MAX_TOKENS", 256)
    monkeypatch.setattr(bench_around, "require_cuda", lambda _: torch.device("cpu"))
    monkeypatch.setattr(bench_around, "copy_bytes_per_second", lambda _: 4e12)
    monkeypatch.setattr(bench_around, "matmul_flops_per_second", lambda _: 8e14)
    monkeypatch.setattr(bench_around, "origin", lambda *_: {"gpu": "Some GPU", "commit": "abc"})
    monkeypatch.setattr(bench_around, "l2_bytes", lambda _: 2**10)
    monkeypatch.setattr(bench_around, "time_calls", fake_times)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**33, 2**33))


@pytest.mark.parametrize("op", OPS)
def test_cells_are_right_and_timed(op: str) -> None:
    cell = SMALL[op]()
    row = bench_around.measure(cell, torch.device("cpu"), 4e12, 8e14, 1)
    assert row["error"] <= row["limit"] and row["us"] == 10.0
    floor = cell.num_bytes(bench_around.make(cell, torch.device("cpu"), 0)) / 4e12
    assert row["ratio"] == pytest.approx(1e-5 / max(floor, cell.flops / 8e14), rel=1e-3)


def test_every_op_has_cells() -> None:
    assert {cell.op for cell in CELLS} == set(OPS)
    assert len({(cell.op, cell.name) for cell in CELLS}) == len(CELLS)


def test_floor_counts_bytes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = around_cells.decode_cell(4, 8)
    inputs = bench_around.make(cell, torch.device("cpu"), 0)
    # read and written: states and windows; read: projections, gates; written: output
    moved = 2 * (inputs["state_pool"].nbytes + inputs["conv_pool"].nbytes)
    moved += sum(inputs[name].nbytes for name in ("qkv", "g_raw", "gate")) + 2 * 4 * 8 * 128
    assert cell.num_bytes(inputs) == moved


def test_wrong_results_are_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    good, norm = SMALL["gated_rms_norm"](), OPS["gated_rms_norm"]
    for factor in (1.01, float("nan")):

        def wrong(factor: float = factor, **inputs: Any) -> torch.Tensor:
            return around_cells.norms.gated_rms_norm(**inputs) * factor

        monkeypatch.setitem(OPS, "gated_rms_norm", Op(wrong, norm.reference, norm.limit))
        monkeypatch.setattr(bench_around, "CELLS", (good,))
        with pytest.raises(SystemExit):
            bench_around.main(["--out", str(tmp_path)])
        (row,) = json.loads((tmp_path / "around.json").read_text())["rows"]
        assert row["us"] is None


def test_main(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    cells: tuple[Cell, ...] = (SMALL["gated_rms_norm"](), SMALL["mla_store"](), SMALL["moe"]())
    monkeypatch.setattr(bench_around, "CELLS", cells)
    bench_around.main(["--out", str(tmp_path), "--op", "moe", "mla_store"])
    data = json.loads((tmp_path / "around.json").read_text())
    assert [row["op"] for row in data["rows"]] == ["mla_store", "moe"]
    page = (tmp_path / "around.md").read_text()
    assert page == bench_around.markdown(data) and "## moe" in page and "gated" not in page
    assert "M70" in capsys.readouterr().out
