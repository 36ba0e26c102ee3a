"""The ops under torch.library's checks and torch.compile: one graph, one compilation, no copies."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch_kda.ops.activations import sigmoid_mul, silu_and_mul
from torch_kda.ops.attention import mla_decode, mla_prefill, mla_store
from torch_kda.ops.conv import causal_conv_prefill
from torch_kda.ops.kda import kda_decode, kda_prefill
from torch_kda.ops.moe import moe
from torch_kda.ops.norms import add_rms_norm, gated_rms_norm, rms_norm
from torch_kda.tests.checks import assert_rms, assert_same
from torch_kda.tests.ops.cases import POOLS, Case, decode_case, ints, prefill_case, sizes

CSR = ("checkpoint_indptr", "checkpoint_offsets", "checkpoint_slots")


def prefill(device: str, *, csr: bool) -> Case:
    case = prefill_case([20, 0, 17], **sizes(device), rows=48) | {"scale": 0.25}
    return case if csr else case | dict.fromkeys(CSR)


def conv(device: str, *, csr: bool) -> Case:
    case, dtype = prefill(device, csr=csr), sizes(device)["dtype"]
    slots = case["state_pool"].shape[0]
    tensors = {"x": torch.randn(48, 24), "weight": torch.randn(24, 4)}
    tensors["conv_pool"] = torch.randn(slots, 3, 24)
    tensors = {name: t.to(device, dtype) for name, t in tensors.items()}
    names = ("cu_seqlens", "initial_slots", "final_slots", *CSR)
    return tensors | {name: case[name] for name in names}


def decode(device: str, *, counted: bool) -> Case:
    counts = {"num_tokens": ints([2, 0, 1], device) if counted else None}
    return decode_case(3, 2, **sizes(device)) | counts | {"scale": 0.25, "eps": 1e-5}


def mla(device: str) -> Case:
    dtype = sizes(device)["dtype"]
    pool = torch.randn(6, 16, 20).to(device, dtype)
    return {
        "q": torch.randn(16, 3, 20).to(pool),
        "kv_pool": pool,
        "block_table": ints([[0, 1], [2, 3]], device),
        "seq_lens": ints([12, 30], device),
        "scale": 0.3,
    }


def cases(device: str) -> list[tuple[str, Callable[..., Any], Case]]:
    """Each op with each pattern of its optional arguments."""
    dtype = sizes(device)["dtype"]
    x, w13, w2 = (torch.randn(*s).to(device, dtype) for s in ((9, 16), (5, 48, 16), (5, 16, 24)))
    ids, weights = ints([[0, 3]] * 9, device), torch.rand(9, 2, device=device)
    pool = {name: mla(device)[name] for name in ("kv_pool", "block_table", "seq_lens", "scale")}
    latent = {"latent": torch.randn(9, 20).to(device, dtype), "kv_pool": pool["kv_pool"]}
    queries = {
        "q": torch.randn(48, 3, 12).to(device, dtype),
        "cu_seqlens": ints([0, 10, 40], device),
    }
    kv_b = {"kv_b_weight": torch.randn(3 * 14, 16).to(device, dtype), "v_head_dim": 6}
    norm = {"x": x, "gate": x.clone(), "weight": x[0].clone(), "eps": 1e-5}
    rows = {"x": x, "weight": x[0].clone(), "eps": 1e-5}
    experts = {"x": x, "w13": w13, "w2": w2, "topk_ids": ids, "topk_weights": weights}
    rank = {"kv_lora_rank": 16, "num_tokens_per_row": 8}
    return [
        ("kda_prefill-csr", kda_prefill, prefill(device, csr=True)),
        ("kda_prefill", kda_prefill, prefill(device, csr=False)),
        ("kda_decode-num_tokens", kda_decode, decode(device, counted=True)),
        ("kda_decode", kda_decode, decode(device, counted=False)),
        ("causal_conv_prefill-csr", causal_conv_prefill, conv(device, csr=True)),
        ("causal_conv_prefill", causal_conv_prefill, conv(device, csr=False)),
        ("gated_rms_norm", gated_rms_norm, norm),
        ("rms_norm", rms_norm, rows),
        ("add_rms_norm", add_rms_norm, rows | {"residual": x.flip(0)}),
        ("silu_and_mul", silu_and_mul, {"x": x}),
        ("sigmoid_mul", sigmoid_mul, {"x": x, "gate": x.flip(0)}),
        ("moe", moe, experts | {"num_shared": 0}),
        ("moe-shared", moe, experts | {"num_shared": 1}),
        ("mla_store", mla_store, latent | {"slot_mapping": ints([*range(8), -1], device)}),
        ("mla_decode", mla_decode, mla(device) | rank),
        ("mla_prefill", mla_prefill, pool | queries | kv_b),
    ]


NAMES = [name for name, _, _ in cases("cpu")]


def cloned(case: Case) -> Case:
    return {name: x.clone() if name in POOLS else x for name, x in case.items()}


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str, device: str) -> None:
    _, op, case = next(c for c in cases(device) if c[0] == name)
    overload = getattr(torch.ops.torch_kda, op.__name__).default
    # the op's own arguments, in its schema's order
    arguments = overload._schema.arguments
    args = tuple(case[a.name] for a in arguments if not a.kwarg_only)
    torch.library.opcheck(overload, args, {a.name: case[a.name] for a in arguments if a.kwarg_only})


@pytest.mark.parametrize("name", NAMES)
def test_fullgraph(name: str, device: str) -> None:
    _, op, case = next(c for c in cases(device) if c[0] == name)
    torch._dynamo.reset()
    eager, compiled = cloned(case), cloned(case)
    expected = op(**eager)
    out = torch.compile(op, fullgraph=True, backend="aot_eager")(**compiled)
    if expected is not None:
        tensors = [y if isinstance(y, tuple) else (y,) for y in (out, expected)]
        for a, b in zip(*tensors, strict=True):
            assert_same(name, a, b)
    for pool in POOLS:
        if pool in case:
            assert_same(pool, compiled[pool], eager[pool])


def token_rows(T: int, device: str) -> Tensor:
    """Hidden rows whose number is the one dynamic size of the model."""
    x = torch.randn(T, 32).to(device, sizes(device)["dtype"])
    torch._dynamo.mark_dynamic(x, 0, min=16, max=1 << 20)
    return x


class Stack(torch.nn.Module):
    """Layers of conv, recurrence and gated norm over D decode rows, then prefill rows."""

    def __init__(self, num_layers: int, device: str) -> None:
        super().__init__()
        dims = sizes(device)
        self.H, self.HV, self.K, self.V = (dims[letter] for letter in ("H", "HV", "K", "V"))
        self.C = 2 * self.H * self.K + self.HV * self.V
        gates = self.HV * (self.K + self.V) + 8  # beta in the last 8, so that rows are aligned
        layers = []
        for _ in range(num_layers):
            layer = {
                "project": torch.randn(self.C + gates, 32) / 32**0.5,
                "conv_weight": torch.randn(self.C, 4) / 2,
                "norm_weight": torch.ones(self.V),
                "back": torch.randn(32, self.HV * self.V) / (self.HV * self.V) ** 0.5,
            }
            layer = {name: w.to(device, dims["dtype"]) for name, w in layer.items()}
            layer["A_log"] = torch.zeros(self.HV, device=device)
            layer["dt_bias"] = torch.zeros(self.HV, self.K, device=device)
            parameters = {n: torch.nn.Parameter(w, requires_grad=False) for n, w in layer.items()}
            layers.append(torch.nn.ParameterDict(parameters))
        self.layers = torch.nn.ModuleList(layers)

    def forward(
        self,
        x: Tensor,
        state_pools: list[Tensor],
        conv_pools: list[Tensor],
        decode_slots: tuple[Tensor, Tensor],
        metadata: tuple[Tensor, ...],
    ) -> Tensor:
        D = decode_slots[0].shape[0]
        for layer, states, windows in zip(self.layers, state_pools, conv_pools, strict=True):
            x = x + self.mix(x, D, layer, states, windows, decode_slots, metadata)
        return x

    def mix(
        self,
        x: Tensor,
        D: int,
        layer: Any,
        states: Tensor,
        windows: Tensor,
        decode_slots: tuple[Tensor, Tensor],
        metadata: tuple[Tensor, ...],
    ) -> Tensor:
        HV, K, V = self.HV, self.K, self.V
        y = torch.nn.functional.linear(x, layer.project)
        qkv, g, gate, beta = y.split([self.C, HV * K, HV * V, 8], dim=1)
        beta = beta[:, :HV]
        g, gate = g.unflatten(1, (HV, K)), gate.unflatten(1, (HV, V))
        o = kda_decode(
            *(qkv[:D], g[:D], beta[:D], gate[:D], layer.conv_weight),
            *(layer.A_log, layer.dt_bias, layer.norm_weight, states, windows, *decode_slots),
            lower_bound=-5.0,
        )
        mixed = causal_conv_prefill(qkv[D:], layer.conv_weight, windows, *metadata)
        q, k, v = mixed.split([self.H * K, self.H * K, HV * V], dim=1)
        q, k, v = (t.unflatten(1, (-1, d)) for t, d in ((q, K), (k, K), (v, V)))
        p = kda_prefill(
            *(q, k, v, g[D:], beta[D:], layer.A_log, layer.dt_bias, states),
            *metadata,
            lower_bound=-5.0,
        )
        p = gated_rms_norm(p, gate[D:], layer.norm_weight, eps=1e-5).flatten(1)
        return torch.nn.functional.linear(torch.cat([o, p]), layer.back)


SLOTS, D = 23, 3  # 23: a size that nothing else has


def pools(stack: Stack, device: str) -> tuple[list[Tensor], list[Tensor]]:
    """Every layer starts from other contents."""
    shape = (SLOTS, stack.HV, stack.V, stack.K)
    states = [torch.randn(shape, device=device) for _ in stack.layers]
    dtype = sizes(device)["dtype"]
    return states, [torch.randn(SLOTS, 3, stack.C).to(device, dtype) for _ in stack.layers]


def step(rng: torch.Generator, T: int, device: str) -> tuple[tuple[Tensor, ...], ...]:
    """Metadata of a random step in capacities: 3 decode rows, 4 sequences, 6 checkpoints."""
    N, E = 4, 6
    num = int(torch.randint(1, N + 1, (), generator=rng))
    cuts = torch.randint(0, T + 1, (num,), generator=rng).sort().values.tolist()
    cu = [0, *cuts, *[cuts[-1]] * (N - num)]
    slots = torch.randperm(SLOTS, generator=rng).tolist()
    rows = int(torch.randint(0, D + 1, (), generator=rng))
    src = [slots.pop() if d < rows else -1 for d in range(D)]
    dst = [[slots.pop() if d < rows else -1] for d in range(D)]
    initial = [slots.pop() if n < num and n % 2 == 0 else -1 for n in range(N)]
    final = [slots.pop() if n < num else -1 for n in range(N)]
    indptr, offsets, targets = [0], [], []
    for n in range(N):
        for offset in range(16, cu[n + 1] - cu[n] + 1, 16)[:1] if n < num else ():
            offsets.append(offset)
            targets.append(slots.pop())
        indptr.append(len(offsets))
    padding = [0] * (E - len(offsets))
    metadata = [cu, initial, final, indptr, offsets + padding, targets + [-1] * len(padding)]
    to_device = lambda values: tuple(ints(v, device) for v in values)  # noqa: E731
    return to_device([src, dst]), to_device(metadata)


def test_one_compilation_for_all_batches(device: str) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    rng = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        stack = Stack(2, device)
        compiled = torch.compile(stack, fullgraph=True, backend=counter)
        states, windows = pools(stack, device)
        for i in range(30):
            T = 16 * int(torch.randint(1, 9, (), generator=rng))
            decode_slots, metadata = step(rng, T, device)
            x = token_rows(D + T, device)
            eager = [t.clone() for t in (*states, *windows)]
            expected = stack(x, eager[:2], eager[2:], decode_slots, metadata)
            out = compiled(x, states, windows, decode_slots, metadata)
            assert_same(f"out {i}", out, expected)
            for a, b in zip((*states, *windows), eager, strict=True):
                assert_same(f"pool {i}", a, b)
    assert counter.frame_count == 1


def pool_copies(code: str, pool: Tensor) -> list[str]:
    """Lines of generated code that allocate, run over or copy as much as a whole pool."""
    numel, shape = pool.numel(), re.escape(str(tuple(pool.shape)))
    allocates = rf"empty_strided\w*\({shape}|empty_strided\w*\(\({numel}"
    runs = rf"static_cast<int64_t>\({numel}L\)|<\(?{numel}L\)?;|xnumel = {numel}\b"
    copies = r"aten\.clone|\.clone\(|aten\.copy"
    lines = (line for line in code.splitlines() if not line.strip().startswith(("#", "//")))
    return [line for line in lines if re.search(f"{allocates}|{runs}|{copies}", line)]


ON_INDUCTOR = [
    pytest.param("cpu", marks=pytest.mark.inductor),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", ON_INDUCTOR)
def test_inductor_stack_keeps_its_pools_apart_and_in_place(device: str) -> None:
    torch._dynamo.reset()
    rng = torch.Generator().manual_seed(0)
    # a layer that used another's memory would be wrong by about its whole size
    bound = 1e-5 if device == "cpu" else 3e-2
    with torch.inference_mode():
        stack = Stack(3, device)
        compiled = torch.compile(stack, fullgraph=True)
        start = pools(stack, device)
        for i, T in enumerate((48, 16, 128, 32, 80)):
            decode_slots, metadata = step(rng, T, device)
            x = token_rows(D + T, device)
            eager, pooled = ([[t.clone() for t in kind] for kind in start] for _ in range(2))
            expected = stack(x, *eager, decode_slots, metadata)
            args = (x, *pooled, decode_slots, metadata)
            if i == 0:
                out, codes = run_and_get_code(compiled, *args)
                assert len(codes) == 1
                for pool in (start[0][0], start[1][0]):
                    assert pool_copies(codes[0], pool) == []
            else:
                out = compiled(*args)
            assert_rms(f"out, {T} tokens", out, expected, bound)
            for kind in range(2):
                for n in range(3):
                    name = f"pool {kind} of layer {n}, {T} tokens"
                    assert_rms(name, pooled[kind][n], eager[kind][n], bound)
                    changed = (eager[kind][n] != start[kind][n]).any()
                    assert changed, f"{name}: nothing was written, the test says nothing"


@pytest.mark.parametrize("device", ON_INDUCTOR)
def test_inductor_copy_of_a_pool_would_be_found(device: str) -> None:
    torch._dynamo.reset()
    pool = torch.randn(SLOTS, 2, 4, 8, device=device)
    copying = torch.compile(lambda x: (x + 1, x.clone()), fullgraph=True)
    _, codes = run_and_get_code(copying, pool)
    assert pool_copies(codes[0], pool)
