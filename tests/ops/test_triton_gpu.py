"""The Triton kernels at real sizes on CUDA: truth, bits, replay, no compilation for a length."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_kda.ops import reference
from torch_kda.ops.activations import sigmoid_mul, silu_and_mul
from torch_kda.ops.attention import mla_decode, mla_prefill
from torch_kda.ops.conv import causal_conv_prefill
from torch_kda.ops.kda import kda_decode
from torch_kda.ops.moe import moe
from torch_kda.ops.norms import add_rms_norm, gated_rms_norm, rms_norm
from torch_kda.tests.checks import assert_close_as_torch, assert_rms, assert_same
from torch_kda.tests.ops.cases import BOUNDS, GATES, POOLS, Case, run, to, truth
from torch_kda.tests.ops.triton_cases import (
    conv_case,
    drafts_case,
    lengths_of,
    mla_decode_case,
    mla_prefill_case,
    moe_case,
)

pytestmark = pytest.mark.gpu

CUDA = {"dtype": torch.bfloat16, "device": "cuda"}
KDA = CUDA | {"K": 128, "V": 128}
LATENT = CUDA | {"R": 512, "P": 64, "block_size": 64, "max_blocks": 64}


def norm_case(seed: int) -> Case:
    rng = torch.Generator().manual_seed(seed)
    x, gate = (torch.randn(33, 12, 256, generator=rng).to(**CUDA)[..., :128] for _ in range(2))
    return {"x": x, "gate": gate, "weight": torch.randn(128, generator=rng).to(**CUDA), "eps": 1e-5}


def row_case(seed: int, size: int, *names: str) -> Case:
    """Slices of wider rows, by name."""
    rng = torch.Generator().manual_seed(seed)
    wide = {name: torch.randn(33, size + 64, generator=rng).to(**CUDA) for name in names}
    return {name: x[:, :size] for name, x in wide.items()}


def row_norm_case(seed: int, *names: str) -> Case:
    weight = torch.randn(2304, generator=torch.Generator().manual_seed(seed)).to(**CUDA)
    return row_case(seed, 2304, *names) | {"weight": weight, "eps": 1e-5}


def stacked(**case: Any) -> Tensor:
    return torch.stack(add_rms_norm(**case))


def sequences(seed: int, rows: int, count: int) -> list[int]:
    return lengths_of(rows, count, torch.Generator().manual_seed(seed))


def prefill_case(seed: int) -> Case:
    # a context of its own for each; the last has one that is too long to be expanded
    lengths = [*sequences(seed, 600, 4), 130]
    seq_lens = [n + 100 * i if n else 0 for i, n in enumerate(lengths)]
    seq_lens[-1] = 3000 + seed
    return mla_prefill_case(lengths, seq_lens, 4, K=128, V=128, seed=seed, rows=768, **LATENT)


MAKERS: dict[str, tuple[Callable[..., Any], Callable[[int], Case]]] = {
    "decode": (kda_decode, lambda s: drafts_case(9, 1, H=12, HV=12, seed=s, **KDA)),
    "decode-drafts": (
        kda_decode,
        lambda s: drafts_case(5, 4, H=4, HV=8, gates="softplus", seed=s, **KDA),
    ),
    "conv": (
        causal_conv_prefill,
        lambda s: conv_case(sequences(s, 400, 6), 432, 1536, seed=s, **CUDA),
    ),
    "norm": (gated_rms_norm, norm_case),
    "rms_norm": (rms_norm, lambda s: row_norm_case(s, "x")),
    "add_rms_norm": (stacked, lambda s: row_norm_case(s, "x", "residual")),
    "silu_and_mul": (silu_and_mul, lambda s: row_case(s, 2048, "x")),
    "sigmoid_mul": (sigmoid_mul, lambda s: row_case(s, 1536, "x", "gate")),
    "mla_decode": (
        mla_decode,
        lambda s: mla_decode_case([700 + s, 0, 2900 - s, 16, 3 * s + 1], 1, 32, seed=s, **LATENT),
    ),
    "mla_decode-drafts": (
        mla_decode,
        lambda s: mla_decode_case([700 + s, 0, 2900 - s], 2, 48, seed=s, **LATENT),
    ),
    "mla_prefill": (mla_prefill, prefill_case),
    "moe": (moe, lambda s: moe_case(24, E=16, k=4, dim=256, F=128, seed=s, **CUDA)),
    "moe-many": (moe, lambda s: moe_case(200, E=16, k=4, dim=256, F=128, seed=s, **CUDA)),
}


@pytest.mark.parametrize("name", MAKERS)
def test_two_runs_and_replay(name: str):
    """Two runs are alike, and a graph captured on one case gives the other's bits."""
    op, make = MAKERS[name]
    cases = [make(seed) for seed in (0, 1)]
    static = {n: x.clone() if isinstance(x, Tensor) else x for n, x in cases[0].items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op(**static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = op(**static)
    pools = [n for n in static if n in POOLS]
    for case in (cases[1], cases[0]):
        for n, x in static.items():
            if isinstance(x, Tensor):
                x.copy_(case[n])
        graph.replay()
        first, second = run(op, case), run(op, case)
        replayed = (out, *(static[n] for n in POOLS if n in pools))
        for what, a, b, c in zip(("out", *pools), first, second, replayed, strict=True):
            assert_same(f"{what}, again", b, a)
            assert_same(f"{what}, replayed", c, a)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("H", [12, 16, 24, 32, 48, 64, 96])
def test_decode_heads(H: int, gates: str, nan_memory: None):
    case = drafts_case(3, 2, H=H, HV=H, gates=gates, **KDA)
    expected = truth(reference.kda_decode_ref, case)
    out, state_pool, conv_pool = run(kda_decode, case)
    assert_rms("out", out, expected[0], BOUNDS[torch.bfloat16])
    assert_rms("state", state_pool, expected[1], 1e-5)
    assert_same("windows", conv_pool.cpu(), expected[2].to(torch.bfloat16))


@pytest.mark.parametrize("M", [1, 3])
def test_decode_alone(M: int):
    case = drafts_case(7, M, H=12, HV=12, **KDA)
    out, state_pool, _ = run(kda_decode, case)
    for d in (0, 2, 6):
        rows = {n: case[n][d * M : (d + 1) * M] for n in ("qkv", "g_raw", "beta_logit", "gate")}
        rows |= {n: case[n][d : d + 1] for n in ("src_slots", "dst_slots", "num_tokens")}
        alone, alone_state, _ = run(kda_decode, case, **rows)
        assert_same(f"out {d}", alone, out[d * M : (d + 1) * M])
        slot = int(case["dst_slots"][d, 0])
        assert_same(f"state {d}", alone_state[slot], state_pool[slot])


def in_torch(ref: Callable[..., Any], case: Case) -> Tensor:
    """The reference with every step in bf16."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "_work", lambda x: x)
        return run(ref, case)[0]


@pytest.mark.parametrize("heads", [12, 32, 64, 96])
@pytest.mark.parametrize("M", [1, 4])
def test_mla_decode(heads: int, M: int, nan_memory: None):
    lens = [M, 0, 511, 1024, 3997]
    case = mla_decode_case(lens, M, heads, **LATENT)
    o = mla_decode(**case)
    expected = truth(reference.mla_decode_ref, case)[0]
    assert_close_as_torch("o", o, expected, in_torch(reference.mla_decode_ref, case))
    for d in range(len(lens)):
        mine = slice(d * M, (d + 1) * M)
        # what a row gives doesn't depend on the others
        others = {n: case[n].clone() for n in ("seq_lens", "q")}
        others["seq_lens"][(d + 1) % len(lens)] = 0
        others["q"].mul_(-2)[mine] = case["q"][mine]
        assert_same(f"among others {d}", mla_decode(**(case | others))[mine], o[mine])
        # few rows are cut into smaller parts
        alone = {n: case[n][d : d + 1] for n in ("block_table", "seq_lens")} | {
            "q": case["q"][mine]
        }
        assert_close_as_torch(
            f"alone {d}",
            mla_decode(**(case | alone)),
            expected[mine],
            in_torch(reference.mla_decode_ref, case | alone),
        )


@pytest.mark.parametrize(("K", "P", "V"), [(128, 64, 128), (256, 0, 256)], ids=["kimi", "glm"])
def test_mla_prefill(K: int, P: int, V: int, nan_memory: None):
    lengths, seq_lens = [300, 0, 5, 129, 200, 100], [300, 0, 700, 2000, 3500, 4000]
    dims = LATENT | {"P": P}
    case = mla_prefill_case(lengths, seq_lens, 3, K=K, V=V, **dims)
    o = mla_prefill(**case)
    expected = truth(reference.mla_prefill_ref, case)[0]
    assert_close_as_torch("o", o, expected, in_torch(reference.mla_prefill_ref, case))
    for n, length in enumerate(lengths):
        begin = int(case["cu_seqlens"][n])
        one = {name: case[name][n : n + 1] for name in ("block_table", "seq_lens")}
        one["cu_seqlens"] = case["cu_seqlens"][n : n + 2] - begin
        one["q"] = case["q"][begin : begin + length]
        assert_same(f"alone {n}", mla_prefill(**(case | one)), o[begin : begin + length])


def test_mla_prefill_behind_long_contexts(nan_memory: None):
    """A turn of many rows and one of few: keys expanded, and in parts."""
    dims = LATENT | {"max_blocks": 1600}
    case = mla_prefill_case([200, 100], [100_000, 90_000], 3, K=128, V=128, **dims)
    expected = truth(reference.mla_prefill_ref, case)[0]
    as_torch = in_torch(reference.mla_prefill_ref, case)
    assert_close_as_torch("o", mla_prefill(**case), expected, as_torch)


MOE_WAYS = ["fewest", "tile-16", "tile-32", "tile-64", "tile-128", "many"]


@pytest.mark.parametrize("num_shared", [0, 1, 2])
@pytest.mark.parametrize("M", [2, 16, 150, 400, 1000, 1100], ids=MOE_WAYS)
def test_moe(M: int, num_shared: int, nan_memory: None):
    case = moe_case(M, E=64, k=8, dim=512, F=256, num_shared=num_shared, **CUDA)
    y = moe(**case)
    expected = truth(reference.moe_ref, case)[0]
    # a dense product of shared experts is rounded before it is added
    dense = num_shared > 0 and M > 2
    as_torch = in_torch(reference.moe_ref, case)
    assert_close_as_torch("y", y, expected, as_torch, roundings=1 + dense)
    for m in () if dense or M == 1100 else (0, M // 2, M - 1):
        rows = {n: case[n][m : m + 1] for n in ("x", "topk_ids", "topk_weights")}
        assert_same(f"alone {m}", moe(**(case | rows)), y[m : m + 1])


@pytest.mark.parametrize("M", [1, 64, 8192])
def test_a_sum_and_its_norm(M: int, nan_memory: None):
    """Eager torch's sum, to the bit; a row has the same bits in any number of rows."""
    x, residual, weight = (torch.randn(*s).to(**CUDA) for s in ((M, 2304), (M, 2304), (2304,)))
    total, y = add_rms_norm(x, residual, weight, eps=1e-5)
    assert_same("sum", total, x + residual)
    assert_same("norm", y, rms_norm(total, weight, eps=1e-5))
    expected = reference.rms_norm_ref(total, weight, eps=1e-5)
    # the product of two numbers rounded alike, but where the roots part by an ulp of fp32
    assert (y != expected).double().mean() < 1e-3
    alone = add_rms_norm(x[-1:], residual[-1:], weight, eps=1e-5)
    assert_same("alone", alone[1], y[-1:])


@pytest.mark.parametrize("M", [1, 64, 8192])
def test_activations(M: int, nan_memory: None):
    """As in eager torch, but for an exp that parts by an ulp of fp32."""
    x = torch.randn(M, 2048).to(**CUDA)
    gate, up = x.chunk(2, dim=1)
    for name, y, expected in (
        ("silu", silu_and_mul(x), torch.nn.functional.silu(gate) * up),
        ("sigmoid", sigmoid_mul(up, gate), up * gate.sigmoid()),
    ):
        assert (y != expected).double().mean() < 1e-3, name
        assert_rms(name, y, expected, 1e-3)


def test_lengths_do_not_compile():
    from torch_kda.ops.triton import conv, latent_prefill

    def compiled() -> int:
        kernels = (conv._conv_kernel, latent_prefill._wide_kernel, latent_prefill._short_kernel)
        kernels += (latent_prefill._plan_kernel, latent_prefill._pack_kernel)
        kernels += (latent_prefill._join_kernel,)
        return sum(len(cache[0]) for k in kernels for cache in k.device_caches.values())

    def call(lengths: list[int], rows: int) -> None:
        case = conv_case(lengths, rows, 1536, **CUDA)
        causal_conv_prefill(**case)
        dims = LATENT | {"max_blocks": 16 + len(lengths)}
        case = mla_prefill_case(lengths, lengths, 4, K=128, V=128, rows=rows, **dims)
        mla_prefill(**to(case, torch.bfloat16, "cuda"))

    call([200, 30], 256)
    before = compiled()
    for lengths, rows in (([1], 1), ([160], 160), ([7] * 16, 129), ([500, 1, 2], 512)):
        call(lengths, rows)
    assert compiled() == before
