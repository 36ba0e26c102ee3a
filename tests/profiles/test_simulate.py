"""The simulator: forwards of the published workloads, its JSON, and errors that name the option."""

import json
import re

import pytest
from torch_kda.kda.__main__ import app
from torch_kda.profiles import simulate, simulate_report
from typer.testing import CliRunner, Result

KEYS = {
    *("rounds", "forwards", "tokens_computed", "tokens_cached", "tokens_lost"),
    *("slots_peak", "evictions"),
}


def run(*arguments: object) -> Result:
    words = ["bench", "simulate", *(str(argument) for argument in arguments)]
    return CliRunner().invoke(app, words)


@pytest.mark.parametrize("block", [1, 2, 4, 8, 16, 32, 64, 128])
@pytest.mark.parametrize(
    ("start", "step"), [(120_000, 2_000), (119_937, 2_017)], ids=["even", "odd"]
)
def test_growing_prefix(block: int, start: int, step: int) -> None:
    """One forward a round, for every block size that divides the unit (I18)."""
    workload = simulate.make_workload("growing-prefix", kv_block=block, start=start, step=step)
    outcome = simulate.simulate(workload)
    found = outcome.as_json()
    assert found["rounds"] == found["forwards"] == 22
    assert [a_round.forwards for a_round in outcome.rounds] == [1] * 22
    sent = sum(start + step * index for index in range(1, 23))
    assert found["tokens_computed"] + found["tokens_cached"] == sent
    assert found["tokens_lost"] == found["evictions"] == 0
    # what a round computes anew: its step, and less than a unit of the round before
    assert all(step <= a_round.tokens_computed < step + 128 for a_round in outcome.rounds)


def test_growing_prefix_two_pass() -> None:
    """The baseline ends a forward at each boundary, and caches the same."""
    single = simulate.simulate(simulate.make_workload("growing-prefix")).as_json()
    workload = simulate.make_workload("growing-prefix", has_exports=False)
    two = simulate.simulate(workload).as_json()
    assert (single["forwards"], two["forwards"]) == (22, 44)
    assert single["tokens_cached"] == two["tokens_cached"]


def test_growing_prefix_streams() -> None:
    """Streams share forwards: all tokens of a round over the budget, rounded up."""
    outcome = simulate.simulate(simulate.make_workload("growing-prefix", streams=8, rounds=3))
    for a_round in outcome.rounds:
        assert a_round.forwards == -(-a_round.tokens_computed // 8192)


@pytest.mark.parametrize("streams", [1, 4, 16])
def test_eight_k(streams: int) -> None:
    outcome = simulate.simulate(simulate.make_workload("eight-k", streams=streams))
    assert [a_round.forwards for a_round in outcome.rounds] == [-(-streams * 8000 // 8192)] * 8
    assert outcome.as_json()["tokens_cached"] == 0


def test_shared_prefix() -> None:
    """A cold prompt loses nothing. The second sharer finds KV and no state, and leaves a state for
    all others; what it loses are the whole units of what is shared.
    """
    outcome = simulate.simulate(simulate.make_workload("shared-prefix"))
    first, second, *rest = outcome.rounds
    assert (first.tokens_lost, first.tokens_cached, first.tokens_computed) == (0, 0, 9000)
    assert (second.tokens_lost, second.tokens_cached) == (8000 // 128 * 128, 0)
    for a_round in rest:
        assert (a_round.tokens_lost, a_round.forwards) == (0, 1)
        assert a_round.tokens_cached == 7936


def test_shared_prefix_streams() -> None:
    """Together from a cold cache: after the first round nothing is lost."""
    outcome = simulate.simulate(simulate.make_workload("shared-prefix", streams=4))
    first, *rest = outcome.rounds
    assert first.tokens_computed + first.tokens_cached == 4 * 9000
    assert first.tokens_lost <= 2 * 7936
    for a_round in rest:
        assert (a_round.tokens_lost, a_round.forwards) == (0, 1)
        assert a_round.tokens_cached == 4 * 7936


@pytest.mark.parametrize("name", simulate.SIZES)
def test_one_cold_round_loses_nothing(name: str) -> None:
    done = run(name, "--rounds", 1, "--json")
    assert json.loads(done.stdout)["tokens_lost"] == 0


def test_what_the_words_mean(tmp_path) -> None:
    """Lost tokens are explained where there are some; two passes are never passed off as others."""
    options = ("--start", 500, "--step", 100, "--picture", tmp_path / "x.png")
    one, three = run("shared-prefix", "--rounds", 1, *options), run("shared-prefix", *options)
    assert simulate_report.LOST not in one.output and simulate_report.LOST in three.output
    assert simulate_report.TWO_PASSES in one.output
    assert "num_prefill_checkpoint_blocks=0" in one.output


def test_little_room() -> None:
    """With too few slots states are evicted and tokens are lost; the numbers say so."""
    workload = simulate.make_workload("growing-prefix", streams=4, rounds=3, slots=5)
    outcome = simulate.simulate(workload)
    found = outcome.as_json()
    assert found["slots_peak"] == 5
    assert found["evictions"] > 0 and found["tokens_lost"] > 0
    sent = sum(a_round.prompt_tokens for a_round in outcome.rounds)
    assert found["tokens_computed"] + found["tokens_cached"] == sent


def test_json() -> None:
    """The command of the README prints one object and nothing else."""
    done = run(
        *("growing-prefix", "--streams", 1, "--unit", 128, "--budget", 8192, "--kv-block", 128),
        *("--start", 120000, "--step", 2000, "--rounds", 22, "--json"),
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found.keys() == KEYS and done.stderr == ""
    assert (found["rounds"], found["forwards"]) == (22, 22)


def test_table_and_picture(tmp_path) -> None:
    picture = tmp_path / "rounds.png"
    done = run(
        "growing-prefix", "--rounds", 2, "--start", 2000, "--step", 500, "--picture", picture
    )
    assert done.exit_code == 0, done.output
    assert "single pass: 2 forwards in 2 rounds" in done.output
    assert "two passes: 4 forwards in 2 rounds" in done.output
    # a line of its own; long paths are not broken
    assert str(picture.resolve()) in done.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_picture_without_matplotlib(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(simulate_report, "can_draw", lambda: False)
    done = run("eight-k", "--rounds", 1, "--picture", tmp_path / "rounds.png")
    assert done.exit_code == 0 and "matplotlib is not installed" in done.output


def test_picture_that_cannot_be_written(monkeypatch, tmp_path) -> None:
    """Said before anything runs."""
    monkeypatch.setattr(simulate, "simulate", lambda _: pytest.fail("it ran"))
    done = run("eight-k", "--rounds", 1, "--picture", tmp_path / "nowhere" / "rounds.png")
    assert done.exit_code == 2 and "--picture: " in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("growing-prefix", "--unit", 100), "--unit must be a multiple of 16, got 100"),
        (("growing-prefix", "--kv-block", 48), "--kv-block must divide --unit 128, got 48"),
        (("growing-prefix", "--streams", 0), "--streams must be from 1 to 1,000, got 0"),
        (("growing-prefix", "--step", -1), "--step must be from 0 to 10,000,000, got -1"),
        (("eight-k", "--streams", 1000), "take <= 10,000,000 tokens of KV, got 73,161,000"),
        (("eight-k", "--picture", "x.xyz"), "--picture: x.xyz must end with one of .png, .svg"),
        (("report", "--out", "/dev/null"), "--out: /dev/null is no folder that can be written"),
        (("growing-prefix", "--budget", 16), "max_num_batched_tokens must be >= "),
        (("growing-prefix", "--slots", 1), "there must be >= 2 state slots"),
        (("growing-prefix", "--kv-tokens", 1000), "KV blocks of 128"),
        (("growing-prefix", "--rounds", "x"), "invalid int value: 'x'"),
        (("eight-k", "--out", "x"), "--out can't go with one workload, which writes a --picture"),
        (("report",), "report needs --out"),
        (("report", "--out", "x", "--json"), "--json can't go with report, which"),
        (("report", "--out", "x", "--kv-block", 16), "--kv-block can't go with report"),
        (("report", "--out", "x", "--two-pass"), "--two-pass can't go with report"),
        (("report", "--out", ""), "--out: expected a path, got ''"),
        (("eight-k", "--picture", ""), "--picture: expected a path, got ''"),
        (("eight-k", "--json", "--picture", "z.png"), "--picture can't go with --json"),
        (("eight-k", "--step", 5), "--step must be 0 for eight-k, got 5"),
        (("uphill",), "invalid choice: 'uphill'"),
        ((), "WORKLOAD"),
    ],
)
def test_errors(arguments: tuple[object, ...], message: str) -> None:
    """Code 2, one line that names the option, and no trace."""
    done = run(*arguments)
    assert done.exit_code == 2
    assert re.search(message, done.output) and "Traceback" not in done.output
    assert done.output.count("\n") == 1


@pytest.mark.parametrize("field", simulate.NUMBERS)
def test_counts_have_bounds(field: str) -> None:
    """Of every number that the command line takes; beyond them nothing is made."""
    option, got = simulate._option(field), 99_999_999_999
    done = run("eight-k", option, got)
    least, most = simulate.LIMITS[field]
    assert done.exit_code == 2
    assert done.output == (
        f"torch-kda: simulate: {option} must be from {least:,} to {most:,}, got {got}\n"
    )


def test_workload_by_name() -> None:
    with pytest.raises(ValueError, match="WORKLOAD must be one of growing-prefix, eight-k"):
        simulate.make_workload("uphill")


def test_report(monkeypatch, tmp_path) -> None:
    out = tmp_path / "results"
    small = [
        simulate.make_workload("growing-prefix", rounds=2, start=3000, step=200),
        simulate.make_workload("shared-prefix", rounds=1, start=500, step=100),
    ]
    monkeypatch.setattr(simulate_report, "published", lambda: small)
    done = run("report", "--out", out, "--commit", "abc")
    assert done.exit_code == 0
    assert done.stdout.split() == [str(out / f"simulate.{kind}") for kind in ("json", "md", "png")]
    page = (out / "simulate.md").read_text()
    lines = page.splitlines()
    assert "| growing-prefix | 1 | 3,000 + 200 | 128 / 128 | 64 | 2 | **2** | 4 |" in "\n".join(
        lines
    )
    assert len({line.count("|") for line in lines if line.startswith("|")}) == 1
    assert "report --out" in page and ", commit abc, " in page
    assert simulate_report.LOST in page and simulate_report.TWO_PASSES in page
    assert (out / "simulate.png").stat().st_size > 10_000
    found = json.loads((out / "simulate.json").read_text())
    assert found["origin"]["commit"] == "abc"
    assert [one["workload"]["name"] for one in found["workloads"]] == [w.name for w in small]
    assert [one["two_pass"]["forwards"] for one in found["workloads"]] == [4, 2]
