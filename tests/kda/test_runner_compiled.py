"""The runner with the model compiled: how often, and that nothing else changes."""

import random

import einops
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch_kda.kda.config import EngineConfig
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.runner import ModelRunner
from torch_kda.kda.step import StepInputs
from torch_kda.tests.checks import assert_same
from torch_kda.tests.kda.steps import fill_pools, pool_tensors, random_step, small_model

CONFIG = EngineConfig(
    max_num_seqs=9,
    max_num_batched_tokens=208,
    prefix_match_unit=16,
    kv_block_size=16,
    num_state_slots=61,
    num_kv_blocks=97,
    compile=True,
)
EAGER = EngineConfig(**{**{f: getattr(CONFIG, f) for f in CONFIG.__slots__}, "compile": False})
NUM_KINDS = 3  # prefill alone, decode alone, both


@pytest.fixture(scope="module")
def model() -> KDAForCausalLM:
    return small_model(CONFIG)


class Watched(ModelRunner):
    """Keeps the logits of its last step."""

    def forward(self, inputs: StepInputs) -> torch.Tensor:
        self.seen = [super().forward(inputs)]
        return self.seen[0]


def random_lengths(rng: random.Random) -> tuple[int, list[int]]:
    """Decode rows and lengths of prefills of one step."""
    num_rows = rng.choice([0, 0, 1, 2, 3, 5, 9])
    lengths = [rng.randrange(1, 70) for _ in range(rng.choice([0, 0, 1, 2, 3]))]
    return (num_rows, lengths) if num_rows or lengths else (1, lengths)


def test_one_compilation_for_each_kind_of_step(model: KDAForCausalLM) -> None:
    """200 random steps after the start compile nothing; all values are eager's, bit by bit."""
    torch._dynamo.reset()
    einops._backends._type2backend.clear()  # as in a process that has not run a step
    counter = CompileCounterWithBackend("aot_eager")
    compiled, eager = ModelRunner(model, CONFIG, backend=counter), ModelRunner(model, EAGER)
    assert counter.frame_count == NUM_KINDS
    fill_pools(compiled, eager)
    rng = random.Random(0)
    for i in range(200):
        num_rows, lengths = random_lengths(rng)
        batch = random_step(rng, eager, num_rows=num_rows, lengths=lengths)
        assert compiled.run(batch) == eager.run(batch)
        for n, (a, b) in enumerate(zip(pool_tensors(compiled), pool_tensors(eager), strict=True)):
            assert_same(f"pool {n} after step {i}", a, b)
    assert counter.frame_count == NUM_KINDS


@pytest.mark.inductor
def test_inductor_is_eager(model: KDAForCausalLM) -> None:
    """Logits and pools are eager's, bit by bit: the compiler finds nothing but copies to merge.

    One compilation for each kind of step.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled, eager = Watched(model, CONFIG, backend=counter), Watched(model, EAGER)
    fill_pools(compiled, eager)
    rng = random.Random(1)
    for i in range(30):
        num_rows, lengths = random_lengths(rng)
        batch = random_step(rng, eager, num_rows=num_rows, lengths=lengths)
        assert compiled.run(batch).token_ids == eager.run(batch).token_ids
        for a, b in zip(compiled.seen, eager.seen, strict=True):
            assert_same(f"logits of step {i}", a[: len(batch.rows)], b[: len(batch.rows)])
        for n, (a, b) in enumerate(zip(pool_tensors(compiled), pool_tensors(eager), strict=True)):
            assert_same(f"pool {n} after step {i}", a, b)
    assert counter.frame_count == NUM_KINDS
