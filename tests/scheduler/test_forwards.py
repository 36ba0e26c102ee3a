"""How many forwards a prefill takes: our theorem, and vLLM's rules beside ours."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_kda.cache.policy import replay_boundary
from torch_kda.cache.prefix_cache import PrefixCache
from torch_kda.scheduler.batch import ScheduledRow
from torch_kda.scheduler.request import Request, SamplingParams
from torch_kda.scheduler.scheduler import Scheduler
from torch_kda.tests.scheduler.vllm_rules import Rules, growing_prefix, position, split

ONE_TOKEN = SamplingParams(max_tokens=1)


def make_scheduler(
    *, unit: int, budget: int, block_size: int = 0, tokens: int = 1 << 20, **limits: int
) -> Scheduler:
    block_size = block_size or unit
    cache = PrefixCache(
        num_blocks=tokens // block_size + 8,
        block_size=block_size,
        num_slots=64,
        unit=unit,
        lookahead=limits.pop("lookahead", 0),
    )
    limits = {"max_num_seqs": 1, "max_model_len": tokens, **limits}
    return Scheduler(cache, max_num_batched_tokens=budget, **limits)


def prefill(scheduler: Scheduler, prompt: array) -> list[ScheduledRow]:
    """Runs one request that is alone to its first token. Returns its rows."""
    scheduler.enqueue(Request(f"r{scheduler.counters.steps}", prompt, ONE_TOKEN))
    rows = []
    while scheduler.has_work:
        batch = scheduler.schedule()
        rows += batch.rows
        scheduler.commit(batch, [[7] if row.samples else [] for row in batch.rows])
    scheduler.check_integrity()
    return rows


def lengths(rows: list[ScheduledRow]) -> list[int]:
    return [row.end - row.start for row in rows]


def prompt_of(num_tokens: int) -> array:
    return array("i", [i * 7919 % 100_003 for i in range(num_tokens)])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shared=st.integers(1, 6000),
    tail=st.integers(1, 6000),
    budget=st.integers(2, 512).map(lambda x: 16 * x),
    unit=st.integers(1, 40).map(lambda x: 16 * x),
    divisor=st.sampled_from([1, 2, 4]),
    draft=st.booleans(),
)
def test_single_pass_theorem(shared, tail, budget, unit, divisor, draft):
    """Alone, forwards = ceil((n - hit) / budget), whatever the sizes (I18, I22)."""
    scheduler = make_scheduler(
        unit=unit, budget=budget, block_size=unit // divisor, lookahead=int(draft), tokens=1 << 15
    )
    prompt = prompt_of(shared + tail)
    drop = unit if draft else 0
    hit = 0
    for num_tokens in (shared, shared + tail, shared + tail):
        rows = prefill(scheduler, prompt[:num_tokens])
        assert rows[0].start == hit
        assert len(rows) == -(-(num_tokens - hit) // budget)
        assert sum(lengths(rows)) == num_tokens - hit
        # what an identical or a longer prompt finds now; the end of this one may lie on the grid
        hit = replay_boundary(num_tokens, unit, drop)
        if num_tokens == shared and not draft and num_tokens % unit == 0:
            hit = num_tokens
    # the unit that draft KV costs is all that is lost
    assert scheduler.cache.counters.lost_tokens <= 2 * drop


@pytest.mark.parametrize("n", [127, 128, 129, 255, 256, 257, 1024, 1025, 3072, 3073])
@pytest.mark.parametrize("draft", [False, True], ids=["plain", "draft"])
def test_resend_hits_the_replay_boundary(n, draft):
    """Exactly that position, for lengths around the grid (I22); an extension hits no less (I23)."""
    scheduler = make_scheduler(unit=128, budget=8192, lookahead=int(draft))
    boundary = replay_boundary(n, 128, 128 if draft else 0)
    prompt = prompt_of(n + 1)
    assert prefill(scheduler, prompt[:n])[0].start == 0
    assert prefill(scheduler, prompt[:n])[0].start == boundary
    extended = prefill(scheduler, prompt)[0].start
    # B21: the state at an exact end is kept too
    assert extended == (n if n % 128 == 0 and not draft else boundary)


# as its tests assert: P, block, unit, budget, start, draft, split, with an internal checkpoint
VLLM_SPLITS = [
    (8000, 1536, 1536, 8192, 0, False, [7680, 320], [8000]),
    (8000, 1536, 1536, 16384, 0, False, [7680, 320], [8000]),
    (8000, 1536, 1536, 4096, 0, False, [3072, 3072, 1536, 320], [3072, 3072, 1856]),
    (8000, 1536, 1536, 2048, 0, False, [1536] * 5 + [320], [1536] * 4 + [1856]),
    (8000, 1536, 1536, 1024, 0, False, [1024, 512] * 5 + [320], [1024, 512] * 5 + [320]),
    (8000, 768, 128, 8192, 0, False, [7680, 256, 64], [8000]),
    (8000, 768, 128, 4096, 0, False, [3840, 3840, 256, 64], [3840, 3840, 256, 64]),
    (8000, 768, 128, 2048, 0, False, [1536] * 5 + [256, 64], [1536] * 4 + [1856]),
    (1159, 1152, 1152, 8192, 0, False, [1152, 7], [1159]),
    (7680, 1536, 1536, 8192, 0, False, [6144, 1536], [7680]),
    (1536, 1536, 1536, 8192, 0, False, [1536], [1536]),
    (1537, 1536, 1536, 8192, 0, False, [1536, 1], [1537]),
    (8000, 1536, 1536, 8192, 0, True, [6144, 1856], [8000]),
    (8000, 1536, 128, 8192, 0, True, [6144, 1664, 192], [8000]),
    (30000, 11392, 11392, 8192, 0, False, [8192, 3200, 8192, 3200, 7216], None),
    (30000, 11392, 32, 8192, 0, False, [8192, 3200, 8192, 3200, 7200, 16], None),
    (10000, 512, 32, 8192, 0, False, [8192, 1536, 256, 16], [8192, 1808]),
    (8000, 768, 128, 8192, 128, False, [640, 6912, 256, 64], [7872]),
    (8000, 768, 128, 8192, 1664, False, [640, 5376, 256, 64], [6336]),
    (8000, 768, 128, 8192, 7552, False, [128, 256, 64], [128, 256, 64]),
    (8000, 768, 128, 8192, 7680, False, [256, 64], [256, 64]),
    (8000, 768, 128, 8192, 7936, False, [64], [64]),
    (8000, 768, 768, 8192, 1, False, None, [767, 7232]),
    (8000, 768, 768, 8192, 16, False, None, [752, 7232]),
    (8000, 768, 768, 8192, 767, False, None, [1, 7232]),
    (8000, 768, 768, 8192, 800, False, None, [736, 6464]),
    (8000, 768, 768, 8192, 768, False, None, [7232]),
]


@pytest.mark.parametrize(
    "case", VLLM_SPLITS, ids=[f"P{c[0]}-B{c[1]}-H{c[2]}-M{c[3]}-s{c[4]}" for c in VLLM_SPLITS]
)
def test_never_more_forwards_than_vllm(case):
    """vLLM's rules as restated give the chunks that its tests assert; ours never needs more."""
    num_tokens, block, unit, budget, start, draft, plain, internal = case
    rules = Rules(block, unit, budget, draft)
    with_export = split(rules, num_tokens, start)
    assert with_export == (internal or plain)
    if plain is not None:
        assert split(replace(rules, internal=False), num_tokens, start) == plain
    drop = {"lookahead": int(draft)}
    grid = rules.grid if rules.grid % 16 == 0 else 16
    scheduler = make_scheduler(unit=grid, budget=max(budget, 17), **drop)
    ours = prefill(scheduler, prompt_of(num_tokens))
    if start == 0:
        assert len(ours) == -(-num_tokens // budget) <= len(with_export)
    # and from any start that is on our grid
    if start and start % grid == 0:
        kept = make_scheduler(unit=grid, budget=budget, **drop)
        prefill(kept, prompt_of(start + 1 + drop["lookahead"] * grid))
        rows = prefill(kept, prompt_of(num_tokens))
        assert rows[0].start == start
        assert len(rows) == -(-(num_tokens - start) // budget) <= len(with_export)


# 120K to 164K tokens by 2,000: block, draft, unit 128 split / internal, full block split / internal
VLLM_GROWING = [
    (768, False, 80, 22, 44, 22),
    (768, True, 87, 22, 44, 22),
    (1536, False, 70, 50, 44, 22),
    (1536, True, 66, 46, 44, 22),
    (2304, False, 62, 62, 41, 22),
    (3072, False, 57, 57, 36, 22),
]


@pytest.mark.parametrize("case", VLLM_GROWING, ids=[f"B{c[0]}-draft{c[1]:d}" for c in VLLM_GROWING])
def test_growing_prefix_of_vllm(case):
    block, draft, *expected = case
    got = [
        sum(growing_prefix(Rules(block, unit, 8192, draft, internal), 120_000, 2_000, 22))
        for unit in (128, block)
        for internal in (False, True)
    ]
    assert got == expected


@pytest.mark.parametrize("start", [120_000, 119_937])
@pytest.mark.parametrize("block_size", [16, 64, 128])
@pytest.mark.parametrize("draft", [False, True], ids=["plain", "draft"])
def test_growing_prefix(start, block_size, draft):
    """22 rounds are 22 forwards, whatever the block size and however odd the numbers."""
    step = 2_000 if start == 120_000 else 2_017
    scheduler = make_scheduler(
        unit=128, budget=8192, block_size=block_size, lookahead=int(draft), tokens=1 << 18
    )
    prompt = prompt_of(start + 22 * step)
    assert len(prefill(scheduler, prompt[:start])) == -(-start // 8192)
    counters = scheduler.cache.counters
    before = counters.hit_tokens, counters.missed_tokens
    forwards = computed = 0
    for index in range(1, 23):
        previous = start + step * (index - 1)
        rows = prefill(scheduler, prompt[: previous + step])
        forwards += len(rows)
        computed += sum(lengths(rows))
        hit = position(previous, 128, draft)
        if previous % 128 == 0 and not draft:
            hit = previous  # the end of the round before lay on the grid
        assert rows[0].start == hit
    assert forwards == 22
    # I27: recomputed + cached = prompt, and of a prompt's KV no state is missing but for draft KV
    cached = counters.hit_tokens - before[0]
    assert computed + cached == sum(start + step * i for i in range(1, 23))
    assert computed == counters.missed_tokens - before[1] + counters.lost_tokens
    assert counters.lost_tokens <= (22 * 128 if draft else 0)
    assert set(scheduler.cache.counters.published_states) <= {"REPLAY", "END"}
    assert scheduler.counters.exports_dropped == 0


def test_two_pass_baseline():
    """Without exports a forward ends at the boundary, and the follow-up hits the same."""
    prompt = prompt_of(8000)
    for exports, expected in ((16, [8000]), (0, [7680, 320])):
        scheduler = make_scheduler(unit=1536, budget=8192, num_prefill_checkpoint_blocks=exports)
        assert lengths(prefill(scheduler, prompt)) == expected
        assert lengths(prefill(scheduler, prompt)) == [320]
        assert prefill(scheduler, prompt_of(8100))[0].start == 7680
