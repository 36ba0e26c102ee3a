"""The plan of a prefill, made on the device: sequences longest first, and the 16-token tiles."""

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint32, range_constexpr
from cutlass.memory import SmemAllocator

from .kda_record import TILE

MAX_SEQUENCES = 4096
# of lengths: two for each power of two of tiles, so lengths in a class differ by less than 1.5x
NUM_CLASSES = 32

WARP = 32
NUM_THREADS = 1024
NUM_WARPS = NUM_THREADS // WARP
PER_THREAD = MAX_SEQUENCES // NUM_THREADS


class KdaPlan:
    """Writes the plan (int32) that `kda_prepare` and `kda_scan` read.

        [0 .. 4N)          sequences, longest first: (sequence, first token, length, first tile)
        [4N .. 4N + 2 TC)  tiles: (first token, valid tokens). After the last one come padding tiles
                           (row, -rows): rows [row, row + rows) of o belong to no sequence

    N = cu_seqlens.numel() - 1, TC = ceil(T / 16) + N. Tiles of a sequence are consecutive, and
    sequences follow in their own order. Longest first goes by class of length and is stable, so two
    runs write the same plan. `ops.kda` has the same in PyTorch.
    """

    @cute.jit
    def __call__(self, cu_seqlens: cute.Tensor, plan: cute.Tensor, num_tokens: Int32, stream):
        self.kernel(cu_seqlens, plan, num_tokens).launch(
            grid=[1, 1, 1], block=[NUM_THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, cu_seqlens: cute.Tensor, plan: cute.Tensor, num_tokens: Int32):
        tid, _, _ = cute.arch.thread_idx()
        num_sequences = cute.size(cu_seqlens) - 1
        num_blocks = (num_sequences + (WARP - 1)) // WARP

        smem = SmemAllocator()
        s_start = smem.allocate_tensor(Int32, cute.make_layout(MAX_SEQUENCES + 1), 16)
        s_tile = smem.allocate_tensor(Int32, cute.make_layout(MAX_SEQUENCES + 1), 16)
        # [class, block of 32 sequences]: number of sequences, then the place of the first of them
        s_count = smem.allocate_tensor(
            Int32, cute.make_layout(NUM_CLASSES * (MAX_SEQUENCES // WARP)), 16
        )
        s_warp = smem.allocate_tensor(Int32, cute.make_layout(NUM_WARPS), 16)

        for i in range(tid, NUM_CLASSES * num_blocks, NUM_THREADS):
            s_count[i] = 0
        self._number_tiles(cu_seqlens, num_tokens, num_sequences, s_start, s_tile, s_warp, tid)
        cute.arch.sync_threads()
        self._write_tiles(plan, num_tokens, num_sequences, s_start, s_tile, tid)
        self._count_classes(num_sequences, num_blocks, s_tile, s_count, tid)
        cute.arch.sync_threads()
        self._place_classes(num_blocks, s_count, s_warp, tid)
        cute.arch.sync_threads()
        self._write_sequences(plan, num_sequences, num_blocks, s_start, s_tile, s_count, tid)

    @cute.jit
    def _number_tiles(
        self,
        cu_seqlens: cute.Tensor,
        num_tokens: Int32,
        num_sequences: Int32,
        s_start: cute.Tensor,
        s_tile: cute.Tensor,
        s_warp: cute.Tensor,
        tid: Int32,
    ):
        """First token and first tile of each sequence, and the ends of both, into shared memory."""
        first = tid * PER_THREAD
        starts = cute.make_rmem_tensor(PER_THREAD + 1, Int32)
        for j in range_constexpr(PER_THREAD + 1):
            i = cutlass.min(first + j, num_sequences)
            # a caller's wrong lengths must not lead outside the tensors
            starts[j] = cutlass.max(cutlass.min(cu_seqlens[i], num_tokens), 0)
        total = Int32(0)
        tiles = cute.make_rmem_tensor(PER_THREAD, Int32)
        for j in range_constexpr(PER_THREAD):
            tiles[j] = (cutlass.max(starts[j + 1] - starts[j], 0) + (TILE - 1)) // TILE
            total += tiles[j]
        base = _exclusive_scan(total, s_warp, tid)
        for j in range_constexpr(PER_THREAD):
            if first + j <= num_sequences:
                s_start[first + j] = starts[j]
                s_tile[first + j] = base
            base += tiles[j]
        if tid == NUM_THREADS - 1:
            # base is the total here: sequences past the last one have no tiles
            s_start[num_sequences] = starts[PER_THREAD]
            s_tile[num_sequences] = base

    @cute.jit
    def _write_tiles(
        self,
        plan: cute.Tensor,
        num_tokens: Int32,
        num_sequences: Int32,
        s_start: cute.Tensor,
        s_tile: cute.Tensor,
        tid: Int32,
    ):
        num_tiles, end = Int32(s_tile[num_sequences]), Int32(s_start[num_sequences])
        capacity = (num_tokens + (TILE - 1)) // TILE + num_sequences
        table = cute.make_tensor(
            plan.iterator + cute.assume(4 * num_sequences, divby=4),
            cute.make_layout((2, capacity), stride=(1, 2)),
        )
        for tile in range(tid, capacity, NUM_THREADS):
            token = cutlass.min(end + (tile - num_tiles) * TILE, num_tokens)
            tokens = -cutlass.min(num_tokens - token, TILE)
            if tile < num_tiles:
                # the last sequence that starts at or before this tile; empty ones share their tile
                # with the next
                low, high = Int32(0), num_sequences
                while high - low > 1:
                    middle = (low + high) // 2
                    if Int32(s_tile[middle]) <= tile:
                        low = middle
                    else:
                        high = middle
                token = Int32(s_start[low]) + (tile - Int32(s_tile[low])) * TILE
                tokens = cutlass.min(Int32(s_start[low + 1]) - token, TILE)
            _store(table[None, tile], (token, tokens))

    @cute.jit
    def _count_classes(
        self,
        num_sequences: Int32,
        num_blocks: Int32,
        s_tile: cute.Tensor,
        s_count: cute.Tensor,
        tid: Int32,
    ):
        for block in range(tid // WARP, num_blocks, NUM_WARPS):
            i = block * WARP + tid % WARP
            row, peers, rank = _class_peers(i, num_sequences, s_tile)
            if rank == 0 and i < num_sequences:
                s_count[row * num_blocks + block] = Int32(cute.arch.popc(peers))

    @cute.jit
    def _place_classes(
        self, num_blocks: Int32, s_count: cute.Tensor, s_warp: cute.Tensor, tid: Int32
    ):
        """Counts become places: an exclusive scan over classes, longest first, then blocks."""
        size = NUM_CLASSES * num_blocks
        per_thread = (size + (NUM_THREADS - 1)) // NUM_THREADS
        first = tid * per_thread
        last = cutlass.min(first + per_thread, size)
        total = Int32(0)
        for i in range(first, last):
            total += s_count[i]
        base = _exclusive_scan(total, s_warp, tid)
        for i in range(first, last):
            count = s_count[i]
            s_count[i] = base
            base += count

    @cute.jit
    def _write_sequences(
        self,
        plan: cute.Tensor,
        num_sequences: Int32,
        num_blocks: Int32,
        s_start: cute.Tensor,
        s_tile: cute.Tensor,
        s_count: cute.Tensor,
        tid: Int32,
    ):
        table = cute.make_tensor(plan.iterator, cute.make_layout((4, num_sequences), stride=(1, 4)))
        for block in range(tid // WARP, num_blocks, NUM_WARPS):
            i = block * WARP + tid % WARP
            row, _, rank = _class_peers(i, num_sequences, s_tile)
            if i < num_sequences:
                place = s_count[row * num_blocks + block] + rank
                length = cutlass.max(Int32(s_start[i + 1]) - Int32(s_start[i]), 0)
                _store(table[None, place], (i, s_start[i], length, s_tile[i]))


@cute.jit
def _class_peers(i: Int32, num_sequences: Int32, s_tile: cute.Tensor):
    """Length class of sequence i (0: the longest), the lanes that share it, and this one's rank."""
    row = Int32(-1)
    if i < num_sequences:
        tiles = Int32(s_tile[i + 1]) - Int32(s_tile[i])
        row = Int32(NUM_CLASSES - 1)
        if tiles > 0:
            octave = 31 - Int32(cute.arch.clz(tiles))
            half = (tiles >> cutlass.max(octave - 1, 0)) & 1
            if octave == 0:
                half = Int32(1)
            row = NUM_CLASSES - 1 - cutlass.min(2 * octave + half, NUM_CLASSES - 1)
    peers = cute.arch.match_sync(0xFFFFFFFF, row)
    rank = Int32(cute.arch.popc(peers & Uint32(cute.arch.lanemask_lt())))
    return row, peers, rank


@cute.jit
def _exclusive_scan(value: Int32, s_warp: cute.Tensor, tid: Int32) -> Int32:
    """Sum of `value` over all threads before this one; `s_warp` is free after the next barrier."""
    lane, warp = tid % WARP, tid // WARP
    inclusive = _warp_scan(value, lane)
    if lane == WARP - 1:
        s_warp[warp] = inclusive
    cute.arch.sync_threads()
    warps = _warp_scan(s_warp[lane], lane)
    before = cute.arch.shuffle_sync(warps, cutlass.max(warp - 1, 0))
    if warp == 0:
        before = Int32(0)
    return before + inclusive - value


@cute.jit
def _warp_scan(value: Int32, lane: Int32) -> Int32:
    for step in range_constexpr(5):
        other = cute.arch.shuffle_sync_up(value, 1 << step)
        if lane >= 1 << step:
            value += other
    return value


@cute.jit
def _store(row: cute.Tensor, values: tuple):
    """One vector store of 2 or 4 neighbouring entries of the plan."""
    out = cute.make_rmem_tensor(len(values), Int32)
    for j in range_constexpr(len(values)):
        out[j] = values[j]
    cute.autovec_copy(out, row)
