"""One pass over the requests: who gets tokens, blocks and slots in the next step."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..cache.policy import Kind, replay_boundary
from ..cache.prefix_cache import Match
from .admission import blocks_to_admit, find_writer, wanted_states
from .batch import ScheduledBatch, ScheduledRow
from .chunking import plan_chunk
from .holdings import Holdings
from .limits import Limits
from .live import Flight, KeptState, LiveRequest, SchedulerCounters
from .queues import Queues, order_of
from .request import RequestStatus
from .run import Run

# the name of a member is looked up by a descriptor in Python 3.11: 70 ns
_RUNNING = RequestStatus.RUNNING


@dataclass(slots=True)
class _PrefillRow:
    live: LiveRequest
    start: int
    end: int
    src_slot: int
    wanted: list[tuple[int, Kind]]  # states to export
    exports: list[KeptState] = field(default_factory=list)


class _PassedOver(NamedTuple):
    """A waiting request that isn't admitted because a step is about to make a deeper hit."""

    live: LiveRequest
    writer: str
    key: bytes
    is_first: bool  # it didn't wait for this writer before


class Pass:
    """Plans one step. Requests are looked at in order, so none that has a row is preempted.

    Only a request that is later in the order is ever preempted. One that lacks room waits, and
    those after it take no room before it has it. A request that was passed over for a state which
    then got no slot is looked at again, as if that state had not been announced.
    """

    def __init__(
        self,
        limits: Limits,
        queues: Queues,
        holdings: Holdings,
        counters: SchedulerCounters,
        step: int,
    ) -> None:
        self.limits = limits
        self.queues = queues
        self.holdings = holdings
        self.cache = holdings.cache
        self.block_size = holdings.cache.block_size
        self.counters = counters
        self.step = step
        # tokens left for prefill; those of decode rows are set aside
        self.budget = limits.max_num_batched_tokens
        self.next_waiting = 0  # index of the waiting request to look at
        self.admits = True  # whether a waiting request may still come in
        self.starved: tuple[int, int] | None = None  # order of the first one that lacks room
        self.barrier: tuple[int, int] | None = None  # order of the first one preempted here
        self.decode_rows: list[tuple] = []  # fields that differ between them, as `_columns` reads
        self.decode_lives: list[LiveRequest] = []
        self.prefills: list[_PrefillRow] = []
        self.pinned_slots: list[int] = []
        self.passed_over: list[_PassedOver] = []
        self.looks_again = False

    def plan(self) -> Flight:
        """The step, not yet in flight; it may have no rows."""
        return self._repeat() or self._look_at_all()

    def _repeat(self) -> Flight | None:
        """The rows of the step before, one token on, if a look at all requests would choose those.

        None, and nothing changed: it would not, or it may not.
        """
        flights, queues = self.holdings.flights, self.queues
        if len(flights) != 1 or self.limits.num_speculative_tokens or self._may_admit():
            return None
        (before,) = flights
        run = queues.run
        if run is None:
            running = queues.running
            if before.batch.num_decode_rows < len(running) or before.requests != running:
                return None
            run = Run(before, self.cache.lookahead)
        columns: Any = before.batch.columns
        starts, size = columns.end, self.block_size
        due = [row for row, start in enumerate(starts) if not start % size]
        if self.step > run.last_step or len(due) > self.cache.num_available_blocks:
            return None
        queues.run = run
        sources = columns.src_slot
        if before.pinned_slots:
            # some went on in a fresh slot
            sources = tuple([slot for (slot,) in columns.dst_slots])
        for row in due:
            live = run.write_back(row, num_in_flight=1)
            has_room = self._take_room(live, starts[row], starts[row] + 1)
            assert has_room, "there was a block for each"
        run.moved.update(due)
        columns = _one_token_on(columns, run, sources)
        run.scheduled, run.newest_step = columns.end, self.step
        batch = ScheduledBatch(self.step, columns, len(starts))
        return Flight(batch, before.requests, before.exports, self.pinned_slots)

    def _may_admit(self) -> bool:
        """Whether a waiting request may come in: there is a seat, or a later request to preempt."""
        running, waiting = self.queues.running, self.queues.waiting
        return bool(waiting) and not (self._is_full and waiting[0].order > running[-1].order)

    def _look_at_all(self) -> Flight:
        self.queues.end_run()
        running, waiting = self.queues.running, self.queues.waiting
        num_decoding = sum([live.scheduled_end >= live.prefill_end for live in running])
        self.budget -= num_decoding * self.limits.row_tokens
        for live in list(running):
            while (
                self.admits
                and self.next_waiting < len(waiting)
                and waiting[self.next_waiting].order < live.order
            ):
                self._try_admit(waiting[self.next_waiting])
            if live.request.status is not _RUNNING:
                continue  # preempted by a request before it
            if live.scheduled_end >= live.prefill_end:
                self._plan_decode(live)
            else:
                self._plan_prefill(live)
        while True:
            while self.admits and self.next_waiting < len(waiting):
                self._try_admit(waiting[self.next_waiting])
            if self.prefills:
                self._assign_exports()
            if not self.passed_over or not self._look_again():
                return self._make_flight()

    # rows of running requests

    def _plan_decode(self, live: LiveRequest) -> None:
        request, block_size = live.request, self.block_size
        start = live.scheduled_end
        end = start + 1
        if end >= live.limit:
            return  # its last token is on its way
        if start < len(live.token_ids):
            token_ids, prev_row = (live.token_ids[start],), -1
            if live.drafts:
                # as many as could still be accepted, beside the token that is sampled
                token_ids += tuple(live.drafts[: live.limit - end - 1])
                end = start + len(token_ids)
        elif self.limits.num_speculative_tokens:
            return  # how many drafts are accepted is not known yet
        else:
            token_ids, prev_row = (0,), live.last_row
        src = live.slots[0]
        # the table covers what was there before, and a unit begins where a block does
        needs_room = start % block_size == 0 or end - start > 1
        if needs_room and not self._take_room(live, start, end):
            return
        if live.grid_state is not None:
            position, slot = live.grid_state
            live.grid_state = None
            if self.holdings.is_wanted(live, position, Kind.DECODE):
                self.holdings.keep_scratch(live, position, slot)
        lives = self.decode_lives
        live.last_row = len(lives)
        lives.append(live)
        self.decode_rows.append(
            (
                request.request_id,
                start,
                end,
                token_ids,
                prev_row,
                src,
                live.slots[: len(token_ids)],
                live.table,
                request.sampling,
                start + 1 - request.num_prompt_tokens,
            )
        )
        live.scheduled_end = end
        live.last_step = self.step
        live.num_in_flight += 1

    def _plan_prefill(self, live: LiveRequest) -> None:
        start = live.scheduled_end
        end = self._chunk_end(live.prefill_end, start, live.plan)
        if end == start:
            return
        missing = -(-end // self.cache.block_size) - len(live.table)
        if missing > 0 and not self._take_blocks(live, missing):
            return
        src = live.slots[0]
        if not self.limits.has_exports and start in live.plan:
            self._keep_running(live, start)
        self._add_prefill(live, start, end, src)

    def _chunk_end(self, num_tokens: int, start: int, plan: dict[int, Kind]) -> int:
        return plan_chunk(
            start,
            num_tokens,
            self.budget,
            budget=self.limits.max_num_batched_tokens,
            unit=self.cache.unit,
            alignment=self.limits.alignment,
            stops=() if self.limits.has_exports else plan,
        )

    def _add_prefill(self, live: LiveRequest, start: int, end: int, src: int) -> None:
        most = self.limits.num_prefill_checkpoint_blocks
        wanted: list[tuple[int, Kind]] = []
        for position, kind in live.plan.items():
            if not start < position <= end or not self.holdings.is_wanted(live, position, kind):
                continue
            if len(wanted) < most:
                wanted.append((position, kind))
            elif most:
                self.counters.exports_dropped += 1
                continue
            # without exports the chunk ends here, and the next row keeps the state
            self.holdings.announce(live, position, self.step)
        self.prefills.append(_PrefillRow(live, start, end, src, wanted))
        self.budget -= end - start
        live.scheduled_end = end
        live.last_step = self.step
        live.num_in_flight += 1

    def _keep_running(self, live: LiveRequest, position: int) -> None:
        """A wanted state is kept by slot choice: the row reads its slot and writes another."""
        kind = None if self.limits.has_exports else live.plan.get(position)
        if kind is None and live.is_decoding and self.limits.num_decode_states:
            kind = Kind.DECODE
        if kind is None:
            return
        key = self.holdings.key_at(live, position)
        if key is not None:
            announced = self.holdings.announced.get(key)
            if announced is not None and announced.writer == live.request_id:
                # without exports the row before has announced what is kept here
                announced = announced if self.limits.has_exports else None
            if announced is not None or self.cache.has_state(key):
                return
        slot = self.holdings.fork(live, position, kind)
        if slot is None:
            self.counters.exports_dropped += 1
            return
        self.pinned_slots.append(slot)
        self.holdings.announce(live, position, self.step)

    # room

    def _take_room(self, live: LiveRequest, start: int, end: int) -> bool:
        """Blocks for a decode row, and where a unit begins a slot for what its state becomes."""
        missing = -(-end // self.block_size) - len(live.table)
        if missing > 0 and not self._take_blocks(live, missing):
            return False
        if start % self.cache.unit == 0:
            self._keep_running(live, start)
        return True

    def _take_blocks(self, live: LiveRequest, count: int) -> bool:
        blocks = None
        while not self._is_starved(live) and (blocks := self.cache.allocate_blocks(count)) is None:
            if not self._preempt_after(live):
                self.starved = live.order
                break
        if blocks is None:
            return False
        # not in place: rows in flight show the one before
        live.table = live.table + array("i", blocks)
        return True

    def _is_starved(self, live: LiveRequest) -> bool:
        """Whether a request before this one lacks room, so that this one takes none."""
        return self.starved is not None and self.starved < live.order

    def _preempt_after(self, live: LiveRequest) -> bool:
        """Preempts the last running request if it is later than `live`; whether that made room."""
        running = self.queues.running
        if self.queues.draining or not running or running[-1].order <= live.order:
            return False  # also: room comes back anyway when steps retire
        victim = running[-1]
        if victim.last_step == self.step:
            assert self.looks_again, (
                "who has a row is earlier in the order, or was looked at before"
            )
            return False
        if victim.is_decoding:
            self.budget += self.limits.row_tokens
        self.barrier = victim.order
        frees_now = victim.num_in_flight == 0
        self.counters.preemptions += 1
        self.queues.preempt(victim)
        return frees_now

    # admission

    def _try_admit(self, live: LiveRequest) -> None:
        """Admits the waiting request, passes it over while its writer runs, or ends admission."""
        self.holdings.extend_keys(live)
        if (
            self._is_starved(live)
            or self.budget < self.limits.alignment
            or (self.barrier is not None and live.order >= self.barrier)
            or not self._may_fit(live)
        ):
            self.admits = False
            return
        num_tokens, unit, every = len(live.token_ids), self.cache.unit, self.limits.export_every
        max_units = replay_boundary(num_tokens, unit, self.cache.drop) // unit
        match = self.cache.match(live.keys, max_units)
        hit = match.source.depth if match.source else 0
        writer = find_writer(self.holdings.announced, live, hit, max_units)
        if writer is not None:
            is_first = writer[0] not in live.deferred_to
            self.passed_over.append(_PassedOver(live, *writer, is_first))
            self.counters.deferrals += is_first
            live.deferred_to.update([writer])
            self.cache.cancel(match)
            self.next_waiting += 1
            return
        start = hit * unit
        plan = wanted_states(live, self.cache, start, match.node.depth * unit, every)
        end = self._chunk_end(num_tokens, start, plan)
        if end == start or not self._make_room(live):
            self.cache.cancel(match)
            self.admits = False
            return
        self.cache.accept(match, num_tokens, max_units)
        self._start(live, match, start, end)
        live.plan = plan
        self._add_prefill(live, start, end, match.source.slot if match.source else -1)

    def _may_fit(self, live: LiveRequest) -> bool:
        """Whether it is worth to look closer: there is room, or a later request to preempt.

        Most steps of a full machine end here, so nothing is done that grows with the prompt.
        """
        running = self.queues.running
        if running and running[-1].order > live.order:
            return True
        return self._has_room(blocks_to_admit(self.queues.running, live, self.cache))

    def _has_room(self, blocks: int) -> bool:
        return (
            not self._is_full
            and self.cache.num_available_slots >= self.limits.row_tokens
            and self.cache.num_available_blocks >= blocks
        )

    @property
    def _is_full(self) -> bool:
        return len(self.queues.running) >= self.limits.max_num_seqs

    def _make_room(self, live: LiveRequest) -> bool:
        """Makes sure of a seat, slots and KV for the whole prompt; preempts later requests."""
        blocks = blocks_to_admit(self.queues.running, live, self.cache)
        while not self._has_room(blocks):
            was_full = self._is_full
            if not self._preempt_after(live) and not (was_full and not self._is_full):
                self.starved = live.order
                return False
        return True

    def _look_again(self) -> bool:
        """Whether requests were passed over for states that then got no slot. If so, admission goes
        on from the first of them, and slots for exports are given out anew.
        """
        announced, waiting = self.holdings.announced, self.queues.waiting
        still = [p for p in self.passed_over if p.live.request.status is RequestStatus.WAITING]
        in_vain = [passed for passed in still if passed.key not in announced]
        if not in_vain:
            return False
        self.passed_over = [passed for passed in still if passed.key in announced]
        for passed in in_vain:
            if passed.is_first:
                # it may still wait for another state of this writer
                del passed.live.deferred_to[passed.writer]
                self.counters.deferrals -= 1
        for row in self.prefills:
            row.wanted = [(kept.position, kept.kind) for kept in row.exports]
            for kept in row.exports:
                self.cache.state_pool.release(kept.slot)
            row.exports = []
        self.next_waiting = waiting.index(min((passed.live for passed in in_vain), key=order_of))
        self.admits = self.looks_again = True
        return True

    def _start(self, live: LiveRequest, match: Match, start: int, end: int) -> None:
        request = live.request
        if request.num_preemptions == 0:
            request.num_cached_tokens = start
        live.node = match.node
        live.kv_cached = match.node.depth * self.cache.unit
        live.prefill_end = len(live.token_ids)
        live.scheduled_end = live.num_computed = live.num_proven = start
        if match.source is not None:
            self.pinned_slots.append(match.source.slot)
        for _ in range(self.limits.row_tokens):
            slot = self.cache.allocate_slot()
            assert slot is not None, "there was room for it"
            live.slots += (slot,)
        missing = -(-end // self.cache.block_size) - len(match.blocks)
        blocks = self.cache.allocate_blocks(max(missing, 0))
        assert blocks is not None, "there was room for them"
        live.table = array("i", (*match.blocks, *blocks))
        self.queues.start(live)

    # the batch

    def _assign_exports(self) -> None:
        """Slots for the states that rows export: the most valuable first, while there are any."""
        wanted = sorted(
            (kind, index, -position)
            for index, row in enumerate(self.prefills)
            for position, kind in row.wanted
        )
        room = self.limits.max_exports_per_step
        for kind, index, negative in wanted:
            row, position = self.prefills[index], -negative
            slot = self.cache.allocate_slot(kind) if room else None
            if slot is None:
                self.counters.exports_dropped += 1
                self.holdings.withdraw(row.live, position)
                continue
            room -= 1
            self.cache.state_pool.reserve(slot, position, self.step)
            row.exports.append(KeptState(position, slot, kind, self.step))

    def _make_flight(self) -> Flight:
        """The decode rows come first."""
        lives, n = self.decode_lives, len(self.decode_lives)
        names, starts, ends, token_ids, prev_rows, sources, slots, tables, sampling, indices = (
            zip(*self.decode_rows, strict=True) if n else [()] * 10
        )
        always, none = (True,) * n, ((),) * n
        decode = {
            "request_id": names,
            "is_decode": always,
            "start": starts,
            "end": ends,
            "token_ids": token_ids,
            "prev_row": prev_rows,
            "src_slot": sources,
            "dst_slots": slots,
            "exports": none,
            "block_table": tables,
            "kv_start": starts,
            "samples": always,
            "sampling": sampling,
            "sample_index": indices,
            "next_token_ids": none,
        }
        columns = [decode[name] for name in ScheduledRow._fields]
        exports: tuple[Sequence[KeptState], ...] = none
        if self.prefills:
            rows = []
            for draft in self.prefills:
                draft.exports.sort(key=lambda kept: kept.position)
                draft.live.last_row = len(lives)
                rows.append(self._prefill_row(draft))
                lives.append(draft.live)
                exports += (draft.exports,)
            parts = zip(columns, zip(*rows, strict=True), strict=True)
            columns = [decode + prefill for decode, prefill in parts]
        batch = ScheduledBatch(self.step, ScheduledRow._make(columns), n)
        return Flight(batch, lives, exports, self.pinned_slots)

    def _prefill_row(self, draft: _PrefillRow) -> ScheduledRow:
        live, start, end = draft.live, draft.start, draft.end
        lookahead = self.cache.lookahead
        return ScheduledRow(
            request_id=live.request_id,
            is_decode=False,
            start=start,
            end=end,
            token_ids=live.token_ids[start:end],
            prev_row=-1,
            src_slot=draft.src_slot,
            dst_slots=(live.slots[0],),
            exports=tuple((kept.position, kept.slot) for kept in draft.exports),
            block_table=live.table,
            kv_start=min(max(live.kv_cached, start), end),
            samples=end == live.prefill_end,
            sampling=live.request.sampling,
            sample_index=live.prefill_end - live.request.num_prompt_tokens,
            next_token_ids=live.token_ids[end : end + lookahead] if lookahead else (),
        )


def _one_token_on(columns: Any, run: Run, sources: Sequence[int]) -> Any:
    """Columns of the next step of a run; `sources`: the slots to read."""
    starts, count = columns.end, len(columns.end)
    if run.moved:
        slots, tables = [*columns.dst_slots], [*columns.block_table]
        for row in run.moved:
            slots[row], tables[row] = run.requests[row].slots, run.requests[row].table
        columns = columns._replace(dst_slots=tuple(slots), block_table=tuple(tables))
        run.moved.clear()
    return columns._replace(
        start=starts,
        end=tuple([start + 1 for start in starts]),
        token_ids=((0,),) * count,
        prev_row=tuple(range(count)),
        src_slot=sources,
        kv_start=starts,
        sample_index=tuple([index + 1 for index in columns.sample_index]),
    )
