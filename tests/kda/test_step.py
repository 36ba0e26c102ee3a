"""StepBuffers against a plain restatement of StepInputs' field comments, over random batches."""

import random
from array import array

import numpy as np
import pytest
import torch
from torch_kda.kda.sampler import stream_keys, stream_starts
from torch_kda.kda.step import StepBuffers, StepInputs
from torch_kda.scheduler.batch import ScheduledBatch, ScheduledRow
from torch_kda.scheduler.request import SamplingParams
from torch_kda.tests.kda.oracle import load, row

BLOCK = 16
CAPACITY = {
    "max_decode_rows": 6,
    "max_prefill_tokens": 190,
    "max_prefill_rows": 5,
    "max_checkpoints": 12,
    "max_blocks": 12,
    "block_size": BLOCK,
}


TOKENS = [7000 + i for i in range(11)]  # that the step before drew


def buffers(draft_tokens: int = 0, **changes) -> StepBuffers:
    into = StepBuffers(**{**CAPACITY, **changes}, num_speculative_tokens=draft_tokens)
    into.handover.tokens[: len(TOKENS)] = torch.tensor(TOKENS)
    return into


def random_row(rng: random.Random, slots: list[int], *, decode: bool, most: int) -> ScheduledRow:
    length = rng.randint(1, most)
    start = rng.choice([0, 16, 48, 80, 37]) if not decode else rng.randint(1, 100)
    blocks = array("i", rng.sample(range(1000), -(-(start + length) // BLOCK)))
    positions = sorted(
        rng.sample(range(start + 16, start + length + 1, 16), k=min(2, length // 16))
    )
    fields = row(
        [rng.randrange(1, 500) for _ in range(length)],
        start,
        src=slots.pop() if start else -1,
        dst=tuple(slots.pop() for _ in range(length)) if decode else slots.pop(),
        # views of memory and lists are both allowed
        blocks=rng.choice([blocks, memoryview(blocks), list(blocks), np.asarray(blocks)]),
        decode=decode,
        exports=() if decode else tuple((p, slots.pop()) for p in positions),
        kv_start=rng.choice([0, start, start + length // 2]),
        prev_row=rng.choice([-1, -1, 3]),
    )
    temperature = rng.choice([0, 0.3, 2.0])
    return fields._replace(
        samples=decode or rng.random() < 0.7,
        sampling=SamplingParams(temperature=temperature, seed=rng.getrandbits(70)),
        sample_index=rng.randrange(1000),
    )


def plain(batch: ScheduledBatch, D: int, T: int, K: int) -> dict[str, list]:
    """The step's tensors as nested lists, an element at a time."""
    M, N = 1 + K, CAPACITY["max_prefill_rows"] if T else 0
    rows = [r for r in batch.rows if r.is_decode] + [None] * (D - batch.num_decode_rows)
    prefill = [r for r in batch.rows if not r.is_decode]
    out = {name: [] for name in (*StepInputs._fields, "prev_rows")}

    def put_token(r: ScheduledRow, position: int) -> None:
        is_last = position == r.end - 1
        out["input_ids"].append(r.token_ids[position - r.start])
        block = r.block_table[position // BLOCK]
        is_kept = position >= r.kv_start
        out["slot_mapping"].append(block * BLOCK + position % BLOCK if is_kept else -1)
        out["prev_rows"].append(r.prev_row if is_last else -1)

    def put_padding(count: int) -> None:
        for name, value in (("input_ids", 0), ("slot_mapping", -1), ("prev_rows", -1)):
            out[name] += [value] * count

    for i, r in enumerate(rows):
        size = 0 if r is None else r.end - r.start
        out["decode_src_slots"].append(-1 if r is None else r.src_slot)
        dst = () if r is None else r.dst_slots
        out["decode_dst_slots"].append([*dst, *[-1] * (M - size)])
        out["seq_lens"].append(0 if r is None else r.start + M)
        if r is not None:
            out["sample_rows"] += range(i * M, (i + 1) * M)
            for position in range(r.start, r.end):
                put_token(r, position)
        put_padding(M - size)
    out["cu_seqlens"], out["checkpoint_indptr"] = [0], [0]
    for r in prefill:
        for position in range(r.start, r.end):
            put_token(r, position)
        out["cu_seqlens"].append(out["cu_seqlens"][-1] + r.end - r.start)
        out["initial_slots"].append(r.src_slot)
        out["final_slots"].append(r.dst_slots[0])
        for position, slot in r.exports:
            out["checkpoint_offsets"].append(position - r.start)
            out["checkpoint_slots"].append(slot)
        out["checkpoint_indptr"].append(len(out["checkpoint_slots"]))
        out["seq_lens"].append(r.end)
        out["sample_rows"].append(D * M + out["cu_seqlens"][-1] - 1)
    for name, value, size in (
        ("input_ids", 0, D * M + T),
        ("slot_mapping", -1, D * M + T),
        ("prev_rows", -1, D * M + T),
        ("cu_seqlens", out["cu_seqlens"][-1], N + 1),
        ("checkpoint_indptr", out["checkpoint_indptr"][-1], N + 1),
        ("initial_slots", -1, N),
        ("final_slots", -1, N),
        ("checkpoint_offsets", 0, CAPACITY["max_checkpoints"]),
        ("checkpoint_slots", -1, CAPACITY["max_checkpoints"]),
        ("seq_lens", 0, D + N),
        ("sample_rows", 0, D * M + N),
    ):
        out[name] += [value] * (size - len(out[name]))
    for r in [*rows, *prefill, *[None] * (N - len(prefill))]:
        blocks = [] if r is None else list(r.block_table)
        out["block_table"].append(blocks + [0] * (CAPACITY["max_blocks"] - len(blocks)))
    return out


def plain_draws(batch: ScheduledBatch, R: int, K: int) -> tuple[list[float], list[int]]:
    """[R] temperatures, padded, and keys of the batch's own rows, an element at a time."""
    temperatures, keys = [], []
    for r in batch.rows:
        for i in range(1 + K if r.is_decode else 1):
            temperatures.append(np.float32(r.sampling.temperature if r.samples else 0))
            seed = r.sampling.seed if r.samples else 0
            keys += stream_keys(stream_starts([seed]), [r.sample_index + i]).tolist()
    return temperatures + [0] * (R - len(temperatures)), keys


def random_batch(rng: random.Random, K: int) -> ScheduledBatch:
    slots = rng.sample(range(200), 200)
    decode = [
        random_row(rng, slots, decode=True, most=1 + K) for _ in range(rng.choice([0, 1, 3, 6]))
    ]
    prefill = [
        random_row(rng, slots, decode=False, most=rng.choice([1, 20, 36]))
        for _ in range(rng.choice([0, 0, 1, 5]))
    ]
    return ScheduledBatch.of(0, (*decode, *prefill))


def check_inputs(inputs: StepInputs, expected: dict[str, list]) -> None:
    ids, prev_rows = expected["input_ids"], expected.pop("prev_rows")
    expected["input_ids"] = [
        new if i < 0 else TOKENS[i] for i, new in zip(prev_rows, ids, strict=True)
    ]
    for name, values in expected.items():
        tensor = getattr(inputs, name)
        assert tensor.dtype == torch.int32 and tensor.is_contiguous()
        assert tensor.tolist() == values, name


@pytest.mark.parametrize("K", [0, 2])
def test_fill(K: int) -> None:
    """Each fill is complete: nothing of the one before shows, whatever its layout was."""
    rng, into = random.Random(K), buffers(K)
    for _ in range(150):
        batch = random_batch(rng, K)
        tokens = batch.num_prefill_tokens
        D = rng.randint(batch.num_decode_rows, CAPACITY["max_decode_rows"])
        T = rng.choice([t for t in (0, 16, 48, 112, 192) if t >= tokens])
        inputs = load(into, batch, D, T)
        expected = plain(batch, D, T, K)
        check_inputs(inputs, expected)
        temperatures, keys = plain_draws(batch, len(inputs.sample_rows), K)
        assert into.sampling.is_greedy == (not any(temperatures))
        if any(temperatures):
            assert into.temperature[: len(temperatures)].tolist() == temperatures
            assert into.keys[: len(keys)].tolist() == keys
    assert into.temperature.dtype == torch.float32 and into.keys.dtype == torch.int64


@pytest.mark.parametrize("K", [0, 2])
def test_fill_of_the_same_rows(K: int) -> None:
    """Rows that decode on, and then each thing that can change about one of them."""
    rng, into = random.Random(K), buffers(K)
    changes = {
        "token_ids": lambda r: [rng.randrange(500) for _ in r.token_ids],
        "prev_row": lambda r: rng.choice([-1, 0, 5]),
        "src_slot": lambda r: rng.randrange(1000),
        "dst_slots": lambda r: tuple(rng.sample(range(1000), len(r.dst_slots))),
        "block_table": lambda r: array("i", rng.sample(range(1000), CAPACITY["max_blocks"])),
    }
    for _ in range(12):
        slots = rng.sample(range(200), 200)
        n, D = rng.choice([(1, 2), (3, 6), (6, 6)])
        rows = [random_row(rng, slots, decode=True, most=1 + K) for _ in range(n)]
        rows = [r._replace(block_table=changes["block_table"](r)) for r in rows]
        for number in range(12):
            if number and K == 0:
                rows = [r._replace(start=r.start + 1, end=r.end + 1) for r in rows]
            if rng.random() < 0.5:
                i, name = rng.randrange(n), rng.choice(list(changes))
                rows[i] = rows[i]._replace(**{name: changes[name](rows[i])})
            rows = [r._replace(kv_start=r.start) for r in rows]
            if rng.random() < 0.2:
                # another step, or one that isn't filled to its end, in between
                other = random_batch(rng, K)
                load(into, other, CAPACITY["max_decode_rows"], 192)
            if rng.random() < 0.2:
                bad = rows[-1]._replace(dst_slots=("no slot",) * len(rows[-1].dst_slots))
                with pytest.raises(ValueError, match="no slot"):
                    into.fill(ScheduledBatch.of(0, (*rows[:-1], bad)), D, 0)
            batch = ScheduledBatch.of(0, tuple(rows))
            check_inputs(load(into, batch, D, 0), plain(batch, D, 0, K))


def test_fill_looks_up_the_same_rows_once() -> None:
    """What rows ask for is read again when one of them is another, or doesn't sample."""
    greedy, drawn, into = SamplingParams(temperature=0), SamplingParams(seed=4), buffers()

    def fill(*params: SamplingParams, index: int = 0, samples: bool = True) -> tuple:
        made = [
            row([1], 3, src=0, dst=1, blocks=array("i", [5]), decode=True)._replace(
                sampling=asked, sample_index=index, samples=samples
            )
            for asked in params
        ]
        load(into, ScheduledBatch.of(0, tuple(made)), 2)
        return into.sampling, into.temperature[:2].tolist(), into.keys[:2].tolist()

    plan, temperatures, keys = fill(greedy, drawn)
    assert temperatures == [0, 1]
    again, temperatures, later = fill(greedy, drawn, index=1)
    assert again is plan and temperatures == [0, 1]
    assert later == stream_keys(stream_starts([0, 4]), [1, 1]).tolist() != keys
    moved, temperatures, _ = fill(drawn, greedy)
    assert moved is not plan and temperatures == [1, 0]
    assert fill(drawn)[1] == [1, 0]
    assert fill(drawn, samples=False)[0].is_greedy
    assert not fill(drawn)[0].is_greedy
    load(into, ScheduledBatch.of(0, ()))
    assert into.sampling.takes_argmax


def test_fill_exports_are_sorted() -> None:
    batch = ScheduledBatch.of(
        0,
        (row([1] * 50, 16, src=0, dst=1, blocks=array("i", range(5)), exports=((64, 3), (32, 4))),),
    )
    inputs = load(buffers(), batch)
    assert inputs.checkpoint_offsets[:2].tolist() == [16, 48]
    assert inputs.checkpoint_slots[:2].tolist() == [4, 3]


def test_fill_keeps_addresses() -> None:
    """A (D, T) has the same memory each time, so a captured graph can be replayed."""
    into, rng = buffers(), random.Random(1)
    empty = ScheduledBatch.of(0, ())
    first = [x.data_ptr() for x in (*load(into, empty, 3, 32), into.temperature, into.keys)]
    for _ in range(5):
        load(into, random_batch(rng, 0), 6, 192)
    held = (*load(into, empty, 3, 32), into.temperature, into.keys)
    assert [x.data_ptr() for x in held] == first
    assert all(address % 16 == 0 for address in first)


def test_fill_keeps_few_layouts() -> None:
    into = buffers(max_prefill_tokens=16 * 3000)
    for T in range(16, 16 * 1100, 16):
        into.fill(ScheduledBatch.of(0, ()), 0, T)
    assert len(into._layouts) < 1024


@pytest.mark.parametrize("D,T", [(7, 0), (0, 208), (1, 8)])
def test_fill_asserts_capacity(D: int, T: int) -> None:
    with pytest.raises(AssertionError, match="=7|=208|T=8"):
        buffers().fill(ScheduledBatch.of(0, ()), D, T)


def test_fetch_takes_tokens() -> None:
    """The last id comes from the step before, by that step's rows; all others stay."""
    into = buffers()
    rows = [
        row([0], 7, src=0, dst=1, blocks=array("i", [0]), decode=True, prev_row=2),
        row([44], 7, src=2, dst=3, blocks=array("i", [1]), decode=True),
        row([0], 9, src=4, dst=5, blocks=array("i", [2]), decode=True, prev_row=0),
        row([7, 8, 0], 0, src=-1, dst=6, blocks=array("i", [3]), prev_row=1),
    ]
    into.handover.tokens[:3] = torch.tensor([90, 91, 92])
    inputs = load(into, ScheduledBatch.of(0, tuple(rows)), 4, 16)
    assert inputs.input_ids.tolist() == [92, 44, 90, 0, 7, 8, 91, *[0] * 13]


@pytest.mark.gpu
def test_fill_on_gpu() -> None:
    """Steps filled faster than they are fetched arrive whole, each in its turn."""
    on_gpu = buffers(device="cuda")
    on_cpu, rng = buffers(), random.Random(2)
    batches = [random_batch(rng, 0) for _ in range(60)]
    names = (*StepInputs._fields, "temperature", "keys")

    def tensors_of(into: StepBuffers, batch: ScheduledBatch) -> list[torch.Tensor]:
        inputs = load(into, batch, 6, 192)
        # keys of rows of padding are anything, and those of greedy steps too
        count = 0 if into.sampling.is_greedy else len(batch.rows)
        draws = (into.temperature[: count and 6 + 5], into.keys[:count])
        return [x.clone() for x in (*inputs, *draws)]

    torch.cuda._sleep(20_000_000)  # the copies queue up behind this
    seen = [tensors_of(on_gpu, batch) for batch in batches]
    for batch, tensors in zip(batches, seen, strict=True):
        for name, a, b in zip(names, tensors, tensors_of(on_cpu, batch), strict=True):
            assert torch.equal(a.cpu(), b), name
