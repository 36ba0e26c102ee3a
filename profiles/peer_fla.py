"""The peer of the model bench: transformers' kimi_linear with the kernels of FLA, eager.

Runs in a process of its own, because transformers takes FLA's functions when it is imported:
`python -m torch_kda.profiles.peer_fla --out peer.json`. FLA is never a dependency of ours.
"""

import importlib.util
import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..kda.build import load_model
from ..kda.command import check_file, clear_errors
from ..kda.config import MAX_LAYERS, EngineConfig
from ..kda.hf_config import write_hf_config
from ..kda.layers import GatedMLP
from ..kda.mixers import AttentionMixer, KDAMixer
from ..kda.model import Block, KDAForCausalLM
from ..kda.presets import model_preset
from .options import MAX_SEED, MAX_TOKENS, Parser, Positive, integer, integers

# of its JSON, by size; versions beside them
SHAPE = {key: {str: Positive} for key in ("prefill_ms", "decode_us")}

log = logging.getLogger("torch_kda.profiles.peer_fla")


def is_there() -> bool:
    """Whether transformers and FLA can be imported; neither is, by this."""
    return all(importlib.util.find_spec(name) for name in ("transformers", "fla"))


def peer_model(model: KDAForCausalLM) -> Any:
    """transformers' model over the memory of our weights.

    Raises:
        RuntimeError: this transformers has other parameters than the one it was written for.
    """
    from transformers import KimiLinearConfig, KimiLinearForCausalLM

    fields = write_hf_config(model.config)
    with torch.device("meta"):
        peer = KimiLinearForCausalLM(KimiLinearConfig(**fields))
    peer = peer.eval().requires_grad_(False)
    places = _places(model)
    named = {**dict(peer.named_parameters()), **dict(peer.named_buffers())}
    for name, empty in named.items():
        value = places.get(name)
        if value is None or value.numel() != empty.numel():
            raise RuntimeError(f"transformers has a parameter {name} {list(empty.shape)}, unknown")
        owner, _, leaf = name.rpartition(".")
        module = peer.get_submodule(owner)
        value = value.reshape(empty.shape)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[leaf] = value
    return peer


def _places(model: KDAForCausalLM) -> dict[str, Tensor]:
    """The peer's name of each of our weights, as views of them."""
    places: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed,
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": model.lm_head.weight,
    }
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        parts = _kda if isinstance(block.mixer, KDAMixer) else _attention
        layer = {
            "input_layernorm.weight": block.mixer_norm.weight,
            "post_attention_layernorm.weight": block.mlp_norm.weight,
            **{f"self_attn.{name}": place for name, place in parts(block.mixer).items()},
            **{f"mlp.{name}": place for name, place in _mlp(block.mlp).items()},
        }
        places |= {f"model.layers.{i}.{name}": place for name, place in layer.items()}
    return places


def _kda(mixer: Any) -> dict[str, Tensor]:
    size = mixer.num_heads * mixer.head_dim
    qkv, f_a, g_a, beta = mixer.in_proj.weight[: sum(mixer.sections)].split(mixer.sections)
    q, k, v = qkv.split(size)
    return {
        "q_proj.weight": q,
        "k_proj.weight": k,
        "v_proj.weight": v,
        "conv1d.weight": mixer.conv_weight,
        "forget_gate.dt_bias": mixer.dt_bias,
        "forget_gate.A_log": mixer.A_log,
        "forget_gate.f_a_proj.weight": f_a,
        "forget_gate.f_b_proj.weight": mixer.gates_b[0],
        "b_proj.weight": beta,
        "g_a_proj.weight": g_a,
        "g_b_proj.weight": mixer.gates_b[1],
        "o_norm.weight": mixer.o_norm,
        "o_proj.weight": mixer.o_proj.weight,
    }


def _attention(mixer: Any) -> dict[str, Tensor]:
    assert isinstance(mixer, AttentionMixer)
    q, latent, _ = mixer.in_proj.weight.split(mixer.sections)
    return {
        "q_proj.weight": q,
        "kv_a_proj_with_mqa.weight": latent,
        "kv_a_layernorm.weight": mixer.latent_norm.weight,
        "kv_b_proj.weight": mixer.kv_b.weight,
        "o_proj.weight": mixer.o_proj.weight,
    }


def _mlp(mlp: Any) -> dict[str, Tensor]:
    if isinstance(mlp, GatedMLP):
        gate, up = mlp.gate_up.weight.chunk(2)
        return {
            "gate_proj.weight": gate,
            "up_proj.weight": up,
            "down_proj.weight": mlp.down.weight,
        }
    E = mlp.router.weight.shape[0]
    gate, up = mlp.w13[E:].chunk(2, dim=1)
    return {
        "experts.gate_up_proj": mlp.w13[:E],
        "experts.down_proj": mlp.w2[:E],
        "gate.weight": mlp.router.weight,
        "gate.e_score_correction_bias": mlp.choice_bias,
        "shared_experts.gate_proj.weight": gate.flatten(0, 1),
        "shared_experts.up_proj.weight": up.flatten(0, 1),
        "shared_experts.down_proj.weight": mlp.w2[E:].transpose(0, 1).flatten(1),
    }


@torch.inference_mode()
def measure(
    peer: Any,
    *,
    prefill_tokens: Sequence[int],
    decode_batches: Sequence[int],
    context: int,
    rounds: int = 3,
    save: Callable[[dict[str, dict[str, float]]], None] = lambda found: None,
) -> dict[str, dict[str, float]]:
    """Times of one prompt's prefill in ms and of a decode step in us, by size; none if it fails.

    Args:
        save: is given what is known after each time.
    """
    found: dict[str, dict[str, float]] = {"prefill_ms": {}, "decode_us": {}}

    def prefill(tokens: int) -> float:
        ids = _random_ids(peer, 1, tokens)
        return 1e3 * _median_seconds(lambda: _forward(peer, ids, None), rounds)

    def decode(batch: int) -> float:
        _, cache = _forward(peer, _random_ids(peer, batch, context), None)
        ids = _random_ids(peer, batch, 1)
        return 1e6 * _median_seconds(lambda: _forward(peer, ids, cache), 10 * rounds)

    for key, call, sizes in (
        ("prefill_ms", prefill, prefill_tokens),
        ("decode_us", decode, decode_batches),
    ):
        for size in sizes:
            try:
                found[key][str(size)] = call(size)
            except RuntimeError as error:  # of memory, or of a kernel: a fact about the peer
                log.warning("peer: %s of %d fails: %s", key, size, str(error)[:200])
                torch.cuda.empty_cache()
            save(found)
    return found


def _forward(peer: Any, ids: Tensor, cache: Any) -> tuple[Tensor, Any]:
    from transformers import DynamicCache

    cache = DynamicCache(config=peer.config) if cache is None else cache
    out = peer(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return out.logits, out.past_key_values


def _random_ids(peer: Any, rows: int, columns: int) -> Tensor:
    device = peer.lm_head.weight.device
    return torch.randint(0, peer.config.vocab_size, (rows, columns), device=device)


def _median_seconds(call: Callable[[], object], rounds: int) -> float:
    seconds = []
    for turn in range(rounds + 1):
        _wait()
        start = time.perf_counter()
        call()
        _wait()
        if turn > 0:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; writes one JSON object."""
    parser = Parser(prog="python -m torch_kda.profiles.peer_fla")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--model", default="kimi-linear-48b-a3b", help="a preset")
    parser.add_argument("--layers", type=integer(1, MAX_LAYERS), help="of the stack (default: all)")
    parser.add_argument(
        "--prefill",
        type=integers(1, MAX_TOKENS),
        default="1024,8000,16384",
        help="tokens, comma between",
    )
    parser.add_argument(
        "--decode", type=integers(1, MAX_TOKENS), default="1,4,16,64", help="batches, comma between"
    )
    parser.add_argument(
        "--context", type=integer(1, MAX_TOKENS), default=1024, help="tokens before a decode step"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=integer(0, MAX_SEED), default=0)
    options = parser.parse_args(arguments)
    check_file(options.out)
    overrides = {} if options.layers is None else {"num_hidden_layers": options.layers}
    config = EngineConfig(device=options.device, seed=options.seed)
    model_config = config.resolve(model_preset(options.model, **overrides))
    peer = peer_model(load_model(model_config, config, None))
    versions: Mapping[str, object] = {
        "transformers": importlib.import_module("transformers").__version__,
        "fla": getattr(importlib.import_module("fla"), "__version__", None) if is_there() else None,
        "layers": model_config.num_hidden_layers,
    }
    measure(
        peer,
        prefill_tokens=options.prefill,
        decode_batches=options.decode,
        context=options.context,
        # whoever ends it early still has what was measured
        save=lambda found: _write(options.out, {**versions, **found}),
    )
    print(options.out)


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    with clear_errors():
        main()
