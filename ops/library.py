"""Registration of our ops, and the argument checks that their Python functions and fakes share."""

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any

import torch

# owns every op of ours: they live as long as this object
LIBRARY = torch.library.Library("torch_kda", "DEF")
STRIDES = torch.Tag.needs_exact_strides  # what a compiler must keep of an op's arguments
OPS: list[torch._ops.OpOverload] = []  # all that `define_op` has defined

FLOATS = (torch.bfloat16, torch.float32, torch.float64)  # activations
INT = torch.int32  # all metadata

# looked up once: every call of an op asks all three
_is_compiling = torch.compiler.is_compiling
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_profiled = torch._C._autograd._profiler_enabled


def define_op(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """Defines `torch_kda::<schema>` and returns what calls it.

    Plain `define` and `impl` cost 3.5 us a call with 13 tensors, where a `custom_op` costs 66.
    With 15 tensors and optional ones among them the dispatcher took 14 us, so an eager call on CUDA
    goes straight in. Implementations trust their arguments: the checks are in the Python function
    around the op.
    """
    name = schema.split("(")[0]
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, STRIDES))
    LIBRARY.impl(name, cpu, "CPU")
    LIBRARY.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"torch_kda::{name}", fake, lib=LIBRARY)
    op = getattr(torch.ops.torch_kda, name).default
    OPS.append(op)

    def call(*arguments: Any, **options: Any) -> Any:
        # handed on as they came: a tuple that is taken apart costs 0.1 us to put together again
        return (cuda if is_plain(arguments[0]) else op)(*arguments, **options)

    return call


def is_plain(x: Any) -> bool:
    """Whether nothing but the implementation can want to see a call with this CUDA tensor."""
    return (
        not _is_compiling()
        and type(x) is torch.Tensor
        and x.is_cuda
        and _num_dispatch_modes() == 0
        and not _is_profiled()
    )


def is_traced() -> bool:
    """Whether Dynamo reads this: an op's fake checks the same arguments then, at a fraction of the
    time. Of tracing a model, checks read by Dynamo took 60 %.
    """
    return _is_compiling()


def check_tensor(
    op: str,
    name: str,
    x: torch.Tensor,
    shape: str,
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    dims: dict[str, int],
) -> None:
    """Checks rank, sizes and dtype against letters, such as "T H K", "2 N" or "N+1".

    A letter that `dims` lacks is bound to the size that `x` has; others must agree with it.
    """
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{op}: {name} must be a Tensor, got {type(x).__name__}")
    letters = shape.split()
    allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    right = x.ndim == len(letters) and x.dtype in allowed
    if right:
        for i, letter in enumerate(letters):
            size = _size(letter, dims)
            if size is None:
                dims[letter] = x.shape[i]
            elif x.shape[i] != size:
                right = False
                break
    if not right:
        expected = ", ".join(_spelled(letter, dims) for letter in letters)
        kinds = " or ".join(_dtype_name(d) for d in allowed)
        got = f"{list(x.shape)} {_dtype_name(x.dtype)}"
        raise ValueError(f"{op}: {name} must be [{expected}] {kinds}, got {got}")


def check_inner(op: str, name: str, x: torch.Tensor, num_inner: int) -> None:
    """Checks that the last `num_inner` dims are contiguous; those before may have any stride."""
    expected = 1
    for i in range(x.ndim - 1, x.ndim - 1 - num_inner, -1):
        # an empty tensor is contiguous whatever its strides
        if x.shape[i] != 1 and x.stride(i) != expected and x.numel() > 0:
            raise ValueError(
                f"{op}: {name} must have its last {num_inner} dims contiguous, "
                f"got strides {list(x.stride())} for shape {list(x.shape)}; call .contiguous()"
            )
        expected = expected * x.shape[i]


def check_apart(op: str, name: str, pool: torch.Tensor) -> None:
    """Checks that no two slots of a pool, each contiguous, share memory."""
    size = math.prod(pool.shape[1:])
    is_apart = pool.shape[0] <= 1 or pool.stride(0) >= size
    expected = f"slots that do not overlap, {size} or more elements apart"
    require(is_apart, op, name, expected, f"a slot stride of {pool.stride(0)}")


def check_device(op: str, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Checks that all tensors are on one device, and that it is a CPU or a CUDA device."""
    first, where = "", None
    for name, x in tensors.items():
        if x is None:
            continue
        if where is None:
            first, where = name, x.device
            if where.type not in ("cpu", "cuda"):
                raise ValueError(f"{op}: {name} must be on cpu or cuda, got {where}")
        elif x.device != where:
            raise ValueError(f"{op}: {name} must be on {where}, where {first} is, got {x.device}")


def check_csr(
    op: str,
    indptr: torch.Tensor | None,
    offsets: torch.Tensor | None,
    slots: torch.Tensor | None,
    dims: dict[str, int],
) -> dict[str, torch.Tensor | None]:
    """Checks the checkpoint CSR, N being bound, and returns it by name."""
    csr = {
        "checkpoint_indptr": indptr,
        "checkpoint_offsets": offsets,
        "checkpoint_slots": slots,
    }
    if indptr is None and offsets is None and slots is None:
        return csr
    if indptr is None or offsets is None or slots is None:
        given = [name for name, x in csr.items() if x is not None]
        raise ValueError(f"{op}: {', '.join(csr)} must be given together, got only {given}")
    check_tensor(op, "checkpoint_indptr", indptr, "N+1", INT, dims)
    check_tensor(op, "checkpoint_offsets", offsets, "E", INT, dims)
    check_tensor(op, "checkpoint_slots", slots, "E", INT, dims)
    return csr


def check_starts(op: str, name: str, starts: torch.Tensor, limit: int) -> None:
    """Checks the values of cu_seqlens or an indptr: 0 first, none below the one before, or > limit.

    For the CPU implementation of an op, which a fake tensor never reaches. On CUDA the values
    would have to be waited for, so there nobody checks them.
    """
    before = 0
    for n, value in enumerate(starts.tolist()):
        if not (before <= value <= limit) or (n == 0 and value != 0):
            expected = f"0 first, then never less than the one before or more than {limit}"
            got = f"{name}[{n}] = {value}" + (f" after {before}" if n else "")
            raise ValueError(f"{op}: {name} must be {expected}, got {got}")
        before = value


def check_number(op: str, name: str, x: object, expected: str = "a finite number") -> None:
    """Checks that x is a finite number, or one that a graph leaves open."""
    if isinstance(x, torch.SymFloat | torch.SymInt):
        return
    if not (isinstance(x, Real) and _is_finite(x)):
        raise ValueError(f"{op}: {name} must be {expected}, got {_shown(x)}")


def check_eps(op: str, eps: float) -> None:
    """Checks what a norm adds under its root."""
    check_number(op, "eps", eps, "> 0")
    require(eps > 0, op, "eps", "> 0", eps)


def check_count(op: str, name: str, x: object) -> None:
    """Checks that x is an integer, or one that a graph leaves open."""
    require(isinstance(x, Integral | torch.SymInt), op, name, "an integer", _shown(x))


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """Of states and gate parameters, for activations like x."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def require(ok: bool, op: str, name: str, expected: str, got: object) -> None:
    """Raises the house's ValueError unless `ok`."""
    if not ok:
        raise ValueError(f"{op}: {name} must be {expected}, got {got}")


def _size(letter: str, dims: dict[str, int]) -> int | None:
    if letter in dims:
        return dims[letter]
    if letter.isdigit():
        return int(letter)
    if letter.endswith("+1") and letter[:-2] in dims:
        return dims[letter[:-2]] + 1
    return None


def _spelled(letter: str, dims: dict[str, int]) -> str:
    size = _size(letter, dims)
    return letter if size is None or letter.isdigit() else f"{letter}={size}"


def _is_finite(x: Real) -> bool:
    try:
        return math.isfinite(x)
    except OverflowError:  # an integer or a fraction that no float holds
        return False


def _shown(x: object) -> str:
    if isinstance(x, int) and x.bit_length() > 64:  # str() refuses the longest
        return f"an integer of {x.bit_length()} bits"
    return str(x) if x is None or isinstance(x, Real) else type(x).__name__


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
