"""Which peers the bench finds."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_kda.profiles import kda_peers
from torch_kda.profiles.kda_cells import Cell, make_inputs

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without any peer."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in ("fla", "cudnn") else find(name)
    )
    monkeypatch.delenv(kda_peers.VLLM_VARIABLE, raising=False)


def test_find_peers_none() -> None:
    assert list(kda_peers.find_peers(None)) == ["torch_kda"]
    assert list(kda_peers.find_peers([])) == ["torch_kda"]


def test_find_peers_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kda_peers, "_is_there", lambda name: name != "fla")
    assert list(kda_peers.find_peers(None)) == ["torch_kda", "vllm", "cudnn"]
    assert list(kda_peers.find_peers(["cudnn"])) == ["torch_kda", "cudnn"]


def test_find_peers_asked_for() -> None:
    with pytest.raises(ValueError, match="'flash' is none of vllm, fla, cudnn"):
        kda_peers.find_peers(["flash"])
    with pytest.raises(RuntimeError, match="vllm is not here; set VLLM_FLASHKDA_SO"):
        kda_peers.find_peers(["vllm"])
    with pytest.raises(RuntimeError, match="fla is not here; install it"):
        kda_peers.find_peers(["fla"])


def test_find_peers_wrong_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(kda_peers.VLLM_VARIABLE, str(tmp_path / "gone.so"))
    with pytest.raises(RuntimeError, match=r"VLLM_FLASHKDA_SO=.*gone\.so is no file"):
        kda_peers.find_peers(None)


def test_peers_without_the_feature() -> None:
    """A row of 16 checkpoints, or of softplus gates, is no peer's but ours."""
    cell = Cell(2, (64, 256))
    many = make_inputs(cell, "slow", 16, 0, CPU)
    softplus = make_inputs(cell, "softplus", 0, 0, CPU)
    for name, peer in kda_peers.PEERS.items():
        assert peer([many]) == [], name
        if name != "fla":
            assert peer([softplus]) == [], name


def test_fla_cu_seqlens(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor and one copy on the host for all calls, as FLA knows them by their identity."""
    seen = []

    def chunk_kda(q: Tensor, *others: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        seen.append((q, options["cu_seqlens"], options["cu_seqlens_cpu"]))
        return q, options["initial_state"]

    monkeypatch.setitem(sys.modules, "fla.ops.kda", SimpleNamespace(chunk_kda=chunk_kda))
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    sets = [make_inputs(Cell(2, (64, 256)), "slow", 0, seed, CPU) for seed in range(8)]
    for call in kda_peers.fla(sets) * 2:
        call()
    rows, *lengths = ({id(x) for x in column} for column in zip(*seen, strict=True))
    assert len(seen) == 16 and len(rows) == 8 and [len(x) for x in lengths] == [1, 1]
    assert seen[0][1].tolist() == seen[0][2].tolist() == [0, 64, 320]


@pytest.mark.parametrize("count", [0, 1, 16])
def test_torch_kda(count: int) -> None:
    inputs = make_inputs(Cell(2, (64, 256)), "slow", count, 0, CPU)
    (call,) = kda_peers.torch_kda([inputs])
    first, again = call(), call()
    assert torch.equal(first.out, again.out), "states are not read where they were written"
    assert first.states.shape == (2, 2, 128, 128)
    if count == 0:
        assert first.checkpoints is None
    else:
        assert first.checkpoints is not None
        assert first.checkpoints.shape[0] == {1: 2, 16: 4 + 16}[count]
