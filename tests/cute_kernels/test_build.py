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


@pytest.mark.parametrize("name", ["file", "file/x", "folder"])
def test_build_checks_its_folder_first(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(objects, "package_version", lambda _: "1")
    monkeypatch.setattr(build, "build", lambda *_: pytest.fail("it ran"))
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "sm_90a").touch()
    with pytest.raises(SystemExit) as end:
        build.main(["--out", str(tmp_path / name)])
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert f"--out: {tmp_path / name / 'sm_90a'} is no folder that can be written: " in line


def test_build_without_the_dsl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Old objects stay."""
    monkeypatch.setattr(objects, "package_version", lambda _: None)
    (tmp_path / "sm_90a").mkdir()
    (tmp_path / "sm_90a" / "old.so").touch()
    with pytest.raises(SystemExit) as end:
        build.main(["--out", str(tmp_path)])
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 1 and "pip install 'torch-kda[cuda]'" in line
    assert (tmp_path / "sm_90a" / "old.so").exists()
