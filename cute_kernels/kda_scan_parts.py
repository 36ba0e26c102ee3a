"""What both scans share: state slots in and out of registers, and the checkpoints of a sequence.

A thread's part of a state, in its MMA tile of 16 V rows: rows g and g + 8, and of each
group p of 16 channels the four from 16 p + 4 t (g = lane // 4, t = lane % 4).
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr

from . import ptx
from .kda_record import DIM
from .ptx import op

NEVER = 0x7FFFFFFF
NO_SLOT = -1


@cute.jit
def load_entry(mOffsets: cute.Tensor, mSlots: cute.Tensor, cursor: Int32, cursor_end: Int32):
    """Offset and slot of a checkpoint entry; past the last one, an offset that no sequence has."""
    offset = Int32(NEVER)
    slot = Int32(NO_SLOT)
    if cursor < cursor_end:
        offset = Int32(mOffsets[cursor])
        slot = Int32(mSlots[cursor])
    return offset, slot


def pick(flag: Any, one: Any, zero: Any) -> Any:
    """`one` where flag is not 0, else `zero`; LLVM would turn 64 plain ones into copies of all."""
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; selp.f32 $0, $2, $3, p; }"
    return op([Float32], text, Int32(flag), Float32(one), Float32(zero))


@cute.jit
def corner(mPool: cute.Tensor, head: Int32, row0: Int32, lane: Int32) -> Int64:
    """Address of this thread's first element in slot 0."""
    element = Int64(head) * (DIM * DIM) + (row0 + lane // 4) * DIM + (lane % 4) * 4
    return Int64(mPool.iterator.toint()) + element * 4


@cute.jit
def load_state(
    state: cute.Tensor,
    pool: Int64,
    stride: Int64,
    slot: Int32,
    num_slots: Int32,
):
    """Read this thread's part of a slot; an id outside the pool reads as zeros."""
    for i in cutlass.range(64, unroll_full=True):
        state[i] = Float32(0.0)
    if slot >= 0 and slot < num_slots:
        source = pool + Int64(slot) * stride
        for p in range_constexpr(8):
            for low in range_constexpr(2):  # rows g and g + 8
                x = ptx.ldg_f32x4(source + low * (8 * DIM * 4) + p * 64)
                at = 8 * p + 2 * low
                state[at], state[at + 1], state[at + 4], state[at + 5] = x[0], x[1], x[2], x[3]


@cute.jit
def store_state(
    state: cute.Tensor,
    pool: Int64,
    stride: Int64,
    slot: Int32,
    num_slots: Int32,
):
    """Write this thread's part of a slot; an id outside the pool writes nothing."""
    if slot >= 0 and slot < num_slots:
        target = pool + Int64(slot) * stride
        for p in range_constexpr(8):
            for low in range_constexpr(2):
                at = 8 * p + 2 * low
                x = [state[at], state[at + 1], state[at + 4], state[at + 5]]
                ptx.stg_f32x4(target + low * (8 * DIM * 4) + p * 64, x)
