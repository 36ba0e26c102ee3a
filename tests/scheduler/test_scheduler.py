"""The scheduler, one rule a test."""

import copy

import pytest
from torch_kda.cache.state_pool import SlotStatus
from torch_kda.scheduler.request import Request, RequestStatus, SamplingParams
from torch_kda.tests.scheduler.ghost import Bench, generate, make_bench


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return [(i * 7919 + seed) % 1000 for i in range(num_tokens)]


def submit(bench: Bench, name: str, prompt: list[int], max_tokens: int = 1, **options) -> Request:
    return bench.submit(Request(name, prompt, SamplingParams(max_tokens=max_tokens), **options))


def names(batch) -> list[str]:
    return [row.request_id for row in batch.rows]


def exported(batch) -> list[int]:
    return [position for row in batch.rows for position, _ in row.exports]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("exports", [16, 0], ids=["single", "two-pass"])
def test_outputs_with_cache(depth, exports):
    """Requests that share prefixes give what they give alone, with steps in flight or not (I24)."""
    bench = make_bench(num_prefill_checkpoint_blocks=exports)
    prompts = {f"r{i}": list(range(22 + i)) for i in range(6)}
    for name, prompt in prompts.items():
        submit(bench, name, prompt, 10)
    bench.run(depth)
    for name, prompt in prompts.items():
        assert bench.outputs[name] == generate(prompt, 10)
        assert bench.reasons[name] == "length"
    assert bench.requests["r0"].num_cached_tokens == 0
    assert bench.requests["r5"].num_cached_tokens == 24


# exports


def test_exports_by_priority_in_a_row():
    """Over the row's cap the least valuable go: replay, end, junction, named, periodic."""
    for most, expected in [(1, [20]), (2, [20, 24]), (3, [12, 20, 24]), (5, [4, 8, 12, 20, 24])]:
        bench = make_bench(num_prefill_checkpoint_blocks=most, export_every=4)
        submit(bench, "r", prompt_of(24), checkpoint_positions=(13,))
        assert exported(bench.step()) == sorted(expected if most < 5 else [12, 20, 24, 16, 8])
        bench.run()
        assert bench.scheduler.counters.exports_dropped == 6 - most


def test_exports_by_priority_in_a_step():
    """The step's cap is shared by value, not by who comes first."""
    bench = make_bench(max_exports_per_step=2, export_every=4)
    submit(bench, "a", prompt_of(11))
    submit(bench, "b", prompt_of(11, seed=1))
    batch = bench.step()
    assert [row.exports[0][0] for row in batch.rows] == [8, 8]
    assert [len(row.exports) for row in batch.rows] == [1, 1]
    bench.run()


def test_exports_never_wait():
    """Without a slot a forward runs all the same, and keeps nothing (I21)."""
    bench = make_bench(num_slots=2, max_num_seqs=2)
    submit(bench, "a", prompt_of(11), 8)
    submit(bench, "b", prompt_of(11, seed=1), 8)
    batch = bench.step()
    assert names(batch) == ["a", "b"] and exported(batch) == []
    bench.run()
    assert bench.scheduler.counters.exports_dropped >= 2
    assert bench.outputs["b"] == generate(prompt_of(11, seed=1), 8)


def test_exports_take_the_place_of_older_entries():
    bench = make_bench(num_slots=3, max_num_seqs=1, num_decode_states=0)
    for seed in range(3):
        submit(bench, f"r{seed}", prompt_of(11, seed=seed))
        bench.run()
    assert bench.scheduler.cache.counters.evictions_for_states == 1
    submit(bench, "again", prompt_of(11, seed=2))
    bench.run()
    assert bench.requests["again"].num_cached_tokens == 8
    assert bench.scheduler.counters.exports_dropped == 0


def test_path_cap_drops_what_an_earlier_chunk_kept():
    """A path never holds more than its cap, and ends with the most valuable (I25)."""
    bench = make_bench(budget=5, max_num_seqs=1, export_every=4, max_states_per_path=2)
    submit(bench, "turn1", prompt_of(13))
    bench.run()
    submit(bench, "turn2", prompt_of(21))
    bench.run()
    cache = bench.scheduler.cache
    bench.ghost.learn_keys()
    keys = bench.ghost.truths["turn2"].keys
    assert [4 * i for i, key in enumerate(keys, 1) if cache.has_state(key)] == [12, 20]


def test_prefill_tail_of_one_token_is_a_prefill():
    bench = make_bench(num_speculative_tokens=3, budget=4 * 4 + 1, block_size=4)
    submit(bench, "r", prompt_of(17), 2)
    bench.run()
    submit(bench, "again", prompt_of(17), 2)
    row = bench.schedule().rows[0]
    assert (row.start, row.end, row.is_decode) == (16, 17, False)
    bench.commit()
    bench.run()


def test_decode_states_by_slot_choice():
    """At the grid a decode row reads one slot and writes another; the newest two are kept."""
    bench = make_bench(num_slots=16)
    submit(bench, "r", prompt_of(6), 20)
    batches = bench.run()
    rows = [row for batch in batches for row in batch.rows if row.is_decode]
    forks = [row.start for row in rows if row.src_slot != row.dst_slots[0]]
    assert forks == [8, 12, 16, 20, 24]
    bench.ghost.learn_keys()
    keys = bench.ghost.truths["r"].keys
    kept = [4 * i for i, k in enumerate(keys, 1) if bench.scheduler.cache.has_state(k)]
    assert kept == [4, 20, 24]


# visibility and order of steps


def test_end_of_sequence_found_while_the_next_step_runs():
    """The row that ran past the end is discarded: no output, no entry of it."""
    prompt = prompt_of(7)
    stop = generate(prompt, 3)[-1]
    bench = make_bench()
    request = Request("r", prompt, SamplingParams(max_tokens=50, stop_token_ids=(stop,)))
    bench.submit(request)
    live = bench.scheduler.queues.lives["r"]
    bench.run(depth=2)
    assert bench.outputs["r"] == generate(prompt, 3) and bench.reasons["r"] == "stop"
    assert len(bench.batches) == 4  # the last one ran on
    assert live.num_computed == 9
    assert request.token_ids.tolist() == [*prompt, *generate(prompt, 3)]


def test_stop_ids_and_eos():
    prompt = prompt_of(5)
    answer = generate(prompt, 4)
    for options, sampling in (
        ({"eos_token_ids": (answer[1],)}, {}),
        ({}, {"stop_token_ids": (answer[1],)}),
    ):
        bench = make_bench()
        bench.submit(Request("r", prompt, SamplingParams(max_tokens=4, **sampling), **options))
        bench.run()
        assert bench.outputs["r"] == answer[:2]
    bench = make_bench()
    ignoring = SamplingParams(max_tokens=4, ignore_eos=True)
    bench.submit(Request("r", prompt, ignoring, eos_token_ids=(answer[1],)))
    bench.run()
    assert bench.outputs["r"] == answer


def test_failed_step():
    """The first of two steps fails: its request ends, that of the second starts again."""
    bench = make_bench(num_slots=8)
    submit(bench, "first", prompt_of(30), 4)
    bench.schedule()
    submit(bench, "second", prompt_of(30, seed=1), 4)
    assert set(names(bench.schedule())) == {"first", "second"}
    (output,) = bench.fail("out of memory")
    assert (output.request_id, output.finish_reason) == ("first", "error")
    assert output.error == "out of memory" and output.token_ids == ()
    cache = bench.scheduler.cache
    assert cache.num_cached_states == 0 and not list(cache.nodes())
    assert bench.requests["second"].status is RequestStatus.PREEMPTED
    assert not bench.commit()
    assert cache.num_cached_states == 0 and not list(cache.nodes())
    bench.run()
    assert bench.outputs["second"] == generate(prompt_of(30, seed=1), 4)
    assert bench.scheduler.counters.failed_steps == 1


@pytest.mark.parametrize("how", ["abort", "preempt"])
@pytest.mark.parametrize("depth", [1, 2])
def test_interrupted_prefill_resumes_where_it_was(how, depth):
    bench = make_bench(budget=17, max_num_seqs=1)
    submit(bench, "r", prompt_of(60))
    for _ in range(depth):
        bench.schedule()
    getattr(bench.scheduler, how)("r")
    while bench.in_flight:
        bench.commit()
    if how == "abort":
        assert not bench.scheduler.has_work
        submit(bench, "retry", prompt_of(60))
    row = bench.schedule().rows[0]
    assert row.start == 16 * depth
    bench.run()
    assert bench.outputs[row.request_id] == generate(prompt_of(60), 1)


def test_end_of_request_leaves_its_state():
    """On the grid the running slot becomes an entry; off the grid it is free again."""
    for tokens, is_kept in ((4, True), (3, False)):
        bench = make_bench(num_decode_states=0)
        submit(bench, "r", prompt_of(5), tokens)
        bench.run()
        cache = bench.scheduler.cache
        bench.ghost.learn_keys()
        assert cache.has_state(bench.ghost.truths["r"].keys[-1]) is is_kept
        assert cache.num_cached_states == 1 + is_kept


def test_commit_checks_its_arguments():
    """Nothing changes when a call is refused."""
    bench = make_bench()
    submit(bench, "r", prompt_of(5), 3)
    first = bench.schedule()
    second = bench.schedule()
    scheduler = bench.scheduler
    with pytest.raises(ValueError, match="2 steps are in flight"):
        scheduler.schedule()
    with pytest.raises(ValueError, match="must be the oldest in flight"):
        scheduler.commit(second, [[1]])
    with pytest.raises(ValueError, match="must be the oldest in flight"):
        scheduler.fail(second, "no")
    with pytest.raises(ValueError, match="one entry for each of 1 rows, got 0"):
        scheduler.commit(first, [])
    for tokens in ([], [1, 2]):
        with pytest.raises(ValueError, match="'r' must give 1 to 1 tokens"):
            scheduler.commit(first, [tokens])
    bench.check()
    bench.commit()
    with pytest.raises(ValueError, match="must be the oldest in flight"):
        scheduler.commit(first, [[1]])
    bench.run()
    assert not scheduler.commit(scheduler.schedule(), [])
    with pytest.raises(ValueError, match=r"oldest in flight \(none\)"):
        scheduler.commit(second, [[1]])


# order, room, progress


def test_preemption_by_priority():
    """Only a later request is preempted, the last one first, and it goes on where it stopped."""
    bench = make_bench(num_blocks=8, num_slots=12, max_num_seqs=3)
    submit(bench, "low", prompt_of(9, seed=1), 6, priority=2)
    submit(bench, "middle", prompt_of(9, seed=2), 6, priority=1)
    bench.step()
    submit(bench, "high", prompt_of(13, seed=3), 6, priority=0)
    assert names(bench.step()) == ["middle", "high"]
    assert bench.requests["low"].num_preemptions == 1
    bench.run()
    for seed, (name, length) in enumerate((("low", 9), ("middle", 9), ("high", 13)), 1):
        assert bench.outputs[name] == generate(prompt_of(length, seed=seed), 6)
    assert bench.requests["high"].num_preemptions == 0


def test_no_one_earlier_is_preempted():
    bench = make_bench(num_blocks=6, num_slots=12, max_num_seqs=2)
    submit(bench, "first", prompt_of(16), 8)
    bench.step()
    submit(bench, "later", prompt_of(16, seed=1), 8)
    bench.run()
    assert bench.requests["first"].num_preemptions == 0
    assert bench.outputs["later"] == generate(prompt_of(16, seed=1), 8)


def test_equal_prompts_in_one_step():
    """One computes, the others wait one step for what it keeps, once."""
    bench = make_bench()
    for i in range(3):
        submit(bench, f"r{i}", prompt_of(14))
    assert names(bench.schedule()) == ["r0"]
    assert names(bench.schedule()) == []  # it waits as long as the writer is in flight
    bench.commit()
    batch = bench.step()
    assert [(row.request_id, row.start) for row in batch.rows] == [("r1", 12), ("r2", 12)]
    bench.run()
    assert bench.scheduler.counters.deferrals == 2


def test_writer_is_waited_for_once():
    """When the writer fails, who waited for it computes by itself."""
    bench = make_bench()
    submit(bench, "writer", prompt_of(14))
    submit(bench, "other", prompt_of(14))
    assert names(bench.schedule()) == ["writer"]
    bench.fail()
    batch = bench.schedule()
    assert [(row.request_id, row.start) for row in batch.rows] == [("other", 0)]
    bench.commit()
    bench.run()


def test_nobody_waits_for_a_state_that_got_no_slot():
    """b could go on from 8, but a's share of the step's exports ends with its replay boundary."""
    bench = make_bench(max_exports_per_step=1, export_every=4, budget=40)
    submit(bench, "a", prompt_of(13))
    submit(bench, "b", [*prompt_of(8), *prompt_of(5, seed=7)])
    batch = bench.schedule()
    assert [(row.request_id, row.start, row.end) for row in batch.rows] == [
        ("a", 0, 13),
        ("b", 0, 13),
    ]
    assert exported(batch) == [12]
    assert bench.scheduler.counters.deferrals == 0
    bench.commit()
    bench.run()


def test_waits_for_the_next_best_state_that_got_a_slot():
    """Of a's states at 4 and 8 only the named one is kept: b waits for that, once."""
    bench = make_bench(max_exports_per_step=2, export_every=4, budget=40)
    submit(bench, "a", prompt_of(13), checkpoint_positions=(4,))
    submit(bench, "b", [*prompt_of(8), *prompt_of(5, seed=7)])
    batch = bench.step()
    assert names(batch) == ["a"] and exported(batch) == [4, 12]
    assert [(row.request_id, row.start) for row in bench.step().rows] == [("b", 4)]
    assert bench.scheduler.counters.deferrals == 1
    bench.run()


def test_second_look_preempts_nobody_who_has_a_row():
    """b is before the others, and finds all seats taken when it no longer waits for a."""
    bench = make_bench(max_exports_per_step=1, export_every=4, budget=40, max_num_seqs=2)
    submit(bench, "later", prompt_of(5, seed=3), 9, priority=1)
    bench.step()
    submit(bench, "a", prompt_of(13))
    submit(bench, "b", [*prompt_of(8), *prompt_of(5, seed=7)])
    assert names(bench.step()) == ["later", "a"]
    assert bench.requests["later"].num_preemptions == 0
    bench.run()
    assert bench.outputs["later"] == generate(prompt_of(5, seed=3), 9)


def test_kv_written_twice_is_stored_once():
    """Two requests that computed the same units side by side share the older blocks then."""
    bench = make_bench(budget=9, max_num_seqs=2, num_slots=12, export_every=0)
    tail = prompt_of(3, seed=7)
    submit(bench, "a", prompt_of(8), 12)
    submit(bench, "b", [*prompt_of(8), *tail], 12)
    bench.scheduler.queues.waiting[1].deferred_to["a"] = b"another key"  # don't wait for a
    bench.run()
    assert bench.outputs["b"] == generate([*prompt_of(8), *tail], 12)
    first, last = (
        next(row for row in rows if row.request_id == "b")
        for rows in (bench.batches[1].rows, bench.batches[-1].rows)
    )
    assert first.kv_start < 8 and first.block_table[0] != last.block_table[0]


def test_block_tables_of_rows_do_not_change():
    """Neither when their request grows, nor when it gets another's blocks for its own."""
    bench = make_bench(budget=9, max_num_seqs=2, num_slots=12, export_every=0)
    submit(bench, "a", prompt_of(8), 12)
    submit(bench, "b", [*prompt_of(8), *prompt_of(3, seed=7)], 12)
    bench.scheduler.queues.waiting[1].deferred_to["a"] = b"another key"  # don't wait for a
    shown = []
    while bench.scheduler.has_work:
        rows = bench.schedule().rows
        shown += [(row.block_table, list(row.block_table)) for row in rows]
        bench.commit()
    assert all(list(table) == before for table, before in shown)


def test_deep_order_is_kept_while_room_is_short():
    """A later request takes no room while an earlier one waits for some."""
    bench = make_bench(num_blocks=12, num_slots=12, max_num_seqs=3, budget=40)
    submit(bench, "a", prompt_of(20), 20)
    submit(bench, "b", prompt_of(20, seed=1), 4)
    for _ in range(3):
        bench.step()
    submit(bench, "big", prompt_of(30, seed=2))
    submit(bench, "small", prompt_of(3, seed=3))
    assert "small" not in names(bench.step())
    bench.run()


def test_enqueue_refuses():
    bench = make_bench(num_blocks=4, max_model_len=100)
    scheduler = bench.scheduler
    with pytest.raises(ValueError, match="'r' is empty"):
        scheduler.enqueue(Request("r", []))
    with pytest.raises(ValueError, match="has 100 tokens, and the model takes 100"):
        scheduler.enqueue(Request("r", [1] * 100))
    with pytest.raises(ValueError, match="may grow to 18 tokens, which take 5 KV blocks of 4"):
        scheduler.enqueue(Request("r", [1] * 10, SamplingParams(max_tokens=8)))
    request = submit(bench, "r", [1] * 10, 7)
    with pytest.raises(ValueError, match="'r' is in use"):
        scheduler.enqueue(Request("r", [1]))
    bench.run()
    with pytest.raises(ValueError, match="'r' has run already"):
        scheduler.enqueue(request)
    assert bench.outputs["r"] == generate([1] * 10, 7)


def test_max_model_len_ends_a_request():
    bench = make_bench(max_model_len=12)
    submit(bench, "r", prompt_of(8), 50)
    bench.run(depth=2)
    assert bench.outputs["r"] == generate(prompt_of(8), 4) and bench.reasons["r"] == "length"


def test_unknown_requests():
    bench = make_bench()
    assert not bench.scheduler.abort("nobody") and not bench.scheduler.finish("nobody")
    assert not bench.scheduler.preempt("nobody")
    submit(bench, "r", prompt_of(3))
    assert not bench.scheduler.preempt("r")  # it is not running
    assert bench.scheduler.abort("r") and not bench.scheduler.abort("r")
    assert not bench.scheduler.has_work


@pytest.mark.parametrize("moment", ["waiting", "in flight", "two in flight", "decoding"])
@pytest.mark.parametrize("how", ["abort", "finish", "preempt then abort", "fail"])
def test_every_end_leaves_nothing(moment, how):
    """Zero references, zero reserved, maps empty (I07)."""
    bench = make_bench(budget=10, max_num_seqs=2)
    submit(bench, "r", prompt_of(30), 9)
    steps = {"waiting": 0, "in flight": 1, "two in flight": 2, "decoding": 6}[moment]
    for _ in range(steps):
        if len(bench.in_flight) == 2:
            bench.commit()
        bench.schedule()
    if how == "fail":
        if bench.in_flight:
            bench.fail()
        else:
            bench.scheduler.abort("r")
    elif how == "preempt then abort":
        bench.scheduler.preempt("r")
        bench.scheduler.abort("r")
    else:
        getattr(bench.scheduler, how)("r")
    while bench.in_flight:
        bench.commit()
    scheduler, cache = bench.scheduler, bench.scheduler.cache
    assert not scheduler.has_work and not scheduler.holdings.announced
    assert not any(cache.state_pool.pins)
    assert set(cache.state_pool.status) <= {SlotStatus.FREE, SlotStatus.READY}
    cache.clear()
    assert cache.block_pool.num_free == cache.block_pool.num_blocks
    assert cache.state_pool.num_free == cache.state_pool.num_slots


# speculative decoding


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_accepted_drafts(num_right):
    """After a of K drafts the running slot holds base + 1 + a tokens (I15)."""
    bench = make_bench(num_speculative_tokens=3, num_slots=20)
    prompt = prompt_of(6)
    answer = generate(prompt, 40)

    def propose(name: str, tokens: list[int]) -> list[int]:
        done = len(tokens) - len(prompt)
        right = answer[done : done + num_right]
        return [*right, *[999_999] * (3 - num_right)]

    bench.propose = propose
    submit(bench, "r", prompt, 30)
    batches = bench.run()
    assert bench.outputs["r"] == answer[:30]
    rows = [row for batch in batches for row in batch.rows if row.is_decode]
    assert [b.start - a.start for a, b in zip(rows, rows[1:], strict=False)] == (
        [num_right + 1] * (len(rows) - 1)
    )
    assert all(len(set(row.dst_slots)) == len(row.token_ids) for row in rows)
    assert rows[-1].end <= len(prompt) + 29  # never more than could be used
    # a state on the grid is kept also when a row jumped over it
    bench.ghost.learn_keys()
    keys = bench.ghost.truths["r"].keys
    kept = [4 * i for i, k in enumerate(keys, 1) if bench.scheduler.cache.has_state(k)]
    assert kept[-1] == (len(prompt) + 29) // 4 * 4


# what others build on


def test_deepcopy_goes_its_own_way():
    """A copy of scheduler and worker goes on by itself, and the same way (I26)."""
    bench = make_bench(num_blocks=20)
    for i in range(4):
        submit(bench, f"r{i}", prompt_of(9 + i), 6)
    for _ in range(3):
        bench.schedule()
        bench.commit()
    bench.schedule()
    twin = copy.deepcopy(bench)
    before = repr(bench.scheduler.queues.running)
    twin.run(depth=2)
    assert repr(bench.scheduler.queues.running) == before
    bench.run(depth=2)
    assert twin.outputs == bench.outputs
    assert [str(b) for b in twin.batches] == [str(b) for b in bench.batches]
