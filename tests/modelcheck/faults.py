"""How a fault is seeded into the scheduler or the cache: a piece of one function's text is replaced
by another, and every caller runs the new code.
"""

import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any


@dataclass(frozen=True, slots=True)
class Fault:
    """What is broken, where, and which scope of the checker meets it first."""

    name: str
    where: str  # module below torch_kda, and the function in it
    old: str  # occurs once in the function's text
    new: str
    scope: str = "unit 2, block 1"

    @property
    def function(self) -> FunctionType:
        module, _, path = self.where.partition(":")
        found: Any = import_module(f"torch_kda.{module}")
        for name in path.split("."):
            found = inspect.getattr_static(found, name)
        return getattr(found, "fget", found)


@contextmanager
def applied(fault: Fault) -> Iterator[None]:
    """The product has this fault inside the block.

    Raises:
        LookupError: the text to replace is not there, or not once: the fault has to be written
            anew.
    """
    function = fault.function
    intact = function.__code__
    function.__code__ = _broken(fault, function)
    try:
        yield
    finally:
        function.__code__ = intact


def _broken(fault: Fault, function: FunctionType) -> CodeType:
    source = textwrap.dedent(inspect.getsource(function))
    count = source.count(fault.old)
    if count != 1:
        raise LookupError(f"{fault.name}: {fault.old!r} occurs {count} times in {fault.where}")
    space: dict[str, Any] = {}
    # decorators are of no use to the bare code, and annotations may name what only checkers load
    source = "from __future__ import annotations\n" + source.replace(fault.old, fault.new)
    exec(
        compile(source.replace("@property\n", ""), fault.where, "exec"), function.__globals__, space
    )
    return space[function.__name__].__code__
