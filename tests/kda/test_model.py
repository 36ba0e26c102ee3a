"""The model as a function: segments, compilation, random weights, presets."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code
from torch_kda.cache.storage import Pools
from torch_kda.kda import layers, mixers
from torch_kda.kda.config import ModelConfig
from torch_kda.kda.layers import MoE
from torch_kda.kda.mixers import KDAMixer
from torch_kda.kda.model import KDAForCausalLM
from torch_kda.kda.presets import PRESETS, model_preset
from torch_kda.kda.step import StepInputs, mark_sizes
from torch_kda.ops.reference import log_decay
from torch_kda.scheduler.batch import ScheduledBatch, ScheduledRow
from torch_kda.tests.checks import assert_same
from torch_kda.tests.kda.oracle import Driver, row, tokens

SMALL = {  # any preset's shape on a CPU
    "vocab_size": 120,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "dtype": "float32",
    "linear_num_heads": 3,
    "linear_head_dim": 16,
    "num_attention_heads": 2,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "intermediate_size": 48,
    "num_experts": 6,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 24,
    "bos_token_id": 1,
    "eos_token_ids": (2,),
    "pad_token_id": 0,
}


def random_model(config: ModelConfig, seed: int = 0) -> KDAForCausalLM:
    model = KDAForCausalLM(config)
    model.random_init(seed)
    return model


def tiny(**overrides) -> KDAForCausalLM:
    return random_model(model_preset("tiny", **overrides))


# what a compilation has to see: two layers that keep states, one that attends, both kinds of MLP
SHORT = {"num_hidden_layers": 3, "mla_layers": (2,)}
GATED = {"use_mla_output_gate": True, "q_lora_rank": 32, "dtype": "bfloat16"}


def mixed_rows(driver: Driver, lengths: tuple[int, ...]) -> list[ScheduledRow]:
    """Two decode rows, made from prefills that run here, and prefills of the given lengths."""
    rows = []
    for i in range(2):
        blocks, ids = driver.blocks(24), tokens(21 + i, seed=i)
        driver.run(row(ids[:-1], 0, src=-1, dst=i, blocks=blocks))
        rows.append(row(ids[-1:], len(ids) - 1, src=i, dst=2 + i, blocks=blocks, decode=True))
    for i, length in enumerate(lengths):
        exports = ((16, 8),) if length > 16 and i == 0 else ()
        ids, blocks = tokens(length, seed=10 + i), driver.blocks(length)
        rows.append(row(ids, 0, src=-1, dst=4 + i, blocks=blocks, exports=exports))
    return rows


def run(call, inputs: StepInputs, pools: Pools) -> Tensor:
    with torch.inference_mode():
        return call(inputs, pools.state, pools.conv, pools.kv)


def copied(pools: Pools) -> Pools:
    return Pools(*([x.clone() for x in group] for group in (pools.state, pools.conv, pools.kv)))


def all_tensors(pools: Pools) -> list[Tensor]:
    return [*pools.state, *pools.conv, *pools.kv]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_run(name: str) -> None:
    """Every preset's structure, with its sizes cut down, prefills and decodes."""
    config = model_preset(name, **SMALL)
    driver = Driver(random_model(config))
    ids, blocks = tokens(30), driver.blocks(30)
    whole = driver.run_all(row(ids, 0, src=-1, dst=0, blocks=driver.blocks(30)))
    driver.run(row(ids[:20], 0, src=-1, dst=1, blocks=blocks))
    for i in range(20, 30):
        logits = driver.run(row(ids[i : i + 1], i, src=1, dst=1, blocks=blocks, decode=True))
        assert (logits[0] - whole[i]).abs().max() < 2e-5
    assert config.use_full_rank_gate == (len(driver.model.blocks[0].mixer.gates_b) == 1)


def test_preset_sizes() -> None:
    """The 48B preset has 48B weights, of which about 3B work on a token."""
    model = KDAForCausalLM(model_preset("kimi-linear-48b-a3b"), device="meta")
    experts = sum(m.w13.numel() + m.w2.numel() for m in model.modules() if isinstance(m, MoE))
    total = sum(weight.numel() for weight in model.parameters())
    assert 48e9 < total < 50e9
    assert 2.7e9 < total - experts * (1 - 8 / 256) - model.embed.numel() < 3.3e9


def test_forward_skips_empty_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(tiny())
    blocks = driver.blocks(20)
    decode_ops = ("kda_decode", "mla_decode")
    prefill_ops = ("kda_prefill", "causal_conv_prefill", "gated_rms_norm", "mla_prefill")

    def forbid(patch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
        for name in names:
            patch.setattr(mixers, name, lambda *_, **__: pytest.fail("this segment is empty"))

    with monkeypatch.context() as patch:
        forbid(patch, decode_ops)
        driver.run(row(tokens(18), 0, src=-1, dst=0, blocks=blocks))
    with monkeypatch.context() as patch:
        forbid(patch, prefill_ops)
        driver.run(row(tokens(1), 18, src=0, dst=0, blocks=blocks, decode=True), D=4)


def test_forward_writes_only_what_it_is_told() -> None:
    """Padding rows and padding tokens leave every other slot and block as it was: NaN."""
    driver = Driver(tiny())
    blocks = driver.blocks(40)
    driver.run(row(tokens(33), 0, src=-1, dst=3, blocks=blocks, exports=((16, 5),)), T=96)
    driver.run(row([7], 33, src=3, dst=9, blocks=blocks, decode=True), D=8)
    for pool in (*driver.pools.state, *driver.pools.conv):
        is_written = [not x.isnan().any() for x in pool]
        assert [i for i, written in enumerate(is_written) if written] == [3, 5, 9]
        assert all(
            x.isnan().all() for x, written in zip(pool, is_written, strict=True) if not written
        )
    for pool in driver.pools.kv:
        written = ~pool.isnan().any(-1)
        assert written.sum() == 34
        assert written[blocks[2], :2].all()


def test_forward_bf16() -> None:
    """Logits, gate parameters and router are fp32 in a bf16 model; only rounding tells it apart."""
    exact, rounded = tiny(), tiny(dtype="bfloat16")
    mixer, moe = rounded.blocks[0].mixer, rounded.blocks[1].mlp
    fp32 = (mixer.A_log, mixer.dt_bias, moe.router.weight, moe.choice_bias)
    assert {x.dtype for x in fp32} == {torch.float32}
    assert {x.dtype for x in (mixer.in_proj.weight, moe.w13, rounded.embed)} == {torch.bfloat16}
    ids = tokens(40)
    outputs = []
    for model in (exact, rounded):
        driver = Driver(model)
        outputs.append(driver.run_all(row(ids, 0, src=-1, dst=0, blocks=driver.blocks(40))))
        assert driver.pools.state[0].dtype == torch.float32
        assert driver.pools.conv[0].dtype == driver.pools.kv[0].dtype == model.embed.dtype
    assert outputs[1].dtype == torch.float32
    error = (outputs[1] - outputs[0]).square().mean().sqrt() / outputs[0].square().mean().sqrt()
    assert 1e-4 < error < 0.1


def test_parameters_need_no_grad() -> None:
    assert not any(weight.requires_grad for weight in tiny().parameters())


def test_route() -> None:
    """Bias chooses, scores weigh: against the formula, an expert at a time."""
    moe = tiny().blocks[1].mlp
    moe.choice_bias.copy_(torch.linspace(0.5, -0.5, 8))
    x = torch.randn(20, 128)
    ids, weights = moe.route(x)
    scores = 1 / (1 + torch.exp(-(x @ moe.router.weight.T)))
    for i in range(20):
        chosen = sorted(range(8), key=lambda e: -(scores[i, e] + moe.choice_bias[e]).item())[:2]
        assert sorted(ids[i].tolist()) == sorted(chosen)
        share = scores[i, ids[i]] / scores[i, chosen].sum() * 2.446
        torch.testing.assert_close(weights[i], share)
    unbiased = torch.topk(scores, 2).indices
    assert (ids.sort(-1).values != unbiased.sort(-1).values).any()  # the bias matters here


def test_random_init_is_a_function_of_the_seed() -> None:
    one, same, other = tiny(), tiny(), random_model(model_preset("tiny"), seed=1)
    for (name, a), b, c in zip(
        one.named_parameters(), same.parameters(), other.parameters(), strict=True
    ):
        assert_same(name, a, b)
        is_fixed = name.endswith(("norm.weight", "o_norm", "choice_bias"))
        assert is_fixed == torch.equal(a, c), name
    rounded = tiny(dtype="bfloat16")
    for (name, a), b in zip(one.named_parameters(), rounded.parameters(), strict=True):
        assert_same(name, a.to(b.dtype), b)


@pytest.mark.gpu
def test_random_init_same_on_gpu() -> None:
    config = model_preset("tiny", vocab_size=70000)  # more than one piece of random numbers
    on_cpu, on_gpu = random_model(config), KDAForCausalLM(config, device="cuda")
    on_gpu.random_init(0)
    for (name, a), b in zip(on_cpu.named_parameters(), on_gpu.parameters(), strict=True):
        assert_same(name, a, b.cpu())


def test_random_init_spreads() -> None:
    """Weights of the intended size, without repetition between or within them."""
    model = tiny()
    w = model.blocks[1].mlp.w13
    assert w.std().item() == pytest.approx(128**-0.5, rel=0.02)
    assert abs(w.mean().item()) < 1e-3
    assert w.abs().max() <= math.sqrt(3 / 128)
    assert w.unique().numel() > 0.99 * w.numel()
    # neighbours, rows and experts are independent
    for a, b in ((w[..., 1:], w[..., :-1]), (w[:, 1:], w[:, :-1]), (w[1:], w[:-1])):
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.02


@pytest.mark.parametrize("lower_bound", [None, -5.0, -1.0])
def test_random_init_gates(lower_bound: float | None) -> None:
    """Decays at rest reach from long memory to short, in each layer."""
    for module in tiny(gate_lower_bound=lower_bound).modules():
        if isinstance(module, KDAMixer):
            at_rest = torch.zeros(1, 4, 32)
            g = log_decay(at_rest, module.A_log, module.dt_bias, lower_bound)
            low, middle, high = (-g).quantile(torch.tensor([0.02, 0.5, 0.98])).tolist()
            assert 1e-3 < low < 0.03 < middle < 0.3 < high < 1.6


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_random_init_greedy_varies(lower_bound: float | None) -> None:
    driver = Driver(tiny(gate_lower_bound=lower_bound))
    ids = list(b"The state after exactly p tokens.")
    blocks, out = driver.blocks(80), []
    logits = driver.run(row(ids, 0, src=-1, dst=0, blocks=blocks))
    for i in range(24):
        out.append(int(logits[0].argmax()))
        logits = driver.run(row(out[-1:], len(ids) + i, src=0, dst=0, blocks=blocks, decode=True))
    assert len(set(out)) >= 8


@pytest.mark.parametrize("D,T", [(4, 0), (0, 48), (4, 48)])
def test_compile_fullgraph(D: int, T: int) -> None:
    """No graph break in any form of a step; the traced graph computes the same bits."""
    torch._dynamo.reset()
    driver = Driver(tiny(**SHORT))
    rows = mixed_rows(driver, (30, 17))
    batch = ScheduledBatch.of(0, tuple(r for r in rows if (D if r.is_decode else T)))
    inputs = driver.load(batch, D, T)
    eager, traced = copied(driver.pools), copied(driver.pools)
    expected = run(driver.model, inputs, eager)
    compiled = torch.compile(driver.model, fullgraph=True, backend="eager")
    assert_same("logits", run(compiled, inputs, traced), expected)
    for a, b in zip(all_tensors(traced), all_tensors(eager), strict=True):
        assert_same("pool", a, b)


@pytest.mark.inductor
def test_compile_inductor() -> None:
    """One compilation serves every T; all bits are eager's, and no pool is copied."""
    torch._dynamo.reset()
    driver = Driver(tiny(**SHORT, **GATED), num_slots=11, num_blocks=61)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(driver.model, fullgraph=True, backend=counter)
    source = ""
    for lengths in ((30, 17), (5,), (16, 1, 64), (100,), (48, 48)):
        driver.num_blocks_used = 0
        rows = mixed_rows(driver, lengths)
        for i, pool in enumerate(driver.pools.state):
            # another content in each layer, so that taking one layer's memory for another shows
            pool[0] += 0.1 * (i + 1)
        inputs = driver.load(ScheduledBatch.of(0, tuple(rows)))
        mark_sizes(inputs)
        eager, lowered = copied(driver.pools), copied(driver.pools)
        expected = run(driver.model, inputs, eager)
        if source:
            logits = run(compiled, inputs, lowered)
        else:
            # it resets the compiler, so only once
            logits, (source,) = run_and_get_code(run, compiled, inputs, lowered)
        assert_same("logits", logits, expected)
        for a, b in zip(all_tensors(lowered), all_tensors(eager), strict=True):
            assert_same("pool", a, b)
    assert counter.frame_count == 1
    assert "addmm" not in source, "a sum is merged into a product: one rounding in the place of two"
    assert "torch_kda.kda_prefill" in source and "empty_strided_cpu((" in source
    for pool in (driver.pools.state[0], driver.pools.conv[0], driver.pools.kv[0]):
        shape = ", ".join(map(str, pool.shape))
        assert f"empty_strided_cpu(({shape})" not in source, f"a pool of [{shape}] is copied"


def relative_rms(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).square().mean().sqrt() / expected.square().mean().sqrt())


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_forward_on_gpu(seed: int) -> None:
    """In bf16 our kernels are as near to fp32 as torch's ops are, in both segments of a step.

    A row takes all experts: a choice near a tie falls otherwise in bf16, whoever computes it, and
    then no error says anything.
    """
    sizes = {"linear_head_dim": 128, "hidden_size": 256, "kv_lora_rank": 512}
    config = model_preset("tiny", **sizes, num_experts_per_token=8, dtype="bfloat16")
    exact = Driver(random_model(replace(config, dtype="float32"), seed))
    rows = mixed_rows(exact, (30, 17))
    inputs = exact.load(ScheduledBatch.of(0, tuple(rows)))

    def in_bf16(device: str) -> Tensor:
        model = KDAForCausalLM(config, device=device)
        model.random_init(seed)
        pools = Pools(
            [x.to(device, copy=True) for x in exact.pools.state],
            [x.to(device, torch.bfloat16) for x in exact.pools.conv],
            [x.to(device, torch.bfloat16) for x in exact.pools.kv],
        )
        there = StepInputs(*(x.to(device) for x in inputs))
        return run(model, there, pools)[: len(rows)].cpu()

    by_kernels, by_torch = in_bf16("cuda"), in_bf16("cpu")
    expected = run(exact.model, inputs, exact.pools)[: len(rows)]
    error, allowed = relative_rms(by_kernels, expected), 2 * relative_rms(by_torch, expected)
    assert error <= allowed < 0.1, f"{error:.2e}, twice torch's: {allowed:.2e}"


@pytest.mark.parametrize(("D", "T"), [(6, 0), (0, 96), (6, 96)])
def test_padding_wakes_no_expert(monkeypatch: pytest.MonkeyPatch, D: int, T: int) -> None:
    """Only rows of requests choose experts; a decode row costs no more in a padded step."""
    driver = Driver(tiny())
    rows = mixed_rows(driver, (30, 17))
    batch = ScheduledBatch.of(0, tuple(r for r in rows if (D if r.is_decode else T)))
    chosen = []
    call = layers.moe
    monkeypatch.setattr(
        layers, "moe", lambda *a, **kw: chosen.append((a[3] >= 0).all(-1)) or call(*a, **kw)
    )
    inputs = driver.load(batch, D, T)
    run(driver.model, inputs, driver.pools)
    expected = ([True, True] + [False] * 4 if D else []) + ([True] * 47 + [False] * 49 if T else [])
    assert len(chosen) == 3 and all(ids.tolist() == expected for ids in chosen)
