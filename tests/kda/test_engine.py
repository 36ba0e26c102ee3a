"""The engine on the tiny model: what requests get, whatever else runs, fails or goes away."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch_kda.kda.build import build_engine
from torch_kda.kda.config import EngineConfig
from torch_kda.kda.engine import Engine, RequestUpdate
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.presets import model_preset
from torch_kda.kda.runner import LaunchedStep, ModelRunner, StepResult
from torch_kda.kda.tokenizer import Tokenizer
from torch_kda.scheduler.batch import ScheduledBatch
from torch_kda.scheduler.request import SamplingParams

UNIT = 32
CONFIG = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=256,
    prefix_match_unit=UNIT,
    kv_block_size=16,
    num_state_slots=40,
    num_kv_blocks=160,
)
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids without a pattern; different seeds share no prefix."""
    return [((i + 1) * (2 * seed + 37) * 2654435761 >> 13) % 256 for i in range(length)]


class CountingRunner(ModelRunner):
    """Remembers its batches, and breaks on request."""

    def __init__(self, model: KDAForCausalLM, config: EngineConfig) -> None:
        super().__init__(model, config)
        self.batches: list[ScheduledBatch] = []
        self.breaks_at: int | None = None  # the forward, counted from 0, that raises half-way

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        self.batches.append(batch)
        return super().launch(batch)

    def finish(self, launched: LaunchedStep) -> StepResult:
        result = super().finish(launched)
        if self.breaks_at == self.batches.index(launched.batch):
            raise RuntimeError("out of memory: 12 of 8 GiB")
        return result

    @property
    def prefills(self) -> list[tuple[int, int]]:
        return [(r.start, r.end) for b in self.batches for r in b.rows if not r.is_decode]


@pytest.fixture(scope="module")
def model() -> KDAForCausalLM:
    model = KDAForCausalLM(CONFIG.resolve(model_preset("tiny", max_model_len=512)))
    model.random_init(1)
    return model


class Bench:
    """An engine, cold, in whose caches everything unwritten is NaN."""

    def __init__(self, model: KDAForCausalLM, **changes) -> None:
        config = replace(CONFIG, **changes)
        self.runner = CountingRunner(model, config)
        pools = self.runner.pools
        with torch.inference_mode():
            for pool in (*pools.state, *pools.conv, *pools.kv):
                pool.fill_(math.nan)
        self.engine: Engine = build_engine(self.runner, config, Tokenizer.byte_level())

    def run(self) -> dict[str, list[RequestUpdate]]:
        """Steps until all is done; the updates of each request."""
        updates: dict[str, list[RequestUpdate]] = {}
        while self.engine.has_work:
            for update in self.engine.step():
                # it is made without its constructor
                assert len(update) == len(RequestUpdate._fields)
                updates.setdefault(update.request_id, []).append(update)
        self.engine.scheduler.check_integrity()
        return updates

    def answer(self, prompt: Sequence[int], sampling: SamplingParams = GREEDY) -> list[int]:
        request_id = self.engine.submit(prompt, sampling)
        return tokens_of(self.run()[request_id])


@pytest.fixture(params=[1, 2], ids="in-flight{}".format)
def in_flight(request: pytest.FixtureRequest) -> int:
    """Steps in flight: nothing that a request gets may depend on it."""
    return request.param


def tokens_of(updates: Sequence[RequestUpdate]) -> list[int]:
    return [token for update in updates for token in update.token_ids]


@pytest.fixture
def bench(model: KDAForCausalLM) -> Bench:
    return Bench(model)


def reference(model: KDAForCausalLM, prompt: Sequence[int], sampling=GREEDY) -> list[int]:
    """What the prompt gets alone, without any cache."""
    return Bench(model, enable_prefix_caching=False).answer(prompt, sampling)


def test_step_single_pass(model: KDAForCausalLM):
    """A prompt takes one forward, and the two-pass baseline two; the tokens are the same."""
    prompt = prompt_of(200)
    single, two = Bench(model), Bench(model, num_prefill_checkpoint_blocks=0)
    assert single.answer(prompt) == two.answer(prompt) == reference(model, prompt)
    assert single.runner.prefills == [(0, 200)]
    assert two.runner.prefills == [(0, 192), (192, 200)]
    row = single.runner.batches[0].rows[0]
    assert [position for position, _ in row.exports] == [192]


@pytest.mark.parametrize("length", [1, UNIT - 1, UNIT, UNIT + 1, 4 * UNIT, 4 * UNIT + 1, 150])
def test_step_follow_up(model: KDAForCausalLM, length: int, in_flight: int):
    """A follow-up resumes at the deepest boundary, be it in the prompt or in the answer."""
    bench = Bench(model, steps_in_flight=in_flight)
    first = prompt_of(length, seed=length)
    answer = bench.answer(first)
    follow_up = [*first, *answer, *prompt_of(50, seed=99)]
    request_id = bench.engine.submit(follow_up, GREEDY)
    updates = bench.run()[request_id]
    computed = length + len(answer) - 1  # the last token was only drawn
    assert updates[0].num_cached_tokens == computed // UNIT * UNIT
    assert bench.runner.prefills[-1] == (computed // UNIT * UNIT, len(follow_up))
    assert tokens_of(updates) == reference(model, follow_up)


def test_step_same_prompt_again(model: KDAForCausalLM, bench: Bench):
    prompt = prompt_of(128)
    first = bench.answer(prompt)
    assert bench.answer(prompt) == first == reference(model, prompt)
    # one token has to be computed, so the state after all 128 does not help
    assert bench.runner.prefills == [(0, 128), (96, 128)]


def test_step_longer_than_budget(model: KDAForCausalLM, in_flight: int):
    prompt = prompt_of(300)
    bench = Bench(model, steps_in_flight=in_flight, max_num_batched_tokens=96)
    assert bench.answer(prompt) == reference(model, prompt)
    assert [end - start for start, end in bench.runner.prefills] == [96, 96, 96, 12]


def test_step_many_prompts(model: KDAForCausalLM, in_flight: int):
    """Ten prompts, some with a common beginning, through few seats and a small budget."""
    common = prompt_of(70, seed=5)
    prompts = [prompt_of(13 * i + 3, seed=i) for i in range(6)]
    prompts += [[*common, *prompt_of(5 * i + 1, seed=50 + i)] for i in range(4)]
    bench = Bench(model, steps_in_flight=in_flight, max_num_batched_tokens=80)
    ids = [bench.engine.submit(prompt, GREEDY) for prompt in prompts]
    updates = bench.run()
    assert [tokens_of(updates[i]) for i in ids] == [reference(model, p) for p in prompts]
    assert max(len(batch.rows) for batch in bench.runner.batches) == 4
    assert any(len({r.is_decode for r in batch.rows}) == 2 for batch in bench.runner.batches)
    assert [updates[i][0].num_cached_tokens for i in ids[-3:]] == [64, 64, 64]


def test_step_preemption(model: KDAForCausalLM, in_flight: int):
    """KV for fewer tokens than four requests want: some wait again, all get their own tokens."""
    sampling = replace(GREEDY, max_tokens=40)
    prompts = [prompt_of(100 + i, seed=i) for i in range(4)]
    bench = Bench(model, steps_in_flight=in_flight, num_kv_blocks=32)
    ids = [bench.engine.submit(prompt, sampling) for prompt in prompts]
    bench.engine.scheduler.check_integrity()
    updates = bench.run()
    assert bench.engine.scheduler.counters.preemptions > 0
    expected = [reference(model, prompt, sampling) for prompt in prompts]
    assert [tokens_of(updates[i]) for i in ids] == expected


def test_step_few_slots(model: KDAForCausalLM, in_flight: int):
    """Two running states and nothing for the cache: slower, never wrong."""
    prompts = [prompt_of(50 + i, seed=i) for i in range(4)]
    bench = Bench(model, steps_in_flight=in_flight, num_state_slots=2)
    ids = [bench.engine.submit(prompt, GREEDY) for prompt in prompts]
    updates = bench.run()
    assert [tokens_of(updates[i]) for i in ids] == [reference(model, p) for p in prompts]
    assert max(len(batch.rows) for batch in bench.runner.batches) == 2


def test_abort(model: KDAForCausalLM, in_flight: int):
    """Aborted while waiting, in the middle of its prefill, and while it decodes."""
    bench = Bench(model, steps_in_flight=in_flight, max_num_seqs=2, max_num_batched_tokens=64)
    engine, kept, long = bench.engine, prompt_of(90, seed=1), prompt_of(250, seed=2)
    staying = engine.submit(kept, GREEDY)
    in_prefill = engine.submit(long, GREEDY)
    waiting = engine.submit(prompt_of(20, seed=3), GREEDY)
    updates = engine.step() + engine.step() + engine.step()
    assert engine.abort(in_prefill) and engine.abort(waiting)
    decoding = engine.submit(prompt_of(10, seed=4), replace(GREEDY, max_tokens=50))
    while not any(update.request_id == decoding for update in updates):
        updates += engine.step()
    assert engine.abort(decoding) and not engine.abort(decoding) and not engine.abort("nobody")
    late = len(updates)
    for rest in bench.run().values():
        updates += rest
    mine = [update for update in updates if update.request_id == staying]
    assert tokens_of(mine) == reference(model, kept) and mine[-1].finish_reason == "length"
    assert {update.request_id for update in updates[late:]} <= {staying}
    # what the aborted prefill has computed is not lost
    assert bench.answer(long) == reference(model, long)
    assert bench.runner.prefills[-1][0] > 0 or bench.runner.prefills[-2][0] > 0


@pytest.mark.parametrize("breaks_at", [0, 1, 3], ids="forward{}".format)
def test_step_failing_forward(model: KDAForCausalLM, breaks_at: int, in_flight: int):
    """Its requests end with the error; the others go on, and nothing half-written is reused."""
    bench = Bench(model, steps_in_flight=in_flight, max_num_seqs=2)
    bench.runner.breaks_at = breaks_at
    prompts = [prompt_of(70 + i, seed=i) for i in range(5)]
    ids = [bench.engine.submit(prompt, GREEDY) for prompt in prompts]
    updates = bench.run()
    failed = [row.request_id for row in bench.runner.batches[breaks_at].rows]
    assert 0 < len(failed) <= 2
    for request_id, prompt in zip(ids, prompts, strict=True):
        last = updates[request_id][-1]
        if request_id in failed:
            assert last.finish_reason == "error"
            assert last.error == "RuntimeError: out of memory: 12 of 8 GiB"
        else:
            assert last.finish_reason == "length" and last.error is None
            assert tokens_of(updates[request_id]) == reference(model, prompt)
    for prompt in prompts:
        assert bench.answer(prompt) == reference(model, prompt)


def test_seeds(model: KDAForCausalLM, in_flight: int):
    """A request's random tokens depend on its seed, not on the batch or on the cache."""
    bench = Bench(model, steps_in_flight=in_flight)
    prompt = prompt_of(60)
    # cool enough that the prompt weighs more than the draw
    sampling = SamplingParams(max_tokens=12, seed=5, ignore_eos=True, top_p=0.9, temperature=0.5)
    alone = bench.answer(prompt, sampling)
    assert len(set(alone)) > 6
    assert bench.answer(prompt, sampling) == alone  # from the cache
    assert bench.answer(prompt, replace(sampling, seed=6)) != alone
    crowded = Bench(model, steps_in_flight=in_flight, max_num_batched_tokens=48)
    others = [crowded.engine.submit(prompt_of(33, seed=i), sampling) for i in range(3)]
    mine = crowded.engine.submit(prompt, sampling)
    updates = crowded.run()
    assert tokens_of(updates[mine]) == alone
    assert all(tokens_of(updates[other]) != alone for other in others)


def test_seeds_not_given(model: KDAForCausalLM):
    """Without one, requests differ from each other, and a second run repeats the first."""
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    runs = []
    for seed in (0, 0, 1):
        bench = Bench(model, seed=seed)
        runs.append([bench.answer(prompt_of(20), sampling) for _ in range(2)])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1] and runs[0] != runs[2]


def test_stop_token_ids(model: KDAForCausalLM, in_flight: int):
    bench = Bench(model, steps_in_flight=in_flight)
    tokens = bench.answer(prompt_of(40))
    stop = replace(GREEDY, stop_token_ids=(tokens[2],))
    request_id = bench.engine.submit(prompt_of(40), stop)
    updates = bench.run()[request_id]
    assert tokens_of(updates) == tokens[:3] and updates[-1].finish_reason == "stop"


def test_eos(model: KDAForCausalLM, in_flight: int):
    """The model's own end is honoured unless the request says otherwise."""
    expected = reference(model, prompt_of(40))
    bench = Bench(model, steps_in_flight=in_flight)
    bench.runner.model.config, before = (
        replace(model.config, eos_token_ids=(expected[3],)),
        model.config,
    )
    try:
        assert bench.answer(prompt_of(40), replace(GREEDY, ignore_eos=False)) == expected[:4]
        assert bench.answer(prompt_of(40)) == expected
    finally:
        model.config = before


def test_stop_text(model: KDAForCausalLM, monkeypatch: pytest.MonkeyPatch, in_flight: int):
    """A text across two tokens ends the output before it; nothing of it leaves early."""
    expected = reference(model, prompt_of(40))
    letters = {token: chr(97 + i) for i, token in enumerate(dict.fromkeys(expected))}
    monkeypatch.setattr(
        Tokenizer, "token_bytes", lambda self, token: letters.get(token, "?").encode()
    )
    text = "".join(letters[token] for token in expected)
    bench = Bench(model, steps_in_flight=in_flight)
    request_id = bench.engine.submit(prompt_of(40), replace(GREEDY, stop=(text[2:4], "zz")))
    updates = bench.run()[request_id]
    assert [update.text for update in updates] == [text[0], text[1], "", ""]
    assert updates[-1].finish_reason == "stop" and tokens_of(updates) == expected[:4]
    # found in the very last token: a stop, not a length
    request_id = bench.engine.submit(prompt_of(40), replace(GREEDY, stop=(text[4:6],)))
    updates = bench.run()[request_id]
    assert updates[-1].finish_reason == "stop" and "".join(u.text for u in updates) == text[:4]


def test_model_length_ends(model: KDAForCausalLM, bench: Bench):
    prompt = prompt_of(508)
    bench = Bench(model, max_num_batched_tokens=512)
    request_id = bench.engine.submit(prompt, GREEDY)
    updates = bench.run()[request_id]
    assert len(tokens_of(updates)) == 4 and updates[-1].finish_reason == "length"


def test_logprobs(model: KDAForCausalLM, in_flight: int):
    """Log probabilities are those of one prefill over prompt and answer."""
    bench = Bench(model, steps_in_flight=in_flight)
    prompt = prompt_of(45)
    request_id = bench.engine.submit(prompt, replace(GREEDY, logprobs=3))
    bench.engine.submit(prompt_of(30, seed=8), GREEDY)
    updates = bench.run()[request_id]
    tokens = tokens_of(updates)
    found = [item for update in updates for item in update.logprobs]
    assert len(found) == len(tokens)
    for i in range(len(tokens)):
        one = Bench(model, steps_in_flight=in_flight)
        again = one.engine.submit([*prompt, *tokens[:i]], replace(GREEDY, max_tokens=1, logprobs=3))
        expected = one.run()[again][0].logprobs[0]
        assert [token for token, _ in found[i].top] == [token for token, _ in expected.top]
        assert math.isclose(found[i].logprob, expected.logprob, abs_tol=1e-5)
        assert found[i].top[0] == (tokens[i], found[i].logprob)


def test_prefixes_not_shared(model: KDAForCausalLM, bench: Bench):
    """Different salts, and engines without prefix caching, share nothing."""
    prompt = prompt_of(100)
    for salt, cached in (("a", 0), ("b", 0), ("a", 96)):
        request_id = bench.engine.submit(prompt, GREEDY, cache_salt=salt)
        assert bench.run()[request_id][0].num_cached_tokens == cached
    off = Bench(model, enable_prefix_caching=False)
    assert off.answer(prompt) == off.answer(prompt)
    assert off.runner.prefills == [(0, 100), (0, 100)]
    assert not any(row.exports for batch in off.runner.batches for row in batch.rows)


def test_checkpoint_positions(model: KDAForCausalLM, bench: Bench):
    """A prompt that parts from the first at a named position resumes there."""
    first = prompt_of(150)
    bench.engine.submit(first, GREEDY, checkpoint_positions=[70])
    bench.run()
    other = [*first[:70], *prompt_of(40, seed=7)]
    request_id = bench.engine.submit(other, GREEDY)
    updates = bench.run()[request_id]
    assert updates[0].num_cached_tokens == 64
    assert tokens_of(updates) == reference(model, other)


BAD = {
    "empty": ([], {}, "prompt_token_ids must not be empty"),
    "long": ([1] * 512, {}, "the prompt has 512 tokens, but the model holds 512"),
    "negative": ([1, -1], {}, r"must be in \[0, 264\), the vocabulary; got -1 at position 1"),
    "unknown": ([264], {}, r"must be in \[0, 264\), the vocabulary; got 264 at position 0"),
    "huge": ([2**80], {}, "flat sequence of integers"),
    "float": ([1.5], {}, r"flat sequence of integers, got shape \[1\] of float64"),
    "text": ("hello", {}, "must be a sequence of token ids, got str"),
    "strings": (["a", "b"], {}, "flat sequence of integers"),
    "nested": ([[1, 2]], {}, r"flat sequence of integers, got shape \[1, 2\]"),
    "ragged": ([[1], [1, 2]], {}, "must be a sequence of token ids"),
    "none": (None, {}, "flat sequence of integers"),
    "bool": ([True], {}, "flat sequence of integers, got shape .* of bool"),
    "sampling": ([1], {"sampling": {"max_tokens": 3}}, "must be SamplingParams, got dict"),
    "stop id": (
        [1],
        {"sampling": SamplingParams(stop_token_ids=(300,))},
        r"stop_token_ids must be in \[0, 264\)",
    ),
    "id in use": ([1], {"request_id": "good"}, "request_id 'good' is in use"),
    "id": ([1], {"request_id": ["good"]}, "request_id must be a non-empty string"),
    "priority": ([1], {"priority": "high"}, "priority must be an integer, got 'high'"),
    "checkpoint": ([1], {"checkpoint_positions": [2]}, r"checkpoint_positions must be .*\[1, 1\]"),
    "salt": ([1], {"cache_salt": 5}, "cache_salt must be a string, got 5"),
}


@pytest.mark.parametrize("case", BAD)
def test_submit_bad_input(model: KDAForCausalLM, case: str):
    """Each is refused with a clear text, and the request that is running is unharmed."""
    prompt, arguments, message = BAD[case]
    bench = Bench(model)
    good = bench.engine.submit(prompt_of(40), GREEDY, request_id="good")
    updates = bench.engine.step()
    with pytest.raises(ValueError, match=message):
        bench.engine.submit(prompt, arguments.pop("sampling", GREEDY), **arguments)
    rest = bench.run()
    assert set(rest) == {good}
    assert tokens_of(updates + rest[good]) == reference(model, prompt_of(40))


def test_submit_makes_up_a_name_that_is_free(model: KDAForCausalLM):
    bench = Bench(model)
    wanted = ("request-2", None, None)
    names = [bench.engine.submit([1], GREEDY, request_id=name) for name in wanted]
    assert names == ["request-2", "request-1", "request-3"]
    assert set(bench.run()) == set(names)


def test_submit_stop_text_without_tokenizer(model: KDAForCausalLM):
    engine = build_engine(CountingRunner(model, CONFIG), CONFIG, None)
    with pytest.raises(ValueError, match="stop strings need a tokenizer"):
        engine.submit([1], SamplingParams(stop=("x",)))
    engine.submit([1], GREEDY)
    texts = []
    while engine.has_work:
        texts += [update.text for update in engine.step()]
    assert texts == [""] * 6


@pytest.mark.gpu
def test_step_gpu(model: KDAForCausalLM):
    """On the device: one forward, then the deepest boundary; nothing unwritten is read."""
    config = replace(CONFIG, device="cuda", num_kv_blocks=64, num_state_slots=16)
    small = model_preset(
        "tiny", max_model_len=512, dtype="bfloat16", linear_head_dim=128, linear_num_heads=2
    )
    on_gpu = KDAForCausalLM(config.resolve(small), "cuda")
    on_gpu.random_init(1)
    bench = Bench(on_gpu, device="cuda", num_kv_blocks=64)
    prompt = prompt_of(200)
    request_id = bench.engine.submit(prompt, replace(GREEDY, logprobs=1))
    first = bench.run()[request_id]
    assert all(math.isfinite(item.logprob) for update in first for item in update.logprobs)
    again = bench.engine.submit([*prompt, *tokens_of(first), *prompt_of(9)], GREEDY)
    assert bench.run()[again][0].num_cached_tokens == 192
    assert bench.runner.prefills == [(0, 200), (192, 215)]
    assert torch.cuda.max_memory_allocated() > 0
