"""The norm after the recurrence. A plain RMSNorm is a torch expression and needs no op."""

import torch
from torch import Tensor

from . import reference
from .library import FLOATS, check_device, check_inner, check_tensor, define_op, is_traced, require


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
    require(x.ndim >= 1 and x.dtype in FLOATS, op, "x", "[.., V] of floats", f"{x.ndim}d {x.dtype}")
    dims = {f"s{i}": size for i, size in enumerate(x.shape[:-1])} | {"V": x.shape[-1]}
    check_tensor(op, "gate", gate, " ".join(dims), x.dtype, dims)
    check_tensor(op, "weight", weight, "V", x.dtype, dims)
    tensors = {"x": x, "gate": gate, "weight": weight}
    for name, tensor in tensors.items():
        check_inner(op, name, tensor, 1)
    check_device(op, tensors)
    require(eps > 0, op, "eps", "> 0", eps)


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
