"""The checks themselves have teeth: each of these faults is noticed."""

from collections.abc import Callable

import pytest
from torch_kda.scheduler.request import Request, SamplingParams
from torch_kda.scheduler.scheduler import Scheduler
from torch_kda.tests.scheduler.ghost import make_bench


def lose_block(scheduler: Scheduler) -> None:
    scheduler.cache.block_pool.allocate(1)


def lose_slot(scheduler: Scheduler) -> None:
    scheduler.cache.state_pool.allocate()


def forget_pin(scheduler: Scheduler) -> None:
    states = scheduler.cache.state_pool
    states.pins[states.pins.index(1)] = 0


def reference_too_many(scheduler: Scheduler) -> None:
    next(iter(scheduler.cache.nodes())).references += 1


def wrong_position(scheduler: Scheduler) -> None:
    positions = scheduler.cache.state_pool.position
    positions[max(range(len(positions)), key=positions.__getitem__)] += 1


def share_a_block(scheduler: Scheduler) -> None:
    (live,) = scheduler.queues.running
    live.table[-1] = live.table[0]


def forget_request(scheduler: Scheduler) -> None:
    scheduler.queues.running.clear()


def await_nobody(scheduler: Scheduler) -> None:
    holdings = scheduler.holdings
    holdings.announce(next(iter(scheduler.queues.lives.values())), 4, step=999)


def spend_a_state(scheduler: Scheduler) -> None:
    for node in scheduler.cache.nodes():
        node.is_spent = True


FAULTS = [
    lose_block,
    lose_slot,
    forget_pin,
    reference_too_many,
    wrong_position,
    share_a_block,
    forget_request,
    await_nobody,
    spend_a_state,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_check_integrity(fault: Callable[[Scheduler], None]):
    bench = make_bench(checks=False)
    for name in ("before", "now"):
        bench.submit(Request(name, list(range(30)), SamplingParams(max_tokens=4)))
        bench.schedule()
        if name == "before":
            bench.commit()
            bench.run()
    scheduler = bench.scheduler
    assert scheduler.num_in_flight == 1
    scheduler.check_integrity()
    fault(scheduler)
    with pytest.raises(AssertionError):
        scheduler.check_integrity()
