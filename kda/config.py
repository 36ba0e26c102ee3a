"""What a model is and how an engine runs it: numbers, frozen and checked."""

import math
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

DTYPES = ("float32", "bfloat16")
CHECKPOINT_ALIGNMENT = 16  # tokens; the chunk of the KDA ops, on every device
CONV_WIDTH = 4  # taps of the short convolution
MAX_LAYERS = 1000  # far above what any model has: lists of layers are made by their number

_POSITIVE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "max_model_len",
    "linear_num_heads",
    "linear_head_dim",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "num_experts",
    "num_experts_per_token",
    "moe_intermediate_size",
)


class _Checker(NamedTuple):
    """Raises a ValueError that names the field, what was expected and what came."""

    owner: str
    config: object

    def __call__(self, ok: bool, field: str, expected: str) -> None:
        if not ok:
            got = getattr(self.config, field)
            raise ValueError(f"{self.owner}: {field} must be {expected}, got {got!r}")

    def types(self) -> None:
        """Every field is of the kind that its annotation names."""
        for field, hint in get_type_hints(type(self.config)).items():
            kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
            value = getattr(self.config, field)
            self(any(_is_of(value, kind) for kind in kinds), field, _kind_name(hint))


def _is_of(value: object, kind: Any) -> bool:
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(x, get_args(kind)[0]) for x in value)
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        return math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return not isinstance(kind, type) or isinstance(value, kind)


def _kind_name(hint: Any) -> str:
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return " or ".join(_KIND_NAMES.get(kind, str(kind)) for kind in kinds)


_KIND_NAMES = {
    int: "an integer",
    float: "a finite number",
    bool: "true or false",
    str: "a text",
    type(None): "None",
    tuple[int, ...]: "a tuple of integers",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """One model of the Kimi-Linear family: KDA layers, some NoPE MLA layers, MoE after the first.

    Raises ValueError on construction, naming the field.
    """

    name: str  # stands in messages
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    mla_layers: tuple[int, ...]  # layers that attend, counted from 0; all others are KDA
    dtype: str  # "float32" or "bfloat16": weights, activations, conv windows and KV
    max_model_len: int  # tokens, prompt and output together
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    rms_norm_eps: float = 1e-5

    linear_num_heads: int
    linear_head_dim: int  # key and value dim of a KDA head
    gate_lower_bound: float | None = None  # None: softplus gate; else floor of a token's log decay
    use_full_rank_gate: bool = False  # the KDA output gate is one matrix, not two thin ones

    num_attention_heads: int
    kv_lora_rank: int  # latent that all heads share; cached
    qk_nope_head_dim: int
    qk_rope_head_dim: int  # key part that all heads share; never rotated, the name is the files'
    v_head_dim: int
    q_lora_rank: int | None = None  # None: queries come from one full matrix
    use_mla_output_gate: bool = False  # multiply attention's output by sigmoid(g_proj(x))
    latent_norm_eps: float = 1e-6  # kimi_linear's latent norms don't follow rms_norm_eps

    intermediate_size: int  # of the dense layers
    num_dense_layers: int = 1  # the first ones; all others are MoE
    num_experts: int
    num_experts_per_token: int
    num_shared_experts: int = 1  # 0: none
    moe_intermediate_size: int
    routed_scaling_factor: float = 1.0
    moe_renormalize: bool = True  # weights of the chosen experts are scaled to sum to 1

    def __post_init__(self) -> None:
        require = _Checker(f"ModelConfig {self.name!r}", self)
        require.types()
        for field in _POSITIVE_FIELDS:
            require(getattr(self, field) >= 1, field, ">= 1")
        layers = self.num_hidden_layers
        require(1 <= layers <= MAX_LAYERS, "num_hidden_layers", f"in [1, {MAX_LAYERS}]")
        require(
            list(self.mla_layers) == sorted(set(self.mla_layers) & set(range(layers))),
            "mla_layers",
            f"ascending layer numbers in [0, {layers})",
        )
        require(self.dtype in DTYPES, "dtype", f"one of {list(DTYPES)}")
        require(self.qk_rope_head_dim >= 0, "qk_rope_head_dim", ">= 0")
        require(self.q_lora_rank is None or self.q_lora_rank >= 1, "q_lora_rank", "None or >= 1")
        bound = self.gate_lower_bound
        require(
            bound is None or -5 <= bound < 0, "gate_lower_bound", "None (softplus) or in [-5, 0)"
        )
        require(0 <= self.num_dense_layers <= layers, "num_dense_layers", f"in [0, {layers}]")
        experts = self.num_experts
        require(
            self.num_experts_per_token <= experts,
            "num_experts_per_token",
            f"<= num_experts ({experts})",
        )
        require(self.num_shared_experts >= 0, "num_shared_experts", ">= 0")
        is_token = [0 <= token < self.vocab_size for token in self.eos_token_ids]
        require(all(is_token), "eos_token_ids", f"in [0, {self.vocab_size})")

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """Layers with a recurrent state, counted from 0."""
        return tuple(i for i in range(self.num_hidden_layers) if i not in self.mla_layers)

    @property
    def num_kda_layers(self) -> int:
        return len(self.kda_layers)

    @property
    def num_mla_layers(self) -> int:
        return len(self.mla_layers)

    @property
    def linear_dim(self) -> int:
        """Channels of q, of k and of v in a KDA layer."""
        return self.linear_num_heads * self.linear_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of the short convolution: q, k and v side by side."""
        return 3 * self.linear_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Elements that one MLA layer caches for a token."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a model is run: limits of a step, the cache's grid, memory.

    Raises ValueError on construction, naming the field.
    """

    max_num_seqs: int = 16  # requests that run at once
    max_num_batched_tokens: int = 8192  # tokens of one step, draft tokens not counted
    max_model_len: int | None = None  # tokens a request may hold; None: the model's own limit
    enable_prefix_caching: bool = True
    prefix_match_unit: int = 128  # tokens; hits end on this grid
    kv_block_size: int = 64  # tokens of one KV block; divides the unit
    num_prefill_checkpoint_blocks: int = 16  # states a row may export in one step; 0: two passes
    checkpoint_interval: int = 0  # tokens between periodic checkpoints; 0: none
    num_speculative_tokens: int = 0  # K: a decode row runs 1 + K tokens
    num_state_slots: int | None = None  # None: from memory and workload, see `memory.plan_memory`
    num_kv_blocks: int | None = None  # None: likewise
    memory_bytes: int | None = None  # for all pools; None: memory_fraction of what is free
    memory_fraction: float = 0.9  # of the memory that is free once the weights are loaded
    expected_context: int = 8192  # tokens of a typical conversation
    dtype: str = "auto"  # "auto": the model's own; else "float32" or "bfloat16"
    device: str = "cpu"  # "cpu", "cuda" or "cuda:N"
    seed: int = 0  # of random weights, and of requests that bring none
    compile: bool | None = None  # the model as one compiled graph; None: on CUDA
    compile_cache: str | None = None  # folder that keeps compilations for the next start
    cuda_graphs: bool | None = None  # steps are replayed from graphs; None: on CUDA if compiled
    decode_buckets: tuple[int, ...] | None = None  # rows that get a graph; None: chosen
    prefill_buckets: tuple[int, ...] | None = None  # tokens that get a graph; None: chosen
    steps_in_flight: int | None = None  # 1 or 2; None: 2 on CUDA, where host and device overlap

    def __post_init__(self) -> None:
        require = _Checker("EngineConfig", self)
        require.types()
        for field in ("max_num_seqs", "prefix_match_unit", "kv_block_size", "expected_context"):
            require(getattr(self, field) >= 1, field, ">= 1")
        for field in ("max_model_len", "num_state_slots", "num_kv_blocks", "memory_bytes"):
            value = getattr(self, field)
            require(value is None or value >= 1, field, "None or >= 1")
        require(self.num_prefill_checkpoint_blocks >= 0, "num_prefill_checkpoint_blocks", ">= 0")
        require(self.num_speculative_tokens >= 0, "num_speculative_tokens", ">= 0")
        unit, align = self.prefix_match_unit, CHECKPOINT_ALIGNMENT
        require(unit % align == 0, "prefix_match_unit", f"a multiple of {align}")
        require(
            unit % self.kv_block_size == 0,
            "kv_block_size",
            f"a divisor of prefix_match_unit ({unit})",
        )
        interval = self.checkpoint_interval
        require(
            interval >= 0 and interval % unit == 0,
            "checkpoint_interval",
            f"0 (none) or a multiple of prefix_match_unit ({unit})",
        )
        least = self.max_num_seqs * (1 + self.num_speculative_tokens) + align
        require(
            self.max_num_batched_tokens >= least,
            "max_num_batched_tokens",
            f">= max_num_seqs * (1 + num_speculative_tokens) + {align} = {least}",
        )
        require(0 < self.memory_fraction <= 1, "memory_fraction", "in (0, 1]")
        dtypes = ["auto", *DTYPES]
        require(self.dtype in dtypes, "dtype", f"one of {dtypes}")
        is_device = self.device == "cpu" or self.device.partition(":")[0] == "cuda"
        require(is_device, "device", "'cpu', 'cuda' or 'cuda:N'")
        self._check_run(require)

    def _check_run(self, require: _Checker) -> None:
        require(not (self.cuda_graphs and self.device == "cpu"), "cuda_graphs", "off on a CPU")
        is_kept = self.compile_cache is None or self.is_compiled
        require(is_kept, "compile_cache", "None for a model that is not compiled")
        require(self.steps_in_flight in (None, 1, 2), "steps_in_flight", "None, 1 or 2")
        for field, step in (("decode_buckets", 1), ("prefill_buckets", CHECKPOINT_ALIGNMENT)):
            sizes = getattr(self, field) or ()
            is_right = list(sizes) == sorted(set(sizes)) and all(
                size > 0 and size % step == 0 for size in sizes
            )
            require(is_right, field, f"None or ascending positive multiples of {step}")

    @property
    def is_compiled(self) -> bool:
        """Whether the model runs as a compiled graph."""
        return self.device != "cpu" if self.compile is None else self.compile

    @property
    def has_graphs(self) -> bool:
        """Whether steps are recorded and replayed."""
        if self.cuda_graphs is None:
            return self.is_compiled and self.device != "cpu"
        return self.cuda_graphs

    @property
    def max_steps_in_flight(self) -> int:
        return self.steps_in_flight or (1 if self.device == "cpu" else 2)

    @property
    def max_num_checkpoints(self) -> int:
        """Capacity of a step's checkpoint list."""
        return max(1, self.max_num_seqs * self.num_prefill_checkpoint_blocks)

    def resolve(self, model: ModelConfig) -> ModelConfig:
        """The model as this engine runs it: with its dtype and its limit on length.

        Raises:
            ValueError: `max_model_len` is above the model's.
        """
        limit = self.max_model_len or model.max_model_len
        _Checker("EngineConfig", self)(
            limit <= model.max_model_len,
            "max_model_len",
            f"<= {model.max_model_len}, the limit of {model.name!r}",
        )
        dtype = model.dtype if self.dtype == "auto" else self.dtype
        return replace(model, dtype=dtype, max_model_len=limit)
