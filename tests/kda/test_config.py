"""Configurations: presets, checks, derived sizes, config.json, and the memory plan."""

from dataclasses import FrozenInstanceError, replace

import pytest
from torch_kda.kda.config import EngineConfig
from torch_kda.kda.hf_config import read_hf_config, write_hf_config
from torch_kda.kda.presets import PRESETS, model_preset
from torch_kda.tests.kda.oracle import SIZES, linear_attn_config
from transformers import KimiLinearConfig

# as the released Kimi-Linear-48B-A3B has it, oddities included
RELEASED = {
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": 163840,
    "hidden_size": 2304,
    "head_dim": 72,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "num_nextn_predict_layers": 0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "model_max_length": 1048576,
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "tie_word_embeddings": False,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
}


def test_preset_48b_is_the_released_config() -> None:
    assert read_hf_config(RELEASED, name="kimi-linear-48b-a3b") == model_preset(
        "kimi-linear-48b-a3b"
    )


def test_preset_layers() -> None:
    assert model_preset("tiny").mla_layers == (3,)
    assert model_preset("tiny", num_hidden_layers=9).mla_layers == (3, 7)
    cut = model_preset("kimi-linear-48b-a3b", num_hidden_layers=12)
    assert cut.mla_layers == (3, 7, 11)
    assert cut.kda_layers == (0, 1, 2, 4, 5, 6, 8, 9, 10)
    assert model_preset("kimi-k3-tp8", num_hidden_layers=93).mla_layers[-2:] == (91, 92)
    assert model_preset("glm-5.3-flash-kda", num_hidden_layers=2).num_dense_layers == 2
    assert model_preset("tiny", num_hidden_layers=3, mla_layers=(0,)).mla_layers == (0,)


def test_preset_unknown() -> None:
    with pytest.raises(
        ValueError, match="unknown preset 'tony'; presets are tiny, kimi-linear-48b"
    ):
        model_preset("tony")


@pytest.mark.parametrize(
    "field,value",
    [
        ("vocab_size", 0),
        ("hidden_size", "x"),
        ("hidden_size", None),
        ("hidden_size", 64.0),
        ("rms_norm_eps", "a"),
        ("rms_norm_eps", float("nan")),
        ("eos_token_ids", ("z",)),
        ("moe_renormalize", 1),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**9),
        ("mla_layers", (4,)),
        ("mla_layers", (2, 1)),
        ("mla_layers", (1, 1)),
        ("dtype", "float16"),
        ("gate_lower_bound", -5.5),
        ("gate_lower_bound", 0.0),
        ("q_lora_rank", 0),
        ("qk_rope_head_dim", -1),
        ("num_dense_layers", 5),
        ("num_experts_per_token", 9),
        ("num_shared_experts", -1),
        ("eos_token_ids", (264,)),
    ],
)
def test_model_config_checks(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"ModelConfig 'tiny': {field} must be .*, got "):
        replace(model_preset("tiny"), **{field: value})


def test_preset_of_too_many_layers() -> None:
    """Refused before a number of layers becomes a list of them."""
    with pytest.raises(ValueError, match=r"num_hidden_layers must be in \[1, 1000\], got 10{9}"):
        model_preset("tiny", num_hidden_layers=10**9)


def test_configs_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        model_preset("tiny").vocab_size = 3  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(FrozenInstanceError):
        EngineConfig().seed = 3  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("name", PRESETS)
def test_hf_config_round_trip(name: str) -> None:
    config = model_preset(name)
    # the files have no key for this one
    config = replace(config, latent_norm_eps=1e-6)
    assert read_hf_config(write_hf_config(config), name=name) == config


def test_hf_config_of_transformers() -> None:
    """What transformers writes, in its own words: layer_types, linear_num_heads, no sub-dict."""
    config = KimiLinearConfig(
        **SIZES, num_hidden_layers=5, linear_attn_config=linear_attn_config(5, [2, 5])
    ).to_dict()
    ours = read_hf_config(config)
    assert ours.mla_layers == (1, 4)
    assert (ours.linear_num_heads, ours.linear_head_dim, ours.num_dense_layers) == (4, 16, 1)
    del config["linear_attn_config"]
    assert read_hf_config(config) == ours


def test_hf_config_never_guesses_layers() -> None:
    """transformers' default attends in layers 5, 9, ..; the checkpoint in 4, 8, .., 27."""
    bare = {key: value for key, value in RELEASED.items() if key != "linear_attn_config"}
    with pytest.raises(ValueError, match="which layers attend is never guessed"):
        read_hf_config({**bare, "linear_num_heads": 32, "linear_head_dim": 128})


@pytest.mark.parametrize(
    "change,error,match",
    [
        ({"model_type": "llama"}, ValueError, "model_type must be 'kimi_linear', got 'llama'"),
        ({"hidden_size": ...}, ValueError, "hidden_size is missing"),
        *(
            ({"num_hidden_layers": n}, ValueError, rf"must be an integer in \[1, 1000\], got {n}")
            for n in (2.5, None, 0, 1001, 10**9)
        ),
        ({"eos_token_id": 2.5}, ValueError, "eos_token_id must be a list of int, got 2.5"),
        ({"mlp_layer_types": 5}, ValueError, "mlp_layer_types must be a list of str, got 5"),
        ({"layer_types": 5, "linear_attn_config": {}}, ValueError, "layer_types must be a list"),
        *(
            (
                {"linear_attn_config": {**RELEASED["linear_attn_config"], key: value}},
                ValueError,
                key,
            )
            for key in ("full_attn_layers", "kda_layers")
            for value in (5, None, [1, "2"])
        ),
        ({"linear_attn_config": 5}, ValueError, "linear_attn_config must be an object, got 5"),
        ({"num_experts": ...}, ValueError, "num_experts or num_local_experts is missing"),
        ({"tie_word_embeddings": True}, NotImplementedError, "tie_word_embeddings = True"),
        ({"mla_use_nope": False}, NotImplementedError, "mla_use_nope = False"),
        ({"num_expert_group": 8}, NotImplementedError, "num_expert_group = 8"),
        ({"num_key_value_heads": 8}, NotImplementedError, "num_key_value_heads = 8"),
        ({"mlp_layer_types": ["sparse"] * 26 + ["dense"]}, NotImplementedError, "mlp_layer_types"),
        ({"layer_types": ["conv"] * 27, "linear_attn_config": {}}, ValueError, "kinds .'conv'"),
        (
            {"linear_attn_config": {**RELEASED["linear_attn_config"], "kda_layers": [1, 2]}},
            ValueError,
            "must name each of the layers 1..27 once",
        ),
        (
            {"linear_attn_config": {**RELEASED["linear_attn_config"], "short_conv_kernel_size": 3}},
            NotImplementedError,
            "short_conv_kernel_size = 3 is not built; only 4 is",
        ),
    ],
)
def test_hf_config_errors(change: dict, error: type[Exception], match: str) -> None:
    config = {key: value for key, value in {**RELEASED, **change}.items() if value is not ...}
    with pytest.raises(error, match=match):
        read_hf_config(config)


@pytest.mark.parametrize(
    "fields,match",
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be >= 1"),
        ({"max_num_seqs": "8"}, "max_num_seqs must be an integer, got '8'"),
        ({"memory_fraction": None}, "memory_fraction must be a finite number, got None"),
        ({"compile": "yes"}, "compile must be true or false or None, got 'yes'"),
        ({"prefix_match_unit": 24}, "prefix_match_unit must be a multiple of 16, got 24"),
        ({"kv_block_size": 48}, "kv_block_size must be a divisor of prefix_match_unit .128"),
        ({"kv_block_size": 256}, "kv_block_size must be a divisor"),
        ({"checkpoint_interval": 100}, "checkpoint_interval must be 0 .none. or a multiple"),
        ({"num_prefill_checkpoint_blocks": -1}, "num_prefill_checkpoint_blocks must be >= 0"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be >= 0"),
        (
            {"max_num_seqs": 4, "max_num_batched_tokens": 19},
            "max_num_batched_tokens must be >= .* = 20",
        ),
        (
            {"max_num_seqs": 4, "num_speculative_tokens": 2, "max_num_batched_tokens": 27},
            "max_num_batched_tokens must be >= .* = 28",
        ),
        ({"max_model_len": 0}, "max_model_len must be None or >= 1"),
        ({"num_kv_blocks": 0}, "num_kv_blocks must be None or >= 1"),
        ({"memory_fraction": 1.5}, "memory_fraction must be in .0, 1., got 1.5"),
        ({"dtype": "int8"}, "dtype must be one of .'auto'"),
        ({"device": "tpu"}, "device must be 'cpu', 'cuda' or 'cuda:N', got 'tpu'"),
    ],
)
def test_engine_config_checks(fields: dict, match: str) -> None:
    with pytest.raises(ValueError, match=f"EngineConfig: {match}"):
        EngineConfig(**fields)


def test_engine_config_limits() -> None:
    assert EngineConfig(max_num_seqs=4, max_num_batched_tokens=20).max_num_checkpoints == 64
    assert EngineConfig(num_prefill_checkpoint_blocks=0).max_num_checkpoints == 1


def test_resolve() -> None:
    model = model_preset("tiny")
    assert EngineConfig().resolve(model) == model
    resolved = EngineConfig(max_model_len=500, dtype="bfloat16").resolve(model)
    assert (resolved.max_model_len, resolved.dtype) == (500, "bfloat16")
    with pytest.raises(ValueError, match="max_model_len must be <= 32768, the limit of 'tiny'"):
        EngineConfig(max_model_len=40000).resolve(model)
