"""What both gates of prepare share: shared memory, and a thread's place in it."""

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cutlass_dsl import select_

from .kda_record import RECORD_BYTES, SIDE_BYTES, TILE
from .ptx import lds_f32, rsqrt, sts_f32

THREADS = 64  # a warp for each half of the channels, two neighbouring channels a thread
LOG2E = 1.4426950408889634
NORM_EPS = 1e-6

# Shared memory is the record and some scratch. Raw tiles arrive where k~, q~ and K2 will be:
#   k~, q~    raw k, q -> k~, q~
#   K2        raw g -> k_inv (softplus: rows of a level) -> K2
#   Mq2, Et   warp 0's half of Mqk -> Mq2, Et
#   SUMS      of squares, over half of the channels
#   NORMS     factors made of them, one copy a warp
#   TRI       warp 1's half of L -> -L transposed -> A transposed
SUMS = RECORD_BYTES  # fp32 [2 warps, 3, 16]: k.k, q.q, q.k
NORMS = SUMS + 2 * 3 * TILE * 4  # fp32 [2 warps, 2, 16]: 1 / |k|, scale / |q|
TRI = NORMS + 2 * 2 * TILE * 4  # fp32 [16, 20]
TRI_ROW = 80  # bytes: a column, and eight 16-byte pieces of as many rows, meet no bank twice
SMEM_BYTES = TRI + TILE * TRI_ROW


@dataclass(frozen=True)
class Place:
    """Where a thread works; addresses are those of row 0 of the first tile in shared memory."""

    base: Any  # of the CTA
    warp: Any  # 0, 1: its half of the channels
    lane: Any
    raw: Any  # this thread's two channels, in plain order
    own: Any  # the same in the record's order: pair 2t + b of 16 channels at place 4b + t
    matrix: Any  # this lane's row for ldmatrix of 16 rows and 16 channels (later ones by xor): A
    turned: Any  # the same with the middle two of the four 8 x 8 parts exchanged: B

    @staticmethod
    def of(base: Int32, warp: Int32, lane: Int32) -> "Place":
        half = base + warp * SIDE_BYTES
        row = lane % TILE
        return Place(
            base,
            warp,
            lane,
            half + ((lane // 4) << 4) + (lane % 4) * 4,
            half + (((lane // 8) * 2 + lane % 2) << 4) + ((lane % 8) // 2) * 4,
            half + row * 128 + (((lane // TILE) ^ (row % 8)) << 4),
            half + (lane % 8 + (lane // TILE) * 8) * 128 + (((lane // 8 % 2) ^ (lane % 8)) << 4),
        )


def row_bytes(tensor: Any) -> Int64:
    """From one row (mode 0) to the next."""
    return Int64(tensor.stride[0]) * (tensor.element_type.width // 8)


def row_address(tensor: Any, row: Any) -> Int64:
    return Int64(tensor.iterator.toint()) + Int64(row) * row_bytes(tensor)


def at(pair: Any, row: int) -> Any:
    """`row` rows below a place in row 0: a row is 128 bytes, its 16-byte chunks are swizzled."""
    return (pair ^ ((row % 8) << 4)) + row * 128


def normalise(place: Place, scale: Float32) -> Any:
    """1 / |k| and scale / |q| of the 16 rows: where this warp's copy lies. After both left sums."""
    sums = place.base + (SUMS + place.lane * 4)
    inverse = rsqrt(lds_f32(sums) + lds_f32(sums + 3 * TILE * 4) + NORM_EPS)
    norms = place.base + (NORMS + place.warp * (2 * TILE * 4))
    sts_f32(norms + place.lane * 4, select(place.lane < TILE, inverse, inverse * scale))
    cute.arch.sync_warp()
    return norms


def fma(a: Any, b: Any, c: Any) -> Any:
    return cute.math.fma(Float32(a), Float32(b), Float32(c))


def select(condition: Any, a: Any, b: Any) -> Any:
    return Float32(select_(condition, Float32(a), Float32(b)))
