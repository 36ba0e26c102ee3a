"""bench_demo."""

import json
from pathlib import Path

import pytest
import torch
from torch_kda.ops import kda, reference
from torch_kda.profiles import bench_demo


def test_both_paths_keep_the_demo_promises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*tensors: torch.Tensor, **options: float) -> torch.Tensor:
        calls.append(tensors[0].shape[0])
        return reference.kda_prefill_ref(*tensors, **options)

    monkeypatch.setattr(bench_demo, "kda_prefill_ref", counted)
    bench_demo.main(["--out", str(tmp_path), "--device", "cpu", "--tokens", "600"])
    assert len(calls) >= 3 * 6, "three layers and six requests went another way"
    data = json.loads((tmp_path / "demo.json").read_text())
    for path in bench_demo.PATHS:
        assert data[path]["tokens_equal"]
        assert data[path]["single_pass"]["forwards"] == [1, 1]
        assert min(data[path]["single_pass"]["ttft_s"]) > 0
    assert "600 tokens" in (tmp_path / "demo.md").read_text()


def test_out_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_demo, "run_demo", lambda *_, **__: pytest.fail("it ran"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--out: .*file is no folder that can be written"):
        bench_demo.main(["--out", str(tmp_path / "file"), "--device", "cpu"])


def test_torch_prefill_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kda._kda_prefill
    with pytest.raises(RuntimeError), bench_demo.torch_prefill():
        assert kda._kda_prefill is not before
        raise RuntimeError
    assert kda._kda_prefill is before
