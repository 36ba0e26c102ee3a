"""What the model's tests share: transformers' kimi_linear, and a driver that runs steps by hand."""

import math
from array import array
from pathlib import Path

import torch
from torch import Tensor
from torch_kda.cache.storage import Pools
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.step import TOKEN_ALIGNMENT, StepBuffers, StepInputs
from torch_kda.kda.weights import load_checkpoint, load_config
from torch_kda.scheduler.batch import ScheduledBatch, ScheduledRow
from torch_kda.scheduler.request import SamplingParams
from transformers import KimiLinearConfig, KimiLinearForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def linear_attn_config(num_layers: int, mla: list[int], heads: int = 4, dim: int = 16) -> dict:
    """The sub-dict of a checkpoint's config; `mla` counts from 1, as there."""
    return {
        "head_dim": dim,
        "num_heads": heads,
        "short_conv_kernel_size": 4,
        "full_attn_layers": mla,
        "kda_layers": [i for i in range(1, num_layers + 1) if i not in mla],
    }


def hf_model(
    *, num_layers: int = 4, mla: list[int], seed: int = 0, **sizes
) -> KimiLinearForCausalLM:
    """A random kimi_linear in fp32. No weight is left at a default, so every one matters."""
    torch.manual_seed(seed)
    heads, dim = sizes.pop("linear_heads", 4), sizes.pop("linear_dim", 16)
    config = KimiLinearConfig(
        **{**SIZES, **sizes},
        num_hidden_layers=num_layers,
        linear_attn_config=linear_attn_config(num_layers, mla, heads, dim),
    )
    model = KimiLinearForCausalLM(config).eval().requires_grad_(False)
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("e_score_correction_bias"):
            weight.copy_(torch.rand_like(weight) * 0.2)
        elif "norm" in name:
            weight.copy_(1 + 0.2 * torch.randn_like(weight))
        elif weight.ndim >= 2 and "A_log" not in name:
            # large enough that every layer shows in the logits, which the default of 0.02 is not;
            # small enough that fp32 noise of transformers' own forms stays below 3e-6
            weight.copy_(0.5 * torch.randn_like(weight) / math.sqrt(weight.shape[-1]))
    return model


def ours(hf: KimiLinearForCausalLM, folder: Path) -> KDAForCausalLM:
    """The same weights in our model, by way of the files that transformers writes."""
    hf.save_pretrained(folder)
    model = KDAForCausalLM(load_config(folder))
    load_checkpoint(model, folder)
    return model


class Driver:
    """Runs steps on a model with pools of its own, which hold NaN wherever nothing was written."""

    def __init__(
        self,
        model: KDAForCausalLM,
        *,
        num_slots: int = 12,
        num_blocks: int = 64,
        block_size: int = 16,
        draft_tokens: int = 0,
    ) -> None:
        config = model.config
        self.model, self.block_size = model, block_size
        dtype = model.embed.dtype
        self.pools = Pools.allocate(
            config, num_slots, num_blocks, block_size, dtype, "cpu", fill=math.nan
        )
        self.buffers = StepBuffers(
            max_decode_rows=8,
            max_prefill_tokens=512,
            max_prefill_rows=6,
            max_checkpoints=16,
            max_blocks=16,
            block_size=block_size,
            num_speculative_tokens=draft_tokens,
        )
        self.num_blocks_used = 0

    def blocks(self, num_tokens: int) -> array:
        """Fresh KV blocks for that many tokens, in an order that is not ascending."""
        count = -(-num_tokens // self.block_size)
        ids = range(self.num_blocks_used, self.num_blocks_used + count)
        self.num_blocks_used += count
        return array("i", reversed(ids))

    def load(self, batch: ScheduledBatch, D: int | None = None, T: int | None = None) -> StepInputs:
        """The batch as a step finds it."""
        return load(self.buffers, batch, D, T)

    def run_all(self, only: ScheduledRow) -> Tensor:
        """Logits after every token of a prefill row."""
        inputs = self.load(ScheduledBatch.of(0, (only,)))
        everywhere = torch.arange(only.end - only.start, dtype=torch.int32)
        with torch.inference_mode():
            pools = (self.pools.state, self.pools.conv, self.pools.kv)
            return self.model(inputs._replace(sample_rows=everywhere), *pools)

    def run(self, *rows: ScheduledRow, D: int | None = None, T: int | None = None) -> Tensor:
        """Logits of the rows, one for each (for a decode row with draft tokens 1 + K)."""
        batch = ScheduledBatch.of(0, rows)
        inputs = self.load(batch, D, T)
        with torch.inference_mode():
            logits = self.model(inputs, self.pools.state, self.pools.conv, self.pools.kv)
        decode = batch.num_decode_rows
        return logits[: decode * self.buffers.row_tokens + len(rows) - decode]


def load(
    buffers: StepBuffers, batch: ScheduledBatch, D: int | None = None, T: int | None = None
) -> StepInputs:
    """What a step of the batch begins with, laid out for its own rows or for more."""
    tokens = -(-batch.num_prefill_tokens // TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT
    shape = (batch.num_decode_rows if D is None else D, tokens if T is None else T)
    buffers.fill(batch, *shape)
    inputs = buffers.fetch(*shape)
    buffers.handover.end()
    return inputs


def row(
    token_ids: list[int],
    start: int,
    *,
    src: int,
    dst: int | tuple[int, ...],
    blocks: array,
    decode: bool = False,
    exports: tuple[tuple[int, int], ...] = (),
    kv_start: int = 0,
    prev_row: int = -1,
) -> ScheduledRow:
    """A row that runs `token_ids` from position `start` on."""
    end = start + len(token_ids)
    return ScheduledRow(
        request_id="r",
        is_decode=decode,
        start=start,
        end=end,
        token_ids=array("i", token_ids),
        prev_row=prev_row,
        src_slot=src,
        dst_slots=(dst,) if isinstance(dst, int) else dst,
        exports=exports,
        block_table=array("i", blocks),
        kv_start=kv_start,
        samples=True,
        sampling=SamplingParams(),
        sample_index=0,
    )


def tokens(count: int, seed: int = 0, vocab_size: int = SIZES["vocab_size"]) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count,), generator=generator).tolist()
