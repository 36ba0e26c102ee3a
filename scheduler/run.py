"""Decode rows that come again step after step, with next to nothing to decide."""

from collections.abc import Sequence

from .live import Flight, LiveRequest


class Run:
    """The rows of a step of decode rows alone, and of all steps after it, which have the same rows.

    Such a step looks at no request. What it changes in all of them alike stands here, once, and
    their own counters are those of before the run until `write_back`. Only a row that needs a
    block, or publishes, is looked at by itself.
    """

    __slots__ = (
        "computed",
        "last_step",
        "lookahead",
        "moved",
        "newest_step",
        "requests",
        "scheduled",
        "stop_ids",
    )

    def __init__(self, flight: Flight, lookahead: int) -> None:
        """
        Args:
            flight: the only one in the air; decode rows of one token each, of all that run.
            lookahead: tokens that KV of draft layers waits for.
        """
        requests, columns = flight.requests, flight.batch.columns
        self.requests = requests
        self.lookahead = lookahead
        self.scheduled: Sequence[int] = columns.end  # of each request: tokens of the newest step
        self.computed: Sequence[int] = columns.start  # of each: tokens of the last retired step
        self.newest_step: int = flight.batch.step
        # the first request to reach its limit does so when this step retires
        left = min([live.limit - end for live, end in zip(requests, columns.end, strict=True)])
        self.last_step = self.newest_step + left - 1
        self.stop_ids = frozenset[int]().union(*[live.stop_ids for live in requests])
        # rows whose blocks may not be those of the newest step any more
        self.moved = set(range(len(requests)))

    def goes_on(self, step: int, tokens: Sequence[Sequence[int]]) -> bool:
        """Whether no request ends with these tokens of a step of the run."""
        return step < self.last_step and self.stop_ids.isdisjoint([token for (token,) in tokens])

    def write_back(self, row: int, num_in_flight: int) -> LiveRequest:
        """Makes the request's own counters true."""
        live = self.requests[row]
        live.scheduled_end = self.scheduled[row]
        live.num_computed = self.computed[row]
        live.num_proven = max(live.num_proven, live.num_computed - self.lookahead)
        live.num_in_flight = num_in_flight
        live.last_step = self.newest_step
        live.last_row = row
        return live
