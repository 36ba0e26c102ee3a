"""Seeded faults: small changes of the scheduler's and the cache's sources, each of which has to be
found.

A fault replaces a piece of one function's text by another and puts the new code under the old name,
so that every caller runs it.
"""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True, slots=True)
class Fault:
    """What is broken, where, and which scope of the checker meets it first."""

    name: str
    where: str  # module below torch_kda, and the function in it
    old: str  # occurs once in the function's text
    new: str
    scope: str = "unit 2, block 1"
    test: str = ""  # finds what costs speed but is not wrong: a node id of pytest

    @property
    def function(self) -> FunctionType:
        module, _, path = self.where.partition(":")
        found: Any = import_module(f"torch_kda.{module}")
        for name in path.split("."):
            found = inspect.getattr_static(found, name)
        return getattr(found, "fget", found)


@contextmanager
def applied(fault: Fault) -> Iterator[None]:
    """The product has this fault inside the block.

    Raises:
        LookupError: the text to replace is not there, or not once: the fault has to be written
            anew.
    """
    function = fault.function
    intact = function.__code__
    function.__code__ = _broken(fault, function)
    try:
        yield
    finally:
        function.__code__ = intact


def _broken(fault: Fault, function: FunctionType) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    count = source.count(fault.old)
    if count != 1:
        raise LookupError(f"{fault.name}: {fault.old!r} occurs {count} times in {fault.where}")
    space: dict[str, Any] = {}
    # decorators are of no use to the bare code, and annotations may name what only checkers load
    source = "from __future__ import annotations\n" + source.replace(fault.old, fault.new)
    exec(
        compile(source.replace("@property\n", ""), fault.where, "exec"), function.__globals__, space
    )
    return space[function.__name__].__code__


POLICY, CHUNKING, HASHING = "cache.policy:", "scheduler.chunking:", "cache.hashing:"
CACHE, STATES = "cache.prefix_cache:PrefixCache.", "cache.state_pool:StatePool."
ORDER, HOLDINGS = "cache.eviction:EvictionOrder.", "scheduler.holdings:Holdings."
QUEUES, PASS, SCHEDULER = (
    "scheduler.queues:Queues.",
    "scheduler.planning:Pass.",
    "scheduler.scheduler:Scheduler.",
)

VISIBILITY = (
    Fault(
        "KV published when its step is scheduled",
        PASS + "_add_prefill",
        "live.scheduled_end = end",
        "live.scheduled_end = live.num_proven = end; self.holdings._publish_kv(live)",
    ),
    Fault(
        "states published when their step is scheduled",
        HOLDINGS + "publish",
        "has_retired = kept.step <= step",
        "has_retired = True",
        scope="decode states",
    ),
    Fault(
        "a failed step's requests leave their running state behind",
        SCHEDULER + "fail",
        "# what the running slot holds now is not known\n        live.is_discarded = True",
        "pass",
        scope="unit 2, alignment 2",
    ),
    Fault(
        "steps after a failed one count",
        SCHEDULER + "fail",
        "later.has_failed = True",
        "pass",
    ),
    Fault(
        "requests of steps after a failed one leave their running state behind",
        SCHEDULER + "fail",
        "            live.is_discarded = True\n    return outputs",
        "            pass\n    return outputs",
        scope="failures below and above",
    ),
    Fault(
        "what runs past the end of a request counts",
        SCHEDULER + "_commit_row",
        "self.queues.finish(live, is_discarded=True)",
        "self.queues.finish(live, is_discarded=False)",
        scope="ends at any token",
    ),
    Fault(
        "the running state is keyed though it is not on the grid",
        HOLDINGS + "_keep_last",
        "position % self.cache.unit == 0 and ",
        "",
    ),
    Fault(
        "draft KV counts before the tokens that it depends on are known",
        SCHEDULER + "_commit_row",
        "known - self.cache.lookahead",
        "known",
        scope="draft layers",
    ),
)

POSITIONS = (
    Fault(
        "export told one token too early",
        PASS + "_prefill_row",
        "(kept.position, kept.slot)",
        "(kept.position - 1, kept.slot)",
    ),
    Fault(
        "replay boundary at the last token",
        POLICY + "replay_boundary",
        "(num_tokens - (drop == 0))",
        "num_tokens",
    ),
    Fault(
        "replay boundary one unit too early",
        POLICY + "replay_boundary",
        "// unit * unit - drop",
        "// unit * unit - drop - unit",
    ),
    Fault(
        "replay boundary without the unit that draft KV costs",
        POLICY + "replay_boundary",
        "// unit * unit - drop",
        "// unit * unit",
        scope="draft layers",
    ),
    Fault(
        "exact end not kept",
        POLICY + "checkpoint_positions",
        "num_tokens == deepest",
        "num_tokens < deepest",
    ),
    Fault(
        "deepest position left out",
        POLICY + "checkpoint_positions",
        "position <= deepest",
        "position < deepest",
    ),
    Fault(
        "start of the prefill kept again",
        POLICY + "checkpoint_positions",
        "if start < position",
        "if start <= position",
    ),
    Fault(
        "junction one unit too early",
        POLICY + "checkpoint_positions",
        "min(junction, deepest)",
        "min(junction - unit, deepest)",
        scope="named and junctions",
    ),
    Fault(
        "chunk takes one token too many",
        CHUNKING + "plan_chunk",
        "start + available",
        "start + available + 1",
    ),
    Fault(
        "chunk end not aligned",
        CHUNKING + "plan_chunk",
        "end -= (end - start) % alignment",
        "pass",
        scope="unit 4, block 2, alignment 2",
    ),
    Fault(
        "chunk may be empty",
        CHUNKING + "plan_chunk",
        "on_grid > start",
        "on_grid >= start",
        scope="unit 4, block 2, alignment 2",
    ),
    Fault(
        "chunk ends on the grid at the cost of a forward",
        CHUNKING + "plan_chunk",
        "num_tokens - on_grid, budget) ==",
        "num_tokens - on_grid, budget) >=",
        scope="unit 4, block 2, alignment 2",
    ),
    Fault(
        "chunk stops where it starts",
        CHUNKING + "plan_chunk",
        "start < stop",
        "start <= stop",
        scope="two passes",
    ),
)

PINS = (
    Fault(
        "source not pinned while its reader is in flight",
        PASS + "_start",
        "self.pinned_slots.append(match.source.slot)",
        "self.cache.unpin(match.source.slot)",
    ),
    Fault(
        "source of a decode row that keeps it not pinned",
        PASS + "_keep_running",
        "self.pinned_slots.append(slot)",
        "self.cache.unpin(slot)",
        scope="decode states",
    ),
    Fault(
        "pins stay after the step",
        HOLDINGS + "retire",
        "self.cache.unpin(slot)",
        "pass",
    ),
    Fault(
        "pin of a match stays though it was not used",
        CACHE + "cancel",
        "self.unpin(match.source.slot)",
        "pass",
        scope="three slots",
    ),
    Fault(
        "only the deepest unit of KV pinned",
        CACHE + "match",
        "step.references += 1",
        "step.references += step is node",
    ),
    Fault(
        "KV stays referenced",
        CACHE + "_unreference",
        "step.references -= 1",
        "step.references -= step is node",
    ),
    Fault(
        "DOOMED slot freed though it is read",
        STATES + "release",
        "if self.pins[slot]:",
        "if False:",
        scope="decode states",
    ),
)

EXITS = (
    Fault(
        "leak when a request finishes",
        QUEUES + "settle",
        "self._holdings.release(live)",
        "live.request.status is RequestStatus.FINISHED or self._holdings.release(live)",
    ),
    Fault(
        "leak when a request is preempted",
        QUEUES + "settle",
        "self._holdings.release(live)",
        "live.request.status is RequestStatus.PREEMPTED or self._holdings.release(live)",
    ),
    Fault(
        "leak when a request is aborted with steps in flight",
        SCHEDULER + "_commit_row",
        "elif not live.num_in_flight and",
        "elif False and",
    ),
    Fault(
        "exports of a failed step leak",
        SCHEDULER + "_drop_row",
        "(*flight.exports[index], *written)",
        "written",
    ),
    Fault(
        "kept states of a failed step leak",
        SCHEDULER + "_drop_row",
        "(*flight.exports[index], *written)",
        "flight.exports[index]",
        scope="decode states",
    ),
    Fault(
        "running slot leaks",
        HOLDINGS + "release",
        "(*live.slots, *",
        "(*live.slots[1:], *",
    ),
    Fault(
        "own blocks leak",
        HOLDINGS + "release",
        "self.cache.block_pool.release(own.tolist())",
        "pass",
    ),
    Fault(
        "blocks that were given up in flight leak",
        HOLDINGS + "retire",
        "self.cache.block_pool.release(flight.freed_blocks)",
        "pass",
        scope="equal prompts",
    ),
    Fault(
        "blocks freed though a step in flight reads them",
        HOLDINGS + "_publish_kv",
        "if live.num_in_flight:",
        "if False:",
        scope="equal prompts",
    ),
    Fault(
        "everything freed at once when a request stops in flight",
        QUEUES + "_stop",
        "if live.num_in_flight:",
        "if False:",
    ),
    Fault(
        "the table keeps blocks that another was first with",
        HOLDINGS + "_publish_kv",
        "live.table.replace(replaced)",
        "pass",
        scope="equal prompts",
    ),
)

EVICTION = (
    Fault(
        "state evicted while it is read",
        ORDER + "update",
        "has_state and not is_read",
        "has_state",
    ),
    Fault(
        "KV evicted while it is used",
        ORDER + "update",
        "node.depth > 0 and not node.references and",
        "node.depth > 0 and",
    ),
    Fault(
        "KV evicted above other KV",
        ORDER + "update",
        " and not node.children",
        "",
    ),
    Fault(
        "state outlives its KV",
        CACHE + "_remove",
        "self._free_state(node)",
        "pass",
    ),
    Fault(
        "states by last use, not by last hit",
        ORDER + "update",
        "_put(self._states, node, node.last_hit",
        "_put(self._states, node, -node.last_used",
    ),
    Fault(
        "a state that was hit counts as spent",
        CACHE + "_refresh",
        "not node.was_hit and ",
        "",
        scope="decode states",
    ),
    Fault(
        "one state too many on a path",
        CACHE + "_make_path_room",
        "while len(above) + 1 + below >",
        "while len(above) + below >",
        scope="one state a path",
    ),
    Fault(
        "the deepest state of a path gives way",
        CACHE + "_make_path_room",
        "(below and kind > victim.kind)",
        "kind >= victim.kind",
        scope="one state a path",
    ),
    Fault(
        "the state of a path that is worth most gives way",
        CACHE + "_make_path_room",
        "max(victims, key=worthlessness, default=None)",
        "min(victims, key=worthlessness, default=None)",
        scope="two states a path",
    ),
    Fault(
        "a READY key gets another slot",
        CACHE + "publish",
        "if node.slot >= 0:",
        "if False:",
        scope="equal prompts",
    ),
)

KEYS = (
    Fault(
        "salt is not part of the key",
        HASHING + "_extras_of",
        "if value:",
        'if value and name != "salt":',
        scope="salt",
    ),
    Fault(
        "keys are not chained",
        HASHING + "extend_keys",
        'b"".join((key, unit_bytes, suffix))',
        'b"".join((root, b"%d" % i, unit_bytes, suffix))',
        scope="named and junctions",
    ),
    Fault(
        "key leaves out its last token",
        HASHING + "extend_keys",
        "data[first * width : last * width]",
        "data[first * width : (last - 1) * width]",
        scope="salt",
    ),
    Fault(
        "key leaves out the tokens that draft KV depends on",
        HASHING + "extend_keys",
        "last = (i + 1) * unit + lookahead",
        "last = (i + 1) * unit",
        scope="draft layers",
    ),
)

ROWS = (
    Fault(
        "one slot exported twice",
        PASS + "_prefill_row",
        "(kept.position, kept.slot)",
        "(kept.position, draft.exports[0].slot)",
        scope="periodic",
    ),
    Fault(
        "row reads its destination",
        PASS + "_prefill_row",
        "src_slot=draft.src_slot",
        "src_slot=live.slots[0]",
    ),
    Fault(
        "row writes its source",
        PASS + "_prefill_row",
        "dst_slots=(live.slots[0],)",
        "dst_slots=(max(draft.src_slot, 0),)",
    ),
    Fault(
        "decode row reads the slot that it goes on in",
        PASS + "_plan_decode",
        "src,\n",
        "live.slots[0],\n",
        scope="decode states",
    ),
    Fault(
        "KV of new tokens not written",
        PASS + "_prefill_row",
        "kv_start=min(max(live.kv_cached, start), end)",
        "kv_start=end",
    ),
    Fault(
        "shared KV written again",
        PASS + "_prefill_row",
        "kv_start=min(max(live.kv_cached, start), end)",
        "kv_start=start",
        scope="equal prompts",
    ),
    Fault(
        "last token of the step before taken from another row",
        PASS + "_plan_decode",
        "(0,), live.last_row",
        "(0,), live.last_row - 1",
        scope="equal prompts",
    ),
    Fault(
        "runs one token past its end",
        PASS + "_plan_decode",
        "known + live.num_pending >= live.limit",
        "known + live.num_pending > live.limit",
        scope="blocks for one",
    ),
    Fault(
        "state of another draft becomes the running one",
        SCHEDULER + "_choose_slot",
        "live.slots.remove(slots[num_tokens - 1])\n    live.slots.insert(0, slots[num_tokens - 1])",
        "live.slots.remove(slots[-1])\n    live.slots.insert(0, slots[-1])",
        scope="one draft",
    ),
    Fault(
        "kept scratch state is one token off",
        SCHEDULER + "_choose_slot",
        "slots[position - row.start - 1]",
        "slots[position - row.start]",
        scope="one draft",
    ),
)

ORDERING = (
    Fault(
        "a request that can never fit is taken in",
        SCHEDULER + "enqueue",
        "blocks > self.cache.block_pool.num_blocks",
        "blocks > self.cache.block_pool.num_blocks + 1",
        scope="never fits",
    ),
    Fault(
        "an earlier request is preempted",
        PASS + "_preempt_after",
        "or running[-1].order <= live.order",
        "",
        scope="blocks for one",
    ),
    Fault(
        "one request more than there are seats",
        PASS + "_is_full",
        ">= self.limits.max_num_seqs",
        "> self.limits.max_num_seqs",
        scope="one at a time",
    ),
    Fault(
        "decode rows not set aside from the budget",
        PASS + "plan",
        "self.budget -= num_decoding * self.limits.row_tokens",
        "pass",
        scope="no decode states",
    ),
    Fault(
        "a prefill costs no budget",
        PASS + "_add_prefill",
        "self.budget -= end - start",
        "pass",
    ),
    Fault(
        "a writer is announced after its step has retired",
        HOLDINGS + "retire",
        "del self.announced[key]",
        "pass",
    ),
    Fault(
        "nobody waits for a writer",
        "scheduler.admission:find_writer",
        "return found",
        "return None",
        scope="equal prompts",
    ),
)

FAULTS = (
    *VISIBILITY,
    *POSITIONS,
    *PINS,
    *EXITS,
    *EVICTION,
    *KEYS,
    *ROWS,
    *ORDERING,
)
