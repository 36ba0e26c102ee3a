"""The demo's promises, and that its checks notice when one is broken."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch_kda.kda import demo
from torch_kda.kda.demo import (
    MIN_DISTINCT,
    NEW_TOKENS,
    NUM_STAGES,
    DemoResult,
    compare,
    describe_result,
    repository_text,
    run_demo,
)
from torch_kda.kda.recording import RequestRun
from torch_kda.kda.timeline import draw_timeline


@pytest.fixture(scope="module")
def result() -> DemoResult:
    said: list[str] = []
    found = run_demo(repository_text(), 1000, device="cpu", seed=0, say=said.append)
    assert len(said) == NUM_STAGES and len(set(said)) == NUM_STAGES
    return found


def test_run_demo(result: DemoResult):
    (first, follow_up), (two_first, two_follow_up) = result.single_pass, result.two_pass
    assert result.failures() == []
    assert [len(run.prefills) for run in (first, follow_up)] == [1, 1]
    assert [len(run.prefills) for run in (two_first, two_follow_up)] == [2, 2]
    assert len(set(first.token_ids)) >= MIN_DISTINCT and len(first.token_ids) == NEW_TOKENS
    assert first.prompt == list(repository_text().encode()[:1000])
    assert follow_up.prompt[: 1000 + NEW_TOKENS] == [*first.prompt, *first.token_ids]
    assert follow_up.num_cached_tokens == two_follow_up.num_cached_tokens == 896
    assert len(first.logits) == len(first.token_ids)
    assert [int(x.argmax()) for x in first.logits] == first.token_ids


def test_as_json(result: DemoResult):
    """The schema that readers of --json rely on."""
    found = json.loads(json.dumps(result.as_json()))
    follow_up = len(result.single_pass[1].prompt)
    expected = {"exports": [1, 1], "forwards": [1, 1], "tokens_cached": [0, 896]}
    expected["tokens_computed"] = [1000, follow_up - 896]
    assert all(x > 0 for mode in ("single_pass", "two_pass") for x in found[mode].pop("ttft_s"))
    assert found.pop("single_pass") == expected
    assert found.pop("two_pass") == {**expected, "exports": [0, 0], "forwards": [2, 2]}
    assert 0 <= found.pop("max_logit_diff") < 1e-5
    assert found == {"tokens_equal": True}


def test_describe_result(result: DemoResult):
    lines = "\n".join(describe_result(result))
    assert "1 forward where two passes take 2" in lines
    assert "896 of" in lines and "deepest boundary of 128 tokens is 896" in lines
    assert "equal, " in lines and f"distinct of {NEW_TOKENS}" in lines


def test_run_demo_shortest():
    """One more than a unit is enough for all that the demo shows."""
    found = run_demo(repository_text(), 129, device="cpu", seed=0, say=lambda _: None)
    assert found.failures() == [] and found.deepest_boundary == 128
    assert found.as_json()["single_pass"]["forwards"] == [1, 1]
    assert found.as_json()["two_pass"]["forwards"] == [2, 2]


@pytest.mark.parametrize(
    ("num_tokens", "unit", "message"),
    [
        (128, 128, "must have >= 129 tokens, got 128: states are kept every 128 tokens"),
        (64, 64, "must have >= 65 tokens, got 64: states are kept every 64 tokens"),
        (32_600, 128, r"must have <= 32,4\d\d tokens, got 32,600: .* the 32,768 that the model"),
    ],
)
def test_run_demo_refuses(
    num_tokens: int, unit: int, message: str, monkeypatch: pytest.MonkeyPatch
):
    """Before there is a model."""
    monkeypatch.setattr(demo, "load_model", lambda *_: pytest.fail("a model was made"))
    make = demo.demo_config
    monkeypatch.setattr(demo, "demo_config", lambda *a: replace(make(*a), prefix_match_unit=unit))
    with pytest.raises(ValueError, match=f"demo: the prompt {message}"):
        run_demo("x" * num_tokens, num_tokens, device="cpu", seed=0, say=pytest.fail)


def test_prompt_limits():
    """What is let in by its length fits, follow-up and all."""
    least, most = demo.prompt_limits(128)
    follow_up = most + NEW_TOKENS + len(demo.FOLLOW_UP.encode())
    assert least == 129 and follow_up + NEW_TOKENS == demo.MAX_LEN


def changed(run: RequestRun, **changes) -> RequestRun:
    return replace(copy.copy(run), **changes)


def test_failures_notice(result: DemoResult):
    """Each broken promise is found."""
    first, follow_up = result.single_pass
    wrong = changed(first, token_ids=[*first.token_ids[:-1], (first.token_ids[-1] + 1) % 256])
    comparisons = {"single pass, first request": compare(first, wrong)}
    assert replace(result, comparisons=comparisons).failures() == [
        "single pass, first request: greedy tokens differ"
    ]
    dull = changed(first, token_ids=[7] * NEW_TOKENS)
    assert "only 1 distinct" in replace(result, single_pass=(dull, follow_up)).failures()[0]
    twice = changed(first, forwards=[*first.forwards, first.forwards[0]])
    found = replace(result, single_pass=(twice, follow_up)).failures()
    assert found == ["first request: 2 forwards instead of 1"]
    shallow = changed(follow_up, num_cached_tokens=768)
    found = replace(result, single_pass=(first, shallow)).failures()
    assert found == ["follow-up: 768 tokens from the cache, but the deepest boundary is 896"]


def test_compare():
    """Logits count up to where the tokens part; a near tie is one by the difference seen before."""
    logits = [torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3.0, 2.99, 0.0]), torch.zeros(3)]
    reference = RequestRun([1], logits=logits, token_ids=[1, 0, 0])
    same = compare(reference, reference)
    assert same.is_equal and same.max_logit_diff == 0 and not same.is_near_tie
    near = [x + torch.tensor([0, 0.004, 0]) for x in logits[:2]] + [torch.ones(3) * 9]
    other = compare(reference, RequestRun([1], logits=near, token_ids=[1, 1, 2]))
    assert not other.is_equal and other.is_near_tie
    assert other.max_logit_diff == pytest.approx(0.004, rel=1e-3)  # the third position is not seen
    assert other.gap == pytest.approx(0.01, rel=1e-3)
    far = [logits[0], torch.tensor([2.0, 2.99, 0.0]), logits[2]]
    tiny = [x * 1.0 for x in logits]
    assert compare(reference, RequestRun([1], logits=far, token_ids=[1, 1, 0])).is_near_tie
    assert not compare(reference, RequestRun([1], logits=tiny, token_ids=[1, 1, 0])).is_near_tie


def test_near_tie_is_no_excuse_in_fp32(result: DemoResult):
    """On a CPU tokens are equal or the demo fails; in bf16 on a device a near tie is reported."""
    one = replace(next(iter(result.comparisons.values())), is_equal=False, gap=1e-9)
    broken = replace(result, comparisons={"x": replace(one, max_logit_diff=1e-6)})
    assert broken.failures() == ["x: greedy tokens differ"] and not broken.tokens_equal
    model = replace(broken.model_config, dtype="bfloat16")
    on_device = replace(broken, model_config=model, config=replace(broken.config, device="cuda"))
    assert on_device.failures() == []
    assert any("near tie" in line for line in describe_result(on_device))
    far = replace(on_device, comparisons={"x": replace(one, gap=1.0)})
    assert far.failures() == ["x: greedy tokens differ"]


def test_draw_timeline(result: DemoResult, tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.png"
    draw_timeline(path, result.panels())
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000
    with pytest.raises(OSError):
        draw_timeline(tmp_path / "missing" / "x.png", result.panels())
