"""How a prefill is cut, read off cu_seqlens by each CTA: its tile, and the order of sequences.

c[n]: start of sequence n, c[N] the end of the last one, both within the T rows that there are.

    f(n) = c[n] // 16 + n
    tile t of f(n) .. f(n+1) - 1   rows from c[n] + 16 (t - f(n)), 16 at most, up to c[n+1]
    tile t from f(N) on            rows from c[N] + 16 (t - f(N)), likewise up to T: of no sequence

So no sum over sequences is needed: f ascends and a tile's sequence is found by a search. Sequence n
has c[n+1] // 16 - c[n] // 16 + 1 tiles, and ceil(length / 16) is never more; some have no rows.
ceil(T / 16) + N tiles suffice: those from f(N) on are ceil((T - c[N]) / 16), and rounded up once
c[N] // 16 + (T - c[N]) / 16 is at most ceil(T / 16).

A caller's cu_seqlens that do not ascend make useless tiles, but none leads outside a tensor.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from .kda_prepare_parts import THREADS
from .kda_record import TILE
from .ptx import ldg_b32, lds_b32, stg_b32x4, sts_b32

# of lengths: two for each power of two of tiles, so lengths in a class differ by less than 1.5x
NUM_CLASSES = 32

WARP = 32
WINDOW = WARP - 1  # sequences that one round tells apart: the next one's start is in a lane too
SHIFT = TILE.bit_length() - 1

# shared memory of `order_sequences`: int32 counters [class, thread], a gap after each 32 of them
GAPPED = (WARP + 1) * 4  # bytes from one 32 to the next
CLASS = THREADS // WARP * GAPPED  # bytes from one class to the next
TOTAL = NUM_CLASSES * CLASS


@cute.jit
def load_start(starts: Int64, n: Int32, num_sequences: Int32, num_tokens: Int32) -> Int32:
    """c[n]; c[N] past it."""
    start = ldg_b32(starts + Int64(cutlass.min(n, num_sequences)) * 4)
    return cutlass.max(cutlass.min(start, num_tokens), 0)


@cute.jit
def narrow(starts: Int64, num_sequences: Int32, num_tokens: Int32, tile: Int32, lane: Int32):
    """low, count: the tile's sequence, or N, is one of these, at most `WINDOW`; by a whole warp."""
    low = Int32(0)
    count = num_sequences + 1
    while count > WINDOW:
        step = (count + WARP) // (WARP + 1)
        ahead = step * (lane + 1)
        start = load_start(starts, low + ahead, num_sequences, num_tokens)
        hits = _ballot(ahead < count and (start >> SHIFT) + low + ahead <= tile)
        skipped = step * (WARP - Int32(cute.arch.clz(hits)))
        low += skipped
        count = cutlass.min(step, count - skipped)
    return low, count


@cute.jit
def find_rows(
    start: Int32,
    low: Int32,
    count: Int32,
    num_sequences: Int32,
    num_tokens: Int32,
    tile: Int32,
    lane: Int32,
):
    """first, valid: rows [first, first + valid) are the tile's; with valid < 0, -valid rows are of
    no sequence. `start` is c[low + lane], the rest from `narrow`; by a whole warp.
    """
    hits = _ballot(lane < count and (start >> SHIFT) + low + lane <= tile)
    place = cutlass.max(WARP - 1 - Int32(cute.arch.clz(hits)), 0)
    end = Int32(cute.arch.shuffle_sync(start, place + 1))
    start = Int32(cute.arch.shuffle_sync(start, place))
    n = low + place
    first = (start & (TILE - 1)) + (tile - n) * TILE
    valid = cutlass.max(cutlass.min(end - first, TILE), 0)
    if n == num_sequences:
        valid = -cutlass.max(cutlass.min(num_tokens - first, TILE), 0)
    return first, valid


@cute.jit
def order_sequences(
    starts: Int64, order: Int64, num_sequences: Int32, num_tokens: Int32, base: Int32, tid: Int32
):
    """Writes (sequence, first row, length, first tile), 16 bytes each, by one CTA of prepare.

    The longest come first, by class of length and stable: two runs write the same. A thread has a
    stretch of neighbouring sequences, and a counter for each class.
    """
    lane, warp = tid % WARP, tid // WARP
    stretch = (num_sequences + (THREADS - 1)) // THREADS
    begin = tid * stretch
    end = cutlass.min(begin + stretch, num_sequences)
    counters = base + warp * GAPPED + lane * 4
    for i in range_constexpr(NUM_CLASSES):
        sts_b32(counters + i * CLASS, 0)
    first = load_start(starts, begin, num_sequences, num_tokens)
    for n in range(begin, end):
        after = load_start(starts, n + 1, num_sequences, num_tokens)
        counter = counters + length_class(after - first) * CLASS
        sts_b32(counter, lds_b32(counter) + 1)
        first = after
    cute.arch.sync_threads()

    # counts become places: a sum over those before, by classes and then threads
    block = base + tid * GAPPED
    counts = [lds_b32(block + i * 4) for i in range(WARP)]
    total = Int32(0)
    for i in range_constexpr(WARP):
        total += counts[i]
    place = total
    for i in range_constexpr(5):
        other = Int32(cute.arch.shuffle_sync_up(place, 1 << i))
        if lane >= 1 << i:
            place += other
    if tid == WARP - 1:
        sts_b32(base + TOTAL, place)
    place -= total
    cute.arch.sync_threads()
    if warp > 0:
        place += lds_b32(base + TOTAL)
    for i in range_constexpr(WARP):
        sts_b32(block + i * 4, place)
        place += counts[i]
    cute.arch.sync_threads()

    first = load_start(starts, begin, num_sequences, num_tokens)
    for n in range(begin, end):
        after = load_start(starts, n + 1, num_sequences, num_tokens)
        length = cutlass.max(after - first, 0)
        counter = counters + length_class(length) * CLASS
        rank = lds_b32(counter)
        sts_b32(counter, rank + 1)
        stg_b32x4(order + Int64(rank) * 16, [n, first, length, (first >> SHIFT) + n])
        first = after


@cute.jit
def length_class(length: Int32) -> Int32:
    """0 for the longest, NUM_CLASSES - 1 for none or less."""
    tiles = (cutlass.max(length, 0) + (TILE - 1)) >> SHIFT
    # two bits from the top tell the class; with one more below them an empty one has a top bit too
    x = 2 * tiles + 1
    octave = WARP - 1 - Int32(cute.arch.clz(x))
    half = (x >> cutlass.max(octave - 1, 0)) & 1
    return NUM_CLASSES - 1 - cutlass.min(cutlass.max(2 * octave + half - 2, 0), NUM_CLASSES - 1)


def _ballot(condition: Any) -> Int32:
    return Int32(cute.arch.vote_ballot_sync(condition))
