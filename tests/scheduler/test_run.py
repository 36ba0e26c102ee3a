"""Steps that repeat the one before without a look at the requests."""

from copy import deepcopy
from dataclasses import replace
from random import Random

import pytest
from torch_kda.scheduler.batch import ScheduledBatch
from torch_kda.scheduler.integrity import settled
from torch_kda.scheduler.planning import Pass
from torch_kda.scheduler.request import Request, SamplingParams
from torch_kda.scheduler.scheduler import Scheduler
from torch_kda.tests.scheduler.ghost import Bench, generate, make_bench
from torch_kda.tests.scheduler.walk import ACTIONS, Walk, make_world

COMPARED = ("scheduled_end", "num_computed", "num_proven", "num_in_flight", "last_step", "last_row")
COMPARED += ("table", "slots", "kept")


def request(name: str, num_tokens: int, max_tokens: int, *, priority: int = 0) -> Request:
    prompt = [(7 * ord(name) + i) % 1000 for i in range(num_tokens)]
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens), priority=priority)


def running(*requests: Request, **sizes: int) -> Bench:
    """All of them decode, and a run goes on."""
    bench = make_bench(**sizes)
    for each in requests:
        bench.submit(each)
    while bench.scheduler.queues.run is None:
        bench.step(depth=2)
    return bench


def looks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Who is looked at from now on."""
    found, look = [], Pass._plan_decode
    monkeypatch.setattr(
        Pass, "_plan_decode", lambda self, live: found.append(live.request_id) or look(self, live)
    )
    return found


def test_nobody_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second step of decode rows alone to that in which the first request ends."""
    requests = [request("a", 5, 40), request("b", 8, 30)]
    bench = running(*requests)
    run, found = bench.scheduler.queues.run, looks(monkeypatch)
    while not bench.reasons:
        assert bench.scheduler.queues.run is run
        bench.step(depth=2)
    assert found == ["a", "b"]  # one is ending, so all are looked at for the next step
    bench.run(depth=2)
    for each in requests:
        assert bench.outputs[each.request_id] == generate(
            each.prompt_token_ids, each.sampling.max_tokens
        )


def test_a_run_goes_on_while_others_wait_for_a_seat(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = running(request("a", 5, 40), request("b", 8, 40), max_num_seqs=2)
    run, found = bench.scheduler.queues.run, looks(monkeypatch)
    bench.submit(request("c", 6, 2))
    for _ in range(5):
        bench.step(depth=2)
    assert not found and bench.scheduler.queues.run is run


def test_a_run_gives_way_to_priority() -> None:
    bench = running(*(request(n, 5, 40, priority=1) for n in "ab"), max_num_seqs=2)
    bench.submit(request("c", 6, 2))
    bench.step(depth=2)
    assert bench.scheduler.queues.run is None and bench.scheduler.counters.preemptions == 1
    bench.run(depth=2)
    assert bench.reasons == dict.fromkeys("abc", "length")


def test_a_stop_token_ends_a_run() -> None:
    prompt = request("a", 5, 40).prompt_token_ids
    stop = generate(prompt, 12)[-1]
    params = SamplingParams(max_tokens=40, stop_token_ids=(stop,))
    bench = running(Request("a", prompt, params), request("b", 8, 40))
    while not bench.reasons:
        bench.step(depth=2)
    assert bench.outputs["a"] == generate(prompt, 12) and bench.reasons == {"a": "stop"}
    bench.run(depth=2)


def test_a_look_at_what_runs_leaves_it_as_it_was() -> None:
    bench = running(request("a", 5, 40), request("b", 8, 40))
    queues = bench.scheduler.queues
    live = queues.lives["a"]
    before = live.scheduled_end
    bench.step(depth=2)
    with settled(queues):
        assert live.scheduled_end == bench.batches[-1].rows[0].end > before
    assert live.scheduled_end == before


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_a_look_at_all_would_choose_the_same(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step of some walks is planned a second time, in a copy that looks at all requests."""
    schedule, repeated = Scheduler.schedule, list[bool]()

    def compared(scheduler: Scheduler) -> ScheduledBatch:
        copy = deepcopy(scheduler)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Pass, "_repeat", lambda self: None)
            expected = schedule(copy)
        batch = schedule(scheduler)
        repeated.append(scheduler.queues.run is not None)
        assert batch.rows == expected.rows
        with settled(scheduler.queues):
            for name, live in scheduler.queues.lives.items():
                other = copy.queues.lives[name]
                for field in COMPARED:
                    assert getattr(live, field) == getattr(other, field), f"{name}: {field}"
        return batch

    monkeypatch.setattr(Scheduler, "schedule", compared)
    weights = ACTIONS | {"schedule": 40, "commit": 40}
    for seed in range(first, first + 10):
        rng = Random(seed)
        walk = Walk(replace(make_world(rng), drafts=0))
        for _ in range(150):
            action = rng.choices(list(weights), list(weights.values()))[0]
            if walk.can(action):
                walk.act(action, rng)
        walk.drain()
    assert sum(repeated) > 25
