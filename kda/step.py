"""One step in tensors: what the model reads beside weights and pools."""

from typing import NamedTuple

import torch


class StepInputs(NamedTuple):
    """D decode rows of 1 + K tokens come first, then T prefill tokens of up to N sequences.

    Every shape is a capacity, so one compilation serves every batch; the padding values stand at each field.
    D and T are read off the shapes: D = decode_src_slots.shape[0], T = input_ids.shape[0] - D * (1 + K).
    """

    input_ids: torch.Tensor  # [D * (1 + K) + T] int32; padding: 0
    decode_src_slots: torch.Tensor  # [D] int32 state slot read; padding: -1
    decode_dst_slots: torch.Tensor  # [D, 1 + K] int32 state slots written; padding: -1
    cu_seqlens: torch.Tensor  # [N + 1] int32, counted from the first prefill token; last repeated
    initial_slots: torch.Tensor  # [N] int32; -1: zeros
    final_slots: torch.Tensor  # [N] int32; -1: not written
    checkpoint_indptr: torch.Tensor  # [N + 1] int32; last repeated
    checkpoint_offsets: torch.Tensor  # [C] int32, tokens from the sequence's start in this step
    checkpoint_slots: torch.Tensor  # [C] int32; -1: skipped
    block_table: torch.Tensor  # [D + N, max_blocks] int32; decode rows first; padding: 0
    slot_mapping: torch.Tensor  # [D * (1 + K) + T] int32, block * block_size + offset; -1: no write
    seq_lens: torch.Tensor  # [D + N] int32, tokens attended to after this step; padding: 0
    sample_rows: torch.Tensor  # [R] int32, rows of the hidden states whose logits are wanted; padding: 0
