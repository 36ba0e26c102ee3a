"""The ahead-of-time build: what it writes, says and refuses."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch_kda.cute_kernels import build, jit, objects
from torch_kda.cute_kernels.kda_prefill import PREFILL


def test_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    pytest.importorskip("cutlass")
    variant = PREFILL["bounded"]
    monkeypatch.setattr(build, "VARIANTS", (variant,))
    (tmp_path / "sm_100a").mkdir()
    (tmp_path / "sm_100a" / "stale.so").touch()
    build.main(["--arch", "sm_90a", "--arch", "sm_100a", "--out", str(tmp_path)])
    text = capsys.readouterr().out
    for arch in ("sm_90a", "sm_100a"):
        folder = tmp_path / arch
        files = sorted(path.name for path in folder.iterdir())
        assert files == ["kda_prefill_bounded.so", objects.MANIFEST]
        manifest = json.loads((folder / objects.MANIFEST).read_text())
        assert manifest["arch"] == arch and manifest["sources"] == objects.source_hash()
        assert manifest["cutlass_dsl"] == objects.versions()["cutlass_dsl"] is not None
        assert f"kda_prefill_bounded {arch}" in text
        monkeypatch.setenv(jit.AOT_VARIABLE, str(tmp_path))
        assert jit.find(variant, arch) == folder / "kda_prefill_bounded.so"
    assert "64 threads" in text and " registers " in text and "0 B stack" in text


@pytest.mark.parametrize(
    "arguments", [["--arch", "sm_80", "--out", "x"], ["--arch", "sm_90a"]], ids=["arch", "no-out"]
)
def test_build_refuses(arguments: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        build.main(arguments)
    assert end.value.code == 2 and "usage" in capsys.readouterr().err
