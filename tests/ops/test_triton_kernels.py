"""The Triton kernels against the references: interpreted in fp32 on a CPU, in bf16 on CUDA.

The tests of the ops run on CUDA too; here the kernels are called with tiles so small that a few
rows take every way through them.
"""

from types import ModuleType

import pytest
import torch
from torch import Tensor
from torch_kda.ops import handover, reference
from torch_kda.tests.checks import assert_close_as_torch, assert_rms, assert_same
from torch_kda.tests.ops.cases import BOUNDS, POOLS, Case, run, to, truth
from torch_kda.tests.ops.interpreted import kernels
from torch_kda.tests.ops.triton_cases import (
    conv_case,
    drafts_case,
    mla_decode_case,
    mla_prefill_case,
    moe_case,
)

Kernels = dict[str, ModuleType]


@pytest.fixture(name="triton")
def _triton(device: str, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return kernels(device, monkeypatch)


@pytest.fixture(name="dtype")
def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def check(
    op, ref, case: Case, *, is_strict: bool = True, roundings: int = 1, **tiles: object
) -> tuple[Tensor, ...]:
    """Outputs and pools are as near to float64 as twice the reference's error.

    The reference rounds once, at the end; if not is_strict, after each of its steps.
    """
    names = ["out", *(name for name in POOLS if name in case)]
    results = run(lambda **kwargs: op(**kwargs, **tiles), case)
    with pytest.MonkeyPatch.context() as patch:
        if not is_strict:
            patch.setattr(reference, "_work", lambda x: x)
        plain = run(ref, to(case, case_dtype(case), "cpu"))
    for name, x, as_torch, true in zip(names, results, plain, truth(ref, case), strict=True):
        if name == "kv_pool":
            assert_same(name, x, case[name])
        elif name == "state_pool":
            assert_rms(name, x, true, BOUNDS[torch.float32])
        else:
            assert_close_as_torch(name, x, true, as_torch.to(x.device), roundings=roundings)
    return results


def case_dtype(case: Case) -> torch.dtype:
    return next(x.dtype for name, x in case.items() if name in ("qkv", "x", "q"))


@pytest.mark.parametrize("gates", ["mixed", "saturated", "softplus", "extreme"])
@pytest.mark.parametrize(("H", "HV", "M"), [(2, 2, 1), (1, 2, 3)], ids=["1", "grouped-3"])
def test_decode(triton: Kernels, device: str, dtype: torch.dtype, gates, H, HV, M, nan_memory):
    dims = {"K": 128, "V": 128} if device == "cuda" else {"K": 64, "V": 32}
    case = drafts_case(4, M, H=H, HV=HV, **dims, dtype=dtype, device=device, gates=gates)
    scale = dims["K"] ** -0.5

    def op(**kwargs):
        return triton["decode"].kda_decode(**kwargs, scale=scale, eps=1e-5)

    out, state_pool, conv_pool = check(op, reference.kda_decode_ref, case)
    expected = run(reference.kda_decode_ref, to(case, dtype, "cpu"))
    assert_same("windows", conv_pool.cpu(), expected[2])
    for d, count in enumerate(case["num_tokens"].tolist()):
        unreal = out[d * M + (count if case["src_slots"][d] >= 0 else 0) : (d + 1) * M]
        assert_same(f"unreal {d}", unreal, torch.zeros_like(unreal))
    untouched = set(range(len(state_pool))) - set(case["dst_slots"].flatten().tolist())
    for slot in untouched:
        assert_same(f"slot {slot}", state_pool[slot], case["state_pool"][slot])


@pytest.mark.parametrize("block_t", [8, 60])
@pytest.mark.parametrize(
    "lengths",
    [[37], [0, 5, 0, 33, 1, 2, 3, 16], [0, 0], [56, 1, 0, 2, 30]],
    ids=["one", "many", "empty", "late"],
)
def test_conv(triton: Kernels, device: str, dtype: torch.dtype, lengths, block_t, nan_memory):
    case = conv_case(lengths, sum(lengths) + 7, 24, dtype=dtype, device=device)
    tiles = {"block_t": block_t, "block_c": 16}
    op = triton["conv"].causal_conv_prefill
    y, pool = check(op, reference.causal_conv_prefill_ref, case, **tiles)
    expected, expected_pool = run(reference.causal_conv_prefill_ref, to(case, dtype, "cpu"))
    assert_same("windows", pool.cpu(), expected_pool)
    assert_same("padding", y[sum(lengths) :].cpu(), expected[sum(lengths) :])
    bare = dict.fromkeys(("checkpoint_indptr", "checkpoint_offsets", "checkpoint_slots"))
    no_exports, _ = run(lambda **kwargs: op(**kwargs, **tiles), case, **bare)
    assert_same("without exports", no_exports, y)


def test_conv_bits(triton: Kernels, device: str, dtype: torch.dtype):
    """The same bits alone, in a batch at any place, and resumed from an export."""
    lengths = [7, 48, 33]
    case = conv_case(lengths, 88, 24, dtype=dtype, device=device)

    def op(**kwargs):
        return triton["conv"].causal_conv_prefill(**kwargs, block_t=8, block_c=16)

    y, pool = run(op, case)
    one = conv_case([48], 48, 24, dtype=dtype, device=device)
    one |= {"x": case["x"][7:55], "weight": case["weight"], "conv_pool": case["conv_pool"]}
    one["initial_slots"] = case["initial_slots"][[1, 3, 4]]
    assert_same("alone", run(op, one)[0], y[7:55])
    rest = conv_case([32], 32, 24, dtype=dtype, device=device)
    rest |= {"x": case["x"][23:55], "weight": case["weight"], "conv_pool": pool}
    rest["initial_slots"][0] = case["checkpoint_slots"][1]
    assert_same("resumed", run(op, rest)[0], y[23:55])


def test_conv_long_lists(triton: Kernels, device: str, dtype: torch.dtype, monkeypatch):
    """More starts and exports than one load has; an export below one before it is skipped."""
    count = 600
    if device == "cpu":
        count = 3
        for name in ("conv", "search"):
            monkeypatch.setattr(triton[name], "BLOCK", 2)
    lengths = [0] * count + [1, 70, 0, 3] + [0] * count + [100]
    case = conv_case(lengths, 180, 24, dtype=dtype, device=device)
    end = int(case["checkpoint_indptr"][-1])
    offsets = [16, 64, 48, 64, 96]
    case["checkpoint_offsets"][end - 5 : end] = torch.tensor(offsets, dtype=torch.int32)
    slots = case["checkpoint_slots"][end - 5 : end].tolist()
    op = triton["conv"].causal_conv_prefill
    _, pool = check(op, reference.causal_conv_prefill_ref, case, block_t=60, block_c=32)
    for slot, offset in zip(slots, offsets, strict=True):
        window = case["x"][74 + offset - 3 : 74 + offset]
        assert_same(f"at {offset}", pool[slot], case["conv_pool"][slot] if offset == 48 else window)


@pytest.mark.parametrize("shape", [(5, 3, 20), (7,), (2, 3, 4, 16), (0, 4, 16)], ids=str)
def test_norm(triton: Kernels, device: str, dtype: torch.dtype, shape, nan_memory):
    x, gate = (3 * torch.randn(shape).to(device, dtype) for _ in range(2))
    case = {"x": x, "gate": gate, "weight": torch.randn(shape[-1]).to(device, dtype), "eps": 1e-5}
    op = triton["norms"].gated_rms_norm
    (y,) = check(op, reference.gated_rms_norm_ref, case, block_rows=4)
    wide = torch.cat([x, x], dim=-1)[..., : shape[-1]]
    assert_same("strided", op(wide, gate, case["weight"], eps=1e-5), y)


@pytest.mark.parametrize("block_n", [16, 32], ids=["one block a tile", "two blocks a tile"])
@pytest.mark.parametrize("M", [1, 3])
def test_mla_decode(triton: Kernels, device: str, dtype: torch.dtype, M, block_n, nan_memory):
    lens, dims = [M, 0, 40, 16, 129], {"R": 16, "P": 8, "dtype": dtype, "device": device}
    case = mla_decode_case(lens, M, 3, **dims)
    tiles = {"split_tokens": 32, "block_n": block_n}
    op, ref = triton["latent_decode"].mla_decode, reference.mla_decode_ref
    o, _ = check(op, ref, case, is_strict=False, **tiles)
    for d in range(5):
        # what a row gives doesn't depend on the others
        rows = {n: case[n].clone() for n in ("block_table", "seq_lens", "q")}
        rows["seq_lens"][(d + 1) % 5] = 0
        rows["q"].mul_(-2)
        rows["q"][d * M : (d + 1) * M] = case["q"][d * M : (d + 1) * M]
        mine = slice(d * M, (d + 1) * M)
        assert_same(f"among others {d}", op(**(case | rows), **tiles)[mine], o[mine])
    # few rows are cut into smaller parts
    for d in range(5):
        rows = {n: case[n][d : d + 1] for n in ("block_table", "seq_lens")}
        rows["q"] = case["q"][d * M : (d + 1) * M]
        check(op, ref, case | rows, is_strict=False, **tiles)


def test_mla_decode_in_launches(triton: Kernels, device: str, dtype, monkeypatch):
    """Rows beyond the workspace are another launch's, with the same bits."""
    dims = {"R": 16, "P": 0, "dtype": dtype, "device": device}
    case = mla_decode_case([40, 70, 3, 33, 100], 1, 2, **dims)
    op = triton["latent_decode"]
    o, _ = check(
        op.mla_decode, reference.mla_decode_ref, case, is_strict=False, split_tokens=32, block_n=16
    )
    # 8 parts of 2 rows: two rows of the batch at a time
    monkeypatch.setattr(op, "WORKSPACE_BYTES", 2 * 4 * 4 * 2 * (16 + 2))
    assert_same("o", op.mla_decode(**case, split_tokens=32, block_n=16), o)


@pytest.mark.parametrize(
    ("lengths", "seq_lens"),
    [([37], [37]), ([0, 5, 0, 33, 1, 20, 17], [0, 5, 0, 70, 49, 20, 300])],
    ids=["37", "mixed"],
)
@pytest.mark.parametrize("part_tokens", [32, 2048], ids="parts of {}".format)
@pytest.mark.usefixtures("nan_memory")
def test_mla_prefill(
    triton: Kernels, device: str, dtype: torch.dtype, lengths, seq_lens, part_tokens, monkeypatch
):
    """Wide from 16 rows, also the last, for whose context there is room by far."""
    dims = {"R": 24, "P": 8, "K": 24, "V": 20, "dtype": dtype, "device": device}
    case = mla_prefill_case(lengths, seq_lens, 2, **dims)
    module = triton["latent_prefill"]
    if device == "cpu":
        monkeypatch.setattr(module, "_expand", expand_fp32)
    monkeypatch.setattr(module, "KV_BYTES", 1)  # a head at a time
    tiles = {"min_rows": 16, "min_room": 1000, "part_tokens": part_tokens}
    tiles |= {"wide": (16, 16, 4, 2), "short": (16, 16, 4, 2)}
    o, _ = check(module.mla_prefill, reference.mla_prefill_ref, case, is_strict=False, **tiles)
    assert_same("padding", o[sum(lengths) :], torch.zeros_like(o[sum(lengths) :]))
    monkeypatch.setattr(module, "KV_BYTES", 1 << 30)
    assert_same("all heads at once", module.mla_prefill(**case, **tiles), o)
    for n, length in enumerate(lengths):
        begin = int(case["cu_seqlens"][n])
        one = {name: case[name][n : n + 1] for name in ("block_table", "seq_lens")}
        one["cu_seqlens"] = case["cu_seqlens"][n : n + 2] - begin
        one["q"] = case["q"][begin : begin + length]
        alone = module.mla_prefill(**(case | one), **tiles)
        assert_same(f"alone {n}", alone, o[begin : begin + length])


@pytest.mark.usefixtures("nan_memory")
def test_mla_prefill_without_room(
    triton: Kernels, device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    """There is room for 318 tokens, 2 a row. Contexts of 70, 20 and 31 tokens always fit, with so
    many rows; of the 197 that are left, 150 go to the first that fits, and 90 don't fit then.
    """
    lengths, seq_lens = [35, 0, 33, 17, 20, 18, 31], [70, 0, 500, 150, 20, 90, 31]
    dims = {"R": 24, "P": 8, "K": 24, "V": 20, "dtype": dtype, "device": device}
    case = mla_prefill_case(lengths, seq_lens, 2, **dims)
    module = triton["latent_prefill"]
    if device == "cpu":
        monkeypatch.setattr(module, "_expand", expand_fp32)
    monkeypatch.setattr(module, "MAX_RATIO", 2)
    plans, make_plan = [], module._make_plan
    monkeypatch.setattr(
        module, "_make_plan", lambda *args: plans.append(make_plan(*args)) or plans[-1]
    )
    tiles = {"min_rows": 16, "min_room": 0, "part_tokens": 32}
    tiles |= {"wide": (16, 16, 4, 2), "short": (16, 16, 4, 2)}
    check(module.mla_prefill, reference.mla_prefill_ref, case, is_strict=False, **tiles)
    starts = plans[0].numbers[module.PLAN_HEAD : module.PLAN_HEAD + len(lengths) + 1].tolist()
    assert starts == [0, 70, 70, 70, 220, 240, 240, 271]


def expand_fp32(latent: Tensor, weight: Tensor, numbers: Tensor) -> Tensor:
    """The grouped matmul knows bf16 only."""
    out = torch.full((latent.shape[0], weight.shape[0]), float("nan"))
    out[: int(numbers[0])] = latent[: int(numbers[0])] @ weight.mT
    return out


@pytest.mark.parametrize("num_shared", [0, 1, 2])
@pytest.mark.parametrize("M", [1, 5, 11], ids=["one", "as-they-stand", "sorted"])
def test_moe_few(triton: Kernels, device: str, dtype: torch.dtype, M, num_shared, nan_memory):
    sizes = {"E": 5, "k": 2, "dim": 24, "F": 16, "num_shared": num_shared}
    case = moe_case(M, **sizes, dtype=dtype, device=device)
    op = triton["experts"].moe
    tiles = {"few_choices": 100, "tile": (16, 16, 16, 4, 2)}
    # a dense product of shared experts is rounded before it is added
    dense = num_shared > 0 and M == 11
    (y,) = check(op, reference.moe_ref, case, is_strict=False, roundings=1 + dense, **tiles)
    for m in () if dense else {0, M // 2, M - 1}:
        rows = {n: case[n][m : m + 1] for n in ("x", "topk_ids", "topk_weights")}
        assert_same(f"alone {m}", op(**(case | rows), **tiles), y[m : m + 1])


@pytest.mark.parametrize("num_shared", [0, 1, 2])
@pytest.mark.parametrize("M", [1, 9, 40])
def test_moe_many(triton: Kernels, device: str, M, num_shared, nan_memory):
    sizes = {"E": 5, "k": 2, "dim": 24, "F": 16, "num_shared": num_shared}
    case = moe_case(M, **sizes, dtype=torch.bfloat16, device=device)
    op = triton["experts"].moe
    options = {"is_strict": False, "roundings": 1 + (num_shared > 0), "few_choices": 0}
    (y,) = check(op, reference.moe_ref, case, **options)
    assert_same("int64", op(**(case | {"topk_ids": case["topk_ids"].long()}), few_choices=0), y)


@pytest.mark.parametrize(
    "tiles",
    [{"few_choices": 100}, {"few_choices": 100, "fewest_choices": 0}, {"few_choices": 0}],
    ids=["as-they-stand", "sorted", "many"],
)
@pytest.mark.parametrize("num_shared", [1, 2])
@pytest.mark.parametrize("bad", [-1, 5, 1_000], ids=str)
def test_moe_first_id_out_of_range(
    triton: Kernels, device: str, dtype: torch.dtype, bad, num_shared, tiles, nan_memory
):
    """Shared experts are left out of the row, the expert that it names is not."""
    sizes = {"E": 5, "k": 2, "dim": 24, "F": 16, "num_shared": num_shared}
    # torch's grouped product knows bf16 only
    dtype = dtype if tiles["few_choices"] > 0 else torch.bfloat16
    case = moe_case(3, **sizes, dtype=dtype, device=device)
    case["topk_ids"].copy_(torch.tensor([[bad, 1], [bad, bad], [1, bad]]))
    op = triton["experts"].moe
    y = op(**case, **tiles)
    assert_same("padding", y[1], torch.zeros_like(y[1]))
    expected = op(**case | {n: case[n][:5] for n in ("w13", "w2")} | {"num_shared": 0}, **tiles)
    assert_same("named", y[0], expected[0])
    assert y[0].abs().max() > 0.01, "nothing is added, the test says nothing"
    assert not torch.equal(y[2], expected[2])


@pytest.mark.parametrize("E", [5, 20])
def test_route(triton: Kernels, device: str, E: int):
    """Both ways of routing give the places of a stable sort."""
    ids = torch.randint(-1, E + 1, (70, 3), dtype=torch.int32).to(device)
    flat = ids.flatten().cpu()
    is_expert = (flat >= 0) & (flat < E)
    order = torch.where(is_expert, flat, E).argsort(stable=True)[: int(is_expert.sum())]
    for one_kernel_choices in (1000, 0):
        place, token, ends = triton["experts"]._route(ids, E, one_kernel_choices=one_kernel_choices)
        expected = torch.full_like(flat, -1)
        expected[order] = torch.arange(len(order), dtype=torch.int32)
        assert_same("place", place.cpu(), expected)
        assert_same("token", token.cpu()[: len(order)], (order // 3).to(torch.int32))
        counts = torch.bincount(flat[is_expert], minlength=E)
        assert_same("ends", ends.cpu(), counts.cumsum(0).to(torch.int32))


def test_mla_store(triton: Kernels, device: str, dtype: torch.dtype):
    pool = torch.randn(4, 16, 20).to(device, dtype)
    expected, latent = pool.clone(), torch.randn(11, 40).to(device, dtype)[:, :20]
    places = [17, -1, 63, 64, 0, -20, 1_000_000, 5, 6, 7, 8]
    slots = torch.tensor(places, dtype=torch.int32, device=device)
    for m, place in enumerate(places):
        if 0 <= place < 64:
            expected[place // 16, place % 16] = latent[m]
    triton["latents"].mla_store(latent, pool, slots)
    assert_same("pool", pool, expected)


@pytest.mark.parametrize("shape", [(5, 48), (1, 1), (3, 1008), (0, 16)], ids=str)
def test_row_norms(triton: Kernels, device: str, dtype: torch.dtype, shape, nan_memory):
    """Rows start aligned: where one doesn't, it is read in other pieces, and summed in their order.

    The tests of the ops have others, which are only close to the truth.
    """
    x, residual = (3 * torch.randn(shape).to(device, dtype) for _ in range(2))
    case = {"x": x, "weight": torch.randn(shape[-1]).to(device, dtype), "eps": 1e-5}
    norms = triton["norms"]
    (y,) = check(norms.rms_norm, reference.rms_norm_ref, case)
    wide = torch.cat([x, residual], dim=-1)
    assert_same("strided", norms.rms_norm(**(case | {"x": wide[:, : shape[1]]})), y)
    total, y = norms.add_rms_norm(**case, residual=residual)
    assert_same("sum", total, x + residual)
    assert_same("norm of it", y, norms.rms_norm(**(case | {"x": total})))
    halves = {"x": wide[:, : shape[1]], "residual": wide[:, shape[1] :]}
    strided = norms.add_rms_norm(**(case | halves))
    assert_same("strided sum", strided[0], total)
    assert_same("norm of that", strided[1], y)


@pytest.mark.parametrize("shape", [(5, 20), (1, 1), (3, 70), (0, 16)], ids=str)
def test_activations(triton: Kernels, device: str, dtype: torch.dtype, shape, nan_memory):
    wide = 3 * torch.randn(shape[0], 2 * shape[1] + 3).to(device, dtype)
    both, kernels = wide[:, : 2 * shape[1]], triton["activations"]
    check(kernels.silu_and_mul, reference.silu_and_mul_ref, {"x": both}, block=32)
    x, gate = both.chunk(2, dim=1)
    check(kernels.sigmoid_mul, reference.sigmoid_mul_ref, {"x": x, "gate": gate}, block=32)


PLACES = {
    "apart": handover.Places(32, 64, 9, 80, 90, 100, num_rows=5, width=5, block_size=16),
    "small": handover.Places(0, 3, 3, 6, 8, 10, num_rows=2, width=2, block_size=7),
    "many": handover.Places(0, 16, 16, 32, 36, 41, num_rows=4, width=20, block_size=64),
    "none": handover.Places(5, 20, 0, 30, 31, 40, num_rows=0, width=3, block_size=16),
}


@pytest.mark.parametrize("name", PLACES)
def test_fetch(triton: Kernels, device: str, name: str):
    """The turns alternate whatever the number of programs, and nothing past the size is written."""
    places = PLACES[name]
    hosts = torch.randint(1 << 20, (2, 150), dtype=torch.int32, pin_memory=device == "cuda")
    rows = torch.randint(-3, 5, (2, places.num_ids), dtype=torch.int32).clamp(min=-1)
    hosts[:, places.prev_rows : places.prev_rows + places.num_ids] = rows
    longest = places.width * places.block_size
    lengths = torch.randint(longest + 1, (2, places.num_rows), dtype=torch.int32)
    lengths[0, :1], lengths[1, -1:] = 0, longest
    hosts[:, places.seq_lens : places.seq_lens + places.num_rows] = lengths
    tokens = torch.randint(1 << 20, (5,), dtype=torch.int64)
    size = places.table + places.num_rows * places.width
    state, known = (torch.tensor([1, 0], dtype=torch.int32) for _ in range(2))
    state, on_device = state.to(device), tokens.to(device)
    for _ in range(5):
        packed = torch.full((150,), -5, dtype=torch.int32, device=device)
        triton["handover"].fetch(hosts, state, on_device, packed[:size], places, block=16)
        expected = torch.full((150,), -5, dtype=torch.int32)
        handover.fetch(hosts, known, tokens, expected[:size], places)
        assert_same("packed", packed.cpu(), expected)
        assert_same("state", state.cpu(), known)


@pytest.mark.parametrize("count", [1, 8, 19])
def test_post(triton: Kernels, device: str, count: int):
    posted = torch.full((2, 20), -5, dtype=torch.int64, pin_memory=device == "cuda")
    for turn in (1, 0, 1):
        tokens = torch.randint(1 << 40, (count,), dtype=torch.int64, device=device)
        state = torch.tensor([turn, 0], dtype=torch.int32)
        expected = posted.clone()
        handover.post(tokens.cpu(), state, expected)
        triton["handover"].post(tokens, state.to(device), posted, block=8)
        if device == "cuda":
            torch.cuda.synchronize()
        assert_same("posted", posted, expected)
