"""The scopes of the full search. Each is small enough to be gone through to its end, and together
they hold every limit and every kind of request.

A scope bounds how many disturbances (failure, abort, finish, preemption, evictions) one run has;
submissions, steps and commits come in any order, as does everything that is disturbed.
"""

from dataclasses import replace

from torch_kda.tests.modelcheck.scope import Act, Scope, Template


def zeros(
    num_tokens: int, max_tokens: int = 1, *, priority: int = 0, named: tuple[int, ...] = ()
) -> Template:
    """A prompt that is a prefix of all other ones like it, and whose output goes on like them."""
    return Template(prompt=(0,) * num_tokens, max_tokens=max_tokens, priority=priority, named=named)


def fork(
    num_shared: int, num_own: int, max_tokens: int = 1, *, priority: int = 0, salt: str = ""
) -> Template:
    """A prompt that shares its first tokens with those of `zeros`."""
    prompt = (0,) * num_shared + (1,) + (0,) * (num_own - 1)
    return Template(prompt=prompt, max_tokens=max_tokens, priority=priority, salt=salt)


ENDINGS = (Act.FAIL, Act.ABORT, Act.FINISH, Act.PREEMPT)
EVICTIONS = (Act.EVICT_STATE, Act.EVICT_KV)

SCOPES = (
    # grids: unit, block and alignment
    Scope(
        name="unit 1",
        unit=1,
        budget=4,
        requests=(zeros(4, 2), zeros(5), fork(3, 2)),
        max_disturbances=5,
    ),
    Scope(
        name="unit 2, block 1",
        unit=2,
        block_size=1,
        num_blocks=16,
        requests=(zeros(5, 2), zeros(8), fork(4, 2)),
        max_disturbances=5,
    ),
    Scope(
        name="unit 2, alignment 2",
        unit=2,
        alignment=2,
        budget=6,
        requests=(zeros(9, 2), zeros(6, 2), fork(3, 4)),
        max_disturbances=3,
    ),
    Scope(
        name="unit 4, block 2, alignment 2",
        unit=4,
        block_size=2,
        alignment=2,
        num_blocks=18,
        budget=6,
        requests=(zeros(9, 3), zeros(12), fork(8, 3)),
        max_disturbances=4,
    ),
    Scope(
        name="unit 4, block 1, alignment 4",
        unit=4,
        block_size=1,
        alignment=4,
        num_blocks=36,
        budget=8,
        requests=(zeros(12), zeros(8, 2), zeros(9)),
        max_disturbances=4,
    ),
    # room
    Scope(
        name="two slots",
        num_slots=2,
        requests=(zeros(5, 2), zeros(7), fork(4, 2)),
        max_disturbances=6,
    ),
    Scope(
        name="three slots",
        num_slots=3,
        budget=5,
        max_num_seqs=2,
        requests=(zeros(5, 2), zeros(7), zeros(5, 3)),
        max_disturbances=5,
    ),
    Scope(
        name="blocks for one",
        num_blocks=5,
        requests=(zeros(4, 5), zeros(6, 4), zeros(8, 2)),
        max_disturbances=3,
    ),
    Scope(
        name="blocks and slots for one",
        num_blocks=6,
        num_slots=3,
        budget=5,
        requests=(zeros(6, 5), fork(4, 3, 4), zeros(9, 3)),
        max_disturbances=3,
    ),
    Scope(
        name="never fits",
        num_blocks=3,
        requests=(zeros(4, 2), zeros(6, 2), zeros(5, 2)),
        max_disturbances=6,
    ),
    Scope(
        name="priorities",
        num_blocks=6,
        num_slots=4,
        budget=5,
        max_num_seqs=2,
        requests=(zeros(6, 3, priority=1), zeros(7, 3), zeros(8, 2, priority=1)),
        max_disturbances=3,
    ),
    Scope(
        name="failures below and above",
        requests=(zeros(9, 2, priority=1), fork(0, 6, 2)),
        disturbances=ENDINGS,
        max_disturbances=6,
    ),
    Scope(
        name="one at a time",
        max_num_seqs=1,
        budget=4,
        requests=(zeros(7, 2, priority=1), zeros(9), fork(6, 3)),
        max_disturbances=4,
    ),
    # caps
    Scope(
        name="two passes",
        exports=0,
        requests=(zeros(7, 2), zeros(8), fork(4, 3)),
        max_disturbances=4,
    ),
    Scope(
        name="one export a row",
        exports=1,
        every=2,
        requests=(zeros(8), fork(4, 4), zeros(9)),
        max_disturbances=4,
    ),
    Scope(
        name="two exports a step",
        exports_per_step=2,
        every=2,
        budget=8,
        requests=(zeros(8), fork(4, 4), fork(0, 5)),
        max_disturbances=5,
    ),
    Scope(
        name="exports given out anew",
        exports_per_step=2,
        every=2,
        budget=10,
        max_num_seqs=2,
        requests=(
            fork(0, 5, 2, priority=1),
            zeros(7, named=(2,)),
            fork(4, 3),
        ),
        max_disturbances=4,
    ),
    Scope(
        name="one state a path",
        path=1,
        every=2,
        requests=(zeros(7, 3), fork(4, 3), zeros(9)),
        max_disturbances=4,
    ),
    Scope(
        name="two states a path",
        path=2,
        every=2,
        num_slots=8,
        requests=(zeros(8, 3), fork(6, 2), zeros(9, 2, named=(2,))),
        max_disturbances=4,
    ),
    # kinds of states
    Scope(
        name="periodic",
        every=4,
        num_slots=5,
        budget=7,
        requests=(zeros(10), fork(8, 4), zeros(11)),
        max_disturbances=5,
    ),
    Scope(
        name="named and junctions",
        num_slots=5,
        requests=(zeros(9, named=(3, 6)), fork(6, 3), fork(2, 5)),
        max_disturbances=5,
    ),
    Scope(
        name="decode states",
        unit=1,
        num_slots=6,
        num_blocks=14,
        decode_states=1,
        requests=(zeros(2, 6), zeros(4, 3)),
        max_disturbances=3,
    ),
    Scope(
        name="no decode states",
        decode_states=0,
        requests=(zeros(3, 5), zeros(7, 2), fork(4, 2, 3)),
        max_disturbances=3,
    ),
    # who shares what
    Scope(
        name="equal prompts",
        num_slots=5,
        budget=5,
        requests=(zeros(6, 2), zeros(6, 2), zeros(6, 2)),
        max_disturbances=4,
    ),
    Scope(
        name="salt",
        requests=(zeros(6, 2), fork(5, 1, 2, salt="a"), fork(5, 1, 2)),
        max_disturbances=4,
    ),
    Scope(
        name="ends at any token",
        unit=1,
        ends_early=True,
        num_slots=7,
        budget=5,
        requests=(zeros(2, 4), zeros(3, 4)),
        max_disturbances=3,
    ),
    # step after step of the same rows
    Scope(
        name="runs",
        unit=4,
        block_size=2,
        num_slots=7,
        ends_early=True,
        requests=(zeros(3, 8), zeros(4, 7)),
        max_disturbances=1,
    ),
    Scope(
        name="runs while others wait",
        num_slots=5,
        num_blocks=10,
        max_num_seqs=2,
        requests=(zeros(2, 6, priority=1), zeros(3, 5, priority=1), zeros(5, 2)),
        max_disturbances=1,
    ),
    Scope(
        name="runs with a draft layer",
        lookahead=1,
        num_slots=7,
        requests=(zeros(2, 8), fork(1, 2, 7)),
        max_disturbances=1,
    ),
    # speculation
    Scope(
        name="draft layers",
        lookahead=1,
        requests=(zeros(7, 2), zeros(9), fork(4, 3)),
        max_disturbances=4,
    ),
    Scope(
        name="draft layers that look two ahead",
        lookahead=2,
        budget=5,
        requests=(zeros(8, 3), zeros(9), fork(6, 3)),
        max_disturbances=3,
    ),
    Scope(
        name="one draft",
        drafts=1,
        num_slots=7,
        max_num_seqs=2,
        budget=8,
        requests=(zeros(4, 5), zeros(5, 3)),
        max_disturbances=2,
    ),
    Scope(
        name="two drafts and a draft layer",
        drafts=2,
        lookahead=1,
        num_slots=8,
        max_num_seqs=2,
        budget=10,
        ends_early=True,
        requests=(zeros(5, 4), zeros(7, 3)),
        max_disturbances=2,
    ),
    # any number of disturbances
    Scope(
        name="evictions without end",
        disturbances=EVICTIONS,
        every=2,
        num_slots=5,
        requests=(zeros(6, 3), zeros(9, 2), fork(4, 4, 2)),
    ),
    Scope(
        name="preemptions without end",
        disturbances=(Act.PREEMPT,),
        num_slots=4,
        num_blocks=7,
        requests=(zeros(6, 4), zeros(7, 2), fork(4, 4, 2)),
    ),
    Scope(
        name="anything without end",
        num_slots=4,
        num_blocks=5,
        max_num_seqs=2,
        requests=(zeros(4, 3), zeros(5, 2)),
    ),
)


# scopes in which one disturbance makes more than 10,000 transitions
LARGE = {"blocks for one", "priorities", "no decode states", "ends at any token", "one draft"}
LARGE |= {"two drafts and a draft layer", "blocks and slots for one", "decode states"}
LARGE |= {"draft layers that look two ahead"}


def quick(scope: Scope) -> Scope:
    """The same with one disturbance at most, or none where that is a lot."""
    return replace(scope, max_disturbances=int(scope.name not in LARGE))
