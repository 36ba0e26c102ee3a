"""Requests by what they are doing, each in the order of (priority, arrival)."""

from bisect import bisect_left, insort

from .holdings import Holdings
from .live import LiveRequest
from .request import RequestStatus
from .run import Run


class Queues:
    """Every request that is not gone is in exactly one of waiting, running and draining."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self.lives: dict[str, LiveRequest] = {}  # all of them, by request_id
        self.waiting: list[LiveRequest] = []
        self.running: list[LiveRequest] = []
        self.draining: dict[str, LiveRequest] = {}  # PREEMPTED or FINISHED, with steps in flight
        self.run: Run | None = None  # of all that run

    def add(self, live: LiveRequest) -> None:
        """A new request waits."""
        self.lives[live.request_id] = live
        insort(self.waiting, live, key=order_of)

    def start(self, live: LiveRequest) -> None:
        """WAITING -> RUNNING."""
        assert self.run is None
        live.request.status = RequestStatus.RUNNING
        _remove(self.waiting, live)
        insort(self.running, live, key=order_of)

    def preempt(self, live: LiveRequest, *, is_discarded: bool = False) -> None:
        """RUNNING -> WAITING, by way of PREEMPTED while steps of it are in flight."""
        self.end_run()
        live.request.num_preemptions += 1
        self._stop(live, RequestStatus.PREEMPTED, is_discarded=is_discarded)

    def finish(self, live: LiveRequest, *, is_discarded: bool) -> None:
        """Any status -> FINISHED. Its rows in flight are discarded, or still published."""
        if live.request.status is RequestStatus.WAITING:
            _remove(self.waiting, live)
            live.request.status = RequestStatus.FINISHED
            del self.lives[live.request_id]
        else:
            self.end_run()
            self._stop(live, RequestStatus.FINISHED, is_discarded=is_discarded)

    def end_run(self) -> None:
        """From here on each request is looked at again."""
        self.write_back()
        self.run = None

    def write_back(self) -> None:
        """Makes the counters of the requests in a run true."""
        run = self.run
        if run is not None:
            num_in_flight = len(self._holdings.flights)
            for row in range(len(run.requests)):
                run.write_back(row, num_in_flight)

    def _stop(self, live: LiveRequest, status: RequestStatus, *, is_discarded: bool) -> None:
        if live.request.status is RequestStatus.RUNNING:
            _remove(self.running, live)
        live.request.status = status
        if live.num_in_flight:
            live.is_discarded |= is_discarded
            self.draining[live.request_id] = live
        else:
            self.settle(live)

    def settle(self, live: LiveRequest) -> None:
        """The last step of a request that doesn't run any more has retired."""
        self.draining.pop(live.request_id, None)
        self._holdings.release(live)
        if live.request.status is RequestStatus.PREEMPTED:
            live.request.status = RequestStatus.WAITING
            live.num_computed = 0
            insort(self.waiting, live, key=order_of)
        else:
            del self.lives[live.request_id]


def order_of(live: LiveRequest) -> tuple[int, int]:
    """The key of every queue: (priority, arrival)."""
    return live.order


def _remove(queue: list[LiveRequest], live: LiveRequest) -> None:
    index = bisect_left(queue, live.order, key=order_of)
    assert queue[index] is live
    del queue[index]
