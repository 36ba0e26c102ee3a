"""The soak in small, and that it notices what it is there for."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch_kda.cache.prefix_cache import PrefixCache
from torch_kda.kda.layers import MoE
from torch_kda.kda.presets import PRESETS
from torch_kda.kda.runner import LaunchedStep, StepResult
from torch_kda.profiles.workloads import StandIn
from torch_kda.scheduler.batch import ScheduledBatch, ScheduledRow
from torch_kda.tests.soak.__main__ import main
from torch_kda.tests.soak.recompute import GRID
from torch_kda.tests.soak.run import Soak
from torch_kda.tests.soak.subject import Setup, make_setup

SEED = 3  # unit 16, four exports a row
STEPS = 30


def setup_of(dtype: str = "auto") -> Setup:
    return make_setup("tiny", device="cpu", seed=SEED, dtype=dtype)


def soaked(soak: Soak, steps: int = STEPS) -> Soak:
    soak.run(600, share=1, max_steps=steps, say=lambda line: None)
    return soak


def test_soak():
    """Everything happens, all of it is looked at, and nothing is wrong."""
    soak = soaked(Soak(setup_of(), seed=SEED, fault_rate=0.1), 80)
    assert soak.violations == []
    report = json.loads(json.dumps(soak.as_json()))
    assert report["slots_sampled"] > report["different_slots_sampled"] > 30
    assert report["kv_prefixes_sampled"] > report["slots_sampled"]
    assert report["preemptions"] > report["of_them_forced"] > 0
    evictions = report["evictions"]
    assert evictions["states"] > evictions["of_them_forced"]
    assert evictions["kv_units"] > evictions["of_these_forced"]
    assert sum(report["failed_forwards"].values()) > 2
    assert all(report["requests"].values())
    assert report["greedy"]["answers"] > 10 and report["greedy"]["equal_tokens"] > 30
    assert max(report["worst_relative_rms"].values()) < 1e-5  # fp32
    assert len(report["worst_relative_rms"]) == 3 + 3 + 1
    wrong = report["smallest_relative_rms_of_wrong_positions"]
    assert min(wrong["state, 16 tokens"], wrong["conv, 16 tokens"], wrong["conv, 1 token"]) > 0.1


def test_soak_bf16():
    """Rounding stays well below the tolerance, with choices of experts that it can't turn."""
    soak = soaked(Soak(setup_of("bfloat16"), seed=SEED), 25)
    assert soak.violations == []
    assert 1e-3 < max(soak.judge.found.worst.values()) < 8e-3


class Faulty(StandIn):
    """Changes the rows of every step that a fault touches, or its result."""

    def __init__(
        self,
        runner: StandIn,
        row: Callable[[ScheduledRow], ScheduledRow] = lambda row: row,
        result: Callable[[StepResult], StepResult] = lambda result: result,
    ) -> None:
        super().__init__(runner)  # pyright: ignore[reportArgumentType]
        self._row, self._result = row, result

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        changed = ScheduledBatch.of(batch.step, map(self._row, batch.rows))
        return self.runner.launch(changed)._replace(batch=batch)

    def finish(self, launched: LaunchedStep) -> StepResult:
        return self._result(self.runner.finish(launched))


def export_early(row: ScheduledRow) -> ScheduledRow:
    moved = [
        (position - GRID if position - GRID > row.start else position, slot)
        for position, slot in row.exports
    ]
    is_apart = len({position for position, _ in moved}) == len(moved)
    return row._replace(exports=tuple(moved)) if is_apart else row


def skip_exports(row: ScheduledRow) -> ScheduledRow:
    return row._replace(exports=())


def skip_kv(row: ScheduledRow) -> ScheduledRow:
    return row if row.is_decode else row._replace(kv_start=max(row.start, row.kv_start) + 1)


def start_from_zeros(row: ScheduledRow) -> ScheduledRow:
    return row if row.is_decode else row._replace(src_slot=-1)


def raise_in_prefill(row: ScheduledRow) -> ScheduledRow:
    if not row.is_decode and row.end > 100:
        raise RuntimeError("illegal memory access")
    return row


def other_tokens(result: StepResult) -> StepResult:
    return result._replace(token_ids=[[(t + 1) % 264 for t in row] for row in result.token_ids])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (export_early, "state 0 is off by"),
        (skip_exports, "state 0 is off by inf"),
        (skip_kv, "kv 0 is off by"),
        (start_from_zeros, "state 0 is off by"),
        (raise_in_prefill, "illegal memory access"),
    ],
)
def test_soak_catches_row(fault: Callable[[ScheduledRow], ScheduledRow], message: str):
    soak = Soak(setup_of(), seed=SEED, fault_rate=0)
    soak.witness.runner = Faulty(soak.witness.runner, row=fault)  # pyright: ignore[reportAttributeAccessIssue]
    assert any(message in found for found in soaked(soak).violations)


def test_soak_catches_tokens():
    """Tokens that the model would not have chosen, though caches agree with them."""
    soak = Soak(setup_of(), seed=SEED, fault_rate=0)
    soak.witness.runner = Faulty(soak.witness.runner, result=other_tokens)  # pyright: ignore[reportAttributeAccessIssue]
    assert any("greedy tokens part at" in found for found in soaked(soak).violations)


def test_soak_catches_leak(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(PrefixCache, "unpin", lambda self, slot: None)
    soak = soaked(Soak(setup_of(), seed=SEED, fault_rate=0))
    assert len(soak.leaks) == 1 and soak.leaks[0] in soak.violations


@pytest.fixture(scope="module")
def filled() -> Soak:
    """With something cached."""
    soak = Soak(setup_of("bfloat16"), seed=SEED, fault_rate=0)
    for _ in range(30):
        soak.traffic.act()
        soak.step()
    return soak


@pytest.fixture
def judged(filled: Soak) -> Iterator[Soak]:
    found = filled.judge.found
    assert not found.violations
    yield filled
    found.violations.clear()


@pytest.mark.parametrize("kind", ["state", "conv"])
def test_check_prefix_position(judged: Soak, kind: str):
    """One slot that holds what was 16 tokens before, in one layer and one kind."""
    soak, index = judged, 1
    node = next(node for node in soak.cache.nodes() if node.slot >= 0 and node.depth > 1)
    soak.judge.check_prefix(node)
    assert soak.violations == []
    tokens = soak.book.find(node.key)
    assert tokens is not None
    earlier = soak.judge.recompute.prefix(tokens).earlier
    assert earlier is not None
    slot = getattr(soak.runner.pools, kind)[index][node.slot]
    before = slot.clone()
    overwrite(slot, earlier[kind == "conv"][index])
    soak.judge.check_prefix(node)
    overwrite(slot, before)
    (violation,) = soak.violations
    assert f"{kind} {index} is off by" in violation and repr(node) in violation


def test_check_prefix_unknown_key(judged: Soak, monkeypatch: pytest.MonkeyPatch):
    node = next(node for node in judged.cache.nodes() if node.slot >= 0)
    monkeypatch.setattr(judged.book, "_found", {})
    judged.judge.check_prefix(node)
    (violation,) = judged.violations
    assert "nobody had tokens with its key" in violation


@torch.inference_mode()
def overwrite(slot: Tensor, values: Tensor) -> None:
    slot.copy_(values)


@torch.inference_mode()
def test_quieten(monkeypatch: pytest.MonkeyPatch):
    """Choices differ between tokens and between layers, and none is near."""
    setup = setup_of("bfloat16")
    chosen: list[Tensor] = []
    gaps: list[float] = []
    route = MoE.route

    def watched(self: MoE, x: Tensor, is_real: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scores = self.router(x.float()).sigmoid()
        best = scores.topk(self.num_experts_per_token + 1).values
        gaps.append(float((best[:, -2] - best[:, -1]).min()))
        found = route(self, x, is_real)
        chosen.append(found[0].sort(-1).values)
        return found

    monkeypatch.setattr(MoE, "route", watched)
    soak = Soak(setup, seed=SEED)
    soak.judge.recompute.prefix(list(range(256)))
    assert len(gaps) == 3 and min(gaps) > 0.7
    for choices in chosen:
        assert len(choices.unique(dim=0)) > 20
    assert not any(torch.equal(chosen[0], other) for other in chosen[1:])


@pytest.mark.parametrize("preset", list(PRESETS))
def test_make_setup(preset: str):
    """Heads, dims and gates are the preset's; prompts may exceed the budget, pools are small."""
    for seed in range(8):
        setup = make_setup(preset, device="cuda", seed=seed)
        model, engine = setup.model, setup.engine
        assert model.linear_num_heads == PRESETS[preset]["linear_num_heads"]
        assert model.gate_lower_bound == PRESETS[preset].get("gate_lower_bound")
        assert model.kda_layers == (0, 1, 3) and model.num_dense_layers == 1
        assert engine.prefix_match_unit % 16 == 0 and engine.max_steps_in_flight == 2
        assert engine.max_num_batched_tokens < model.max_model_len
        assert engine.num_kv_blocks is not None
        tokens = engine.num_kv_blocks * engine.kv_block_size
        assert model.max_model_len <= tokens < engine.max_num_seqs * model.max_model_len


def test_main(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["--device", "cpu", "--model", "tiny", "--minutes", "0.02", "--out", str(tmp_path)]
    assert main([*arguments, "--commit", "abc", "--min-slots", "0"]) == 0
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["is_ok"] and report["commit"] == "abc" and report["violations"] == []
    assert report["steps"] > 0 and report["torch"] == torch.__version__
    assert main([*arguments, "--min-slots", "100000"]) == 1
    assert "FAILED: only " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        *(("--minutes", value, "a number above 0, 1,440 at most") for value in ("-1", "0", "nan")),
        ("--share", "2", "a number above 0, 1 at most"),
        ("--min-slots", "-1", "an integer from 0 to "),
        ("--seed", "-1", "an integer from 0 to "),
        ("--out", "", "a path"),
    ],
)
def test_main_refuses(
    option: str, value: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--device", "cpu", "--model", "tiny", option, value])
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and f"{option}: expected {expected}" in line


def test_main_without_a_device(tmp_path: Path):
    """As its users run it: one line, and no trace."""
    command = [sys.executable, "-m", "torch_kda.tests.soak", "--out", str(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "torch-kda: device 'cuda': torch finds no CUDA device; use 'cpu'\n"
