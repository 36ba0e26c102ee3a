"""The text of one output as it grows: decoded in whole characters, ended by stop strings."""

from collections.abc import Sequence

from .tokenizer import Tokenizer


class OutputText:
    """Turns the tokens of one output into pieces of text; the pieces joined are the output's text.

    Text that may be the beginning of a stop string waits until it is known not to be.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """
        Args:
            stop: texts that end the output.
        """
        self._stream = tokenizer.stream()
        self._stop = tuple(stop)
        self._held = ""
        self.is_stopped = False  # a stop string has come; nothing follows

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens release, without a stop string and what comes after it."""
        return self._release(self._stream.push(token_ids))

    def finish(self) -> str:
        """What still waits when the output ends for another reason."""
        piece = self._release(self._stream.finish())
        held, self._held = self._held, ""
        return piece + held

    def _release(self, new: str) -> str:
        if not self._stop:
            return new
        if self.is_stopped:
            return ""
        text = self._held + new
        starts = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        if starts:
            self.is_stopped = True
            self._held = ""
            return text[: min(starts)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
