"""The full search in small: tasks, what is kept between runs, and the report."""

import json

import pytest
from torch_kda.tests.modelcheck import run
from torch_kda.tests.modelcheck.__main__ import main
from torch_kda.tests.modelcheck.faults import applied
from torch_kda.tests.modelcheck.report import write_report
from torch_kda.tests.modelcheck.run import Task, all_tasks, fingerprint, run_all, run_task
from torch_kda.tests.modelcheck.scopes import SCOPES, quick
from torch_kda.tests.modelcheck.seeded_faults import FAULTS

SMALL = Task("scope", "never fits")


@pytest.fixture
def small_scopes(monkeypatch) -> None:
    monkeypatch.setattr(run, "SCOPES", tuple(quick(scope) for scope in SCOPES))


def test_all_tasks() -> None:
    tasks = all_tasks()
    assert {task.kind for task in tasks} == {"scope", "walks", "faults"}
    assert len({task.file for task in tasks}) == len(tasks)
    assert all_tasks("never fits") == [SMALL]


def test_run_all(tmp_path) -> None:
    """A second run takes the results of the first; other sources make them void."""
    told = []
    tasks = [Task("quick", "evictions without end")]
    (first,) = run_all(tasks, tmp_path, 1, told.append)
    assert first[1]["is_complete"] and first[1]["states"] > 100
    kept = tmp_path / tasks[0].file
    kept.write_text(json.dumps({"transitions": 1}))
    assert list(run_all(tasks, tmp_path, 1, told.append)) == [(tasks[0], {"transitions": 1})]
    (tmp_path / "sources.txt").write_text("others")
    (third,) = run_all(tasks, tmp_path, 1, told.append)
    assert third[1]["states"] == first[1]["states"]


def test_run_task_tells_a_violation(small_scopes, tmp_path) -> None:
    fault = next(fault for fault in FAULTS if fault.name == "running slot leaks")
    with applied(fault):
        result = run_task(SMALL, tmp_path)
    assert result["violation"].startswith("never fits: submit")


def test_walks(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(run, "WALKS_A_TASK", 2)
    result = run_task(Task("walks", "0"), tmp_path)
    assert result["walks"] == 2 and 400 < result["steps"] <= 1200
    fault = next(fault for fault in FAULTS if fault.name == "own blocks leak")
    with applied(fault):
        assert "random walk of seed 0" in run_task(Task("walks", "0"), tmp_path)["violation"]


def test_write_report(small_scopes, tmp_path) -> None:
    results = [(SMALL, run_task(SMALL, tmp_path))]
    results.append((Task("walks", "0"), {"walks": 3, "steps": 900, "cpu_seconds": 1.0}))
    caught = run.find_fault(FAULTS[0])
    missed = {"name": "x", "where": "y", "scope": "z", "by": None}
    results.append((Task("faults", "all"), {"faults": [caught, missed]}))
    path = tmp_path / "modelcheck.md"
    write_report(path, results, 61.0)
    text = path.read_text()
    assert f"**{results[0][1]['transitions']:,} transitions**" in text
    assert "**900 random steps**" in text and "**1 of 2 seeded faults**" in text
    assert fingerprint() in text and "FAILED" not in text and "**MISSED**" in text
    assert "| never fits | 0 x 4 -> 2; 0 x 6 -> 2; 0 x 5 -> 2 | blocks 3 |" in text
    write_report(path, [*results, (SMALL, {"violation": "never fits: submit: boom"})], 61.0)
    assert "**FAILED**" in path.read_text()


@pytest.mark.parametrize("by", ["rules", None])
def test_main(monkeypatch, tmp_path, capsys, by) -> None:
    """Exit code 1 if anything is wrong; the report is written either way."""
    found = {"name": "x", "where": "y", "scope": "z", "by": by, "transitions": 1}
    results = [(Task("faults", "all"), {"faults": [found]})]
    monkeypatch.setattr(
        "torch_kda.tests.modelcheck.__main__.run_all", lambda *arguments: iter(results)
    )
    path = tmp_path / "modelcheck.md"
    monkeypatch.setattr("sys.argv", ["modelcheck", "--report", str(path)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == (0 if by else 1)
    assert path.exists()
    assert ("not caught: x" in capsys.readouterr().out) is (by is None)


def test_main_without_tasks(monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["modelcheck", "--only", "nothing like it"])
    with pytest.raises(SystemExit, match="no task has 'nothing like it'"):
        main()
