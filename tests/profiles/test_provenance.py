"""What is noted beside a number."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch_kda.profiles.provenance import first_line, head_commit, origin


def test_first_line() -> None:
    assert first_line(sys.executable, "-c", "print('one'); print('two')") == "one"
    assert first_line(sys.executable, "-c", "exit(3)") is None
    assert first_line("no-such-program") is None


def test_head(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of the folder that the code lies in, not of the caller's or of one further up."""

    def git(*words: str) -> None:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *names, "-C", str(tmp_path), *words], check=True)

    inside = tmp_path / "site-packages"
    inside.mkdir()
    git("init", "-q")
    git("commit", "-q", "--allow-empty", "-m", "first")
    found = head_commit(tmp_path)
    assert found and re.fullmatch("[0-9a-f]{7,}", found)
    assert head_commit(inside) is None
    ours = head_commit()
    monkeypatch.chdir(tmp_path)
    assert head_commit() == ours != found


def test_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command can be pasted into a shell; a commit that is named goes before git's."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    on_gpu, on_cpu = (
        origin(torch.device(name), "abc", ["bench", "--cells", "H12-*"]) for name in ("cuda", "cpu")
    )
    assert on_gpu["gpu"] == "Some GPU" and "driver" in on_gpu and "cpu" not in on_gpu
    assert on_cpu["gpu"] is None and on_cpu["cpu"] and "driver" not in on_cpu
    for found in (on_gpu, on_cpu):
        assert found["commit"] == "abc" and found["torch"] == torch.__version__
        assert found["command"] == "bench --cells 'H12-*'"
