"""The bench's program: options, what it writes, what it refuses to time. Needs no device."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_kda.kda.__main__ import app
from torch_kda.profiles import bench_ops, kda_cells, kda_peers
from torch_kda.profiles.bench_ops import Variant
from torch_kda.profiles.kda_cells import Cell, Inputs, Result
from torch_kda.profiles.provenance import ROOT
from torch_kda.profiles.timing import Timing
from typer.testing import CliRunner

CELLS = (Cell(2, (96, 40)), Cell(1, (64,)))
ROW_KEYS = ["heads", "lens", "gates", "checkpoints", "floor_us", "us", "eager_us"]
ROW_KEYS += ["err_out", "err_state", "err_tokens"]
META = {"gpu": "Some GPU", "driver": None, "torch": "2", "cutlass_dsl": None, "commit": "abc"}
META |= {"command": "", "date": "", "copy_tb_s": 4.0}


def kda_prefill_json() -> Path:
    return ROOT / "profiles" / "results" / "kda_prefill.json"


def fake_peer(sets: Sequence[Inputs]) -> list[kda_peers.Call]:
    """A peer without checkpoints, a little off."""
    if sets[0].checkpoint_offsets is not None:
        return []

    def call(ours: kda_peers.Call) -> Result:
        result = ours()
        return Result(result.out * 1.01, result.states)

    return [partial(call, ours) for ours in kda_peers.torch_kda(sets)]


def fake_times(
    variants: Mapping[Variant, Sequence[Any]], rounds: int, on_failure: Any
) -> dict[Variant, Timing]:
    return {name: Timing(10.0 + i, 9.0, 12.0, 20.0) for i, name in enumerate(variants)}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU in the place of a GPU, with a clock that always says the same."""
    monkeypatch.setattr(kda_cells, "CELLS", CELLS)
    monkeypatch.setattr(bench_ops, "CELLS", CELLS)
    monkeypatch.setattr(bench_ops, "require_cuda", lambda _: torch.device("cpu"))
    monkeypatch.setattr(bench_ops.kda_prefill, "prepare", lambda _: None)
    monkeypatch.setattr(bench_ops, "copy_bytes_per_second", lambda _: 4e12)
    monkeypatch.setattr(bench_ops, "metadata", lambda *_: META)
    monkeypatch.setattr(bench_ops, "l2_bytes", lambda _: 2**20)
    monkeypatch.setattr(bench_ops, "time_calls", fake_times)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**30))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        bench_ops, "find_peers", lambda _: {"torch_kda": kda_peers.torch_kda, "fla": fake_peer}
    )


def test_main(machine: None, tmp_path: Path, capsys: Any) -> None:
    bench_ops.main(["--out", str(tmp_path), "--gates", "slow,softplus"])
    data = json.loads((tmp_path / "kda_prefill.json").read_text())
    assert list(data) == ["meta", "rows"] and list(data["meta"]) == list(META)
    rows = data["rows"]
    assert [(row["heads"], row["gates"], row["checkpoints"]) for row in rows] == [
        (heads, gates, c) for heads in (2, 1) for gates in ("slow", "softplus") for c in (0, 1, 16)
    ]
    for row in rows:
        assert list(row) == ROW_KEYS
        for key in ("us", "eager_us", "err_out", "err_state"):
            assert list(row[key]) == ["torch_kda", "vllm", "fla", "cudnn"], key
            assert row[key]["vllm"] is None and row[key]["cudnn"] is None
        # all of a cell are timed in one go, ours first: with 0, 1 and 16 checkpoints, then fla
        us = {0: 10.0, 1: 11.0, 16: 12.0}[row["checkpoints"]]
        assert row["us"]["torch_kda"] == us and row["eager_us"]["torch_kda"] == 20.0
        assert 0 < row["err_out"]["torch_kda"] < 4.5e-3
        assert 0 < row["err_state"]["torch_kda"] < 3.5e-3
        has_fla = row["checkpoints"] == 0
        assert row["us"]["fla"] == (13.0 if has_fla else None)
        assert (row["err_out"]["fla"] is not None) == has_fla
        assert row["err_tokens"] == sum(row["lens"])
    assert rows[0]["floor_us"] == round(CELLS[0].io_bytes(0) / 4e12 * 1e6, 2)
    assert (tmp_path / "kda_prefill.md").is_file() and (tmp_path / "kda_prefill.png").is_file()
    out = capsys.readouterr().out
    assert "H2-mixed" in out and "torch_kda 10.0 (9.0..12.0) eager 20" in out


def test_main_refuses_wrong_results(
    machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A wrong peer has errors but no time; wrong results of ours end the program with 1."""
    monkeypatch.setitem(bench_ops.LIMITS, "fla", (5e-3, 4e-3))
    bench_ops.main(["--out", str(tmp_path), "--gates", "slow", "--checkpoints", "0"])
    rows = json.loads((tmp_path / "kda_prefill.json").read_text())["rows"]
    assert all(row["us"]["fla"] is None and row["err_out"]["fla"] > 5e-3 for row in rows)
    assert all(row["us"]["torch_kda"] == 10.0 for row in rows)
    monkeypatch.setitem(bench_ops.LIMITS, "torch_kda", (1e-6, 1e-6))
    with pytest.raises(SystemExit) as end:
        bench_ops.main(["--out", str(tmp_path), "--gates", "slow", "--checkpoints", "1"])
    assert end.value.code == 1
    rows = json.loads((tmp_path / "kda_prefill.json").read_text())["rows"]
    assert all(row["us"]["torch_kda"] is None for row in rows)
    assert "torch_kda with 1 is wrong and not timed: output" in capsys.readouterr().out


def test_main_survives_a_peer(
    machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """A peer that isn't there, raises, or can't be captured is left out; the others are timed."""

    def missing(sets: Sequence[Inputs]) -> list[kda_peers.Call]:
        raise ImportError("no module of this name")

    def broken(sets: Sequence[Inputs]) -> list[kda_peers.Call]:
        def call() -> Result:
            raise TypeError("no such\nargument")

        return [call for _ in sets]

    def times(
        variants: Mapping[Variant, Any], rounds: int, on_failure: Any
    ) -> dict[Variant, Timing]:
        fla = Variant("fla", 0)
        assert [*variants] == [Variant("torch_kda", 0), fla]
        assert len(variants[fla]) > 1, "no call of another input set is captured"
        on_failure(fla, RuntimeError("fla can't be captured in a CUDA graph"))
        return fake_times({Variant("torch_kda", 0): []}, rounds, on_failure)

    peers = {"vllm": missing, "fla": fake_peer, "torch_kda": kda_peers.torch_kda, "cudnn": broken}
    monkeypatch.setattr(bench_ops, "find_peers", lambda _: peers)
    monkeypatch.setattr(bench_ops, "time_calls", times)
    arguments = ["--gates", "slow", "--checkpoints", "0"]
    bench_ops.main(["--out", str(tmp_path), *arguments])
    rows = json.loads((tmp_path / "kda_prefill.json").read_text())["rows"]
    for row in rows:
        assert row["us"] == {"torch_kda": 10.0, "vllm": None, "fla": None, "cudnn": None}
        assert row["err_out"]["cudnn"] is None
    out = capsys.readouterr().out
    assert "vllm with 0 is not timed: ImportError: no module of this name\n" in out
    assert "cudnn with 0 is not timed: TypeError: no such argument\n" in out
    assert "fla with 0 is not timed: RuntimeError: fla can't be captured" in out
    monkeypatch.setattr(bench_ops, "find_peers", lambda _: {"torch_kda": broken})
    with pytest.raises(TypeError, match="no such"):
        bench_ops.main(["--out", str(tmp_path), *arguments])


def test_main_render(machine: None, tmp_path: Path) -> None:
    bench_ops.main(["--out", str(tmp_path / "a"), "--gates", "slow", "--checkpoints", "0"])
    source = tmp_path / "a" / "kda_prefill.json"
    bench_ops.main(["--out", str(tmp_path / "b"), "--render", str(source)])
    written = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert written == ["kda_prefill.json", "kda_prefill.md", "kda_prefill.png"]
    for name in written[:2]:
        assert (tmp_path / "b" / name).read_text() == (tmp_path / "a" / name).read_text()


@pytest.mark.parametrize(("text", "message"), [("", "is not JSON"), ("{}", "is not a kda_prefill")])
def test_main_render_of_another(machine: None, tmp_path: Path, text: str, message: str) -> None:
    source = tmp_path / "a.json"
    source.write_text(text)
    with pytest.raises(ValueError, match=f"--render: .*a.json {message}"):
        bench_ops.main(["--out", str(tmp_path), "--render", str(source)])


@pytest.mark.parametrize("name", ["around", "model", "simulate", "kda_prefill_stages"])
def test_main_render_of_another_bench(machine: None, tmp_path: Path, name: str) -> None:
    source = kda_prefill_json().with_name(f"{name}.json")
    done = CliRunner().invoke(
        app, ["bench", "ops", "--out", str(tmp_path / "out"), "--render", str(source)]
    )
    assert done.exit_code == 2 and done.output.count("\n") == 1
    assert f"--render: {source} is not a kda_prefill.json of torch-kda bench ops" in done.output
    assert not (tmp_path / "out").exists()


def test_main_render_of_the_published(tmp_path: Path) -> None:
    source = kda_prefill_json()
    bench_ops.main(["--out", str(tmp_path), "--render", str(source)])
    for name in ("kda_prefill.json", "kda_prefill.md"):
        assert (tmp_path / name).read_text() == source.with_name(name).read_text()


def test_main_render_without_rows(machine: None, tmp_path: Path) -> None:
    source = tmp_path / "a.json"
    source.write_text(json.dumps({"meta": META, "rows": []}))
    with pytest.raises(ValueError, match=r"a\.json is not .*: rows is no list of anything"):
        bench_ops.main(["--out", str(tmp_path), "--render", str(source)])


@pytest.mark.parametrize("time", [0, -1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("key", ["us", "eager_us"])
def test_main_render_of_no_time(machine: None, tmp_path: Path, key: str, time: float) -> None:
    data = json.loads(kda_prefill_json().read_text())
    data["rows"][1][key]["torch_kda"] = time
    source = tmp_path / "a.json"
    source.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"a\.json is not .*: rows\[1\]\.{key}\.torch_kda is "):
        bench_ops.main(["--out", str(tmp_path / "out"), "--render", str(source)])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("key", "value", "misfit"),
    [
        ("checkpoints", 10**9, "checkpoints is 1000000000"),
        ("checkpoints", -1, "checkpoints is -1"),
        ("checkpoints", True, "checkpoints is true"),
        ("heads", 0, "heads is 0"),
        ("lens", [0], "lens[0] is 0"),
        ("lens", [10**9], "lens[0] is 1000000000"),
        ("lens", [500], "err_tokens is 512, and not the sum of its lens"),
        ("gates", "$", 'gates is "$"'),
        ("floor_us", 10**400, "floor_us is 1000"),
        ("err_out.vllm", None, "err_out.vllm is null beside its err_state"),
        ("err_state.vllm", None, "err_state.vllm is null beside its err_out"),
        ("err_state.vllm", -1, "err_state.vllm is -1"),
        ("us.cudnn", 3.0, "err_out.cudnn is null beside its us"),
    ],
)
def test_main_render_of_the_damaged(key: str, value: Any, misfit: str, tmp_path: Path) -> None:
    data = json.loads(kda_prefill_json().read_text())
    part, _, last = key.rpartition(".")
    row = data["rows"][0]
    (row[part] if part else row)[last] = value
    source = tmp_path / "a.json"
    source.write_text(json.dumps(data))
    with pytest.raises(ValueError) as error:
        bench_ops.main(["--out", str(tmp_path / "out"), "--render", str(source)])
    what = "a kda_prefill.json of torch-kda bench ops"
    assert str(error.value).startswith(f"--render: {source} is not {what}: rows[0].{misfit}")
    assert not (tmp_path / "out").exists()


def test_main_render_of_a_peer_that_is_not_finite(
    machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the bench wrote of the worst error can be rendered."""

    def nowhere(sets: Sequence[Inputs]) -> list[kda_peers.Call]:
        def call(ours: kda_peers.Call) -> Result:
            result = ours()
            return Result(result.out * float("nan"), result.states)

        return [partial(call, ours) for ours in kda_peers.torch_kda(sets)]

    peers = {"torch_kda": kda_peers.torch_kda, "fla": nowhere}
    monkeypatch.setattr(bench_ops, "find_peers", lambda _: peers)
    bench_ops.main(["--out", str(tmp_path / "a"), "--gates", "slow", "--checkpoints", "0"])
    source = tmp_path / "a" / "kda_prefill.json"
    bench_ops.main(["--out", str(tmp_path / "b"), "--render", str(source)])
    assert "| 1.0e+15 / " in (tmp_path / "b" / "kda_prefill.md").read_text()


def test_main_out_is_checked_first(
    machine: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_ops.kda_prefill, "prepare", lambda _: pytest.fail("it ran"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--out: .*file is no folder that can be written"):
        bench_ops.main(["--out", str(tmp_path / "file")])


def test_main_render_several(machine: None, tmp_path: Path) -> None:
    """Parts of one measurement become one; of two they do not."""
    sources = []
    for gates in ("slow", "softplus"):
        out = tmp_path / gates
        bench_ops.main(["--out", str(out), "--gates", gates, "--checkpoints", "0"])
        sources.append(out / "kda_prefill.json")
    command = ["--out", str(tmp_path / "all"), "--render", *map(str, sources)]
    bench_ops.main(command)
    rows = json.loads((tmp_path / "all" / "kda_prefill.json").read_text())["rows"]
    assert [row["gates"] for row in rows] == ["slow"] * 2 + ["softplus"] * 2
    twice = ["--out", str(tmp_path / "twice"), "--render", *2 * [str(sources[0])]]
    with pytest.raises(ValueError, match=r"two rows of heads 2, lens \[96, 40\], gates .slow., ch"):
        bench_ops.main(twice)
    assert not (tmp_path / "twice").exists()
    other = json.loads(sources[1].read_text())
    other["meta"]["commit"] = "def"
    sources[1].write_text(json.dumps(other))
    with pytest.raises(ValueError, match="differ in commit"):
        bench_ops.main(command)


def test_main_without_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="torch-kda bench ops needs a CUDA device"):
        bench_ops.main(["--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch-kda bench ops` hands its options on, and says in one line that it needs a device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runner = CliRunner()
    done = runner.invoke(app, ["bench", "ops", "--out", "x", "--quick"])
    assert done.exit_code == 1
    assert "torch-kda: torch-kda bench ops needs a CUDA device" in done.output
    done = runner.invoke(app, ["bench", "ops", "--help"])
    assert done.exit_code == 0 and "--checkpoints" in done.output and "--stages" in done.output


def test_parse_quick() -> None:
    options = bench_ops.parse(["--out", "x", "--quick"])
    assert [cell.name for cell in options.cells] == [
        cell.name for cell in kda_cells.CELLS if cell.name in kda_cells.QUICK
    ]
    assert options.gates == ["slow"] and options.checkpoints == [1] and options.peers is None
    options = bench_ops.parse(["--out", "x", "--quick", "--gates", "fast", "--peers", ""])
    assert options.gates == ["fast"] and options.peers == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cells", "H13-*"], "fits no cell"),
        (["--gates", "weak"], "are none of slow, fast, softplus"),
        (["--peers", "nobody"], "['nobody'] are none of vllm, fla, cudnn"),
        (["--checkpoints", "one"], "--checkpoints: expected an integer from 0 to 2,048, got 'one'"),
        (["--checkpoints", "0,99999999999"], "got '99999999999'"),
        (["--cells", ""], "--cells: expected at least one, got ''"),
        (["--gates", ""], "--gates: expected at least one, got ''"),
        (["--out", ""], "--out: expected a path, got ''"),
        (["--commit", ""], "--commit: expected a name, got ''"),
        (["--render", "a", "--quick", "--cells", "x"], "--cells, --quick can't go with --render"),
        (["--render", "a", "--peers", ""], "--peers can't go with --render"),
        (["--stages", "--peers", "", "--checkpoints", "1"], "--checkpoints, --peers can't go with"),
        (["--rounds", "0"], "--rounds: expected an integer from 1 to 1,000,000, got '0'"),
        (["--fast"], "unrecognized arguments"),
    ],
)
def test_parse_errors(arguments: list[str], message: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as end:
        bench_ops.parse(["--out", "x", *arguments])
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and message in line
