"""The routed experts of a mixture-of-experts layer."""

import torch
from torch import Tensor

from . import reference
from .library import FLOATS, check_device, check_inner, check_tensor, define_op, is_traced, require


def moe(x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """SwiGLU experts, each on the rows that chose it, summed by weight.

        gate|up = w13[e] x
        y = sum_k topk_weights[:, k] * w2[e] (SiLU(gate) * up),  e = topk_ids[:, k]

    M rows, dim channels, E experts of F hidden channels, k choices a row.

    Args:
        x: [M, dim] bf16, fp32 or float64, contiguous.
        w13: [E, 2*F, dim] of the same dtype, contiguous; gate rows, then up rows.
        w2: [E, dim, F] of the same dtype, contiguous.
        topk_ids: [M, k] int32 or int64. An id outside [0, E) adds nothing.
        topk_weights: [M, k] fp32.

    On CUDA in bf16, dim and F are multiples of 8.

    Returns:
        y: [M, dim] of x's dtype.

    Raises:
        ValueError: a shape, dtype, stride or device is not as above.

    Reference: `ops.reference.moe_ref`.
    """
    if not is_traced():
        _check(x, w13, w2, topk_ids, topk_weights)
    return _moe(x, w13, w2, topk_ids, topk_weights)


def _check(x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> None:
    op, dims = "moe", {}
    check_tensor(op, "x", x, "M dim", FLOATS, dims)
    check_tensor(op, "w2", w2, "E dim F", x.dtype, dims)
    dims["2*F"] = 2 * dims["F"]
    check_tensor(op, "w13", w13, "E 2*F dim", x.dtype, dims)
    check_tensor(op, "topk_ids", topk_ids, "M k", (torch.int32, torch.int64), dims)
    check_tensor(op, "topk_weights", topk_weights, "M k", torch.float32, dims)
    tensors = {"x": x, "w13": w13, "w2": w2, "topk_ids": topk_ids, "topk_weights": topk_weights}
    for name, tensor in tensors.items():
        check_inner(op, name, tensor, tensor.ndim)
    check_device(op, tensors)
    if _is_grouped(x):
        for letter in ("dim", "F"):
            require(dims[letter] % 8 == 0, op, letter, "a multiple of 8", dims[letter])


def _is_grouped(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.bfloat16


def _moe_cuda(x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    if not _is_grouped(x) or x.shape[0] == 0:
        return reference.moe_ref(x, w13, w2, topk_ids, topk_weights)
    from .triton import experts

    return experts.moe(x, w13, w2, topk_ids, topk_weights)


def _fake(x: Tensor, w13: Tensor, w2: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    _check(x, w13, w2, topk_ids, topk_weights)
    return x.new_empty(x.shape)


_moe = define_op(
    "moe(Tensor x, Tensor w13, Tensor w2, Tensor topk_ids, Tensor topk_weights) -> Tensor",
    cpu=reference.moe_ref,
    cuda=_moe_cuda,
    fake=_fake,
)
