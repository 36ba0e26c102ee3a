"""The canonical form leaves out nothing that makes a difference, and the copies are copies."""

import copy
from random import Random

import pytest
from torch_kda.cache.block_pool import BlockPool
from torch_kda.cache.node import Node
from torch_kda.cache.prefix_cache import PrefixCache
from torch_kda.cache.state_pool import StatePool
from torch_kda.scheduler.batch import ScheduledRow
from torch_kda.scheduler.holdings import Announced
from torch_kda.scheduler.live import Flight, KeptState, LiveRequest
from torch_kda.scheduler.request import Request
from torch_kda.scheduler.run import Run
from torch_kda.tests.modelcheck.canonical import canonical, digest
from torch_kda.tests.modelcheck.clone import MUTABLE, clone, field_names
from torch_kda.tests.modelcheck.scope import Act, Action, Scope
from torch_kda.tests.modelcheck.scopes import SCOPES
from torch_kda.tests.modelcheck.world import World, make_world

TEMPLATE = "of the template, which is in the form"
FOLLOWS = "follows from the rest"
NAMES = "only decides how things are called"
COUNTS = "only counts"
FIXED = "of the scope"

# what is not in the form, and why that makes no difference
LEFT_OUT = {
    LiveRequest: {
        "order": "the order of requests in the form",
        **dict.fromkeys(("limit", "extras", "stop_ids"), TEMPLATE),
        "keys": FOLLOWS,
    },
    Request: {
        **dict.fromkeys(("prompt_token_ids", "sampling", "eos_token_ids", "priority"), TEMPLATE),
        **dict.fromkeys(("checkpoint_positions", "cache_salt", "lora", "spans"), TEMPLATE),
        **dict.fromkeys(("num_prompt_tokens",), TEMPLATE),
        **dict.fromkeys(("num_cached_tokens", "num_preemptions"), COUNTS),
    },
    Run: {
        **dict.fromkeys(("requests", "scheduled", "computed", "newest_step"), FOLLOWS),
        **dict.fromkeys(("last_step", "stop_ids"), FOLLOWS),
        "lookahead": FIXED,
    },
    Flight: {},
    ScheduledRow: {"sampling": TEMPLATE},
    KeptState: {},
    Announced: {"depth": "of the key"},
    Node: {
        **dict.fromkeys(("parent", "depth", "children", "is_spent"), FOLLOWS),
        "serial": "breaks ties between times, and has its part in their ranks",
    },
    StatePool: {"_free": NAMES, "num_slots": FIXED, "num_evictable": FOLLOWS},
    BlockPool: {"_free": NAMES, "_is_free": FOLLOWS, "num_blocks": FIXED},
    PrefixCache: {
        **dict.fromkeys(("block_size", "blocks_per_unit", "lookahead", "unit"), FIXED),
        **dict.fromkeys(("max_states_per_path", "root", "root_key"), FIXED),
        **dict.fromkeys(("_node_of_slot", "_num_referenced", "_order"), FOLLOWS),
        **dict.fromkeys(("_serial", "_tick"), "later than all that are in the form"),
        "counters": COUNTS,
    },
}
IN_FORM = {
    LiveRequest: {
        *("request", "token_ids", "deferred_to", "drafts", "node", "table", "slots"),
        *("grid_state", "kept", "decode_states", "plan", "prefill_end", "kv_cached"),
        *("scheduled_end", "num_computed", "num_proven", "num_in_flight", "last_step", "last_row"),
        "is_discarded",
    },
    Request: {"request_id", "token_ids", "status"},
    Run: {"moved"},
    Flight: {"batch", "requests", "exports", "pinned_slots", "freed_blocks", "has_failed"},
    ScheduledRow: {
        *("request_id", "is_decode", "start", "end", "token_ids", "prev_row", "src_slot"),
        *("dst_slots", "exports", "block_table", "kv_start", "samples", "sample_index"),
        "next_token_ids",
    },
    KeptState: {"position", "slot", "kind", "step"},
    Announced: {"writer", "step"},
    Node: {
        *("key", "blocks", "references", "last_used", "slot", "kind", "last_hit", "was_hit"),
    },
    StatePool: {"status", "position", "step", "pins"},
    BlockPool: set(),
    PrefixCache: {"_nodes", "block_pool", "state_pool"},
}


@pytest.mark.parametrize("cls", LEFT_OUT, ids=lambda cls: cls.__name__)
def test_no_field_is_forgotten(cls: type) -> None:
    """A new field has to be put into the form, or to be left out for a reason."""
    fields = getattr(cls, "_fields", None) or getattr(cls, "__dataclass_fields__", None)
    names = set(fields or getattr(cls, "__slots__", ()))
    assert names == IN_FORM[cls] | LEFT_OUT[cls].keys()
    assert IN_FORM[cls].isdisjoint(LEFT_OUT[cls])


def walk(scope: Scope, seed: int, num_actions: int) -> tuple[World, list[Action]]:
    rng, world, done = Random(seed), make_world(scope), list[Action]()
    for _ in range(num_actions):
        possible = world.actions()
        if not possible:
            break
        done.append(rng.choice(possible))
        world.act(done[-1])
    return world, done


@pytest.mark.parametrize("scope", SCOPES, ids=[scope.name for scope in SCOPES])
def test_copies_go_their_own_way(scope: Scope) -> None:
    """A copy behaves as its original and as a deep copy do, and neither moves the other."""
    for seed in range(3):
        world, _ = walk(scope, seed, 4 + 4 * seed)
        before = digest(world)
        for action in world.actions():
            ours, theirs = clone(world), copy.deepcopy(world)
            assert digest(ours) == digest(theirs) == before
            ours.act(action)
            assert digest(world) == before
            theirs.act(action)
            assert canonical(ours) == canonical(theirs)
        for action in world.actions()[:1]:
            kept = clone(world)
            world.act(action)
            assert digest(kept) == before


def test_clone_knows_what_it_copies() -> None:
    class Unknown:
        pass

    with pytest.raises(TypeError, match="SHARED or MUTABLE"):
        clone([Unknown()])
    assert World in MUTABLE and "scheduler" in field_names(make_world(SCOPES[0]))


@pytest.mark.parametrize("scope", SCOPES, ids=[scope.name for scope in SCOPES])
def test_names_make_no_difference(scope: Scope) -> None:
    """With other slots and blocks handed out, the forms stay the same all along the way."""
    for seed in range(3):
        plain, other = make_world(scope), make_world(scope)
        rng = Random(seed)
        rng.shuffle(other.cache.state_pool._free)
        rng.shuffle(other.cache.block_pool._free)
        for _ in range(25):
            assert canonical(plain) == canonical(other)
            possible = plain.actions()
            assert possible == other.actions()
            if not possible:
                break
            action = rng.choice(possible)
            plain.act(action)
            other.act(action)


@pytest.mark.parametrize("scope", SCOPES[::3], ids=[scope.name for scope in SCOPES[::3]])
def test_one_form_means_one_future(scope: Scope) -> None:
    """Two ways to one form: every action on either world leads to one form again."""
    first: dict[int, World] = {}
    compared = 0
    for seed in range(80):
        rng, world = Random(seed), make_world(scope)
        for _ in range(18):
            possible = world.actions()
            if not possible:
                break
            world.act(rng.choice(possible))
            known = first.setdefault(digest(world), world.copy())
            if known.scheduler.counters != world.scheduler.counters:
                assert known.actions() == world.actions()
                for action in world.actions():
                    a, b = known.copy(), world.copy()
                    a.act(action)
                    b.act(action)
                    assert digest(a) == digest(b), f"{action}"
                    compared += 1
    assert compared > 10


def test_contents_are_part_of_the_form() -> None:
    """A wrong state or KV is never taken for a right one that was seen before."""
    world = make_world(SCOPES[0])
    for act in (Act.SUBMIT, Act.SCHEDULE, Act.COMMIT):
        world.act((act, 0))
    wrong = world.copy()
    slot = next(s for s, status in enumerate(world.cache.state_pool.status) if status)
    wrong.ghost.states[slot] = (99, 99)
    assert digest(wrong) != digest(world)
    wrong = world.copy()
    block = next(b for b in range(12) if not world.cache.block_pool.is_free(b))
    wrong.ghost.kv[block] = 99
    assert digest(wrong) != digest(world)
