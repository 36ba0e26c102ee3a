"""The two token mixers of the hybrid: Kimi Delta Attention and latent attention without positions.

Both run in two segments that the shapes show: decode rows first, then prefill tokens. A segment of
size 0 is left out of the graph.
"""

from typing import NamedTuple

import torch
from einops import einsum, rearrange
from torch import Tensor, nn

from ..ops.activations import sigmoid_mul
from ..ops.attention import mla_decode, mla_prefill, mla_store
from ..ops.conv import causal_conv_prefill
from ..ops.kda import kda_decode, kda_prefill
from ..ops.norms import gated_rms_norm
from .config import CONV_WIDTH, ModelConfig
from .layers import Linear, RMSNorm, empty_parameter
from .step import StepInputs

ROW_ALIGNMENT = 64  # elements; the ops take q, k, v as slices of rows that start 16-byte aligned


class KDAMixer(nn.Module):
    """Kimi Delta Attention.

    One matrix makes all that comes from x: q | k | v, the thin halves (or the whole) of the two
    gates, and beta. `sections` names its rows.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        heads, dim, size = config.linear_num_heads, config.linear_head_dim, config.linear_dim
        self.num_heads, self.head_dim = heads, dim
        self.lower_bound = config.gate_lower_bound
        self.eps = config.rms_norm_eps
        gate_size = size if config.use_full_rank_gate else dim
        self.sections = (3 * size, dim, gate_size, heads)  # qkv, f_a, g_a or g, b
        rows = -(-sum(self.sections) // ROW_ALIGNMENT) * ROW_ALIGNMENT
        self.in_proj = Linear(config.hidden_size, rows, dtype=dtype)
        self.conv_weight = empty_parameter(3 * size, CONV_WIDTH, dtype=dtype)
        # the wide halves of the thin gates, which take one product: f_b, and g_b if it is thin
        num_thin = 1 if config.use_full_rank_gate else 2
        self.gates_b = empty_parameter(num_thin, size, dim, dtype=dtype)
        self.A_log = empty_parameter(heads, dtype=torch.float32)
        self.dt_bias = empty_parameter(heads, dim, dtype=torch.float32)
        self.o_norm = empty_parameter(dim, dtype=dtype)
        self.o_proj = Linear(size, config.hidden_size, dtype=dtype)

    def forward(
        self, x: Tensor, inputs: StepInputs, state_pool: Tensor, conv_pool: Tensor
    ) -> Tensor:
        """x [M, hidden] to [M, hidden]."""
        num_decode = inputs.decode_dst_slots.numel()
        rows = self._project(x)
        outputs = []
        if num_decode > 0:
            decode = _KDARows(*(y[:num_decode] for y in rows))
            outputs.append(self._decode(decode, inputs, state_pool, conv_pool))
        if x.shape[0] > num_decode:
            prefill = _KDARows(*(y[num_decode:] for y in rows))
            outputs.append(self._prefill(prefill, inputs, state_pool, conv_pool))
        return self.o_proj(_join(outputs))

    def _project(self, x: Tensor) -> "_KDARows":
        rows = self.in_proj(x)[:, : sum(self.sections)]
        qkv, _, full_gate, beta = rows.split(self.sections, dim=-1)
        num_thin, start = self.gates_b.shape[0], qkv.shape[1]
        thin = rows[:, start : start + num_thin * self.head_dim]
        thin = rearrange(thin, "m (n d) -> n m d", n=num_thin)
        wide = torch.bmm(thin, self.gates_b.mT)
        g_raw, gate = wide[0], wide[1] if num_thin == 2 else full_gate
        g_raw, gate = (rearrange(y, "m (h d) -> m h d", h=self.num_heads) for y in (g_raw, gate))
        return _KDARows(qkv, g_raw, beta, gate)

    def _decode(
        self, rows: "_KDARows", inputs: StepInputs, state_pool: Tensor, conv_pool: Tensor
    ) -> Tensor:
        return kda_decode(
            *rows,
            self.conv_weight,
            self.A_log,
            self.dt_bias,
            self.o_norm,
            state_pool,
            conv_pool,
            inputs.decode_src_slots,
            inputs.decode_dst_slots,
            lower_bound=self.lower_bound,
            eps=self.eps,
        )

    def _prefill(
        self, rows: "_KDARows", inputs: StepInputs, state_pool: Tensor, conv_pool: Tensor
    ) -> Tensor:
        sequences = (
            inputs.cu_seqlens,
            inputs.initial_slots,
            inputs.final_slots,
            inputs.checkpoint_indptr,
            inputs.checkpoint_offsets,
            inputs.checkpoint_slots,
        )
        qkv = causal_conv_prefill(rows.qkv, self.conv_weight, conv_pool, *sequences)
        q, k, v = rearrange(qkv, "t (n h d) -> n t h d", n=3, h=self.num_heads).unbind(0)
        o = kda_prefill(
            q,
            k,
            v,
            rows.g_raw,
            rows.beta_logit,
            self.A_log,
            self.dt_bias,
            state_pool,
            *sequences,
            lower_bound=self.lower_bound,
        )
        return gated_rms_norm(o, rows.gate, self.o_norm, eps=self.eps).flatten(1)


class _KDARows(NamedTuple):
    """What a KDA layer makes of its rows of x."""

    qkv: Tensor  # [M, 3 * H * K] before the conv
    g_raw: Tensor  # [M, H, K] forget gate before bias and activation
    beta_logit: Tensor  # [M, H]
    gate: Tensor  # [M, H, V] output gate before the sigmoid


class AttentionMixer(nn.Module):
    """Multi-head latent attention without positions; a part of the key is shared by all heads.

    The cache holds one latent a token. Prefill expands it to keys and values. Decode attends in
    the latent space: W_uk is absorbed into the query, W_uv applied to the result.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        heads = config.num_attention_heads
        self.num_heads = heads
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.v_dim, self.latent_rank = config.v_head_dim, config.kv_lora_rank
        self.scale = config.qk_head_dim**-0.5
        q_size, q_rank = heads * config.qk_head_dim, config.q_lora_rank
        gate_size = heads * config.v_head_dim if config.use_mla_output_gate else 0
        self.sections = (q_rank or q_size, config.latent_dim, gate_size)  # q_a or q, kv_a, g
        self.in_proj = Linear(config.hidden_size, sum(self.sections), dtype=dtype)
        self.q_norm = self.q_b = None
        if q_rank is not None:
            self.q_norm = RMSNorm(q_rank, config.latent_norm_eps, dtype=dtype)
            self.q_b = Linear(q_rank, q_size, dtype=dtype)
        self.latent_norm = RMSNorm(config.kv_lora_rank, config.latent_norm_eps, dtype=dtype)
        kv_size = heads * (config.qk_nope_head_dim + config.v_head_dim)
        self.kv_b = Linear(config.kv_lora_rank, kv_size, dtype=dtype)
        self.o_proj = Linear(heads * config.v_head_dim, config.hidden_size, dtype=dtype)

    def forward(self, x: Tensor, inputs: StepInputs, kv_pool: Tensor) -> Tensor:
        """x [M, hidden] to [M, hidden]; stores the latents of all rows first."""
        num_rows, num_decode = inputs.decode_src_slots.shape[0], inputs.decode_dst_slots.numel()
        q, latent, gate = self.in_proj(x).split(self.sections, dim=-1)
        if self.q_norm is not None and self.q_b is not None:
            q = self.q_b(self.q_norm(q))
        q = rearrange(q, "m (h d) -> m h d", h=self.num_heads)
        latent, k_shared = latent.split([self.latent_rank, self.rope_dim], dim=-1)
        latent = torch.cat([self.latent_norm(latent), k_shared], dim=-1)
        mla_store(latent, kv_pool, inputs.slot_mapping)
        outputs = []
        if num_decode > 0:
            table, lens = inputs.block_table[:num_rows], inputs.seq_lens[:num_rows]
            outputs.append(self._decode(q[:num_decode], kv_pool, table, lens))
        if x.shape[0] > num_decode:
            o = mla_prefill(
                q[num_decode:],
                kv_pool,
                self.kv_b.weight,
                inputs.cu_seqlens,
                inputs.block_table[num_rows:],
                inputs.seq_lens[num_rows:],
                scale=self.scale,
                v_head_dim=self.v_dim,
            )
            outputs.append(o)
        o = _join(outputs).flatten(1)
        return self.o_proj(sigmoid_mul(o, gate) if gate.shape[-1] > 0 else o)

    def _decode(self, q: Tensor, kv_pool: Tensor, block_table: Tensor, seq_lens: Tensor) -> Tensor:
        kv_b = rearrange(self.kv_b.weight, "(h d) r -> h d r", h=self.num_heads)
        w_uk, w_uv = kv_b.split([self.nope_dim, self.v_dim], dim=1)
        q_nope, q_shared = q.split([self.nope_dim, self.rope_dim], dim=-1)
        q_latent = einsum(q_nope, w_uk, "m h d, h d r -> m h r")
        o = mla_decode(
            torch.cat([q_latent, q_shared], dim=-1),
            kv_pool,
            block_table,
            seq_lens,
            scale=self.scale,
            kv_lora_rank=self.latent_rank,
            num_tokens_per_row=q.shape[0] // block_table.shape[0],
        )
        return einsum(o, w_uv, "m h r, h v r -> m h v")


def _join(segments: list[Tensor]) -> Tensor:
    """Decode rows and prefill tokens one after the other; a lone segment is not copied."""
    return segments[0] if len(segments) == 1 else torch.cat(segments)
