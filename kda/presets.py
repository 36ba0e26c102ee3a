"""Named model configurations."""

from typing import Any

from .config import MAX_LAYERS, ModelConfig

# `also_mla`: layers that attend beside every fourth one. The last two presets keep KDA geometry,
# gates and widths of their models (one of eight ranks for K3) in a short stack. Residuals,
# attention and experts are the plain ones of Kimi-Linear: they are no copies of those models.
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 264,  # 256 bytes and a few specials
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "also_mla": (),
        "dtype": "float32",
        "max_model_len": 32768,
        "bos_token_id": 256,
        "eos_token_ids": (257,),
        "pad_token_id": 258,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "num_attention_heads": 4,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "intermediate_size": 256,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_token": 2,
        "moe_intermediate_size": 64,
        "routed_scaling_factor": 2.446,
    },
    "kimi-linear-48b-a3b": {
        "vocab_size": 163840,
        "hidden_size": 2304,
        "num_hidden_layers": 27,
        "also_mla": (26,),
        "dtype": "bfloat16",
        "max_model_len": 1048576,
        "bos_token_id": 163584,
        "eos_token_ids": (163586,),
        "pad_token_id": 163839,
        "linear_num_heads": 32,
        "linear_head_dim": 128,
        "num_attention_heads": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 9216,
        "num_dense_layers": 1,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 1024,
        "routed_scaling_factor": 2.446,
    },
    "glm-5.3-flash-kda": {
        "vocab_size": 154880,
        "hidden_size": 4096,
        "num_hidden_layers": 4,
        "also_mla": (),
        "dtype": "bfloat16",
        "max_model_len": 1048576,
        "bos_token_id": 154820,
        "eos_token_ids": (154820,),
        "pad_token_id": 154820,
        "linear_num_heads": 64,
        "linear_head_dim": 128,
        "gate_lower_bound": -5.0,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 256,
        "qk_rope_head_dim": 0,
        "v_head_dim": 256,
        "latent_norm_eps": 1e-5,
        "intermediate_size": 12288,
        "num_dense_layers": 3,
        "num_experts": 288,
        "num_experts_per_token": 8,
        "moe_intermediate_size": 2048,
        "routed_scaling_factor": 2.5,
    },
    "kimi-k3-tp8": {
        "vocab_size": 163840,
        "hidden_size": 7168,
        "num_hidden_layers": 4,
        "also_mla": (92,),
        "dtype": "bfloat16",
        "max_model_len": 1048576,
        "bos_token_id": 163584,
        "eos_token_ids": (163586,),
        "pad_token_id": 163839,
        "linear_num_heads": 12,  # 96 over 8 ranks
        "linear_head_dim": 128,
        "gate_lower_bound": -5.0,
        "use_full_rank_gate": True,
        "num_attention_heads": 12,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "use_mla_output_gate": True,
        "intermediate_size": 2304,
        "num_dense_layers": 1,
        "num_experts": 112,  # 896 over 8 ranks; of 16 chosen 2 fall on a rank
        "num_experts_per_token": 2,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
    },
}


def model_preset(name: str, **overrides: Any) -> ModelConfig:
    """A named configuration; any field can be overridden.

    `num_hidden_layers` alone makes the stack shorter or longer in its own pattern of layers.

    Raises:
        ValueError: there is no such preset (the message lists them), or a field is wrong.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; presets are {', '.join(PRESETS)}")
    fields = {"name": name, **PRESETS[name], **overrides}
    also_mla = fields.pop("also_mla")
    num_layers = fields["num_hidden_layers"]
    # ModelConfig refuses more layers; no list is made of them before
    pattern = tuple(i for i in range(min(num_layers, MAX_LAYERS)) if i % 4 == 3 or i in also_mla)
    fields.setdefault("mla_layers", pattern)
    # a stack cut below its dense layers is dense throughout
    if "num_dense_layers" not in overrides:
        fields["num_dense_layers"] = min(fields["num_dense_layers"], max(num_layers, 0))
    return ModelConfig(**fields)
