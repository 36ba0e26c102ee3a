"""The serial half of KDA prefill: walk a sequence tile by tile, the fp32 state an accumulator.

mX: whole tensor in global memory. Addresses in shared memory are Int32 byte addresses.
g, t: lane // 4 and lane % 4, row and column pair of a fragment. p: group of 16 channels (0..7).
The design, its record layout and its measurements: profiles/results/kda_design.md.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from . import ptx
from .kda_prepare_parts import row_bytes
from .kda_record import DIM, ET, K_UPDATE, MQ, RECORD_BYTES, SIDE_BYTES, TILE
from .kda_scan_parts import NEVER, NO_SLOT, corner, load_entry, load_state, pick, store_state
from .ptx import bulk_store, lds_b32, sts_b32, sts_f32x4

# upper halves of wgmma matrix descriptors: swizzle kind, 8-row stride / 16
SW128 = 0x40000000 | (1024 >> 4)
NO_SWIZZLE = 256 >> 4
# lower halves: leading stride / 16; the start address / 16 is added
LEAD_SWIZZLED_K = 1 << 16
LEAD_SWIZZLED_MN = (SIDE_BYTES >> 4) << 16
LEAD_CORE = (128 >> 4) << 16
V_LAG = 2  # tiles between a request for v and the wait for it; the scan looks two tiles ahead


def get(tensor: cute.Tensor, start: int, count: int) -> list[Any]:
    return [tensor[start + i] for i in range(count)]


def put(tensor: cute.Tensor, start: int, values: Any) -> None:
    for i, value in enumerate(values):
        tensor[start + i] = value


class KdaScanSm90:
    """o and states of every (sequence, head) from the records that prepare made.

        R = v - k~ S^T;  o = q~ S^T + Mq2 R;  S = S * Et + R^T K2

    A CTA owns `rows` V rows of one (sequence, head), a warpgroup 64 of them: S is the accumulator
    of one m64n128 product, its bf16 shadow the register operand of the next. One more warp brings
    records and v, another sends checkpoints off. k~ and q~ are one n32 operand, since a record
    holds them side by side.

    parts: the update is cut in so many products, so that packing one part overlaps with the next.

    One run of steps serves the whole sequence. A state that is wanted goes to shared memory in the
    shadow of the projection after it, where its registers are whole and not yet decayed.
    """

    def __init__(self, rows: int = 64, stages: int = 6, parts: int = 1):
        assert rows in (64, 128) and parts in (1, 2) and stages >= V_LAG + 3
        self.rows, self.stages, self.parts = rows, stages, parts
        self.early = 4 * (parts - 1)  # groups of Et that are loaded between the parts: no spills
        self.groups = rows // 64
        self.splits = DIM // rows
        self.warps = 4 * self.groups
        self.threads = 32 * (self.warps + 2)
        self.v_pitch = rows * 2 + 16  # bytes of a token's v, padded against bank conflicts
        self.v_bytes = TILE * self.v_pitch
        self.v_base = stages * RECORD_BYTES
        self.o_base = self.v_base + stages * self.v_bytes
        self.export_base = self.o_base + self.warps * 512
        self.export_bytes = rows * DIM * 4  # this CTA's rows of a state
        self.note_base = self.export_base + self.export_bytes
        self.barrier_base = self.note_base + 16
        self.smem_bytes = self.barrier_base + 16 * stages + 16

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
        smem = SmemAllocator().allocate(self.smem_bytes, 1024)
        base = Int32(smem.toint())
        full = base + self.barrier_base
        empty = full + 8 * self.stages
        ready = empty + 8 * self.stages
        staged = ready + 8

        if tidx == 0:
            for s in range_constexpr(self.stages):
                ptx.mbarrier_init(full + 8 * s, 1 + 32)  # the record's copy, and v by each lane
                ptx.mbarrier_init(empty + 8 * s, 32 * self.warps)
            ptx.mbarrier_init(ready, 1)
            ptx.mbarrier_init(staged, 32 * self.warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

        entry = Int64(mOrder.iterator.toint()) + Int64(rank) * 16
        sequence, first, length, tile0 = ptx.ldg_b32x4(entry)
        length = cute.arch.make_warp_uniform(length)
        tiles = (length + (TILE - 1)) // TILE
        if warp == self.warps:
            self.load(
                mRecords, mV, base, full, empty, head, heads, split, first, length, tile0, tiles
            )  # fmt: skip
        elif warp == self.warps + 1:
            if tidx % 32 == 0 and tiles > 0:
                self.export(
                    mPool, mIndptr, mOffsets, mSlots,
                    base, ready, staged, head, split, sequence, length,
                )  # fmt: skip
        else:
            self.scan(
                mO, mPool, mInitial, mFinal,
                base, full, empty, ready, staged, head, split, warp, sequence, first, length, tiles,
            )  # fmt: skip

    @cute.jit
    def load(
        self,
        mRecords: cute.Tensor,
        mV: cute.Tensor,
        base: Int32,
        full: Int32,
        empty: Int32,
        head: Int32,
        heads: Int32,
        split: Int32,
        first: Int32,
        length: Int32,
        tile0: Int32,
        tiles: Int32,
    ):
        """Brings records into the ring by bulk copy, and each tile's v beside it by cp.async.

        A tile's v is waited for `V_LAG` tiles later and then announced like any other write, not by
        an asynchronous arrival: that one racecheck does not see. On both sides of the ring each
        lane arrives for itself, since ptxas drops the warp barrier that one for all would need.
        """
        lane = cute.arch.lane_idx()
        source = Int64(mRecords.iterator.toint()) + (Int64(tile0) * heads + head) * RECORD_BYTES
        stride = Int64(heads) * RECORD_BYTES
        chunks = self.rows // 8  # of 16 bytes in a token's row
        token = lane // chunks
        per_pass = 32 // chunks  # tokens
        v_stride = row_bytes(mV)
        v_source = (
            Int64(mV.iterator.toint())
            + Int64(first + token) * v_stride
            + Int64(head * DIM + split * self.rows + (lane % chunks) * 8) * 2
        )
        v_shared = base + self.v_base + token * self.v_pitch + (lane % chunks) * 16
        stage = Int32(0)
        parity = Int32(1)  # the first pass over the ring finds every stage empty
        late = Int32(0)  # the stage whose v is announced
        left = length - token
        for i in cutlass.range(tiles + V_LAG, unroll=1):
            if i < tiles:
                ptx.mbarrier_wait(empty + 8 * stage, parity)
                if lane == 0:
                    barrier = full + 8 * stage
                    ptx.mbarrier_expect(barrier, RECORD_BYTES)
                    ptx.bulk_load(base + stage * RECORD_BYTES, source, RECORD_BYTES, barrier)
                for n in range_constexpr(TILE // per_pass):
                    num_bytes = Int32(16)
                    if left <= n * per_pass:
                        num_bytes = Int32(0)  # zeros past the end
                    ptx.cp_async_16(
                        v_shared + stage * self.v_bytes + n * per_pass * self.v_pitch,
                        v_source + v_stride * (n * per_pass),
                        num_bytes,
                    )
                source += stride
                v_source += v_stride * TILE
                left -= TILE
                stage += 1
                if stage == self.stages:
                    stage = Int32(0)
                    parity ^= 1
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(V_LAG)
            if i >= V_LAG:
                ptx.mbarrier_arrive(full + 8 * late)
                late += 1
                if late == self.stages:
                    late = Int32(0)

    @cute.jit
    def export(
        self,
        mPool: cute.Tensor,
        mIndptr: cute.Tensor,
        mOffsets: cute.Tensor,
        mSlots: cute.Tensor,
        base: Int32,
        ready: Int32,
        staged: Int32,
        head: Int32,
        split: Int32,
        sequence: Int32,
        length: Int32,
    ):
        """One thread that finds out which states are wanted, and sends them off.

        The scan only has to know the tile after which one is wanted, two ahead. When it has put the
        state into shared memory, the copy to its slots is this thread's, while the scan runs on.
        Entries that fit no border of a tile are passed over.
        """
        num_slots = Int32(cute.size(mPool, mode=[0]))
        cursor = Int32(mIndptr[sequence])
        cursor_end = Int32(mIndptr[sequence + 1])
        rows = (
            Int64(mPool.iterator.toint())
            + (Int64(head) * (DIM * DIM) + split * (self.rows * DIM)) * 4
        )
        stride = row_bytes(mPool)
        # an entry, and the one after it, on its way
        due, slot = load_entry(mOffsets, mSlots, cursor, cursor_end)
        due_after, slot_after = load_entry(mOffsets, mSlots, cursor + 1, cursor_end)
        border = Int32(0)  # entries must ascend: the largest so far, rounded up to a border
        # of the note before: the slot, and where more entries of its border may stand
        noted = Int32(NO_SLOT)
        more = Int32(0)
        stop = Int32(0)
        done = Int32(0)
        notes = Int32(0)
        is_last = Int32(0)
        while is_last == 0:
            wanted = Int32(NO_SLOT)
            first = cursor
            # to the next border that has a slot, and past all its entries
            while due <= length and (wanted == NO_SLOT or due <= border):
                if due > border:
                    border = (due + (TILE - 1)) // TILE * TILE
                is_here = due == border and due > 0 and slot >= 0 and slot < num_slots
                if is_here and wanted == NO_SLOT:
                    wanted = slot
                    first = cursor + 1
                cursor += 1
                due, slot = due_after, slot_after
                due_after, slot_after = load_entry(mOffsets, mSlots, cursor + 1, cursor_end)
            tile = Int32(NEVER)
            if wanted != NO_SLOT:
                tile = border // TILE - 1
            sts_b32(base + self.note_base + (notes & 1) * 4, tile)
            if notes > 0:
                ptx.mbarrier_arrive(ready)
                if noted == NO_SLOT:
                    is_last = Int32(1)
                else:
                    ptx.mbarrier_wait(staged, (notes - 1) & 1)
                    # all stores are behind the barrier: one fence here orders them before the copy
                    cute.arch.fence_proxy("async.shared", space="cta")
                    source = base + self.export_base
                    bulk_store(rows + Int64(noted) * stride, source, self.export_bytes)
                    while more < stop:
                        again, into = load_entry(mOffsets, mSlots, more, stop)
                        if again == done and into >= 0 and into < num_slots:
                            bulk_store(rows + Int64(into) * stride, source, self.export_bytes)
                        more += 1
                    cute.arch.cp_async_bulk_commit_group()
                    cute.arch.cp_async_bulk_wait_group(0, read=True)
            noted = wanted
            more = first
            stop = cursor
            done = border
            notes += 1

    @cute.jit
    def scan(
        self,
        mO: cute.Tensor,
        mPool: cute.Tensor,
        mInitial: cute.Tensor,
        mFinal: cute.Tensor,
        base: Int32,
        full: Int32,
        empty: Int32,
        ready: Int32,
        staged: Int32,
        head: Int32,
        split: Int32,
        warp: Int32,
        sequence: Int32,
        first: Int32,
        length: Int32,
        tiles: Int32,
    ):
        """The steps of one warpgroup."""
        lane = cute.arch.lane_idx()
        row0 = split * self.rows + warp * 16
        num_slots = Int32(cute.size(mPool, mode=[0]))
        pool = corner(mPool, head, row0, lane)
        pool_stride = row_bytes(mPool)
        state = cute.make_rmem_tensor((64,), Float32)
        load_state(state, pool, pool_stride, mInitial[sequence], num_slots)

        if tiles > 0:
            # v tile [token][row]: lane i has row i % 8 of matrix i // 8 = (token half, row half)
            v_load = (
                base
                + self.v_base
                + ((lane & 7) + ((lane >> 4) << 3)) * self.v_pitch
                + (warp * 16 + ((lane >> 3) & 1) * 8) * 2
            )
            # o staging [row half][token] of 16 bytes
            o_shared = base + self.o_base + warp * 512
            o_store = o_shared + ((lane & 7) + ((lane >> 4) << 3)) * 16 + ((lane >> 3) & 1) * 256
            o_token = lane & 15
            o_stride = row_bytes(mO)
            o_out = (
                Int64(mO.iterator.toint())
                + Int64(first + o_token) * o_stride
                + Int64(head * DIM + row0 + (lane >> 4) * 8) * 2
            )
            shadow = cute.make_rmem_tensor((32,), Int32)
            acc = cute.make_rmem_tensor((16,), Float32)  # -k~ S^T, -q~ S^T
            oacc = cute.make_rmem_tensor((8,), Float32)  # o
            et = cute.make_rmem_tensor((32,), Float32)
            v = cute.make_rmem_tensor((4,), Int32)
            r = cute.make_rmem_tensor((4,), Int32)  # R
            out = cute.make_rmem_tensor((4,), Int32)  # 16 bytes of a row of o, on their way out
            et_load = ET + (lane % 4) * 16

            # low, v_tile, stage: of the current tile; ahead, parity: the next stage, its phase
            base16 = base >> 4
            low = base16
            v_tile = v_load
            stage = Int32(0)
            ahead = Int32(1)
            parity = Int32(0)
            ptx.mbarrier_wait(full, 0)
            exported = Int32(0)  # states so far
            ptx.mbarrier_wait(ready, 0)
            due = lds_b32(base + self.note_base)  # the tile whose state is wanted next

            put(v, 0, ptx.ldmatrix_x4(v_tile, trans=True))
            if tiles > 1:
                ptx.mbarrier_wait(full + 8 * ahead, parity)
            for part in range_constexpr(self.parts):
                self.pack_part(state, shadow, part)
            for part in range_constexpr(self.parts):
                self.project_part(shadow, acc, low, part)
            self.finish_projection(state, acc, oacc, r, v)
            self.load_et(et, low * 16 + et_load, 0, 8)
            self.decay(state, et)

            # invariant: r, and oacc = q~ S^T, are of this step, the state is decayed by its Et,
            # no product runs, the record after this one has landed
            for step in cutlass.range(tiles - 1, unroll=1):  # pyright: ignore[reportCallIssue]
                if step > 0:  # the tile before goes out
                    ptx.stg_b32x4(o_out, get(out, 0, 4))
                    o_out += o_stride * TILE
                self.update(state, oacc, r, low)
                # in the shadow of the update: the next v comes in
                barrier = empty + 8 * stage
                stage = ahead
                low = base16 + stage * (RECORD_BYTES // 16)
                v_tile = v_load + stage * self.v_bytes
                ahead += 1
                if ahead == self.stages:
                    ahead = Int32(0)
                    parity ^= 1
                put(v, 0, ptx.ldmatrix_x4(v_tile, trans=True))
                et_at = low * 16 + et_load
                # a step early, so that it is never on the critical path
                if step + 2 < tiles:
                    ptx.mbarrier_wait(full + 8 * ahead, parity)

                if const_expr(self.parts == 1):
                    put(state, 0, ptx.wgmma_wait(1, get(state, 0, 64)))
                    self.pack_part(state, shadow, 0)
                    pinned = ptx.wgmma_wait(0, [*get(oacc, 0, 8), *get(shadow, 0, 32), et_at])
                    put(oacc, 0, pinned[:8])
                    put(shadow, 0, pinned[8:40])
                    et_at = pinned[40]
                    self.project_part(shadow, acc, low, 0)
                else:
                    for part in range_constexpr(self.parts):
                        count = 64 // self.parts
                        done_regs = get(state, part * count, count)
                        if const_expr(part == 0):
                            done_regs = done_regs + get(oacc, 0, 8)
                        done_regs = ptx.wgmma_wait(self.parts - 1, done_regs)
                        put(state, part * count, done_regs[:count])
                        if const_expr(part == 0):
                            put(oacc, 0, done_regs[count:])
                            self.load_et(et, et_at, 0, self.early)
                        self.pack_part(state, shadow, part)
                        self.project_part(shadow, acc, low, part)
                # in the shadow of the projection, the state whole and not yet decayed. This branch
                # and the edge keep ptxas from mixing the shadow into the chain of products: 0.43 us
                # a step without two such borders, 0.35 with
                if step == due:
                    due = self.next_due(base, ready, exported)
                    exported += 1
                    self.stage_state(state, base, warp, lane)
                    ptx.mbarrier_arrive(staged)
                ptx.mbarrier_arrive(barrier)
                self.load_et(et, et_at, self.early, 8)
                self.stage_out(oacc, o_store)
                self.decay(state, et)
                put(out, 0, ptx.lds_b32x4(o_shared + lane * 16))
                cute.arch.sync_warp()
                ptx.edge(step, full)
                self.finish_projection(state, acc, oacc, r, v)

            self.update(state, oacc, r, low)
            if tiles > 1:
                ptx.stg_b32x4(o_out, get(out, 0, 4))
                o_out += o_stride * TILE
            put(state, 0, ptx.wgmma_wait(0, get(state, 0, 64)))
            put(oacc, 0, ptx.wgmma_wait(0, get(oacc, 0, 8)))
            self.stage_out(oacc, o_store)
            last = ptx.lds_b32x4(o_shared + lane * 16)
            cute.arch.sync_warp()
            if (tiles - 1) * TILE + o_token < length:
                ptx.stg_b32x4(o_out, last)

            if tiles - 1 == due:
                self.next_due(base, ready, exported)
                self.stage_state(state, base, warp, lane)
                ptx.mbarrier_arrive(staged)

        store_state(state, pool, pool_stride, mFinal[sequence], num_slots)

    def next_due(self, base: Int32, ready: Int32, exported: Int32) -> Int32:
        """Waits for room for a state; the tile after which the next one is wanted."""
        ptx.mbarrier_wait(ready, exported & 1)
        return lds_b32(base + self.note_base + ((exported + 1) & 1) * 4)

    def stage_state(self, state: Any, base: Int32, warp: Int32, lane: Int32) -> None:
        """Puts the state into shared memory, for `export`."""
        to = base + self.export_base + (warp * 16 + lane // 4) * (DIM * 4) + (lane % 4) * 16
        # odd rows take the two groups of a pair in the other order: no bank meets another
        odd = (lane // 4) % 2
        for p in range(0, 8, 2):
            for turn in range(2):
                where = to + ((turn ^ odd) + p) * 64
                for low in range(2):
                    x = []
                    for i in (0, 1, 4, 5):
                        a = state[8 * (p + turn) + 2 * low + i]
                        b = state[8 * (p + 1 - turn) + 2 * low + i]
                        x.append(pick(odd, b, a))
                    sts_f32x4(where + low * (8 * DIM * 4), x)

    def load_et(self, et: cute.Tensor, address: Int32, start: int, stop: int) -> None:
        for p in range(start, stop):
            put(et, 4 * p, ptx.lds_f32x4(address + 64 * p))

    def decay(self, state: Any, et: Any) -> None:
        for p in range(8):
            for i in range(8):
                state[8 * p + i] = state[8 * p + i] * et[4 * p + 2 * (i // 4) + i % 2]

    def pack_part(self, state: cute.Tensor, shadow: cute.Tensor, part: int) -> None:
        count = 32 // self.parts
        for i in range(part * count, (part + 1) * count):
            shadow[i] = ptx.pack_bf16(state[2 * i], state[2 * i + 1])

    def project_part(
        self, shadow: cute.Tensor, acc: cute.Tensor, record16: Int32, part: int
    ) -> None:
        """acc (-)= S [k~|q~]^T for the channels of a part."""
        groups = 8 // self.parts
        values = get(acc, 0, 16) if part else []
        pinned = ptx.wgmma_fence(get(shadow, 4 * groups * part, 4 * groups) + values)
        put(shadow, 4 * groups * part, pinned[: 4 * groups])
        values = pinned[4 * groups :] if part else [Float32(0.0)] * 16
        low = record16 + LEAD_SWIZZLED_K
        for p in range(part * groups, (part + 1) * groups):
            where = low + (p // 4) * (SIDE_BYTES >> 4) + (p % 4) * 2
            a = get(shadow, 4 * p, 4)
            values = ptx.wgmma(values, a, where, SW128, negate=True, zero=p == 0)
        put(acc, 0, values)
        ptx.wgmma_commit()

    def finish_projection(
        self,
        state: cute.Tensor,
        acc: cute.Tensor,
        oacc: cute.Tensor,
        r: cute.Tensor,
        v: cute.Tensor,
    ) -> None:
        """Wait for S [k~|q~]^T; R = v - k~ S^T, and o starts as q~ S^T."""
        pinned = ptx.wgmma_wait(0, get(acc, 0, 16) + get(state, 0, 64))
        put(state, 0, pinned[16:])
        # must be new registers: a slice of acc kept over the loop's edge makes ptxas serialise all
        # products (C7511)
        put(oacc, 0, [-x for x in pinned[8:16]])
        for i in range(4):
            low, high = ptx.unpack_bf16(v[i])
            r[i] = ptx.pack_bf16(low + pinned[2 * i], high + pinned[2 * i + 1])

    def update(
        self, state: cute.Tensor, oacc: cute.Tensor, rr: cute.Tensor, record16: Int32
    ) -> None:
        """S += R^T K2 in parts, and o += Mq2 R beside the first."""
        pinned = ptx.wgmma_fence(get(state, 0, 64) + get(rr, 0, 4) + get(oacc, 0, 8))
        put(state, 0, pinned[:64])
        r = pinned[64:68]
        count = 64 // self.parts
        for part in range(self.parts):
            where = record16 + ((K_UPDATE + SIDE_BYTES * part) >> 4) + LEAD_SWIZZLED_MN
            at = part * count
            put(state, at, ptx.wgmma(get(state, at, count), r, where, SW128, b_mn_major=True))
            if part == 0:
                if self.parts == 1:
                    ptx.wgmma_commit()
                where = record16 + (MQ >> 4) + LEAD_CORE
                put(oacc, 0, ptx.wgmma(pinned[68:], r, where, NO_SWIZZLE))
            ptx.wgmma_commit()

    def stage_out(self, oacc: cute.Tensor, o_store: Int32) -> None:
        pairs = [ptx.pack_bf16(oacc[2 * i], oacc[2 * i + 1]) for i in range(4)]
        ptx.stmatrix_x4_trans(o_store, pairs)
        cute.arch.sync_warp()
