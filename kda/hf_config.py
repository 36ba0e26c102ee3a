"""Hugging Face `config.json` of model type kimi_linear, read and written."""

from collections.abc import Mapping
from typing import Any

from .config import CONV_WIDTH, MAX_LAYERS, ModelConfig

# what the format can ask for and the one answer that is built; a key that is absent means this
_ONLY_BUILT = {
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mla_use_nope": True,
    "moe_router_activation_func": "sigmoid",
    "moe_layer_freq": 1,
    "num_expert_group": 1,
    "n_group": 1,
    "num_nextn_predict_layers": 0,
    "short_conv_kernel_size": CONV_WIDTH,
    "linear_conv_kernel_dim": CONV_WIDTH,
}


def read_hf_config(config: Mapping[str, Any], *, name: str = "kimi-linear") -> ModelConfig:
    """The model that a `config.json` describes, in the original's terms or in transformers'.

    Args:
        config: the file's content.
        name: becomes `ModelConfig.name`.

    Raises:
        ValueError: a key is missing or wrong.
        NotImplementedError: the file asks for something that is not built here.
    """
    if config.get("model_type") != "kimi_linear":
        raise ValueError(
            f"config.json: model_type must be 'kimi_linear', got {config.get('model_type')!r}"
        )
    linear = config.get("linear_attn_config") or {}
    if not isinstance(linear, Mapping):
        raise ValueError(f"config.json: linear_attn_config must be an object, got {linear!r}")
    config = {**config, **linear}
    _refuse_unbuilt(config)

    def get(*keys: str) -> Any:
        for key in keys:
            if key in config:
                return config[key]
        raise ValueError(f"config.json: {' or '.join(keys)} is missing")

    num_layers = get("num_hidden_layers")
    if type(num_layers) is not int or not 1 <= num_layers <= MAX_LAYERS:
        raise ValueError(
            f"config.json: num_hidden_layers must be an integer in [1, {MAX_LAYERS}], "
            f"got {num_layers!r}"
        )
    eos = config.get("eos_token_id")
    if eos is None or isinstance(eos, int):
        eos_token_ids = () if eos is None else (eos,)
    else:
        eos_token_ids = tuple(_list(config, "eos_token_id", int))
    dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    return ModelConfig(
        name=name,
        vocab_size=get("vocab_size"),
        hidden_size=get("hidden_size"),
        num_hidden_layers=num_layers,
        mla_layers=_mla_layers(config, num_layers),
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=get("model_max_length", "max_position_embeddings"),
        eos_token_ids=eos_token_ids,
        bos_token_id=config.get("bos_token_id"),
        pad_token_id=config.get("pad_token_id"),
        rms_norm_eps=get("rms_norm_eps"),
        linear_num_heads=linear["num_heads"] if "num_heads" in linear else get("linear_num_heads"),
        # the head_dim beside linear_attn_config belongs to nothing here
        linear_head_dim=linear["head_dim"] if "head_dim" in linear else get("linear_head_dim"),
        gate_lower_bound=linear.get("gate_lower_bound"),
        use_full_rank_gate=linear.get("use_full_rank_gate", False),
        num_attention_heads=get("num_attention_heads"),
        kv_lora_rank=get("kv_lora_rank"),
        qk_nope_head_dim=get("qk_nope_head_dim"),
        qk_rope_head_dim=get("qk_rope_head_dim"),
        v_head_dim=get("v_head_dim"),
        q_lora_rank=config.get("q_lora_rank"),
        use_mla_output_gate=config.get("mla_use_output_gate", False),
        intermediate_size=get("intermediate_size"),
        num_dense_layers=_num_dense_layers(config, num_layers),
        num_experts=get("num_experts", "num_local_experts"),
        num_experts_per_token=get("num_experts_per_token", "num_experts_per_tok"),
        num_shared_experts=get("num_shared_experts", "n_shared_experts"),
        moe_intermediate_size=get("moe_intermediate_size"),
        routed_scaling_factor=get("routed_scaling_factor"),
        moe_renormalize=get("moe_renormalize", "norm_topk_prob"),
    )


def write_hf_config(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` of a model, in the original checkpoint's terms: layers count from 1."""
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": model.dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_hidden_layers,
        "rms_norm_eps": model.rms_norm_eps,
        "model_max_length": model.max_model_len,
        "bos_token_id": model.bos_token_id,
        "eos_token_id": list(model.eos_token_ids),
        "pad_token_id": model.pad_token_id,
        "linear_attn_config": {
            "full_attn_layers": [i + 1 for i in model.mla_layers],
            "kda_layers": [i + 1 for i in model.kda_layers],
            "num_heads": model.linear_num_heads,
            "head_dim": model.linear_head_dim,
            "short_conv_kernel_size": CONV_WIDTH,
            "gate_lower_bound": model.gate_lower_bound,
            "use_full_rank_gate": model.use_full_rank_gate,
        },
        "mla_use_nope": True,
        "mla_use_output_gate": model.use_mla_output_gate,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_attention_heads,
        "kv_lora_rank": model.kv_lora_rank,
        "q_lora_rank": model.q_lora_rank,
        "qk_nope_head_dim": model.qk_nope_head_dim,
        "qk_rope_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        "intermediate_size": model.intermediate_size,
        "first_k_dense_replace": model.num_dense_layers,
        "num_experts": model.num_experts,
        "num_experts_per_token": model.num_experts_per_token,
        "num_shared_experts": model.num_shared_experts,
        "moe_intermediate_size": model.moe_intermediate_size,
        "routed_scaling_factor": model.routed_scaling_factor,
        "moe_renormalize": model.moe_renormalize,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
        "num_expert_group": 1,
        "topk_group": 1,
    }


def _refuse_unbuilt(config: Mapping[str, Any]) -> None:
    heads = config.get("num_attention_heads")
    for key, built in {**_ONLY_BUILT, "num_key_value_heads": heads}.items():
        if config.get(key, built) != built:
            raise NotImplementedError(
                f"config.json: {key} = {config[key]!r} is not built; only {built!r} is"
            )


def _mla_layers(config: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers that attend, from 0. Never guessed: transformers' default is not the checkpoint's."""
    if "full_attn_layers" in config and "kda_layers" in config:
        attending = _list(config, "full_attn_layers", int)
        numbers = [*attending, *_list(config, "kda_layers", int)]
        if sorted(numbers) != list(range(1, num_layers + 1)):
            raise ValueError(
                "config.json: full_attn_layers and kda_layers must name each of the layers "
                f"1..{num_layers} once, got {attending} and {config['kda_layers']}"
            )
        return tuple(sorted(i - 1 for i in attending))
    kinds = [] if config.get("layer_types") is None else _list(config, "layer_types", str)
    if len(kinds) != num_layers:
        raise ValueError(
            "config.json: linear_attn_config with full_attn_layers and kda_layers is missing, and "
            f"layer_types with {num_layers} entries too; which layers attend is never guessed"
        )
    if unknown := set(kinds) - {"full_attention", "linear_attention"}:
        raise ValueError(f"config.json: layer_types has unknown kinds {sorted(unknown)}")
    return tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")


def _num_dense_layers(config: Mapping[str, Any], num_layers: int) -> int:
    if config.get("mlp_layer_types") is None:
        return config.get("first_k_dense_replace", 1)
    kinds = _list(config, "mlp_layer_types", str)
    num_dense = kinds.count("dense")
    if kinds != ["dense"] * num_dense + ["sparse"] * (num_layers - num_dense):
        raise NotImplementedError(
            f"config.json: mlp_layer_types = {kinds} is not built; only dense layers first is"
        )
    return num_dense


def _list(config: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    """Raises ValueError if it is none, or of other things than this kind."""
    found = config[key]
    if not isinstance(found, list | tuple) or not all(type(one) is kind for one in found):
        raise ValueError(f"config.json: {key} must be a list of {kind.__name__}, got {found!r}")
    return list(found)
