"""Random walks over everything that can happen, some of them steered by hypothesis."""

from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch_kda.tests.scheduler.walk import ACTIONS, Walk, make_world, random_walk

randoms = st.randoms(use_true_random=False)


class SchedulerMachine(RuleBasedStateMachine):
    """Actions in any order, two steps in flight, everything checked after each."""

    walk: Walk | None = None

    @initialize(rng=randoms)
    def start(self, rng: Random) -> None:
        self.walk = Walk(make_world(rng))

    def teardown(self) -> None:
        if self.walk is not None:
            self.walk.drain()


def _rule_for(action: str):
    def run(self: SchedulerMachine, rng: Random) -> None:
        assert self.walk is not None
        self.walk.act(action, rng)

    run.__name__ = action
    guarded = precondition(lambda self: self.walk is not None and self.walk.can(action))
    return guarded(rule(rng=randoms)(run))


for _action in ACTIONS:
    setattr(SchedulerMachine, _action, _rule_for(_action))

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=150,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)


@pytest.mark.parametrize("seed", range(150))
def test_random_walk(seed):
    random_walk(seed, 200)
