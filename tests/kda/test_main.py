"""The command line, as its users run it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch_kda
import torch_kda.kda.command
import torch_kda.kda.timeline
from torch_kda.kda.__main__ import app
from typer.testing import CliRunner, Result

ROOT = Path(__file__).resolve().parents[2]


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_help():
    found = invoke("--help")
    assert found.exit_code == 0
    assert "demo" in found.stdout and "generate" in found.stdout
    assert invoke("demo", "--help").exit_code == 0


def test_help_is_light():
    """Help comes without torch: seconds matter at a prompt."""
    code = "import sys, torch_kda.kda.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--json", "--tokens", "200"],
        ["generate", "hi", "--max-tokens", "2"],
        ["bench", "simulate", "eight-k", "--rounds", "1", "--json"],
        ["--version"],
    ],
    ids=["demo", "generate", "simulate", "version"],
)
def test_on_a_full_disk(arguments: list[str]):
    command = [sys.executable, "-m", "torch_kda.kda", *arguments]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
    assert done.returncode == 2
    assert done.stderr.rstrip().endswith("torch-kda: [Errno 28] No space left on device")
    assert "Traceback" not in done.stderr


def test_demo_json(tmp_path: Path):
    """In a process of its own: one object on stdout, all else on stderr, a picture drawn."""
    picture = tmp_path / "timeline.png"
    command = [sys.executable, "-m", "torch_kda.kda", "demo", "--json", "--tokens", "600"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--picture", str(picture)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"single_pass", "two_pass", "tokens_equal", "max_logit_diff"}
    keys = {"forwards", "exports", "tokens_computed", "tokens_cached", "ttft_s"}
    assert set(found["single_pass"]) == set(found["two_pass"]) == keys
    assert found["single_pass"]["forwards"] == [1, 1] and found["tokens_equal"] is True
    assert "follow-up" in done.stderr
    if torch_kda.kda.timeline.can_draw():
        assert str(picture) in done.stderr and picture.stat().st_size > 10_000


def test_demo_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = tmp_path / "text.txt"
    text.write_text("Wer reitet so spät durch Nacht und Wind? " * 30, encoding="utf-8")
    monkeypatch.setattr(torch_kda.kda.timeline, "can_draw", lambda: False)
    found = invoke("demo", "--device", "cpu", "--tokens", 300, "--file", text)
    assert found.exit_code == 0, found.output
    for word in ("forwards", "exports", "computed", "cached", "TTFT", "single pass", "two passes"):
        assert word in found.stdout
    assert "1 forward where two passes take 2" in found.stdout
    assert "greedy tokens with and without cache: equal" in found.stdout
    assert "no picture: matplotlib is not installed; pip install 'torch-kda[plots]'" in found.stderr


def test_demo_short_text(tmp_path: Path):
    """Fewer tokens than asked for: it says so and goes on, unless they are too few."""
    text, picture = tmp_path / "text.txt", tmp_path / "x.png"
    text.write_text("Wer reitet so spaet durch Nacht und Wind? " * 5)
    found = invoke("demo", "--device", "cpu", "--file", text, "--json", "--picture", picture)
    assert found.exit_code == 0
    assert json.loads(found.stdout)["single_pass"]["tokens_computed"][0] == 210
    assert "the text has only 210 tokens" in found.stderr
    text.write_text("short")
    found = invoke("demo", "--device", "cpu", "--file", text, "--picture", picture)
    assert found.exit_code == 2 and "must have >= 129 tokens, got 5" in found.stderr


@pytest.mark.parametrize("name", ["missing/x.png", "folder.png", "file/x.png"])
def test_demo_checks_its_picture_first(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from torch_kda.kda import demo

    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(demo, "run_demo", lambda *_, **__: pytest.fail("it ran"))
    found = invoke("demo", "--device", "cpu", "--picture", tmp_path / name)
    assert found.exit_code == 2 and found.stdout == ""
    assert f"--picture: {tmp_path / name} can't be written: " in found.stderr


@pytest.mark.parametrize("name", ["d.xyz", "d", "d.png.bak"])
def test_demo_draws_only_known_formats(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from torch_kda.kda import demo

    monkeypatch.setattr(demo, "run_demo", lambda *_, **__: pytest.fail("it ran"))
    found = invoke("demo", "--device", "cpu", "--picture", tmp_path / name)
    assert found.exit_code == 2 and found.stdout == ""
    assert f"--picture: {tmp_path / name} must end with one of .png, .svg" in found.stderr
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("suffix", "start"),
    [(".PNG", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".jpg", b"\xff\xd8")],
)
def test_picture_is_what_its_name_says(suffix: str, start: bytes, tmp_path: Path):
    from torch_kda.kda.timeline import Forward, Lane, draw_timeline

    steps = {"num_tokens": 200, "is_decode": False, "exports": (192,)}
    forward = Forward(start_s=0, end_s=1, first_token=0, **steps)
    lane = Lane(name="single pass", forwards=[forward], num_cached_tokens=0, ttft_s=1)
    path = tmp_path / f"picture{suffix}"
    torch_kda.kda.command.check_picture(path)
    draw_timeline(path, {"first request": [lane]})
    assert path.read_bytes().startswith(start)


def test_make_folder(tmp_path: Path):
    """Makes what lacks, and leaves nothing in it."""
    new = tmp_path / "a" / "b"
    for _ in range(2):
        torch_kda.kda.command.make_folder(new)
        assert list(new.iterdir()) == []
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "x", tmp_path / ("x" * 300)):
        with pytest.raises(ValueError, match="--there: .* is no folder that can be written: "):
            torch_kda.kda.command.make_folder(path, "--there")


def test_check_picture_leaves_no_trace(tmp_path: Path):
    new, old = tmp_path / "new.png", tmp_path / "old.png"
    old.write_bytes(b"before")
    torch_kda.kda.command.check_picture(new)
    torch_kda.kda.command.check_picture(old)
    assert not new.exists() and old.read_bytes() == b"before"


def test_demo_fails_if_tokens_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from torch_kda.kda import demo

    monkeypatch.setattr(demo, "MIN_DISTINCT", 1000)
    picture = tmp_path / "x.png"
    found = invoke("demo", "--device", "cpu", "--tokens", 129, "--json", "--picture", picture)
    assert found.exit_code == 1
    assert "FAILED: only" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "50000"], "must have <= 32,4"),
        (["--tokens", "128"], "must have >= 129 tokens, got 128"),
        (["--file", "nowhere.txt"], "nowhere.txt"),
        (["--file", str(ROOT / "tests")], "tests"),
        (["--device", "tpu"], "device must be 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
        (["--tokens", "0"], "tokens"),
    ],
    ids=["long", "short", "file", "folder", "device", "none"],
)
def test_demo_bad_input(arguments: list[str], message: str):
    found = invoke(
        "demo", *(["--device", "cpu"] if "--device" not in arguments else []), *arguments
    )
    assert found.exit_code == 2 and found.stdout == ""
    assert message in found.stderr and "Traceback" not in found.stderr


def test_demo_empty_and_binary_files(tmp_path: Path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, message in (
        ("empty", "is empty"),
        ("binary", "is not UTF-8 text: "),
        ("none", "can't be read: "),
    ):
        found = invoke("demo", "--device", "cpu", "--file", tmp_path / name)
        assert found.exit_code == 2
        assert f"--file: {tmp_path / name} {message}" in found.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_demo_no_device():
    found = invoke("demo", "--device", "cuda")
    assert found.exit_code == 1 and found.stdout == ""
    assert "torch finds no CUDA device; use 'cpu'" in found.stderr


def test_generate():
    found = invoke("generate", "Hello", "--device", "cpu", "--max-tokens", 5)
    assert found.exit_code == 0
    assert "5 prompt tokens, " in found.stderr
    assert "prefill: single pass, up to 16 states exported a forward" in found.stderr
    assert invoke("generate", "Hello", "--device", "cpu", "--max-tokens", 5).stdout == found.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "--device", "cpu"], "must not be empty"),
        (["x", "--device", "cpu", "--model", "none"], "unknown preset 'none'"),
        (["x", "--device", "cpu", "--max-tokens", "0"], "max_tokens must be >= 1, got 0"),
        (["x", "--device", "cpu", "--temperature", "-1"], "temperature must be >= 0, got -1.0"),
    ],
    ids=["empty", "preset", "tokens", "temperature"],
)
def test_generate_bad_input(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch):
    """Found before a model is made."""
    from torch_kda.kda import llm

    monkeypatch.setattr(llm, "load_model", lambda *_: pytest.fail("a model was made"))
    found = invoke("generate", *arguments)
    assert found.exit_code == 2 and found.stdout == "" and message in found.stderr


def test_version():
    found = invoke("--version")
    assert found.exit_code == 0 and found.stdout.strip() == f"torch-kda {torch_kda.__version__}"
