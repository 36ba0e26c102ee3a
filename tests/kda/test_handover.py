"""Turns of the host and of the device: they agree, also after a launch that failed."""

import random

import pytest
import torch
from torch_kda.kda.handover import Handover
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.runner import ModelRunner
from torch_kda.ops.handover import Places
from torch_kda.tests.checks import assert_same
from torch_kda.tests.kda.steps import fill_pools, pool_tensors, random_step, small_model
from torch_kda.tests.kda.test_graphs import CONFIG, FakeRecorder

NUM_WORDS, NUM_TOKENS = 40, 6
PLACES = Places(8, 16, 8, 24, 28, 32, num_rows=2, width=2, block_size=16)


def step(handover: Handover, number: int, *, is_posted: bool = True) -> None:
    """Fill, fetch and post, as a step of that number would."""
    turn = handover.turns[handover.begin()]
    turn.words.fill_(number)
    turn.words[16:24] = -1
    handover.fetch(NUM_WORDS, PLACES)
    handover.tokens.fill_(100 * number)
    if is_posted:
        handover.post(NUM_TOKENS)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_steps_in_flight(device: str) -> None:
    """A step's tokens stay until the step after the next one, and so does what it read."""
    handover = Handover(NUM_WORDS, NUM_TOKENS, torch.device(device))
    flying, read = [], []
    for number in range(1, 10):
        step(handover, number)
        read.append(handover.packed.clone())
        flying.append(handover.end())
        if len(flying) == 2:
            turn = flying.pop(0)
            turn.wait()
            assert turn.tokens.tolist() == [100 * (number - 1)] * NUM_TOKENS
    assert [int(words[0]) for words in read] == list(range(1, 10))
    assert len({turn.words.data_ptr() for turn in handover.turns}) == 2


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("stage", ["filled", "fetched", "posted"])
def test_restart(device: str, stage: str) -> None:
    """Wherever a launch failed, and how often: the next step reads what is filled for it."""
    handover, rng = Handover(NUM_WORDS, NUM_TOKENS, torch.device(device)), random.Random(0)
    for number in range(1, 12):
        for _ in range(rng.choice([0, 1, 2])):
            if stage == "filled":
                handover.turns[handover.begin()].words.fill_(-7)
            else:
                step(handover, -7, is_posted=stage == "posted")
            handover.restart()
        step(handover, number)
        assert int(handover.packed[0]) == number
        turn = handover.end()
        turn.wait()
        assert turn.tokens.tolist() == [100 * number] * NUM_TOKENS


@pytest.fixture(scope="module")
def model() -> KDAForCausalLM:
    return small_model(CONFIG)


def test_steps_after_a_launch_that_failed(model: KDAForCausalLM) -> None:
    """They give what they give a runner in which nothing failed: tokens and pools."""
    failing = ModelRunner(model, CONFIG, recorder=FakeRecorder())
    plain = ModelRunner(model, CONFIG, recorder=FakeRecorder())
    fill_pools(failing, plain)
    rng = random.Random(3)
    for number in range(20):
        batch = random_step(rng, plain, num_rows=rng.choice([0, 1, 3]), lengths=[20])
        if rng.random() < 0.5:
            with pytest.MonkeyPatch.context() as patch:
                # before the fetch, or between it and the end of the launch
                owner, name = rng.choice(
                    [(failing.graphs, "replay"), (failing.buffers.handover, "end")]
                )
                patch.setattr(owner, name, _fail)
                lost = random_step(rng, plain, num_rows=2, lengths=[])
                # it writes pools, or not: what it wrote is put right again
                kept = [pool.clone() for pool in pool_tensors(failing)]
                with pytest.raises(RuntimeError, match="lost"):
                    failing.launch(lost)
                with torch.inference_mode():
                    for pool, before in zip(pool_tensors(failing), kept, strict=True):
                        pool.copy_(before)
        results = [runner.run(batch) for runner in (failing, plain)]
        assert results[0].token_ids == results[1].token_ids, f"step {number}"
        for n, pools in enumerate(zip(*map(pool_tensors, (failing, plain)), strict=True)):
            assert_same(f"pool {n} after step {number}", *pools)


def _fail(*args: object) -> None:
    raise RuntimeError("lost")
