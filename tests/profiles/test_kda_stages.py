"""The stage timer: what it launches, and how a line reads. The compiled function is a stand-in."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch_kda.cute_kernels import kda_prefill
from torch_kda.cute_kernels.tiles import SCAN_TILES
from torch_kda.profiles import kda_stages
from torch_kda.profiles.kda_cells import Cell
from torch_kda.profiles.timing import Timing

CPU = torch.device("cpu")


def test_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    launched: list[tuple[int, int]] = []

    def compiled(*arguments: Any) -> None:
        # 16 tensors, lower_bound, scale, stages, scan_tile
        assert all(isinstance(x, torch.Tensor) for x in arguments[:16])
        launched.append(arguments[18:20])

    def fake_times(
        variants: Mapping[str, Sequence[Any]], rounds: int, eager_rounds: int
    ) -> dict[str, Timing]:
        found = {}
        for name, calls in variants.items():
            launched.clear()
            for call in calls:
                call()
            stages, tiles = zip(*launched, strict=True)
            assert len(set(stages)) == len(set(tiles)) == 1
            found[name] = (stages[0], tiles[0])
        expected = {"prepare": (1, 0), "all": (3, 0)}
        scans = {f"scan_v{tile.rows}": (2, i) for i, (tile, _) in enumerate(SCAN_TILES)}
        assert found == expected | scans
        return {name: Timing(5.0, 4.0, 6.0) for name in variants}

    zeros = torch.zeros(2, dtype=torch.int32)
    device = kda_prefill._Device(132, (zeros, zeros, zeros), zeros)
    monkeypatch.setattr(kda_prefill, "_FUNCTIONS", {("bounded", -1): (compiled, device)})
    monkeypatch.setattr(kda_stages, "time_calls", fake_times)
    monkeypatch.setattr(kda_stages, "time_host", lambda call, rounds: 9.0)
    monkeypatch.setattr(kda_stages, "l2_bytes", lambda _: 2**20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**30))
    sms = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: sms)
    kda_stages.run([Cell(2, (96, 40))], ["slow"], CPU, {"gpu": "x"}, tmp_path, 3)
    data = json.loads((tmp_path / "kda_prefill_stages.json").read_text())
    (row,) = data["rows"]
    assert row["chosen"] == f"scan_v{SCAN_TILES[0][0].rows}" and row["us"]["prepare"] == 5.0
    assert "H2-mixed" in capsys.readouterr().out


def test_describe() -> None:
    us = {"prepare": 100.0, "scan_v16": 250.0, "scan_v64": 300.0, "all": 340.0}
    row = {"gates": "slow", "us": us, "chosen": "scan_v64", "host_us": 15.0}
    line = kda_stages.describe(Cell(12, (8000, 160)), row)
    # 97,920 token-heads; 500 steps in the longest sequence
    assert "prepare 100.0 (1.021 ns a token-head)" in line
    assert "scan_v16 250.0 (0.500 a step)  scan_v64 300.0 (0.600 a step)*" in line
    assert "all 340.0 us" in line and "host 15.0" in line
