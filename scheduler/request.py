"""What a caller asks for and what the scheduler remembers of it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen and when they end.

    Raises ValueError on construction, naming the field.
    """

    max_tokens: int = 16  # tokens to generate at most, >= 1
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # keep the smallest set of tokens with this probability, in (0, 1]
    top_k: int = 0  # keep this many of the likeliest tokens; 0 keeps all
    seed: int | None = None  # same seed, same prompt: same tokens, whatever else is in the batch
    stop: tuple[str, ...] = ()  # texts that end the output; they are not part of it
    stop_token_ids: tuple[int, ...] = ()  # ids that end the output; the id is kept
    ignore_eos: bool = False  # go on to max_tokens even if the model ends
    logprobs: int | None = None  # return this many likeliest tokens a position, in [0, 20]

    def __post_init__(self) -> None:
        def require(ok: bool, field: str, expected: str) -> None:
            if not ok:
                got = getattr(self, field)
                raise ValueError(f"SamplingParams: {field} must be {expected}, got {got!r}")

        require(self.max_tokens >= 1, "max_tokens", ">= 1")
        require(self.temperature >= 0, "temperature", ">= 0")
        require(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        require(self.top_k >= 0, "top_k", ">= 0 (0 keeps all tokens)")
        require(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "in [0, 20]")
        require(not isinstance(self.stop, str), "stop", "a tuple of strings")
        require(all(self.stop), "stop", "a tuple of non-empty strings")
