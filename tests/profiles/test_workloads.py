"""Streams on a simulated device: times can be computed by hand there."""

from dataclasses import replace

import pytest
from torch_kda.kda.buckets import Shape
from torch_kda.kda.build import build_engine
from torch_kda.kda.config import EngineConfig
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.presets import model_preset
from torch_kda.kda.runner import ModelRunner
from torch_kda.profiles.workloads import (
    Client,
    SimulatedRunner,
    StepModel,
    StepRecord,
    TimedRunner,
    bursts,
    closed_loop,
)

CONFIG = EngineConfig(
    max_num_seqs=4,
    max_num_batched_tokens=112,
    prefix_match_unit=32,
    kv_block_size=16,
    num_state_slots=40,
    num_kv_blocks=200,
    steps_in_flight=2,
)
# a token of prefill takes 1 s, a step of decode 0.5 s
STEPS = StepModel({Shape(D, T): T or 0.5 for D in (0, 2, 3, 4) for T in range(0, 240, 16)})


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    config = CONFIG.resolve(model_preset("tiny", max_model_len=1024))
    model = KDAForCausalLM(config)
    model.random_init(0)
    return ModelRunner(model, CONFIG)


def prompts(streams: int, each: int, tokens: int = 100) -> list[list[list[int]]]:
    def prompt(stream: int, turn: int) -> list[int]:
        return [(31 * stream + 7 * turn + i) % 256 for i in range(tokens)]

    return [[prompt(stream, turn) for turn in range(each)] for stream in range(streams)]


def client(runner: ModelRunner, *, num_new: int = 3, **changes) -> tuple[Client, SimulatedRunner]:
    simulated = SimulatedRunner(runner, STEPS)
    engine = build_engine(simulated, replace(CONFIG, **changes), None)
    return Client(engine, num_new=num_new, clock=simulated), simulated


def test_closed_loop_alone(runner: ModelRunner) -> None:
    """One stream: a prompt of 100 tokens takes one step of 112, or one of 96 and one of 16."""
    for blocks, forwards in ((16, 1), (0, 2)):
        one, device = client(runner, num_prefill_checkpoint_blocks=blocks)
        found = closed_loop(one, prompts(1, 3))
        assert len(found) == 2  # the first one warms up
        assert [record.num_prefills for record in found] == [forwards] * 2
        assert [record.ttft for record in found] == [112, 112]
        assert [record.queued for record in found] == [0, 0]
        # three answers of three tokens: a prefill and two steps of decode each
        assert device.now() == 3 * (112 + 2 * 0.5)


def test_closed_loop_streams_go_on_by_themselves(runner: ModelRunner) -> None:
    one, _ = client(runner)
    found = closed_loop(one, prompts(3, 4), num_warm=0)
    assert len(found) == 12 and all(record.finished > record.first_token for record in found)
    assert one.engine.scheduler.counters.steps < 12 * 3  # they share steps


def test_bursts(runner: ModelRunner) -> None:
    """All of a wave are sent at once; the next waits for the last answer."""
    one, _ = client(runner)
    found = bursts(one, prompts(3, 2))
    assert len(found) == 3 and len({record.submitted for record in found}) == 1
    assert sorted(record.queued for record in found)[0] == 0
    assert len({record.first_token for record in found}) > 1


def test_timed_runner(runner: ModelRunner) -> None:
    timed = TimedRunner(runner)
    one = Client(build_engine(timed, CONFIG, None), num_new=4)
    closed_loop(one, prompts(1, 1), num_warm=0)
    assert [(step.num_rows, step.num_tokens) for step in timed.steps] == [
        (0, 100),
        (1, 0),
        (1, 0),
        (1, 0),
    ]
    assert [step.shape for step in timed.steps] == [(0, 112), (2, 0), (2, 0), (2, 0)]
    assert all(step.seconds > 0 for step in timed.steps)
    ends = [step.end for step in timed.steps]
    assert ends == sorted(ends)
    # their times cover the run without holes or overlaps, up to the host's own work
    assert sum(step.seconds for step in timed.steps) <= ends[-1] - timed.steps[0].launched


def test_step_model() -> None:
    steps = [StepRecord(Shape(0, 32), 0, 30, 0.0, seconds=s) for s in (1.0, 3.0, 2.0)]
    steps.append(StepRecord(Shape(2, 0), 2, 0, 0.0, seconds=0.25))
    model = StepModel.learn(steps)
    assert model.seconds(Shape(0, 32)) == 2 and model.seconds(Shape(2, 0)) == 0.25
    assert model.seconds(Shape(0, 64)) == 4  # not seen: by tokens from the nearest of its kind
    assert model.seconds(Shape(8, 0)) == 1
