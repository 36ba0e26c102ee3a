"""Where a chunk of a prefill ends."""

from hypothesis import given
from hypothesis import strategies as st
from torch_kda.scheduler.chunking import plan_chunk


def test_plan_chunk_takes_all():
    end = plan_chunk(0, 8000, 8192, budget=8192, unit=128, alignment=16)
    assert end == 8000
    assert plan_chunk(119936, 122000, 8192, budget=8192, unit=128, alignment=16) == 122000


def test_plan_chunk_is_aligned():
    # 1000 tokens are left in this step
    assert plan_chunk(0, 8000, 1000, budget=1024, unit=4096, alignment=16) == 992
    assert plan_chunk(0, 8000, 15, budget=1024, unit=128, alignment=16) == 0
    # the last chunk ends where the prompt does
    assert plan_chunk(7984, 8000, 16, budget=1024, unit=128, alignment=16) == 8000
    assert plan_chunk(7984, 7999, 15, budget=1024, unit=128, alignment=16) == 7999


def test_plan_chunk_prefers_the_grid_when_it_is_free():
    # 8000 - 1920 needs 6 more forwards of 1024, as 8000 - 2000 does
    assert plan_chunk(0, 8000, 2000, budget=1024, unit=128, alignment=16) == 1920
    # 2048 - 1008 would need two more forwards, 2048 - 1024 one
    assert plan_chunk(0, 2032, 1008, budget=1024, unit=128, alignment=16) == 1008


def test_plan_chunk_stops():
    def plan(start: int) -> int:
        return plan_chunk(
            start, 8000, 8192, budget=8192, unit=1536, alignment=16, stops=[7680, 1536]
        )

    assert [plan(0), plan(1536), plan(7680)] == [1536, 7680, 8000]


@given(
    num_tokens=st.integers(1, 5000),
    units=st.integers(1, 40),
    budget=st.integers(1, 100),
    hit=st.integers(0, 5000),
    alignment=st.sampled_from([1, 4, 16]),
)
def test_plan_chunk_forwards(num_tokens, units, budget, hit, alignment):
    """Single-pass theorem, for the pure function: forwards = ceil((n - hit) / budget)."""
    unit, budget = units * alignment, budget * alignment
    start = hit % num_tokens // unit * unit
    forwards = -(-(num_tokens - start) // budget)
    for _ in range(forwards):
        assert start < num_tokens
        end = plan_chunk(start, num_tokens, budget, budget=budget, unit=unit, alignment=alignment)
        assert start < end <= start + budget
        assert end == num_tokens or (end - start) % alignment == 0
        start = end
    assert start == num_tokens
