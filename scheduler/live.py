"""What the scheduler keeps of a request, and of a step in flight."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..cache.hashing import Extras
from ..cache.policy import Kind
from ..cache.prefix_cache import Node
from .batch import ScheduledBatch
from .request import Request


@dataclass(slots=True)
class KeptState:
    """A state on its way into the cache: its slot is RESERVED or WRITTEN."""

    position: int
    slot: int
    kind: Kind
    step: int  # that writes it


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request and all that it holds. Nothing of the second half is held while it waits.

    While it is in a `Run`, its counters (from `num_computed` on) are those of before.
    """

    request: Request
    order: tuple[int, int]  # priority, arrival
    limit: int  # tokens, prompt included, at which it ends
    extras: Extras
    stop_ids: frozenset[int]
    token_ids: array  # the request's own
    keys: list[bytes] = field(default_factory=list)  # of the units that are filled
    deferred_to: dict[str, bytes] = field(default_factory=dict)  # writer -> key it waited for
    drafts: Sequence[int] = ()  # proposed ids after the last token

    node: Node | None = None  # deepest cached unit of its KV; the path down to it is pinned
    # array("i") of KV blocks; what it shows never changes, so rows share it
    table: array = field(default_factory=lambda: array("i"))
    slots: tuple[int, ...] = ()  # the running state first, then scratch
    grid_state: tuple[int, int] | None = None  # verified state in a scratch slot: position, slot
    kept: list[KeptState] = field(default_factory=list)
    decode_states: list[tuple[Node, int]] = field(default_factory=list)  # node, slot; oldest first
    plan: dict[int, Kind] = field(default_factory=dict)  # states to keep of this prefill
    prefill_end: int = 0  # tokens of this prefill, those found included
    kv_cached: int = 0  # tokens whose KV was found
    num_computed: int = 0  # tokens that have state and KV now
    scheduled_end: int = 0  # num_computed when all steps have retired
    num_proven: int = 0  # tokens whose KV is complete, draft layers included
    num_in_flight: int = 0  # steps with a row of it
    last_step: int = -1  # newest step with a row of it
    last_row: int = -1  # that row
    is_discarded: bool = False  # steps in flight don't count, nor what the running slot holds

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_decoding(self) -> bool:
        return self.scheduled_end >= self.prefill_end


@dataclass(slots=True, eq=False)
class Flight:
    """A step between schedule and commit: what has to be done when it retires."""

    batch: ScheduledBatch
    requests: list[LiveRequest]  # of the rows
    exports: tuple[Sequence[KeptState], ...]  # of the rows
    pinned_slots: list[int]  # kept states that it reads
    freed_blocks: list[int] = field(default_factory=list)  # that it may still read
    has_failed: bool = False


@dataclass(slots=True)
class SchedulerCounters:
    """Since start."""

    steps: int = 0
    prefill_tokens: int = 0  # computed in prefill rows
    decode_tokens: int = 0  # generated in decode rows
    exports: int = 0  # states that prefill rows wrote for the cache
    exports_dropped: int = 0  # wanted, but over a cap or without a slot
    preemptions: int = 0
    deferrals: int = 0  # times that a request began to wait for a writer
    failed_steps: int = 0
    slots_peak: int = 0  # slots in use, cached ones included
