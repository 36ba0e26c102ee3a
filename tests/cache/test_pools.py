"""Blocks and slots as numbers: nothing is lost, nothing given out twice."""

import pytest
from torch_kda.cache.block_pool import BlockPool
from torch_kda.cache.state_pool import SlotStatus, StatePool


def test_block_pool():
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert len(set(first)) == 3 and pool.num_free == 1
    assert pool.allocate(0) == []
    pool.release(first[:2])
    assert pool.num_free == 3 and pool.is_free(first[0]) and not pool.is_free(first[2])
    pool.check_integrity()
    with pytest.raises(AssertionError, match="free already"):
        pool.release([first[0]])
    with pytest.raises(AssertionError):
        pool.allocate(5)
    with pytest.raises(ValueError, match="num_blocks"):
        BlockPool(0)


def test_state_pool_life_of_a_kept_state():
    pool = StatePool(2)
    slot = pool.allocate()
    assert pool.status[slot] is SlotStatus.RUNNING
    pool.reserve(slot, 128, step=3)
    with pytest.raises(AssertionError):
        pool.mark_ready(slot)  # nothing is visible before its step has retired
    pool.mark_written(slot)
    assert pool.num_evictable == 0
    pool.mark_ready(slot)
    assert (pool.position[slot], pool.num_evictable) == (128, 1)
    pool.check_integrity()
    pool.release(slot)
    assert (pool.status[slot], pool.position[slot], pool.num_free) == (SlotStatus.FREE, -1, 2)
    pool.check_integrity()


def test_state_pool_pins():
    pool = StatePool(1)
    slot = pool.allocate()
    pool.reserve(slot, 16, step=0)
    pool.mark_written(slot)
    pool.mark_ready(slot)
    pool.pin(slot)
    pool.pin(slot)
    assert pool.num_evictable == 0
    pool.release(slot)
    assert pool.status[slot] is SlotStatus.DOOMED and pool.num_free == 0
    pool.unpin(slot)
    assert pool.num_free == 0
    pool.check_integrity()
    pool.unpin(slot)
    assert pool.num_free == 1
    pool.check_integrity()
    with pytest.raises(AssertionError):
        pool.unpin(slot)
    with pytest.raises(AssertionError):
        pool.release(slot)
