"""Between engine and runner: notes what the model drew, and makes some forwards fail."""

import math
from array import array
from random import Random

import torch
from torch_kda.cache.hashing import Extras, extend_keys
from torch_kda.cache.prefix_cache import PrefixCache
from torch_kda.kda.runner import LaunchedStep, ModelRunner, StepResult
from torch_kda.profiles.workloads import StandIn
from torch_kda.scheduler.batch import ScheduledBatch

INJECTED = "injected fault"  # in the message of every error that is made here
WHERE = ("before the launch", "after the launch", "at the end")


class KeyBook:
    """Which tokens a key stands for: hashes of all that was submitted and drawn, kept for good.

    It asks neither scheduler nor cache. A key names the tokens that were hashed into it, so one
    that is noted for a sequence of tokens is right whatever became of the request.
    """

    def __init__(self, cache: PrefixCache) -> None:
        assert cache.lookahead == 0, "keys would reach beyond the state"
        self._root, self._unit = cache.root_key, cache.unit
        self._tokens: dict[str, array] = {}  # by request: prompt, and what the model drew
        self._keys: dict[str, list[bytes]] = {}
        self._extras: dict[str, Extras] = {}
        self._found: dict[bytes, tuple[array, int]] = {}  # key -> tokens, how many of them

    def submit(self, request_id: str, prompt: list[int], salt: str) -> None:
        self._tokens[request_id] = array("i", prompt)
        self._keys[request_id] = []
        self._extras[request_id] = Extras(salt=salt)
        self._extend(request_id)

    def draw(self, batch: ScheduledBatch, result: StepResult) -> None:
        """Notes the tokens of a step. A step that is dropped later is noted too."""
        for row, drawn in zip(batch.rows, result.token_ids, strict=True):
            known = self._tokens[row.request_id]
            # a failed step leaves a gap, and what comes right after it is dropped
            if not row.samples or row.end > len(known):
                continue
            if row.end < len(known):
                # drawn once more after a failure: keys of the other ending stay, with its array
                self._tokens[row.request_id] = known = known[: row.end]
                del self._keys[row.request_id][row.end // self._unit :]
            known.extend(drawn)
            self._extend(row.request_id)

    def tokens_of(self, request_id: str) -> list[int]:
        """Prompt and all that was drawn, also behind the request's end."""
        return self._tokens[request_id].tolist()

    def find(self, key: bytes) -> list[int] | None:
        """The tokens that a key stands for; None if nobody ever had them."""
        if key not in self._found:
            return None
        tokens, count = self._found[key]
        return tokens[:count].tolist()

    def _extend(self, request_id: str) -> None:
        tokens, keys = self._tokens[request_id], self._keys[request_id]
        done = len(keys)
        extend_keys(keys, tokens, self._root, self._unit, extras=self._extras[request_id])
        for i in range(done, len(keys)):
            self._found[keys[i]] = tokens, (i + 1) * self._unit


class WitnessedRunner(StandIn):
    """A runner that now and then raises, before, after or at the end of a forward.

    What such a forward was to write is filled with NaN then: it may have written anything.
    """

    def __init__(self, runner: ModelRunner, rng: Random, fault_rate: float) -> None:
        super().__init__(runner)
        self.book: KeyBook | None = None
        self.num_faults: dict[str, int] = dict.fromkeys(WHERE, 0)
        self._rng, self._rate = rng, fault_rate / len(WHERE)

    def launch(self, batch: ScheduledBatch) -> LaunchedStep:
        self._maybe_fail(batch, WHERE[0])
        launched = self.runner.launch(batch)
        self._maybe_fail(batch, WHERE[1])
        return launched

    def finish(self, launched: LaunchedStep) -> StepResult:
        self._maybe_fail(launched.batch, WHERE[2])
        result = self.runner.finish(launched)
        assert self.book is not None
        self.book.draw(launched.batch, result)
        return result

    def _maybe_fail(self, batch: ScheduledBatch, where: str) -> None:
        if self._rng.random() >= self._rate:
            return
        self.num_faults[where] += 1
        self._poison(batch)
        raise RuntimeError(f"{INJECTED} {where}")

    @torch.inference_mode()
    def _poison(self, batch: ScheduledBatch) -> None:
        pools, size = self.runner.pools, self.runner.plan.block_size
        slots = [s for row in batch.rows for s in (*row.dst_slots, *(s for _, s in row.exports))]
        places = [
            int(row.block_table[i // size]) * size + i % size
            for row in batch.rows
            for i in range(max(row.start, row.kv_start), row.end)
        ]
        for pool in (*pools.state, *pools.conv):
            pool[slots] = math.nan
        for pool in pools.kv:
            pool.flatten(0, 1)[places] = math.nan
