"""Traces: what they show, who can read them, and the report that is made of them."""

import csv
import json
from pathlib import Path

import pytest
from torch_kda.kda.__main__ import app
from torch_kda.profiles import report
from torch_kda.profiles import trace as trace_module
from torch_kda.profiles.provenance import ROOT
from torch_kda.profiles.trace import (
    SUFFIX,
    Event,
    Recording,
    Scenario,
    busy_us,
    device_events,
    forwards,
    gaps_us,
    idle_share,
    kernel_rows,
    load_events,
    op_of_kernels,
)
from typer.testing import CliRunner

TRACES = {"single-pass": 1, "two-pass": 2}  # forwards


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    options = ["--device", "cpu", "--tokens", "200", "--unit", "96", "--commit", "abc"]
    done = CliRunner().invoke(app, ["profile", *options, "--out", str(folder)])
    assert done.exit_code == 0, done.output
    return folder


def trace(out: Path, mode: str) -> Path:
    return out / mode / "eager.pt.trace.json.gz"


@pytest.mark.parametrize("mode", TRACES)
def test_trace_shows_its_forwards(out: Path, mode: str) -> None:
    events = load_events(trace(out, mode))
    assert len(forwards(events)) == TRACES[mode]
    labels = [event.name for event in events if event.name.startswith("prefill [")]
    expected = {
        "single-pass": ["prefill [0, 200), keeps 192"],
        "two-pass": ["prefill [0, 192)", "prefill [192, 200)"],
    }
    assert labels == expected[mode]
    layers = [event.name for event in events if event.name.startswith("layer ")]
    assert layers[:4] == ["layer 0 KDA", "layer 0 GatedMLP", "layer 1 KDA", "layer 1 MoE"]
    assert len(layers) == 8 * TRACES[mode] and "layer 3 MLA" in layers
    calls = [event for event in events if event.name == "torch_kda::kda_prefill"]
    assert len(calls) == 3 * TRACES[mode]
    assert 0 < idle_share(events) < 1


@pytest.mark.parametrize("mode", TRACES)
def test_tensorboard_reads_it(out: Path, mode: str, tmp_path: Path) -> None:
    """Its own reader finds the file by name and takes each forward for a step."""
    from torch_tb_profiler import consts
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.run_generator import RunGenerator

    path = trace(out, mode)
    found = consts.WORKER_PATTERN.match(path.name)
    assert found and found.group(1) == "eager"
    data = RunProfileData.parse("eager", None, str(path), str(tmp_path))
    assert data.steps_names == [str(i) for i in range(TRACES[mode])]
    profile = RunGenerator("eager", None, data).generate_run_profile()
    assert {view.name for view in profile.views} >= {"overall", "operator", "trace"}
    rows = profile.operation_table_by_name["data"]
    assert any(row["name"] == "torch_kda::kda_prefill" for row in rows)


def test_kernels_csv(out: Path) -> None:
    with (out / "kernels.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["trace"] for row in rows} == {"single-pass eager", "two-pass eager"}
    ours = [row for row in rows if row["op"] == "kda_prefill"]
    assert [int(row["calls"]) for row in ours] == [3, 6]
    for name in ("single-pass eager", "two-pass eager"):
        shares = [float(row["share"]) for row in rows if row["trace"] == name]
        assert sum(shares) == pytest.approx(1, abs=0.01)
        assert shares == sorted(shares, reverse=True)


def test_report(out: Path) -> None:
    page, text = (out / "report.html").read_text(), (out / "report.md").read_text()
    assert "commit: abc" in page and "data:image/png;base64," in page
    assert (out / "timeline.png").stat().st_size > 10_000
    for part in ("| single-pass eager | 1 |", "| two-pass eager | 2 |", "timeline.png"):
        assert part in text


def test_order_and_origin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Both modes are warm before one is kept; the commit is ours, wherever the command is given."""
    recorded: list[tuple[str, int]] = []
    prefill = Scenario.prefill

    def watched(self: Scenario, mode: str, *, seed: int) -> Recording:
        recorded.append((mode, seed))
        return prefill(self, mode, seed=seed)

    monkeypatch.setattr(Scenario, "prefill", watched)
    monkeypatch.setattr(report, "head_commit", lambda: "1234abc")
    monkeypatch.chdir(tmp_path)
    options = ["--device", "cpu", "--tokens", "40", "--unit", "32"]
    done = CliRunner().invoke(app, ["profile", *options, "--out", "out"])
    assert done.exit_code == 0, done.output
    assert recorded == [(mode, seed) for seed in (0, 1) for mode in TRACES]
    assert "- commit: 1234abc\n" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--unit", "0"], "--unit: expected an integer from 1 to 10,000,000, got '0'"),
        (["--unit", "x"], "--unit: expected an integer from 1 to 10,000,000, got 'x'"),
        (["--tokens", "0"], "--tokens: expected an integer from 2 to 10,000,000, got '0'"),
        (["--tokens", "96"], "--tokens: expected more than --unit 96, got 96"),
        (["--tokens", "500", "--unit", "512"], "--tokens: expected more than --unit 512, got 500"),
        (["--out", "/dev/null"], "--out: /dev/null is no folder that can be written: File exists"),
        (["--out", "/dev/null/x"], "--out: /dev/null/x is no folder that can be written: Not a"),
    ],
)
def test_refused_before_the_work(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a line."""
    monkeypatch.setattr(trace_module, "load_model", lambda *_: pytest.fail("a model was made"))
    options = ["profile", "--device", "cpu", "--out", str(tmp_path / "out"), *arguments]
    done = CliRunner().invoke(app, options)
    assert done.exit_code == 2 and done.output.count("\n") == 1
    assert message in done.output and not (tmp_path / "out").exists()


def gpu_trace() -> list[Event]:
    """As CUDA traces are: an op that launches two kernels, and one launched by torch."""
    return [
        Event("torch_kda::kda_prefill", "cpu_op", 0, 10, 1, None),
        Event("cudaLaunchKernel", "cuda_runtime", 2, 1, 1, 71),
        Event("cuLaunchKernelEx", "cuda_driver", 5, 1, 1, 72),
        Event("cudaLaunchKernel", "cuda_runtime", 5, 1, 2, 75),  # another thread's
        Event("cudaLaunchKernel", "cuda_runtime", 12, 1, 1, 73),
        Event("prepare", "kernel", 20, 10, 7, 71),
        Event("scan", "kernel", 25, 15, 7, 72),
        Event("gemm", "kernel", 50, 10, 7, 73),
        Event("other", "kernel", 60, 10, 7, 75),
    ]


def test_reading_of_kernels() -> None:
    events = gpu_trace()
    device = device_events(events)
    assert [event.name for event in device] == ["prepare", "scan", "gemm", "other"]
    assert busy_us(device) == 40 and gaps_us(device) == [10]
    assert idle_share(events) == pytest.approx(0.2)
    assert op_of_kernels(events) == {71: "kda_prefill", 72: "kda_prefill"}
    assert kernel_rows(events)[0] == ("kda_prefill", "scan", 1, 15, 0.375)
    assert [row[0] for row in kernel_rows(events)].count("kda_prefill") == 2


def test_kernel_rows_order() -> None:
    """By the time itself: two may be alike in tenths of a us, and not in their shares."""
    events = [Event(str(us), "kernel", 10 * us, us, 7, None) for us in (0.42, 0.44, 0.4)]
    assert [row[1] for row in kernel_rows(events)] == ["0.44", "0.42", "0.4"]


def test_load_events_file(out: Path) -> None:
    """Plain Chrome JSON, so that Perfetto opens it."""
    import gzip

    with gzip.open(trace(out, "single-pass"), "rt") as file:
        assert json.load(file)["traceEvents"]


@pytest.mark.parametrize("kind", ["eager", "replay"])
@pytest.mark.parametrize("mode", TRACES)
def test_traces_of_an_h200_show_their_passes(mode: str, kind: str, tmp_path: Path) -> None:
    """Those in the repository, through TensorBoard's reader: 20 KDA layers in each forward."""
    from torch_tb_profiler.profiler.data import RunProfileData
    from torch_tb_profiler.profiler.run_generator import RunGenerator

    path = ROOT / "profiles" / "results" / "traces" / mode / f"{kind}{SUFFIX}"
    data = RunProfileData.parse(kind, None, str(path), str(tmp_path))
    assert data.steps_names == [str(i) for i in range(TRACES[mode])]
    views = {view.name for view in RunGenerator(kind, None, data).generate_run_profile().views}
    assert views >= {"overall", "kernel", "trace"}
    events = load_events(path)
    assert len(forwards(events)) == TRACES[mode]
    scans = [e for e in device_events(events) if e.name.startswith("kda_scan")]
    assert len(scans) == 20 * TRACES[mode]
