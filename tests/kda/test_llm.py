"""The front door: what prompts may look like, what comes back, and what is refused."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch_kda
from torch_kda import LLM, SamplingParams
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.presets import model_preset
from torch_kda.kda.tokenizer import Tokenizer
from torch_kda.kda.weights import save_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
SETTINGS = {"device": "cpu", "prefix_match_unit": 32, "kv_block_size": 16, "memory_bytes": 32 << 20}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", **SETTINGS)


def test_generate_prompts(llm: LLM):
    """A text, its ids, and lists of these are the same prompts."""
    text, ids = "The quick brown fox", list(b"The quick brown fox")
    single = llm.generate(text, GREEDY)
    assert len(single) == 1 and single[0].usage.prompt_tokens == len(ids)
    expected = single[0].token_ids
    for prompts in (ids, tuple(ids), [text], [ids], [text, ids], (ids, text)):
        outputs = llm.generate(prompts, GREEDY)
        assert [output.token_ids for output in outputs] == [expected] * len(outputs)
    assert len(llm.generate([text, ids], GREEDY)) == 2


def test_generate_output(llm: LLM):
    output = llm.generate("x" * 100, SamplingParams(temperature=0, max_tokens=7, logprobs=2))[0]
    assert output.finish_reason in ("length", "stop") and output.error is None
    assert output.text == Tokenizer.byte_level().decode(output.token_ids)
    assert output.usage.prompt_tokens == 100 and output.usage.cached_tokens == 0
    assert output.usage.completion_tokens == len(output.token_ids)
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids)
    again = llm.generate("x" * 100, GREEDY)[0]
    assert again.usage.cached_tokens == 96 and again.logprobs is None
    assert again.token_ids[:5] == output.token_ids[:5]


def test_generate_order_and_params(llm: LLM):
    """More prompts than seats, each with its own parameters: outputs come in the prompts' order."""
    prompts = [f"prompt number {i}" * (1 + i % 3) for i in range(20)]
    params = [
        SamplingParams(temperature=0, max_tokens=1 + i % 4, ignore_eos=True) for i in range(20)
    ]
    outputs = llm.generate(prompts, params)
    assert [len(output.token_ids) for output in outputs] == [1 + i % 4 for i in range(20)]
    assert outputs[7].token_ids == llm.generate(prompts[7], params[7])[0].token_ids


def test_generate_stop(llm: LLM):
    free = llm.generate("stop here", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[
        0
    ]
    stop = free.text[4:6]
    sampling = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=(stop,))
    output = llm.generate("stop here", sampling)[0]
    assert output.finish_reason == "stop"
    assert output.text == free.text[: free.text.find(stop)]


def test_generate_progress(llm: LLM, capfd: pytest.CaptureFixture[str]):
    llm.generate(["a", "b"], GREEDY, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "2/2" in err and "10 tokens" in err
    llm.generate("a", GREEDY)
    assert capfd.readouterr() == ("", "")


def test_generate_failing_forward(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """The error reaches the output, and the model answers the next prompt."""
    expected = llm.generate("some prompt", GREEDY)[0].token_ids
    with monkeypatch.context() as patch:

        def broken(*_: object) -> None:
            raise RuntimeError("the device is gone")

        patch.setattr(llm.engine.runner, "forward", broken)
        output = llm.generate("some prompt", GREEDY)[0]
    assert output.finish_reason == "error" and output.token_ids == []
    assert output.error == "RuntimeError: the device is gone"
    assert llm.generate("some prompt", GREEDY)[0].token_ids == expected


@pytest.fixture(name="interrupts")
def _interrupts() -> Iterator[None]:
    """Ctrl-C as at a terminal; a job in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize(("part", "name"), [("scheduler", "schedule"), ("runner", "launch")])
def test_generate_interrupted(llm: LLM, monkeypatch: pytest.MonkeyPatch, part: str, name: str):
    """Ctrl-C ends a call between two steps, wherever it comes, and the next call is as ever."""
    expected = llm.generate("a prompt", GREEDY)[0].token_ids
    owner, signals = getattr(llm.engine, part), [signal.SIGINT]
    call = getattr(owner, name)

    def interrupted(*arguments: object):
        while signals:
            signal.raise_signal(signals.pop())
        return call(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("another prompt", GREEDY)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate("a prompt", GREEDY)[0].token_ids == expected


@pytest.mark.usefixtures("interrupts")
def test_generate_interrupted_at_the_end(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """A Ctrl-C after the last step is not lost."""

    def abort(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(llm.engine, "abort", abort)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a prompt", GREEDY)


@pytest.mark.usefixtures("interrupts")
def test_generate_interrupted_twice(llm: LLM, monkeypatch: pytest.MonkeyPatch):
    """Who presses Ctrl-C again does not wait for a step that may hang."""

    def hangs(*_: object) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the second one came to nothing")

    monkeypatch.setattr(llm.engine, "step", hangs)
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a prompt", GREEDY)
    assert not llm.engine.has_work


def test_generate_from_threads(llm: LLM):
    """Calls take turns: the answers are those of one after the other."""
    prompts = [f"prompt {i}" for i in range(4)]
    expected = [llm.generate(prompt, GREEDY)[0].token_ids for prompt in prompts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda prompt: llm.generate(prompt, GREEDY), prompts))
    assert [output.token_ids for (output,) in found] == expected


@pytest.mark.parametrize(
    ("prompts", "sampling", "message"),
    [
        ("", None, "^prompt 0: the text must not be empty$"),
        (["fine", ""], None, "^prompt 1: the text must not be empty$"),
        ([], None, "prompts must not be empty"),
        ([[1], []], None, "prompt 1: .*must not be empty"),
        (["x" * 40000], None, "prompt 0: .*has 40,000 tokens, but the model holds 32,768"),
        ([[1, 2], [1, 999]], None, "prompt 1: .*the vocabulary; got 999 at position 1"),
        ([1, "a"], None, "prompt 0: .*flat sequence of integers"),
        (["a", 1], None, "prompt 0: .*flat sequence of integers"),
        (7, None, "prompts must be a text, token ids, or a list of these, got int"),
        ({"a": 1}, None, "prompts must be .*, got dict"),
        ("\ud800", None, "^prompt 0: .*not valid Unicode"),
        (["fine", "\ud800", "fine"], None, "^prompt 1: .*not valid Unicode"),
        (
            "a",
            {"max_tokens": 3},
            "sampling must be one SamplingParams or one for each of 1 prompts",
        ),
        (["a", "b"], [GREEDY], "one for each of 2 prompts, got 1"),
        ("a", ["greedy"], "prompt 0: .*sampling must be SamplingParams, got str"),
    ],
)
def test_generate_bad_input(llm: LLM, prompts, sampling, message: str):
    """Refused as a whole, before anything runs."""
    steps = llm.engine.scheduler.counters.steps
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, sampling)
    assert not llm.engine.has_work and llm.engine.scheduler.counters.steps == steps


def test_generate_beside_the_engine(llm: LLM):
    """Updates of a request that was submitted to the engine itself are not taken from its owner."""
    request_id = llm.engine.submit([1, 2], GREEDY)
    with pytest.raises(ValueError, match="1 requests that were submitted to LLM.engine have not"):
        llm.generate("hi", GREEDY)
    updates = []
    while llm.engine.num_requests:
        updates += llm.engine.step()
    assert {update.request_id for update in updates} == {request_id}
    assert llm.generate("hi", GREEDY)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        ("tinny", {}, "unknown preset 'tinny', and no folder of that name; presets are tiny, "),
        ("tiny", {"max_num_seq": 3}, "unknown setting 'max_num_seq'; settings are max_num_seqs, "),
        ("tiny", {"max_num_seqs": 0}, "max_num_seqs must be >= 1, got 0"),
        ("tiny", {"device": "tpu"}, "device must be 'cpu', 'cuda' or 'cuda:N'"),
        ("tiny", {"max_model_len": 100_000}, "max_model_len must be <= 32768"),
        ("tiny", {"memory_bytes": 1000}, "no room for one request of 32,768 tokens"),
        ("tiny", {"compile_cache": "kept"}, "compile_cache must be None for a model that is not"),
        ("tiny", {"tokenizer": "bytes"}, "tokenizer must be a Tokenizer or None, got str"),
    ],
    ids=["preset", "setting", "seqs", "device", "length", "memory", "kept", "tokenizer"],
)
def test_llm_bad_input(model: str, settings: dict, message: str):
    with pytest.raises(ValueError, match=message):
        LLM(model, **{"device": "cpu", **settings})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_llm_no_device():
    with pytest.raises(RuntimeError, match="torch finds no CUDA device; use 'cpu'"):
        LLM("tiny", device="cuda")


def test_llm_folder(tmp_path: Path):
    """A saved model answers as the one it was saved from; ids work without a tokenizer file."""
    model = KDAForCausalLM(model_preset("tiny", num_hidden_layers=2, mla_layers=(1,)))
    model.random_init(3)
    save_checkpoint(model, tmp_path)
    loaded = LLM(tmp_path, **SETTINGS)
    direct = LLM(model.config, seed=3, **SETTINGS)
    ids = list(range(100))
    output = loaded.generate(ids, GREEDY)[0]
    assert output.token_ids == direct.generate(ids, GREEDY)[0].token_ids
    assert output.text == ""
    with pytest.raises(ValueError, match="prompt 0 is a text, but .*no tokenizer.json"):
        loaded.generate("text", GREEDY)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        loaded.generate(ids, SamplingParams(stop=("x",)))
    with_bytes = LLM(str(tmp_path), tokenizer=Tokenizer.byte_level(), **SETTINGS)
    assert with_bytes.generate(bytes(ids).decode(), GREEDY)[0].token_ids == output.token_ids


def test_llm_broken_folder(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="config.json"):
        LLM(tmp_path, device="cpu")


def test_front_door():
    """The names that the README uses come from the package itself."""
    assert torch_kda.LLM is LLM and torch_kda.SamplingParams is SamplingParams
    with pytest.raises(AttributeError):
        _ = torch_kda.nothing
