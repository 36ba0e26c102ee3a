"""What a caller asks for and what the scheduler remembers of it."""

import sys
from array import array
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

# a logit divided by less could overflow; 1e-4 below the greatest, a token has e**-100 of its chance
MIN_TEMPERATURE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end.

    Raises ValueError on construction, naming the field.
    """

    max_tokens: int = 16  # tokens to generate at most, >= 1
    temperature: float = 1.0  # 0 is greedy, and so is what is below MIN_TEMPERATURE
    top_p: float = 1.0  # keep the smallest set of tokens with this probability, in (0, 1]
    top_k: int = 0  # keep this many of the likeliest tokens; 0 keeps all
    seed: int | None = None  # same seed, same prompt: same tokens, whatever else is in the batch
    stop: tuple[str, ...] = ()  # texts that end the output; they are not part of it
    stop_token_ids: tuple[int, ...] = ()  # ids that end the output; the id is kept
    ignore_eos: bool = False  # go on to max_tokens even if the model ends
    logprobs: int | None = None  # return this many likeliest tokens a position, in [0, 20]

    def __post_init__(self) -> None:
        require = partial(_require, self)
        for name in ("max_tokens", "top_k"):
            require(_is_int(getattr(self, name)), name, "an integer")
        for name in ("seed", "logprobs"):
            value = getattr(self, name)
            require(value is None or _is_int(value), name, "an integer or None")
        for name in ("temperature", "top_p"):
            require(_is_finite(getattr(self, name)), name, "a finite number")
        require(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False")
        require(self.max_tokens >= 1, "max_tokens", ">= 1")
        require(self.temperature >= 0, "temperature", ">= 0")
        require(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        require(0 <= self.top_k < 2**31, "top_k", "in [0, 2**31) (0 keeps all tokens)")
        require(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "in [0, 20]")
        is_texts = isinstance(self.stop, (tuple, list))
        is_texts = is_texts and all(isinstance(text, str) and text for text in self.stop)
        require(is_texts, "stop", "a tuple of non-empty strings")
        require(_are_ints(self.stop_token_ids), "stop_token_ids", "a tuple of integers")


def _require(record: object, ok: bool, field: str, expected: str) -> None:
    if not ok:
        kind, got = type(record).__name__, getattr(record, field)
        raise ValueError(f"{kind}: {field} must be {expected}, got {got!r}")


def _are_ints(values: object) -> bool:
    return isinstance(values, (tuple, list)) and all(_is_int(value) for value in values)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and -sys.float_info.max <= value <= sys.float_info.max


class RequestStatus(Enum):
    """What a request is doing."""

    WAITING = "waiting"  # holds nothing
    RUNNING = "running"
    PREEMPTED = "preempted"  # will wait again as soon as its steps in flight have retired
    FINISHED = "finished"  # gone for its caller; steps of it may still be in flight


@dataclass(slots=True, eq=False)
class Request:
    """One prompt, and what became of it so far.

    Raises ValueError on construction, naming the field.
    """

    request_id: str
    prompt_token_ids: Sequence[int]  # packed on construction
    sampling: SamplingParams = SamplingParams()
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0  # lower runs first
    # states to keep, in tokens of the prompt; floored to the grid
    checkpoint_positions: Sequence[int] = ()
    cache_salt: str = ""  # requests with different salts share nothing
    lora: tuple[str, str] = ("", "")  # name and path
    spans: tuple[Hashable, ...] = ()  # `cache.hashing.Span`: images and the like

    token_ids: array = field(init=False)  # array("i"): prompt and output
    num_prompt_tokens: int = field(init=False)
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    num_cached_tokens: int = field(default=0, init=False)  # found when it was first admitted
    num_preemptions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.token_ids = _pack(self.prompt_token_ids)
        self.prompt_token_ids = array("i", self.token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        require = partial(_require, self)
        is_name = isinstance(self.request_id, str) and self.request_id != ""
        require(is_name, "request_id", "a non-empty string")
        require(_are_ints(self.eos_token_ids), "eos_token_ids", "a tuple of integers")
        require(_is_int(self.priority), "priority", "an integer")
        last = self.num_prompt_tokens
        are_within = _are_ints(self.checkpoint_positions)
        are_within = are_within and all(1 <= at <= last for at in self.checkpoint_positions)
        expected = f"a tuple of integers in [1, {last}], the prompt"
        require(are_within, "checkpoint_positions", expected)
        require(isinstance(self.cache_salt, str), "cache_salt", "a string")
        is_pair = isinstance(self.lora, (tuple, list)) and len(self.lora) == 2
        is_pair = is_pair and all(isinstance(part, str) for part in self.lora)
        require(is_pair, "lora", "two strings, name and path")
        require(isinstance(self.spans, (tuple, list)), "spans", "a tuple of Span")
        # makes room to grow now: the first append to a long array copies it, 2 ms at 128K tokens
        self.token_ids.append(0)
        self.token_ids.pop()

    @property
    def output_token_ids(self) -> array:
        return self.token_ids[self.num_prompt_tokens :]


class RequestOutput(NamedTuple):
    """What one commit brought for one request."""

    request_id: str
    token_ids: tuple[int, ...]  # new ones
    finish_reason: str | None = None  # "stop", "length" or "error"; None: it goes on
    error: str | None = None  # what went wrong, with finish_reason "error"


class RequestOutputs(Sequence[RequestOutput]):
    """What one step brought. Each output is made when it is looked at: a step has hundreds."""

    __slots__ = ("tuples",)

    def __init__(self, tuples: list[tuple]) -> None:
        """
        Args:
            tuples: the fields of each output.
        """
        self.tuples = tuples

    def __len__(self) -> int:
        return len(self.tuples)

    def __getitem__(self, index):
        return list(self)[index]

    def __iter__(self) -> Iterator[RequestOutput]:
        return map(RequestOutput._make, self.tuples)


def _pack(token_ids: Sequence[int]) -> array:
    try:
        packed = array("i", token_ids)
    except (OverflowError, TypeError) as error:
        raise ValueError(f"Request: prompt_token_ids must be ids in [0, 2**31): {error}") from None
    if packed and min(packed) < 0:
        raise ValueError(f"Request: prompt_token_ids must be ids in [0, 2**31), got {min(packed)}")
    return packed
