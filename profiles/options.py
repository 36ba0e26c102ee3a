"""What the programs of this folder accept: counts with bounds, names, files of results."""

import argparse
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

# far above what any preset has or takes
MAX_TOKENS, MAX_ROUNDS, MAX_MINUTES = 10_000_000, 1_000_000, 1440
MAX_SEED = 2**63 - 1  # torch takes no larger one


class Parser(argparse.ArgumentParser):
    """One whose errors take a line: --help has the rest. An empty path is refused."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register("type", Path, _path)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def refuse(self, options: argparse.Namespace, fields: Iterable[str], why: str) -> None:
        """Ends the program if any of these options was given, which would not be heeded."""
        given = [
            f"--{field.replace('_', '-')}"
            for field in fields
            if getattr(options, field) != self.get_default(field)
        ]
        if given:
            self.error(f"{', '.join(given)} can't go with {why}")

    def refuse_beside_render(self, options: argparse.Namespace) -> None:
        """--render measures nothing, and heeds nothing but --out."""
        if options.render is not None:
            others = vars(options).keys() - {"render", "out"}
            self.refuse(options, sorted(others), "--render, which only takes --out")


def _path(text: str) -> Path:
    if not text:  # Path("") is the current folder
        raise argparse.ArgumentTypeError("expected a path, got ''")
    return Path(text)


def check_count(name: str, value: int, least: int, most: int) -> None:
    """Raises ValueError, with the name, for what is out of range."""
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least:,} to {most:,}, got {value}")


def integer(least: int, most: int) -> Callable[[str], int]:
    """Type of an option: an integer in a range."""

    def parse(text: str) -> int:
        try:
            value = int(text)
            check_count("it", value, least, most)
        except ValueError:
            expected = f"an integer from {least:,} to {most:,}"
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}") from None
        return value

    return parse


def integers(least: int, most: int) -> Callable[[str], tuple[int, ...]]:
    """Type of an option: at least one integer in a range, comma between."""
    one = integer(least, most)
    return lambda text: tuple(one(part.strip()) for part in text.split(","))


def positive(most: float) -> Callable[[str], float]:
    """Type of an option: a number above 0."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value <= most:  # so is NaN refused
            raise argparse.ArgumentTypeError(
                f"expected a number above 0, {most:,} at most, got {text!r}"
            )
        return value

    return parse


def names(allowed: Collection[str], *, least: int = 1) -> Callable[[str], list[str]]:
    """Type of an option: some of these names, comma between."""

    def parse(text: str) -> list[str]:
        given = some(text) if least else split(text)
        if unknown := sorted(set(given) - set(allowed)):
            raise argparse.ArgumentTypeError(f"{unknown} are none of {', '.join(allowed)}")
        return given

    return parse


def some(text: str) -> list[str]:
    """Type of an option: at least one part, comma between."""
    if not (parts := split(text)):
        raise argparse.ArgumentTypeError(f"expected at least one, got {text!r}")
    return parts


def split(text: str) -> list[str]:
    """The parts between commas, but for empty ones."""
    return [part.strip() for part in text.split(",") if part.strip()]


class _AboveZero(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, float | int) and value > 0


class Positive(metaclass=_AboveZero):
    """In a shape: a number above 0."""


class MaybeKey(str):
    """A key that a result may be without."""

    __slots__ = ()


def read_results(path: Path, shape: Any, *, option: str, what: str) -> dict[str, Any]:
    """The JSON of a bench.

    Args:
        shape: what it must be like. A dict: at least these keys, but for each `MaybeKey`, and
            their values like these; of the key str: whatever keys, each value like it. A list of
            one: a list, each like it; a tuple of one: a list that isn't empty. Else a type, or a
            union of types. No number anywhere is NaN or infinite.
        what: names it in errors.

    Raises:
        ValueError: it can't be read, is no JSON, or is of something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{option}: {path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{option}: {path} is not JSON: {error}") from None
    if (misfit := _misfit(found, shape) or _not_finite(found)) is not None:
        raise ValueError(f"{option}: {path} is not {what}: {misfit}")
    return found


def check_distinct(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], option: str) -> None:
    """Raises ValueError for rows of the same case, which these keys say."""
    cases = [tuple(json.dumps(row[key]) for key in keys) for row in rows]
    for i, case in enumerate(cases):
        if case in cases[:i]:
            what = ", ".join(f"{key} {value}" for key, value in zip(keys, case, strict=True))
            raise ValueError(f"{option}: there are two rows of {what}")


def _misfit(value: Any, shape: Any, at: str = "") -> str | None:
    """The first place where a value is unlike its shape."""
    parts: list[tuple[Any, Any, str]] = []
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{at or 'the whole'} is no object"
        for key, part in (dict.fromkeys(value, shape[str]) if str in shape else shape).items():
            place = f"{at}.{key}" if at else key
            if key in value:
                parts.append((value[key], part, place))
            elif not isinstance(key, MaybeKey):
                return f"it has no {place}"
    elif isinstance(shape, list | tuple):
        if not isinstance(value, list) or (isinstance(shape, tuple) and not value):
            return f"{at or 'the whole'} is no list of anything"
        parts = [(item, shape[0], f"{at}[{i}]") for i, item in enumerate(value)]
    elif not isinstance(value, shape):
        return f"{at} is {json.dumps(value)[:40]}"
    return next((found for part in parts if (found := _misfit(*part)) is not None), None)


def _not_finite(value: Any, at: str = "") -> str | None:
    """The first place of a number that is NaN or infinite."""
    if isinstance(value, float) and not math.isfinite(value):
        return f"{at} is {json.dumps(value)}"
    parts: list[tuple[Any, str]] = []
    if isinstance(value, dict):
        parts = [(part, f"{at}.{key}" if at else key) for key, part in value.items()]
    elif isinstance(value, list):
        parts = [(part, f"{at}[{i}]") for i, part in enumerate(value)]
    return next((found for part in parts if (found := _not_finite(*part)) is not None), None)
