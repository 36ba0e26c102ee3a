"""Recorded steps: what is recorded, in what order, and that a replay is the step itself."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch_kda.kda.buckets import Buckets, Shape
from torch_kda.kda.config import EngineConfig
from torch_kda.kda.graphs import StepGraphs
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.presets import model_preset
from torch_kda.kda.runner import ModelRunner
from torch_kda.scheduler.request import SamplingParams
from torch_kda.tests.checks import assert_rms, assert_same
from torch_kda.tests.kda.steps import fill_pools, pool_tensors, random_step, small_model

CONFIG = EngineConfig(
    max_num_seqs=8,
    max_num_batched_tokens=128,
    prefix_match_unit=16,
    kv_block_size=16,
    num_state_slots=64,
    num_kv_blocks=100,
    decode_buckets=(2, 4, 8),
    prefill_buckets=(32, 64),
)
NUM_SHAPES = 3 + 2 + 3 * 2


class FakeRecorder:
    """Repeats a launch by making it again; notes what was recorded and replayed."""

    num_bytes = 0

    def __init__(self) -> None:
        self.num_recorded = 0
        self.replayed: list[int] = []

    def record(self, launch: Callable[[], None]) -> Callable[[], None]:
        launch()
        index = self.num_recorded
        self.num_recorded += 1

        def replay() -> None:
            self.replayed.append(index)
            launch()

        return replay


@pytest.fixture(scope="module")
def model() -> KDAForCausalLM:
    return small_model(CONFIG)


def test_capture_order_and_replay() -> None:
    """From the largest down, then the draws; each replay is that of its shape."""
    recorder, launched = FakeRecorder(), []
    graphs = StepGraphs(recorder, Buckets((2, 4), (32,)))
    summary = graphs.capture(launched.append, lambda count: launched.append(-count), [2, 12, 4])
    shapes = [Shape(4, 32), Shape(2, 32), Shape(0, 32), Shape(4, 0), Shape(2, 0)]
    assert launched == [*shapes, -12, -4, -2]
    assert summary.num_shapes == 5 and "5 graphs" in str(summary)
    for i, shape in enumerate(shapes):
        graphs.replay(shape)
        assert launched[-1] == shape and recorder.replayed[-1] == i
    graphs.draw(4)
    assert launched[-1] == -4 and recorder.replayed[-1] == 6
    assert graphs.find(3, 0) == Shape(4, 0) and graphs.find(5, 0) is None


def test_capture_failure_says_what_and_how_to_go_on() -> None:
    class Failing(FakeRecorder):
        def record(self, launch: Callable[[], None]) -> Callable[[], None]:
            raise RuntimeError("operation not permitted when stream is capturing")

    graphs = StepGraphs(Failing(), Buckets((2,), ()))
    with pytest.raises(RuntimeError, match=r"Shape\(D=2, T=0\).*capturing; cuda_graphs=False"):
        graphs.capture(lambda shape: None, lambda count: None, [])


def test_capture_touches_no_pool(model: KDAForCausalLM) -> None:
    """Steps are recorded over padding: nothing that a cache holds is written."""
    recorder = FakeRecorder()
    runner = ModelRunner(model, CONFIG, recorder=recorder)
    assert recorder.num_recorded == NUM_SHAPES + len({2, 4, 8, 2 + 8, 4 + 8, 8 + 8})
    assert runner.captured is not None and runner.captured.num_shapes == NUM_SHAPES
    assert all(not pool.any() for pool in pool_tensors(runner))


SAMPLING = {
    "greedy": SamplingParams(temperature=0),
    "drawn": SamplingParams(temperature=0.8, seed=3),
    "filtered": SamplingParams(temperature=0.8, seed=3, top_k=7, top_p=0.9),
    "logprobs": SamplingParams(temperature=0, logprobs=2),
}


def check_replay(
    recorded: ModelRunner, plain: ModelRunner, num_steps: int, *, is_exact: bool, **limits: int
) -> None:
    """Random steps, in pairs of which the second takes tokens of the first on the device."""
    rng = random.Random(0)
    for i in range(num_steps):
        sampling = SAMPLING[rng.choice(list(SAMPLING))]
        batches, previous = [], 0
        for _ in range(2):
            num_rows, lengths = random_lengths(rng, **limits)
            batches.append(
                random_step(
                    rng,
                    plain,
                    num_rows=num_rows,
                    lengths=lengths,
                    sampling=sampling,
                    prev_rows=previous,
                )
            )
            previous = num_rows + len(lengths)
        results = []
        for runner in (recorded, plain):
            first = runner.launch(batches[0])
            second = runner.launch(batches[1])
            results.append([runner.finish(first), runner.finish(second)])
        for a, b in zip(*results, strict=True):
            assert a.token_ids == b.token_ids, f"pair {i}"
            assert not is_exact or a.logprobs == b.logprobs, f"pair {i}"
            assert list(map(len, a.logprobs)) == list(map(len, b.logprobs))
        for n, (a, b) in enumerate(zip(pool_tensors(recorded), pool_tensors(plain), strict=True)):
            name = f"pool {n} after pair {i}"
            assert_same(name, a, b) if is_exact else assert_rms(name, a, b, 1e-5)


def random_lengths(
    rng: random.Random, *, max_rows: int = 8, max_tokens: int = 128
) -> tuple[int, list[int]]:
    num_rows = rng.choice([0, 1, 2, 3, max_rows])
    lengths, left = [], max_tokens
    for _ in range(rng.choice([0, 1, 1, 3])):
        lengths.append(rng.randrange(1, max(2, left // 2)))
        left -= lengths[-1]
    return (num_rows, lengths) if num_rows or lengths else (1, [])


def test_replay_is_the_step(model: KDAForCausalLM) -> None:
    """Tokens, log probabilities and pools, recorded or above the largest bucket."""
    recorder = FakeRecorder()
    recorded = ModelRunner(model, CONFIG, recorder=recorder)
    plain = ModelRunner(model, CONFIG)
    fill_pools(recorded, plain)
    # padding a step moves the last bits of a CPU's matrix products
    check_replay(recorded, plain, 60, is_exact=False)
    assert set(recorder.replayed) == set(range(recorder.num_recorded))
    assert len(recorder.replayed) < 2 * 120  # steps above the buckets are not recorded


def test_addresses_stay(model: KDAForCausalLM) -> None:
    """What a recorded step reads and writes is at the same place each time."""
    runner = ModelRunner(model, CONFIG, recorder=FakeRecorder())
    rng = random.Random(1)

    def addresses() -> list[int]:
        held = [runner.buffers.handover.tokens, runner._logits]
        held += [runner.buffers.temperature, runner.buffers.keys]
        with torch.inference_mode():
            for shape in runner.graphs.buckets.shapes:
                held += runner.buffers.fetch(*shape)
        runner.buffers.handover.restart()
        return [x.data_ptr() for x in held]

    before = addresses()
    for _ in range(10):
        num_rows, lengths = random_lengths(rng)
        runner.run(random_step(rng, runner, num_rows=num_rows, lengths=lengths))
    assert addresses() == before


def test_buckets_from_settings(model: KDAForCausalLM) -> None:
    """Sizes beyond the limits of a step, and a single row, have no graph."""
    config = replace(CONFIG, decode_buckets=(1, 4, 64), prefill_buckets=(64, 4096))
    runner = ModelRunner(
        model, replace(config, compile=True), recorder=FakeRecorder(), backend="eager"
    )
    assert runner.graphs.buckets == Buckets((4,), (64,))
    done = runner.run(random_step(random.Random(0), runner, num_rows=1, lengths=[]))
    assert len(done.token_ids) == 1


GPU = EngineConfig(
    device="cuda",
    max_num_seqs=8,
    max_num_batched_tokens=512,
    prefix_match_unit=16,
    kv_block_size=16,
    num_state_slots=64,
    num_kv_blocks=200,
    decode_buckets=(2, 4, 8),
    prefill_buckets=(64, 256),
)


@pytest.mark.gpu
def test_replay_on_gpu() -> None:
    """Graphs against the same compiled step without them, bit by bit."""
    sizes = {"linear_head_dim": 128, "hidden_size": 256, "kv_lora_rank": 512, "vocab_size": 1000}
    config = model_preset("tiny", **sizes, dtype="bfloat16", max_model_len=1024)
    model = KDAForCausalLM(GPU.resolve(config), device="cuda")
    model.random_init(0)
    recorded = ModelRunner(model, GPU)
    # the same buckets and buffers: what differs is the replay alone
    plain = ModelRunner(model, GPU, recorder=FakeRecorder())
    fill_pools(recorded, plain)
    check_replay(recorded, plain, 60, is_exact=True, max_tokens=500)
