"""The CUDA prefill at full size: accuracy for every gate, length and batch, and the promised bits.

What a small case shows on either device is in test_kda.py.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_kda.ops.kda import kda_prefill
from torch_kda.ops.reference import kda_recurrent_ref
from torch_kda.tests.checks import assert_same
from torch_kda.tests.ops.cases import Case, ints, run, to
from torch_kda.tests.ops.gpu_cases import (
    BOUNDS,
    DEVICE,
    GATES,
    K,
    error,
    every,
    long_case,
    make,
    prefill,
    select,
    truth_of,
)

pytestmark = pytest.mark.gpu

LENGTHS = {"1to17": [*range(1, 18)], "37": [37], "97": [97], "1000": [1000], "4096": [4096]}


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> Iterator[None]:
    from torch_kda.cute_kernels.kda_prefill import prepare

    prepare(DEVICE)
    yield
    long_case.cache_clear()


def assert_accurate(
    case: Case,
    result: tuple[Tensor, ...],
    truth: tuple[Tensor, ...],
    bounds: tuple[float, float],
) -> None:
    (out, pool), (allowed_out, allowed_state) = result, bounds
    N, end = case["final_slots"].shape[0], int(case["cu_seqlens"][-1])
    assert (got := error(out[:end], truth[0][:end])) <= allowed_out, f"output {got:.2e}"
    # slots read come first, the last one is not touched
    assert (got := error(pool[N:-1], truth[1][N:-1])) <= allowed_state, f"states {got:.2e}"
    assert_same("padding rows", out[end:], torch.zeros_like(out[end:]))
    assert_same("slots read", pool[:N], case["state_pool"][:N])


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("gates", GATES)
def test_accuracy(gates: str, lengths: list[int]) -> None:
    case = make(lengths, gates, exports=every(64, lengths))
    assert_accurate(case, prefill(case), truth_of(case), BOUNDS[gates])


@pytest.mark.parametrize("gates", GATES)
def test_accuracy_does_not_fall_with_length(gates: str) -> None:
    """65537 tokens: output and states are as near to the truth at the end as at the start."""
    case, truth = long_case(gates)
    out, pool = prefill(case)
    assert_accurate(case, (out, pool), truth, BOUNDS[gates])
    allowed_out, allowed_state = BOUNDS[gates]
    for start in (0, 1024, 16384, 65537 - 1024):
        rows = slice(start, start + 1024)
        assert (got := error(out[rows], truth[0][rows])) <= allowed_out, f"from {start}: {got:.2e}"
    for slot in (2, 17, 65):
        got = error(pool[slot], truth[1][slot])
        assert got <= allowed_state, f"state after {(slot - 1) * 1024} tokens: {got:.2e}"


def test_truth_by_chunks_is_the_token_recurrence() -> None:
    """The truth of these tests, against the law token by token."""
    for gates in GATES:
        case = make([150, 37], gates, exports=every(16, [150, 37]))
        by_token = run(kda_recurrent_ref, to(case, torch.float64, DEVICE))
        for name, got, expected in zip(("out", "pool"), truth_of(case), by_token, strict=True):
            assert error(got, expected) < 1e-10, f"{gates} {name}"


@pytest.mark.parametrize("N", [1, 2, 63, 1000, 4096])
@pytest.mark.parametrize("gates", ["mixed", "kimi"])
def test_batches(gates: str, N: int) -> None:
    """Many sequences, empty ones first, in the middle and last; two value heads a key head."""
    lengths = [(37 * n + 11) % 71 for n in range(N)]
    for empty in {0, N // 2, N - 1} if N > 2 else ():
        lengths[empty] = 0
    assert_batch(lengths, gates)


@pytest.mark.parametrize("N", [31, 32, 33, 1023, 4096])
def test_mostly_empty(N: int) -> None:
    """Up to 96 empty sequences between two: a search for a tile's sequence passes over them."""
    assert_batch([(30 + n % 64) * (n % 97 == 5) for n in range(N)], "mixed", padding=100)


def assert_batch(lengths: list[int], gates: str, padding: int = 3) -> None:
    N = len(lengths)
    case = make(lengths, gates, HV=4, padding=padding)
    out, pool = prefill(case)
    assert_accurate(case, (out, pool), truth_of(case), BOUNDS[gates])
    for n in (n for n in range(N) if lengths[n] == 0):
        initial = case["state_pool"][n] if n % 3 != 2 else torch.zeros_like(pool[n])
        assert_same(f"state of empty sequence {n}", pool[N + n], initial)


@pytest.mark.parametrize("same", [0.0, 0.05], ids=["identical", "nearly"])
@pytest.mark.parametrize("gates", ["weak", "kimi"])
def test_collinear_keys(gates: str, same: float) -> None:
    """Keys that repeat, with large beta: the hardest case of the triangular inverse.

    Corrections then cancel, so bf16 operands cost more: simulated, these kernels' roundings give
    0.8e-2 to 1.8e-2, those of other kernels up to 2.9e-2.
    """
    case = make([1000], gates)
    case["k"] = (case["k"][:1] + same * case["k"]).bfloat16()
    case["beta_logit"] = case["beta_logit"] + 4
    assert_accurate(case, prefill(case), truth_of(case), (2e-2, 2e-2))


PATTERNS = {
    "none": lambda n: [],
    "one": lambda n: [n // 32 * 16] if n >= 32 else [],
    "every16": lambda n: [*range(16, n + 1, 16)],
    "every64": lambda n: [*range(64, n + 1, 64)],
    "every256": lambda n: [*range(256, n + 1, 256)],
    "end": lambda n: [n] if n and n % 16 == 0 else [],
}


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("gates", ["mixed", "kimi"])
def test_checkpoints(gates: str, pattern: str) -> None:
    """State p is bit for bit the final state of p tokens alone; exporting changes nothing else."""
    lengths = [1000, 512, 0, 16, 777, 768]
    exports = [PATTERNS[pattern](n) for n in lengths]
    bare, case = make(lengths, gates), make(lengths, gates, exports=exports)
    N = len(lengths)
    (out, pool), (out_bare, pool_bare) = prefill(case), prefill(bare)
    assert_same("out", out, out_bare)
    assert_same("final states", pool[N : 2 * N], pool_bare[N : 2 * N])
    prefixes = [(n, p) for n in range(N) for p in exports[n]]
    if not prefixes:
        return
    cu = case["cu_seqlens"].tolist()
    rows = torch.cat([torch.arange(cu[n], cu[n] + p) for n, p in prefixes]).to(DEVICE)
    slots = {
        "initial_slots": case["initial_slots"][[n for n, _ in prefixes]],
        "final_slots": case["checkpoint_slots"],
    }
    alone = prefill(select(case, rows, [p for _, p in prefixes], **slots))[1]
    assert_same("checkpoints", pool[2 * N :], alone[2 * N :])


@pytest.mark.parametrize("scan_tile", [0, 1])
def test_any_checkpoint_entries(scan_tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of any offset, order and slot: those that name a border in turn write its state.

    An entry counts if it is a multiple of 16 within the sequence and none before it was larger,
    rounded up to such a border. Entries of one offset may name several slots.
    """
    from torch_kda.cute_kernels import kda_prefill as glue

    monkeypatch.setattr(glue, "choose_scan_tile", lambda *_: scan_tile)
    rng = random.Random(scan_tile)
    lengths, E = [100, 16, 0, 7, 96, 333], 48
    N = len(lengths)
    clean = make(lengths, exports=every(16, lengths))
    out_clean, pool_clean = prefill(clean)
    borders = [(n, p) for n, length in enumerate(lengths) for p in range(16, length + 1, 16)]
    states = {at: pool_clean[2 * N + i] for i, at in enumerate(borders)}
    first, end = 2 * N, 2 * N + E
    bare = torch.cat([clean["state_pool"][:first], torch.full((E, 2, K, K), 7.0, device=DEVICE)])
    for _ in range(40):
        indptr = [0, *sorted(rng.randint(0, E) for _ in range(N - 1)), E]
        entries = [
            _random_offsets(rng, length, indptr[n + 1] - indptr[n])
            for n, length in enumerate(lengths)
        ]
        slots = [
            slot if rng.random() < 0.9 else rng.choice([-1, -2, -(2**31), 10**6, 2**31 - 1])
            for slot in rng.sample(range(first, end), E)
        ]
        wanted = {slots[indptr[n] + i]: (n, p) for n in range(N) for i, p in _in_turn(entries[n])}
        wanted = {slot: at for slot, at in wanted.items() if at in states}
        lists = {"checkpoint_indptr": indptr, "checkpoint_offsets": sum(entries, [])}
        lists |= {"checkpoint_slots": slots}
        case = clean | {"state_pool": bare} | {name: ints(x, DEVICE) for name, x in lists.items()}
        out, pool = prefill(case)
        assert_same("out", out, out_clean)
        assert_same("final states", pool[:first], pool_clean[:first])
        for slot in range(first, end):
            expected = states[wanted[slot]] if slot in wanted else bare[slot]
            assert_same(f"slot {slot} of {lists}", pool[slot], expected)


def _random_offsets(rng: random.Random, length: int, count: int) -> list[int]:
    special = [1, 16, 32, 48, 96, length, 2**31 - 1, -(2**31)]
    offsets = []
    for _ in range(count):
        near = [16 * rng.randint(-1, length // 16 + 2), rng.randint(-9, length + 40)]
        offsets.append(rng.choice(special + near))
    return sorted(offsets) if rng.random() < 0.6 else offsets


def _in_turn(offsets: list[int]) -> Iterator[tuple[int, int]]:
    """Entries that are borders and below none that came before."""
    highest = 0
    for i, offset in enumerate(offsets):
        if offset > 0 and offset % 16 == 0 and offset >= highest:
            yield i, offset
        highest = max(highest, -(-offset // 16) * 16)


@pytest.mark.parametrize("gates", ["mixed", "kimi"])
def test_resumed(gates: str) -> None:
    """Cut at multiples of 16 and continued in place: the bits of one shot."""
    case = make([1000], gates, padding=0)
    out, pool = prefill(case)
    state, parts = case["state_pool"].clone(), []
    for begin, end in [(0, 16), (16, 48), (48, 512), (512, 992), (992, 1000)]:
        rows = torch.arange(begin, end, device=DEVICE)
        slot = ints([0], DEVICE)
        part = select(case, rows, [end - begin], initial_slots=slot, final_slots=slot)
        parts.append(kda_prefill(**(part | {"state_pool": state})))
    assert_same("out", torch.cat(parts), out)
    assert_same("state", state[0], pool[1])


@pytest.mark.parametrize("gates", ["mixed", "kimi"])
def test_alone_and_in_any_batch(gates: str) -> None:
    lengths = [33, 1000, 0, 16, 257, 5, 640]
    case = make(lengths, gates, exports=every(64, lengths))
    N, cu = len(lengths), case["cu_seqlens"].tolist()
    out, pool = prefill(case)
    for order in ([*range(N)][::-1], [4], [1, 1, 3]):
        rows = torch.cat([torch.arange(cu[n], cu[n + 1]) for n in order]).to(DEVICE)
        slots = {
            "initial_slots": case["initial_slots"][order],
            "final_slots": ints([N + i for i in range(len(order))], DEVICE),
        }
        picked = select(case, rows, [lengths[n] for n in order], **slots)
        out_picked, pool_picked = prefill(picked)
        assert_same(f"out of {order}", out_picked, out[rows])
        states = pool[[N + n for n in order]]
        assert_same(f"states of {order}", pool_picked[N : N + len(order)], states)


def test_scan_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """How the V rows are split over CTAs changes no bit."""
    from torch_kda.cute_kernels import kda_prefill as glue
    from torch_kda.cute_kernels.tiles import SCAN_TILES

    lengths = [333, 0, 64, 17]
    case = make(lengths, exports=every(16, lengths), HV=4)
    results = []
    for i in range(len(SCAN_TILES)):
        monkeypatch.setattr(glue, "choose_scan_tile", lambda *_, i=i: i)
        results.append(prefill(case))
    for out, pool in results[1:]:
        assert_same("out", out, results[0][0])
        assert_same("pool", pool, results[0][1])


@pytest.mark.parametrize("gates", ["mixed", "kimi"])
def test_causal(gates: str) -> None:
    """What comes after a token does not change a bit of its output."""
    case = make([200], gates, padding=0)
    out = prefill(case)[0]
    for t in (0, 5, 15, 16, 100, 198):
        later = {name: case[name].clone() for name in ("q", "k", "v", "g_raw", "beta_logit")}
        for x in later.values():
            x[t + 1 :] = x[t + 1 :].flip(0) * 1.5 + 1
        changed = prefill(case | later)[0]
        assert_same(f"out up to {t}", changed[: t + 1], out[: t + 1])
        assert not torch.equal(changed[t + 1 :], out[t + 1 :])


def test_nan_stays_where_it_is() -> None:
    """In one sequence, in rows of none, in slots that are not read."""
    lengths = [40, 33, 70]
    case = make(lengths, exports=every(16, lengths), padding=20)
    N, cu = 3, case["cu_seqlens"].tolist()
    out, pool = prefill(case)
    poisoned = {name: case[name].clone() for name in ("q", "k", "v", "g_raw", "beta_logit")}
    for x in poisoned.values():
        x[cu[1] : cu[2]] = float("nan")
        x[cu[3] :] = float("nan")
    states = case["state_pool"].clone()
    states[[1, 2, *range(N, states.shape[0])]] = float("nan")
    out_nan, pool_nan = prefill(case | poisoned, state_pool=states)
    for n in (0, 2):
        assert_same(f"out {n}", out_nan[cu[n] : cu[n + 1]], out[cu[n] : cu[n + 1]])
        assert_same(f"state {n}", pool_nan[N + n], pool[N + n])
    assert_same("padding", out_nan[cu[3] :], torch.zeros_like(out[cu[3] :]))


@pytest.mark.parametrize("gates", ["mixed", "kimi"])
def test_thousand_runs(gates: str, nan_memory: None) -> None:
    """All equal, though output, workspace and written slots hold NaN before each: a lost fence or
    a race between kernels would show."""
    lengths = [300, 0, 17, 512, 64, 33]
    case = make(lengths, gates, HV=4, exports=every(32, lengths))
    N = len(lengths)
    arguments = case | {"state_pool": case["state_pool"].clone()}
    expected = prefill(case)
    differs = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    for _ in range(1000):
        arguments["state_pool"][N:] = float("nan")
        arguments["state_pool"][-1] = case["state_pool"][-1]
        out = kda_prefill(**arguments)
        differs[0] += (out.view(torch.int16) != expected[0].view(torch.int16)).sum()
        pool = arguments["state_pool"].view(torch.int32)
        differs[1] += (pool != expected[1].view(torch.int32)).sum()
    assert differs.tolist() == [0, 0]


def test_shared_and_in_place_slots() -> None:
    case = make([100, 40, 64, 33])
    shared = case | {"initial_slots": ints([1, 1, 1, 1], DEVICE)}
    out, pool = prefill(shared)
    truth = truth_of(shared)
    assert_accurate(shared, (out, pool), truth, BOUNDS["mixed"])
    apart = prefill(case)
    own = case["initial_slots"].clone()
    own[2] = 2
    zeroed = case | {"state_pool": case["state_pool"].clone(), "initial_slots": own}
    zeroed["state_pool"][2] = 0
    out, pool = prefill(zeroed, final_slots=own)
    assert_same("out in place", out, apart[0])
    assert_same("states in place", pool[:4], apart[1][4:8])


def test_strided_rows() -> None:
    """q, k and v as parts of one projection, gates and beta as parts of another, padded slots."""
    case = make([100, 61], H=2, HV=4)
    T = case["q"].shape[0]
    packed = torch.cat([case[name].flatten(1) for name in ("q", "k", "v")], dim=1)
    q, k, v = packed.split([2 * K, 2 * K, 4 * K], dim=1)
    gates = torch.cat([case["g_raw"].flatten(1), case["beta_logit"], packed[:, :12]], dim=1)
    slots = torch.zeros(case["state_pool"].shape[0], 4 * K * K + 64, device=DEVICE)
    pool = slots[:, : 4 * K * K].unflatten(1, (4, K, K))
    pool.copy_(case["state_pool"])
    strided = {
        **{"q": q.unflatten(1, (2, K)), "k": k.unflatten(1, (2, K)), "v": v.unflatten(1, (4, K))},
        "g_raw": gates[:, : 4 * K].unflatten(1, (4, K)),
        "beta_logit": gates[:, 4 * K : 4 * K + 4],
        "state_pool": pool,
    }
    assert gates.shape == (T, 4 * K + 16)
    out, expected = kda_prefill(**(case | strided)), prefill(case)
    assert_same("out", out, expected[0])
    assert_same("pool", pool.contiguous(), expected[1])
    assert not slots[:, 4 * K * K :].any()


def test_offsets_past_2_to_the_31() -> None:
    """Rows, records and slots beyond 2^31 elements or bytes: the last head of a huge call."""
    T, HV = 140_000, 128
    case = make([T], H=HV, HV=HV, padding=0)
    assert T * HV * K > 2**31
    pool = torch.empty(1040, HV, K, K, device=DEVICE)
    assert pool.numel() > 2**31
    pool[1038:] = case["state_pool"][:2]
    slots = {"initial_slots": ints([1038], DEVICE), "final_slots": ints([1039], DEVICE)}
    out = kda_prefill(**(case | slots | {"state_pool": pool}))
    for head in (0, HV - 1):
        one = slice(head, head + 1)
        by_head = {name: case[name][:, one] for name in ("q", "k", "v", "g_raw", "beta_logit")}
        by_head |= {name: case[name][one] for name in ("A_log", "dt_bias")}
        # a stretch from the start to keep the truth short, and the end by its state
        short = {name: x[:2048] for name, x in by_head.items() if x.shape[0] == T}
        short["state_pool"] = case["state_pool"][:, one].contiguous()
        cu = {"cu_seqlens": ints([0, 2048], DEVICE)}
        true_out = truth_of(case | by_head | short | cu)[0]
        assert error(out[:2048, one], true_out) <= BOUNDS["mixed"][0]
        alone = case | {name: x.contiguous() for name, x in by_head.items()}
        out_alone, pool_alone = prefill(alone, state_pool=short["state_pool"])
        assert_same("last rows", out[-2048:, one].contiguous(), out_alone[-2048:])
        assert_same("state", pool[1039, one], pool_alone[1])


def test_no_host_sync() -> None:
    case = make([100, 0, 61], exports=every(16, [100, 0, 61]))
    kda_prefill(**case)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kda_prefill(**case)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_captured() -> None:
    """One capture serves other inputs and other lengths, bit for bit what an eager call gives."""
    first = make([100, 61, 0], exports=every(64, [100, 61, 0]))
    static = {n: x.clone() if isinstance(x, Tensor) else x for n, x in first.items()}
    kda_prefill(**static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kda_prefill(**static)
    cases = [first, make([3, 16, 142], seed=1), make([0, 0, 0], padding=164, seed=2)]
    # capacities are those of the first: its one checkpoint entry, its pool
    for case in cases:
        case = case | {"state_pool": first["state_pool"]}
        if case["checkpoint_offsets"].shape[0] == 0:
            case["checkpoint_offsets"] = torch.zeros_like(first["checkpoint_offsets"])
            case["checkpoint_slots"] = torch.zeros_like(first["checkpoint_slots"])
        for name, x in case.items():
            if isinstance(x, Tensor):
                static[name].copy_(x)
        graph.replay()
        expected, pool = prefill(case)
        assert_same("out", out, expected)
        assert_same("pool", static["state_pool"], pool)


@pytest.mark.inductor
def test_compiled_and_captured() -> None:
    """Inside one compiled graph, and that inside a CUDA graph: the bits of eager."""

    def step(case: Case) -> Tensor:
        return kda_prefill(**case) + 1

    case = make([100, 61], exports=every(16, [100, 61]))
    expected, pool = prefill(case)
    compiled = torch.compile(step, fullgraph=True)
    with torch.inference_mode():
        first = case | {"state_pool": case["state_pool"].clone()}
        assert_same("compiled out", compiled(first), expected + 1)
        assert_same("compiled pool", first["state_pool"], pool)
        static = case | {"state_pool": case["state_pool"].clone()}
        compiled(static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = compiled(static)
        static["state_pool"].copy_(case["state_pool"])
        graph.replay()
        assert_same("captured out", out, expected + 1)
        assert_same("captured pool", static["state_pool"], pool)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("k", lambda x: x.float(), "k must be .* bfloat16, got .* float32"),
        ("k", lambda x: x[:-1], "k must be"),
        ("k", lambda x: x.cpu(), "k must be on cuda"),
        ("v", lambda x: x.mT.contiguous().mT, "v must have its last 2 dims contiguous"),
        (
            "g_raw",
            lambda x: torch.cat([x, x], 1).flatten(1)[:, 4:260].unflatten(1, (2, K)),
            "aligned",
        ),
        ("final_slots", lambda x: x.long(), "final_slots must be .* int32, got .* int64"),
        ("state_pool", lambda x: x[:, :1], "state_pool must be"),
        ("lower_bound", lambda x: -9.0, "lower_bound must be"),
    ],
    ids=["dtype", "rows", "device", "heads", "alignment", "index", "pool", "bound"],
)
def test_errors(name: str, value: Any, message: str) -> None:
    """What the compiled call refuses is said in the op's words, and nothing is launched."""
    case = make([20, 17])
    with pytest.raises(ValueError, match=message):
        kda_prefill(**(case | {name: value(case[name])}))
    torch.cuda.synchronize()
