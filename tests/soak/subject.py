"""What the soak runs: a short model whose routing rounding can't flip, an engine with little room.

Two runs of the same prefix in other batches differ by rounding. Where a router's choice is a near
tie, rounding picks another expert, and a token changes by tens of percent though nothing is wrong;
three such tokens fill a conv window. So `quieten` gives every token a code that no layer
writes to, and routers read nothing else: tokens still go to different experts, and to others in
each layer, but between the last chosen score and the first one left out lies more than 0.7.

What remains is rounding to bf16. It adds up along the residual: measured on a CPU, 256 decode steps
against one prefill gave the last of three states 3.0e-2 relative RMS with random routers, 8.7e-3
with wide ones, and 5.4e-3 with what the layers write scaled down to a quarter, which is done here.
Each layer's own state is compared in full, so a state of a wrong position shows as before.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch_kda.kda.build import load_model
from torch_kda.kda.config import EngineConfig, ModelConfig
from torch_kda.kda.layers import GatedMLP, MoE
from torch_kda.kda.mixers import AttentionMixer, KDAMixer
from torch_kda.kda.model import Block, KDAForCausalLM
from torch_kda.kda.presets import model_preset

# KDA with a dense MLP, KDA, MLA, KDA, all with experts: the last state depends on every kind
SHAPE: dict[str, Any] = {"num_hidden_layers": 4, "mla_layers": (2,), "num_dense_layers": 1}
# of the presets that are not tiny: heads, head dims, gates and latents stay
NARROW: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_experts": 16,
    "num_experts_per_token": 4,
    "moe_intermediate_size": 512,
    "bos_token_id": None,
    "eos_token_ids": (1,),
    "pad_token_id": None,
}
CODE_SIZE = (1.5, 3.0)  # of a code's elements, in units of the embedding's standard deviation
ROUTER_GAIN = 2.0
WRITE_SCALE = 0.25  # of what mixers and MLPs add to the residual


@dataclass(frozen=True, slots=True)
class Setup:
    """One soak's model and engine, chosen by its seed."""

    model: ModelConfig
    engine: EngineConfig
    num_waiting: int  # requests that are not finished, at most
    max_new_tokens: int


def make_setup(
    preset: str, *, device: str, seed: int, compiles: bool = False, dtype: str = "auto"
) -> Setup:
    """Pools hold three of the longest requests or so, for four or eight that run at once."""
    rng = Random(seed)
    is_tiny = preset == "tiny"
    longest, rows = (256, 4) if is_tiny else (4096, 8)
    unit = rng.choice((16, 32, 48) if is_tiny else (32, 64, 128))
    block_size = rng.choice([size for size in (16, 32, 64) if unit % size == 0])
    engine = EngineConfig(
        device=device,
        seed=seed,
        dtype=dtype,
        max_num_seqs=rows,
        max_num_batched_tokens=longest // 4,
        max_model_len=longest,
        prefix_match_unit=unit,
        kv_block_size=block_size,
        num_prefill_checkpoint_blocks=rng.choice((1, 4, 16)),
        checkpoint_interval=rng.choice((0, 2, 4)) * unit,
        num_state_slots=2 * rows + rng.randint(0, 2 * rows),
        num_kv_blocks=rng.randint(5 * longest // 2, 7 * longest // 2) // block_size,
        compile=compiles,
        cuda_graphs=compiles and device != "cpu",
        decode_buckets=(2, rows) if compiles else None,
        prefill_buckets=(longest // 16, longest // 4) if compiles else None,
        steps_in_flight=2,
    )
    model = model_preset(preset, **SHAPE, **({} if is_tiny else NARROW))
    return Setup(
        model=engine.resolve(model),
        engine=engine,
        num_waiting=2 * rows,
        max_new_tokens=48 if is_tiny else 160,
    )


def make_model(setup: Setup) -> KDAForCausalLM:
    """The model with random weights on its device, made quiet."""
    model = load_model(setup.model, setup.engine, None)
    quieten(model, setup.engine.seed)
    return model


@torch.inference_mode()
def quieten(model: KDAForCausalLM, seed: int) -> None:
    """Takes near ties out of the routing, and most of the rounding out of the residual."""
    config = model.config
    size, chosen = config.num_experts, config.num_experts_per_token
    rng = torch.Generator().manual_seed(seed)
    rank = torch.rand(config.vocab_size, size, generator=rng).argsort(-1)
    low, high = CODE_SIZE
    code = low + (high - low) * torch.rand(config.vocab_size, size, generator=rng)
    model.embed[:, :size] = torch.where(rank < chosen, code, -code).to(model.embed)
    for block in model.blocks:
        assert isinstance(block, Block)
        for weight in _writers(block):
            weight *= WRITE_SCALE
            weight[..., :size, :] = 0
        if isinstance(block.mlp, MoE):
            reads = torch.randperm(size, generator=rng)
            block.mlp.router.weight.zero_()
            block.mlp.router.weight[torch.arange(size), reads] = ROUTER_GAIN


def _writers(block: Block) -> list[Tensor]:
    """The weights [.., hidden, in] whose products are added to the residual."""
    mixer, mlp = block.mixer, block.mlp
    assert isinstance(mixer, KDAMixer | AttentionMixer)
    assert isinstance(mlp, MoE | GatedMLP)
    return [mixer.o_proj.weight, mlp.w2 if isinstance(mlp, MoE) else mlp.down.weight]
