"""Each ValueError of each op names the function, the argument, what it must be, what came."""

import inspect
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch_kda.ops import kda
from torch_kda.ops.activations import sigmoid_mul, silu_and_mul
from torch_kda.ops.attention import mla_decode, mla_prefill, mla_store
from torch_kda.ops.conv import causal_conv_prefill
from torch_kda.ops.kda import kda_decode, kda_prefill
from torch_kda.ops.moe import moe, moe_route
from torch_kda.ops.norms import add_rms_norm, gated_rms_norm, rms_norm
from torch_kda.tests.ops.cases import Case, decode_case, ints, prefill_case, sizes

OPS: dict[str, Callable[..., Any]] = {
    "kda_prefill": kda_prefill,
    "kda_decode": kda_decode,
    "causal_conv_prefill": causal_conv_prefill,
    "gated_rms_norm": gated_rms_norm,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "silu_and_mul": silu_and_mul,
    "sigmoid_mul": sigmoid_mul,
    "moe": moe,
    "moe_route": moe_route,
    "mla_store": mla_store,
    "mla_decode": mla_decode,
    "mla_prefill": mla_prefill,
}


def good(op: str) -> Case:
    """Arguments that the op takes."""
    prefill = prefill_case([36, 12], **sizes("cpu"), rows=48)
    if op == "kda_prefill":
        return prefill | {"scale": None}
    if op == "kda_decode":
        return decode_case(3, 2, **sizes("cpu")) | {"num_tokens": ints([2, 2, 1])}
    if op == "causal_conv_prefill":
        names = ("cu_seqlens", "initial_slots", "final_slots")
        csr = ("checkpoint_indptr", "checkpoint_offsets", "checkpoint_slots")
        tensors = {"x": torch.randn(48, 10), "weight": torch.randn(10, 4)}
        tensors["conv_pool"] = torch.randn(9, 3, 10)
        return tensors | {name: prefill[name] for name in names + csr}
    return {
        "gated_rms_norm": {
            "x": torch.randn(4, 8),
            "gate": torch.randn(4, 8),
            "weight": torch.randn(8),
            "eps": 1e-5,
        },
        "rms_norm": {"x": torch.randn(4, 8), "weight": torch.randn(8), "eps": 1e-5},
        "add_rms_norm": {
            "x": torch.randn(4, 8),
            "residual": torch.randn(4, 8),
            "weight": torch.randn(8),
            "eps": 1e-5,
        },
        "silu_and_mul": {"x": torch.randn(4, 8)},
        "sigmoid_mul": {"x": torch.randn(4, 8), "gate": torch.randn(4, 8)},
        "moe": {
            "x": torch.randn(4, 8),
            "w13": torch.randn(3, 12, 8),
            "w2": torch.randn(3, 8, 6),
            "topk_ids": ints([[0, 1]] * 4),
            "topk_weights": torch.rand(4, 2),
            "num_shared": 1,
        },
        "moe_route": {
            "x": torch.randn(4, 8),
            "weight": torch.randn(3, 8),
            "choice_bias": torch.randn(3),
            "num_choices": 2,
            "renormalize": True,
            "scaling_factor": 2.0,
            "is_real": torch.ones(4, dtype=torch.bool),
        },
        "mla_store": {
            "latent": torch.randn(4, 6),
            "kv_pool": torch.randn(3, 16, 6),
            "slot_mapping": ints([0, 1, 2, 3]),
        },
        "mla_decode": {
            "q": torch.randn(4, 2, 6),
            "kv_pool": torch.randn(3, 16, 6),
            "block_table": ints([[0, 2], [1, 2]]),
            "seq_lens": ints([3, 4]),
            "scale": 1.0,
            "kv_lora_rank": 4,
            "num_tokens_per_row": 2,
        },
        "mla_prefill": {
            "q": torch.randn(4, 2, 5),
            "kv_pool": torch.randn(3, 16, 6),
            "kv_b_weight": torch.randn(2 * (3 + 7), 4),
            "cu_seqlens": ints([0, 3, 4]),
            "block_table": ints([[0, 2], [1, 2]]),
            "seq_lens": ints([3, 4]),
            "scale": 1.0,
            "v_head_dim": 7,
        },
    }[op]


@pytest.mark.parametrize("op", OPS)
def test_good_arguments_pass(op: str) -> None:
    OPS[op](**good(op))


def tensor_arguments() -> list[tuple[str, str]]:
    cases = {op: good(op) for op in OPS}
    return [(op, n) for op, case in cases.items() for n, x in case.items() if isinstance(x, Tensor)]


def refuses(op: str, case: Case, message: str) -> None:
    pools = {
        n: x.clone()
        for n, x in case.items()
        if n.endswith("_pool") and isinstance(x, Tensor) and not x.is_meta
    }
    with pytest.raises(ValueError, match=f"^{op}: {message}"):
        OPS[op](**case)
    assert all(torch.equal(case[n], x) for n, x in pools.items())


NO_TENSORS = {"None": None, "list": [1.0], "ndarray": np.zeros(3, np.float32)}
# None is their default, and the checkpoints come together or not at all
OPTIONAL = {"num_tokens", "is_real"} | {f"checkpoint_{x}" for x in ("indptr", "offsets", "slots")}


def no_tensors() -> list[tuple[str, str, str]]:
    cases = [(*argument, kind) for argument in tensor_arguments() for kind in NO_TENSORS]
    return [case for case in cases if case[2] != "None" or case[1] not in OPTIONAL]


@pytest.mark.parametrize(("op", "name", "kind"), no_tensors())
def test_no_tensor(op: str, name: str, kind: str) -> None:
    got = type(NO_TENSORS[kind]).__name__
    refuses(op, good(op) | {name: NO_TENSORS[kind]}, f"{name} must be a Tensor, got {got}$")


@pytest.mark.parametrize(
    "error", [ValueError, TypeError, AttributeError, IndexError, OverflowError]
)
def test_no_tensor_in_the_compiled_call(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA the checks come when the compiled call has refused, in whatever way."""

    def refusing(*_: object, **__: object) -> None:
        raise error("not our words")

    monkeypatch.setattr(kda, "_cuda", lambda: SimpleNamespace(kda_prefill=refusing))
    case = good("kda_prefill")
    numbers = {name: case.pop(name) for name in ("lower_bound", "scale")}
    names = [name for name in inspect.signature(kda_prefill).parameters if name in case]
    tensors: list[Any] = [case[name] for name in names]
    with pytest.raises(error, match="not our words"):
        kda._kda_prefill_cuda(*tensors, **numbers)
    for scale, got in ((math.nan, "nan"), (10**400, "an integer of 1329 bits")):
        message = f"^kda_prefill: scale must be a finite number, got {got}$"
        with pytest.raises(ValueError, match=message):
            kda._kda_prefill_cuda(*tensors, **(numbers | {"scale": scale}))
    tensors[2] = None
    with pytest.raises(ValueError, match="^kda_prefill: v must be a Tensor, got NoneType$"):
        kda._kda_prefill_cuda(*tensors, **numbers)


def brief(value: object) -> str:
    return str(value)[:6]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "kind"), [case[1:] for case in no_tensors() if case[0] == "kda_prefill"]
)
def test_no_tensor_on_cuda(name: str, kind: str) -> None:
    case = prefill_case([36, 12], **sizes("cuda"), rows=48) | {name: NO_TENSORS[kind]}
    refuses("kda_prefill", case, f"{name} must be a Tensor, got ")


@pytest.mark.gpu
@pytest.mark.parametrize("value", ["-1", math.nan, math.inf, [1.0], -(10**400)], ids=brief)
@pytest.mark.parametrize("name", ["lower_bound", "scale"])
def test_no_number_on_cuda(name: str, value: Any) -> None:
    case = prefill_case([36, 12], **sizes("cuda"), rows=48) | {name: value}
    refuses("kda_prefill", case, f"{name} must be ")


@pytest.mark.parametrize(
    ("op", "name", "expected"),
    [
        *((op, "lower_bound", r"in \[-5, 0\) or None") for op in ("kda_prefill", "kda_decode")),
        *((op, "scale", "a finite number") for op in OPS if "scale" in good(op)),
        *((op, "eps", "> 0") for op in OPS if "eps" in good(op)),
        ("moe_route", "scaling_factor", "a finite number"),
    ],
)
@pytest.mark.parametrize(
    ("value", "got"),
    [
        *(("-1", "str"), (math.nan, "nan"), (-math.inf, "-inf"), ([1.0], "list")),
        # integers that no float holds, the second too long for str()
        *((-(10**400), "an integer of 1329 bits"), (10**5000, "an integer of 16610 bits")),
    ],
    ids=["str", "nan", "-inf", "list", "large", "huge"],
)
def test_no_number(op: str, name: str, expected: str, value: Any, got: str) -> None:
    refuses(op, good(op) | {name: value}, f"{name} must be {expected}, got {got}$")


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("moe", "num_shared"),
        ("moe_route", "num_choices"),
        ("mla_decode", "kv_lora_rank"),
        ("mla_decode", "num_tokens_per_row"),
        ("mla_prefill", "v_head_dim"),
    ],
)
@pytest.mark.parametrize(
    ("value", "got"), [("2", "str"), (2.5, "2.5"), (None, "None")], ids=["str", "float", "None"]
)
def test_no_count(op: str, name: str, value: Any, got: str) -> None:
    refuses(op, good(op) | {name: value}, f"{name} must be an integer, got {got}$")


@pytest.mark.parametrize(
    ("op", "name"),
    [
        ("kda_prefill", "state_pool"),
        ("kda_decode", "state_pool"),
        ("kda_decode", "conv_pool"),
        ("causal_conv_prefill", "conv_pool"),
    ],
)
def test_slots_that_overlap(op: str, name: str) -> None:
    case = good(op)
    slots, *rest = case[name].shape
    size = math.prod(rest)
    inner = case[name].stride()[1:]
    message = f"{name} must be slots that do not overlap, {size} or more elements apart, got a slot"
    for stride in (0, size - 1):
        overlapping = case[name].flatten().as_strided((slots, *rest), (stride, *inner))
        refuses(op, case | {name: overlapping}, f"{message} stride of {stride}$")
    spread = case[name].new_zeros(slots * (size + 3)).as_strided((slots, *rest), (size + 3, *inner))
    OPS[op](**(case | {name: spread}))


@pytest.mark.parametrize(("op", "name"), tensor_arguments())
def test_wrong_rank(op: str, name: str) -> None:
    case = good(op)
    # a norm takes any number of dims, but not none
    case[name] = case[name].sum() if (op, name) == ("gated_rms_norm", "x") else case[name][None]
    refuses(op, case, rf"{name} must be .*, got ")


@pytest.mark.parametrize(("op", "name"), tensor_arguments())
def test_wrong_dtype(op: str, name: str) -> None:
    case = good(op)
    wrong = torch.float16 if case[name].is_floating_point() else torch.int16
    case[name] = case[name].to(wrong)
    refuses(op, case, f"{name} must be .*(u?int|float)16")


# a size is bound by the first tensor that has it, so a wrong one there is found at the next
FOUND_AT = {
    ("kda_prefill", "q"): "k",
    ("kda_prefill", "v"): "state_pool",
    ("kda_prefill", "initial_slots"): "final_slots",
    ("kda_prefill", "checkpoint_offsets"): "checkpoint_slots",
    ("kda_decode", "qkv"): "conv_weight",
    ("kda_decode", "dst_slots"): "qkv",
    ("kda_decode", "src_slots"): "src_slots",
    ("kda_decode", "state_pool"): "g_raw",
    ("causal_conv_prefill", "x"): "weight",
    ("causal_conv_prefill", "initial_slots"): "final_slots",
    ("causal_conv_prefill", "checkpoint_offsets"): "checkpoint_slots",
    ("gated_rms_norm", "x"): "gate",
    ("rms_norm", "x"): "weight",
    ("add_rms_norm", "x"): "residual",
    ("sigmoid_mul", "x"): "gate",
    ("moe", "x"): "w2",
    ("moe", "w2"): "w13",
    ("moe", "topk_ids"): "topk_weights",
    ("moe_route", "x"): "weight",
    ("mla_store", "latent"): "kv_pool",
    ("mla_decode", "q"): "kv_pool",
    ("mla_decode", "seq_lens"): "q",
    ("mla_prefill", "q"): "kv_b_weight",
    ("mla_prefill", "kv_pool"): "kv_b_weight",
    ("mla_prefill", "seq_lens"): "cu_seqlens",
}


@pytest.mark.parametrize(("op", "name"), tensor_arguments())
def test_wrong_size(op: str, name: str) -> None:
    case = good(op)
    if name == "block_table":
        case[name] = case[name][:1]  # how many blocks a row has is free
    else:
        case[name] = case[name][..., :-1].contiguous()
    refuses(op, case, rf"{FOUND_AT.get((op, name), name)} must be .*, got \[")


@pytest.mark.parametrize(("op", "name"), tensor_arguments())
def test_wrong_stride(op: str, name: str) -> None:
    case = good(op)
    # every second element of a wider tensor: right shape, wrong last stride
    wider = case[name].repeat_interleave(2, dim=-1)
    case[name] = wider[..., ::2]
    refuses(op, case, rf"{name} must have its last \d dims contiguous, got strides")


@pytest.mark.parametrize(("op", "name"), tensor_arguments())
def test_wrong_device(op: str, name: str) -> None:
    case = good(op)
    case[name] = case[name].to("meta")
    # the first tensor says where the others must be
    first = next(n for n, x in case.items() if isinstance(x, Tensor))
    expected = "cpu or cuda, got meta" if name == first else f"cpu, where {first} is, got meta"
    refuses(op, case, f"{name} must be on {expected}")


@pytest.mark.parametrize(
    ("op", "changes", "message"),
    [
        (
            "kda_prefill",
            {"lower_bound": -5.1},
            r"lower_bound must be in \[-5, 0\) or None, got -5.1",
        ),
        ("kda_prefill", {"lower_bound": 0.0}, "lower_bound must be"),
        ("kda_prefill", {"checkpoint_slots": None}, "checkpoint_indptr, .* must be given together"),
        ("kda_decode", {"lower_bound": 1.0}, "lower_bound must be"),
        ("causal_conv_prefill", {"checkpoint_indptr": None}, "checkpoint_indptr, .* together"),
        ("gated_rms_norm", {"eps": 0.0}, "eps must be > 0, got 0.0"),
        ("rms_norm", {"eps": 0.0}, "eps must be > 0, got 0.0"),
        ("add_rms_norm", {"eps": -1e-5}, "eps must be > 0, got -1e-05"),
        ("add_rms_norm", {"residual": torch.randn(3, 8)}, r"residual must be \[M=4, dim=8\]"),
        ("moe", {"num_shared": -1}, r"num_shared must be in 0\.\.2 .*, got -1"),
        ("moe", {"num_shared": 3}, r"num_shared must be in 0\.\.2 .*, got 3"),
        (
            "moe",
            {
                "x": torch.randn(1, 8),
                "topk_ids": torch.zeros(1, 0).int(),
                "topk_weights": torch.zeros(1, 0),
            },
            r"num_shared must be in .*\(0 without choices\), got 1",
        ),
        ("moe_route", {"num_choices": 0}, r"num_choices must be in 1\.\.E=3, got 0"),
        ("moe_route", {"num_choices": 4}, r"num_choices must be in 1\.\.E=3, got 4"),
        (
            "kda_prefill",
            {name: torch.randn(48, 0, 8) for name in ("q", "k")},
            r"q must be \[T, H, K\] with H >= 1, got \[48, 0, 8\]",
        ),
        ("mla_decode", {"kv_lora_rank": 7}, r"kv_lora_rank must be in 1\.\.W=6, got 7"),
        ("mla_decode", {"kv_lora_rank": 0}, "kv_lora_rank must be"),
        ("mla_decode", {"num_tokens_per_row": 0}, "num_tokens_per_row must be >= 1, got 0"),
        ("mla_prefill", {"v_head_dim": 6}, r"kv_b_weight must be \[Hq\*\(N_k\+Vh\)=18, R\]"),
        ("mla_prefill", {"kv_b_weight": torch.randn(20, 7)}, r"kv_b_weight must be .*got R=7"),
        ("mla_prefill", {"q": torch.randn(4, 2, 1)}, r"q must be \[T, Hq, N_k \+ P=2\], got"),
    ],
)
def test_wrong_value(op: str, changes: Case, message: str) -> None:
    refuses(op, good(op) | changes, message)


# with the number of their tokens, T
PACKED = {"kda_prefill": 48, "causal_conv_prefill": 48, "mla_prefill": 4}
WRONG_STARTS = {
    "late": ([1, 3, 4], "cu_seqlens[0] = 1"),
    "negative": ([-2, 3, 4], "cu_seqlens[0] = -2"),
    "back": ([0, 3, 2], "cu_seqlens[2] = 2 after 3"),
    "below 0": ([0, -1, 4], "cu_seqlens[1] = -1 after 0"),
    "beyond": ([0, 3, 99], "cu_seqlens[2] = 99 after 3"),
}


def packed(op: str, cu_seqlens: list[int]) -> Case:
    return good(op) | {"cu_seqlens": ints(cu_seqlens)}


@pytest.mark.parametrize(("cu_seqlens", "got"), WRONG_STARTS.values(), ids=WRONG_STARTS)
@pytest.mark.parametrize("op", PACKED)
def test_wrong_cu_seqlens(op: str, cu_seqlens: list[int], got: str) -> None:
    """On a CPU the values are at hand."""
    expected = "0 first, then never less than the one before or more than "
    message = f"cu_seqlens must be {expected}{PACKED[op]}, got {got}"
    refuses(op, packed(op, cu_seqlens), re.escape(message))


@pytest.mark.parametrize("op", ["kda_prefill", "causal_conv_prefill"])
@pytest.mark.parametrize(
    ("indptr", "got"),
    [
        ([1, 1, 2], "checkpoint_indptr[0] = 1"),
        ([0, 2, 1], "checkpoint_indptr[2] = 1 after 2"),
        ([0, 1, 9], "checkpoint_indptr[2] = 9 after 1"),
    ],
    ids=str,
)
def test_wrong_checkpoint_indptr(op: str, indptr: list[int], got: str) -> None:
    csr = {"checkpoint_offsets": ints([16, 16]), "checkpoint_slots": ints([-1, -1])}
    case = good(op) | csr | {"checkpoint_indptr": ints(indptr)}
    expected = "checkpoint_indptr must be 0 first, then never less than the one before or more"
    refuses(op, case, re.escape(f"{expected} than 2, got {got}"))


@pytest.mark.parametrize(
    "cu_seqlens", [[0, 3, 3], [0, 0, 3], [0, 0, 0], [0, 1, 4]], ids=lambda value: str(value)
)
@pytest.mark.parametrize("op", PACKED)
def test_cu_seqlens_with_padding(op: str, cu_seqlens: list[int]) -> None:
    """Empty sequences, and rows of no sequence."""
    OPS[op](**packed(op, cu_seqlens))


@pytest.mark.parametrize("op", PACKED)
def test_wrong_cu_seqlens_in_a_graph(op: str) -> None:
    """Tracing has no values to look at; a run of the compiled graph has."""
    run = torch.compile(OPS[op], backend="aot_eager", fullgraph=True)
    run(**packed(op, [0, 3, 4]))
    case = packed(op, [0, 3, 2])
    pools = {name: x.clone() for name, x in case.items() if name.endswith("_pool")}
    with pytest.raises(ValueError, match=f"^{op}: cu_seqlens must be "):
        run(**case)
    assert all(torch.equal(case[name], x) for name, x in pools.items())


@pytest.mark.parametrize("op", PACKED)
def test_cu_seqlens_of_a_fake_tensor(op: str) -> None:
    mode, case = FakeTensorMode(), packed(op, [0, 3, 2])
    fakes = {n: mode.from_tensor(x) if isinstance(x, Tensor) else x for n, x in case.items()}
    with mode:
        out = OPS[op](**fakes)
    assert isinstance(out, FakeTensor)


# of 2 sequences, with 2 blocks of 16 tokens each and 3 in the pool
WRONG_CACHED = {
    "rows": ("mla_prefill", "seq_lens", [2, 4], ">= the 3 rows here and <= .* = 32", "[0] = 2"),
    "negative": ("mla_prefill", "seq_lens", [3, -1], ">= the 1 rows here .*", "[1] = -1"),
    "full": ("mla_prefill", "seq_lens", [3, 33], ".* <= max_blocks .* = 32", "[1] = 33"),
    "most": ("mla_prefill", "seq_lens", [2**31 - 1, 4], ".* = 32", "[0] = 2147483647"),
    "block": (
        "mla_prefill",
        "block_table",
        [[0, 2], [3, 2]],
        "in .*=3.* first 4 tokens",
        "[1, 0] = 3",
    ),
    "block -1": (
        "mla_prefill",
        "block_table",
        [[-1, 2], [1, 2]],
        "in .*=3.* first 3 tokens",
        "[0, 0] = -1",
    ),
    "M": ("mla_decode", "seq_lens", [3, 1], "0 or >= the 2 rows here and <= .* = 32", "[1] = 1"),
    "M negative": ("mla_decode", "seq_lens", [-1, 4], "0 or >= the 2 rows here .*", "[0] = -1"),
    "M full": ("mla_decode", "seq_lens", [33, 4], ".* <= max_blocks .* = 32", "[0] = 33"),
    "M block": (
        "mla_decode",
        "block_table",
        [[99, 2], [1, 2]],
        "in .*=3.* first 3 tokens",
        "[0, 0] = 99",
    ),
}


@pytest.mark.parametrize(
    ("op", "name", "values", "expected", "got"), WRONG_CACHED.values(), ids=WRONG_CACHED
)
def test_wrong_cached(op: str, name: str, values: list[Any], expected: str, got: str) -> None:
    """Where the tokens of a sequence lie: on a CPU the values are at hand."""
    message = rf"{name} must be {expected}, got {re.escape(name + got)}$"
    refuses(op, good(op) | {name: ints(values)}, message)


@pytest.mark.parametrize("op", ["mla_prefill", "mla_decode"])
def test_wrong_cached_late(op: str) -> None:
    """The second block is looked up from 17 tokens on, and none of an empty pool."""
    case = good(op) | {"block_table": ints([[0, 1], [1, 3]]), "seq_lens": ints([17, 16])}
    OPS[op](**case)
    message = r"block_table must be in \[0, num_blocks=3\) for the first 17 tokens, got "
    message += r"block_table\[1, 1\] = 3$"
    refuses(op, case | {"seq_lens": ints([17, 17])}, message)
    message = r"block_table must be in \[0, num_blocks=0\) .*, got block_table\[0, 0\] = 0$"
    refuses(op, good(op) | {"kv_pool": torch.randn(0, 16, 6)}, message)
    no_blocks = {"block_table": torch.zeros(2, 0).int()}
    message = "seq_lens must be .* and <= .* = 0, got "
    refuses(op, good(op) | no_blocks, message + r"seq_lens\[0\] = 3$")


@pytest.mark.parametrize("op", ["mla_prefill", "mla_decode"])
def test_cached_that_is_not_looked_up(op: str) -> None:
    """Blocks past a sequence's tokens may be anything, and all those of one without rows."""
    case = good(op) | {"block_table": ints([[0, 2**30], [2**30, -5]]), "seq_lens": ints([16, 0])}
    if op == "mla_prefill":
        case["cu_seqlens"] = ints([0, 3, 3])
        expected = OPS[op](**case)
        for length in (5, 33):
            assert torch.equal(OPS[op](**(case | {"seq_lens": ints([16, length])})), expected)
        message = r"seq_lens must be >= the 0 rows here, got seq_lens\[1\] = -1$"
        refuses(op, case | {"seq_lens": ints([16, -1])}, message)
    assert OPS[op](**case).isfinite().all()
    full = {"block_table": ints([[0, 2], [1, 2]]), "seq_lens": ints([32, 32])}
    assert OPS[op](**(case | full)).isfinite().all()
    nobody = {"kv_pool": torch.randn(0, 16, 6), "seq_lens": ints([0, 0])}
    nobody |= {"cu_seqlens": ints([0, 0, 0])} if op == "mla_prefill" else {}
    assert not OPS[op](**(case | nobody)).any()


@pytest.mark.parametrize("op", ["mla_prefill", "mla_decode"])
def test_wrong_cached_in_a_graph(op: str) -> None:
    run = torch.compile(OPS[op], backend="aot_eager", fullgraph=True)
    run(**good(op))
    with pytest.raises(ValueError, match=f"^{op}: block_table must be .*= 99$"):
        run(**good(op) | {"block_table": ints([[99, 2], [1, 2]])})


def test_kda_heads_must_divide() -> None:
    case = good("kda_prefill")
    case["q"] = case["k"] = torch.randn(48, 3, 8)
    refuses("kda_prefill", case, "v must be of HV % H=3 == 0, got 4")
    case = good("kda_decode")
    case["qkv"] = torch.randn(6, 2 * 3 * 8 + 4 * 12)
    case["conv_weight"], case["conv_pool"] = torch.randn(96, 4), torch.randn(11, 3, 96)
    refuses("kda_decode", case, r"qkv must be \[D\*M, 2\*H\*K \+ HV\*V\] .*got C=96")


@pytest.mark.parametrize("row_stride", [True, False], ids=["stride", "offset"])
def test_kda_prefill_alignment_on_cuda(row_stride: bool) -> None:
    # the check itself runs anywhere; only CUDA calls it
    from torch_kda.ops.kda_checks import _check_aligned

    _check_aligned("kda_prefill", "q", torch.zeros(4, 16)[:, 8:], 8)
    x = torch.zeros(4, 17)[:, :16] if row_stride else torch.zeros(4, 24)[:, 4:20]
    with pytest.raises(
        ValueError, match="q must be 16-byte aligned in each row .*, got row stride"
    ):
        _check_aligned("kda_prefill", "q", x, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["K64", "fp32"])
@pytest.mark.parametrize("op", ["kda_prefill", "kda_decode"])
def test_cuda_contract(op: str, dtype: torch.dtype) -> None:
    dims = sizes("cuda") | {"dtype": dtype}
    if dtype == torch.bfloat16:
        dims |= {"K": 64, "V": 64}
    case = prefill_case([20], **dims) if op == "kda_prefill" else decode_case(2, 1, **dims)
    with pytest.raises(
        NotImplementedError, match=f"{op}: on CUDA K = V = 128 in bfloat16 is built"
    ):
        OPS[op](**case)
