"""One soak: the real engine under random traffic, its caches and answers judged on the way."""

import logging
import time
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch_kda.cache.node import Node
from torch_kda.cache.state_pool import SlotStatus
from torch_kda.kda.build import build_engine
from torch_kda.kda.runner import ModelRunner
from torch_kda.tests.soak.judge import TOLERANCE, WRONG, Judge
from torch_kda.tests.soak.recompute import Recompute
from torch_kda.tests.soak.subject import Setup, make_model
from torch_kda.tests.soak.traffic import Traffic
from torch_kda.tests.soak.witness import KeyBook, WitnessedRunner

FAULT_RATE = 0.003  # forwards that raise
DRAIN_RATE = 0.002  # steps after which everything runs to its end
NEW_SHARE = 0.7  # of the samples that look for a state not seen before
KV_SHARE = 0.15  # of the samples that take KV without a state
MAX_VIOLATIONS = 20  # enough to see what is wrong
FINAL_SHARE = 0.15  # of the run's time for what is cached at its end
MAX_DRAIN_STEPS = 20_000  # every request that can wait, one after the other, takes fewer
SAY_EVERY = 10.0  # seconds

log = logging.getLogger("torch_kda.soak")

Say = Callable[[str], None]


class Soak:
    """Everything of one run. Its parts are public, so that a test can break one of them."""

    def __init__(self, setup: Setup, *, seed: int, fault_rate: float = FAULT_RATE) -> None:
        self.setup = setup
        # the choice of samples depends on time; the traffic must not
        self.rng, self.sampling_rng = Random(f"{seed} steps"), Random(f"{seed} samples")
        self.model = make_model(setup)
        self.runner = ModelRunner(self.model, setup.engine)
        with torch.inference_mode():
            for pool in (*self.runner.pools.state, *self.runner.pools.conv, *self.runner.pools.kv):
                pool.fill_(float("nan"))  # a read of what was never written shows
        self.witness = WitnessedRunner(self.runner, Random(f"{seed} faults"), fault_rate)
        # it stands where a runner is expected, and has all that one has
        self.engine = build_engine(self.witness, setup.engine, None)  # pyright: ignore[reportArgumentType]
        self.cache = self.engine.scheduler.cache
        self.witness.book = self.book = KeyBook(self.cache)
        self.traffic = Traffic(self.engine, setup, self.book, Random(f"{seed} traffic"))
        self.judge = Judge(Recompute(self.model), self.runner.pools, self.cache, self.book)
        self.num_steps = self.num_drains = 0
        self.leaks: list[str] = []  # at most one: books that are wrong end the run
        self.crashes: list[str] = []  # likewise
        self.checking_seconds = 0.0

    @property
    def violations(self) -> list[str]:
        return [*self.leaks, *self.crashes, *self.traffic.violations, *self.judge.found.violations]

    def run(
        self, seconds: float, *, share: float = 0.5, max_steps: int | None = None, say: Say
    ) -> None:
        """
        Args:
            share: of the time that goes into recomputing; 1: something after every step.
            max_steps: an end before the time is up.
        """
        start = said = time.monotonic()
        try:
            while (now := time.monotonic()) - start < seconds and not self._is_over(max_steps):
                if now - said >= SAY_EVERY:
                    said = now
                    say(self.progress(now - start))
                self.traffic.act()
                self.step()
                if share >= 1 or self.checking_seconds < share * (now - start):
                    self.sample()
                if self.rng.random() < DRAIN_RATE:
                    self.drain()
            self._end(FINAL_SHARE * seconds)
        # an assertion is the product's own, its integrity checks', or that of `drain`
        except Exception as error:
            log.exception("the soak stopped in step %d", self.num_steps)
            message = f"step {self.num_steps}: {type(error).__name__}: {error}"
            (self.leaks if isinstance(error, AssertionError) else self.crashes).append(message)
        self.judge.conclude()
        say(self.progress(time.monotonic() - start))

    def _is_over(self, max_steps: int | None) -> bool:
        is_done = max_steps is not None and self.num_steps >= max_steps
        return is_done or len(self.violations) >= MAX_VIOLATIONS

    def step(self) -> None:
        """One step of the engine, and its books."""
        self.traffic.take(self.engine.step())
        self.engine.scheduler.check_integrity()
        self.num_steps += 1

    def sample(self) -> None:
        """Judges one cached prefix, and one answer if there is any."""
        start = time.monotonic()
        node = self._choose()
        if node is not None:
            self.judge.check_prefix(node)
        if self.traffic.to_compare:
            self._check_answer()
        self.checking_seconds += time.monotonic() - start

    def _choose(self) -> Node | None:
        rng, nodes = self.sampling_rng, list(self.cache.nodes())
        ready = [node for node in nodes if node.slot >= 0]
        new = [node for node in ready if (node.serial, node.slot) not in self.judge.found.slots]
        bare = [node for node in nodes if node.slot < 0 and not node.children]
        if bare and rng.random() < KV_SHARE:
            return rng.choice(bare)
        if new and rng.random() < NEW_SHARE:
            return rng.choice(new)
        return rng.choice(ready) if ready else None

    def _check_answer(self) -> None:
        name, asked = self.traffic.to_compare.pop()
        self.judge.check_answer(name, asked.prompt, asked.answer, asked.logprobs)

    def drain(self) -> None:
        """To the end of all requests; then nobody owns anything but the cache (zero leaks)."""
        last = self.num_steps + MAX_DRAIN_STEPS
        while self.engine.has_work:
            assert self.num_steps < last, f"{list(self.traffic.active)} do not end"
            self.step()
        self.num_drains += 1
        scheduler, states = self.engine.scheduler, self.cache.state_pool
        assert not self.traffic.active, f"{list(self.traffic.active)} are gone without an end"
        assert not scheduler.has_work and not scheduler.holdings.announced
        assert not any(node.references for node in self.cache.nodes()), "a unit is still used"
        assert not any(states.pins), f"{states.pins=}"
        owned = set(states.status) - {SlotStatus.FREE, SlotStatus.READY}
        assert not owned, f"slots of {owned} are left over"
        assert states.num_slots - states.num_free == self.cache.num_cached_states
        units = len(list(self.cache.nodes()))
        blocks = self.cache.block_pool
        assert blocks.num_blocks - blocks.num_free == units * self.cache.blocks_per_unit

    def _end(self, seconds: float) -> None:
        """Half of the requests are aborted, the rest runs out; all that is cached is judged."""
        for name in list(self.traffic.active)[::2]:
            self.traffic.abort(name)
        self.drain()
        until = time.monotonic() + seconds
        nodes = [node for node in self.cache.nodes() if node.slot >= 0]
        while nodes and time.monotonic() < until:
            self.judge.check_prefix(nodes.pop())
        while self.traffic.to_compare and time.monotonic() < until:
            self._check_answer()
        self.cache.clear()
        self.engine.scheduler.check_integrity()
        blocks, states = self.cache.block_pool, self.cache.state_pool
        assert blocks.num_free == blocks.num_blocks and states.num_free == states.num_slots

    def progress(self, seconds: float) -> str:
        counts, found = self.traffic.counts, self.judge.found
        worst = max(found.worst.values(), default=0.0)
        return (
            f"{seconds:5.0f} s: {self.num_steps:,} steps, {counts.finished:,} requests finished, "
            f"{len(found.slots):,} slots checked, worst {worst:.1e}, "
            f"{found.num_answers:,} answers, {len(self.violations)} violations"
        )

    def as_json(self) -> dict[str, Any]:
        """All counts, in the words of `soak.json`."""
        counts, found, scheduler = self.traffic.counts, self.judge.found, self.engine.scheduler
        cache = self.cache.counters
        mismatches = found.mismatches()
        near = [one for _, one in mismatches if one.is_near_tie]
        return {
            "model": {
                "name": self.setup.model.name,
                "gate_lower_bound": self.setup.model.gate_lower_bound,
                "heads": self.setup.model.linear_num_heads,
                "head_dim": self.setup.model.linear_head_dim,
                "kda_layers": self.setup.model.kda_layers,
                "mla_layers": self.setup.model.mla_layers,
                "hidden_size": self.setup.model.hidden_size,
                "dtype": self.setup.model.dtype,
            },
            "engine": {
                "is_compiled": self.runner.is_compiled,
                "graphs": self.runner.captured and str(self.runner.captured),
                "max_num_seqs": self.setup.engine.max_num_seqs,
                "budget": self.setup.engine.max_num_batched_tokens,
                "max_model_len": self.setup.model.max_model_len,
                "unit": self.cache.unit,
                "kv_block": self.cache.block_size,
                "exports_per_row": scheduler.limits.num_prefill_checkpoint_blocks,
                "export_every": scheduler.limits.export_every,
                "state_slots": self.cache.state_pool.num_slots,
                "kv_blocks": self.cache.block_pool.num_blocks,
                "steps_in_flight": self.engine.max_steps_in_flight,
            },
            "steps": self.num_steps,
            "requests": {
                "submitted": counts.submitted,
                "finished": counts.finished,
                "aborted": counts.aborted,
                "failed": counts.failed,
            },
            "preemptions": scheduler.counters.preemptions,
            "of_them_forced": counts.forced_preemptions,
            "failed_forwards": self.witness.num_faults,
            "evictions": {
                "states": cache.evictions_for_states,
                "of_them_forced": counts.forced_evictions_of_states,
                "kv_units": cache.evictions_for_kv,
                "of_these_forced": counts.forced_evictions_of_kv,
                "states_lost_with_kv": cache.states_lost_with_kv,
            },
            "tokens": {
                "prefill": scheduler.counters.prefill_tokens,
                "decode": scheduler.counters.decode_tokens,
                "cached": cache.hit_tokens,
                "lost": cache.lost_tokens,
                "recomputed": found.num_tokens,
            },
            "published_states": cache.published_states,
            "slots_sampled": found.num_slots,
            "different_slots_sampled": len(found.slots),
            "kv_prefixes_sampled": found.num_kv_prefixes,
            "tolerance": TOLERANCE,
            "worst_relative_rms": _rounded(found.worst),
            "wrong_is_at_least": WRONG,
            "smallest_relative_rms_of_wrong_positions": _rounded(found.smallest_wrong),
            "wrong_positions_looked_at": found.num_wrong,
            "greedy": {
                "answers": found.num_answers,
                "equal_tokens": found.num_greedy_tokens,
                "largest_difference": _short(found.largest_difference),
                "worst_relative_rms": _short(found.worst_answer),
                "near_ties": len(near),
                "violations": len(mismatches) - len(near),
                "largest_gap_of_a_near_tie": _short(max((one.gap for one in near), default=0.0)),
            },
            "drains": self.num_drains,
            "leaks": self.leaks,
            "violations": self.violations,
        }


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: _short(value) for name, value in sorted(values.items())}


def _short(value: float) -> float:
    return float(f"{value:.3g}")
