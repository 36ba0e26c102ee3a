"""Fast copies of a scheduler with all that hangs on it: a search makes one for every transition.

The copier of a class is generated from its fields, so that a new field is copied too. Values that
never change are shared between the copies.
"""

from array import array
from collections import deque
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar

from torch_kda.cache.eviction import EvictionOrder, EvictionQueue
from torch_kda.cache.hashing import Extras
from torch_kda.cache.node import Node
from torch_kda.cache.policy import Kind
from torch_kda.cache.prefix_cache import CacheCounters, PrefixCache
from torch_kda.cache.state_pool import SlotStatus
from torch_kda.scheduler.batch import ScheduledBatch
from torch_kda.scheduler.holdings import Announced, Holdings
from torch_kda.scheduler.limits import Limits
from torch_kda.scheduler.live import Flight, KeptState, LiveRequest, SchedulerCounters
from torch_kda.scheduler.queues import Queues
from torch_kda.scheduler.request import Request, RequestStatus, SamplingParams
from torch_kda.scheduler.run import Run
from torch_kda.scheduler.scheduler import Scheduler
from torch_kda.tests.scheduler.ghost import PoisonedBlocks, PoisonedStates, Truth

Memo = dict[int, Any]
Copier = Callable[[Any, Memo], Any]
T = TypeVar("T")

# never changed after they are made
SHARED: set[type] = {
    *(int, float, bool, bytes, str, frozenset, type(None)),
    *(Kind, SlotStatus, RequestStatus),
    *(Announced, Extras, KeptState, Limits, SamplingParams, ScheduledBatch),
}
MUTABLE: set[type] = {
    *(CacheCounters, EvictionOrder, EvictionQueue, Flight, Holdings, LiveRequest, Node),
    *(PoisonedBlocks, PoisonedStates, PrefixCache, Queues, Request, Run, Scheduler),
    *(SchedulerCounters, Truth),
}
# fields with lists of values that never change: copied without a look at each of them
FLAT = {
    "_free",
    "_heap",
    "draft_kv",
    "hashes",
    "keys",
    "kv",
    "pins",
    "position",
    "states",
    "status",
}
# fields that only grow, and hold for every copy; or never change, though their type may
COMMON = {"prefix_of_key", "prompt_token_ids"}


def clone(value: T) -> T:
    """A copy that shares nothing with the original that either may change."""
    return COPIERS[type(value)](value, {})


def field_names(value: Any) -> list[str]:
    """The names of all fields of an object."""
    names = [name for base in type(value).__mro__ for name in getattr(base, "__slots__", ())]
    return names + list(getattr(value, "__dict__", ()))


def _copy_list(value: list, memo: Memo) -> list:
    return [x if (t := type(x)) in SHARED else COPIERS[t](x, memo) for x in value]


def _copy_deque(value: deque, memo: Memo) -> deque:
    return deque([COPIERS[type(x)](x, memo) for x in value])


def _copy_tuple(value: tuple, memo: Memo) -> tuple:
    for item in value:
        if type(item) not in SHARED:
            return tuple([x if (t := type(x)) in SHARED else COPIERS[t](x, memo) for x in value])
    return value


def _copy_dict(value: dict, memo: Memo) -> dict:
    if not value:
        return {}
    return {k: v if (t := type(v)) in SHARED else COPIERS[t](v, memo) for k, v in value.items()}


def _copy_array(value: array, memo: Memo) -> array:
    # an array with two owners keeps two owners
    done = memo.get(id(value))
    if done is None:
        done = memo[id(value)] = value[:]
    return done


def _copy_bytearray(value: bytearray, memo: Memo) -> bytearray:
    return value[:]


def _copy_set(value: set, memo: Memo) -> set:
    return set(value)  # what is in a set is hashed, so it does not change


def _copy_method(value: MethodType, memo: Memo) -> MethodType:
    owner = value.__self__
    return MethodType(value.__func__, COPIERS[type(owner)](owner, memo))


class _Copiers(dict[type, Copier]):
    """Those of classes are made when the first object of the class is met."""

    def __missing__(self, cls: type) -> Copier:
        if cls not in MUTABLE:
            raise TypeError(f"clone: is {cls} SHARED or MUTABLE? Name it there")
        return lambda value, memo: self.setdefault(cls, _generate(value))(value, memo)


COPIERS = _Copiers(
    {
        list: _copy_list,
        deque: _copy_deque,
        tuple: _copy_tuple,
        dict: _copy_dict,
        array: _copy_array,
        bytearray: _copy_bytearray,
        set: _copy_set,
        MethodType: _copy_method,
    }
)


def _generate(example: Any) -> Copier:
    """A function that copies objects of this class field by field, written out for speed."""
    lines = ["def copier(old, memo):", " done = memo.get(id(old))", " if done is not None:"]
    lines += ["  return done", " new = memo[id(old)] = make(cls)"]
    if hasattr(example, "__dict__"):
        # only a class with slots can't get a field later on
        lines.append(f" assert len(old.__dict__) == {len(example.__dict__)}, old.__dict__")
    for name in field_names(example):
        if name in FLAT and type(getattr(example, name)) is list:
            lines.append(f" new.{name} = old.{name}[:]")
        elif name in COMMON:
            lines.append(f" new.{name} = old.{name}")
        else:
            lines += [f" v = old.{name}", " t = type(v)"]
            lines.append(f" new.{name} = v if t in shared else copiers[t](v, memo)")
    lines.append(" return new")
    space = {"make": object.__new__, "cls": type(example), "shared": SHARED, "copiers": COPIERS}
    exec("\n".join(lines), space)
    return space["copier"]
