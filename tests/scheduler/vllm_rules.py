"""How vLLM 0.33 splits a prefill of a hybrid model, restated for comparison.

B is the tokens of a recurrent block, H the tokens of a hash (H < B: partial hits), s the start of a
chunk, n the prompt. `draft`: one unit is dropped from every hit because of draft layers.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rules:
    block: int  # B
    unit: int  # H; equal to block without partial hits
    budget: int
    draft: bool = False
    internal: bool = True  # the kernel exports one interior state
    alignment: int = 16
    threshold: int = 1 << 62  # most tokens of a long prefill in one step

    @property
    def has_partial_hits(self) -> bool:
        return self.unit < self.block

    @property
    def grid(self) -> int:
        """Where hits land."""
        return self.unit if self.has_partial_hits else self.block


def position(num_tokens: int, grid: int, draft: bool) -> int:
    """Deepest boundary that a resend of the prompt can resume at."""
    return max((num_tokens - (not draft)) // grid * grid - (grid if draft else 0), 0)


def is_valid(rules: Rules, start: int, end: int, checkpoint: int) -> bool:
    """Whether the kernel may export the state at `checkpoint` in a chunk [start, end)."""
    initial_column = (start - 1) // rules.block if start else -1
    checkpoint_column = -(-end // rules.block) - 2
    return (
        start % rules.unit == 0
        and start + rules.unit <= checkpoint
        and start < checkpoint < end
        and (checkpoint - start) % rules.alignment == 0
        and checkpoint_column > initial_column
    )


def chunk_end(rules: Rules, start: int, num_tokens: int, junction: int = 0) -> int:
    """End of the chunk that begins at `start`."""
    block = rules.block
    end = start + min(num_tokens - start, rules.budget, rules.threshold)
    last = position(num_tokens, block, rules.draft)
    checkpoint = position(num_tokens, rules.grid, rules.draft)
    internal = rules.internal and end >= num_tokens and is_valid(rules, start, end, checkpoint)
    if internal:
        last = 0
    if end < num_tokens:
        floored = end // block * block
        if floored > start or block <= min(rules.budget, rules.threshold):
            end = floored
    stops = []
    if start % block and not internal:
        stops.append(-(-start // block) * block)
    stops.append(last)
    tail = position(num_tokens, rules.unit, rules.draft)
    if rules.has_partial_hits and not internal and last < tail < num_tokens:
        stops.append(tail)
    stops.append(junction)
    return max(min((stop for stop in stops if start < stop < end), default=end), start)


def split(rules: Rules, num_tokens: int, start: int = 0) -> list[int]:
    """Lengths of the chunks of a request that is alone."""
    lengths = []
    while start < num_tokens:
        end = chunk_end(rules, start, num_tokens)
        assert end > start, f"{rules} makes no progress at {start} of {num_tokens}"
        lengths.append(end - start)
        start = end
    return lengths


def growing_prefix(rules: Rules, start: int, step: int, rounds: int) -> list[int]:
    """Forwards of each round of a stream that grows by `step` tokens; its first prompt is warm."""
    forwards = []
    for index in range(1, rounds + 1):
        previous, num_tokens = start + step * (index - 1), start + step * index
        hit = position(previous, rules.grid, rules.draft)
        forwards.append(len(split(rules, num_tokens, hit)))
    return forwards
