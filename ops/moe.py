"""A mixture-of-experts layer: the choice of experts for each row, and the experts."""

import torch
from torch import Tensor

from . import reference
from .library import (
    FLOATS,
    check_count,
    check_device,
    check_inner,
    check_number,
    check_tensor,
    define_op,
    is_traced,
    require,
)


def moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    *,
    num_shared: int = 0,
) -> Tensor:
    """SwiGLU experts, each on the rows that chose it, summed by weight, and shared ones.

        gate|up = w13[e] x,  f(e) = w2[e] (SiLU(gate) * up)
        y = sum_k topk_weights[:, k] * f(topk_ids[:, k]) + sum_s f(E + s)

    M rows, dim channels, E experts of F hidden channels, k choices a row, S shared experts. An id
    outside [0, E) adds nothing, and if it is a row's first, the shared experts are left out of that
    row; its other ids add what they do in any row. So the y of padding, with no id inside, is 0.

    Args:
        x: [M, dim] bf16, fp32 or float64, contiguous.
        w13: [E+S, 2*F, dim] of the same dtype, contiguous; gate rows, then up rows.
        w2: [E+S, dim, F] of the same dtype, contiguous.
        topk_ids: [M, k] int32 or int64. May be outside [0, E).
        topk_weights: [M, k] fp32.
        num_shared: S, below the number of experts; with k >= 1 if there are any.

    On CUDA in bf16, dim and F are multiples of 8.

    Returns:
        y: [M, dim] of x's dtype.

    Raises:
        ValueError: a shape, dtype, stride or device is not as above.

    Reference: `ops.reference.moe_ref`.
    """
    if not is_traced():
        _check(x, w13, w2, topk_ids, topk_weights, num_shared)
    return _moe(x, w13, w2, topk_ids, topk_weights, num_shared=num_shared)


def _check(
    x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, topk_weights: Tensor, num_shared: int
) -> None:
    op, dims = "moe", {}
    check_tensor(op, "x", x, "M dim", FLOATS, dims)
    check_tensor(op, "w2", w2, "E+S dim F", x.dtype, dims)
    dims["2*F"] = 2 * dims["F"]
    check_tensor(op, "w13", w13, "E+S 2*F dim", x.dtype, dims)
    check_tensor(op, "topk_ids", topk_ids, "M k", (torch.int32, torch.int64), dims)
    check_tensor(op, "topk_weights", topk_weights, "M k", torch.float32, dims)
    tensors = {"x": x, "w13": w13, "w2": w2, "topk_ids": topk_ids, "topk_weights": topk_weights}
    for name, tensor in tensors.items():
        check_inner(op, name, tensor, tensor.ndim)
    check_device(op, tensors)
    check_count(op, "num_shared", num_shared)
    expected = f"in 0..{max(dims['E+S'] - 1, 0)} (0 without choices)"
    right = num_shared >= 0 and (num_shared < dims["E+S"] and dims["k"] > 0 or num_shared == 0)
    require(right, op, "num_shared", expected, num_shared)
    if _is_grouped(x):
        for letter in ("dim", "F"):
            require(dims[letter] % 8 == 0, op, letter, "a multiple of 8", dims[letter])


def _is_grouped(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


def _moe_cuda(
    x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, num_shared: int
) -> Tensor:
    if not _is_grouped(x) or x.shape[0] == 0:
        return reference.moe_ref(x, w13, w2, topk_ids, topk_weights, num_shared=num_shared)
    from .triton import experts

    return experts.moe(x, w13, w2, topk_ids, topk_weights, num_shared=num_shared)


def _fake(
    x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, topk_weights: Tensor, *, num_shared: int
) -> Tensor:
    _check(x, w13, w2, topk_ids, topk_weights, num_shared)
    return x.new_empty(x.shape)


_moe = define_op(
    "moe(Tensor x, Tensor w13, Tensor w2, Tensor topk_ids, Tensor topk_weights, *, "
    "SymInt num_shared) -> Tensor",
    cpu=reference.moe_ref,
    cuda=_moe_cuda,
    fake=_fake,
)


def moe_route(
    x: Tensor,
    weight: Tensor,
    choice_bias: Tensor,
    num_choices: int,
    *,
    renormalize: bool,
    scaling_factor: float,
    is_real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts of each row, and their weights: what `moe` takes.

        scores = sigmoid(x weight^T), in fp32
        ids = the num_choices largest of scores + choice_bias, in falling order
        weights = scaling_factor * scores[ids]; if renormalize, divided by sum(scores[ids]) + 1e-20

    Of equal experts the lower id comes first. Sums with NaN are the largest, and equal. M rows, dim
    channels, E experts, k choices a row.

    Args:
        x: [M, dim] bf16 or fp32, contiguous.
        weight: [E, dim] fp32, contiguous.
        choice_bias: [E] fp32, contiguous.
        num_choices: k, in 1..E.
        renormalize: Whether the weights of a row sum up to scaling_factor.
        scaling_factor: Of all weights.
        is_real: [M] bool, contiguous. Where false the ids are -1. Default: all rows are real.

    Returns:
        topk_ids: [M, k] int32.
        topk_weights: [M, k] fp32.

    Raises:
        ValueError: a shape, dtype, stride, device or number is not as above.

    Reference: `ops.reference.moe_route_ref`.
    """
    if not is_traced():
        _check_route(x, weight, choice_bias, num_choices, scaling_factor, is_real)
    return _moe_route(
        *(x, weight, choice_bias, num_choices),
        renormalize=renormalize,
        scaling_factor=scaling_factor,
        is_real=is_real,
    )


def _check_route(
    x: Tensor,
    weight: Tensor,
    choice_bias: Tensor,
    num_choices: int,
    scaling_factor: float,
    is_real: Tensor | None,
) -> None:
    op, dims = "moe_route", {}
    check_tensor(op, "x", x, "M dim", (torch.bfloat16, torch.float32), dims)
    check_tensor(op, "weight", weight, "E dim", torch.float32, dims)
    check_tensor(op, "choice_bias", choice_bias, "E", torch.float32, dims)
    tensors = {"x": x, "weight": weight, "choice_bias": choice_bias}
    if is_real is not None:
        check_tensor(op, "is_real", is_real, "M", torch.bool, dims)
        tensors["is_real"] = is_real
    for name, tensor in tensors.items():
        check_inner(op, name, tensor, tensor.ndim)
    check_device(op, tensors)
    check_number(op, "scaling_factor", scaling_factor)
    check_count(op, "num_choices", num_choices)
    expected = f"in 1..E={dims['E']}"
    require(1 <= num_choices <= dims["E"], op, "num_choices", expected, num_choices)


def _moe_route_cuda(
    x: Tensor,
    weight: Tensor,
    choice_bias: Tensor,
    num_choices: int,
    *,
    renormalize: bool,
    scaling_factor: float,
    is_real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    from .triton import router

    return router.moe_route(
        *(x, weight, choice_bias, num_choices),
        renormalize=renormalize,
        scaling_factor=scaling_factor,
        is_real=is_real,
    )


def _fake_route(
    x: Tensor,
    weight: Tensor,
    choice_bias: Tensor,
    num_choices: int,
    *,
    renormalize: bool,
    scaling_factor: float,
    is_real: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    _check_route(x, weight, choice_bias, num_choices, scaling_factor, is_real)
    ids = x.new_empty(x.shape[0], num_choices, dtype=torch.int32)
    return ids, torch.empty_like(ids, dtype=torch.float32)


_moe_route = define_op(
    "moe_route(Tensor x, Tensor weight, Tensor choice_bias, SymInt num_choices, *, "
    "bool renormalize, float scaling_factor, Tensor? is_real=None) -> (Tensor, Tensor)",
    cpu=reference.moe_route_ref,
    cuda=_moe_route_cuda,
    fake=_fake_route,
)
