"""What a step takes from memory of the host, and what it leaves there.

These are no ops of the library: they run before and after the model's graph, not in it, and only
their caller knows which tensors lie where.
"""

import torch
from torch import Tensor

NUM_TURNS = 2  # places on the host: one is filled while a step works on the other


def fetch(
    hosts: Tensor,
    state: Tensor,
    tokens: Tensor,
    packed: Tensor,
    *,
    ids_at: int,
    prev_rows_at: int,
    num_ids: int,
) -> None:
    """Copy the first words of the next turn, with ids of tokens that only the device knows yet.

    The turn passes on: state[0] becomes 1 - state[0], and packed the start of hosts at that turn.
    Then, where prev_row >= 0, the id is tokens[prev_row].

    Args:
        hosts: [2, words] int32 on the host, pinned if the others are on CUDA. Rows contiguous.
        state: [2] int32: the turn, and 0.
        tokens: [R] int64, sampled before.
        packed: [size] int32, size <= words.
        ids_at, prev_rows_at, num_ids: where in packed so many ids and prev_rows begin.
    """
    if packed.is_cuda:
        from .triton import handover

        places = {"ids_at": ids_at, "prev_rows_at": prev_rows_at, "num_ids": num_ids}
        handover.fetch(hosts, state, tokens, packed, **places)
        return
    turn = 1 - int(state[0])
    state[0] = turn
    packed.copy_(hosts[turn, : len(packed)])
    ids, prev_rows = packed[ids_at:][:num_ids], packed[prev_rows_at:][:num_ids]
    ids.copy_(torch.where(prev_rows < 0, ids, tokens[prev_rows.clamp(min=0)]))


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
