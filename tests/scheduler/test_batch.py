"""Counts and columns of a step, and rows and outputs that are whole."""

from collections.abc import Sequence

from torch_kda.cache.prefix_cache import PrefixCache
from torch_kda.scheduler.batch import ScheduledBatch, ScheduledRow
from torch_kda.scheduler.request import Request, RequestOutput, SamplingParams
from torch_kda.scheduler.scheduler import Scheduler

Step = tuple[ScheduledBatch, Sequence[RequestOutput]]


def mixed_steps(num_speculative_tokens: int) -> list[Step]:
    """Steps of three requests, of which one comes in while the others generate."""
    cache = PrefixCache(num_blocks=64, block_size=4, num_slots=24, unit=4)
    scheduler = Scheduler(
        cache,
        max_num_seqs=3,
        max_num_batched_tokens=24,
        max_model_len=100,
        alignment=1,
        num_speculative_tokens=num_speculative_tokens,
    )
    steps = []
    for i, length in enumerate((5, 9, 40)):
        sampling = SamplingParams(max_tokens=12)
        scheduler.enqueue(Request(f"r{i}", list(range(i, i + length)), sampling))
        for _ in range(3):
            batch = scheduler.schedule()
            tokens = [[7] if row.samples else [] for row in batch.rows]
            drafts = [[7] * num_speculative_tokens for _ in batch.rows]
            steps.append((batch, scheduler.commit(batch, tokens, drafts=drafts)))
    return steps


def test_counts() -> None:
    """The same as a look at every row."""
    batches = [ScheduledBatch.of(0, ()), *(batch for K in (0, 2) for batch, _ in mixed_steps(K))]
    kinds = set()
    for batch in batches:
        decode = [row for row in batch.rows if row.is_decode]
        prefill = [row for row in batch.rows if not row.is_decode]
        kinds.add((bool(decode), bool(prefill)))
        assert batch.num_rows == len(batch.rows) and batch.num_decode_rows == len(decode)
        assert list(batch.prefill_rows) == prefill
        assert batch.num_prefill_tokens == sum(row.end - row.start for row in prefill)
    assert len(kinds) == 4


def test_columns_and_rows_tell_the_same() -> None:
    for K in (0, 2):
        for batch, _ in mixed_steps(K):
            again = ScheduledBatch.of(batch.step, batch.rows)
            assert again.columns == batch.columns and again.rows == batch.rows
            assert again.num_decode_rows == batch.num_decode_rows
            for name, column in batch.columns._asdict().items():
                assert [getattr(row, name) for row in batch.rows] == list(column), name


def test_rows_and_outputs_are_whole() -> None:
    """They are made of columns and tuples: no field is missing or too many."""
    for K in (0, 2):
        for batch, outputs in mixed_steps(K):
            for row in batch.rows:
                assert type(row) is ScheduledRow and ScheduledRow(*row) == row
                assert len(row) == len(ScheduledRow._fields)
                assert len(row.token_ids) == row.end - row.start
                assert row.exports == () or not row.is_decode
            assert len(outputs) > 0 and outputs[0] == next(iter(outputs))
            for output in outputs:
                assert type(output) is RequestOutput and len(output) == len(RequestOutput._fields)
                assert output.token_ids == (7,)
