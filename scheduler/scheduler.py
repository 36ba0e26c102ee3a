"""Who runs in the next step, with what slots and blocks; and what becomes visible when a step has
retired.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..cache.hashing import Extras
from ..cache.policy import Kind, checkpoint_positions, replay_boundary
from ..cache.prefix_cache import Match, PrefixCache
from .batch import ScheduledBatch, ScheduledRow
from .chunking import plan_chunk
from .holdings import Holdings
from .live import BlockTable, Flight, KeptState, LiveRequest
from .request import Request, RequestOutput, RequestStatus


@dataclass(slots=True)
class SchedulerCounters:
    """Since start."""

    steps: int = 0
    prefill_tokens: int = 0  # computed in prefill rows
    decode_tokens: int = 0
    exports: int = 0  # states written for the cache by prefill rows
    exports_dropped: int = 0  # wanted, but over a cap or without a slot
    preemptions: int = 0
    deferrals: int = 0  # requests that waited for a writer
    failed_steps: int = 0
    slots_peak: int = 0  # slots in use, cached ones included


@dataclass(slots=True, frozen=True)
class _Pending:
    """A state that a step in flight is about to make visible."""

    writer: str  # request_id
    step: int
    depth: int  # units


@dataclass(slots=True)
class _PrefillRow:
    live: LiveRequest
    start: int
    end: int
    src_slot: int
    wanted: list[tuple[int, Kind]]  # states to export
    exports: list[KeptState] = field(default_factory=list)


@dataclass(slots=True)
class _Pass:
    """One call of schedule: what it has handed out so far."""

    step: int
    prefill_budget: int  # tokens left; those of decode rows are set aside
    next_waiting: int = 0  # index of the waiting request to look at
    admits: bool = True  # whether a waiting request may still come in
    is_starved: bool = False  # an earlier request lacks room: later ones take none
    barrier: tuple[int, int] | None = None  # order of the first request preempted in this pass
    decode_rows: list[ScheduledRow] = field(default_factory=list)
    decode_lives: list[LiveRequest] = field(default_factory=list)
    prefills: list[_PrefillRow] = field(default_factory=list)
    pinned_slots: list[int] = field(default_factory=list)


class Scheduler:
    """Requests in order of (priority, arrival); steps that are scheduled, run elsewhere, and
    committed.

    Two steps may be in flight. Nothing that a step writes is visible to others before its commit.

    Args:
        cache: owns the pools.
        max_num_seqs: requests that run at once.
        max_num_batched_tokens: the budget: tokens of a step.
        max_model_len: tokens of a request, prompt and output.
        num_speculative_tokens: K: tokens a decode row may draft.
        alignment: what the kernel asks of an export's offset; chunks end on multiples of it.
        num_prefill_checkpoint_blocks: states a row may export in one step. 0: the two-pass
            baseline, in which a chunk ends where a state is to be kept.
        max_exports_per_step: states all rows may export in one step.
        export_every: distance in tokens of periodic exports, a multiple of the unit; 0: none.
        num_decode_states: newest states kept while a request generates; 0: none.
        max_steps_in_flight: 1 or 2.

    Raises ValueError if these don't fit together.
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_speculative_tokens: int = 0,
        alignment: int = 16,
        num_prefill_checkpoint_blocks: int = 16,
        max_exports_per_step: int = 256,
        export_every: int = 0,
        num_decode_states: int = 2,
        max_steps_in_flight: int = 2,
    ) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.num_speculative_tokens = num_speculative_tokens
        self.alignment = alignment
        self.num_prefill_checkpoint_blocks = num_prefill_checkpoint_blocks
        self.max_exports_per_step = max_exports_per_step
        self.export_every = export_every
        self.max_steps_in_flight = max_steps_in_flight
        self.counters = SchedulerCounters()
        self._check_arguments(num_decode_states)
        self._drop = cache.unit if cache.lookahead else 0
        self._holdings = Holdings(cache, num_decode_states=num_decode_states)
        self._flights = self._holdings.flights
        self._lives: dict[str, LiveRequest] = {}  # all that hold or want something
        self._running: list[LiveRequest] = []  # in order
        self._waiting: list[LiveRequest] = []  # in order
        self._draining: dict[str, LiveRequest] = {}  # PREEMPTED or FINISHED, but in flight
        self._pending: dict[bytes, _Pending] = {}  # by key
        self._num_arrived = 0
        self._step = 0

    def _check_arguments(self, num_decode_states: int) -> None:
        for name, value, least in (
            ("max_num_seqs", self.max_num_seqs, 1),
            ("max_model_len", self.max_model_len, 2),
            ("num_speculative_tokens", self.num_speculative_tokens, 0),
            ("alignment", self.alignment, 1),
            ("num_prefill_checkpoint_blocks", self.num_prefill_checkpoint_blocks, 0),
            ("max_exports_per_step", self.max_exports_per_step, 0),
            ("export_every", self.export_every, 0),
            ("num_decode_states", num_decode_states, 0),
        ):
            if value < least:
                raise ValueError(f"Scheduler: {name} must be >= {least}, got {value}")
        if self.max_steps_in_flight not in (1, 2):
            raise ValueError(
                f"Scheduler: max_steps_in_flight must be 1 or 2, got {self.max_steps_in_flight}"
            )
        unit = self.cache.unit
        for name, value, divisor in (
            ("unit", unit, self.alignment),
            ("export_every", self.export_every, unit),
        ):
            if value % divisor:
                raise ValueError(f"Scheduler: {name} must be a multiple of {divisor}, got {value}")
        row_tokens = 1 + self.num_speculative_tokens
        budget = self.max_num_seqs * row_tokens + self.alignment
        if self.max_num_batched_tokens < budget:
            raise ValueError(
                f"Scheduler: max_num_batched_tokens must be >= max_num_seqs * (1 + K) + alignment "
                f"= {budget}, so that prefills always go on; got {self.max_num_batched_tokens}"
            )
        if self.cache.state_pool.num_slots < row_tokens + 1:
            raise ValueError(
                f"Scheduler: there must be >= {row_tokens + 1} state slots (one to read, 1 + K to "
                f"write), got {self.cache.state_pool.num_slots}"
            )

    # requests

    @property
    def has_work(self) -> bool:
        """Whether a request is not finished or a step has not retired."""
        return bool(self._lives or self._flights)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    def enqueue(self, request: Request) -> None:
        """Takes a request in, to run when its turn comes.

        Raises:
            ValueError: the id is in use, the prompt is empty, or the request can never fit.
        """
        name, length = request.request_id, request.num_prompt_tokens
        if name in self._lives:
            raise ValueError(f"enqueue: request_id {name!r} is in use")
        if request.status is not RequestStatus.WAITING:
            raise ValueError(f"enqueue: request {name!r} is {request.status.value} already")
        if length == 0:
            raise ValueError(f"enqueue: the prompt of {name!r} is empty")
        if length >= self.max_model_len:
            raise ValueError(
                f"enqueue: the prompt of {name!r} has {length} tokens, and the model takes "
                f"{self.max_model_len} with the output"
            )
        limit = min(length + request.sampling.max_tokens, self.max_model_len)
        # the last token is never computed
        blocks = -(-(limit - 1) // self.cache.block_size)
        if blocks > self.cache.block_pool.num_blocks:
            raise ValueError(
                f"enqueue: {name!r} may grow to {limit} tokens, which take {blocks} KV blocks of "
                f"{self.cache.block_size}, and there are {self.cache.block_pool.num_blocks}; "
                f"lower max_tokens or shorten the prompt"
            )
        sampling = request.sampling
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
        self._lives[name] = live
        insort(self._waiting, live, key=_order)

    def abort(self, request_id: str) -> bool:
        """Ends a request at its caller's wish; False if it is not there (any more).

        What its steps in flight compute is still published when they retire.
        """
        return self._end(request_id, is_discarded=False)

    def finish(self, request_id: str, reason: str = "stop") -> bool:
        """Ends a request for a reason that only the caller sees, like a stop text.

        Rows of it that are in flight ran past its end: they are discarded.
        """
        return self._end(request_id, is_discarded=True)

    def _end(self, request_id: str, *, is_discarded: bool) -> bool:
        live = self._lives.get(request_id)
        if live is None or live.request.status is RequestStatus.FINISHED:
            return False
        if live.request.status is RequestStatus.WAITING:
            _remove(self._waiting, live)
            live.request.status = RequestStatus.FINISHED
            del self._lives[request_id]
        else:
            self._stop(live, RequestStatus.FINISHED, is_discarded=is_discarded)
        return True

    def preempt(self, request_id: str) -> bool:
        """Makes a running request wait again; it resumes from what is cached of it."""
        live = self._lives.get(request_id)
        if live is None or live.request.status is not RequestStatus.RUNNING:
            return False
        self._preempt(live)
        return True

    def _preempt(self, live: LiveRequest, *, is_discarded: bool = False) -> None:
        self.counters.preemptions += 1
        live.request.num_preemptions += 1
        self._stop(live, RequestStatus.PREEMPTED, is_discarded=is_discarded)

    def _stop(self, live: LiveRequest, status: RequestStatus, *, is_discarded: bool) -> None:
        """RUNNING, or PREEMPTED and in flight, to another status: what it holds goes when its steps
        retire.
        """
        if live.request.status is RequestStatus.RUNNING:
            _remove(self._running, live)
        live.request.status = status
        if live.num_in_flight:
            live.is_discarded |= is_discarded
            # a discarded row leaves the running slot at a position that doesn't count
            live.is_dirty |= is_discarded
            self._draining[live.request_id] = live
        else:
            self._settle(live)

    def _settle(self, live: LiveRequest) -> None:
        """The last step of a request that doesn't run any more has retired."""
        self._draining.pop(live.request_id, None)
        self._holdings.release(live)
        if live.request.status is RequestStatus.PREEMPTED:
            live.request.status = RequestStatus.WAITING
            live.request.num_computed_tokens = 0
            insort(self._waiting, live, key=_order)
        else:
            del self._lives[live.request_id]

    # schedule

    def schedule(self) -> ScheduledBatch:
        """The next step. It has no rows if nothing can run now, and is then not to be committed.

        Raises:
            ValueError: as many steps as allowed are in flight.
        """
        if len(self._flights) >= self.max_steps_in_flight:
            raise ValueError(
                f"schedule: {len(self._flights)} steps are in flight; commit the oldest first"
            )
        num_decoding = sum(live.is_decoding for live in self._running)
        decode_budget = num_decoding * (1 + self.num_speculative_tokens)
        plan = _Pass(self._step, self.max_num_batched_tokens - decode_budget)
        waiting = self._waiting
        for live in list(self._running):
            while (
                plan.admits
                and plan.next_waiting < len(waiting)
                and waiting[plan.next_waiting].order < live.order
            ):
                self._try_admit(waiting[plan.next_waiting], plan)
            if live.request.status is not RequestStatus.RUNNING:
                continue  # preempted by a request before it
            if live.scheduled_end >= live.prefill_end:
                self._plan_decode(live, plan)
            else:
                self._plan_prefill(live, plan)
        while plan.admits and plan.next_waiting < len(waiting):
            self._try_admit(waiting[plan.next_waiting], plan)
        self._assign_exports(plan)
        batch = self._launch(plan)
        assert batch.rows or self._flights or not self._lives, (
            f"nothing runs, nothing is in flight: {len(self._running)} running, "
            f"{len(self._waiting)} waiting"
        )
        return batch

    def _plan_decode(self, live: LiveRequest, plan: _Pass) -> None:
        known = len(live.token_ids)
        start = live.scheduled_end
        if known + live.num_pending >= live.limit:
            return  # its last token is on its way
        if start < known:
            token_ids, prev_row = (live.token_ids[start],), -1
            if self.num_speculative_tokens:
                # as many as could still be accepted, beside the token that is sampled
                token_ids += tuple(live.drafts[: live.limit - known - 1])
        else:
            if self.num_speculative_tokens:
                return  # how many drafts were accepted is not known yet
            token_ids, prev_row = (0,), live.last_row
        end = start + len(token_ids)
        missing = -(-end // self.cache.block_size) - len(live.table.ids)
        if missing > 0 and not self._take_blocks(live, missing, plan):
            return
        src = live.slots[0]
        if start % self.cache.unit == 0:
            self._keep_running(live, start, plan)
        if live.grid_state is not None:
            position, slot = live.grid_state
            live.grid_state = None
            if self._is_wanted(live, position):
                self._holdings.keep_scratch(live, position, slot)
        live.last_row = len(plan.decode_rows)
        plan.decode_lives.append(live)
        plan.decode_rows.append(
            ScheduledRow(
                live.request.request_id,
                True,
                start,
                end,
                token_ids,
                prev_row,
                src,
                tuple(live.slots[: len(token_ids)]),
                (),
                live.table.ids,
                start,
                True,
                live.request.sampling,
                known - live.request.num_prompt_tokens + live.num_pending,
            )
        )
        live.scheduled_end = end
        live.last_step = plan.step
        live.num_in_flight += 1
        live.num_pending += 1

    def _plan_prefill(self, live: LiveRequest, plan: _Pass) -> None:
        start = live.scheduled_end
        end = self._chunk_end(live.prefill_end, start, live.plan, plan)
        if end == start:
            return
        missing = -(-end // self.cache.block_size) - len(live.table.ids)
        if missing > 0 and not self._take_blocks(live, missing, plan):
            return
        src = live.slots[0]
        if not self.num_prefill_checkpoint_blocks and start in live.plan:
            self._keep_running(live, start, plan)
        self._add_prefill(live, start, end, src, plan)

    def _chunk_end(self, num_tokens: int, start: int, stops: dict[int, Kind], plan: _Pass) -> int:
        return plan_chunk(
            start,
            num_tokens,
            plan.prefill_budget,
            budget=self.max_num_batched_tokens,
            unit=self.cache.unit,
            alignment=self.alignment,
            stops=() if self.num_prefill_checkpoint_blocks else stops,
        )

    def _add_prefill(self, live: LiveRequest, start: int, end: int, src: int, plan: _Pass) -> None:
        here = [(p, kind) for p, kind in live.plan.items() if start < p <= end]
        wanted = []
        for position, kind in here:
            if not self._is_wanted(live, position):
                continue
            if self.num_prefill_checkpoint_blocks == 0:
                # the chunk ends here: the next row of this request keeps the state
                self._announce(live, position, plan.step)
            elif len(wanted) < self.num_prefill_checkpoint_blocks:
                self._announce(live, position, plan.step)
                wanted.append((position, kind))
            else:
                self.counters.exports_dropped += 1
        plan.prefills.append(_PrefillRow(live, start, end, src, wanted))
        plan.prefill_budget -= end - start
        live.scheduled_end = end
        live.last_step = plan.step
        live.num_in_flight += 1
        live.num_pending += end == live.prefill_end

    def _is_wanted(self, live: LiveRequest, position: int) -> bool:
        """Whether nobody has kept, or is about to keep, the state after these tokens."""
        key = self._holdings.key_at(live, position)
        return key is None or not (key in self._pending or self.cache.has_state(key))

    def _announce(self, live: LiveRequest, position: int, step: int) -> None:
        key = self._holdings.key_at(live, position)
        if key is not None:
            depth = position // self.cache.unit
            self._pending[key] = _Pending(live.request_id, step, depth)

    def _keep_running(self, live: LiveRequest, position: int, plan: _Pass) -> None:
        """The row that starts at `position` reads the running slot and writes another, if that
        state is wanted.
        """
        kind = None if self.num_prefill_checkpoint_blocks else live.plan.get(position)
        if kind is None and live.is_decoding and self._holdings.num_decode_states:
            kind = Kind.DECODE
        if kind is None:
            return
        key = self._holdings.key_at(live, position)
        if key is not None:
            pending = self._pending.get(key)
            # in the baseline the row before this one has announced the state that is kept here
            is_own = (
                pending is not None
                and pending.writer == live.request_id
                and not self.num_prefill_checkpoint_blocks
            )
            if self.cache.has_state(key) or (pending is not None and not is_own):
                return
        slot = self._holdings.fork(live, position, kind)
        if slot is None:
            self.counters.exports_dropped += 1
            return
        plan.pinned_slots.append(slot)
        self._announce(live, position, plan.step)

    # room

    def _take_blocks(self, live: LiveRequest, count: int, plan: _Pass) -> bool:
        blocks = None
        if not plan.is_starved:
            while (blocks := self.cache.allocate_blocks(count)) is None:
                if not self._preempt_after(live, plan):
                    plan.is_starved = True
                    break
        if blocks is None:
            return False
        live.table.extend(blocks)
        return True

    def _preempt_after(self, live: LiveRequest, plan: _Pass) -> bool:
        """Preempts the last running request that is strictly later than `live`; whether that made
        room now.
        """
        if self._draining or not self._running:
            return False  # room comes back when their steps retire
        victim = self._running[-1]
        if victim.order <= live.order:
            return False
        if victim.is_decoding:
            plan.prefill_budget += 1 + self.num_speculative_tokens
        plan.barrier = victim.order
        frees_now = victim.num_in_flight == 0
        self._preempt(victim)
        return frees_now

    # admission

    def _try_admit(self, live: LiveRequest, plan: _Pass) -> None:
        """Admits the waiting request, passes it over until its writer has retired, or ends
        admission.
        """
        is_full = len(self._running) >= self.max_num_seqs
        if (
            plan.is_starved
            or plan.prefill_budget < self.alignment
            or (plan.barrier is not None and live.order >= plan.barrier)
            or (is_full and self._running[-1].order < live.order)
        ):
            plan.admits = False
            return
        self._holdings.extend_keys(live)
        num_tokens = len(live.token_ids)
        max_units = replay_boundary(num_tokens, self.cache.unit, self._drop) // self.cache.unit
        match = self.cache.match(live.keys, max_units)
        hit = match.source.depth if match.source else 0
        if self._is_deferred(live, hit, max_units):
            self.cache.cancel(match)
            plan.next_waiting += 1
            return
        states = self._wanted_states(live, hit * self.cache.unit, match.node.depth)
        end = self._chunk_end(num_tokens, hit * self.cache.unit, states, plan)
        if end == hit * self.cache.unit or not self._make_room(live, match, plan):
            self.cache.cancel(match)
            plan.admits = False
            return
        self.cache.accept(match, num_tokens, max_units)
        self._start(live, match, states)
        live.table.extend(self._blocks_up_to(live, end))
        src = match.source.slot if match.source else -1
        if src >= 0:
            plan.pinned_slots.append(src)
        self._add_prefill(live, hit * self.cache.unit, end, src, plan)

    def _is_deferred(self, live: LiveRequest, hit: int, max_units: int) -> bool:
        """Whether a step in flight is about to make a deeper hit possible. Once for each writer."""
        best = None
        for key, pending in self._pending.items():
            depth = pending.depth
            if hit < depth <= max_units and live.keys[depth - 1] == key:
                is_new = pending.writer not in live.deferred_to
                if is_new or live.deferred_to[pending.writer] == key:
                    hit, best = depth, (pending.writer, key, is_new)
        if best is None:
            return False
        writer, key, is_new = best
        live.deferred_to[writer] = key
        self.counters.deferrals += is_new
        return True

    def _wanted_states(self, live: LiveRequest, start: int, cached_units: int) -> dict[int, Kind]:
        cached = cached_units * self.cache.unit
        positions = checkpoint_positions(
            start,
            len(live.token_ids),
            self.cache.unit,
            drop=self._drop,
            junction=cached if cached > start else 0,
            named=live.request.checkpoint_positions,
            every=self.export_every,
        )
        return dict(positions[: self.cache.max_states_per_path])

    def _make_room(self, live: LiveRequest, match: Match, plan: _Pass) -> bool:
        """Makes sure of a seat, 1 + K slots and the KV of the whole prompt, preempting later
        requests if need be.
        """
        slots = 1 + self.num_speculative_tokens
        blocks = -(-len(live.token_ids) // self.cache.block_size) - len(match.blocks)
        for other in self._running:
            if other.order < live.order:  # what it was admitted for is not for others
                prompt = -(-other.prefill_end // self.cache.block_size)
                blocks += max(prompt - len(other.table), 0)
        while (
            len(self._running) >= self.max_num_seqs
            or self.cache.num_available_slots < slots
            or self.cache.num_available_blocks < blocks
        ):
            is_full = len(self._running) >= self.max_num_seqs
            if not self._preempt_after(live, plan) and not (
                is_full and len(self._running) < self.max_num_seqs
            ):
                plan.is_starved = True
                return False
        return True

    def _start(self, live: LiveRequest, match: Match, states: dict[int, Kind]) -> None:
        request, start = live.request, match.source.depth * self.cache.unit if match.source else 0
        if request.num_preemptions == 0:
            request.num_cached_tokens = start
        request.num_computed_tokens = start
        request.status = RequestStatus.RUNNING
        live.node = match.node
        live.table = BlockTable(match.blocks)
        live.kv_cached = match.node.depth * self.cache.unit
        live.plan = states
        live.prefill_end = len(live.token_ids)
        live.scheduled_end = start
        live.num_proven = start
        for _ in range(1 + self.num_speculative_tokens):
            slot = self.cache.allocate_slot()
            assert slot is not None
            live.slots.append(slot)
        _remove(self._waiting, live)
        insort(self._running, live, key=_order)

    def _blocks_up_to(self, live: LiveRequest, end: int) -> list[int]:
        missing = -(-end // self.cache.block_size) - len(live.table)
        blocks = self.cache.allocate_blocks(max(missing, 0))
        assert blocks is not None
        return blocks

    # the batch

    def _assign_exports(self, plan: _Pass) -> None:
        """Slots for the states that rows export: the most valuable first, none if there is no
        room.
        """
        wanted = sorted(
            (kind, index, -position)
            for index, row in enumerate(plan.prefills)
            for position, kind in row.wanted
        )
        room = self.max_exports_per_step
        for kind, index, negative in wanted:
            row, position = plan.prefills[index], -negative
            slot = self.cache.allocate_slot(kind) if room else None
            if slot is None:
                self.counters.exports_dropped += 1
                key = self._holdings.key_at(row.live, position)
                if key is not None:
                    self._pending.pop(key, None)
                continue
            room -= 1
            self.cache.state_pool.reserve(slot, position, plan.step)
            row.exports.append(KeptState(position, slot, kind, plan.step))

    def _launch(self, plan: _Pass) -> ScheduledBatch:
        rows, lives = plan.decode_rows, plan.decode_lives
        exports: list[list[KeptState]] = [[] for _ in rows]
        for draft in plan.prefills:
            draft.exports.sort(key=lambda kept: kept.position)
            draft.live.last_row = len(rows)
            rows.append(self._prefill_row(draft))
            lives.append(draft.live)
            exports.append(draft.exports)
        batch = ScheduledBatch(plan.step, tuple(rows))
        if rows:
            self._flights.append(Flight(batch, lives, exports, plan.pinned_slots))
            self._step += 1
            self.counters.steps += 1
            in_use = self.cache.state_pool.num_slots - self.cache.state_pool.num_free
            self.counters.slots_peak = max(self.counters.slots_peak, in_use)
        return batch

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
            block_table=live.table.ids,
            kv_start=min(max(live.kv_cached, start), end),
            samples=end == live.prefill_end,
            sampling=live.request.sampling,
            sample_index=live.prefill_end - live.request.num_prompt_tokens,
            next_token_ids=live.token_ids[end : end + lookahead] if lookahead else (),
        )

    # commit

    def commit(
        self,
        batch: ScheduledBatch,
        tokens: Sequence[Sequence[int]],
        *,
        drafts: Sequence[Sequence[int]] = (),
    ) -> list[RequestOutput]:
        """The step has run: takes its tokens, publishes what it wrote, ends what has ended.

        Args:
            batch: the oldest one in flight.
            tokens: for each row the ids it gave: none if it doesn't sample, one for a prefill, one
                to 1 + K for a decode row with drafts (the accepted ones and one more).
            drafts: for each row ids to try next; empty without a drafter.

        Raises:
            ValueError: it is not the oldest batch, or the tokens don't fit the rows. Nothing has
                changed then.
        """
        if not batch.rows:
            return []
        flight = self._oldest("commit", batch)
        if flight.has_failed:
            self._retire(flight)
            for index in range(len(batch.rows)):
                self._drop_row(flight, index)
            return []
        self._check_tokens(batch, tokens)
        self._retire(flight)
        outputs: list[RequestOutput] = []
        for index, live in enumerate(flight.requests):
            if live.is_discarded:
                self._drop_row(flight, index)
                continue
            self._commit_row(flight, index, tokens[index], outputs)
            if drafts:
                live.drafts = tuple(drafts[index][: self.num_speculative_tokens])
        return outputs

    def _oldest(self, caller: str, batch: ScheduledBatch) -> Flight:
        if not self._flights or self._flights[0].batch is not batch:
            oldest = self._flights[0].batch.step if self._flights else "none"
            raise ValueError(
                f"{caller}: batch must be the oldest in flight (step {oldest}), got {batch.step}"
            )
        return self._flights[0]

    def _check_tokens(self, batch: ScheduledBatch, tokens: Sequence[Sequence[int]]) -> None:
        if len(tokens) != len(batch.rows):
            raise ValueError(
                f"commit: tokens must have one entry for each of {len(batch.rows)} rows, "
                f"got {len(tokens)}"
            )
        for row, new in zip(batch.rows, tokens, strict=True):
            most = row.end - row.start if row.is_decode else row.samples
            if not int(row.samples) <= len(new) <= most:
                raise ValueError(
                    f"commit: row of {row.request_id!r} must give {int(row.samples)} to {most} "
                    f"tokens, got {len(new)}"
                )

    def _retire(self, flight: Flight) -> None:
        """What the step read may change from now on."""
        self._flights.popleft()
        for slot in flight.pinned_slots:
            self.cache.unpin(slot)
        self.cache.block_pool.release(flight.freed_blocks)
        if self._pending:
            step = flight.batch.step
            gone = [key for key, pending in self._pending.items() if pending.step == step]
            for key in gone:
                del self._pending[key]

    def _commit_row(
        self, flight: Flight, index: int, new: Sequence[int], outputs: list[RequestOutput]
    ) -> None:
        row, live, exports = flight.batch.rows[index], flight.requests[index], flight.exports[index]
        request = live.request
        is_finished = request.status is RequestStatus.FINISHED
        live.num_in_flight -= 1
        live.num_pending -= row.samples
        reason = None
        if row.samples and not is_finished:
            new, reason = _cut(new, live)
        live.token_ids.extend(new)
        if row.is_decode:
            end = known = row.start + len(new)
            self.counters.decode_tokens += len(new)
            if self.num_speculative_tokens:
                self._choose_slot(row, live, len(new))
        else:
            end, known = row.end, live.prefill_end
            self.counters.prefill_tokens += end - row.start
        request.num_computed_tokens = end
        live.num_proven = max(live.num_proven, min(end, known - self.cache.lookahead))
        if exports:
            self.counters.exports += len(exports)
            live.kept.extend(exports)
        assert live.node is not None
        if live.kept or live.num_proven >= (live.node.depth + 1) * self.cache.unit:
            self._holdings.publish(live, flight.batch.step)
        if row.samples and not is_finished:
            outputs.append(RequestOutput(row.request_id, tuple(new), reason))
            if reason is not None:
                self._stop(live, RequestStatus.FINISHED, is_discarded=True)
                return
        if not live.num_in_flight and request.status is not RequestStatus.RUNNING:
            self._settle(live)

    def _choose_slot(self, row: ScheduledRow, live: LiveRequest, num_tokens: int) -> None:
        """The verified state becomes the running one; an earlier one on the grid may be worth
        keeping.
        """
        dst, unit = row.dst_slots, self.cache.unit
        live.slots.remove(dst[num_tokens - 1])
        live.slots.insert(0, dst[num_tokens - 1])
        live.scheduled_end = row.start + num_tokens
        position = (live.scheduled_end - 1) // unit * unit
        if position > row.start and self._holdings.num_decode_states:
            live.grid_state = (position, dst[position - row.start - 1])

    def _drop_row(self, flight: Flight, index: int) -> None:
        """The row doesn't count: nothing of it is published."""
        live, step = flight.requests[index], flight.batch.step
        live.num_in_flight -= 1
        live.num_pending -= flight.batch.rows[index].samples
        written = [kept for kept in live.kept if kept.step == step]
        live.kept = [kept for kept in live.kept if kept.step != step]
        for kept in (*flight.exports[index], *written):
            self.cache.state_pool.release(kept.slot)
        if not live.num_in_flight and live.request.status is not RequestStatus.RUNNING:
            self._settle(live)

    def fail(self, batch: ScheduledBatch, error: str | BaseException) -> list[RequestOutput]:
        """The step has raised: its requests end with the error, and nothing of it or after it is
        published.

        Requests that are only in a later step in flight start again from what is cached.

        Raises:
            ValueError: `batch` is not the oldest one in flight.
        """
        if not batch.rows:
            return []
        flight = self._oldest("fail", batch)
        self._retire(flight)
        self.counters.failed_steps += 1
        for later in self._flights:
            later.has_failed = True
            for live in later.requests:
                if live.request.status is RequestStatus.RUNNING and live not in flight.requests:
                    self._preempt(live, is_discarded=True)
                live.is_discarded = live.is_dirty = True
        outputs = []
        for index, live in enumerate(flight.requests):
            if live.request.status is not RequestStatus.FINISHED:
                outputs.append(RequestOutput(live.request_id, (), "error", str(error)))
            live.is_dirty = True
            if live.request.status is RequestStatus.RUNNING:
                _remove(self._running, live)
            live.request.status = RequestStatus.FINISHED
            self._draining[live.request_id] = live
            self._drop_row(flight, index)
        return outputs

    def check_integrity(self) -> None:
        """Everything has one owner, and every list tells the same story. Slow; for tests.

        Raises AssertionError.
        """
        lives = list(self._lives.values())
        self._holdings.check_integrity(lives)
        by_status = {
            RequestStatus.RUNNING: self._running,
            RequestStatus.WAITING: self._waiting,
        }
        for status, queue in by_status.items():
            orders = [live.order for live in queue]
            assert orders == sorted(set(orders)), f"{status} is out of order: {orders}"
            expected = [live for live in lives if live.request.status is status]
            assert sorted(map(_order, expected)) == orders, f"{status} misses or doubles a request"
        assert len(self._running) <= self.max_num_seqs
        for live in lives:
            rows = sum(live in flight.requests for flight in self._flights)
            assert rows == live.num_in_flight, f"{live.request_id}: {rows=} {live.num_in_flight=}"
            is_draining = live.request.status in (RequestStatus.PREEMPTED, RequestStatus.FINISHED)
            assert is_draining == (live.request_id in self._draining), f"{live.request_id}"
            assert not is_draining or rows, f"{live.request_id} drains, but nothing is in flight"
            assert (live.node is None) == (live.request.status is RequestStatus.WAITING)
            assert len(live.slots) in (0, 1 + self.num_speculative_tokens)
        steps = {flight.batch.step for flight in self._flights}
        assert all(p.step in steps for p in self._pending.values()), "a writer is awaited in vain"
        if not self.has_work:
            cache = self.cache
            assert cache.num_available_blocks == cache.block_pool.num_blocks
            assert cache.num_available_slots == cache.state_pool.num_slots


def _order(live: LiveRequest) -> tuple[int, int]:
    return live.order


def _remove(queue: list[LiveRequest], live: LiveRequest) -> None:
    index = bisect_left(queue, live.order, key=_order)
    assert queue[index] is live
    del queue[index]


def _cut(new: Sequence[int], live: LiveRequest) -> tuple[Sequence[int], str | None]:
    """The new tokens up to where the request ends, and why it does."""
    room = live.limit - len(live.token_ids)
    for count, token in enumerate(new, 1):
        if token in live.stop_ids:
            return new[:count], "stop"
        if count == room:
            return new[:count], "length"
    return new, None
