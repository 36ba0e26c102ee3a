"""One step in tensors: what the model reads beside weights and pools."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from ..ops.handover import Places
from ..scheduler.batch import ScheduledBatch, ScheduledRow
from ..scheduler.request import SamplingParams
from .handover import Handover
from .sampler import SamplingPlan

TOKEN_ALIGNMENT = 16  # T is a multiple of this
FIELD_ALIGNMENT = 64  # int32 elements: each tensor starts on a 256-byte line
MAX_CACHED_LAYOUTS = 1024  # (D, T) pairs whose views are kept
GREEDY = SamplingParams(temperature=0)


NO_COLUMNS: Any = ScheduledRow._make([()] * len(ScheduledRow._fields))


class StepInputs(NamedTuple):
    """D decode rows of 1 + K tokens come first, then T prefill tokens of up to N sequences.

    Every shape is a capacity, so one compilation serves every batch; the padding values stand at
    each field. D and T are read off the shapes: D = decode_src_slots.shape[0],
    T = input_ids.shape[0] - D * (1 + K).
    """

    input_ids: torch.Tensor  # [D * (1 + K) + T] int32; padding: 0
    decode_src_slots: torch.Tensor  # [D] int32 state slot read; padding: -1
    decode_dst_slots: torch.Tensor  # [D, 1 + K] int32 state slots written; padding: -1
    cu_seqlens: torch.Tensor  # [N + 1] int32, counted from the first prefill token; last repeated
    initial_slots: torch.Tensor  # [N] int32; -1: zeros
    final_slots: torch.Tensor  # [N] int32; -1: not written
    checkpoint_indptr: torch.Tensor  # [N + 1] int32; last repeated
    checkpoint_offsets: torch.Tensor  # [C] int32, tokens from the sequence's start in this step
    checkpoint_slots: torch.Tensor  # [C] int32; -1: skipped
    block_table: torch.Tensor  # [D + N, max_blocks] int32; decode rows first; padding: 0
    slot_mapping: torch.Tensor  # [D * (1 + K) + T] int32, block * block_size + offset; -1: no write
    seq_lens: torch.Tensor  # [D + N] int32, tokens attended to after this step; padding: 0
    sample_rows: (
        torch.Tensor
    )  # [R] int32, rows of the hidden states whose logits are wanted; padding: 0


_TOKEN_FIELDS = ("input_ids", "slot_mapping")
_ROW_FIELDS = (
    "decode_src_slots",
    "decode_dst_slots",
    "block_table",
    "seq_lens",
    "sample_rows",
)


def mark_sizes(inputs: StepInputs) -> None:
    """Tell the compiler that D and T vary; every other size is a capacity.

    So there are three compilations: with prefill tokens alone, with decode rows alone, with both.
    A D of 1 would be one more, since the compiler takes 0 and 1 for constants.
    """
    has_rows = inputs.decode_src_slots.shape[0] > 0
    for name in (*_TOKEN_FIELDS, *(_ROW_FIELDS if has_rows else ())):
        torch._dynamo.mark_dynamic(getattr(inputs, name), 0)


class StepBuffers:
    """Turns batches into StepInputs: packed in memory of the host, one copy, fixed addresses.

    A step is laid out for D decode rows and T prefill tokens, which may exceed the batch's own;
    each (D, T) has its views of the same memory. `fill` writes arrays of the host, and the step
    begins with `fetch`, so a captured graph is replayed after `fill`. See `Handover` for the rest.
    """

    def __init__(
        self,
        *,
        max_decode_rows: int,
        max_prefill_tokens: int,
        max_prefill_rows: int,
        max_checkpoints: int,
        max_blocks: int,
        block_size: int,
        num_speculative_tokens: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """
        Args:
            max_decode_rows: D at most.
            max_prefill_tokens: T at most; rounded up to a multiple of 16.
            max_prefill_rows: N, in every step that has prefill tokens.
            max_checkpoints: C.
            max_blocks: KV blocks of the longest request.
            block_size: Tokens of a KV block.
            num_speculative_tokens: K.
        """
        self.block_size = block_size
        self.row_tokens = 1 + num_speculative_tokens
        self.max_decode_rows = max_decode_rows
        self.max_prefill_tokens = _round_up(max_prefill_tokens, TOKEN_ALIGNMENT)
        self.max_prefill_rows = max_prefill_rows
        self.max_checkpoints = max_checkpoints
        capacity = self._sizes(max_decode_rows, self.max_prefill_tokens)
        inner = {"decode_dst_slots": (self.row_tokens,), "block_table": (max_blocks,)}
        self._shapes = {name: (size, *inner.get(name, ())) for name, size in capacity.items()}
        self._offsets: dict[str, int] = {}
        end = 0
        for name, shape in self._shapes.items():
            self._offsets[name] = end
            words = int(np.prod(shape)) * _dtype(name).itemsize // torch.int32.itemsize
            end += _round_up(words, FIELD_ALIGNMENT)
        self.handover = Handover(end, capacity["sample_rows"], torch.device(device))
        self._hosts = [self._new_host(turn.words) for turn in self.handover.turns]
        self._layouts: dict[tuple[int, int], _Layout] = {}
        self._positions = np.arange(max_blocks * block_size)
        # what rows of logits ask for: of the last fill
        self.sampling = SamplingPlan(())
        # of the last fetch: if a row draws, the temperature and key of each, as in `SamplingRows`;
        # R is at capacity, and a layout's rows are the first
        self.temperature = self._view(self.handover.packed, "temperature")
        self.keys = self._view(self.handover.packed, "keys")

    def fill(self, batch: ScheduledBatch, D: int, T: int) -> None:
        """The batch, on the host, for the next step to fetch.

        Sampled row i is the batch's row i (with draft tokens: 1 + K of them for a decode row), so
        `sample_rows` says where each row of logits comes from. `sampling` is set too; if a row
        draws, so are `temperature` and `keys`, and rows of padding are greedy.

        Args:
            D: decode rows to lay out for.
            T: prefill tokens, a multiple of 16.
        """
        num_decode = batch.num_decode_rows
        num_prefill, tokens = batch.num_rows - num_decode, batch.num_prefill_tokens
        self._assert_fits(num_decode, tokens, num_prefill, D, T)
        layout = self._layout(D, T)
        turn = self.handover.begin()
        host, (arrays, paddings) = self._hosts[turn], layout.hosts[turn]
        shape = (D, T, num_decode)
        stays = host.shape == shape and T == 0 and self.row_tokens == 1
        host.shape = None  # until this fill is complete
        if not stays:
            host.columns = NO_COLUMNS
            for values, padding in paddings:
                values.fill(padding)
        if not num_decode:
            host.write_blocks(0, D, ())
        elif self.row_tokens == 1:
            self._fill_decode(host, arrays, batch, D)
        else:
            self._fill_drafts(host, arrays, batch.rows[:num_decode], D)
        # without prefill tokens there are no sequences, and both prefix sums are their first 0
        if T > 0:
            self._fill_prefill(host, arrays, batch.prefill_rows, D, num_decode)
        self._fill_draws(arrays, batch if self.row_tokens == 1 else self._expand(batch))
        host.shape = shape

    def fetch(self, D: int, T: int) -> StepInputs:
        """Launch the copy of what was filled, and say where it will be.

        Tokens that the step before sampled, by its rows, are put where the batch waits for them.
        """
        layout = self._layout(D, T)
        self.handover.fetch(layout.size, layout.places)
        return layout.inputs

    def _sizes(self, D: int, T: int) -> dict[str, int]:
        """Leading sizes, in packed order. The table comes last: its tail isn't copied."""
        N = self.max_prefill_rows if T > 0 else 0
        tokens = D * self.row_tokens + T
        return {
            "decode_src_slots": D,
            "decode_dst_slots": D,
            "cu_seqlens": N + 1,
            "initial_slots": N,
            "final_slots": N,
            "checkpoint_indptr": N + 1,
            "checkpoint_offsets": self.max_checkpoints,
            "checkpoint_slots": self.max_checkpoints,
            "seq_lens": D + N,
            "sample_rows": D * self.row_tokens + N,
            "temperature": D * self.row_tokens + N,
            "keys": D * self.row_tokens + N,
            "input_ids": tokens,
            "slot_mapping": tokens,
            "prev_rows": tokens,
            "block_table": D + N,
        }

    def _new_host(self, words: torch.Tensor) -> "_Host":
        return _Host({name: self._view(words, name).numpy() for name in self._shapes})

    def _view(self, packed: torch.Tensor, name: str) -> torch.Tensor:
        begin, shape = self._offsets[name], self._shapes[name]
        return packed[begin:].view(_dtype(name))[: int(np.prod(shape))].view(shape)

    def _layout(self, D: int, T: int) -> "_Layout":
        layout = self._layouts.get((D, T))
        if layout is None:
            if len(self._layouts) == MAX_CACHED_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[D, T] = self._make_layout(D, T)
        return layout

    # views made inside and outside of this mode are two kinds, and would be compiled for twice
    @torch.inference_mode()
    def _make_layout(self, D: int, T: int) -> "_Layout":
        sizes, packed = self._sizes(D, T), self.handover.packed
        views = {name: self._view(packed, name)[: sizes[name]] for name in StepInputs._fields}
        inputs = StepInputs(**views)
        size = self._offsets["block_table"] + inputs.block_table.numel()
        hosts = [_host_layout(host, sizes) for host in self._hosts]
        return _Layout(inputs, size, self._places(D, inputs), hosts)

    def _places(self, D: int, inputs: StepInputs) -> Places:
        """Where a step completes itself: tokens, and of decode rows of one token the KV slots."""
        return Places(
            ids=self._offsets["input_ids"],
            prev_rows=self._offsets["prev_rows"],
            num_ids=inputs.input_ids.shape[0],
            slots=self._offsets["slot_mapping"],
            seq_lens=self._offsets["seq_lens"],
            table=self._offsets["block_table"],
            num_rows=D if self.row_tokens == 1 else 0,
            width=inputs.block_table.shape[1],
            block_size=self.block_size,
        )

    def _assert_fits(self, num_decode: int, tokens: int, num_prefill: int, D: int, T: int) -> None:
        assert num_decode <= D <= self.max_decode_rows, (
            f"{num_decode=} {D=} {self.max_decode_rows=}"
        )
        assert tokens <= T <= self.max_prefill_tokens, f"{tokens=} {T=} {self.max_prefill_tokens=}"
        assert T % TOKEN_ALIGNMENT == 0, f"{T=}"
        assert num_prefill <= self.max_prefill_rows, f"{num_prefill=} {self.max_prefill_rows=}"

    def _fill_decode(
        self, host: "_Host", arrays: dict[str, np.ndarray], batch: ScheduledBatch, D: int
    ) -> None:
        """Rows of one token each, in few calls: this runs between two steps of the device.

        Most steps have the rows of the step before, so only what is not what stands there is
        written, which is lengths alone, and those without numpy: a call of it takes 40 us where the
        caches have forgotten its code. Where the KV goes the step finds by itself.
        """
        columns: Any = batch.columns
        n = batch.num_decode_rows
        if n < batch.num_rows:
            columns = ScheduledRow._make([column[:n] for column in columns])
        known, host.columns = host.columns, columns
        host.write_blocks(0, D, columns.block_table)
        if columns.src_slot != known.src_slot:
            arrays["decode_src_slots"][:n] = columns.src_slot
        if columns.dst_slots != known.dst_slots:
            arrays["decode_dst_slots"][:n, 0] = [slot for (slot,) in columns.dst_slots]
        if columns.token_ids != known.token_ids:
            arrays["input_ids"][:n] = [token for (token,) in columns.token_ids]
        if columns.prev_row != known.prev_row:
            arrays["prev_rows"][:n] = columns.prev_row
        if known is NO_COLUMNS:
            arrays["sample_rows"][:n] = self._positions[:n]
        host.seq_lens[:n] = array("i", columns.end)

    def _fill_drafts(
        self, host: "_Host", arrays: dict[str, np.ndarray], rows: Sequence[ScheduledRow], D: int
    ) -> None:
        """Rows of 1 + K tokens, of which the last ones may be missing."""
        n, M = len(rows), self.row_tokens
        host.write_blocks(0, D, [row.block_table for row in rows])
        table = arrays["block_table"][:n]
        starts = np.array([row.start for row in rows])
        arrays["decode_src_slots"][:n] = [row.src_slot for row in rows]
        arrays["seq_lens"][:n] = starts + M
        arrays["sample_rows"][: n * M] = np.arange(n * M)
        ids = [[*row.token_ids, *[0] * (M - len(row.token_ids))] for row in rows]
        dst = [[*row.dst_slots, *[-1] * (M - len(row.dst_slots))] for row in rows]
        counts = np.array([[row.end - row.start] for row in rows])
        positions = starts[:, None] + np.arange(M)
        is_new = (np.arange(M) < counts) & (positions >= np.array([[r.kv_start] for r in rows]))
        blocks, offsets = np.divmod(np.where(is_new, positions, 0), self.block_size)
        places = np.take_along_axis(table, blocks, axis=1) * self.block_size + offsets
        arrays["decode_dst_slots"][:n] = dst
        arrays["input_ids"][: n * M] = np.ravel(ids)
        arrays["slot_mapping"][: n * M] = np.where(is_new, places, -1).ravel()
        last = np.arange(n) * M + counts[:, 0] - 1
        arrays["prev_rows"][last] = [row.prev_row for row in rows]

    def _fill_prefill(
        self,
        host: "_Host",
        arrays: dict[str, np.ndarray],
        rows: Sequence[ScheduledRow],
        D: int,
        num_decode: int,
    ) -> None:
        first = begin = D * self.row_tokens
        n, N = len(rows), len(arrays["initial_slots"])
        host.write_blocks(D, D + N, [row.block_table for row in rows])
        table = arrays["block_table"][D : D + n]
        exports: list[tuple[int, int]] = []
        ends, indptr = [0], [0]
        last = np.empty(n, np.int32)
        for i, row in enumerate(rows):
            end = begin + row.end - row.start
            arrays["input_ids"][begin:end] = row.token_ids
            new = max(row.kv_start, row.start)
            blocks, offsets = np.divmod(self._positions[new : row.end], self.block_size)
            places = table[i, blocks] * self.block_size + offsets
            arrays["slot_mapping"][begin + new - row.start : end] = places
            arrays["prev_rows"][end - 1] = row.prev_row
            exports += [(position - row.start, slot) for position, slot in sorted(row.exports)]
            ends.append(end - first)
            indptr.append(len(exports))
            last[i] = end - 1
            begin = end
        assert len(exports) <= self.max_checkpoints, f"{len(exports)=} {self.max_checkpoints=}"
        for name, values in (("cu_seqlens", ends), ("checkpoint_indptr", indptr)):
            arrays[name][: n + 1] = values
            arrays[name][n + 1 :] = values[-1]
        arrays["initial_slots"][:n] = [row.src_slot for row in rows]
        arrays["final_slots"][:n] = [row.dst_slots[0] if row.dst_slots else -1 for row in rows]
        if exports:
            arrays["checkpoint_offsets"][: len(exports)] = [offset for offset, _ in exports]
            arrays["checkpoint_slots"][: len(exports)] = [slot for _, slot in exports]
        arrays["seq_lens"][D : D + n] = [row.end for row in rows]
        sampled = num_decode * self.row_tokens
        arrays["sample_rows"][sampled : sampled + n] = last

    def _expand(self, batch: ScheduledBatch) -> ScheduledBatch:
        """A row for each row of logits, of which a decode row has one for each of its tokens."""
        M = self.row_tokens
        ahead = [(row, i) for row in batch.rows for i in range(M if row.is_decode else 1)]
        rows = [row._replace(sample_index=row.sample_index + i) for row, i in ahead]
        return ScheduledBatch.of(batch.step, rows)

    def _fill_draws(self, arrays: dict[str, np.ndarray], batch: ScheduledBatch) -> None:
        """Temperature and key of each row of logits, if one draws.

        Most steps have the rows of the step before, so what these ask for is looked up once.
        """
        columns = batch.columns
        params = columns.sampling
        if not all(columns.samples):
            pairs = zip(params, columns.samples, strict=True)
            params = tuple([asked if samples else GREEDY for asked, samples in pairs])
        n = len(params)
        if params != self.sampling.params:
            self.sampling = SamplingPlan(params)
        if self.sampling.is_greedy:
            return
        arrays["keys"][:n] = self.sampling.keys(columns.sample_index)
        arrays["temperature"][:n] = self.sampling.temperature
        arrays["temperature"][n:] = 0


# what stands where no row, sequence, token or checkpoint is; the prefix sums are padded as they are
# filled, and rows of the block table as they shrink
_PADDING = {
    "decode_src_slots": -1,
    "decode_dst_slots": -1,
    "initial_slots": -1,
    "final_slots": -1,
    "checkpoint_offsets": 0,
    "checkpoint_slots": -1,
    "seq_lens": 0,
    "sample_rows": 0,
    "input_ids": 0,
    "slot_mapping": -1,
    "prev_rows": -1,
}


class _Layout(NamedTuple):
    """The memory of one (D, T)."""

    inputs: StepInputs
    size: int  # words that a step of this layout reads
    places: Places
    hosts: list["_HostLayout"]  # the same on the host, in each turn


class _HostLayout(NamedTuple):
    """The memory of one (D, T) in one turn."""

    arrays: dict[str, np.ndarray]
    paddings: list[tuple[np.ndarray, int]]  # those of _PADDING that are not empty


@dataclass(slots=True)
class _Host:
    """One turn."""

    arrays: dict[str, np.ndarray]  # at full capacity
    seq_lens: memoryview = field(init=False)  # of the arrays
    blocks: memoryview = field(init=False)  # of the arrays: the block table, row after row
    max_blocks: int = field(init=False)  # of a row
    tables: list[Sequence[int]] = field(init=False)  # what stands in each row of the block table
    shape: tuple[int, int, int] | None = None  # D, T and decode rows of what stands in the others
    columns: Any = NO_COLUMNS  # its decode rows

    def __post_init__(self) -> None:
        self.seq_lens = self.arrays["seq_lens"].data
        table = self.arrays["block_table"]
        self.blocks = table.reshape(-1).data
        self.tables = [()] * len(table)
        self.max_blocks = table.shape[1]

    def write_blocks(self, first: int, end: int, block_tables: Sequence[Sequence[int]]) -> None:
        """Write the rows from `first` on and clear the rest of [first, end).

        A row is as long as the longest request, so only what a fill before left is cleared, and a
        table that stands there already is left alone: what it shows never changes.
        """
        tables, wanted = self.tables, [*block_tables, *[()] * (end - first - len(block_tables))]
        for i, blocks in enumerate(wanted, first):
            known = tables[i]
            if blocks is known:
                continue
            begin, size = i * self.max_blocks, len(blocks)
            assert size <= self.max_blocks, f"{size=} {self.max_blocks=}"
            if size > 0:
                self.blocks[begin : begin + size] = blocks
            if size < len(known):
                self.arrays["block_table"][i, size : len(known)] = 0
            tables[i] = blocks


def _dtype(name: str) -> torch.dtype:
    return {"temperature": torch.float32, "keys": torch.int64}.get(name, torch.int32)


def _host_layout(host: _Host, sizes: dict[str, int]) -> _HostLayout:
    arrays = {name: host.arrays[name][:size] for name, size in sizes.items()}
    paddings = [(arrays[name], padding) for name, padding in _PADDING.items() if arrays[name].size]
    return _HostLayout(arrays, paddings)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
