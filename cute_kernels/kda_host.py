"""What each compiled object launches: `@cute.jit` host functions, and the fake tensors for them.

Sizes and strides are symbols: one object serves every number of tokens, sequences, heads and slots.
"""

from collections.abc import Callable
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, range_constexpr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from .kda_prepare import KdaPrepareSm90
from .kda_record import DIM, RECORD_BYTES, TILE
from .kda_scan import KdaScanSm90
from .kda_scan_mma import KdaScanMma
from .tiles import SCAN_TILES


class KdaPrefill:
    """One call of the op: prepare, then scan, on one stream."""

    def __init__(self, arch: str, gate: str):
        self.gate = gate
        self.prepare = KdaPrepareSm90(bounded=gate == "bounded")
        tiles = [tile for tile, _ in SCAN_TILES]
        if arch == "sm_90a":
            self.scans = [KdaScanSm90(tile.rows, tile.stages, tile.parts) for tile in tiles]
        else:  # wgmma is Hopper's alone
            self.scans = [KdaScanMma(tile.rows, tile.stages) for tile in tiles]

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mV: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mALog: cute.Tensor,
        mDtBias: cute.Tensor,
        mPool: cute.Tensor,
        mCuSeqlens: cute.Tensor,
        mInitial: cute.Tensor,
        mFinal: cute.Tensor,
        mIndptr: cute.Tensor,
        mOffsets: cute.Tensor,
        mSlots: cute.Tensor,
        mRecords: cute.Tensor,
        mO: cute.Tensor,
        lower_bound: Float32,
        scale: Float32,
        stages: Int32,
        scan_tile: Int32,
        stream: Any,
    ):
        """`mRecords`: the records, and behind them the order of sequences, 16 bytes for each.

        `stages`: bits of what is launched, 1 prepare, 2 scan. `scan_tile` of SCAN_TILES. Without
        tokens nothing is launched; the kernels are still loaded.
        """
        num_tokens = Int32(cute.size(mQ, mode=[0]))
        num_sequences = Int32(cute.size(mInitial, mode=[0]))
        num_tiles = (num_tokens + (TILE - 1)) // TILE + num_sequences
        record_bytes = Int64(num_tiles) * Int32(cute.size(mV, mode=[1])) * RECORD_BYTES
        address = Int64(mRecords.iterator.toint()) + record_bytes
        order = cute.make_tensor(
            cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout(4 * num_sequences),
        )
        _name_kernel(self.prepare, f"kda_prepare_{self.gate}")
        if num_tokens > 0:
            if stages & 1 != 0:
                self.prepare(
                    mQ, mK, mG, mBeta, mALog, mDtBias, mCuSeqlens, mRecords, order, mO,
                    num_sequences, lower_bound, scale, stream,
                )  # fmt: skip
            for i in range_constexpr(len(self.scans)):
                _name_kernel(self.scans[i], f"kda_scan_v{self.scans[i].rows}")
                if stages & 2 != 0 and scan_tile == i:
                    self.scans[i](
                        mRecords, mV, mO, mPool, order, mInitial, mFinal,
                        mIndptr, mOffsets, mSlots, stream,
                    )  # fmt: skip


def _name_kernel(kernel: Any, name: str) -> None:
    """What profilers and reports show, with a number; holds from the next launch that is traced."""
    type(kernel).kernel.set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)


def prefill(arch: str, gate: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`KdaPrefill` and its arguments."""
    T, H, HV, slots = cute.sym_int(), cute.sym_int(), cute.sym_int(), cute.sym_int()
    N, E = cute.sym_int(), cute.sym_int()
    slot_stride = cute.sym_int64(divisibility=4)
    pool = _tensor(Float32, (slots, HV, DIM, DIM), (slot_stride, DIM * DIM, DIM, 1))
    return KdaPrefill(arch, gate), (
        *(_rows(T, H), _rows(T, H), _rows(T, HV), _rows(T, HV)),
        _tensor(BFloat16, (T, HV), (cute.sym_int64(), 1), align=2),
        _tensor(Float32, (HV,), (1,), align=4),
        _tensor(Float32, (HV, DIM), (DIM, 1), align=4),
        pool,
        *(_list(), _list(N), _list(N)),
        *(_list(), _list(E), _list(E)),
        _tensor(Uint8, (cute.sym_int64(),), (1,), align=128),
        _rows(T, HV),
        *(Float32(0), Float32(0), Int32(0), Int32(0)),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )


def _rows(T: Any, heads: Any) -> Any:
    """[T, heads, 128] bf16 with any row stride that keeps 16-byte loads."""
    return _tensor(BFloat16, (T, heads, DIM), (cute.sym_int64(divisibility=8), DIM, 1))


def _list(size: Any = None, align: int = 4) -> Any:
    return _tensor(Int32, (cute.sym_int() if size is None else size,), (1,), align)


def _tensor(
    dtype: type[cutlass.Numeric], shape: tuple[Any, ...], stride: tuple[Any, ...], align: int = 16
) -> Any:
    return make_fake_tensor(dtype, shape, stride, assumed_align=align)
