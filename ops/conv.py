"""The short causal convolution in front of q, k and v."""

from typing import Any

import torch
from torch import Tensor

from . import reference
from .library import (
    FLOATS,
    INT,
    check_apart,
    check_csr,
    check_device,
    check_inner,
    check_starts,
    check_tensor,
    define_op,
    is_traced,
)


def causal_conv_prefill(
    x: Tensor,
    weight: Tensor,
    conv_pool: Tensor,
    cu_seqlens: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    checkpoint_indptr: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
    checkpoint_slots: Tensor | None = None,
) -> Tensor:
    """Depthwise causal conv of width 4 and SiLU over N packed sequences; windows live in a pool.

        y[t] = SiLU(sum_j weight[:, j] * x[t - 3 + j])

    A window is the last 3 raw inputs; the rows before a sequence's first come from its initial one.
    T rows, N sequences, C channels; T and N are capacities, padded as in `kda_prefill`.

    Args:
        x: [T, C] bf16, packed q|k|v. Last dim contiguous.
        weight: [C, 4] bf16, the oldest input's first.
        conv_pool: [slots, 3, C] bf16, oldest first, raw inputs, each slot contiguous; slots don't
            overlap. Written at final_slots and checkpoint_slots.
        cu_seqlens, initial_slots, final_slots: As in `kda_prefill`, for windows.
        checkpoint_indptr, checkpoint_offsets, checkpoint_slots: As in `kda_prefill`, for windows.

    On a CPU all bf16 may be fp32 or float64.

    Returns:
        y: [T, C] of x's dtype. Rows from cu_seqlens[-1] on are 0.

    Raises:
        ValueError: a shape, dtype, stride or device is not as above; on a CPU also cu_seqlens,
            checkpoint_indptr, or slots that clash.

    Reference: `ops.reference.causal_conv_prefill_ref`.
    """
    tensors = (x, weight, conv_pool, cu_seqlens, initial_slots, final_slots)
    csr = (checkpoint_indptr, checkpoint_offsets, checkpoint_slots)
    if not is_traced():
        _check(*tensors, *csr)
    return _causal_conv_prefill(*tensors, *csr)


def _check(
    x: Tensor,
    weight: Tensor,
    conv_pool: Tensor,
    cu_seqlens: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    checkpoint_indptr: Tensor | None,
    checkpoint_offsets: Tensor | None,
    checkpoint_slots: Tensor | None,
) -> None:
    op, dims = "causal_conv_prefill", {}
    check_tensor(op, "x", x, "T C", FLOATS, dims)
    check_tensor(op, "weight", weight, "C 4", x.dtype, dims)
    check_tensor(op, "conv_pool", conv_pool, "slots 3 C", x.dtype, dims)
    check_tensor(op, "initial_slots", initial_slots, "N", INT, dims)
    check_tensor(op, "final_slots", final_slots, "N", INT, dims)
    check_tensor(op, "cu_seqlens", cu_seqlens, "N+1", INT, dims)
    csr = check_csr(op, checkpoint_indptr, checkpoint_offsets, checkpoint_slots, dims)
    lists = {"cu_seqlens": cu_seqlens, "initial_slots": initial_slots, "final_slots": final_slots}
    for name, tensor in ({"weight": weight} | lists | csr).items():
        if tensor is not None:
            check_inner(op, name, tensor, tensor.ndim)
    check_inner(op, "x", x, 1)
    check_inner(op, "conv_pool", conv_pool, 2)
    check_apart(op, "conv_pool", conv_pool)
    check_device(op, {"x": x, "weight": weight, "conv_pool": conv_pool} | lists | csr)


def _causal_conv_prefill_cpu(x: Tensor, *others: Tensor | None) -> Tensor:
    _, _, cu_seqlens, _, _, indptr, _, slots = others
    assert cu_seqlens is not None
    check_starts("causal_conv_prefill", "cu_seqlens", cu_seqlens, x.shape[0])
    if indptr is not None and slots is not None:
        check_starts("causal_conv_prefill", "checkpoint_indptr", indptr, slots.shape[0])
    return reference.causal_conv_prefill_ref(x, *others)  # pyright: ignore[reportArgumentType]


def _causal_conv_prefill_cuda(x: Tensor, *others: Tensor | None) -> Tensor:
    if x.dtype == torch.float64:
        return reference.causal_conv_prefill_ref(x, *others)  # pyright: ignore[reportArgumentType]
    from .triton.conv import causal_conv_prefill

    return causal_conv_prefill(x, *others)  # pyright: ignore[reportArgumentType]


def _fake(x: Tensor, *others: Any) -> Tensor:
    _check(x, *others)
    return x.new_empty(x.shape)


_causal_conv_prefill = define_op(
    "causal_conv_prefill(Tensor x, Tensor weight, Tensor(a!) conv_pool, Tensor cu_seqlens, "
    "Tensor initial_slots, Tensor final_slots, Tensor? checkpoint_indptr, "
    "Tensor? checkpoint_offsets, Tensor? checkpoint_slots) -> Tensor",
    cpu=_causal_conv_prefill_cpu,
    cuda=_causal_conv_prefill_cuda,
    fake=_fake,
)
