"""For tests of the runner: a small model, and random steps of any rows a scheduler may make."""

import random
from array import array

import torch
from torch import Tensor
from torch_kda.kda.config import EngineConfig
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.presets import model_preset
from torch_kda.kda.runner import ModelRunner
from torch_kda.scheduler.batch import ScheduledBatch, ScheduledRow
from torch_kda.scheduler.request import SamplingParams

ALIGNMENT = 16


def small_model(config: EngineConfig) -> KDAForCausalLM:
    """One KDA and one MLA layer, with random weights, as this engine runs it."""
    preset = model_preset("tiny", max_model_len=256, num_hidden_layers=2, mla_layers=(1,))
    model = KDAForCausalLM(config.resolve(preset))
    model.random_init(0)
    return model


def pool_tensors(runner: ModelRunner) -> list[Tensor]:
    return [*runner.pools.state, *runner.pools.conv, *runner.pools.kv]


@torch.inference_mode()
def fill_pools(*runners: ModelRunner) -> None:
    """The same random contents in all, and others in each layer."""
    for pools in zip(*(pool_tensors(runner) for runner in runners), strict=True):
        pools[0].normal_(std=0.25)
        for pool in pools[1:]:
            pool.copy_(pools[0])


def random_step(
    rng: random.Random,
    runner: ModelRunner,
    *,
    num_rows: int,
    lengths: list[int],
    sampling: SamplingParams | None = None,
    prev_rows: int = 0,
) -> ScheduledBatch:
    """Decode rows, then prefills of the given lengths, in slots and blocks that none shares.

    Args:
        prev_rows: rows of the step before that decode rows may take their token from.
    """
    plan, vocab = runner.plan, runner.model.config.vocab_size
    slots = rng.sample(range(plan.num_state_slots), plan.num_state_slots)
    blocks = rng.sample(range(plan.num_kv_blocks), plan.num_kv_blocks)
    sampling = sampling or SamplingParams(temperature=0)

    def row(start: int, length: int, *, is_decode: bool) -> ScheduledRow:
        end = start + length
        on_grid = range(start + ALIGNMENT, end + 1, ALIGNMENT)
        exports = () if is_decode else sorted(rng.sample(on_grid, min(2, len(on_grid))))
        count = -(-end // plan.block_size)
        table, blocks[:count] = blocks[:count], []
        is_known = not (is_decode and prev_rows and rng.random() < 0.5)
        source = slots.pop() if start else -1
        return ScheduledRow(
            request_id=str(rng.random()),
            is_decode=is_decode,
            start=start,
            end=end,
            token_ids=array("i", [rng.randrange(vocab) if is_known else 0 for _ in range(length)]),
            prev_row=-1 if is_known else rng.randrange(prev_rows),
            src_slot=source,
            # in place or into another slot
            dst_slots=(source if source >= 0 and rng.random() < 0.5 else slots.pop(),),
            exports=tuple((position, slots.pop()) for position in exports),
            block_table=array("i", table),
            kv_start=start,
            samples=True,
            sampling=sampling,
            sample_index=rng.randrange(100),
        )

    rows = [row(rng.randrange(1, 40), 1, is_decode=True) for _ in range(num_rows)]
    rows += [row(rng.choice([0, 16, 32]), length, is_decode=False) for length in lengths]
    return ScheduledBatch.of(0, tuple(rows))
