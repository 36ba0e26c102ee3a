"""How much the scheduler may do at once."""

from dataclasses import dataclass

from ..cache.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes of steps and requests. Raises ValueError on construction, naming the field."""

    max_num_seqs: int  # requests that run at once
    max_num_batched_tokens: int  # the budget: tokens of a step
    max_model_len: int  # tokens of a request, prompt and output
    num_speculative_tokens: int = 0  # K: tokens that a decode row may draft
    alignment: int = 16  # what the kernel asks of an export's offset; chunks end on multiples of it
    # states that a row may export in one step. 0: the two-pass baseline, in which a chunk ends
    # where a state is to be kept
    num_prefill_checkpoint_blocks: int = 16
    max_exports_per_step: int = 256  # states that all rows may export in one step
    export_every: int = 0  # tokens between periodic exports, a multiple of the unit; 0: none
    num_decode_states: int = 2  # newest states kept while a request generates; 0: none
    max_steps_in_flight: int = 2  # 1 or 2

    def __post_init__(self) -> None:
        for name, least in (
            ("max_num_seqs", 1),
            ("max_model_len", 2),
            ("num_speculative_tokens", 0),
            ("alignment", 1),
            ("num_prefill_checkpoint_blocks", 0),
            ("max_exports_per_step", 0),
            ("export_every", 0),
            ("num_decode_states", 0),
            ("max_steps_in_flight", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"Limits: {name} must be >= {least}, got {getattr(self, name)}")
        if self.max_steps_in_flight > 2:
            raise ValueError(
                f"Limits: max_steps_in_flight must be 1 or 2, got {self.max_steps_in_flight}"
            )
        least = self.max_num_seqs * self.row_tokens + self.alignment
        if self.max_num_batched_tokens < least:
            raise ValueError(
                f"Limits: max_num_batched_tokens must be >= max_num_seqs * (1 + K) + alignment = "
                f"{least}, so that prefills always go on; got {self.max_num_batched_tokens}"
            )

    @property
    def row_tokens(self) -> int:
        """Tokens that a decode row takes at most, and slots that a request holds."""
        return 1 + self.num_speculative_tokens

    @property
    def has_exports(self) -> bool:
        return self.num_prefill_checkpoint_blocks > 0

    def check_cache(self, cache: PrefixCache) -> None:
        """Raises ValueError if the cache can't serve these limits."""
        if cache.unit % self.alignment:
            raise ValueError(
                f"Limits: the cache's unit must be a multiple of alignment={self.alignment}, "
                f"got {cache.unit}"
            )
        if self.export_every % cache.unit:
            raise ValueError(
                f"Limits: export_every must be a multiple of the cache's unit {cache.unit}, "
                f"got {self.export_every}"
            )
        # a request that is alone reads a cached state while it writes its own
        if cache.state_pool.num_slots < self.row_tokens + 1:
            raise ValueError(
                f"Limits: there must be >= {self.row_tokens + 1} state slots (one to read, 1 + K "
                f"to write), got {cache.state_pool.num_slots}"
            )
