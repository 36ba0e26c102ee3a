"""A walk over everything that can happen to the scheduler, with the ghost worker as witness.

Whatever chooses the way (hypothesis, or a seed) hands in a `random.Random`.
"""

from dataclasses import dataclass
from random import Random

from torch_kda.scheduler.request import Request, RequestStatus, SamplingParams
from torch_kda.tests.scheduler.ghost import Bench, generate, make_bench

ACTIONS = {
    "submit": 6,
    "schedule": 10,
    "commit": 10,
    "fail": 1,
    "abort": 2,
    "finish": 1,
    "preempt": 3,
    "evict_state": 1,
    "evict_kv": 2,
    "clear": 1,
}
VOCAB = 2  # so that unrelated requests share prefixes, and drafts are often right


@dataclass(frozen=True)
class World:
    """Sizes that everything in one walk shares."""

    unit: int
    block_size: int
    alignment: int
    num_slots: int
    num_blocks: int
    budget: int
    max_num_seqs: int
    exports: int
    exports_per_step: int
    every: int
    decode_states: int
    path: int
    lookahead: int
    drafts: int


def make_world(rng: Random) -> World:
    alignment = rng.choice([1, 1, 2, 4])
    unit = alignment * rng.choice([1, 2, 4])
    block_size = rng.choice([b for b in (1, 2, 4, 8, 16) if unit % b == 0])
    drafts = rng.choice([0, 0, 0, 1, 3])
    max_num_seqs = rng.randint(1, 4)
    return World(
        unit=unit,
        block_size=block_size,
        alignment=alignment,
        num_slots=2 + drafts + rng.randint(0, 14),
        num_blocks=rng.randint(24, 120) // block_size + 1,
        budget=max_num_seqs * (1 + drafts) + alignment * rng.randint(1, 12),
        max_num_seqs=max_num_seqs,
        exports=rng.choice([0, 1, 2, 16]),
        exports_per_step=rng.choice([1, 3, 100]),
        every=rng.choice([0, unit, 2 * unit]),
        decode_states=rng.randint(0, 2),
        path=rng.choice([1, 2, 3, 32]),
        lookahead=rng.choice([0, 0, 1, min(2, unit)]),
        drafts=drafts,
    )


class Walk:
    """One scheduler in one world. Every action leaves it checked."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.bench = self._build(world)
        self.num_submitted = 0
        self.streams: list[list[int]] = []  # token sequences that new prompts may begin with
        self.prompts: dict[str, list[int]] = {}

    def _build(self, world: World) -> Bench:
        bench = make_bench(
            unit=world.unit,
            block_size=world.block_size,
            num_blocks=world.num_blocks,
            num_slots=world.num_slots,
            lookahead=world.lookahead,
            max_states_per_path=world.path,
            budget=world.budget,
            max_num_seqs=world.max_num_seqs,
            alignment=world.alignment,
            vocab=VOCAB,
            num_speculative_tokens=world.drafts,
            num_prefill_checkpoint_blocks=world.exports,
            max_exports_per_step=world.exports_per_step,
            export_every=world.every,
            num_decode_states=world.decode_states,
        )
        if world.drafts:
            # right about half the time
            bench.propose = lambda name, tokens: [sum(tokens) % VOCAB] * world.drafts
        return bench

    @property
    def unfinished(self) -> list[str]:
        requests = self.bench.requests.values()
        return [r.request_id for r in requests if r.status is not RequestStatus.FINISHED]

    def can(self, action: str) -> bool:
        in_flight = len(self.bench.in_flight)
        match action:
            case "submit":
                return len(self.unfinished) < 6
            case "schedule":
                return in_flight < 2
            case "commit" | "fail":
                return in_flight > 0
            case "abort" | "finish" | "preempt":
                return bool(self.unfinished)
        return True

    def act(self, action: str, rng: Random) -> None:
        match action:
            case "submit":
                self.submit(rng)
            case "schedule" | "commit" | "fail":
                for output in getattr(self.bench, action)() if action != "schedule" else ():
                    if output.finish_reason in ("stop", "length"):
                        self.remember(output.request_id)
                if action == "schedule":
                    self.bench.schedule()
            case "abort" | "finish" | "preempt":
                name = rng.choice(self.unfinished)
                getattr(self.bench.scheduler, action)(name)
                if action == "abort":
                    self.remember(name)
            case _:
                getattr(self.bench.scheduler.cache, action)()
        self.bench.check()

    def submit(self, rng: Random) -> None:
        world = self.world
        capacity = world.num_blocks * world.block_size
        base = rng.choice(self.streams) if self.streams and rng.random() < 0.7 else []
        keep = rng.choice([len(base), rng.randint(0, len(base))])
        extra = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 24))]
        prompt = (base[:keep] + extra or [0])[: capacity - 1]
        named = [rng.randint(1, len(prompt)) for _ in range(rng.randint(0, 2))]
        request = Request(
            f"r{self.num_submitted}",
            prompt,
            SamplingParams(max_tokens=rng.randint(1, min(12, capacity + 1 - len(prompt)))),
            eos_token_ids=rng.choice([(), (), (1,)]),
            priority=rng.randint(0, 1),
            checkpoint_positions=named,
            cache_salt=rng.choice(["", "", "", "salt"]),
        )
        self.num_submitted += 1
        self.prompts[request.request_id] = prompt
        self.streams = [*self.streams[-4:], prompt]
        self.bench.submit(request)

    def remember(self, request_id: str) -> None:
        """The conversation may go on from here."""
        tokens = self.bench.ghost.truths[request_id].tokens.tolist()
        self.streams = [*self.streams[-4:], tokens]

    def drain(self) -> None:
        """To the end of all requests, and then everything is free again (I06, I07)."""
        bench = self.bench
        while bench.in_flight:
            bench.commit()
        bench.run(2)
        self.check_outputs()
        cache = bench.scheduler.cache
        assert cache.num_available_blocks == cache.block_pool.num_blocks
        assert cache.num_available_slots == cache.state_pool.num_slots
        cache.clear()
        cache.check_integrity()
        assert cache.block_pool.num_free == cache.block_pool.num_blocks
        assert cache.state_pool.num_free == cache.state_pool.num_slots

    def check_outputs(self) -> None:
        """What came out is what comes out without a cache (I24)."""
        for name, prompt in self.prompts.items():
            if self.bench.requests[name].cache_salt:
                continue
            got = self.bench.outputs[name]
            assert got == generate(prompt, len(got), VOCAB), f"{name}: {got}"


def random_walk(seed: int, num_actions: int) -> Walk:
    rng = Random(seed)
    walk = Walk(make_world(rng))
    names, weights = list(ACTIONS), list(ACTIONS.values())
    for _ in range(num_actions):
        action = rng.choices(names, weights)[0]
        if walk.can(action):
            walk.act(action, rng)
    walk.drain()
    return walk
