"""One step in numbers: what the scheduler decided and all that the runner needs to know."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .request import SamplingParams


class ScheduledRow(NamedTuple):
    """The share of one request in one step: its tokens [start, end), from the state at start.

    A named tuple, because a step makes hundreds of rows. `block_table` and `token_ids` may be views
    of what the request keeps: what they show never changes afterwards.
    """

    request_id: str
    is_decode: bool  # runs in the decode segment (1 + K tokens), else in the prefill segment
    start: int  # tokens whose state and KV exist before this step
    end: int  # tokens whose state and KV exist after it
    token_ids: Sequence[int]  # ids of [start, end); the last one is 0 where prev_row says otherwise
    prev_row: int  # row of the step before whose sampled token is the last input token; -1: known
    src_slot: int  # state slot read; -1: the state is zero (start == 0)
    dst_slots: tuple[int, ...]  # slots written: the final state (prefill), one a token (decode)
    exports: tuple[tuple[int, int], ...]  # (position, slot) inside the row, ascending
    block_table: Sequence[int]  # KV block ids that cover [0, end), in order; an int32 array
    kv_start: int  # KV of positions below this is already in the blocks and is not written again
    samples: bool  # whether the last token's logits give a new token
    sampling: SamplingParams
    sample_index: int  # number of tokens generated before this one: the random stream's position
    next_token_ids: Sequence[int] = ()  # known ids from `end` on that draft layers look ahead to


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step. Decode rows come first. Never changed after it is made."""

    step: int
    rows: tuple[ScheduledRow, ...]

    @property
    def num_decode_rows(self) -> int:
        return bisect_left(self.rows, True, key=lambda row: not row.is_decode)

    @property
    def num_prefill_tokens(self) -> int:
        return sum(row.end - row.start for row in self.rows[self.num_decode_rows :])
