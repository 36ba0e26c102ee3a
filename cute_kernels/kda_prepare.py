"""The parallel half of KDA prefill: what a tile of 16 tokens holds before any state, as a record.

mX: whole tensor in global memory. g, t: lane // 4 and lane % 4, row and column pair of a fragment.
The record, the design and its measurements: profiles/results/kda_design.md.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, range_constexpr
from cutlass.cutlass_dsl import select_
from cutlass.memory import SmemAllocator

from . import ptx
from .kda_layout import find_rows, load_start, narrow, order_sequences
from .kda_prepare_parts import (
    LOG2E,
    SMEM_BYTES,
    SUMS,
    THREADS,
    TRI,
    TRI_ROW,
    Place,
    at,
    fma,
    normalise,
    row_address,
    row_bytes,
    select,
)
from .kda_prepare_softplus import SoftplusGate
from .kda_record import DIM, ET, K_DECAYED, K_UPDATE, MQ, Q_DECAYED, RECORD_BYTES, SIDE_BYTES, TILE
from .ptx import (
    bulk_store,
    ex2,
    ldg_bf16,
    ldg_f32,
    lds_b32,
    lds_f32x2,
    mma_bf16_k8,
    rcp,
    stg_b32,
    sts_b32,
    sts_f32,
    sts_f32x2,
    sts_f32x4,
)

BF16_LOWEST_PAIR = -0x800081  # 0xFF7FFF7F


class BoundedGate:
    """g = lower_bound * sigmoid(exp(A_log) * (g_raw + dt_bias)), at least -5 a token.

    So 2^-G is finite over a tile, and L = k~ (kn 2^-G)^T needs one product.
    """

    num_sums = 2  # k.k, q.q
    smem_bytes = SMEM_BYTES
    min_blocks = 12  # an SM: 80 registers

    def constants(self, a: Float32, bias: Any, lower_bound: Float32) -> Any:
        """bound, decay, shift: log2(e) g = bound / (1 + 2^(decay * g_raw + shift))."""
        decay = a * -LOG2E
        return lower_bound * LOG2E, decay, [decay * b for b in bias]

    def factors(self, place: Place, gate: Any, scale: Float32) -> Any:
        """k~ and q~ in place of k and q, k_inv in place of g.

        Returns k_r [16 tokens][2 channels], Et [2], and this warp's share of the two scores,
        <k~_i, k_inv_j> and <q~_i, k_inv_j>; the other warp's share of them is in shared memory.
        """
        bound, decay, shift = gate
        gates = []
        total = [Float32(0.0)] * 2
        for i in range(TILE):
            g = ptx.unpack_bf16(lds_b32(at(place.raw, i) + K_UPDATE))
            # 1 / (1 + 2^x): no cancellation for the weakest gates
            opening = [rcp(ex2(fma(g[e], decay, shift[e])) + 1.0) for e in range(2)]
            total = [fma(opening[e], bound, total[e]) for e in range(2)]
            gates.append(total)
        cute.arch.sync_threads()
        norms = normalise(place, scale)

        kr = []
        et = total
        for block in range(TILE // 4):
            k_norm = ptx.lds_f32x4(norms + block * 16)
            q_norm = ptx.lds_f32x4(norms + (4 * TILE + block * 16))
            rows = range(4 * block, 4 * block + 4)
            k_raw = [lds_b32(at(place.raw, i) + K_DECAYED) for i in rows]
            q_raw = [lds_b32(at(place.raw, i) + Q_DECAYED) for i in rows]
            # the record has another order of channels: all lanes read these rows before any
            # writes them
            cute.arch.sync_warp()
            for i in range(4):
                to = at(place.own, rows[i])
                k = [x * k_norm[i] for x in ptx.unpack_bf16(k_raw[i])]
                q = [x * q_norm[i] for x in ptx.unpack_bf16(q_raw[i])]
                grow = [ex2(-x) for x in gates[rows[i]]]
                et = [ex2(x) for x in gates[rows[i]]]
                k_inv = [k[e] * grow[e] for e in range(2)]
                sts_b32(to + K_DECAYED, ptx.pack_bf16(k[0] * et[0], k[1] * et[1]))
                sts_b32(to + Q_DECAYED, ptx.pack_bf16(q[0] * et[0], q[1] * et[1]))
                sts_b32(to + K_UPDATE, ptx.pack_bf16(k_inv[0], k_inv[1]))
                kr.append(k_inv)
        cute.arch.sync_warp()
        left, right = self.scores(place)
        # they are sums over all channels: warp 0 goes on with L, warp 1 with Mqk
        self.put_shares(place.base, place.warp, place.lane, left, right)
        return [[x[e] * et[e] for e in range(2)] for x in kr], et, left, right

    def scores(self, place: Place) -> Any:
        """Fragments of both scores, without rows 0-7 of columns 8-15, which no one needs."""
        left = [[Float32(0.0)] * 4 for _ in range(2)]
        right = [[Float32(0.0)] * 4 for _ in range(2)]
        for s in range(4):
            here = place.matrix ^ (32 * s)
            k = ptx.ldmatrix_x4(here + K_DECAYED)
            q = ptx.ldmatrix_x4(here + Q_DECAYED)
            b = ptx.ldmatrix_x4((place.turned ^ (32 * s)) + K_UPDATE)
            for n in range(2):
                left[n] = ptx.mma_bf16(left[n], k, b[2 * n : 2 * n + 2])
                right[n] = ptx.mma_bf16(right[n], q, b[2 * n : 2 * n + 2])
        return [*left[0], *left[1][2:4]], [*right[0], *right[1][2:4]]

    @cute.jit
    def put_shares(self, base: Int32, warp: Int32, lane: Int32, left: Any, right: Any):
        """Hand the other warp its part."""
        if warp == 0:
            self.put_share(base + MQ, right, lane)
        else:
            self.put_share(base + TRI, left, lane)

    def put_share(self, to: Any, x: Any, lane: Any) -> None:
        sts_f32x4(to + lane * 16, x[0:4])
        sts_f32x2(to + (512 + lane * 8), x[4:6])

    def add_share(self, x: Any, share: Any, lane: Any) -> Any:
        other = [*ptx.lds_f32x4(share + lane * 16), *lds_f32x2(share + (512 + lane * 8))]
        return [x[i] + other[i] for i in range(6)]

    def spread_left(self, place: Place, left: Any, beta: Float32) -> None:
        """-L transposed, fp32, into TRI; entries on and above the diagonal of L are never used."""
        g, t = place.lane // 4, place.lane % 4
        scores = self.add_share(left, place.base + TRI, place.lane)
        low = -cute.arch.shuffle_sync(beta, g)
        high = -cute.arch.shuffle_sync(beta, g + 8)
        cute.arch.sync_warp()
        to = place.base + TRI + t * (2 * TRI_ROW) + g * 4
        for e in range(2):
            sts_f32(to + e * TRI_ROW, low * scores[e])
            sts_f32(to + (e * TRI_ROW + 32), high * scores[2 + e])
            sts_f32(to + ((8 + e) * TRI_ROW + 32), high * scores[4 + e])

    def gather_right(self, place: Place, right: Any) -> Any:
        """Mqk, unmasked: rows g, g + 8 of columns 2t + {0, 1}; row g + 8 of 2t + {8, 9}."""
        return self.add_share(right, place.base + MQ, place.lane)


class KdaPrepareSm90:
    """Records of all (tile, value head) pairs, and zeros in the rows of o of no sequence.

        G = cumsum(log2(e) g);  kn = k / |k|, qn = scale q / |q|
        k~ = kn 2^G,  q~ = qn 2^G,  k_r = kn 2^(Gl - G),  Et = 2^Gl    (Gl: G of the last row)
        L = strictly_lower(beta kn 2^(G_i - G_j) kn^T),  Mqk = lower(qn 2^(G_i - G_j) kn^T)
        A = (I + L)^-1 diag(beta),  Mq2 = Mqk A,  K2 = A^T k_r

    A CTA of two warps makes one record: a loop over records in fewer CTAs, with or without a
    prefetch of the next rows, took 10 % to 30 % longer.
    """

    def __init__(self, bounded: bool, min_blocks: int | None = None):
        self.gate = BoundedGate() if bounded else SoftplusGate()
        self.min_blocks = self.gate.min_blocks if min_blocks is None else min_blocks

    @cute.jit
    def __call__(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mALog: cute.Tensor,
        mBias: cute.Tensor,
        mCuSeqlens: cute.Tensor,
        mRecords: cute.Tensor,
        mOrder: cute.Tensor,
        mO: cute.Tensor,
        num_sequences: Int32,
        lower_bound: Float32,
        scale: Float32,
        stream: Any,
    ):
        heads = cute.size(mG, mode=[1])
        tiles = (cute.size(mQ, mode=[0]) + (TILE - 1)) // TILE + num_sequences
        by_heads = cute.FastDivmodDivisorV2(heads)
        by_group = cute.FastDivmodDivisorV2(heads // cute.size(mQ, mode=[1]))
        self.kernel(
            mQ, mK, mG, mBeta, mALog, mBias, mCuSeqlens, mRecords, mOrder, mO,
            num_sequences, lower_bound, scale, by_heads, by_group,
        ).launch(
            grid=[1 + tiles * heads, 1, 1],
            block=[THREADS, 1, 1],
            smem=self.gate.smem_bytes,
            min_blocks_per_mp=self.min_blocks,
            preferred_smem_carveout=100,
            stream=stream,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mALog: cute.Tensor,
        mBias: cute.Tensor,
        mCuSeqlens: cute.Tensor,
        mRecords: cute.Tensor,
        mOrder: cute.Tensor,
        mO: cute.Tensor,
        num_sequences: Int32,
        lower_bound: Float32,
        scale: Float32,
        by_heads: cute.FastDivmodDivisorV2,
        by_group: cute.FastDivmodDivisorV2,
    ):
        tidx, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        base = Int32(SmemAllocator().allocate(self.gate.smem_bytes, 128).toint())
        num_tokens = Int32(cute.size(mQ, mode=[0]))
        starts = Int64(mCuSeqlens.iterator.toint())
        if block > 0:
            self.make_record(
                mQ, mK, mG, mBeta, mALog, mBias, mRecords, mO,
                starts, num_sequences, num_tokens, lower_bound, scale, by_heads, by_group,
                block, base, tidx,
            )  # fmt: skip
        else:  # of all CTAs it may take the longest, so it starts first
            order = Int64(mOrder.iterator.toint())
            order_sequences(starts, order, num_sequences, num_tokens, base, tidx)

    @cute.jit
    def make_record(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mG: cute.Tensor,
        mBeta: cute.Tensor,
        mALog: cute.Tensor,
        mBias: cute.Tensor,
        mRecords: cute.Tensor,
        mO: cute.Tensor,
        starts: Int64,
        num_sequences: Int32,
        num_tokens: Int32,
        lower_bound: Float32,
        scale: Float32,
        by_heads: cute.FastDivmodDivisorV2,
        by_group: cute.FastDivmodDivisorV2,
        block: Int32,
        base: Int32,
        tidx: Int32,
    ):
        """Of one (tile, head): heads of a tile are neighbours, and so are their rows."""
        tile, head = divmod(block - 1, by_heads)
        qk_head = head // by_group
        warp = cute.arch.make_warp_uniform(tidx // 32)
        lane = Int32(cute.arch.lane_idx())
        low, count = narrow(starts, num_sequences, num_tokens, tile, lane)
        start = load_start(starts, low + lane, num_sequences, num_tokens)
        # volatile, so that these loads too are under way before anything waits
        a_log = ldg_f32(Int64(mALog.iterator.toint()) + Int64(head) * 4)
        bias_at = row_address(mBias, head) + tidx * 8
        bias = [ldg_f32(bias_at), ldg_f32(bias_at + 4)]
        first, valid = find_rows(start, low, count, num_sequences, num_tokens, tile, lane)
        if valid > 0:
            self.load(mQ, mK, mG, base, warp, lane, first, valid, head, qk_head)
            # the floor keeps the product with the lowest bf16 (an absent row) huge
            a = cute.math.max(ex2(a_log * LOG2E), Float32(2.0**-100))
            gate = self.gate.constants(a, bias, lower_bound)
            beta = self.beta(mBeta, first, valid, head, lane)
            # the loads above are issued before the wait: none moves over a barrier
            cute.arch.sync_warp()
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_warp()
            self.record(base, warp, lane, valid, beta, gate, scale)
            self.store(mRecords, block, base, tidx)
        else:
            row = row_address(mO, first) + (head * DIM + tidx * 2) * 2
            for _ in cutlass.range(-valid, unroll=1):
                stg_b32(row, 0)
                row += row_bytes(mO)

    @cute.jit
    def load(
        self,
        mQ: cute.Tensor,
        mK: cute.Tensor,
        mG: cute.Tensor,
        base: Int32,
        warp: Int32,
        lane: Int32,
        first: Int32,
        valid: Int32,
        head: Int32,
        qk_head: Int32,
    ):
        """Start copying this warp's half of the raw tiles; rows past the end become zeros."""
        row, chunk = lane // 8, lane % 8
        shared = base + warp * SIDE_BYTES + row * 128 + ((chunk ^ row) << 4)
        sizes = [Int32(select_(row + 4 * i < valid, Int32(16), Int32(0))) for i in range(4)]
        for slot, tensor, h in (
            (K_UPDATE, mG, head), (K_DECAYED, mK, qk_head), (Q_DECAYED, mQ, qk_head),
        ):  # fmt: skip
            source = row_address(tensor, first + row) + (h * DIM + warp * 64 + chunk * 8) * 2
            for i in range_constexpr(4):
                ptx.cp_async_16((shared ^ (64 * (i % 2))) + (slot + 512 * i), source, sizes[i])
                source += row_bytes(tensor) * 4
        cute.arch.cp_async_commit_group()

    @cute.jit
    def beta(
        self, mBeta: cute.Tensor, first: Int32, valid: Int32, head: Int32, lane: Int32
    ) -> Float32:
        """Of token lane % 16; 0 past the end."""
        token = lane % TILE
        beta = Float32(0.0)
        if token < valid:
            logit = ldg_bf16(row_address(mBeta, first + token) + head * 2)
            beta = rcp(ex2(logit * -LOG2E) + 1.0)
        return beta

    @cute.jit
    def record(
        self,
        base: Int32,
        warp: Int32,
        lane: Int32,
        valid: Int32,
        beta: Float32,
        gate: Any,
        scale: Float32,
    ):
        """Turn the raw tiles in shared memory into the record."""
        place = Place.of(base, warp, lane)
        if valid < TILE:
            # rows past the end: every gate maps its lowest input to g = 0
            for i in range_constexpr(TILE):
                if i >= valid:
                    sts_b32(at(place.raw, i) + K_UPDATE, BF16_LOWEST_PAIR)
        sums = self.sum_squares(place)
        if lane % 4 == lane // 8:
            for n in range_constexpr(2 * self.gate.num_sums):
                sts_f32(base + SUMS + warp * 192 + (lane // 4) * 4 + n * 32, sums[n])
        kr, et, left, right = self.gate.factors(place, gate, scale)
        cute.arch.sync_threads()
        if warp == 0:
            self.gate.spread_left(place, left, beta)
            cute.arch.sync_warp()
            self.invert(place, beta)
            cute.arch.sync_threads()
        else:
            self.finish_scores(place, right)
        self.update_operand(place, kr)
        sts_f32x2(base + ET + (warp * 64 + lane * 2) * 4, et)

    @cute.jit
    def store(self, mRecords: cute.Tensor, block: Int32, base: Int32, tidx: Int32):
        """Send the record off as it lies in shared memory."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_threads()
        if tidx == 0:
            record = Int64(mRecords.iterator.toint()) + Int64(block) * RECORD_BYTES - RECORD_BYTES
            bulk_store(record, base, RECORD_BYTES)
            cute.arch.cp_async_bulk_commit_group()
            cute.arch.cp_async_bulk_wait_group(0, read=True)

    def sum_squares(self, place: Place) -> Any:
        """k.k, q.q (and q.k) over this warp's channels, as diagonals of products.

        The lane with t == g // 2 has rows g and g + 8 of each.
        """
        num = self.gate.num_sums
        acc = [[Float32(0.0)] * 4 for _ in range(2 * num)]
        for s in range(4):
            k = ptx.ldmatrix_x4((place.matrix ^ (32 * s)) + K_DECAYED)
            q = ptx.ldmatrix_x4((place.matrix ^ (32 * s)) + Q_DECAYED)
            for n, (a, b) in enumerate(((k, k), (q, q), (q, k))[:num]):
                for i in range(4):
                    half = a[0:2] if i < 2 else a[2:4]
                    acc[2 * n + i % 2] = mma_bf16_k8(acc[2 * n + i % 2], half, b[i])
        odd = (place.lane // 4) % 2 == 1
        return [select(odd, x[1 + 2 * (n % 2)], x[2 * (n % 2)]) for n, x in enumerate(acc)]

    def invert(self, place: Place, beta: Float32) -> None:
        """A, transposed, over -L: forward substitution in fp32, one column a lane."""
        tri = place.base + TRI
        column = place.lane % TILE
        x = [select(column == i, 1.0, 0.0) for i in range(TILE)]
        for k in range(TILE - 1):
            for block in range((k + 1) // 4, 4):
                minus_l = ptx.lds_f32x4(tri + (k * TRI_ROW + block * 16))
                for i in range(max(4 * block, k + 1), 4 * block + 4):
                    x[i] = fma(minus_l[i % 4], x[k], x[i])
        cute.arch.sync_warp()
        for block in range(4):  # lanes 16-31 write the same values once more
            values = [x[4 * block + i] * beta for i in range(4)]
            sts_f32x4(tri + column * TRI_ROW + block * 16, values)

    def finish_scores(self, place: Place, right: Any) -> None:
        """Mq2 = Mqk A by tensor cores, each fp32 operand as a sum of two bf16."""
        g, t = place.lane // 4, place.lane % 4
        m = self.gate.gather_right(place, right)
        for e in range(2):
            m[e] = select(2 * t + e <= g, m[e], 0.0)
            m[4 + e] = select(2 * t + e <= g, m[4 + e], 0.0)
        parts = [self.split(m[2 * i], m[2 * i + 1]) for i in range(3)]
        a_high, a_low = [(x[0], x[1], Int32(0), x[2]) for x in zip(*parts, strict=True)]
        cute.arch.sync_threads()
        for n in range(2):
            row = place.base + TRI + (g + 8 * n) * TRI_ROW + t * 8
            b = [self.split(*lds_f32x2(row + 32 * i)) for i in range(2)]
            b_high, b_low = zip(*b, strict=True)
            acc = ptx.mma_bf16([Float32(0.0)] * 4, a_low, b_high)
            acc = ptx.mma_bf16(acc, a_high, b_low)
            acc = ptx.mma_bf16(acc, a_high, b_high)
            to = place.base + (MQ + n * 128) + place.lane * 4
            sts_b32(to, ptx.pack_bf16(acc[0], acc[1]))
            sts_b32(to + 256, ptx.pack_bf16(acc[2], acc[3]))

    def split(self, x: Any, y: Any) -> tuple[Any, Any]:
        """bf16 pairs whose sum is (x, y) to 16 bits."""
        high = ptx.pack_bf16(x, y)
        back = ptx.unpack_bf16(high)
        return high, ptx.pack_bf16(x - back[0], y - back[1])

    def update_operand(self, place: Place, kr: Any) -> None:
        """K2 = A^T k_r in fp32, rounded once; over k_inv."""
        for j in range(TILE):
            row = []
            for block in range(j // 4, 4):
                row += ptx.lds_f32x4(place.base + (TRI + j * TRI_ROW + block * 16))
            row = row[j % 4 :]
            acc = [row[0] * kr[j][e] for e in range(2)]
            for i in range(j + 1, TILE):
                acc = [fma(row[i - j], kr[i][e], acc[e]) for e in range(2)]
            sts_b32(at(place.own, j) + K_UPDATE, ptx.pack_bf16(acc[0], acc[1]))
