"""The norms of the model.

They are ops, though torch could spell them: a compiler would sum and round in another order than
eager torch does, and the two would choose other tokens.
"""

import torch
from torch import Tensor

from . import reference
from .library import (
    FLOATS,
    check_device,
    check_eps,
    check_inner,
    check_tensor,
    define_op,
    is_traced,
)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """RMSNorm over a head's channels, times a sigmoid gate.

        y = x / sqrt(mean(x^2) + eps) * weight * sigmoid(gate)

    Any number of dims before the V channels.

    Args:
        x, gate: [.., V] bf16, fp32 or float64, of one shape and dtype. Last dim contiguous.
        weight: [V] of the same dtype.
        eps: Inside the root, > 0.

    Returns:
        y: [.., V] of x's dtype, contiguous.

    Raises:
        ValueError: a shape, dtype, stride, device or eps is not as above.

    Reference: `ops.reference.gated_rms_norm_ref`.
    """
    if not is_traced():
        _check(x, gate, weight, eps)
    return _gated_rms_norm(x, gate, weight, eps=eps)


def _check(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> None:
    op = "gated_rms_norm"
    num_outer = x.ndim - 1 if isinstance(x, Tensor) else 0
    shape, dims = " ".join([*(f"s{i}" for i in range(num_outer)), "V"]), {}
    check_tensor(op, "x", x, shape, FLOATS, dims)
    check_tensor(op, "gate", gate, shape, x.dtype, dims)
    check_tensor(op, "weight", weight, "V", x.dtype, dims)
    tensors = {"x": x, "gate": gate, "weight": weight}
    for name, tensor in tensors.items():
        check_inner(op, name, tensor, 1)
    check_device(op, tensors)
    check_eps(op, eps)


def _impl(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    return reference.gated_rms_norm_ref(x, gate, weight, eps=eps).contiguous()


def _cuda(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    if x.dtype == torch.float64:
        return _impl(x, gate, weight, eps=eps)
    from .triton.norms import gated_rms_norm

    return gated_rms_norm(x, gate, weight, eps=eps)


def _fake(x: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    _check(x, gate, weight, eps)
    return x.new_empty(x.shape)


_gated_rms_norm = define_op(
    "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, *, float eps) -> Tensor",
    cpu=_impl,
    cuda=_cuda,
    fake=_fake,
)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """RMSNorm over a row; the root in fp32, the product with the weight in x's dtype.

        y = weight * round(x / sqrt(mean(x^2) + eps))

    M rows of dim channels; round: to x's dtype.

    Args:
        x: [M, dim] bf16, fp32 or float64. Last dim contiguous.
        weight: [dim] of the same dtype.
        eps: Inside the root, > 0.

    Returns:
        y: [M, dim] of x's dtype, contiguous.

    Raises:
        ValueError: a shape, dtype, stride, device or eps is not as above.

    Reference: `ops.reference.rms_norm_ref`.
    """
    if not is_traced():
        _check_rows("rms_norm", {"x": x}, weight, eps)
    return _rms_norm(x, weight, eps=eps)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    """A sum and its `rms_norm`.

        total = round(x + residual)
        y = rms_norm(total)

    Args:
        x, residual: [M, dim] bf16, fp32 or float64, of one dtype. Last dim contiguous.
        weight: [dim] of the same dtype.
        eps: Inside the root, > 0.

    Returns:
        total: [M, dim] of x's dtype, contiguous.
        y: likewise.

    Raises:
        ValueError: a shape, dtype, stride, device or eps is not as above.

    Reference: `ops.reference.add_rms_norm_ref`.
    """
    if not is_traced():
        _check_rows("add_rms_norm", {"x": x, "residual": residual}, weight, eps)
    return _add_rms_norm(x, residual, weight, eps=eps)


def _check_rows(op: str, rows: dict[str, Tensor], weight: Tensor, eps: float) -> None:
    dtypes, dims = FLOATS, {}
    for name, x in rows.items():
        check_tensor(op, name, x, "M dim", dtypes, dims)
        dtypes = x.dtype
    check_tensor(op, "weight", weight, "dim", dtypes, dims)
    tensors = rows | {"weight": weight}
    for name, tensor in tensors.items():
        check_inner(op, name, tensor, 1)
    check_device(op, tensors)
    check_eps(op, eps)


def _rms_norm_cuda(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    if x.dtype == torch.float64:
        return reference.rms_norm_ref(x, weight, eps=eps)
    from .triton.norms import rms_norm

    return rms_norm(x, weight, eps=eps)


def _rms_norm_fake(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    _check_rows("rms_norm", {"x": x}, weight, eps)
    return x.new_empty(x.shape)


_rms_norm = define_op(
    "rms_norm(Tensor x, Tensor weight, *, float eps) -> Tensor",
    cpu=reference.rms_norm_ref,
    cuda=_rms_norm_cuda,
    fake=_rms_norm_fake,
)


def _add_rms_norm_cuda(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    if x.dtype == torch.float64:
        return reference.add_rms_norm_ref(x, residual, weight, eps=eps)
    from .triton.norms import add_rms_norm

    return add_rms_norm(x, residual, weight, eps=eps)


def _add_rms_norm_fake(
    x: Tensor, residual: Tensor, weight: Tensor, *, eps: float
) -> tuple[Tensor, Tensor]:
    _check_rows("add_rms_norm", {"x": x, "residual": residual}, weight, eps)
    return x.new_empty(x.shape), x.new_empty(x.shape)


_add_rms_norm = define_op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, *, float eps) -> (Tensor, Tensor)",
    cpu=reference.add_rms_norm_ref,
    cuda=_add_rms_norm_cuda,
    fake=_add_rms_norm_fake,
)
