"""Products and sums of elements.

They are ops, though torch could spell them: a compiler would round elsewhere than eager torch does,
and the two would choose other tokens.
"""

import torch
from torch import Tensor

from . import reference
from .library import FLOATS, check_device, check_inner, check_tensor, define_op, is_traced, require


def silu_and_mul(x: Tensor) -> Tensor:
    """The middle of a SwiGLU: SiLU of the first half of a row, times the second half.

        gate|up = x
        y = round(SiLU(gate)) * up

    M rows of F gates and F values; SiLU in fp32, round: to x's dtype.

    Args:
        x: [M, 2*F] bf16, fp32 or float64. Last dim contiguous.

    Returns:
        y: [M, F] of x's dtype, contiguous.

    Raises:
        ValueError: a shape, dtype, stride or device is not as above.

    Reference: `ops.reference.silu_and_mul_ref`.
    """
    if not is_traced():
        _check_halves(x)
    return _silu_and_mul(x)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """y = x * round(sigmoid(gate)); the sigmoid in fp32, round: to x's dtype.

    M rows of dim channels.

    Args:
        x, gate: [M, dim] bf16, fp32 or float64, of one dtype. Last dim contiguous.

    Returns:
        y: [M, dim] of x's dtype, contiguous.

    Raises:
        ValueError: a shape, dtype, stride or device is not as above.

    Reference: `ops.reference.sigmoid_mul_ref`.
    """
    if not is_traced():
        _check_pair("sigmoid_mul", {"x": x, "gate": gate})
    return _sigmoid_mul(x, gate)


def _check_halves(x: Tensor) -> None:
    op = "silu_and_mul"
    check_tensor(op, "x", x, "M 2*F", FLOATS, {})
    require(x.shape[1] % 2 == 0, op, "x", "[M, 2*F]", list(x.shape))
    check_inner(op, "x", x, 1)
    check_device(op, {"x": x})


def _check_pair(op: str, tensors: dict[str, Tensor]) -> None:
    dtypes, dims = FLOATS, {}
    for name, x in tensors.items():
        check_tensor(op, name, x, "M dim", dtypes, dims)
        dtypes = x.dtype
    for name, x in tensors.items():
        check_inner(op, name, x, 1)
    check_device(op, tensors)


def _silu_and_mul_cuda(x: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return reference.silu_and_mul_ref(x)
    from .triton.activations import silu_and_mul

    return silu_and_mul(x)


def _silu_and_mul_fake(x: Tensor) -> Tensor:
    _check_halves(x)
    return x.new_empty(x.shape[0], x.shape[1] // 2)


_silu_and_mul = define_op(
    "silu_and_mul(Tensor x) -> Tensor",
    cpu=reference.silu_and_mul_ref,
    cuda=_silu_and_mul_cuda,
    fake=_silu_and_mul_fake,
)


def _sigmoid_mul_cuda(x: Tensor, gate: Tensor) -> Tensor:
    if x.dtype == torch.float64:
        return reference.sigmoid_mul_ref(x, gate)
    from .triton.activations import sigmoid_mul

    return sigmoid_mul(x, gate)


def _sigmoid_mul_fake(x: Tensor, gate: Tensor) -> Tensor:
    _check_pair("sigmoid_mul", {"x": x, "gate": gate})
    return x.new_empty(x.shape)


_sigmoid_mul = define_op(
    "sigmoid_mul(Tensor x, Tensor gate) -> Tensor",
    cpu=reference.sigmoid_mul_ref,
    cuda=_sigmoid_mul_cuda,
    fake=_sigmoid_mul_fake,
)
