"""A worker without a model: its state is a hash of the tokens, so that any wrong one shows.

The state after n tokens is (n, h) with h = h * BASE + token + 1 modulo a prime. KV of position j is
the hash of tokens [0, j], and with draft layers also that of [0, j + lookahead]. What a request's
tokens really are, the worker knows from its own notes, not from the scheduler.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch_kda.cache.block_pool import BlockPool
from torch_kda.cache.hashing import Extras, extend_keys
from torch_kda.cache.prefix_cache import PrefixCache
from torch_kda.cache.state_pool import SlotStatus, StatePool
from torch_kda.scheduler.batch import ScheduledBatch, ScheduledRow
from torch_kda.scheduler.request import Request, RequestOutput
from torch_kda.scheduler.scheduler import Scheduler

PRIME = (1 << 61) - 1
BASE = 0x1234567_89ABCDE

State = tuple[int, int]  # tokens, hash
POISON: State = (-1, -1)


def extend_hash(value: int, token: int) -> int:
    return (value * BASE + token + 1) % PRIME


def sample(value: int, vocab: int) -> int:
    """The model: the next token is a function of the state alone."""
    return (value ^ (value >> 29)) % vocab


class PoisonedStates(StatePool):
    """Tells the ghost at once when a slot is freed."""

    __slots__ = ("on_free",)

    def __init__(self, num_slots: int, on_free: Callable[[int], None]) -> None:
        super().__init__(num_slots)
        self.on_free = on_free

    def _free_now(self, slot: int) -> None:
        super()._free_now(slot)
        self.on_free(slot)


class PoisonedBlocks(BlockPool):
    """Tells the ghost at once when a block is freed."""

    __slots__ = ("on_free",)

    def __init__(self, num_blocks: int, on_free: Callable[[int], None]) -> None:
        super().__init__(num_blocks)
        self.on_free = on_free

    def release(self, blocks) -> None:
        blocks = list(blocks)
        super().release(blocks)
        for block in blocks:
            self.on_free(block)


@dataclass
class Truth:
    """What a request's tokens are, and the hash after each of them."""

    extras: Extras
    tokens: array
    hashes: list[int]  # hashes[n] is that of n tokens
    keys: list[bytes] = field(default_factory=list)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self.hashes.append(extend_hash(self.hashes[-1], token))


class GhostWorker:
    """Runs batches on pools of hashes. A read of what is not right is an AssertionError."""

    def __init__(self, cache: PrefixCache, *, vocab: int = 1000) -> None:
        self.cache = cache
        self.vocab = vocab
        num_blocks, num_slots = cache.block_pool.num_blocks, cache.state_pool.num_slots
        cache.state_pool = PoisonedStates(num_slots, self.poison_slot)
        cache.block_pool = PoisonedBlocks(num_blocks, self.poison_block)
        self.states: list[State] = [POISON] * num_slots
        size = num_blocks * cache.block_size
        self.kv = [-1] * size  # hash of the prefix that ends here
        self.draft_kv = [-1] * size  # hash of that prefix and `lookahead` more tokens
        self.truths: dict[str, Truth] = {}
        self.prefix_of_key: dict[bytes, tuple[State, int]] = {}  # key -> state, hash with lookahead
        self.prev_tokens: tuple[int, list[list[int]]] = (-1, [])  # step, its tokens by row
        self.forwards = 0

    def poison_slot(self, slot: int) -> None:
        self.states[slot] = POISON

    def poison_block(self, block: int) -> None:
        size = self.cache.block_size
        self.kv[block * size : (block + 1) * size] = [-1] * size
        self.draft_kv[block * size : (block + 1) * size] = [-1] * size

    def learn(self, request: Request) -> None:
        """Notes a request before it is enqueued."""
        extras = Extras(
            salt=request.cache_salt,
            lora_name=request.lora[0],
            lora_path=request.lora[1],
            spans=request.spans,  # pyright: ignore[reportArgumentType]
        )
        seed = hash(repr(extras)) % PRIME if extras != Extras() else 1
        truth = Truth(extras, array("i"), [seed])
        for token in request.prompt_token_ids:
            truth.append(token)
        self.truths[request.request_id] = truth

    # the forward

    def run(self, batch: ScheduledBatch, drafts: dict[str, Sequence[int]] | None = None):
        """Runs one step. Returns the tokens of each row."""
        self.forwards += 1
        self._check_writes(batch)
        inputs = [self._inputs(row) for row in batch.rows]
        # every read sees the pools as they were before the step
        for row, tokens in zip(batch.rows, inputs, strict=True):
            self._check_reads(row, tokens)
        sources = [self._source(row) for row in batch.rows]
        results = []
        for row, tokens, source in zip(batch.rows, inputs, sources, strict=True):
            states = self._states_along(source, tokens)
            self._write_states(row, states)
            self._write_kv(row, tokens, states)
            results.append(self._sample(row, tokens, states))
        self.prev_tokens = (batch.step, results)
        return results

    def fail(self, batch: ScheduledBatch) -> None:
        """A forward that raised: it may have written anything to where it was to write."""
        for row in batch.rows:
            for slot in self._written_slots(row):
                self.states[slot] = POISON
            for position in range(max(row.start, row.kv_start), row.end):
                place = self._place(row, position)
                self.kv[place] = self.draft_kv[place] = -1
        self.prev_tokens = (batch.step, [[0] for _ in batch.rows])

    def _inputs(self, row: ScheduledRow) -> list[int]:
        tokens = list(row.token_ids)
        assert len(tokens) == row.end - row.start > 0, f"{row}"
        if row.prev_row >= 0:
            step, results = self.prev_tokens
            assert results[row.prev_row], f"row {row.prev_row} of step {step} gave no token: {row}"
            tokens[-1] = results[row.prev_row][-1]
        return tokens

    def _check_writes(self, batch: ScheduledBatch) -> None:
        """Slots written are pairwise distinct, and none is another row's source (I04)."""
        written: set[int] = set()
        for row in batch.rows:
            slots = self._written_slots(row)
            assert written.isdisjoint(slots) and len(set(slots)) == len(slots), f"{batch}"
            written.update(slots)
        for row in batch.rows:
            own = set(row.dst_slots)
            assert row.src_slot not in written - own, f"{row} reads what another row writes"
            exported = {slot for _, slot in row.exports}
            assert row.src_slot not in exported, f"{row}"
            positions = [position for position, _ in row.exports]
            assert positions == sorted(set(positions)), f"{row}"
            assert all(row.start < position <= row.end for position in positions), f"{row}"
        decode = [row.is_decode for row in batch.rows]
        assert decode == sorted(decode, reverse=True), "decode rows come first"
        places = [
            self._place(row, position)
            for row in batch.rows
            for position in range(max(row.start, row.kv_start), row.end)
        ]
        assert len(set(places)) == len(places), "two rows write one KV place"

    def _written_slots(self, row: ScheduledRow) -> list[int]:
        return [*row.dst_slots, *(slot for _, slot in row.exports)]

    def _source(self, row: ScheduledRow) -> State:
        truth = self.truths[row.request_id]
        if row.src_slot < 0:
            assert row.start == 0, f"{row} starts from nothing"
            return (0, truth.hashes[0])
        state = self.states[row.src_slot]
        expected = (row.start, truth.hashes[row.start])
        assert state == expected, f"{row} reads {state} and should read {expected}"
        return state

    def _check_reads(self, row: ScheduledRow, tokens: list[int]) -> None:
        truth = self.truths[row.request_id]
        known = truth.tokens[row.start : row.end].tolist()
        assert tokens[: len(known)] == known or row.is_decode, f"{row}: {tokens=} {known=}"
        assert tokens[0] == known[0], f"{row}: {tokens=} {known=}"
        lookahead = self.cache.lookahead
        for position in range(max(row.start, row.kv_start)):
            place = self._place(row, position)
            assert self.kv[place] == truth.hashes[position + 1], f"KV of {position} is wrong: {row}"
            if lookahead and position + lookahead < max(row.start, row.kv_start):
                assert self.draft_kv[place] == truth.hashes[position + 1 + lookahead], (
                    f"draft KV of {position} is wrong: {row}"
                )

    def _states_along(self, source: State, tokens: list[int]) -> list[State]:
        states = [source]
        for token in tokens:
            length, value = states[-1]
            states.append((length + 1, extend_hash(value, token)))
        return states

    def _write_states(self, row: ScheduledRow, states: list[State]) -> None:
        if row.is_decode:
            assert len(row.dst_slots) == len(states) - 1, f"{row}"
            for slot, state in zip(row.dst_slots, states[1:], strict=True):
                self.states[slot] = state
        else:
            (slot,) = row.dst_slots
            self.states[slot] = states[-1]
        for position, slot in row.exports:
            self.states[slot] = states[position - row.start]

    def _write_kv(self, row: ScheduledRow, tokens: list[int], states: list[State]) -> None:
        for position in range(max(row.start, row.kv_start), row.end):
            place = self._place(row, position)
            self.kv[place] = states[position - row.start + 1][1]
            self.draft_kv[place] = -1
        lookahead = self.cache.lookahead
        if not lookahead:
            return
        # a draft layer fills in the places whose next tokens are known now, also where it had
        # looked ahead to drafts that were not accepted
        chain = states + self._states_along(states[-1], list(row.next_token_ids))[1:]
        for position in range(max(row.start - lookahead, 0), row.end):
            end = position + 1 + lookahead - row.start
            place = self._place(row, position)
            if end < len(chain):
                self.draft_kv[place] = chain[end][1]

    def _place(self, row: ScheduledRow, position: int) -> int:
        size = self.cache.block_size
        return int(row.block_table[position // size]) * size + position % size

    def _sample(self, row: ScheduledRow, tokens: list[int], states: list[State]) -> list[int]:
        if not row.samples:
            return []
        truth = self.truths[row.request_id]
        if not row.is_decode:
            new = [sample(states[-1][1], self.vocab)]
        else:
            new = []
            for index, (_, value) in enumerate(states[1:]):
                new.append(sample(value, self.vocab))
                if index + 1 < len(tokens) and tokens[index + 1] != new[-1]:
                    break
        known = len(truth.tokens)
        assert known == row.end - len(tokens) + 1 or not row.is_decode, f"{row} {known=}"
        if row.end >= known or row.is_decode:
            for token in new:
                truth.append(token)
        return new

    # what others may see

    def check_visible(self) -> None:
        """Every READY state and every cached unit of KV is what its key says (I01)."""
        self.learn_keys()
        cache = self.cache
        size, lookahead = cache.block_size, cache.lookahead
        for node in cache.nodes():
            state, with_lookahead, hashes = self.prefix_of_key[node.key]
            if node.slot >= 0:
                assert cache.state_pool.status[node.slot] is SlotStatus.READY
                assert self.states[node.slot] == state, f"{node!r} {self.states[node.slot]} {state}"
            first = (node.depth - 1) * cache.unit
            for i in range(cache.unit):
                place = node.blocks[i // size] * size + i % size
                assert self.kv[place] == hashes[first + i + 1], f"{node!r}: KV {first + i}"
                if lookahead:
                    assert self.draft_kv[place] == hashes[first + i + 1 + lookahead], f"{node!r}"
            del with_lookahead

    def learn_keys(self) -> None:
        cache = self.cache
        for truth in self.truths.values():
            done = len(truth.keys)
            extend_keys(
                truth.keys,
                truth.tokens,
                cache.root_key,
                cache.unit,
                lookahead=cache.lookahead,
                extras=truth.extras,
            )
            for index in range(done, len(truth.keys)):
                length = (index + 1) * cache.unit
                self.prefix_of_key[truth.keys[index]] = (
                    (length, truth.hashes[length]),
                    truth.hashes[length + cache.lookahead],
                    truth.hashes,
                )


@dataclass
class Bench:
    """Scheduler and ghost worker together, with steps in flight and everything checked.

    A step runs as late as it can: just before it is committed or the one after it runs. What was
    freed too early is poison by then.
    """

    scheduler: Scheduler
    ghost: GhostWorker
    checks: bool = True
    propose: Callable[[str, list[int]], Sequence[int]] | None = None  # drafter
    in_flight: list[ScheduledBatch] = field(default_factory=list)
    batches: list[ScheduledBatch] = field(default_factory=list)
    requests: dict[str, Request] = field(default_factory=dict)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    doomed: set[int] = field(default_factory=set)  # steps in flight after one that failed

    def submit(self, request: Request) -> Request:
        self.ghost.learn(request)
        self.scheduler.enqueue(request)
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        return request

    def schedule(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        self._check_batch(batch)
        if batch.rows:
            self.in_flight.append(batch)
            self.batches.append(batch)
        self.check()
        return batch

    def commit(self) -> Sequence[RequestOutput]:
        batch = self.in_flight.pop(0)
        if batch.step in self.doomed:
            self.ghost.fail(batch)
            return self._take(self.scheduler.commit(batch, []))
        tokens = self.ghost.run(batch)
        drafts = ()
        if self.propose is not None:
            drafts = [
                self.propose(row.request_id, self.ghost.truths[row.request_id].tokens.tolist())
                for row in batch.rows
            ]
        return self._take(self.scheduler.commit(batch, tokens, drafts=drafts))

    def fail(self, error: str = "boom") -> Sequence[RequestOutput]:
        batch = self.in_flight.pop(0)
        self.ghost.fail(batch)
        if batch.step not in self.doomed:
            self.doomed.update(later.step for later in self.in_flight)
        return self._take(self.scheduler.fail(batch, error))

    def _take(self, outputs: Sequence[RequestOutput]) -> Sequence[RequestOutput]:
        for output in outputs:
            assert output.request_id not in self.reasons, f"{output} came after its end"
            self.outputs[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                self.reasons[output.request_id] = output.finish_reason
        self.check()
        return outputs

    def step(self, depth: int = 1) -> ScheduledBatch:
        """Schedules, and commits what would make more than `depth - 1` steps in flight."""
        batch = self.schedule()
        while len(self.in_flight) >= depth or (self.in_flight and not batch.rows):
            self.commit()
            if not batch.rows:
                break
        return batch

    def run(self, depth: int = 1, limit: int = 10_000) -> list[ScheduledBatch]:
        """To the end of all requests. Returns the batches of this run."""
        first = len(self.batches)
        for _ in range(limit):
            if not self.scheduler.has_work:
                self.check()
                return self.batches[first:]
            self.step(depth)
        raise AssertionError(f"not done after {limit} steps")

    def check(self) -> None:
        if self.checks:
            self.scheduler.check_integrity()
            self.ghost.check_visible()

    def _check_batch(self, batch: ScheduledBatch) -> None:
        scheduler = self.scheduler
        tokens = sum(row.end - row.start for row in batch.rows)
        assert tokens <= scheduler.limits.max_num_batched_tokens, f"{tokens} tokens in {batch}"
        assert len(batch.rows) <= scheduler.limits.max_num_seqs
        assert len({row.request_id for row in batch.rows}) == len(batch.rows)
        exports = sum(len(row.exports) for row in batch.rows)
        assert exports <= scheduler.limits.max_exports_per_step
        for row in batch.rows:
            assert len(row.exports) <= scheduler.limits.num_prefill_checkpoint_blocks
            assert len(row.block_table) * scheduler.cache.block_size >= row.end
            assert all(p % scheduler.cache.unit == 0 for p, _ in row.exports)
            if not row.is_decode:
                assert row.start % scheduler.limits.alignment == 0


def make_bench(
    *,
    unit: int = 4,
    block_size: int | None = None,
    num_blocks: int = 64,
    num_slots: int = 16,
    lookahead: int = 0,
    max_states_per_path: int = 32,
    budget: int = 32,
    max_num_seqs: int = 4,
    max_model_len: int = 1 << 20,
    alignment: int = 1,
    vocab: int = 1000,
    checks: bool = True,
    num_speculative_tokens: int = 0,
    **options,
) -> Bench:
    cache = PrefixCache(
        num_blocks=num_blocks,
        block_size=block_size or unit,
        num_slots=num_slots,
        unit=unit,
        root=b"test",
        lookahead=lookahead,
        max_states_per_path=max_states_per_path,
    )
    ghost = GhostWorker(cache, vocab=vocab)
    scheduler = Scheduler(
        cache,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
        alignment=alignment,
        num_speculative_tokens=num_speculative_tokens,
        **options,
    )
    return Bench(scheduler, ghost, checks=checks)


def generate(prompt: Sequence[int], count: int, vocab: int = 1000) -> list[int]:
    """What the ghost's model answers to a prompt, without any cache."""
    value, new = 1, []
    for token in prompt:
        value = extend_hash(value, token)
    for _ in range(count):
        new.append(sample(value, vocab))
        value = extend_hash(value, new[-1])
    return new
