"""What admission asks of the cache before it pins anything."""

from torch_kda.cache.policy import Kind
from torch_kda.scheduler.admission import blocks_to_admit, find_writer, wanted_states
from torch_kda.scheduler.holdings import Announced
from torch_kda.scheduler.live import LiveRequest
from torch_kda.scheduler.request import Request, SamplingParams
from torch_kda.tests.scheduler.ghost import Bench, make_bench


def waiting(bench: Bench, name: str, prompt: list[int], **options) -> LiveRequest:
    bench.submit(Request(name, prompt, SamplingParams(max_tokens=1), **options))
    return bench.scheduler.queues.lives[name]


def test_blocks_to_admit():
    bench = make_bench(budget=12, max_num_seqs=2)
    waiting(bench, "running", list(range(22)))
    bench.step()
    live = waiting(bench, "live", [*range(8), *range(100, 110)])
    running, cache = bench.scheduler.queues.running, bench.scheduler.cache
    # 5 for 18 tokens, of which 2 are cached; the running one lacks 3 of its 6
    assert blocks_to_admit(running, live, cache) == 5 - 2 + 3
    first = waiting(bench, "first", list(range(100, 106)), priority=-1)
    assert blocks_to_admit(running, first, cache) == 2  # the running one gives way
    bench.run()


def test_find_writer():
    """The deepest key that is on its way, within reach; each writer is waited for once."""
    bench = make_bench()
    live = waiting(bench, "live", list(range(20)))
    keys = live.keys
    announced = {
        keys[1]: Announced("a", 0, 2),
        keys[2]: Announced("b", 0, 3),
        keys[4]: Announced("c", 0, 5),  # too deep: the last token has to be computed
        b"another prompt": Announced("d", 0, 4),
    }
    assert find_writer(announced, live, 0, 4) == ("b", keys[2])
    assert find_writer(announced, live, 3, 4) is None
    live.deferred_to["b"] = keys[2]
    assert find_writer(announced, live, 0, 4) == ("b", keys[2])  # still the same one
    live.deferred_to["b"] = keys[0]
    assert find_writer(announced, live, 0, 4) == ("a", keys[1])
    live.deferred_to["a"] = keys[0]
    assert find_writer(announced, live, 0, 4) is None


def test_wanted_states():
    bench = make_bench(max_states_per_path=3)
    live = waiting(bench, "live", list(range(20)), checkpoint_positions=(5,))
    cache = bench.scheduler.cache
    assert wanted_states(live, cache, 0, 12, every=8) == {
        16: Kind.REPLAY,
        20: Kind.END,
        12: Kind.JUNCTION,
    }
    assert wanted_states(live, cache, 12, 12, every=8) == {16: Kind.REPLAY, 20: Kind.END}


def test_wanted_states_with_draft_layers():
    """A hit that is one unit short of its KV is no junction."""
    bench = make_bench(lookahead=1)
    live = waiting(bench, "live", list(range(20)))
    cache = bench.scheduler.cache
    assert wanted_states(live, cache, 4, 8, every=0) == {16: Kind.REPLAY}
    assert wanted_states(live, cache, 0, 8, every=0) == {16: Kind.REPLAY, 8: Kind.JUNCTION}
