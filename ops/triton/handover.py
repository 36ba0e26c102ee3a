"""What a step reads from pinned memory of the host, and what it writes there."""

# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportReturnType=false
# The checker reads kernels as plain Python, and does not know a launch.

import triton
import triton.language as tl
from torch import Tensor

from ..handover import Places

FETCH_BLOCK = 1024  # words of a program
POST_BLOCK = 256  # tokens of a program


def fetch(
    hosts: Tensor,
    state: Tensor,
    tokens: Tensor,
    packed: Tensor,
    places: Places,
    *,
    block: int = FETCH_BLOCK,
) -> None:
    """`ops.handover.fetch`."""
    size = packed.shape[0]
    _fetch_kernel[(triton.cdiv(size, block),)](
        *(hosts, state, tokens, packed, hosts.stride(0), size, *places), BLOCK=block
    )


def post(tokens: Tensor, state: Tensor, posted: Tensor, *, block: int = POST_BLOCK) -> None:
    """`ops.handover.post`."""
    size = tokens.shape[0]
    _post_kernel[(triton.cdiv(size, block),)](
        *(tokens, state, posted, posted.stride(0), size), BLOCK=block
    )


@triton.jit
def _fetch_kernel(
    hosts,
    state,
    tokens,
    packed,
    host_stride,
    size,
    ids_at,
    prev_rows_at,
    num_ids,
    slots_at,
    seq_lens_at,
    table_at,
    num_rows,
    width,
    block_size,
    BLOCK: tl.constexpr,
):
    turn = 1 - tl.load(state)
    host = hosts + turn * host_stride
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(host + at, mask=at < size, other=0)
    is_id = (at >= ids_at) & (at < ids_at + num_ids)
    prev_rows = tl.load(host + (at - ids_at + prev_rows_at), mask=is_id, other=-1)
    is_taken = prev_rows >= 0
    taken = tl.load(tokens + prev_rows, mask=is_taken, other=0)
    words = tl.where(is_taken, taken.to(tl.int32), words)
    row = at - slots_at
    is_slot = (row >= 0) & (row < num_rows)
    last = tl.load(host + seq_lens_at + row, mask=is_slot, other=0) - 1
    is_real = is_slot & (last >= 0)
    block = tl.load(host + table_at + row * width + last // block_size, mask=is_real, other=0)
    slot = tl.where(is_real, block * block_size + last % block_size, -1)
    tl.store(packed + at, tl.where(is_slot, slot, words), mask=at < size)
    # the last program to arrive passes the turn on, when each thread of each has read it
    tl.debug_barrier()
    if tl.atomic_add(state + 1, 1) == tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        tl.store(state, turn)


@triton.jit
def _post_kernel(tokens, state, posted, posted_stride, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = posted + tl.load(state) * posted_stride
    tl.store(here + at, tl.load(tokens + at, mask=at < size, other=0), mask=at < size)
