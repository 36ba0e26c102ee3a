"""Limits that are out of range are refused by name."""

import pytest
from torch_kda.cache.prefix_cache import PrefixCache
from torch_kda.scheduler.limits import Limits
from torch_kda.scheduler.scheduler import Scheduler

GOOD = dict(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=100)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be >= 1, got 0"),
        ({"max_model_len": 1}, "max_model_len must be >= 2, got 1"),
        ({"num_prefill_checkpoint_blocks": -1}, "num_prefill_checkpoint_blocks must be >= 0"),
        ({"max_steps_in_flight": 3}, "max_steps_in_flight must be 1 or 2, got 3"),
        ({"max_num_batched_tokens": 19}, r"max_num_seqs \* \(1 \+ K\) \+ alignment = 20"),
        ({"num_speculative_tokens": 12}, r"\+ alignment = 68, so that prefills always go on"),
        ({"alignment": 48}, "unit must be a multiple of alignment=48, got 16"),
        ({"export_every": 24}, "export_every must be a multiple of the cache's unit 16, got 24"),
        ({"num_speculative_tokens": 3}, "must be >= 5 state slots .*, got 4"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_limits_errors(change, message):
    cache = PrefixCache(num_blocks=4, block_size=16, num_slots=4, unit=16)
    Scheduler(cache, **GOOD)
    with pytest.raises(ValueError, match=f"Limits: .*{message}"):
        Scheduler(cache, **{**GOOD, **change})


def test_limits_derived():
    limits = Limits(**GOOD, num_speculative_tokens=2, num_prefill_checkpoint_blocks=0)
    assert limits.row_tokens == 3 and not limits.has_exports
