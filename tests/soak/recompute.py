"""A prefix computed by itself: one sequence, one forward, own pools, no cache.

Its inputs are written out here, so that the step buffers of the engine have no share in it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch_kda.cache.storage import Pools
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.step import StepInputs

FINAL, EARLIER = 0, 1  # slots
GRID = 16  # tokens: states can be exported on multiples of it


class Recomputed(NamedTuple):
    """Of one prefix. The tensors are the pools' own: good until the next forward."""

    states: list[Tensor]  # of each KDA layer [H, V, K]
    windows: list[Tensor]  # of each KDA layer [3, C]
    latents: list[Tensor]  # of each MLA layer [tokens, W]
    earlier: tuple[list[Tensor], list[Tensor]] | None  # states and windows 16 tokens before


class Recompute:
    """A model's plain forward, always eager."""

    def __init__(self, model: KDAForCausalLM) -> None:
        config = model.config
        self.model, self.device = model, model.embed.device
        self.num_blocks = -(-config.max_model_len // GRID)
        self.num_forwards = 0
        self.pools = Pools.allocate(
            config, 2, self.num_blocks, GRID, model.embed.dtype, self.device, fill=float("nan")
        )

    def prefix(self, token_ids: Sequence[int]) -> Recomputed:
        """What the caches hold after these tokens."""
        n, pools = len(token_ids), self.pools
        has_earlier = n % GRID == 0 and n > GRID
        self._forward(token_ids, [n - 1], export=n - GRID if has_earlier else 0)
        earlier = [x[EARLIER] for x in pools.state], [x[EARLIER] for x in pools.conv]
        return Recomputed(
            [x[FINAL] for x in pools.state],
            [x[FINAL] for x in pools.conv],
            [x.flatten(0, 1)[:n] for x in pools.kv],
            earlier if has_earlier else None,
        )

    def logprobs(self, token_ids: Sequence[int], first: int) -> Tensor:
        """[tokens - first, vocab] log probabilities of what follows each token from `first` on."""
        rows = range(first, len(token_ids))
        return self._forward(token_ids, rows, export=0).log_softmax(-1)

    @torch.inference_mode()
    def _forward(self, token_ids: Sequence[int], rows: Sequence[int], *, export: int) -> Tensor:
        self.num_forwards += 1
        n = len(token_ids)
        padding = -n % GRID

        def ints(*values: int) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        inputs = StepInputs(
            input_ids=ints(*token_ids, *[0] * padding),
            decode_src_slots=ints(),
            decode_dst_slots=ints().view(0, 1),
            cu_seqlens=ints(0, n),
            initial_slots=ints(-1),
            final_slots=ints(FINAL),
            checkpoint_indptr=ints(0, int(export > 0)),
            checkpoint_offsets=ints(export),
            checkpoint_slots=ints(EARLIER if export else -1),
            block_table=ints(*range(self.num_blocks)).view(1, -1),
            slot_mapping=ints(*range(n), *[-1] * padding),
            seq_lens=ints(n),
            sample_rows=ints(*rows),
        )
        return self.model(inputs, self.pools.state, self.pools.conv, self.pools.kv)


def relative_rms(x: Tensor, truth: Tensor, dim: int | None = None) -> Tensor:
    """RMS of the difference over that of the truth, along `dim` or of all.

    On the device; infinite where there is a NaN.
    """
    x, truth = x.float(), truth.float()
    error = (x - truth).square().mean(dim).sqrt() / truth.square().mean(dim).sqrt()
    return error.nan_to_num(nan=float("inf"))
