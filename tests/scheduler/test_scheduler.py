import pytest
from torch_kda.scheduler.request import Request, SamplingParams
from torch_kda.tests.scheduler.ghost import generate, make_bench


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("exports", [16, 0], ids=["single", "two-pass"])
def test_schedule_and_commit(depth, exports):
    """Requests that share prefixes give what they give alone, with steps in flight or not (I24)."""
    bench = make_bench(num_prefill_checkpoint_blocks=exports)
    prompts = {f"r{i}": list(range(22 + i)) for i in range(6)}
    for name, prompt in prompts.items():
        bench.submit(Request(name, prompt, SamplingParams(max_tokens=10)))
    bench.run(depth)
    for name, prompt in prompts.items():
        assert bench.outputs[name] == generate(prompt, 10)
        assert bench.reasons[name] == "length"
    assert bench.requests["r0"].num_cached_tokens == 0
    assert bench.requests["r5"].num_cached_tokens == 24
