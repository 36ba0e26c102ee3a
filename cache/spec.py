"""What a layer caches, and what its kernel can export."""

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
    def state_bytes(self) -> int:
        """One recurrent state."""
        elements = self.num_value_heads * self.head_v_dim * self.head_k_dim
        return elements * ITEM_BYTES[self.state_dtype]

    @property
    def conv_bytes(self) -> int:
        """One conv window."""
        window = (self.conv_width - 1) * self.conv_channels
        return window * ITEM_BYTES[self.conv_dtype]

    @property
    def slot_bytes(self) -> int:
        """One state and its window."""
        return self.state_bytes + self.conv_bytes

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

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(
                f"MLASpec: dtype must be one of {sorted(ITEM_BYTES)}, got {self.dtype!r}"
            )

    @property
    def token_bytes(self) -> int:
        """Latent of one token."""
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
