"""One small system under search: the real scheduler and cache, the ghost worker, and the actions
that may come next.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_kda.cache.prefix_cache import PrefixCache
from torch_kda.scheduler.batch import ScheduledBatch, ScheduledRow
from torch_kda.scheduler.live import LiveRequest
from torch_kda.scheduler.request import Request, RequestOutput, RequestStatus, SamplingParams
from torch_kda.scheduler.scheduler import Scheduler
from torch_kda.tests.modelcheck import (
    clone,
    eviction_rules,
    invariants,
    retirement_rules,
    schedule_rules,
)
from torch_kda.tests.modelcheck.scope import (
    DISTURBANCES,
    END,
    GOOD,
    WRONG,
    Act,
    Action,
    Scope,
    Template,
)
from torch_kda.tests.scheduler.ghost import GhostWorker, State, extend_hash


class SmallGhost(GhostWorker):
    """A ghost worker whose model says GOOD, or END for a request that is told to end."""

    def __init__(self, cache: PrefixCache) -> None:
        super().__init__(cache, vocab=1)
        self.ending: str | None = None  # this request samples END in the next step

    def _sample(self, row: ScheduledRow, tokens: list[int], states: list[State]) -> list[int]:
        new = super()._sample(row, tokens, states)
        if row.request_id == self.ending and new:
            truth = self.truths[row.request_id]
            truth.tokens[-1] = END
            truth.hashes[-1] = extend_hash(truth.hashes[-2], END)
            new[-1] = END
        return new


@dataclass(slots=True, eq=False)
class World:
    """The system between two actions."""

    scope: Scope
    scheduler: Scheduler
    ghost: SmallGhost
    num_submitted: int = 0
    num_disturbed: int = 0
    outputs: dict[str, list[int]] = field(default_factory=dict)  # of requests that go on
    ended: set[str] = field(default_factory=set)  # by their model or by `finish`

    @property
    def cache(self) -> PrefixCache:
        return self.scheduler.cache

    @property
    def in_flight(self) -> list[ScheduledBatch]:
        return [flight.batch for flight in self.scheduler.holdings.flights]

    @property
    def preemptions(self) -> int:
        return self.scheduler.counters.preemptions

    @property
    def lives(self) -> list[LiveRequest]:
        """All requests that are not gone, in order."""
        return sorted(self.scheduler.queues.lives.values(), key=lambda live: live.order)

    @property
    def unfinished(self) -> list[LiveRequest]:
        return [x for x in self.lives if x.request.status is not RequestStatus.FINISHED]

    def copy(self) -> "World":
        return clone.clone(self)

    # what may come next

    def actions(self) -> list[Action]:
        scope, flights = self.scope, self.scheduler.holdings.flights
        found: list[Action] = []
        lives = self.unfinished
        if self.num_submitted < (scope.num_submissions or len(scope.requests)):
            found.append((Act.SUBMIT, 0))
        if lives and len(flights) < 2:
            found.append((Act.SCHEDULE, 0))
        if flights:
            found += [(Act.COMMIT, way) for way in range(self.num_commit_ways())]
        if scope.max_disturbances is not None and self.num_disturbed >= scope.max_disturbances:
            return found
        for act in scope.disturbances:
            match act:
                case Act.FAIL:
                    found += [(act, 0)] if flights else []
                case Act.ABORT | Act.FINISH:
                    found += [(act, i) for i in range(len(lives))]
                case Act.PREEMPT:
                    for i, live in enumerate(lives):
                        if live.request.status is RequestStatus.RUNNING:
                            found.append((act, i))
                case Act.EVICT_STATE:
                    found += [(act, 0)] if self.cache.state_pool.num_evictable else []
                case Act.EVICT_KV:
                    free = self.cache.block_pool.num_free
                    found += [(act, 0)] if self.cache.num_available_blocks > free else []
        return found

    def num_commit_ways(self) -> int:
        """Plainly; with END for each row that samples; with 0..K right drafts for the next step."""
        flight = self.scheduler.holdings.flights[0]
        if flight.has_failed:
            return 1
        samples = sum(row.samples for row in flight.batch.rows) if self.scope.ends_early else 0
        return 1 + self.scope.drafts + (self.scope.drafts > 0) + samples

    # doing it

    def act(self, action: Action) -> None:
        """Does it, and asserts everything that must hold afterwards."""
        act, index = action
        before = invariants.Before.of(self)
        match act:
            case Act.SUBMIT:
                self.submit(self.scope.requests[self.num_submitted % len(self.scope.requests)])
            case Act.SCHEDULE:
                schedule_rules.check_schedule(self, before, self.scheduler.schedule())
            case Act.COMMIT:
                self._commit(index, before)
            case Act.FAIL:
                self._fail(before)
            case Act.ABORT | Act.FINISH | Act.PREEMPT:
                lives = self.unfinished
                name = lives[index].request_id
                assert getattr(self.scheduler, act.name.lower())(name)
                if act is not Act.PREEMPT:
                    del self.outputs[name]
                if act is Act.FINISH:
                    self.ended.add(name)
                retirement_rules.check_stop(self, before, lives[index])
            case Act.EVICT_STATE:
                assert self.cache.evict_state()
                eviction_rules.check_evict_state(self, before)
            case Act.EVICT_KV:
                assert self.cache.evict_kv()
                eviction_rules.check_evict_kv(self, before)
        self.num_disturbed += act in DISTURBANCES
        invariants.check(self)
        truths, lives = self.ghost.truths, self.scheduler.queues.lives
        for name in truths.keys() - lives.keys():
            del truths[name]
        self.ended &= lives.keys()

    def submit(self, template: Template) -> None:
        request = Request(
            f"r{self.num_submitted}",
            array("i", template.prompt),
            SamplingParams(max_tokens=template.max_tokens),
            eos_token_ids=(END,),
            priority=template.priority,
            checkpoint_positions=template.named,
            cache_salt=template.salt,
        )
        self.num_submitted += 1
        tokens = len(template.prompt) + template.max_tokens - 1
        if tokens > self.cache.block_pool.num_blocks * self.cache.block_size:
            # it can never fit (I20)
            try:
                self.scheduler.enqueue(request)
            except ValueError:
                return
            raise AssertionError(f"{template} was taken in")
        self.ghost.learn(request)
        self.outputs[request.request_id] = []
        self.scheduler.enqueue(request)

    def _commit(self, way: int, before: invariants.Before) -> None:
        flight = self.scheduler.holdings.flights[0]
        batch, drafts = flight.batch, ()
        if flight.has_failed:
            self.ghost.fail(batch)
            assert not self.scheduler.commit(batch, [])
            return
        most = self.scope.drafts
        if most:
            num_right = min(way, most + 1)
            right = [GOOD] * num_right + [WRONG] * (most - num_right)
            # the last of these ways proposes nothing
            drafts = [right if num_right <= most else [] for _ in batch.rows]
        ends = way - (1 + most + (most > 0))
        if ends >= 0:
            self.ghost.ending = [row.request_id for row in batch.rows if row.samples][ends]
        tokens = self.ghost.run(batch)
        self.ghost.ending = None
        outputs = self.scheduler.commit(batch, tokens, drafts=drafts)
        self._take(outputs)
        retirement_rules.check_commit(self, before, flight, outputs)

    def _fail(self, before: invariants.Before) -> None:
        flight = self.scheduler.holdings.flights[0]
        has_failed = flight.has_failed
        self.ghost.fail(flight.batch)
        outputs = self.scheduler.fail(flight.batch, "boom")
        self._take(outputs)
        if has_failed:
            assert not outputs
        else:
            retirement_rules.check_fail(self, before, flight, outputs)

    def _take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id in self.outputs, f"{output} came after its end"
            got = self.outputs[output.request_id]
            got += output.token_ids
            invariants.check_output(self, output, got)
            if output.finish_reason is not None:
                del self.outputs[output.request_id]
                self.ended.add(output.request_id)

    def drain(self) -> None:
        """To the end of all requests, and then everything is free again (I06, I07, I19)."""
        for _ in range(200):
            if not self.scheduler.has_work:
                break
            if len(self.in_flight) < 2 and self.unfinished:
                before = len(self.in_flight)
                self.act((Act.SCHEDULE, 0))
                if len(self.in_flight) > before:
                    continue
            self.act((Act.COMMIT, 0))
        else:
            raise AssertionError("still not done after 200 steps")
        self.cache.clear()
        self.scheduler.check_integrity()
        invariants.check_all_free(self)


def make_world(scope: Scope) -> World:
    cache = PrefixCache(
        num_blocks=scope.num_blocks,
        block_size=scope.block_size or scope.unit,
        num_slots=scope.num_slots,
        unit=scope.unit,
        root=b"small",
        lookahead=scope.lookahead,
        max_states_per_path=scope.path,
    )
    ghost = SmallGhost(cache)
    scheduler = Scheduler(
        cache,
        max_num_seqs=scope.max_num_seqs,
        max_num_batched_tokens=scope.budget,
        max_model_len=100,
        alignment=scope.alignment,
        num_speculative_tokens=scope.drafts,
        num_prefill_checkpoint_blocks=scope.exports,
        max_exports_per_step=scope.exports_per_step,
        export_every=scope.every,
        num_decode_states=scope.decode_states,
    )
    return World(scope, scheduler, ghost)


clone.SHARED.add(Scope)
clone.MUTABLE.update((World, SmallGhost))
