"""Bugs that other engines have shipped, by public issue, and what is right for our rules.

The numbers b01.. are those of our catalogue of public cases. Its cases about connectors, tiers,
context parallelism and kernels have no test here: B13, B36, B47-B51, B53-B57, B59, B60.
"""

import pytest
from torch_kda.cache.policy import Kind, replay_boundary
from torch_kda.cache.prefix_cache import PrefixCache
from torch_kda.cache.state_pool import SlotStatus
from torch_kda.scheduler.batch import ScheduledRow
from torch_kda.scheduler.request import Request, SamplingParams
from torch_kda.scheduler.scheduler import Scheduler
from torch_kda.tests.scheduler.ghost import Bench, generate, make_bench


def prompt_of(num_tokens: int, seed: int = 0) -> list[int]:
    return [(i * 7919 + seed) % 1000 for i in range(num_tokens)]


def request(name: str, prompt: list[int], max_tokens: int = 1, **options) -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), **options)


def run_alone(bench: Bench, name: str, prompt: list[int], max_tokens: int = 1, **options):
    """Runs one request to its end and returns its rows."""
    bench.submit(request(name, prompt, max_tokens, **options))
    rows = [row for batch in bench.run() for row in batch.rows if row.request_id == name]
    if not options.get("cache_salt"):
        assert bench.outputs[name] == generate(prompt, max_tokens)
    return rows


def states_of(bench: Bench, prompt: list[int]) -> list[int]:
    """Positions at which a state of this prompt is visible."""
    cache = bench.scheduler.cache
    request_id = f"probe{len(bench.ghost.truths)}"
    bench.ghost.learn(request(request_id, prompt))
    bench.ghost.learn_keys()
    keys = bench.ghost.truths.pop(request_id).keys
    return [i * cache.unit for i, key in enumerate(keys, 1) if cache.has_state(key)]


def start_of(bench: Bench, name: str, prompt: list[int], **options) -> int:
    return run_alone(bench, name, prompt, **options)[0].start


def big_bench(**options) -> Bench:
    defaults = dict(unit=128, num_blocks=256, budget=8192, alignment=16)
    return make_bench(**{**defaults, **options})


# 4.1 visibility, races, lifetime


@pytest.mark.parametrize("ending", ["commit", "fail"])
def test_b01_abort_before_commit(ending):
    """vllm#56525: an aborted prefill is visible when its step has retired, if that went well."""
    bench = big_bench(unit=1536, num_blocks=32)
    bench.submit(request("r1", prompt_of(8000)))
    row = bench.schedule().rows[0]
    assert [position for position, _ in row.exports] == [7680]
    bench.scheduler.abort("r1")
    bench.submit(request("r2", prompt_of(8001)))
    # it waits for the writer instead of reading what is not there
    assert bench.schedule().rows == ()
    assert states_of(bench, prompt_of(8001)) == []
    getattr(bench, ending)()
    rows = bench.schedule().rows
    assert rows[0].start == (7680 if ending == "commit" else 0)
    bench.run()


@pytest.mark.parametrize("has_priority", [True, False], ids=["priority", "fcfs"])
def test_b02_preempted_in_the_same_pass(has_priority):
    """vllm#57580: no request is preempted in the pass that gave it tokens."""
    bench = big_bench(unit=16, num_blocks=14, budget=32, max_num_seqs=1 if has_priority else 2)
    low = prompt_of(49)
    bench.submit(request("low", low, priority=1))
    bench.step()
    assert bench.scheduler.queues.lives["low"].num_computed == 32
    high = request("high", prompt_of(16, seed=1), priority=0 if has_priority else 2)
    bench.submit(high)
    batch = bench.schedule()
    if has_priority:
        assert [row.request_id for row in batch.rows] == ["high"]
    else:
        assert batch.rows[0].request_id == "low"
    bench.commit()
    states = states_of(bench, low)
    assert states == ([32] if has_priority else [48])
    bench.run()
    assert bench.outputs["low"] == generate(low, 1)


def test_b03_every_export_is_aligned():
    """vllm#53212: chunks start on the alignment, so the kernel skips no planned export."""
    bench = big_bench(unit=16, budget=64)
    run_alone(bench, "r1", prompt_of(17))
    (row,) = run_alone(bench, "r2", prompt_of(50))
    assert (row.start, row.end) == (16, 50)
    assert [position - row.start for position, _ in row.exports] == [32]
    assert states_of(bench, prompt_of(50)) == [16, 48]


def test_b04_unit_that_the_kernel_cannot_write():
    """vllm#53614: a grid whose positions the kernel can't write is refused."""
    with pytest.raises(ValueError, match="multiple of alignment=16, got 8"):
        big_bench(unit=8)
    bench = big_bench(unit=16, lookahead=1)
    (row,) = run_alone(bench, "r", prompt_of(100))
    assert [position for position, _ in row.exports] == [80]


def test_b05_state_at_64_never_at_96():
    """vllm#53614, draft layers and K = 3: the slot holds 64 tokens, and only @64 finds it."""
    bench = big_bench(unit=32, lookahead=1, num_speculative_tokens=3)
    (row,) = run_alone(bench, "r", prompt_of(104))
    ((position, slot),) = row.exports
    assert position == 64 == bench.scheduler.cache.state_pool.position[slot]
    assert states_of(bench, prompt_of(104)) == [64]
    again = run_alone(bench, "again", prompt_of(104))[0]
    assert (again.start, again.src_slot) == (64, slot)
    assert start_of(bench, "shorter", prompt_of(96)) == 64
    # token 64 belongs to the draft KV below it, so it has to agree too
    assert start_of(bench, "agrees", [*prompt_of(65), *prompt_of(40, seed=3)]) == 64
    assert start_of(bench, "differs", [*prompt_of(64), *prompt_of(40, seed=3)]) == 0


def test_b06_partial_boundary():
    """vllm#53614: the state is keyed where it is, not at the end of a block."""
    bench = big_bench(unit=16)
    run_alone(bench, "r", prompt_of(120))
    assert states_of(bench, prompt_of(120)) == [112]
    assert start_of(bench, "again", prompt_of(120)) == 112


def test_b07_transient_states_mid_prompt():
    """vllm#56794: chunks leave no states of their own; a junction gets its own slot."""
    prompt = prompt_of(240)
    sparse = big_bench(unit=16, budget=128)
    assert [row.end for row in run_alone(sparse, "r", prompt)] == [128, 240]
    assert states_of(sparse, prompt) == [224, 240]
    dense = big_bench(unit=16, budget=128, export_every=16, num_slots=32)
    run_alone(dense, "r", prompt)
    assert states_of(dense, prompt) == list(range(16, 241, 16))
    # another prompt shares 96 tokens: their KV is there, a state is not, and now it is made
    sibling = [*prompt[:96], *prompt_of(100, seed=5)]
    row = run_alone(sparse, "sibling", sibling)[0]
    assert (row.start, row.kv_start) == (0, 96)
    assert states_of(sparse, sibling) == [96, 192]
    assert start_of(sparse, "third", [*prompt[:96], *prompt_of(50, seed=6)]) == 96


def test_b08_table_long_enough_already():
    """vllm#55747: an export gets its slot also when the row needs no new block."""
    bench = big_bench(unit=64, budget=20 + 4 * 9, num_speculative_tokens=8)
    first, second, *_ = run_alone(bench, "r", prompt_of(64))
    assert (first.end, second.end) == (48, 64)
    assert list(first.block_table) == list(second.block_table)
    assert [position for position, _ in second.exports] == [64]
    assert states_of(bench, prompt_of(64)) == [64]


def test_b09_same_prompt_in_the_same_step():
    """Who goes on and who hits what it left are in one step, in different slots."""
    bench = make_bench(unit=2, block_size=2)
    bench.submit(request("owner", prompt_of(6), max_tokens=4))
    bench.submit(request("second", prompt_of(6), max_tokens=4))
    bench.submit(request("longer", prompt_of(7), max_tokens=4))
    assert [row.request_id for row in bench.step().rows] == ["owner"]
    # the owner goes on in a place of its own while others read what it has left
    rows = {row.request_id: row for row in bench.step().rows}
    assert (rows["second"].start, rows["longer"].start) == (4, 6)
    assert rows["longer"].src_slot not in rows["owner"].dst_slots
    bench.run()
    for name, length in (("owner", 6), ("second", 6), ("longer", 7)):
        assert bench.outputs[name] == generate(prompt_of(length), 4)


@pytest.mark.parametrize("ending", ["commit", "fail"])
def test_b10_dies_with_its_pins(ending):
    """A reader that is aborted in flight leaves no pin."""
    bench = make_bench()
    run_alone(bench, "r", prompt_of(20))
    bench.submit(request("reader", prompt_of(24)))
    row = bench.schedule().rows[0]
    states = bench.scheduler.cache.state_pool
    assert states.pins[row.src_slot] == 1
    bench.scheduler.abort("reader")
    assert states.pins[row.src_slot] == 1
    getattr(bench, ending)()
    assert sum(states.pins) == 0 and not bench.scheduler.has_work


def test_b11_hit_is_pinned_before_anything_is_allocated():
    """vllm#33775: blocks for the tail never come out of the request's own hit."""
    bench = make_bench(num_blocks=8, num_slots=4)
    run_alone(bench, "old", prompt_of(8, seed=9))
    run_alone(bench, "mine", prompt_of(17))
    # 4 units of mine, 2 older ones and 2 free blocks; the tail needs 4, so the older ones go
    (row,) = run_alone(bench, "longer", prompt_of(32))
    assert row.start == 16 and len(set(row.block_table.tolist())) == 8
    assert states_of(bench, prompt_of(8, seed=9)) == []


def test_b12_resume_after_reset():
    """vllm#35157: nothing of the place before a reset is remembered."""
    bench = make_bench()
    bench.submit(request("r", prompt_of(20), max_tokens=8))
    bench.step()
    bench.scheduler.preempt("r")
    bench.scheduler.cache.clear()
    row = bench.schedule().rows[0]
    assert (row.start, row.src_slot, row.kv_start) == (0, -1, 0)
    bench.run()
    assert bench.outputs["r"] == generate(prompt_of(20), 8)


def test_b14_states_of_a_long_prefill_do_not_pile_up():
    """vllm#55450: 480K tokens, K = 5, two chunks in flight take 6 slots and an export."""
    cache = PrefixCache(num_blocks=150, block_size=3584, num_slots=64, unit=3584)
    scheduler = Scheduler(
        cache,
        max_num_seqs=1,
        max_num_batched_tokens=8192,
        max_model_len=500_000,
        num_speculative_tokens=5,
    )
    scheduler.enqueue(request("r", [1] * 480_000))
    first, steps = scheduler.schedule(), 0
    while scheduler.has_work:
        second = scheduler.schedule()
        scheduler.commit(first, [[7] if row.samples else [] for row in first.rows])
        first, steps = second, steps + 1
    assert steps == -(-480_000 // 8192)
    assert scheduler.counters.slots_peak <= 7


def test_b15_failed_admission_gives_back_what_it_matched():
    """sglang#16067: a match that leads to nothing leaves no pin."""
    bench = make_bench(num_blocks=12, num_slots=8)
    run_alone(bench, "base", prompt_of(17))
    bench.submit(request("running", prompt_of(22, seed=2), max_tokens=8))
    bench.step()
    bench.submit(request("waiting", prompt_of(30)))
    assert [row.request_id for row in bench.schedule().rows] == ["running"]
    states = bench.scheduler.cache.state_pool
    assert sum(states.pins) == 0
    bench.commit()
    bench.run()
    assert bench.requests["waiting"].num_cached_tokens == 16


# 4.2 splitting and progress


@pytest.mark.parametrize(
    ("unit", "budget", "num_tokens"),
    [(1600, 2048, 11_844), (1600, 512, 5_000), (11_392, 8192, 30_000), (2048, 1872, 3_026)],
)
def test_b17_b19_every_step_makes_progress(unit, budget, num_tokens):
    """vllm#40707, #45414: units that no step can hold; a prefill takes what it is offered."""
    bench = big_bench(unit=unit, num_blocks=20, budget=budget, checks=False)
    rows = run_alone(bench, "r", prompt_of(num_tokens))
    assert all(row.end > row.start for row in rows)
    assert len(rows) == -(-num_tokens // (budget // 16 * 16))


def test_b17_other_rows_never_starve_a_prefill():
    """Rows that decode leave tokens for a prefill in every step."""
    bench = make_bench(budget=5 + 4, max_num_seqs=4, alignment=4, num_blocks=200)
    for i in range(3):
        bench.submit(request(f"d{i}", prompt_of(4, seed=i), max_tokens=60))
    for _ in range(8):
        bench.step()
    bench.submit(request("prefill", prompt_of(40, seed=8)))
    starts = []
    while "prefill" not in bench.reasons:
        rows = [row for row in bench.step().rows if row.request_id == "prefill"]
        starts += [row.start for row in rows]
    assert starts == list(range(0, 40, 4))
    bench.run()


@pytest.mark.parametrize(
    ("unit", "first", "second", "hit"),
    [
        (1536, 3072, 3073, 3072),
        (1536, 3071, 3072, 1536),
        (1536, 3073, 3073, 3072),
        (16, 32, 32, 16),
        (16, 48, 48, 32),
        (16, 48, 49, 48),
    ],
)
def test_b21_exact_boundary(unit, first, second, hit):
    """vllm#50235: the state at an exact end is kept, and the one below it."""
    bench = big_bench(unit=unit)
    run_alone(bench, "first", prompt_of(first))
    assert start_of(bench, "second", prompt_of(second)) == hit


def test_b23_kv_block_size_changes_nothing():
    """vllm#54076: the grid is that of the states, whatever blocks attention has."""
    rows = {}
    for block_size in (16, 112, 784, 1568):
        bench = big_bench(unit=1568, block_size=block_size, num_blocks=8 * 1568 // block_size)
        run_alone(bench, "first", prompt_of(4000))
        (row,) = run_alone(bench, "second", prompt_of(5000))
        rows[block_size] = (row.start, row.end, [position for position, _ in row.exports])
    assert set(map(str, rows.values())) == {str((3136, 5000, [4704]))}


def test_b26_refused_or_finished():
    """vllm#52520: what can never fit is refused when it comes; what is taken in ends."""
    bench = make_bench(num_blocks=8, num_slots=2, max_num_seqs=2)
    with pytest.raises(
        ValueError, match="take 9 KV blocks of 4, and there are 8; lower max_tokens"
    ):
        bench.scheduler.enqueue(request("never", prompt_of(30), max_tokens=4))
    for i in range(3):
        bench.submit(request(f"r{i}", prompt_of(30 - i, seed=i), max_tokens=3 + i))
    bench.run()
    for i in range(3):
        assert bench.outputs[f"r{i}"] == generate(prompt_of(30 - i, seed=i), 3 + i)


# 4.3 lookup, draft layers, agreement of KV and states


def test_b27_saved_tail_is_found():
    """vllm#57179."""
    assert replay_boundary(16_000, 16, 16) == 15_984
    bench = big_bench(unit=16, num_blocks=1100, budget=16_384, lookahead=1)
    run_alone(bench, "first", prompt_of(16_000))
    assert start_of(bench, "again", prompt_of(16_000)) == 15_984


def test_b29_a_hit_is_never_deeper_than_its_kv():
    """vllm#45614: 3 units of KV and a state at 4: the state goes with its KV, at once."""
    bench = big_bench(unit=16, export_every=16)
    prompt = prompt_of(65)
    run_alone(bench, "r", prompt)
    cache = bench.scheduler.cache
    assert states_of(bench, prompt) == [16, 32, 48, 64]
    assert cache.evict_kv()
    assert states_of(bench, prompt) == [16, 32, 48]
    assert cache.counters.states_lost_with_kv == 1
    assert start_of(bench, "again", prompt) == 48


@pytest.mark.parametrize("n", [3784, 7542, 11_292, 15_019, 18_770, 8901])
def test_b30_draft_layers_cost_one_unit(n):
    """vllm#54360: one unit, not a block, and never everything."""
    bench = big_bench(lookahead=1, budget=20_000, checks=False)
    run_alone(bench, "first", prompt_of(n))
    assert start_of(bench, "again", prompt_of(n)) == n // 128 * 128 - 128


def test_b31_kv_deeper_than_the_state():
    """vllm#46453: KV of 6 units, a state at 4: it resumes at 4 and writes no KV twice."""
    bench = make_bench(export_every=4)
    prompt = prompt_of(25)
    run_alone(bench, "r", prompt)
    cache = bench.scheduler.cache
    for depth in (5, 6):
        bench.ghost.learn_keys()
        node = cache.find(bench.ghost.truths["r"].keys[depth - 1])
        assert node is not None
        cache._drop_state(node)
    free = cache.block_pool.num_free
    (row,) = run_alone(bench, "again", [*prompt[:24], 5, 6])
    assert (row.start, row.kv_start) == (16, 24)
    assert cache.block_pool.num_free == free  # the shared prefix is stored once
    assert cache.counters.lost_tokens == 8


def test_b32_source_is_the_slot_of_that_position():
    """vllm#55600: a source is found by key, not by a column."""
    bench = big_bench(unit=1152, block_size=16, num_blocks=1000, budget=16_384)
    run_alone(bench, "first", prompt_of(11_521))
    (row,) = run_alone(bench, "second", prompt_of(12_000))
    states = bench.scheduler.cache.state_pool
    assert row.start == 11_520 == states.position[row.src_slot]
    assert states.status[row.src_slot] is SlotStatus.READY


@pytest.mark.parametrize("n", [63, 64, 65, 127, 128, 129])
def test_b34_b35_identical_prompts_around_a_page(n):
    """sglang#22935, #28692."""
    bench = big_bench(unit=64)
    run_alone(bench, "long", prompt_of(200))
    assert run_alone(bench, "first", prompt_of(n))[0].kv_start == n // 64 * 64
    assert start_of(bench, "again", prompt_of(n)) == (n - 1) // 64 * 64


def test_b38_sibling_keeps_the_junction():
    """vllm#53945: with draft layers too, the third with a shared prefix resumes near its end."""
    bench = big_bench(unit=16, lookahead=1)
    shared = prompt_of(100)
    for i in range(3):
        prompt = [*shared, *prompt_of(60, seed=20 + i)]
        rows = run_alone(bench, f"r{i}", prompt)
    assert rows[0].start == 96 and states_of(bench, prompt)[0] == 96


def test_b39_every_turn_finds_the_last():
    """vllm#43587."""
    bench = big_bench(unit=16)
    tokens: list[int] = []
    for turn in range(6):
        tokens = [*tokens, *prompt_of(50, seed=turn)]
        (row, *_) = run_alone(bench, f"turn{turn}", tokens, max_tokens=40)
        previous = len(tokens) - 50
        assert row.start == max(previous - 1, 0) // 16 * 16  # also what was generated: B52
        tokens += bench.outputs[f"turn{turn}"]


# 4.4, 4.5


def test_b40_no_capability_no_export():
    """sglang#30862: without the capability nothing is exported, and so nothing keyed."""
    bench = big_bench(unit=16, num_prefill_checkpoint_blocks=0)
    rows = run_alone(bench, "r", prompt_of(100), max_tokens=2)
    assert all(row.exports == () for row in rows)
    # a state is only had where a forward ended
    assert [row.end for row in rows][:2] == [96, 100]
    assert states_of(bench, prompt_of(100)) == [96]


def test_b42_b46_soak_of_a_long_session():
    """sglang#29973, vllm#56960 at one eighth: long prompt, drafts, many turns."""
    bench = make_bench(
        unit=64,
        num_blocks=400,
        num_slots=24,
        budget=2048,
        alignment=16,
        vocab=3,
        num_speculative_tokens=4,
        checks=False,
    )
    bench.propose = lambda name, tokens: [sum(tokens) % 3] * 4
    tokens = [i % 3 for i in range(9_836)]
    for turn in range(8):
        prompt = [*tokens, turn % 3]
        name = f"turn{turn}"
        bench.submit(request(name, prompt, max_tokens=70))
        bench.run()
        assert bench.outputs[name] == generate(prompt, 70, vocab=3)
        tokens = [*prompt, *bench.outputs[name]]
        bench.ghost.check_visible()
        # also where a row with drafts jumped over the grid
        cached = bench.requests[name].num_cached_tokens
        assert cached == ((len(prompt) - 2) // 64 * 64 if turn else 0)


def test_b43_chunk_end_is_not_the_block_end():
    """vllm#34587: a chunk of 1866 tokens leaves nothing that is keyed @2048."""
    bench = big_bench(unit=2048, budget=1866)
    rows = run_alone(bench, "r", prompt_of(3026))
    assert [row.end for row in rows] == [1856, 3026]
    assert [position for position, _ in rows[1].exports] == [2048]
    assert start_of(bench, "again", prompt_of(3026)) == 2048


def test_b52_states_of_the_answer():
    """vllm#56972: what was generated can be resumed too."""
    bench = make_bench()
    prompt = prompt_of(10)
    run_alone(bench, "r", prompt, max_tokens=20)
    tokens = [*prompt, *bench.outputs["r"]]
    # the two newest on the grid, beside the prompt's own; the last token was never computed
    assert states_of(bench, tokens) == [8, 24, 28]
    assert start_of(bench, "next", [*tokens, 1, 2]) == 28


@pytest.mark.parametrize(
    "options",
    [{"cache_salt": "a"}, {"lora": ("name", "path")}, {"lora": ("name", "other path")}],
    ids=["salt", "lora", "lora path"],
)
def test_b58_isolation(options):
    bench = make_bench()
    for extras in ({}, {"lora": ("name", "")}, options):
        bench.submit(request(f"r{len(bench.requests)}", prompt_of(20), **extras))
        bench.run()
        assert bench.requests[f"r{len(bench.requests) - 1}"].num_cached_tokens == 0
    bench.submit(request("same", prompt_of(20), **options))
    bench.run()
    assert bench.requests["same"].num_cached_tokens == 16


# whatever vLLM's alias guard says, the boundary is exported by the forward that passes it

VALIDITY = [
    (0, 8000, 1536, False, 7680),
    (0, 8000, 128, False, 7936),
    (7680, 8000, 128, False, 7936),
    (6272, 8000, 128, False, 7936),
    (6144, 8000, 128, False, 7936),
    (119_936, 122_000, 128, False, 121_984),
    (0, 1000, 128, False, 896),
    (16, 100, 16, False, 96),
    (0, 50, 16, False, 48),
    (0, 8000, 128, True, 7808),
    (0, 100, 16, True, 80),
]


@pytest.mark.parametrize("case", VALIDITY, ids=[f"s{c[0]}-e{c[1]}-H{c[2]}" for c in VALIDITY])
def test_exports_need_no_alias_guard(case):
    start, end, unit, draft, position = case
    bench = big_bench(
        unit=unit, num_blocks=1000, budget=131_072, lookahead=int(draft), checks=False
    )
    if start:
        run_alone(bench, "before", prompt_of(start + 1))
    (row,) = run_alone(bench, "r", prompt_of(end))
    assert (row.start, row.end) == (start, end)
    assert [p for p, _ in row.exports] == [position]


def test_reservation_is_never_visible_early():
    """I02 step by step: RESERVED while in flight, READY after the commit."""
    bench = make_bench()
    bench.submit(request("r", prompt_of(9)))
    row: ScheduledRow = bench.schedule().rows[0]
    ((position, slot),) = row.exports
    states = bench.scheduler.cache.state_pool
    assert (position, states.status[slot], states.position[slot]) == (8, SlotStatus.RESERVED, 8)
    assert states_of(bench, prompt_of(9)) == []
    bench.commit()
    assert states.status[slot] is SlotStatus.READY
    assert states_of(bench, prompt_of(9)) == [8]
    assert bench.scheduler.cache.counters.published_states == {Kind.REPLAY.name: 1}
