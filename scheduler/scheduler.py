"""Requests go in, steps come out, and what a step wrote becomes visible when it is committed."""

from collections.abc import Sequence

from ..cache.hashing import Extras
from ..cache.prefix_cache import PrefixCache
from .batch import ScheduledBatch
from .holdings import Holdings
from .integrity import check_scheduler
from .limits import Limits
from .live import Flight, LiveRequest, SchedulerCounters
from .planning import Pass
from .queues import Queues
from .request import Request, RequestOutputs, RequestStatus
from .run import Run

# for the sake of every row of every step: see planning.py
_RUNNING, _FINISHED = RequestStatus.RUNNING, RequestStatus.FINISHED


class Scheduler:
    """Requests in order of (priority, arrival); steps to schedule, run elsewhere, and commit.

    Two steps may be in flight. Nothing that a step writes is visible to others before its commit.
    """

    def __init__(self, cache: PrefixCache, **limits: int) -> None:
        """
        Args:
            cache: owns the pools.
            limits: fields of `Limits`.

        Raises:
            ValueError: a limit is out of range, or doesn't go with the cache.
        """
        self.cache = cache
        self.limits = Limits(**limits)
        self.limits.check_cache(cache)
        self.counters = SchedulerCounters()
        self.holdings = Holdings(cache, num_decode_states=self.limits.num_decode_states)
        self.queues = Queues(self.holdings)
        self._num_arrived = 0
        self._step = 0

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished, or a step has not retired."""
        return bool(self.queues.lives or self.holdings.flights)

    @property
    def num_in_flight(self) -> int:
        """Steps that are scheduled and not yet committed."""
        return len(self.holdings.flights)

    # requests

    def enqueue(self, request: Request) -> None:
        """Takes a request in, to run when its turn comes.

        Raises:
            ValueError: the id is in use, the prompt is empty, or the request can never fit.
        """
        name, length, sampling = request.request_id, request.num_prompt_tokens, request.sampling
        if self.knows(name):
            raise ValueError(f"enqueue: request_id {name!r} is in use")
        if request.status is not RequestStatus.WAITING or len(request.token_ids) != length:
            raise ValueError(f"enqueue: request {name!r} has run already")
        if length == 0:
            raise ValueError(f"enqueue: the prompt of {name!r} is empty")
        if length >= self.limits.max_model_len:
            raise ValueError(
                f"enqueue: the prompt of {name!r} has {length} tokens, and the model takes "
                f"{self.limits.max_model_len}, of which one has to be left for the output"
            )
        limit = min(length + sampling.max_tokens, self.limits.max_model_len)
        # the last token is never computed
        blocks = -(-(limit - 1) // self.cache.block_size)
        if blocks > self.cache.block_pool.num_blocks:
            raise ValueError(
                f"enqueue: {name!r} may grow to {limit} tokens, which take {blocks} KV blocks of "
                f"{self.cache.block_size}, and there are {self.cache.block_pool.num_blocks}; "
                f"lower max_tokens or shorten the prompt"
            )
        stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids.update(request.eos_token_ids)
        live = LiveRequest(
            request=request,
            order=(request.priority, self._num_arrived),
            limit=limit,
            extras=Extras(
                salt=request.cache_salt,
                lora_name=request.lora[0],
                lora_path=request.lora[1],
                spans=tuple(request.spans),  # pyright: ignore[reportArgumentType]
            ),
            stop_ids=frozenset(stop_ids),
            token_ids=request.token_ids,
        )
        self._num_arrived += 1
        # here, where it costs no step its time
        self.holdings.extend_keys(live)
        self.queues.add(live)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this name waits, runs or has a step in flight."""
        return request_id in self.queues.lives

    def abort(self, request_id: str) -> bool:
        """Ends a request at its caller's wish; False if it is not there (any more).

        What its steps in flight compute is still published when they retire.
        """
        return self._finish(request_id, is_discarded=False)

    def finish(self, request_id: str, reason: str = "stop") -> bool:
        """Ends a request for a reason that only the caller sees, like a stop text.

        Rows of it that are in flight ran past its end: they are discarded.
        """
        del reason  # the caller's own; named here so that a call reads well
        return self._finish(request_id, is_discarded=True)

    def _finish(self, request_id: str, *, is_discarded: bool) -> bool:
        live = self.queues.lives.get(request_id)
        if live is None or live.request.status is RequestStatus.FINISHED:
            return False
        self.queues.finish(live, is_discarded=is_discarded)
        return True

    def preempt(self, request_id: str) -> bool:
        """Makes a running request wait again; it resumes from what is cached of it."""
        live = self.queues.lives.get(request_id)
        if live is None or live.request.status is not RequestStatus.RUNNING:
            return False
        self.counters.preemptions += 1
        self.queues.preempt(live)
        return True

    # steps

    def schedule(self) -> ScheduledBatch:
        """The next step. If nothing can run now it has no rows, and is not to be committed.

        Raises:
            ValueError: as many steps as allowed are in flight.
        """
        flights = self.holdings.flights
        if len(flights) >= self.limits.max_steps_in_flight:
            raise ValueError(
                f"schedule: {len(flights)} steps are in flight; commit the oldest first"
            )
        flight = Pass(self.limits, self.queues, self.holdings, self.counters, self._step).plan()
        if flight.batch.num_rows:
            flights.append(flight)
            self._step += 1
            self.counters.steps += 1
            states = self.cache.state_pool
            in_use = states.num_slots - states.num_free
            if in_use > self.counters.slots_peak:
                self.counters.slots_peak = in_use
        # with nothing in flight, the first request always finds room
        assert flights or not self.queues.lives, (
            f"{len(self.queues.running)} running and {len(self.queues.waiting)} waiting requests, "
            f"and none can go on"
        )
        return flight.batch

    def commit(
        self,
        batch: ScheduledBatch,
        tokens: Sequence[Sequence[int]],
        *,
        drafts: Sequence[Sequence[int]] = (),
    ) -> RequestOutputs:
        """The step has run: takes its tokens, publishes what it wrote, ends what has ended.

        Args:
            batch: the oldest one in flight. If one before it failed, its results are dropped.
            tokens: for each row the ids it gave: none if it doesn't sample, one for a prefill, one
                to 1 + K for a decode row with drafts (the accepted ones and one more).
            drafts: for each row the ids to try next; empty without a drafter.

        Raises:
            ValueError: it is not the oldest batch, or the tokens don't fit the rows. Nothing has
                changed then.
        """
        if not batch.num_rows:
            return RequestOutputs([])
        flight = self._oldest("commit", batch)
        if flight.has_failed:
            self._drop(flight)
            return RequestOutputs([])
        _check_tokens(batch, tokens)
        run = self.queues.run
        if run is not None and run.goes_on(batch.step, tokens):
            self.holdings.retire(flight)
            return self._commit_run(run, batch, tokens)
        self.queues.end_run()
        self.holdings.retire(flight)
        outputs = self._commit_rows(flight, tokens)
        if drafts:
            for live, proposed in zip(flight.requests, drafts, strict=True):
                if live.request.status is _RUNNING and not live.is_discarded:
                    live.drafts = tuple(proposed[: self.limits.num_speculative_tokens])
        return outputs

    def fail(self, batch: ScheduledBatch, error: str | BaseException) -> RequestOutputs:
        """The step has raised: its requests end with the error.

        Nothing that it or a later step in flight wrote is published. Requests that are only in a
        later one start again from what is cached, also if that one is said to have failed then.

        Raises:
            ValueError: `batch` is not the oldest one in flight.
        """
        if not batch.num_rows:
            return RequestOutputs([])
        flight = self._oldest("fail", batch)
        if flight.has_failed:
            self._drop(flight)
            return RequestOutputs([])
        self.queues.end_run()
        self.holdings.retire(flight)
        self.counters.failed_steps += 1
        outputs: list[tuple] = []
        for index, live in enumerate(flight.requests):
            # what the running slot holds now is not known
            live.is_discarded = True
            if live.request.status is not RequestStatus.FINISHED:
                outputs.append((live.request_id, (), "error", str(error)))
            self._drop_row(flight, index, is_finished=True)
        for later in self.holdings.flights:
            later.has_failed = True
            for live in later.requests:
                if live.request.status is RequestStatus.RUNNING:
                    self.counters.preemptions += 1
                    self.queues.preempt(live)
                live.is_discarded = True
        return RequestOutputs(outputs)

    def _oldest(self, caller: str, batch: ScheduledBatch) -> Flight:
        flights = self.holdings.flights
        if not flights or flights[0].batch is not batch:
            oldest = f"step {flights[0].batch.step}" if flights else "none"
            raise ValueError(
                f"{caller}: batch must be the oldest in flight ({oldest}), got step {batch.step}"
            )
        return flights[0]

    def _commit_rows(self, flight: Flight, tokens: Sequence[Sequence[int]]) -> RequestOutputs:
        """In one piece, since it runs for each row of each step."""
        columns, step = flight.batch.columns, flight.batch.step
        unit, lookahead = self.cache.unit, self.cache.lookahead
        has_drafts = self.limits.num_speculative_tokens > 0
        outputs: list[tuple] = []
        num_generated = 0
        for index, (live, is_decode, start, end, samples, new) in enumerate(
            zip(
                flight.requests,
                columns.is_decode,
                columns.start,
                columns.end,
                columns.samples,
                tokens,
                strict=True,
            )
        ):
            if live.is_discarded:
                self._drop_row(flight, index)
                continue
            request = live.request
            status = request.status
            live.num_in_flight -= 1
            reason = None
            if samples:
                token_ids = live.token_ids
                if status is _FINISHED:
                    token_ids.extend(new)
                else:
                    num_before = len(token_ids)
                    for token in new:
                        token_ids.append(token)
                        if token in live.stop_ids:
                            reason = "stop"
                            break
                        if len(token_ids) == live.limit:
                            reason = "length"
                            break
                    if reason is not None:
                        new = new[: len(token_ids) - num_before]
                    outputs.append((request.request_id, tuple(new), reason, None))
            if is_decode:
                num_generated += len(new)
                if has_drafts:
                    end = start + len(new)
                    self._choose_slot(live, start, columns.dst_slots[index], len(new))
                known = end
            else:
                known = live.prefill_end
                self.counters.prefill_tokens += end - start
                self.counters.exports += len(flight.exports[index])
                live.kept.extend(flight.exports[index])
            live.num_computed = end
            # KV of draft layers is complete where the tokens that it looks ahead to were known
            proven = known - lookahead
            if proven >= end:
                proven = end
            if proven > live.num_proven:
                live.num_proven = proven
            if live.kept or live.num_proven >= (live.node.depth + 1) * unit:
                self.holdings.publish(live, step)
            if reason is not None:
                self.queues.finish(live, is_discarded=True)
            elif status is not _RUNNING and not live.num_in_flight:
                self.queues.settle(live)
        self.counters.decode_tokens += num_generated
        return RequestOutputs(outputs)

    def _commit_run(
        self, run: Run, batch: ScheduledBatch, tokens: Sequence[Sequence[int]]
    ) -> RequestOutputs:
        """Rows of which none ends: each takes its token, and few publish."""
        columns, unit, lookahead = batch.columns, self.cache.unit, self.cache.lookahead
        outputs: list[tuple] = []
        for live, name, new in zip(run.requests, columns.request_id, tokens, strict=True):
            live.token_ids.append(new[0])
            outputs.append((name, tuple(new), None, None))
        self.counters.decode_tokens += len(outputs)
        run.computed = columns.end
        for row, end in enumerate(columns.end):
            # the state that it left is kept there, and visible when its KV is complete
            if not end % unit or not (end - lookahead) % unit:
                live = run.write_back(row, len(self.holdings.flights))
                self.holdings.publish(live, batch.step)
                run.moved.add(row)
        return RequestOutputs(outputs)

    def _choose_slot(
        self, live: LiveRequest, start: int, slots: Sequence[int], num_tokens: int
    ) -> None:
        """The last verified state becomes the running one; an earlier one may be worth keeping."""
        unit = self.cache.unit
        running = slots[num_tokens - 1]
        live.slots = (running, *[slot for slot in live.slots if slot != running])
        live.scheduled_end = start + num_tokens
        position = (live.scheduled_end - 1) // unit * unit
        if position > start and self.limits.num_decode_states:
            live.grid_state = (position, slots[position - start - 1])

    def _drop(self, flight: Flight) -> None:
        self.holdings.retire(flight)
        for index in range(len(flight.requests)):
            self._drop_row(flight, index)

    def _drop_row(self, flight: Flight, index: int, *, is_finished: bool = False) -> None:
        """The row doesn't count: nothing that it wrote is published."""
        live, step = flight.requests[index], flight.batch.step
        live.num_in_flight -= 1
        written = [kept for kept in live.kept if kept.step == step]
        live.kept = [kept for kept in live.kept if kept.step != step]
        for kept in (*flight.exports[index], *written):
            self.cache.state_pool.release(kept.slot)
        if is_finished:
            if live.request.status is RequestStatus.RUNNING or live.num_in_flight:
                self.queues.finish(live, is_discarded=True)
            else:
                live.request.status = RequestStatus.FINISHED
                self.queues.settle(live)
        elif not live.num_in_flight and live.request.status is not RequestStatus.RUNNING:
            self.queues.settle(live)

    def check_integrity(self) -> None:
        """Everything has one owner, and every list tells the same story. Slow; for tests.

        Raises AssertionError.
        """
        check_scheduler(self)


def _check_tokens(batch: ScheduledBatch, tokens: Sequence[Sequence[int]]) -> None:
    if len(tokens) != batch.num_rows:
        raise ValueError(
            f"commit: tokens must have one entry for each of {batch.num_rows} rows, "
            f"got {len(tokens)}"
        )
    if tuple(map(len, tokens)) == batch.columns.samples:
        return
    for row, new in zip(batch.rows, tokens, strict=True):
        least = int(row.samples)
        most = row.end - row.start if row.is_decode else least
        if not least <= len(new) <= most:
            raise ValueError(
                f"commit: the row of {row.request_id!r} must give {least} to {most} tokens, "
                f"got {len(new)}"
            )
