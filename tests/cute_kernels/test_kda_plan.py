"""The plan kernel's PTX on the CPU, bit for bit against the plan in PyTorch."""

from collections.abc import Callable
from itertools import accumulate

import numpy as np
import pytest
import torch
from torch_kda.cute_kernels.kda_prefill import plan_size
from torch_kda.ops.kda import kda_plan
from torch_kda.tests.checks import assert_same
from torch_kda.tests.cute_kernels import ptx_machine
from torch_kda.tests.cute_kernels.conftest import Built
from torch_kda.tests.ops.cases import ints

RESERVED = 1024  # bytes of a CTA's shared memory that are the system's
NUM_WARPS = 32
GUARD = 0x5A5A5A5A

LENGTHS = {
    "empty": [0],
    "1": [1],
    "16": [16],
    "17-0-32-5": [17, 0, 32, 5],
    "long-among-short": [40, 1, 5000, 40, 0, 300, 299],
    "64x128": [128] * 64,
    "300": [7 * n % 130 for n in range(300)],
    "more-tiles-than-threads": [20_000],
}


def run(
    built: Built, cu_seqlens: torch.Tensor, num_tokens: int, order: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The plan that the kernel writes, and what stands after it."""
    program = ptx_machine.Program(built.ptx["kda_plan"].read_text(), "kda_plan")
    shared = built.entries["kda_plan"]["kernels"]["kda_plan_0"]["shared_bytes"]
    size = plan_size(num_tokens, cu_seqlens.shape[0] - 1)
    out = np.full(size + 16, GUARD, np.int32)
    memory = ptx_machine.Memory()
    tensors = [memory.add(cu_seqlens.numpy()), memory.add(out)]
    sizes = [cu_seqlens.shape[0], size]
    params = [
        address.to_bytes(8, "little") + n.to_bytes(4, "little") + bytes(4)
        for address, n in zip(tensors, sizes, strict=True)
    ]
    cta = ptx_machine.Cta(
        program,
        [*params, num_tokens.to_bytes(4, "little")],
        memory,
        block=0,
        num_blocks=1,
        threads=32 * NUM_WARPS,
        shared_bytes=shared - RESERVED,
    )
    cta.run(order)
    return out[:size], out[size:]


def check(built: Built, cu: list[int], num_tokens: int, order: list[int]) -> None:
    cu_seqlens = ints(cu)
    got, after = run(built, cu_seqlens, num_tokens, order)
    assert_same("plan", torch.from_numpy(got), kda_plan(cu_seqlens, num_tokens))
    assert (after == GUARD).all(), "written past the end of the plan"


@pytest.fixture
def built(objects: Callable[[str], Built]) -> Built:
    return objects("sm_90a")


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_kda_plan(lengths: list[int], built: Built) -> None:
    cu = [*accumulate(lengths, initial=0)]
    check(built, cu, cu[-1] + 37, list(range(NUM_WARPS)))


def test_kda_plan_warps_in_any_order(built: Built) -> None:
    """What one warp writes, another reads only after a barrier: the last warp may come first."""
    cu = [*accumulate(LENGTHS["300"], initial=0)]
    check(built, cu, cu[-1], list(range(NUM_WARPS))[::-1])


def test_kda_plan_most_sequences(built: Built) -> None:
    cu = [*accumulate(((37 * n) % 61 for n in range(4096)), initial=0)]
    check(built, cu, cu[-1] + 5, list(range(NUM_WARPS)))


@pytest.mark.parametrize("cu", [[0, 50, 90], [0, 50, 20, 40], [-7, 20, 1000]], ids=str)
def test_kda_plan_wrong_lengths(cu: list[int], built: Built) -> None:
    """A caller's mistake leads to no access outside the tensors."""
    _, after = run(built, ints(cu), 40, list(range(NUM_WARPS)))
    assert (after == GUARD).all()
