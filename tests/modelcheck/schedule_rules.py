"""What a step may be: rules of the scheduler said again in other words, not called."""

from typing import TYPE_CHECKING

from torch_kda.cache.state_pool import SlotStatus
from torch_kda.scheduler.batch import ScheduledBatch, ScheduledRow
from torch_kda.scheduler.live import LiveRequest
from torch_kda.scheduler.request import RequestStatus
from torch_kda.tests.modelcheck.eviction_rules import is_spent
from torch_kda.tests.modelcheck.invariants import Before, on_settled

if TYPE_CHECKING:
    from torch_kda.tests.modelcheck.world import World


@on_settled
def check_schedule(world: "World", before: Before, batch: ScheduledBatch) -> None:
    scheduler, limits = world.scheduler, world.scheduler.limits
    lives = scheduler.queues.lives
    if world.preemptions == before.preemptions:
        # nothing becomes visible (I02)
        for node in world.cache.nodes():
            assert node.key in before.nodes and node.slot in (before.slots[node.key], -1)
    assert batch.rows or before.num_flights, "nothing is in flight and nothing runs (I19, I21)"
    # budgets and widths (I16, I17)
    assert sum(row.end - row.start for row in batch.rows) <= limits.max_num_batched_tokens
    assert len({row.request_id for row in batch.rows}) == len(batch.rows) <= limits.max_num_seqs
    assert sum(len(row.exports) for row in batch.rows) <= limits.max_exports_per_step
    for row in batch.rows:
        live = lives[row.request_id]
        assert live.request.status is RequestStatus.RUNNING, f"{row} of {live.request.status}"
        _check_row(world, row)
        if before.lives[row.request_id].status is RequestStatus.WAITING:
            _check_admission(world, before, row, live)
        if not row.is_decode and limits.has_exports:
            _check_exports(world, before, batch, row, live)
            if len(lives) == 1:
                # alone, no forward is wasted (I18)
                budget, end = limits.max_num_batched_tokens, live.prefill_end
                left, was_left = -(-(end - row.end) // budget), -(-(end - row.start) // budget)
                assert left == was_left - 1, f"{row} leaves {left} forwards of {was_left}"
    _check_first_without_row(world, before, batch)
    _check_waiting(world, before)
    if before.has_draining:
        # room comes back when steps retire, so nobody is preempted for it
        assert world.preemptions == before.preemptions
    if world.preemptions == before.preemptions:
        _check_evictions(world, before, batch)


def _check_waiting(world: "World", before: Before) -> None:
    """A writer is waited for once, for one state of it that a step in flight makes visible."""
    announced = world.scheduler.holdings.announced
    for live in world.lives:
        was = before.lives[live.request_id].deferred_to
        assert all(live.deferred_to[writer] == key for writer, key in was.items())
        if live.request.status is RequestStatus.WAITING:
            new = [key for writer, key in live.deferred_to.items() if writer not in was]
            assert all(key in announced for key in new), f"{live.request_id} waits in vain"


def _check_evictions(world: "World", before: Before, batch: ScheduledBatch) -> None:
    """States that are not spent give way only to running requests and to lasting states (I12)."""
    cache, lives = world.cache, world.scheduler.queues.lives
    gone = [
        node
        for key, node in before.nodes.items()
        if node.slot != before.slots[key] and cache.find(key) is node
    ]
    taken = 0
    for row in batch.rows:
        live = lives[row.request_id]
        taken += sum(not live.plan[position].is_transient for position, _ in row.exports)
        # in two passes a row keeps the state that it starts from
        taken += not world.scope.exports and row.start in live.plan
        if before.lives[row.request_id].status is RequestStatus.WAITING:
            taken += world.scheduler.limits.row_tokens
    assert sum(not is_spent(node, before) for node in gone) <= taken, f"{gone} {batch}"


def _check_first_without_row(world: "World", before: Before, batch: ScheduledBatch) -> None:
    """The first request that goes without a row has a reason for it (I19)."""
    limits, cache = world.scheduler.limits, world.cache
    names = {row.request_id for row in batch.rows}
    tokens = sum(row.end - row.start for row in batch.rows if not row.is_decode)
    running = world.scheduler.queues.running
    # a decoding request's share is set aside, whether it is used or not
    tokens += sum(live.is_decoding for live in running) * limits.row_tokens
    tokens -= sum(not row.is_decode and row.samples for row in batch.rows) * limits.row_tokens
    is_used_up = limits.max_num_batched_tokens - tokens < limits.alignment
    for live in world.lives:
        status = live.request.status
        if live.request_id in names or status is RequestStatus.FINISHED:
            continue
        if status is RequestStatus.PREEMPTED or before.preemptions != world.preemptions:
            return
        if status is RequestStatus.WAITING:
            reason = is_used_up or _is_deferred(world, live) or not _has_room(world, live)
        elif live.is_decoding:
            if len(live.token_ids) + _num_pending(world, live) >= live.limit:
                continue  # its last token is on its way
            # how many drafts are accepted may not be known yet
            reason = _num_pending(world, live) and limits.num_speculative_tokens
            reason = reason or cache.num_available_blocks == 0
        else:
            end = min(live.prefill_end, live.scheduled_end + limits.max_num_batched_tokens)
            missing = -(-end // cache.block_size) - len(live.table)
            reason = is_used_up or cache.num_available_blocks < missing
        assert reason, f"{live.request_id} stands still, and nothing is in its way"
        if status is RequestStatus.RUNNING and not (is_used_up or _num_pending(world, live)):
            _check_nobody_overtakes(world, before, live)
        return


def _num_pending(world: "World", live: LiveRequest) -> int:
    """Tokens that steps in flight sample for a running request."""
    rows = [row for batch in world.in_flight for row in batch.rows]
    return sum(row.samples for row in rows if row.request_id == live.request_id)


def _check_nobody_overtakes(world: "World", before: Before, starved: LiveRequest) -> None:
    """Blocks that a request lacks are not given to a later one."""
    for live in world.scheduler.queues.running:
        if live.order > starved.order:
            was = before.lives[live.request_id]
            assert was.status is RequestStatus.RUNNING and was.num_blocks == len(live.table)


def _is_deferred(world: "World", live: LiveRequest) -> bool:
    announced = world.scheduler.holdings.announced
    return any(key in announced for key in live.deferred_to.values())


def _has_room(world: "World", live: LiveRequest) -> bool:
    """Whether there is a seat, a slot and KV for it, even if it finds nothing in the cache."""
    cache, limits = world.cache, world.scheduler.limits
    running = world.scheduler.queues.running
    size = cache.block_size
    blocks = -(-len(live.token_ids) // size)
    blocks += sum(max(-(-o.prefill_end // size) - len(o.table), 0) for o in running)
    return (
        len(running) < limits.max_num_seqs
        # one more may be taken by its own source
        and cache.num_available_slots > limits.row_tokens
        and cache.num_available_blocks >= blocks
    )


def _check_row(world: "World", row: ScheduledRow) -> None:
    limits, cache, states = world.scheduler.limits, world.cache, world.cache.state_pool
    live = world.scheduler.queues.lives[row.request_id]
    # the last token is never computed
    assert row.end <= (live.limit - 1 if row.is_decode else len(live.token_ids)), f"{row}"
    assert len(row.exports) <= limits.num_prefill_checkpoint_blocks
    assert len(row.block_table) * cache.block_size >= row.end
    assert 0 <= row.start < row.end
    if not row.is_decode:
        assert row.start % limits.alignment == 0
    _check_last_token(world, row, live)
    for slot in row.dst_slots:
        assert states.status[slot] is SlotStatus.RUNNING, f"{slot=} {row}"
    for position, slot in row.exports:
        assert states.status[slot] is SlotStatus.RESERVED, f"{slot=} {row}"
        assert states.position[slot] == position and position % cache.unit == 0, f"{row}"
        assert (position - row.start) % limits.alignment == 0, f"{row}"


def _check_last_token(world: "World", row: ScheduledRow, live: LiveRequest) -> None:
    """The last input token is known, or comes from the request's own row of the step before (I08).

    Tokens alone would rarely tell: most of them are alike.
    """
    known = live.token_ids[row.start : row.end]
    if row.prev_row < 0:
        assert known and list(known) == list(row.token_ids)[: len(known)], f"{row}"
        return
    before = world.in_flight[-2].rows[row.prev_row]
    assert row.is_decode and not known, f"{row}"
    assert before.request_id == row.request_id and before.samples, f"{row} after {before}"
    assert before.end == row.start, f"{row} after {before}"


def _check_admission(world: "World", before: Before, row: ScheduledRow, live: LiveRequest) -> None:
    """It starts from the deepest usable state (I09, I22, I23), and keeps what the policy says."""
    cache, unit = world.cache, world.cache.unit
    tokens, keys = len(live.token_ids), world.ghost.truths[row.request_id].keys
    drop = unit if cache.lookahead else 0
    replay = max((tokens - (0 if drop else 1)) // unit * unit - drop, 0)
    known = 0
    while known < len(keys) and keys[known] in before.nodes:
        known += 1
    depths = range(1, min(known, replay // unit) + 1)
    hit = max((depth for depth in depths if before.slots[keys[depth - 1]] >= 0), default=0) * unit
    assert row.start % unit == 0 and row.start < tokens
    for key, by in before.announced.items():
        if hit < by.depth * unit <= replay and key in keys:
            assert by.writer in live.deferred_to, f"{row.request_id} doesn't wait for {by}"
    node = cache.find(keys[row.start // unit - 1]) if row.start else None
    if node is not None and node.slot == row.src_slot:
        # it is recent now, and no longer transient (I12)
        assert node.was_hit and node.last_hit > before.tick
    running, size = world.scheduler.queues.running, cache.block_size
    if running[-1] is live:
        # there is room for all of its prompt, and for what is left of those before it (I16)
        left = sum(max(-(-o.prefill_end // size) - len(o.table), 0) for o in running)
        assert left <= cache.num_available_blocks, f"{left} blocks are needed yet"
    counters = cache.counters
    if (
        counters.evictions_for_kv + counters.evictions_for_states == before.evictions
        and world.preemptions == before.preemptions
    ):
        assert row.start == hit, f"{row.start=} {hit=}"
        assert row.kv_start == min(max(known * unit, hit), row.end), f"{row} {known=}"
        junction = known * unit if known * unit > hit + drop else 0
        expected = _states_to_keep(world, live, hit, replay, junction)
        assert list(live.plan) == expected, f"{live.plan=} {expected=}"


def _states_to_keep(
    world: "World", live: LiveRequest, start: int, replay: int, junction: int
) -> list[int]:
    """Positions by their worth, the most valuable first."""
    scope, unit, tokens = world.scope, world.cache.unit, len(live.token_ids)
    deepest = replay if scope.lookahead else tokens - tokens % unit
    wanted = [replay]
    if tokens % unit == 0 and not scope.lookahead:
        wanted.append(tokens)
    wanted.append(min(junction, deepest))
    wanted += sorted((p - p % unit for p in live.request.checkpoint_positions), reverse=True)
    if scope.every:
        wanted += [p for p in range(deepest, 0, -1) if p % scope.every == 0]
    kept = [p for i, p in enumerate(wanted) if start < p <= deepest and p not in wanted[:i]]
    return kept[: scope.path]


def _check_exports(
    world: "World",
    before: Before,
    batch: ScheduledBatch,
    row: ScheduledRow,
    live: LiveRequest,
) -> None:
    """A state worth keeping is exported unless it is there, on its way, or no slot is to be had."""
    exported, states = dict(row.exports), world.cache.state_pool
    wanted = {p: kind for p, kind in live.plan.items() if row.start < p <= row.end}
    assert exported.keys() <= wanted.keys(), f"{row} exports more than {wanted}"
    scope, keys = world.scope, world.ghost.truths[row.request_id].keys
    if (
        len(wanted) > scope.exports
        or sum(len(other.exports) for other in batch.rows) == scope.exports_per_step
    ):
        return
    for position, kind in wanted.items():
        if position in exported:
            continue
        index = position // world.cache.unit - 1
        key = keys[index] if index < len(keys) else None
        was_there = before.slots.get(key, -1) >= 0 if key else False
        is_there = was_there or (key is not None and world.cache.has_state(key))
        has_room = states.num_free or (states.num_evictable and not kind.is_transient)
        assert (
            is_there
            or key in before.announced
            or not has_room
            or _is_exported_by_other(world, batch, row, key)
        ), f"{position} of {row} could have been kept"


def _is_exported_by_other(
    world: "World", batch: ScheduledBatch, row: ScheduledRow, key: bytes | None
) -> bool:
    unit = world.cache.unit
    for other in batch.rows:
        if other is not row:
            keys = world.ghost.truths[other.request_id].keys
            if any(keys[position // unit - 1] == key for position, _ in other.exports):
                return True
    # a decode row keeps the state that it starts from
    announced = world.scheduler.holdings.announced
    return key in announced and announced[key].writer != row.request_id
