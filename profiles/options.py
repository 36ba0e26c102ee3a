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
MAX_NUMBER = 1e15  # of a result, in any unit; floats of its size still tell integers apart


class Parser(argparse.ArgumentParser):
    """One whose errors take a line: --help has the rest. An empty path or name is refused."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.register("type", Path, _path)
        self.register("type", None, _name)

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


def _name(text: str) -> str:
    if not text.strip():  # it would pass for an option that wasn't given
        raise argparse.ArgumentTypeError(f"expected a name, got {text!r}")
    return text


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


class _Fitting(type):
    """Of a class in a shape: its instances are the values that fit."""

    fits: Callable[[Any], bool]

    def __instancecheck__(cls, value: object) -> bool:
        return cls.fits(value)


def _fitting(fits: Callable[[Any], bool]) -> type:
    return _Fitting("Fitting", (), {"fits": staticmethod(fits)})


def _within(least: float, most: float, *kinds: type) -> type:
    # by type itself: True is an int to isinstance
    return _fitting(lambda value: type(value) in kinds and least <= value <= most)


def count(least: int, most: int = MAX_TOKENS) -> type:
    """In a shape: an integer in a range."""
    return _within(least, most, int)


def one_of(allowed: Collection[str]) -> type:
    """In a shape: one of these names."""
    return _fitting(lambda value: isinstance(value, str) and value in allowed)


Number = _within(-MAX_NUMBER, MAX_NUMBER, float, int)
NotNegative = _within(0, MAX_NUMBER, float, int)
Positive = _within(1 / MAX_NUMBER, MAX_NUMBER, float, int)  # what may stand below a fraction line
Share = _within(0, 1, float, int)


class MaybeKey(str):
    """A key that a result may be without."""

    __slots__ = ()


def read_results(
    path: Path,
    shape: Any,
    *,
    option: str,
    what: str,
    check: Callable[[dict[str, Any]], str | None] = lambda found: None,
) -> dict[str, Any]:
    """The JSON of a bench.

    Args:
        shape: what it must be like. A dict: at least these keys, but for each `MaybeKey`, and
            their values like these; of the key str: whatever other keys, each value like it. A
            list of one: a list, each like it; a tuple of one: a list that isn't empty. Else a
            type, or a union of types, of which none but bool takes a bool. No number anywhere is
            NaN or beyond `MAX_NUMBER`, and every text can be written.
        what: names it in errors.
        check: the first place, if there is one, where values of that shape don't fit each other.

    Raises:
        ValueError: it can't be read, is no JSON, or is of something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        misfit = _misfit(found, shape) or _unfit(found) or check(found)
    except OSError as error:
        raise ValueError(f"{option}: {path} can't be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{option}: {path} is not JSON: {error}") from None
    except RecursionError:
        raise ValueError(f"{option}: {path} is not {what}: it is nested too deep") from None
    if misfit is not None:
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
        wanted = {key: part for key, part in shape.items() if key is not str}
        if str in shape:
            wanted = dict.fromkeys(value, shape[str]) | wanted
        for key, part in wanted.items():
            if key in value:
                parts.append((value[key], part, _place(at, key)))
            elif not isinstance(key, MaybeKey):
                return f"it has no {_place(at, key)}"
    elif isinstance(shape, list | tuple):
        if not isinstance(value, list) or (isinstance(shape, tuple) and not value):
            return f"{at or 'the whole'} is no list of anything"
        parts = [(item, shape[0], f"{at}[{i}]") for i, item in enumerate(value)]
    elif not isinstance(value, shape) or (isinstance(value, bool) and shape is not bool):
        return f"{at} is {json.dumps(value)[:40]}"
    return next((found for part in parts if (found := _misfit(*part)) is not None), None)


def _unfit(value: Any, at: str = "") -> str | None:
    """The first place of a number or a text that no page can show."""
    is_unfit = isinstance(value, float | int) and not abs(value) <= MAX_NUMBER  # so is NaN
    if is_unfit or (isinstance(value, str) and _is_broken(value)):
        return f"{at} is {json.dumps(value)[:40]}"
    parts: list[tuple[Any, str]] = []
    if isinstance(value, dict):
        if broken := [key for key in value if _is_broken(key)]:
            return f"{_place(at, broken[0])} is no name"
        parts = [(part, _place(at, key)) for key, part in value.items()]
    elif isinstance(value, list):
        parts = [(part, f"{at}[{i}]") for i, part in enumerate(value)]
    return next((found for part in parts if (found := _unfit(*part)) is not None), None)


def _is_broken(text: str) -> bool:
    """Whether it holds half a character, as JSON can."""
    return any("\ud800" <= letter <= "\udfff" for letter in text)


def _place(at: str, key: str) -> str:
    """Of a key, whatever it holds, in a line."""
    name = json.dumps(key)[1:-1][:40]
    return f"{at}.{name}" if at else name
