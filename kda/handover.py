"""How a step gets its numbers from the host and gives its tokens back: by launches of its own.

A copy takes the host 5 us where it is asked for again at once, and 40 us where the caches have
forgotten the code for it, as they do while the device works. So the step itself reads and writes
pinned memory: the host writes arrays, launches one graph, and reads an array.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..ops.handover import NUM_TURNS, Places, fetch, post


@dataclass(slots=True, eq=False)
class Turn:
    """The host's memory of one step: good until the step after the next one is filled."""

    words: Tensor  # [num_words] int32, its inputs
    tokens: memoryview  # [num_tokens] int64, what it drew, by its rows; after `wait`
    end: torch.cuda.Event | None  # None on a CPU, where a launch returns when it is over
    is_flying: bool = False  # launched, and nobody has waited for it

    def wait(self) -> None:
        """Until the step is over."""
        if self.is_flying and self.end is not None:
            self.end.synchronize()
        self.is_flying = False


class Handover:
    """Turns of packed inputs and of tokens, of which the host fills one while another is at work.

    Host and device count turns each by itself: the host when a step is launched, the device when
    it fetches. A launch that fails may stand between the two, so `restart` follows it.
    """

    def __init__(self, num_words: int, num_tokens: int, device: torch.device) -> None:
        """
        Args:
            num_words: int32 words of a step's inputs, at most.
            num_tokens: rows of logits of a step, at most.
        """
        is_cuda = device.type == "cuda"
        self.packed = torch.zeros(num_words, dtype=torch.int32, device=device)
        # drawn by the step launched last, by its rows
        self.tokens = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        self._hosts = torch.zeros(NUM_TURNS, num_words, dtype=torch.int32, pin_memory=is_cuda)
        self._posted = torch.zeros(NUM_TURNS, num_tokens, dtype=torch.int64, pin_memory=is_cuda)
        self.turns = [
            Turn(words, tokens.numpy().data, torch.cuda.Event() if is_cuda else None)
            for words, tokens in zip(self._hosts, self._posted, strict=True)
        ]
        self._stream = torch.cuda.current_stream(device) if is_cuda else None
        self._next = 0
        # [the turn of the step on the device, programs of a fetch that have arrived] int32
        self._state = torch.zeros(2, dtype=torch.int32, device=device)
        self.restart()

    def begin(self) -> int:
        """The turn to fill, when its last step is over."""
        self.turns[self._next].wait()
        return self._next

    def fetch(self, size: int, places: Places) -> None:
        """Launch the copy of the first words of the next turn into `packed`, completed."""
        fetch(self._hosts, self._state, self.tokens, self.packed[:size], places)

    def post(self, count: int) -> None:
        """Launch the copy of so many tokens to the turn that was fetched last."""
        post(self.tokens[:count], self._state, self._posted)

    def end(self) -> Turn:
        """The step is launched, and its turn is over when that is."""
        turn = self.turns[self._next]
        if turn.end is not None:
            turn.end.record(self._current_stream())
        turn.is_flying = True
        self._next = (self._next + 1) % NUM_TURNS
        return turn

    def _current_stream(self) -> torch.cuda.Stream:
        """The one kept, if it still is: torch makes a new object for each who asks, which takes
        longer than to record an event.
        """
        stream = self._stream
        assert stream is not None
        if torch._C._cuda_getCurrentRawStream(stream.device_index) != stream.cuda_stream:
            stream = self._stream = torch.cuda.current_stream(stream.device)
        return stream

    @torch.inference_mode()
    def restart(self) -> None:
        """Count anew: the turn to fill is the next one that a step fetches."""
        if self._state.is_cuda:
            torch.cuda.synchronize(self._state.device)
        before = (self._next - 1) % NUM_TURNS
        self._state.copy_(torch.tensor([before, 0], dtype=torch.int32))
