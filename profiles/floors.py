"""What a step has to move and to compute at least: bytes and floating point operations."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kda import layers
from ..kda.config import CONV_WIDTH, ModelConfig
from ..kda.layers import MoE
from ..kda.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Floors:
    """Counts of one model. Activations are left out: they are small and may stay in caches."""

    config: ModelConfig
    dense_bytes: int  # weights that every step reads: all but experts and embedding
    dense_weights: int  # the same, in elements that a token multiplies with; the head left out
    expert_bytes: int  # one expert of one layer
    expert_weights: int
    num_moe_layers: int
    head_weights: int
    slot_bytes: int  # states and windows of one row, all KDA layers
    token_bytes: float  # cached latents of one token, all MLA layers

    @classmethod
    def of(cls, runner: ModelRunner) -> "Floors":
        model, plan = runner.model, runner.plan
        moes = [module for module in model.modules() if isinstance(module, MoE)]
        experts = [weight for moe in moes for weight in (moe.w13, moe.w2)]
        skipped = {id(weight) for weight in (*experts, model.embed)}
        dense = [weight for weight in model.parameters() if id(weight) not in skipped]
        head = model.lm_head.weight.numel()
        biases = {id(w) for name, w in model.named_parameters() if name.endswith("dt_bias")}
        matrices = sum(w.numel() for w in dense if w.ndim > 1 and id(w) not in biases)
        one = moes[0] if moes else None
        return cls(
            config=model.config,
            dense_bytes=sum(weight.nbytes for weight in dense),
            dense_weights=matrices - head,
            expert_bytes=one.w13[0].nbytes + one.w2[0].nbytes if one else 0,
            expert_weights=one.w13[0].numel() + one.w2[0].numel() if one else 0,
            num_moe_layers=len(moes),
            head_weights=head,
            slot_bytes=plan.slot_bytes,
            token_bytes=plan.block_bytes / plan.block_size,
        )

    def decode_bytes(self, num_rows: int, context: int, num_experts: float) -> float:
        """A step of `num_rows` tokens that attend to `context` each.

        Args:
            num_experts: different routed experts chosen in the step, the mean over layers.
        """
        num_experts += self.config.num_shared_experts
        experts = self.num_moe_layers * num_experts * self.expert_bytes
        # states and windows are read and written, the cache is read and grows by a token
        rows = 2 * self.slot_bytes + (context + 1) * self.token_bytes
        return self.dense_bytes + experts + num_rows * rows

    def kda_decode_bytes(self, num_rows: int) -> float:
        """One KDA layer's decode op: states, windows, inputs and output of the rows."""
        config = self.config
        size = 2 if config.dtype == "bfloat16" else 4
        state = config.linear_num_heads * config.linear_head_dim**2 * 4
        window = (CONV_WIDTH - 1) * config.conv_dim * size
        # q | k | v, the two gates, the output, beta
        values = (config.conv_dim + 3 * config.linear_dim + config.linear_num_heads) * size
        return num_rows * (2 * state + 2 * window + values)

    def prefill_flops(self, num_tokens: int) -> float:
        """Matrix products of one prompt from its beginning: weights, attention and recurrence.

        The recurrence is counted as its serial form computes it, three products of a state with a
        vector, so chunks get no credit for what they compute in addition.
        """
        config = self.config
        num_experts = config.num_experts_per_token + config.num_shared_experts
        experts = self.num_moe_layers * num_experts * self.expert_weights
        weights = 2 * num_tokens * (self.dense_weights + experts) + 2 * self.head_weights
        pairs = num_tokens * (num_tokens + 1) / 2
        head_dims = config.qk_head_dim + config.v_head_dim
        attention = 2 * pairs * config.num_attention_heads * head_dims * config.num_mla_layers
        state = config.linear_num_heads * config.linear_head_dim**2
        recurrence = 6 * num_tokens * state * config.num_kda_layers
        return weights + attention + recurrence


@contextmanager
def counting_experts() -> Iterator[list[int]]:
    """Fills a list with the number of different experts that each MoE layer wakes; eager only."""
    counts: list[int] = []
    call = layers.moe

    def counted(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, *rest: Any, **kw: Any) -> Tensor:
        counts.append(int(torch.unique(ids[ids >= 0]).numel()))
        return call(x, w13, w2, ids, *rest, **kw)

    layers.moe = counted
    try:
        yield counts
    finally:
        layers.moe = call
