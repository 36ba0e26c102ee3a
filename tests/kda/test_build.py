"""Models made for a device that can't hold them."""

import os
from pathlib import Path

import pytest
import torch
from torch_kda.kda import build
from torch_kda.kda.__main__ import app
from torch_kda.kda.build import load_model
from torch_kda.kda.config import EngineConfig
from torch_kda.kda.presets import model_preset
from typer.testing import CliRunner

GIB = 2**30
CURE = "; take fewer layers, a smaller model or another device"


def test_load_model_larger_than_the_machine() -> None:
    """Refused before it is asked for: a CPU would give it, and end the process in the filling."""
    vast = model_preset("kimi-linear-48b-a3b", num_experts=1 << 20)
    with pytest.raises(RuntimeError) as caught:
        load_model(vast, EngineConfig(), None)
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    assert str(caught.value) == (
        "load_model: kimi-linear-48b-a3b with 27 layers in bfloat16 needs 359,661.8 GiB for its "
        f"weights, and cpu has room for {has:,.1f}{CURE}"
    )
    assert caught.value.__cause__ is None, "torch was asked"


def test_load_model_refused_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same words where torch can't get what the machine should have."""
    monkeypatch.setattr(build, "_memory_bytes", lambda _: 1 << 80)
    with pytest.raises(RuntimeError, match=r"tiny with 4 layers in float32 needs [\d,.]+ GiB") as e:
        load_model(model_preset("tiny", vocab_size=1 << 44), EngineConfig(), None)
    assert "can't allocate memory" in str(e.value.__cause__)


def test_load_model_larger_than_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch holds in reserve is free too."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (20 * GIB, 140 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 15 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5 * GIB)
    with pytest.raises(RuntimeError, match=f"91.5 GiB .* cuda:0 has room for 30.0{CURE}"):
        load_model(model_preset("kimi-linear-48b-a3b"), EngineConfig(device="cuda:0"), None)


def test_profile_larger_than_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "_memory_bytes", lambda _: 2 * GIB)
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--model", "kimi-linear-48b-a3b"]
    found = CliRunner().invoke(app, ["profile", *arguments, "--layers", "3"])
    assert found.exit_code == 1 and found.stderr.count("\n") == 1
    assert "with 3 layers in bfloat16 needs 8.5 GiB for its weights" in found.stderr
