"""The softplus gate of prepare: decays without bound, so a hierarchy of blocks and no 2^-G."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cutlass_dsl import select_

from . import ptx
from .kda_prepare_parts import LOG2E, NORMS, SUMS, TRI, TRI_ROW, Place, at, fma, normalise, select
from .kda_record import HALF_BYTES, K_DECAYED, K_UPDATE, MQ, Q_DECAYED, SIDE_BYTES, TILE
from .ptx import ex2, lds_b32, lds_f32, lds_f32x2, lg2, op, sts_b32, sts_f32, sts_f32x2

LEVELS = (1, 2, 4, 8)
# Rows 0-7 of a tile of each side: q of a level's odd rows. What lies between the sides is not used:
# so a row's address is a constant away from its row of k. The end of TRI is free until L is there.
LEVEL_Q = TRI + 4 * 256
SERIES_END = 1 / 32
# log2(1 + u) / u = log2(e) (1 - u/2 + u^2/3): off by 8e-6 at the end of the series
SERIES = (LOG2E / 3, -LOG2E / 2, LOG2E)


class SoftplusGate:
    """g = -exp(A_log) * softplus(g_raw + dt_bias), thousands a token if need be.

    Level s pairs the rows i of each odd block of s rows with the rows j of the even block before
    it, by way of that block's end r: 2^(G_i - G_j) = 2^(G_i - G_r) 2^(G_r - G_j). Levels 1, 2, 4
    and 8 reach every i > j once. Both factors are products of a few 2^g, so none is above 1, and
    nothing is lost where large decays stand beside small ones. Norms come in after the scores.
    """

    num_sums = 3  # k.k, q.q, q.k
    smem_bytes = LEVEL_Q + SIDE_BYTES + HALF_BYTES // 2
    min_blocks = 10  # an SM: 96 registers

    def constants(self, a: Float32, bias: Any, lower_bound: Float32) -> Any:
        """decay, shift: log2(e) g = decay * log2(1 + 2^(log2(e) g_raw + shift))."""
        return -a, [b * LOG2E for b in bias]

    def factors(self, place: Place, gate: Any, scale: Float32) -> Any:
        """k~ and q~ in place of k and q; K_UPDATE is used up.

        Returns k_r [16 tokens][2 channels], Et [2], and this warp's share of its own scores,
        [4 levels][2]: rows g of a level's odd rows, columns 2t + {0, 1} of its even ones.
        """
        step, total = [], [Float32(0.0)] * 2
        for i in range(TILE):
            g = self.log_decay(place, gate, i)
            step.append([ex2(x) for x in g])
            # a state meets Et once a tile: the weakest decays need the sum, not the product
            total = [total[e] + g[e] for e in range(2)]
        scores = []
        for level, s in enumerate(LEVELS):
            cute.arch.sync_warp()
            for start in range(0, TILE, 2 * s):
                self.put_blocks(place, step, start, s)
            cute.arch.sync_warp()
            scores.append(self.exchange(place, level, self.level_scores(place)))
        cute.arch.sync_threads()
        norms = normalise(place, scale)

        # products of the steps before each block of four rows. Their order of factors is another
        # than inside the blocks, where the compiler would else keep all sixteen from here on
        before: list[Any] = [None]
        for i in range(0, TILE - 4, 4):
            pairs = [times(step[i], step[i + 1]), times(step[i + 2], step[i + 3])]
            before.append(times(before[-1], times(*pairs)))
        kr: list[Any] = [None] * TILE
        after = None
        for block in reversed(range(TILE // 4)):
            k_norm = ptx.lds_f32x4(norms + block * 16)
            q_norm = ptx.lds_f32x4(norms + (4 * TILE + block * 16))
            rows = range(4 * block, 4 * block + 4)
            k_raw = [lds_b32(at(place.raw, i) + K_DECAYED) for i in rows]
            q_raw = [lds_b32(at(place.raw, i) + Q_DECAYED) for i in rows]
            # the record has another order of channels: all lanes read these rows before any
            # writes them
            cute.arch.sync_warp()
            factor = before[block]
            for i, row in enumerate(rows):
                to = at(place.own, row)
                factor = times(factor, step[row])
                k = [x * k_norm[i] for x in ptx.unpack_bf16(k_raw[i])]
                q = [x * q_norm[i] for x in ptx.unpack_bf16(q_raw[i])]
                sts_b32(to + K_DECAYED, ptx.pack_bf16(*times(k, factor)))
                sts_b32(to + Q_DECAYED, ptx.pack_bf16(*times(q, factor)))
                kr[row] = k
            for row in reversed(rows):
                kr[row] = times(after, kr[row])
                after = times(after, step[row])
        return kr, [ex2(x) for x in total], scores, scores

    def log_decay(self, place: Place, gate: Any, i: int) -> Any:
        """log2(e) g of row i."""
        decay, shift = gate
        g = ptx.unpack_bf16(lds_b32(at(place.raw, i) + K_UPDATE))
        out = []
        for e in range(2):
            x = fma(g[e], LOG2E, shift[e])
            u = ex2(-op([Float32], "abs.f32 $0, $1;", x))
            series = fma(fma(u, SERIES[0], SERIES[1]), u, SERIES[2]) * u
            # lg2 near 1 has an absolute error only: the weakest gates need the series
            log1p = select(u < SERIES_END, series, lg2(u + 1.0))
            out.append((cute.math.max(x, Float32(0.0)) + log1p) * decay)
        return out

    def put_blocks(self, place: Place, step: Any, start: int, s: int) -> None:
        """A level's operands from an even block of s rows and the odd one after it."""
        to = start // 2
        factor = None
        for i in range(start + s, start + 2 * s):
            factor = times(factor, step[i])
            pair = ptx.pack_bf16(*factor)
            row = at(place.raw, to + i - start - s)
            sts_b32(row + K_UPDATE, times_bf16(lds_b32(at(place.raw, i) + K_DECAYED), pair))
            sts_b32(row + LEVEL_Q, times_bf16(lds_b32(at(place.raw, i) + Q_DECAYED), pair))
        factor = None
        for i in reversed(range(start, start + s)):
            k = lds_b32(at(place.raw, i) + K_DECAYED)
            if factor is not None:
                k = times_bf16(k, ptx.pack_bf16(*factor))
            sts_b32(at(place.raw, 8 + to + i - start) + K_UPDATE, k)
            factor = times(factor, step[i])

    def exchange(self, place: Place, level: int, scores: Any) -> Any:
        """Keep the share of L (warp 0) or Mqk (warp 1), hand the other one to the other warp."""
        is_left = place.warp == 0
        to = place.base + Int32(select_(is_left, Int32(MQ), Int32(TRI))) + place.lane * 8
        give = [select(is_left, scores[2 + e], scores[e]) for e in range(2)]
        sts_f32x2(to + level * 256, give)
        return [select(is_left, scores[e], scores[2 + e]) for e in range(2)]

    def level_scores(self, place: Place) -> Any:
        """[odd rows of k; odd rows of q] times the even rows of k: one 16 x 8 tile."""
        row, quarter = place.lane % 8, place.lane // 8
        half = place.base + place.warp * SIDE_BYTES
        # matrices 0, 1: k and q; 2, 3: the same of the next 8 channels
        tile = Int32(select_(quarter % 2 == 0, Int32(K_UPDATE), Int32(LEVEL_Q)))
        a_at = half + tile + row * 128 + (((quarter // 2) ^ row) << 4)
        b_at = half + (K_UPDATE + 1024) + row * 128 + ((quarter ^ row) << 4)
        acc = [Float32(0.0)] * 4
        for pair in range(2):
            b = ptx.ldmatrix_x4(b_at ^ (64 * pair))
            for s in range(2):
                a = ptx.ldmatrix_x4(a_at ^ (64 * pair + 32 * s))
                acc = ptx.mma_bf16(acc, a, b[2 * s : 2 * s + 2])
        return acc

    def add_share(self, x: Any, share: Any, lane: Any) -> Any:
        other = [lds_f32x2(share + (level * 256) + lane * 8) for level in range(4)]
        return [[x[n][e] + other[n][e] for e in range(2)] for n in range(4)]

    def spread_left(self, place: Place, left: Any, beta: Float32) -> None:
        """-L transposed, fp32, into TRI; only what lies below the diagonal of L."""
        scores = self.add_share(left, place.base + TRI, place.lane)
        norms = place.base + NORMS
        cute.arch.sync_warp()
        for n, s in enumerate(LEVELS):
            i, columns, is_pair = self.pairs_of(place, s)
            row = lds_f32(norms + i * 4) * -cute.arch.shuffle_sync(beta, i)
            for e in range(2):
                value = scores[n][e] * row * lds_f32(norms + columns[e] * 4)
                to = place.base + TRI + columns[e] * TRI_ROW + i * 4
                sts_f32_if(is_pair[e], to, value)

    def gather_right(self, place: Place, right: Any) -> Any:
        """Mqk, unmasked: rows g, g + 8 of columns 2t + {0, 1}; row g + 8 of 2t + {8, 9}."""
        lane = place.lane
        share = place.base + MQ
        scores = self.add_share(right, share, lane)
        norms = place.base + (NORMS + 128)
        token = lane % TILE
        sums = place.base + (SUMS + 2 * TILE * 4) + token * 4
        diagonal = lds_f32(sums) + lds_f32(sums + 192)
        diagonal = diagonal * lds_f32(norms + token * 4) * lds_f32(norms + (64 + token * 4))
        cute.arch.sync_warp()
        for n, s in enumerate(LEVELS):
            i, columns, is_pair = self.pairs_of(place, s)
            row = lds_f32(norms + (64 + i * 4))
            for e in range(2):
                value = scores[n][e] * row * lds_f32(norms + columns[e] * 4)
                sts_f32_if(is_pair[e], share + i * 64 + columns[e] * 4, value)
        sts_f32(share + token * 68, diagonal)
        cute.arch.sync_warp()
        g, t = lane // 4, lane % 4
        here = share + g * 64 + t * 8
        return [*lds_f32x2(here), *lds_f32x2(here + 512), *lds_f32x2(here + 544)]

    def pairs_of(self, place: Place, s: int) -> Any:
        """Row g, columns 2t + {0, 1} of a level's scores as tokens; whether blocks are siblings."""
        g = place.lane // 4
        columns = [2 * (place.lane % 4) + e for e in range(2)]
        token = (g // s) * (2 * s) + s + g % s
        is_pair = [(c // s) == (g // s) for c in columns]
        return token, [(c // s) * (2 * s) + c % s for c in columns], is_pair


def sts_f32_if(condition: Any, address: Any, x: Any) -> None:
    """A predicated store: the lanes stay together."""
    text = "{ .reg .pred p; setp.ne.b32 p, $0, 0; @p st.shared.f32 [$1], $2; }"
    flag = Int32(select_(condition, Int32(1), Int32(0)))
    op([], text, flag, Int32(address), Float32(x), memory=True)


def times(x: Any, y: Any) -> Any:
    """Products of two channels; None is 1."""
    return y if x is None else [x[e] * y[e] for e in range(2)]


def times_bf16(x: Any, y: Any) -> Any:
    """Products of bf16 pairs, rounded."""
    return op([Int32], "mul.rn.bf16x2 $0, $1, $2;", x, y)
