"""What a layer caches, what its kernel can export, and how memory is split."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class KDASpec:
    """State and conv window of one KDA layer on one rank, and what its kernel can do."""

    num_value_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_channels: int  # packed q | k | v
    conv_width: int = 4
    state_dtype: str = "float32"
    conv_dtype: str = "bfloat16"
    num_prefill_checkpoint_blocks: int = 16  # states a row may export in one step; 0: two passes
    checkpoint_alignment: int = 16  # tokens; offsets of exports are multiples of it
    num_speculative_blocks: int = 0  # K: tokens a decode row may draft

    def __post_init__(self) -> None:
        for name in ("state_dtype", "conv_dtype"):
            if getattr(self, name) not in ITEM_BYTES:
                got = getattr(self, name)
                raise ValueError(
                    f"KDASpec: {name} must be one of {sorted(ITEM_BYTES)}, got {got!r}"
                )
        for field in fields(self):
            if field.type is int and getattr(self, field.name) < 0:
                raise ValueError(
                    f"KDASpec: {field.name} must be >= 0, got {getattr(self, field.name)}"
                )
        if self.checkpoint_alignment < 1:
            raise ValueError("KDASpec: checkpoint_alignment must be >= 1, got 0")

    @property
    def slot_bytes(self) -> int:
        """One state and its window."""
        state = self.num_value_heads * self.head_v_dim * self.head_k_dim
        window = (self.conv_width - 1) * self.conv_channels
        return state * ITEM_BYTES[self.state_dtype] + window * ITEM_BYTES[self.conv_dtype]

    @property
    def max_slots_per_request(self) -> int:
        """Slots one request may hold in a step: the one it reads, those it writes, its exports."""
        return 2 + self.num_speculative_blocks + self.num_prefill_checkpoint_blocks

    @property
    def max_memory_usage_bytes(self) -> int:
        """Most that one request can hold of this layer's pool, whatever its length."""
        return self.max_slots_per_request * self.slot_bytes

    @classmethod
    def is_uniform_with_collection(cls, specs: Mapping[str, "KDASpec"]) -> bool:
        """Whether the layers may share one slot number: they agree in every field."""
        return len(set(specs.values())) <= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Latent KV of one MLA layer on one rank."""

    kv_lora_rank: int
    qk_rope_head_dim: int  # the shared key part; not rotated here
    dtype: str = "bfloat16"
    is_draft: bool = False  # belongs to a drafter: its KV depends on the next token

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(
                f"MLASpec: dtype must be one of {sorted(ITEM_BYTES)}, got {self.dtype!r}"
            )

    @property
    def token_bytes(self) -> int:
        return (self.kv_lora_rank + self.qk_rope_head_dim) * ITEM_BYTES[self.dtype]


def common_spec(specs: Mapping[str, KDASpec]) -> KDASpec:
    """The one spec of all KDA layers; what the group can do is what each layer it contains can do.

    Raises:
        ValueError: no layers, or layers that differ; names the first layer that does and the
            fields.
    """
    if not specs:
        raise ValueError("common_spec: there is no KDA layer")
    if not KDASpec.is_uniform_with_collection(specs):
        (first_name, first), *rest = specs.items()
        name, other = next((n, s) for n, s in rest if s != first)
        differing = [
            f"{field.name} ({getattr(first, field.name)} and {getattr(other, field.name)})"
            for field in fields(first)
            if getattr(first, field.name) != getattr(other, field.name)
        ]
        raise ValueError(
            f"common_spec: KDA layers share one slot number, so they must agree; "
            f"{first_name} and {name} differ in {', '.join(differing)}"
        )
    return next(iter(specs.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySplit:
    """How many state slots and KV blocks fit, and why this many."""

    num_slots: int
    num_blocks: int
    block_size: int  # tokens
    slot_bytes: int  # of one slot, all layers
    block_bytes: int  # of one block, all layers
    running_slots: int  # never cached: what running requests write
    expected_context: int  # tokens; as declared
    contexts: float  # cached contexts of that length which both pools hold

    def __str__(self) -> str:
        kv_tokens = self.num_blocks * self.block_size
        return (
            f"{self.num_slots:,} states = {_gib(self.num_slots * self.slot_bytes)}, "
            f"{_count(kv_tokens)} KV tokens = {_gib(self.num_blocks * self.block_bytes)}: "
            f"{self.running_slots:,} states for running requests, "
            f"and room for {self.contexts:,.1f} contexts of {self.expected_context:,} tokens"
        )


def split_memory(
    total_bytes: int,
    *,
    slot_bytes: int,
    block_bytes: int,
    block_size: int,
    expected_context: int,
    max_num_seqs: int,
    num_speculative_tokens: int = 0,
    states_per_context: int = 2,
) -> MemorySplit:
    """Splits memory so that slots and blocks run out at the same number of contexts.

    Running requests come first: each takes 1 + K slots. The rest is shared out by contexts of
    `expected_context` tokens with `states_per_context` states each: that of the replay boundary,
    and the newest one of the answer.

    Args:
        total_bytes: for both pools together.
        slot_bytes: bytes of one slot in all KDA layers.
        block_bytes: bytes of one block in all attention layers; 0 if there are none.
        block_size: tokens a block.
        expected_context: tokens of a typical request, prompt and output.
        max_num_seqs: requests that run at once.

    Raises:
        ValueError: an argument is out of range.
        RuntimeError: the memory can't hold `max_num_seqs` running requests and one expected
            context.
    """
    for name, value, least in (
        ("slot_bytes", slot_bytes, 1),
        ("block_bytes", block_bytes, 0),
        ("block_size", block_size, 1),
        ("expected_context", expected_context, 1),
        ("max_num_seqs", max_num_seqs, 1),
        ("num_speculative_tokens", num_speculative_tokens, 0),
        ("states_per_context", states_per_context, 1),
    ):
        if value < least:
            raise ValueError(f"split_memory: {name} must be >= {least}, got {value}")
    # one more slot: a request that is alone reads a cached state while it writes its own
    running_slots = max_num_seqs * (1 + num_speculative_tokens) + 1
    context_blocks = -(-expected_context // block_size)
    context_bytes = context_blocks * block_bytes + states_per_context * slot_bytes
    rest = total_bytes - running_slots * slot_bytes
    if rest < context_bytes:
        raise RuntimeError(
            f"split_memory: {_gib(total_bytes)} can't hold {running_slots} running states "
            f"({_gib(running_slots * slot_bytes)}) and one context of {expected_context} tokens "
            f"({_gib(context_bytes)}); lower max_num_seqs or expected_context, or give more memory"
        )
    contexts = rest / context_bytes
    num_blocks = int(contexts * context_blocks) if block_bytes else 0
    num_slots = (total_bytes - num_blocks * block_bytes) // slot_bytes
    return MemorySplit(
        num_slots=num_slots,
        num_blocks=num_blocks,
        block_size=block_size,
        slot_bytes=slot_bytes,
        block_bytes=block_bytes,
        running_slots=running_slots,
        expected_context=expected_context,
        contexts=contexts,
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _count(number: int) -> str:
    for size, suffix in ((10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f}{suffix}"
    return str(number)
