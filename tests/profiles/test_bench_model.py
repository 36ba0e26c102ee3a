"""The model bench as its users run it, on a CPU: its schema, and that figures are of its runs."""

import json
import os
from collections.abc import Generator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch_kda.kda.__main__ import app
from torch_kda.profiles import bench_model, model_stages
from torch_kda.profiles.bench_model import parse
from torch_kda.profiles.model_report import markdown, merge
from torch_kda.profiles.model_stages import Bench
from torch_kda.profiles.provenance import ROOT
from typer.testing import CliRunner

RESULTS = ROOT / "profiles" / "results"

SCHEMA = {
    "ttft": {
        "workload",
        "tokens",
        "concurrency",
        "single_pass_ms",
        "two_pass_ms",
        "single_forwards",
        "two_forwards",
        "eager_fla_ms",
    },
    "prefill": {"tokens", "ms", "matmul_share"},
    "decode": {
        "batch",
        "step_us",
        "floor_us",
        "host_us",
        "kda_us",
        "kda_floor_us",
        "eager_fla_step_us",
    },
    "compile": {"graph_breaks", "recompiles", "cold_s", "warm_s"},
}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "results"
    peer = folder.parent / "peer.json"
    peer.write_text(json.dumps({"prefill_ms": {"500": 700.0}, "decode_us": {"4": 80.0}}))
    options = ["--model", "tiny", "--quick", "--device", "cpu", "--no-compile", "--commit", "abc"]
    arguments = ["bench", "model", *options, "--peer", str(peer), "--out", str(folder)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[-2:] == [str(folder / "model.json"), str(folder / "model.md")]
    return folder


def test_schema(out: Path) -> None:
    data = json.loads((out / "model.json").read_text())
    assert set(data) == {"meta", *SCHEMA, "idle_share", "greedy_equal_share"}
    for name in ("ttft", "prefill", "decode"):
        assert data[name] and all(set(row) == SCHEMA[name] for row in data[name])
    assert set(data["compile"]) == SCHEMA["compile"]
    assert data["meta"]["commit"] == "abc" and "--quick" in data["meta"]["command"]


def test_figures(out: Path) -> None:
    data = json.loads((out / "model.json").read_text())
    rows = data["ttft"]
    assert [(row["workload"], row["concurrency"]) for row in rows] == [
        ("closed", 1),
        ("closed", 2),
        ("burst", 1),
        ("burst", 2),
    ]
    for row in rows:
        assert row["tokens"] == 500 and row["single_pass_ms"] > 0
    # one forward against two: chunks of other requests may cut a prompt further
    assert (rows[0]["single_forwards"], rows[0]["two_forwards"]) == (1, 2)
    assert rows[0]["eager_fla_ms"] == 700 and rows[1]["eager_fla_ms"] is None
    assert [row["batch"] for row in data["decode"]] == [1, 4]
    assert data["decode"][1]["eager_fla_step_us"] == 80
    assert data["greedy_equal_share"] == 1  # eager against eager
    (turn,) = data["meta"]["turns"]
    # of 200 tokens the last state on the grid of 96 is found
    assert (turn["context"], turn["cached"], turn["new"], turn["forwards"]) == (200, 192, 20, 1)
    assert turn["ms"] > 0 and turn["context_ms"] > 0
    hosts = data["meta"]["host_detail"]
    assert [hosts[str(row["batch"])]["least_us"] for row in data["decode"]] == [
        row["host_us"] for row in data["decode"]
    ]
    detail = data["meta"]["ttft_detail"]["closed 1"]["two_pass"]
    # two requests measured, one to warm up; each two prefill steps and five of decode
    assert (detail["requests"], detail["prefill_steps"], detail["steps"]) == (2, 6, 21)


def test_report(out: Path) -> None:
    page = (out / "model.md").read_text()
    parts = ("## Time to the first token", "| closed | 1 |", "## Decode after 40 tokens")
    for part in (*parts, "| 200 | 192 | 20 |"):
        assert part in page
    assert "cold start: not measured; warm start: not measured" in page
    (out / "model.md").unlink()
    arguments = ["--render", str(out / "model.json"), "--out", str(out)]
    done = CliRunner().invoke(app, ["bench", "model", *arguments])
    assert done.exit_code == 0
    assert done.stdout.split() == [str(out / "model.json"), str(out / "model.md")]
    assert (out / "model.md").read_text() == page


class CoreByCore:
    """An engine whose step takes the host 1 ms more for each core's number, with a wait of 50 ms.

    The first steps on a core take longer, the one after them much longer, as one does in which
    somebody else had the core.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, order: list[int | None]) -> None:
        self.steps: list[SimpleNamespace] = []
        self.now, self.core, self.on_core = 0.0, None, 0
        self.order = order
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(model_stages, "time", clock)
        monkeypatch.setattr(model_stages, "on_each_core", self.on_each_core)

    def on_each_core(self, rounds: int) -> Generator[int | None, None, None]:
        for core in self.order[:rounds]:
            self.core, self.on_core = core, 0
            yield core

    def step(self) -> None:
        extra = {0: 0.004, 1: 0.004, 2: 0.3}.get(self.on_core, 0)
        self.on_core += 1
        self.now += 0.05 + (self.core or 1) / 1e3 + extra
        self.steps.append(SimpleNamespace(wait=0.05, seconds=len(self.steps) / 1e3))


@pytest.mark.parametrize(
    ("order", "steps", "total", "expected"),
    [
        ([5, 3, 9, 4, 8, 6, 7, 2], 64, 80, (8, 2e3, 5.5e3, 9e3)),
        ([5, 5, 3, 3, 9, 9, 4, 4], 64, 80, (4, 3e3, 4.5e3, 9e3)),
        ([None] * 8, 64, 80, (0, 1e3, 1e3, 1e3)),
        ([5, 3], 4, 8, (2, 153e3, 154e3, 155e3)),  # of two steps, one disturbed
        ([4], 1, 3, (1, 304e3, 304e3, 304e3)),
    ],
)
def test_decode_us(
    order: list[int | None],
    steps: int,
    total: int,
    expected: tuple[int, float, float, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Host time is the least of the cores' medians, without the first steps on each and waits."""
    bench = Bench(parse(["--out", "x"]), [])
    engine = CoreByCore(monkeypatch, order)
    step_us, host = bench.decode_us(engine, engine, steps)
    assert len(engine.steps) == 3 + total
    assert step_us == pytest.approx(1e3 * (3 + (total - 1) / 2))  # of all but three to warm up
    assert list(host) == ["cores", "least_us", "median_us", "most_us"]
    assert tuple(host.values()) == pytest.approx(expected)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="cores can't be chosen here")
def test_decode_us_interrupted() -> None:
    """On a core or not, the thread may run afterwards where it might before."""
    allowed, steps = os.sched_getaffinity(0), []

    def step() -> None:
        steps.append(SimpleNamespace(wait=0.0, seconds=1.0))
        if len(steps) == 6:
            assert len(os.sched_getaffinity(0)) == 1
            raise KeyboardInterrupt

    engine = SimpleNamespace(step=step, steps=steps)
    with pytest.raises(KeyboardInterrupt):
        Bench(parse(["--out", "x"]), []).decode_us(engine, engine)
    assert os.sched_getaffinity(0) == allowed


def test_report_of_host_times() -> None:
    """The least of the cores' medians, and beside it those of the others."""
    data = json.loads((RESULTS / "model.json").read_text())
    data["decode"] = data["decode"][:2]
    detail = {"cores": 8, "least_us": 156.0, "median_us": 389.0, "most_us": 1881.0}
    data["meta"]["host_detail"] = {"1": detail, "2": {**detail, "cores": 0}}
    page = markdown(data)
    assert "| host us | all cores |" in page and "where it is least" in page
    assert "| 156..1,881, median 389 |" in page and "| can't be chosen |" in page


def test_merge(out: Path) -> None:
    """Stages of one model, measured in two runs."""
    data = json.loads((out / "model.json").read_text())
    one = {**data, "ttft": data["ttft"][:2], "decode": [], "greedy_equal_share": None}
    two = {**data, "ttft": data["ttft"][2:], "prefill": [], "idle_share": 0.5}
    two["compile"] = {**data["compile"], "warm_s": 3.0}
    merged = merge([one, two])
    for key in ("ttft", "prefill", "decode", "greedy_equal_share"):
        assert merged[key] == data[key]
    assert merged["idle_share"] == 0.5 and merged["compile"]["warm_s"] == 3.0
    assert merged["meta"]["command"].count("--quick") == 2
    other = {**two, "meta": {**data["meta"], "layers": 3}}
    with pytest.raises(ValueError, match="differ in layers"):
        merge([one, other])
    for stage, case in (("ttft", "workload"), ("prefill", "tokens 64"), ("decode", "batch 1")):
        part = {**data, "ttft": [], "prefill": [], "decode": [], stage: data[stage]}
        with pytest.raises(ValueError, match=f"--render: there are two rows of {case}"):
            merge([part, part])


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--stages", "closed,nap", "['nap'] are none of closed, "),
        *(
            ("--streams", value, "an integer from 1 to 256")
            for value in ("one", "0", "1,-2", "1.5")
        ),
        *(("--streams", value, "an integer from 1 to 256") for value in ("", "99999999999")),
        *(("--minutes", value, "above 0, 1,440 at most") for value in ("0", "-1", "nan", "inf")),
        ("--layers", "1001", "an integer from 1 to 1,000"),
    ],
)
def test_parse_refuses(
    option: str, value: str, expected: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--out", "x", f"{option}={value}"])
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2
    assert f"argument {option}: " in line and expected in line and value.split(",")[-1] in line


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--stages", ""], "--stages: expected at least one, got ''"),
        (["--model", "", "--quick"], "--model: expected a name, got ''"),
        (["--commit", ""], "--commit: expected a name, got ''"),
        (["--device", ""], "--device: expected a name, got ''"),
        (["--out", ""], "--out: expected a path, got ''"),
        (["--render", "a", "--stages", "warm", "--quick"], "--quick, --stages can't go with --ren"),
        (["--render", "a", "--device", "cpu"], "--device can't go with --render"),
        (["--no-compile", "--compile-cache", "x"], "--compile-cache: not allowed with"),
        (["--device", "cpu"], "--device: on a CPU there is only --quick"),
        (["--no-peer", "--peer", "x"], "--peer: not allowed with"),
    ],
)
def test_parse_refuses_what_it_would_not_heed(
    options: list[str], expected: str, capsys: pytest.CaptureFixture
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--out", "x", *options])
    (line,) = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and expected in line


@pytest.mark.parametrize(
    ("options", "model"),
    [
        (["--quick", "--device", "cpu"], "tiny"),
        (["--quick", "--device", "cuda"], "kimi-linear-48b-a3b"),
        (["--device", "cuda"], "kimi-linear-48b-a3b"),
        (["--quick", "--device", "cpu", "--model", "k3-kda-rank"], "k3-kda-rank"),
    ],
)
def test_parse_model(options: list[str], model: str) -> None:
    assert parse(["--out", "x", *options]).model == model


@pytest.mark.parametrize("options", [[], ["--device", "cuda"], ["--quick", "--device", "cuda"]])
def test_without_cuda(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code 1, as with bench ops: it is the machine that lacks something."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = CliRunner().invoke(app, ["bench", "model", "--out", str(tmp_path), *options])
    assert done.exit_code == 1 and done.output.count("\n") == 1
    assert "needs a CUDA device, and torch sees none; run it on a GPU" in done.output
    assert list(tmp_path.iterdir()) == []


def test_out_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_model, "Bench", lambda *_: pytest.fail("it ran"))
    (tmp_path / "file").write_text("")
    options = ["--quick", "--device", "cpu", "--out", str(tmp_path / "file")]
    done = CliRunner().invoke(app, ["bench", "model", *options])
    assert done.exit_code == 2 and "--out: " in done.output
    assert "is no folder that can be written: File exists" in done.output


def refusal(source: Path, folder: Path) -> str:
    """The line that ends --render of a file, before anything is written."""
    arguments = ["--out", str(folder / "out"), "--render", str(source)]
    done = CliRunner().invoke(app, ["bench", "model", *arguments])
    assert done.exit_code == 2 and done.output.count("\n") == 1
    assert not (folder / "out").exists()
    return done.output


def refusal_of(data: object, folder: Path) -> str:
    """The same for what the file holds; it is model.json of the folder."""
    source = folder / "model.json"
    source.write_text(json.dumps(data))
    return refusal(source, folder)


@pytest.mark.parametrize("name", ["around", "kda_prefill", "demo", "soak-cpu", None])
def test_render_of_another(name: str | None, tmp_path: Path) -> None:
    source = tmp_path / "empty.json" if name is None else RESULTS / f"{name}.json"
    if name is None:
        source.write_text("{}")
    output = refusal(source, tmp_path)
    assert f"--render: {source} is not a model.json of torch-kda bench model: " in output


@pytest.mark.parametrize("time", [0, float("nan")])
@pytest.mark.parametrize(
    ("stage", "key"), [("ttft", "two_pass_ms"), ("prefill", "ms"), ("decode", "step_us")]
)
def test_render_of_no_time(stage: str, key: str, time: float, tmp_path: Path) -> None:
    data = json.loads((RESULTS / "model.json").read_text())
    data[stage][0][key] = time
    assert f"{stage}[0].{key} is {json.dumps(time)}" in refusal_of(data, tmp_path)


GONE = object()
ONE = "meta.ttft_detail.closed 1.single_pass"


@pytest.mark.parametrize(
    ("place", "value", "misfit"),
    [
        ("meta.ttft_detail.closed 1", {}, f"it has no {ONE}"),
        ("meta.ttft_detail.closed 1", GONE, "it has no meta.ttft_detail.closed 1"),
        ("meta.ttft_detail.closed 1.two_pass", GONE, "no meta.ttft_detail.closed 1.two_pass"),
        *(
            (f"{ONE}.{key}", value, f"{ONE}.{key}")
            for key in ("ttft_ms_p50", "ttft_ms_p90", "queue_ms_mean", "requests", "steps")
            for value in ("x", -1, True, GONE)
        ),
        *((f"{ONE}.{key}_step_ms_p50", "x", key) for key in ("prefill", "decode")),
        (f"{ONE}.prefill_steps", None, f"{ONE}.prefill_steps is null"),
        ("prefill.0.ms", 10**400, "prefill[0].ms is 1000"),
        ("prefill.0.ms", True, "prefill[0].ms is true"),
        ("prefill.0.tokens", 0, "prefill[0].tokens is 0"),
        ("prefill.0.matmul_share", -7, "prefill[0].matmul_share is -7"),
        ("meta.peer.layers", 10**400, "meta.peer.layers is 1000"),
        ("meta.decode_context", GONE, "it has no meta.decode_context"),
        ("meta.layers", 10**6, "meta.layers is 1000000"),
        ("meta.weights_gib", -3, "meta.weights_gib is -3"),
        ("meta.date", 5, "meta.date is 5"),
        ("meta.more", True, "meta.more is true"),
        ("meta.turns.0.cached", -1, "meta.turns[0].cached is -1"),
        ("meta.host_detail.1.cores", True, "meta.host_detail.1.cores is true"),
        ("ttft.0.workload", "open", 'ttft[0].workload is "open"'),
        ("ttft.0.two_forwards", -2, "ttft[0].two_forwards is -2"),
        ("decode.0.batch", -5, "decode[0].batch is -5"),
        ("compile.recompiles", 0.5, "compile.recompiles is 0.5"),
        ("compile.cold_s", -1, "compile.cold_s is -1"),
        ("idle_share", 40, "idle_share is 40"),
        ("greedy_equal_share", -3, "greedy_equal_share is -3"),
    ],
)
def test_render_of_the_damaged(place: str, value: object, misfit: str, tmp_path: Path) -> None:
    data = json.loads((RESULTS / "model.json").read_text())
    *keys, last = (int(key) if key == "0" else key for key in place.split("."))
    part = data
    for key in keys:
        part = part[key]
    part.pop(last) if value is GONE else part.__setitem__(last, value)
    output = refusal_of(data, tmp_path)
    source = tmp_path / "model.json"
    assert f"--render: {source} is not a model.json of torch-kda bench model: " in output
    assert misfit in output


def test_render_of_another_order(tmp_path: Path) -> None:
    """A figure is below its name, wherever it stands in the file."""
    data = json.loads((RESULTS / "model.json").read_text())
    modes = data["meta"]["ttft_detail"]["closed 1"]
    modes["two_pass"] = dict(reversed(modes["two_pass"].items()))
    assert markdown(data) == (RESULTS / "model.md").read_text()


def test_render_of_the_published(tmp_path: Path) -> None:
    source = RESULTS / "model.json"
    arguments = ["--out", str(tmp_path), "--render", str(source)]
    done = CliRunner().invoke(app, ["bench", "model", *arguments])
    assert done.exit_code == 0, done.output
    for name in ("model.json", "model.md"):
        assert (tmp_path / name).read_text() == (RESULTS / name).read_text()


def test_peer_of_another(tmp_path: Path) -> None:
    arguments = ["--quick", "--device", "cpu", "--peer", str(RESULTS / "around.json")]
    done = CliRunner().invoke(app, ["bench", "model", *arguments, "--out", str(tmp_path)])
    assert done.exit_code == 2 and "around.json is not a run of the peer" in done.output
