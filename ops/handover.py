"""What a step takes from memory of the host, and what it leaves there.

These are no ops of the library: they run before and after the model's graph, not in it, and only
their caller knows which tensors lie where.
"""

from typing import NamedTuple

import torch
from torch import Tensor

NUM_TURNS = 2  # places on the host: one is filled while a step works on the other


class Places(NamedTuple):
    """Where the fields stand, in words from the start, that are completed on the device.

    An id is the token of a row of the step before, where `prev_rows` names one. The new KV of a
    row goes to the slot of its last position, or nowhere (-1) where its length is 0.
    """

    ids: int
    prev_rows: int
    num_ids: int
    slots: int
    seq_lens: int
    table: int  # [num_rows, width]
    num_rows: int
    width: int
    block_size: int


def fetch(hosts: Tensor, state: Tensor, tokens: Tensor, packed: Tensor, places: Places) -> None:
    """Copy the first words of the next turn, and complete them with what the host leaves out.

    The turn passes on: state[0] becomes 1 - state[0], and packed the start of hosts at that turn.
    Then ids[i] = tokens[prev_rows[i]] where prev_rows[i] >= 0, and with p = seq_lens[r] - 1 each
    slots[r] = table[r, p // block_size] * block_size + p % block_size, or -1 where p < 0.

    Args:
        hosts: [2, words] int32 on the host, pinned if the others are on CUDA. Rows contiguous.
        state: [2] int32: the turn, and 0.
        tokens: [R] int64, sampled before.
        packed: [size] int32, size <= words.
        places: all inside packed.
    """
    if packed.is_cuda:
        from .triton import handover

        handover.fetch(hosts, state, tokens, packed, places)
        return
    turn = 1 - int(state[0])
    state[0] = turn
    packed.copy_(hosts[turn, : len(packed)])
    ids, prev_rows = (packed[at:][: places.num_ids] for at in (places.ids, places.prev_rows))
    ids.copy_(torch.where(prev_rows < 0, ids, tokens[prev_rows.clamp(min=0)]))
    rows, size = places.num_rows, places.block_size
    slots, lengths = (packed[at:][:rows] for at in (places.slots, places.seq_lens))
    table = packed[places.table :][: rows * places.width].view(rows, places.width)
    last = (lengths - 1).clamp(min=0)
    blocks = table.gather(1, (last // size)[:, None].long())[:, 0]
    slots.copy_(torch.where(lengths > 0, blocks * size + last % size, -1))


def post(tokens: Tensor, state: Tensor, posted: Tensor) -> None:
    """Copy tokens to the start of the turn that was fetched last.

    Args:
        tokens: [R] int64.
        state: [2] int32: the turn, and 0.
        posted: [2, R or more] int64 on the host, pinned if the others are on CUDA. Rows contiguous.
    """
    if tokens.is_cuda:
        from .triton import handover

        handover.post(tokens, state, posted)
        return
    posted[int(state[0]), : len(tokens)].copy_(tokens)
