"""The tensors behind the numbers: state slots, conv windows, KV blocks."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

GIB = 1 << 30


class PoolShapes(Protocol):
    """What a model says of its caches; `kda.config.ModelConfig` does."""

    @property
    def num_kda_layers(self) -> int: ...
    @property
    def num_mla_layers(self) -> int: ...
    @property
    def linear_num_heads(self) -> int: ...
    @property
    def linear_head_dim(self) -> int: ...
    @property
    def conv_dim(self) -> int: ...  # channels of a conv window
    @property
    def latent_dim(self) -> int: ...  # elements cached for a token of one MLA layer


@dataclass(frozen=True, slots=True)
class Pools:
    """All caches of a model on one device: an own tensor for each layer and kind.

    Slot s of all `state` and `conv` tensors belongs to one sequence or checkpoint; block b of all
    `kv` tensors holds the same tokens. A compiled graph takes each tensor as an input of its own:
    views of one blob were seen to be copied, or to lose writes, when they interleave.
    """

    state: list[Tensor]  # KDA layers: [slots, HV, V, K] fp32, V first
    conv: list[Tensor]  # KDA layers: [slots, 3, C] model dtype, oldest first, raw inputs
    kv: list[Tensor]  # MLA layers: [blocks, block_size, R + P] model dtype

    @classmethod
    def allocate(
        cls,
        shapes: PoolShapes,
        num_slots: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        fill: float = 0.0,
    ) -> "Pools":
        """
        Args:
            dtype: of conv windows and KV; states are fp32.
            fill: first content; NaN in tests, where every read of unwritten memory shall show.

        Raises:
            ValueError: a count is not positive.
            RuntimeError: there is no memory; the message says how much was asked for.
        """
        for name, count in (
            ("num_slots", num_slots),
            ("num_blocks", num_blocks),
            ("block_size", block_size),
        ):
            if count < 1:
                raise ValueError(f"Pools.allocate: {name} must be >= 1, got {count}")
        heads, dim = shapes.linear_num_heads, shapes.linear_head_dim
        layouts = (
            (shapes.num_kda_layers, (num_slots, heads, dim, dim), torch.float32),
            (shapes.num_kda_layers, (num_slots, 3, shapes.conv_dim), dtype),
            (shapes.num_mla_layers, (num_blocks, block_size, shapes.latent_dim), dtype),
        )
        try:
            return cls(
                *(
                    [torch.full(shape, fill, dtype=kind, device=device) for _ in range(layers)]
                    for layers, shape, kind in layouts
                )
            )
        # torch raises OutOfMemoryError, a RuntimeError, on a GPU and plain RuntimeError on a CPU
        except RuntimeError as error:
            gib = [
                layers * math.prod(shape) * kind.itemsize / GIB for layers, shape, kind in layouts
            ]
            raise RuntimeError(
                f"Pools.allocate: {num_slots} state slots ({gib[0] + gib[1]:,.2f} GiB) and "
                f"{num_blocks} KV blocks ({gib[2]:,.2f} GiB) do not fit on {device}; "
                "lower num_state_slots, num_kv_blocks or memory_bytes"
            ) from error

    @property
    def state_bytes(self) -> int:
        return sum(x.nbytes for x in self.state)

    @property
    def conv_bytes(self) -> int:
        return sum(x.nbytes for x in self.conv)

    @property
    def kv_bytes(self) -> int:
        return sum(x.nbytes for x in self.kv)

    @property
    def total_bytes(self) -> int:
        return self.state_bytes + self.conv_bytes + self.kv_bytes
