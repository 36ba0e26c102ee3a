"""The sizes of steps: D decode rows and T prefill tokens, and the few pairs that get a graph."""

from bisect import bisect_left
from dataclasses import dataclass
from typing import NamedTuple

from .step import TOKEN_ALIGNMENT

MIN_ROWS = 2  # the compiler takes sizes 0 and 1 for constants; from 2 on one graph serves all
# above this a mixed step keeps the device busy for longer than its launches take (48B MoE, H200)
MAX_MIXED_TOKENS = 512


class Shape(NamedTuple):
    """What a step is padded to."""

    D: int  # decode rows
    T: int  # prefill tokens


@dataclass(frozen=True, slots=True)
class Buckets:
    """The captured shapes: each of `rows` alone, each of `tokens` alone, and a coarse grid of both.

    A step goes to the smallest one that holds it. A step without one of the segments never goes to
    a shape that has it.
    """

    rows: tuple[int, ...] = ()  # ascending
    tokens: tuple[int, ...] = ()  # ascending multiples of TOKEN_ALIGNMENT

    @classmethod
    def up_to(cls, max_rows: int, max_tokens: int) -> "Buckets":
        """Steps of at most an eighth: padding costs little, and there are few sizes."""
        return cls(sizes_up_to(max_rows, MIN_ROWS, 1), sizes_up_to(max_tokens, TOKEN_ALIGNMENT))

    @property
    def mixed_rows(self) -> tuple[int, ...]:
        return _halves(self.rows)

    @property
    def mixed_tokens(self) -> tuple[int, ...]:
        return _halves(tuple(size for size in self.tokens if size <= MAX_MIXED_TOKENS))

    @property
    def shapes(self) -> list[Shape]:
        """All of them, from the largest down: what the first captures use, the others use again."""
        alone = [Shape(D, 0) for D in self.rows] + [Shape(0, T) for T in self.tokens]
        mixed = [Shape(D, T) for D in self.mixed_rows for T in self.mixed_tokens]
        return sorted(alone + mixed, key=lambda shape: (-sum(shape), shape))

    def find(self, num_rows: int, num_tokens: int) -> Shape | None:
        """The smallest shape for a step; None: no shape holds it."""
        is_mixed = num_rows > 0 and num_tokens > 0
        D = _at_least(self.mixed_rows if is_mixed else self.rows, num_rows)
        T = _at_least(self.mixed_tokens if is_mixed else self.tokens, num_tokens)
        return None if D is None or T is None else Shape(D, T)


def exact_shape(num_rows: int, num_tokens: int) -> Shape:
    """A step's own size, as far as kernels and compiler allow."""
    D = max(num_rows, MIN_ROWS) if num_rows else 0
    return Shape(D, -(-num_tokens // TOKEN_ALIGNMENT) * TOKEN_ALIGNMENT)


def sizes_up_to(limit: int, least: int, grid: int | None = None) -> tuple[int, ...]:
    """Sizes from `least` to `limit`, on a grid (default: `least`), each at most an eighth apart."""
    grid = grid or least
    sizes, size = [], least
    while size < limit:
        sizes.append(size)
        # eighths of the power of two below
        size += max(grid, (1 << (size.bit_length() - 1)) // 8 // grid * grid)
    return (*sizes, max(-(-limit // grid) * grid, least))


def _halves(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The largest, and on the way down each that is at most half of the one before."""
    kept: list[int] = []
    for size in reversed(sizes):
        if not kept or 2 * size <= kept[-1]:
            kept.append(size)
    return tuple(reversed(kept))


def _at_least(sizes: tuple[int, ...], size: int) -> int | None:
    if size == 0:
        return 0
    at = bisect_left(sizes, size)
    return sizes[at] if at < len(sizes) else None
