"""One step in numbers: what the scheduler decided and all that the runner needs to know."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from .request import SamplingParams


class ScheduledRow(NamedTuple):
    """The share of one request in one step: its tokens [start, end), from the state at start.

    `block_table` and `token_ids` may be views of what the request keeps: what they show never
    changes afterwards.
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
    block_table: Sequence[int]  # KV block ids that cover [0, end), in order: array("i")
    kv_start: int  # KV of positions below this is already in the blocks and is not written again
    samples: bool  # whether the last token's logits give a new token
    sampling: SamplingParams
    sample_index: int  # number of tokens generated before this one: the random stream's position
    next_token_ids: Sequence[int] = ()  # known ids from `end` on that draft layers look ahead to


@dataclass(frozen=True, eq=False)
class ScheduledBatch:
    """One step. Decode rows come first. Never changed after it is made.

    A step has hundreds of rows, and who works on all of them works on columns.
    """

    step: int
    columns: Any  # a ScheduledRow of sequences: each field of all rows
    num_decode_rows: int

    @classmethod
    def of(cls, step: int, rows: Iterable[ScheduledRow]) -> "ScheduledBatch":
        """The batch of these rows."""
        fields = list(zip(*rows, strict=True)) or [()] * len(ScheduledRow._fields)
        columns: Any = ScheduledRow._make(fields)
        return cls(step, columns, sum(columns.is_decode))

    @property
    def num_rows(self) -> int:
        return len(self.columns.start)

    @cached_property
    def rows(self) -> tuple[ScheduledRow, ...]:
        """The same, row by row."""
        return tuple(map(ScheduledRow._make, zip(*self.columns, strict=True)))

    @property
    def prefill_rows(self) -> tuple[ScheduledRow, ...]:
        """Those after the decode rows."""
        columns = [column[self.num_decode_rows :] for column in self.columns]
        return tuple(map(ScheduledRow._make, zip(*columns, strict=True)))

    @property
    def num_prefill_tokens(self) -> int:
        columns, first = self.columns, self.num_decode_rows
        return sum(columns.end[first:]) - sum(columns.start[first:])
