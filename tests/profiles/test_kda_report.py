"""The report of the prefill bench: numbers that can be checked by hand."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from torch_kda.profiles import kda_report

NAMES = ("torch_kda", *kda_report.PEERS)
META = {"gpu": "Some GPU", "commit": "abc", "copy_tb_s": 4.0}


def row(
    lens: list[int], checkpoints: int, gates: str = "slow", **us: float | None
) -> dict[str, Any]:
    return {
        "heads": 12,
        "lens": lens,
        "gates": gates,
        "checkpoints": checkpoints,
        "floor_us": 30.0,
        "us": {name: us.get(name) for name in NAMES},
        "eager_us": {name: us.get(name) for name in NAMES},
        "err_out": {name: 1e-3 if name in us else None for name in NAMES},
        "err_state": {name: 2e-3 if name in us else None for name in NAMES},
        "err_tokens": sum(lens),
    }


ROWS = [
    row([8192], 0, torch_kda=200.0, vllm=400.0, fla=600.0),
    row([8192], 1, torch_kda=200.0, vllm=400.0),
    row([8192], 16, torch_kda=212.0),
    row([128] * 64, 1, torch_kda=80.0, vllm=100.0),
    row([8192], 1, "fast", torch_kda=None, vllm=400.0),
]


def test_markdown() -> None:
    text = kda_report.markdown({"meta": META, "rows": ROWS})
    assert "- gpu: Some GPU" in text and "## slow gates" in text and "## fast gates" in text
    assert "| H12-1x8192 | 0 | 30.0 | 200.0 | 15% | 200.0 | 400.0 | 0.50 | 600.0 | 0.33 | -" in text
    assert "| H12-1x8192 | 16 | 30.0 | 212.0 | 14% | 212.0 | - | - |" in text
    # refused: no time, no ratio
    assert "| H12-1x8192 | 1 | 30.0 | - | - | - | 400.0 | - |" in text
    assert "| H12-64x128 | 1 | 8192 | 1.0e-03 / 2.0e-03 | 1.0e-03 / 2.0e-03 | - | - |" in text


def test_ratios() -> None:
    text = kda_report.ratios(ROWS)
    # sqrt(0.5 * 0.8)
    assert "slow: geometric mean 0.632 over 2 cells" in text
    assert "best 0.50 (H12-1x8192), worst 0.80 (H12-64x128)" in text
    assert "fast" not in text
    assert kda_report.ratios(ROWS[2:3]) == ""


def test_export_costs() -> None:
    """16 states of 12 heads are 12.6 MB, 3.1 us at 4 TB/s."""
    text = kda_report.export_costs(ROWS, 4.0)
    assert "| H12-1x8192 | slow | 16 | 12.0 | 3.1 | 6.1 |" in text
    assert "| H12-1x8192 | slow | 1 | 0.0 | 0.2 | 2.3 |" in text
    assert "64x128" not in text


def test_write_report(tmp_path: Path) -> None:
    source = tmp_path / "in" / "kda_prefill.json"
    source.parent.mkdir()
    source.write_text(json.dumps({"meta": META, "rows": ROWS}))
    files = kda_report.write_report(source, tmp_path / "out")
    assert [path.name for path in files[1:]] == ["kda_prefill.md", "kda_prefill.png"]
    assert files[2].read_bytes().startswith(b"\x89PNG") and files[2].stat().st_size > 10_000


def test_write_report_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    source = tmp_path / "kda_prefill.json"
    source.write_text(json.dumps({"meta": META, "rows": ROWS}))
    assert [path.name for path in kda_report.write_report(source, tmp_path)] == [
        *("kda_prefill.json", "kda_prefill.md")
    ]
    assert "no plot: pip install" in capsys.readouterr().out
