"""The scan on mma.sync: for machines without wgmma (sm_100a), from the same records.

The same steps as in `kda_scan.py`; on an H200 it runs too, and is tested there, but is slower where
there are many heads: each warp reads every operand from shared memory.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from . import ptx
from .kda_prepare_parts import row_bytes
from .kda_record import (
    DIM,
    ET,
    K_DECAYED,
    K_UPDATE,
    MQ,
    Q_DECAYED,
    RECORD_BYTES,
    SIDE_BYTES,
    TILE,
)
from .kda_scan_parts import corner, load_entry, load_state, store_state

V_STAGES = 4


class KdaScanMma:
    """o and states of every (sequence, head) from the records that prepare made.

        R = v - k~ S^T;  o = q~ S^T + Mq2 R;  S = S * Et + R^T K2

    A CTA owns `rows` V rows of one (sequence, head), a warp 16 of them, so no two warps ever talk.
    """

    def __init__(self, rows: int = 64, stages: int = 6):
        assert rows % 16 == 0 and DIM % rows == 0, f"{rows=}"
        self.rows, self.stages = rows, stages
        self.warps = rows // 16
        self.splits = DIM // rows
        self.threads = 32 * (self.warps + 1)
        self.v_tile_bytes = TILE * 16 * 2
        self.v_base = stages * RECORD_BYTES
        self.o_base = self.v_base + self.warps * V_STAGES * self.v_tile_bytes
        self.barrier_base = self.o_base + self.warps * self.v_tile_bytes
        self.smem_bytes = self.barrier_base + 16 * stages

    @cute.jit
    def __call__(
        self,
        mRecords: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mPool: cute.Tensor,
        mOrder: cute.Tensor,
        mInitial: cute.Tensor,
        mFinal: cute.Tensor,
        mIndptr: cute.Tensor,
        mOffsets: cute.Tensor,
        mSlots: cute.Tensor,
        stream: Any,
    ):
        heads = Int32(cute.size(mV, mode=[1]))
        sequences = cute.size(mInitial, mode=[0])
        self.kernel(
            mRecords, mV, mO, mPool, mOrder, mInitial, mFinal, mIndptr, mOffsets, mSlots, heads
        ).launch(
            grid=[heads * self.splits, sequences, 1],
            block=[self.threads, 1, 1],
            smem=self.smem_bytes + 1024,
            min_blocks_per_mp=1,  # else ptxas saves registers at the cost of the schedule
            preferred_smem_carveout=100,
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self,
        mRecords: cute.Tensor,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mPool: cute.Tensor,
        mOrder: cute.Tensor,
        mInitial: cute.Tensor,
        mFinal: cute.Tensor,
        mIndptr: cute.Tensor,
        mOffsets: cute.Tensor,
        mSlots: cute.Tensor,
        heads: Int32,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, rank, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(tidx // 32)
        head = block // self.splits
        split = block % self.splits
        smem = SmemAllocator().allocate(self.smem_bytes, 128)
        base = Int32(smem.toint())
        full = base + self.barrier_base
        empty = full + 8 * self.stages

        if tidx == 0:
            for s in range_constexpr(self.stages):
                ptx.mbarrier_init(full + 8 * s, 1)
                ptx.mbarrier_init(empty + 8 * s, self.warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        sequence, first, length, tile0 = ptx.ldg_b32x4(
            Int64(mOrder.iterator.toint()) + Int64(rank) * 16
        )
        tiles = (length + (TILE - 1)) // TILE
        if warp == self.warps:
            self.load(mRecords, base, full, empty, head, heads, tile0, tiles)
        else:
            self.scan(
                mV, mO, mPool, mInitial, mFinal, mIndptr, mOffsets, mSlots,
                base, full, empty, head, split, warp, sequence, first, length, tiles,
            )  # fmt: skip

    @cute.jit
    def load(
        self,
        mRecords: cute.Tensor,
        base: Int32,
        full: Int32,
        empty: Int32,
        head: Int32,
        heads: Int32,
        tile0: Int32,
        tiles: Int32,
    ):
        """One lane brings record after record into the ring."""
        if cute.arch.lane_idx() == 0:
            source = Int64(mRecords.iterator.toint()) + (Int64(tile0) * heads + head) * RECORD_BYTES
            stride = Int64(heads) * RECORD_BYTES
            stage = Int32(0)
            parity = Int32(1)  # the first pass over the ring finds every stage empty
            for _ in cutlass.range(tiles, unroll=1):
                ptx.mbarrier_wait(empty + 8 * stage, parity)
                ptx.mbarrier_expect(full + 8 * stage, RECORD_BYTES)
                ptx.bulk_load(base + stage * RECORD_BYTES, source, RECORD_BYTES, full + 8 * stage)
                source += stride
                stage += 1
                if stage == self.stages:
                    stage = Int32(0)
                    parity ^= 1

    @cute.jit
    def scan(
        self,
        mV: cute.Tensor,
        mO: cute.Tensor,
        mPool: cute.Tensor,
        mInitial: cute.Tensor,
        mFinal: cute.Tensor,
        mIndptr: cute.Tensor,
        mOffsets: cute.Tensor,
        mSlots: cute.Tensor,
        base: Int32,
        full: Int32,
        empty: Int32,
        head: Int32,
        split: Int32,
        warp: Int32,
        sequence: Int32,
        first: Int32,
        length: Int32,
        tiles: Int32,
    ):
        """The steps of one warp."""
        lane = cute.arch.lane_idx()
        row0 = split * self.rows + warp * 16
        num_slots = Int32(cute.size(mPool, mode=[0]))
        pool = corner(mPool, head, row0, lane)
        pool_stride = row_bytes(mPool)
        state = cute.make_rmem_tensor((64,), Float32)
        load_state(state, pool, pool_stride, mInitial[sequence], num_slots)

        # v: a lane brings 16 bytes of token lane // 2; 32-byte rows, swizzled by the token's bit 2
        v_token = lane // 2
        v_shared = base + self.v_base + warp * (V_STAGES * self.v_tile_bytes)
        v_store = v_token * 32 + (((lane % 2) ^ ((v_token >> 2) & 1)) << 4)
        v_stride = row_bytes(mV)
        v_source = (
            Int64(mV.iterator.toint())
            + Int64(first + v_token) * v_stride
            + Int64(head * DIM + row0 + (lane % 2) * 8) * 2
        )
        v_left = length - v_token  # > 0: this lane's token of the next tile to fetch exists
        for s in range_constexpr(V_STAGES - 1):
            self.fetch_v(v_shared + s * self.v_tile_bytes + v_store, v_source, v_left)
            v_source += v_stride * TILE
            v_left -= TILE

        # ldmatrix row addresses inside a record and inside a v or o tile
        l7 = lane & 7
        b_row = (l7 + ((lane >> 4) << 3)) * 128  # k~, q~: token
        b_chunk = ((lane >> 3) & 1) ^ l7
        u_row = (l7 + (((lane >> 3) & 1) << 3)) * 128  # K2: token
        u_chunk = (lane >> 4) ^ l7
        x_token = l7 + ((lane >> 4) << 3)
        x_load = x_token * 32 + ((((lane >> 3) & 1) ^ ((x_token >> 2) & 1)) << 4)

        o_shared = base + self.o_base + warp * self.v_tile_bytes
        o_out = (
            Int64(mO.iterator.toint())
            + Int64(first + v_token) * row_bytes(mO)
            + Int64(head * DIM + row0 + (lane % 2) * 8) * 2
        )
        o_step = row_bytes(mO) * TILE

        cursor = Int32(mIndptr[sequence])
        cursor_end = Int32(mIndptr[sequence + 1])
        due, slot = load_entry(mOffsets, mSlots, cursor, cursor_end)

        u = cute.make_rmem_tensor((8,), Float32)
        early_o = cute.make_rmem_tensor((8,), Float32)
        stage = Int32(0)
        parity = Int32(0)
        if tiles > 0:
            ptx.mbarrier_wait(full, 0)
        for p in range_constexpr(8):
            self.project(state, u, early_o, p, self.load_project(base, p, b_row, b_chunk))

        for step in cutlass.range(tiles, unroll=1):
            record = base + stage * RECORD_BYTES
            slot_v = (step % V_STAGES) * self.v_tile_bytes
            slot_fetch = ((step + V_STAGES - 1) % V_STAGES) * self.v_tile_bytes
            self.fetch_v(v_shared + slot_fetch + v_store, v_source, v_left)
            v_source += v_stride * TILE
            v_left -= TILE
            cute.arch.cp_async_wait_group(V_STAGES - 1)
            cute.arch.sync_warp()

            next_stage = stage + 1
            next_parity = parity
            if next_stage == self.stages:
                next_stage = Int32(0)
                next_parity = parity ^ 1
            ready = ptx.mbarrier_test(full + 8 * next_stage, next_parity)

            o = [early_o[i] for i in range(8)]
            # R = v - u, in the accumulator's layout and at once the A operand of the next products
            v = ptx.ldmatrix_x4(v_shared + slot_v + x_load, trans=True)
            r = []
            for i in range_constexpr(4):
                low, high = ptx.unpack_bf16(v[i])
                r.append(ptx.pack_bf16(low - u[2 * i], high - u[2 * i + 1]))

            # the next record: its k~ and q~ meet each group of the state one group behind the
            # update, so that no product waits for the one before it
            if step + 1 < tiles and ready == 0:
                ptx.mbarrier_wait(full + 8 * next_stage, next_parity)
            next_record = base + next_stage * RECORD_BYTES
            decay = [self.load_decay(record, p, lane) for p in range(2)]
            k2 = [self.load_update(record, p, u_row, u_chunk) for p in range(2)]
            kq = []
            for p in range_constexpr(9):
                if const_expr(p < 8):
                    self.update(state, r, p, decay[p], k2[p])
                if const_expr(p + 2 < 8):
                    decay.append(self.load_decay(record, p + 2, lane))
                    k2.append(self.load_update(record, p + 2, u_row, u_chunk))
                if const_expr(p < 8):
                    kq.append(self.load_project(next_record, p, b_row, b_chunk))
                if const_expr(p > 0):
                    self.project(state, u, early_o, p - 1, kq[p - 1])

            # o += Mq2 R
            b = ptx.ldmatrix_x4(record + MQ + lane * 16)
            o = [*ptx.mma_bf16(o[0:4], r, b[0:2]), *ptx.mma_bf16(o[4:8], r, b[2:4])]
            cute.arch.sync_warp()
            if lane == 0:
                ptx.mbarrier_arrive(empty + 8 * stage)
            stage = next_stage
            parity = next_parity

            pairs = [ptx.pack_bf16(o[2 * i], o[2 * i + 1]) for i in range(4)]
            ptx.stmatrix_x4_trans(o_shared + x_load, pairs)
            cute.arch.sync_warp()
            out = ptx.lds_b32x4(o_shared + v_store)
            if step * TILE + v_token < length:
                ptx.stg_b32x4(o_out, out)
            o_out += o_step

            # checkpoints whose turn has come; offsets that fit no tile border are passed over
            done = (step + 1) * TILE
            while due <= done:
                if due == done and done <= length:
                    store_state(state, pool, pool_stride, slot, num_slots)
                cursor += 1
                due, slot = load_entry(mOffsets, mSlots, cursor, cursor_end)

        store_state(state, pool, pool_stride, mFinal[sequence], num_slots)

    @cute.jit
    def fetch_v(self, shared: Int32, source: Int64, left: Int32):
        """This lane's 16 bytes of a v tile; tokens past the end read as zero."""
        num_bytes = Int32(0)
        if left > 0:
            num_bytes = Int32(16)
        ptx.cp_async_16(shared, source, num_bytes)
        cute.arch.cp_async_commit_group()

    def load_decay(self, record: Any, p: int, lane: Any) -> Any:
        return ptx.lds_f32x4(record + ET + p * 64 + (lane % 4) * 16)

    def load_update(self, record: Any, p: int, u_row: Any, u_chunk: Any) -> Any:
        where = record + K_UPDATE + (p // 4) * SIDE_BYTES + u_row + ((u_chunk ^ (2 * (p % 4))) << 4)
        return ptx.ldmatrix_x4(where, trans=True)

    def load_project(self, record: Any, p: int, b_row: Any, b_chunk: Any) -> Any:
        where = record + (p // 4) * SIDE_BYTES + b_row + ((b_chunk ^ (2 * (p % 4))) << 4)
        return ptx.ldmatrix_x4(where + K_DECAYED) + ptx.ldmatrix_x4(where + Q_DECAYED)

    def update(self, state: Any, r: Any, p: int, decay: Any, b: Any) -> None:
        """S = S * Et + R^T K2 for the 16 channels of group p."""
        for half in range(2):
            at = 8 * p + 4 * half
            acc = [state[at + i] * decay[2 * half + i % 2] for i in range(4)]
            acc = ptx.mma_bf16(acc, r, b[2 * half : 2 * half + 2])
            for i in range(4):
                state[at + i] = acc[i]

    def project(self, state: Any, u: Any, o: Any, p: int, b: Any) -> None:
        """Round group p of the state to bf16 and add its share of u = k~ S^T and o = q~ S^T."""
        a = [ptx.pack_bf16(state[8 * p + 2 * i], state[8 * p + 2 * i + 1]) for i in range(4)]
        for j, (to, at) in enumerate(((u, 0), (u, 4), (o, 0), (o, 4))):
            acc = [to[at + i] for i in range(4)] if p > 0 else [Float32(0.0)] * 4
            acc = ptx.mma_bf16(acc, a, b[2 * j : 2 * j + 2])
            for i in range(4):
                to[at + i] = acc[i]
