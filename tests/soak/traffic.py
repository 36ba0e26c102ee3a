"""Random requests whose prompts form a tree, and what happens to them on their way."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from torch_kda.kda.engine import Engine, RequestUpdate
from torch_kda.kda.runner import TokenLogprobs
from torch_kda.scheduler.request import SamplingParams
from torch_kda.tests.soak.subject import Setup
from torch_kda.tests.soak.witness import INJECTED, KeyBook

# chance of each in one step
ABORT, PREEMPT, EVICT_STATE, EVICT_KV, CLEAR = 0.02, 0.03, 0.02, 0.05, 0.001
NUM_STREAMS = 24  # token sequences that new prompts may begin with
NUM_LOGPROBS = 20
MAX_PENDING = 32  # answers that wait to be compared


@dataclass(slots=True)
class Asked:
    """A request as its caller sees it."""

    prompt: list[int]
    sampling: SamplingParams
    answer: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class TrafficCounts:
    submitted: int = 0
    finished: int = 0
    aborted: int = 0
    failed: int = 0
    forced_preemptions: int = 0
    forced_evictions_of_states: int = 0
    forced_evictions_of_kv: int = 0


class Traffic:
    """Submits, disturbs, and takes what comes back."""

    def __init__(self, engine: Engine, setup: Setup, book: KeyBook, rng: Random) -> None:
        self.engine, self.setup, self.book, self.rng = engine, setup, book, rng
        self.counts = TrafficCounts()
        self.active: dict[str, Asked] = {}
        self.streams: list[list[int]] = []
        self.to_compare: list[tuple[str, Asked]] = []  # finished greedy answers
        self.violations: list[str] = []

    def act(self) -> None:
        """What happens between two steps."""
        rng, cache = self.rng, self.engine.scheduler.cache
        while len(self.active) < self.setup.num_waiting and rng.random() < 0.4:
            self.submit()
        if self.active and rng.random() < ABORT:
            self.abort(rng.choice(list(self.active)))
        if self.active and rng.random() < PREEMPT:
            name = rng.choice(list(self.active))
            self.counts.forced_preemptions += self.engine.scheduler.preempt(name)
        if rng.random() < EVICT_STATE:
            self.counts.forced_evictions_of_states += cache.evict_state()
        if rng.random() < EVICT_KV:
            self.counts.forced_evictions_of_kv += cache.evict_kv()
        if rng.random() < CLEAR:
            cache.clear()

    def submit(self) -> None:
        """One request, or the same prompt twice."""
        rng, unit = self.rng, self.engine.scheduler.cache.unit
        prompt = self._prompt()
        for _ in range(rng.choice((1, 1, 1, 1, 1, 2))):
            sampling = self._sampling(len(prompt))
            salt = rng.choice(("", "", "", "", "", "salt"))
            positions = rng.choice((0, 0, 1, 3))
            priority = rng.choice((0, 0, 0, 1, -1))
            named = [rng.randrange(len(prompt) + unit) for _ in range(positions)]
            named = [min(max(1, at), len(prompt)) for at in named]  # its end more often
            name = self.engine.submit(
                prompt,
                sampling,
                priority=priority,
                checkpoint_positions=named,
                cache_salt=salt,
            )
            self.book.submit(name, prompt, salt)
            self.active[name] = Asked(prompt, sampling)
            self.counts.submitted += 1
        self._remember(prompt)

    def abort(self, name: str) -> None:
        asked = self.active.pop(name)
        if not self.engine.abort(name):
            self.violations.append(f"{name}: it was running and could not be aborted")
        self._remember([*asked.prompt, *asked.answer])
        self.counts.aborted += 1

    def take(self, updates: Sequence[RequestUpdate]) -> None:
        for update in updates:
            asked = self.active.get(update.request_id)
            if asked is None:
                self.violations.append(f"{update.request_id}: an update after its end")
                continue
            asked.answer += update.token_ids
            asked.logprobs += update.logprobs
            if update.finish_reason is not None:
                del self.active[update.request_id]
                self._finish(update, asked)

    def _finish(self, update: RequestUpdate, asked: Asked) -> None:
        name = update.request_id
        if update.finish_reason == "error":
            self.counts.failed += 1
            if INJECTED not in (update.error or ""):
                self.violations.append(f"{name}: {update.error}")
            return
        self.counts.finished += 1
        whole = [*asked.prompt, *asked.answer]
        if self.book.tokens_of(name)[: len(whole)] != whole:
            self.violations.append(f"{name}: its answer is not what the model drew")
        self._remember(whole)
        if asked.sampling.temperature == 0:
            self.to_compare = [*self.to_compare[1 - MAX_PENDING :], (name, asked)]

    def _remember(self, tokens: list[int]) -> None:
        """A later prompt may go on from here."""
        self.streams = [*self.streams[1 - NUM_STREAMS :], tokens]

    def _prompt(self) -> list[int]:
        """A beginning that was there before, cut anywhere or on the grid, and something new."""
        rng, unit = self.rng, self.engine.scheduler.cache.unit
        config = self.setup.model
        base = rng.choice(self.streams) if self.streams and rng.random() < 0.8 else []
        cut = rng.randint(0, len(base))
        base = base[: rng.choice((len(base), len(base), cut, cut // unit * unit))]
        longest = config.max_model_len - 1
        count = int((0.9 * longest) ** rng.random())
        if rng.random() < 0.3:
            # around the end of a unit
            count = max(1, -(-(len(base) + count) // unit) * unit - len(base) + rng.randint(-1, 1))
        tokens = base + [rng.randrange(config.vocab_size) for _ in range(count)]
        return tokens[:longest]

    def _sampling(self, num_prompt_tokens: int) -> SamplingParams:
        rng, vocab = self.rng, self.setup.model.vocab_size
        stops = rng.sample(range(vocab), vocab // 20) if rng.random() < 0.2 else ()
        room = self.setup.model.max_model_len - num_prompt_tokens
        return SamplingParams(
            max_tokens=min(room, int(self.setup.max_new_tokens ** rng.random())),
            temperature=rng.choice((0, 0, 1)),
            stop_token_ids=tuple(stops),
            logprobs=rng.choice((None, NUM_LOGPROBS)),
            seed=rng.getrandbits(32),
        )
