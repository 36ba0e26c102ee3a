"""The runner on batches written by hand: what the scheduler decides is what happens."""

import math
from array import array

import pytest
import torch
from torch_kda.kda.config import EngineConfig, ModelConfig
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.presets import model_preset
from torch_kda.kda.runner import ModelRunner, StepResult
from torch_kda.scheduler.batch import ScheduledBatch, ScheduledRow
from torch_kda.scheduler.request import SamplingParams

GREEDY = SamplingParams(temperature=0)
CONFIG = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=256,
    prefix_match_unit=16,
    kv_block_size=16,
    num_state_slots=16,
    num_kv_blocks=64,
)
PROMPT = [(7 * i * i + 3 * i) % 256 for i in range(75)]


@pytest.fixture(scope="module")
def model() -> KDAForCausalLM:
    config: ModelConfig = model_preset("tiny", max_model_len=256)
    model = KDAForCausalLM(CONFIG.resolve(config))
    model.random_init(0)
    return model


@pytest.fixture
def runner(model: KDAForCausalLM) -> ModelRunner:
    return ModelRunner(model, CONFIG)


def row(
    token_ids: list[int], start: int, end: int, src: int, dst: int, blocks: int, **changes
) -> ScheduledRow:
    """Tokens [start, end) of `token_ids`, its KV in 8 blocks from `blocks` on."""
    fields = {
        "request_id": "r",
        "is_decode": False,
        "start": start,
        "end": end,
        "token_ids": token_ids[start:end],
        "prev_row": -1,
        "src_slot": src,
        "dst_slots": (dst,),
        "exports": (),
        "block_table": array("i", range(blocks, blocks + -(-end // 16))),
        "kv_start": start,
        "samples": True,
        "sampling": GREEDY,
        "sample_index": 0,
    }
    return ScheduledRow(**{**fields, **changes})


def run(runner: ModelRunner, *rows: ScheduledRow) -> StepResult:
    return runner.run(ScheduledBatch.of(0, rows))


def generate(runner: ModelRunner, tokens: list[int], count: int, slot: int, blocks: int):
    """Greedy tokens of one sequence: one prefill, then decode in place."""
    tokens = list(tokens)
    done = run(runner, row(tokens, 0, len(tokens), -1, slot, blocks))
    tokens.append(done.token_ids[0][0])
    for _ in range(count - 1):
        n = len(tokens)
        done = run(runner, row(tokens, n - 1, n, slot, slot, blocks, is_decode=True))
        tokens.append(done.token_ids[0][0])
    return tokens[-count:]


def test_run_decode_is_prefill(runner: ModelRunner):
    """Decoding step by step gives the tokens that prefills of the growing text give."""
    tokens = list(PROMPT)
    for _ in range(6):
        done = run(runner, row(tokens, 0, len(tokens), -1, 3, 20))
        tokens.append(done.token_ids[0][0])
    assert generate(runner, PROMPT, 6, slot=0, blocks=0) == tokens[-6:]


def test_run_exports(runner: ModelRunner):
    """A state exported inside a prefill is one from which the rest runs, with its KV shared."""
    whole = run(runner, row(PROMPT, 0, 75, -1, 0, 0, exports=((32, 5), (64, 6)), sampling=LOGPROBS))
    for start, slot in ((32, 5), (64, 6)):
        rest = run(runner, row(PROMPT, start, 75, slot, 1, 0, kv_start=75, sampling=LOGPROBS))
        assert rest.token_ids == whole.token_ids
        assert math.isclose(rest.logprobs[0][0].logprob, whole.logprobs[0][0].logprob, abs_tol=1e-5)
    # the wrong state is noticed: the test can fail
    wrong = run(runner, row(PROMPT, 64, 75, 5, 1, 0, kv_start=75, sampling=LOGPROBS))
    assert abs(wrong.logprobs[0][0].logprob - whole.logprobs[0][0].logprob) > 1e-3


def test_run_kv_start(runner: ModelRunner):
    """KV below kv_start is left as it is."""
    run(runner, row(PROMPT, 0, 75, -1, 0, 0))
    before = [pool.clone() for pool in runner.pools.kv]
    run(runner, row(PROMPT[::-1], 0, 75, -1, 1, 0, kv_start=64))
    for old, new in zip(before, runner.pools.kv, strict=True):
        assert torch.equal(old[:4], new[:4]) and not torch.equal(old[4], new[4])


LOGPROBS = SamplingParams(temperature=0, logprobs=3)


def test_run_mixed(runner: ModelRunner):
    """Decode rows, a chunk that samples nothing, a padded prefill: each as if it were alone."""
    other = PROMPT[::-1]
    alone = [
        generate(runner, PROMPT, 2, slot=0, blocks=0),
        generate(runner, other[:40], 1, slot=1, blocks=8),
    ]
    run(runner, row(PROMPT, 0, 75, -1, 0, 0))
    tokens = [*PROMPT, alone[0][0]]
    done = run(
        runner,
        row(tokens, 75, 76, 0, 0, 0, is_decode=True, sampling=LOGPROBS),
        row(other, 0, 40, -1, 2, 16),
        row(other, 0, 32, -1, 3, 24, samples=False),
    )
    assert [list(ids) for ids in done.token_ids] == [[alone[0][1]], alone[1], []]
    assert [len(found) for found in done.logprobs] == [1, 0, 0]
    best = done.logprobs[0][0]
    assert best.top[0] == (alone[0][1], best.logprob)
    assert [p for _, p in best.top] == sorted((p for _, p in best.top), reverse=True)
    assert len(best.top) == 3


def test_run_draws(runner: ModelRunner):
    """Rows that draw, beside greedy ones and a chunk that samples nothing: as if alone."""
    drawn = [SamplingParams(seed=s, temperature=5.0, top_k=k) for s, k in ((1, 0), (2, 0), (3, 9))]
    alone = []
    for i, sampling in enumerate((*drawn, GREEDY)):
        prompt = PROMPT[i:]
        fields = {"sampling": sampling, "sample_index": 10 + i}
        alone.append(run(runner, row(prompt, 0, len(prompt), -1, i, 8 * i, **fields)).token_ids[0])
    for order in ((0, 3, 1), (3, 1), (2, 0, 3), (1, 3, 0), (3,)):
        rows = []
        for i in order:
            prompt = PROMPT[i:]
            fields = {"sampling": drawn[i] if i < 3 else GREEDY, "sample_index": 10 + i}
            rows.append(row(prompt, 0, len(prompt), -1, i, 8 * i, **fields))
        chunk = row(PROMPT[::-1], 0, 16, -1, 4, 40, samples=False, sampling=drawn[0])
        done = run(runner, chunk, *rows)
        assert list(done.token_ids) == [(), *[alone[i] for i in order]]
    # drawn with other numbers, they are others: the test can fail
    other = run(runner, row(PROMPT, 0, 75, -1, 0, 0, sampling=drawn[0], sample_index=11))
    assert other.token_ids[0] != alone[0]


def test_launch_two_in_flight(runner: ModelRunner):
    """The step after is launched before this one's token is read: it takes it on the device."""
    expected = generate(runner, PROMPT, 3, slot=0, blocks=0)
    batches = [
        ScheduledBatch.of(0, (row(PROMPT, 0, 75, -1, 1, 8),)),
        ScheduledBatch.of(
            1, (row([*PROMPT, 0], 75, 76, 1, 1, 8, is_decode=True, prev_row=0, sample_index=1),)
        ),
        ScheduledBatch.of(
            2, (row([*PROMPT, 0, 0], 76, 77, 1, 1, 8, is_decode=True, prev_row=0, sample_index=2),)
        ),
    ]
    first = runner.launch(batches[0])
    second = runner.launch(batches[1])
    tokens = [runner.finish(first).token_ids[0][0]]
    third = runner.launch(batches[2])
    tokens += [runner.finish(step).token_ids[0][0] for step in (second, third)]
    assert tokens == expected


def test_speculative_tokens_refused(model: KDAForCausalLM):
    with pytest.raises(NotImplementedError, match="num_speculative_tokens must be 0"):
        ModelRunner(model, EngineConfig(num_speculative_tokens=2))


def test_memory_too_small(model: KDAForCausalLM):
    with pytest.raises(ValueError, match="no room for one request of 256 tokens"):
        ModelRunner(model, EngineConfig(num_kv_blocks=1))
