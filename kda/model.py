"""The language model: a function of a step's inputs and the pools."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import ModelConfig
from .layers import GatedMLP, Linear, MoE, RMSNorm, empty_parameter
from .mixers import AttentionMixer, KDAMixer
from .random_weights import fill_gate, fill_uniform
from .step import StepInputs


class Block(nn.Module):
    """One layer: x + mixer(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mixer = (
            AttentionMixer(config, dtype=dtype)
            if layer in config.mla_layers
            else KDAMixer(config, dtype=dtype)
        )
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.mlp = (
            GatedMLP(config.hidden_size, config.intermediate_size, dtype=dtype)
            if layer < config.num_dense_layers
            else MoE(
                config.hidden_size,
                config.moe_intermediate_size,
                num_experts=config.num_experts,
                num_experts_per_token=config.num_experts_per_token,
                num_shared_experts=config.num_shared_experts,
                renormalize=config.moe_renormalize,
                scaling_factor=config.routed_scaling_factor,
                dtype=dtype,
            )
        )


class KDAForCausalLM(nn.Module):
    """A Kimi-Linear model for inference. Weights are undefined until `random_init` or a load.

    All parameters are without gradient; the whole forward compiles into one graph.
    """

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.config = config
        dtype = getattr(torch, config.dtype)
        with torch.device(device):
            self.embed = empty_parameter(config.vocab_size, config.hidden_size, dtype=dtype)
            self.blocks = nn.ModuleList(
                Block(config, i, dtype=dtype) for i in range(config.num_hidden_layers)
            )
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
            self.lm_head = Linear(config.hidden_size, config.vocab_size, dtype=dtype)

    def forward(
        self,
        inputs: StepInputs,
        state_pools: list[Tensor],
        conv_pools: list[Tensor],
        kv_pools: list[Tensor],
    ) -> Tensor:
        """Logits of the rows that `inputs.sample_rows` names; the pools are updated in place.

        Args:
            inputs: one step; see StepInputs for shapes and padding.
            state_pools, conv_pools: one tensor for each KDA layer, in order. Shapes: `Pools`.
            kv_pools: one tensor for each MLA layer, in order.

        Returns:
            logits: [R, vocab] fp32.
        """
        num_prefill_tokens = inputs.input_ids.shape[0] - inputs.decode_dst_slots.numel()
        is_real = _real_rows(inputs, num_prefill_tokens)
        states, windows, kvs = iter(state_pools), iter(conv_pools), iter(kv_pools)
        x, change = F.embedding(inputs.input_ids, self.embed), None
        for block in self.blocks:
            assert isinstance(block, Block)
            x, y = block.mixer_norm.add(x, change)
            if isinstance(block.mixer, KDAMixer):
                change = block.mixer(y, inputs, next(states), next(windows))
            else:
                change = block.mixer(y, inputs, next(kvs))
            x, y = block.mlp_norm.add(x, change)
            change = block.mlp(y, is_real) if isinstance(block.mlp, MoE) else block.mlp(y)
        rows = inputs.sample_rows  # picked first: the others are in no sum
        _, y = self.norm.add(x[rows], None if change is None else change[rows])
        return self.lm_head(y).float()

    @torch.inference_mode()
    def random_init(self, seed: int) -> None:
        """Fill all weights: a function of seed and parameter names, the same bits on every device.

        Activations keep unit size through the stack and decays are spread over the range that
        models are trained from, so that greedy outputs vary.
        """
        shrink = (2 * self.config.num_hidden_layers) ** -0.5
        for name, weight in self.named_parameters():
            key, kind = f"{seed}/{name}", name.removesuffix(".weight").rpartition(".")[2]
            if kind.endswith("norm"):
                weight.fill_(1.0)
            elif kind == "choice_bias":
                weight.zero_()
            elif kind == "embed":
                fill_uniform(weight, key, std=1.0)
            elif kind not in ("A_log", "dt_bias"):
                # these write to the residual stream, twice a layer
                writes = kind in ("o_proj", "down", "w2")
                fill_uniform(
                    weight, key, std=weight.shape[-1] ** -0.5 * (shrink if writes else 1.0)
                )
        for name, mixer in self.named_modules():
            if isinstance(mixer, KDAMixer):
                fill_gate(mixer.A_log, mixer.dt_bias, f"{seed}/{name}", mixer.lower_bound)


def _real_rows(inputs: StepInputs, num_prefill_tokens: int) -> Tensor:
    """[M] bool: the rows that belong to a request. Padding would read experts that nobody chose."""
    parts = []
    if inputs.decode_dst_slots.numel() > 0:
        is_row = inputs.decode_src_slots >= 0
        parts.append(is_row[:, None].expand_as(inputs.decode_dst_slots).flatten())
    if num_prefill_tokens > 0:
        token = torch.arange(num_prefill_tokens, device=inputs.cu_seqlens.device)
        parts.append(token < inputs.cu_seqlens[-1])
    return torch.cat(parts)
