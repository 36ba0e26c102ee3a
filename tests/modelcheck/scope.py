"""What a search may do, and in what sizes."""

from dataclasses import dataclass
from enum import IntEnum

GOOD, WRONG, END = 0, 1, 2  # tokens: the model always says GOOD, unless a request is to end


class Act(IntEnum):
    SUBMIT = 0
    SCHEDULE = 1
    COMMIT = 2  # index: how (see `commit_ways`)
    FAIL = 3
    ABORT = 4  # index: which unfinished request, in order
    FINISH = 5
    PREEMPT = 6
    EVICT_STATE = 7
    EVICT_KV = 8


DISTURBANCES = (Act.FAIL, Act.ABORT, Act.FINISH, Act.PREEMPT, Act.EVICT_STATE, Act.EVICT_KV)

Action = tuple[Act, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A request that may be submitted. Outputs are zeros, so that they may meet other prompts."""

    prompt: tuple[int, ...]
    max_tokens: int = 1
    priority: int = 0
    named: tuple[int, ...] = ()
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Sizes of a search, and what may happen in it."""

    name: str
    requests: tuple[Template, ...]  # submitted in this order, at any time
    num_submissions: int = 0  # over all; 0: each request once
    unit: int = 2
    block_size: int = 0  # 0: the unit
    alignment: int = 1
    num_slots: int = 6
    num_blocks: int = 12
    budget: int = 6
    max_num_seqs: int = 3
    exports: int = 16  # states that a row may export in one step
    exports_per_step: int = 16
    every: int = 0
    decode_states: int = 2
    path: int = 32
    lookahead: int = 0
    drafts: int = 0
    disturbances: tuple[Act, ...] = DISTURBANCES
    max_disturbances: int | None = None  # in one run; None: any number
    ends_early: bool = False  # whether a commit may bring an end-of-sequence token
