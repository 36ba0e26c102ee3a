"""The prefill on a CUDA device: one call of one host function, which launches all kernels.

Knows nothing of the CuTe DSL: a machine with prebuilt objects runs this without it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import jit, objects
from .kda_record import RECORD_BYTES, TILE
from .tiles import choose_scan_tile

MAX_SEQUENCES = 4096
GATES = ("bounded", "softplus")
STAGES = {"plan": 1, "prepare": 2, "scan": 4}  # bits of what a call launches
OWN_PLAN = 8  # the plan lies behind the records: one allocation less

PLAN = objects.Variant("kda_plan", "kda_host.plan")
PREFILL = {
    gate: objects.Variant(f"kda_prefill_{gate}", "kda_host.prefill", (("gate", gate),))
    for gate in GATES
}
VARIANTS = (PLAN, *PREFILL.values())
BOUNDED, SOFTPLUS = (PREFILL[gate] for gate in GATES)
WITH_PLAN = STAGES["prepare"] | STAGES["scan"]  # of a call that is given one
ALL_STAGES = WITH_PLAN | STAGES["plan"] | OWN_PLAN


def num_tiles(num_tokens: int, num_sequences: int) -> int:
    """Tiles that suffice for any `num_sequences` sequences within `num_tokens` rows."""
    return (num_tokens + TILE - 1) // TILE + num_sequences


def plan_size(num_tokens: int, num_sequences: int) -> int:
    """int32 entries of a plan; its layout: `kda_plan.KdaPlan`."""
    return 4 * num_sequences + 2 * num_tiles(num_tokens, num_sequences)


def workspace_bytes(num_tokens: int, n_cap: int, num_v_heads: int) -> int:
    """Memory of a call of these capacities beside its output and, if it makes one, its plan."""
    return num_tiles(num_tokens, n_cap) * num_v_heads * RECORD_BYTES


def prepare(device: torch.device | int | str | None = None, gates: Iterable[str] = GATES) -> None:
    """Loads the kernels onto a device, so that no later call loads or compiles.

    Once at the start of an engine, before any capture. Raises RuntimeError, saying what to do: no
    CUDA device, an arch without kernels, no objects and no compiler.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("torch-kda: prepare needs a CUDA device, and torch sees none")
    index = torch.device("cuda" if device is None else device).index
    index = torch.cuda.current_device() if index is None else index
    for variant in (PLAN, *(PREFILL[gate] for gate in gates)):
        _function(variant, index)


def make_plan(cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """The plan of a forward, for every `kda_prefill` in it."""
    num_sequences = cu_seqlens.shape[0] - 1
    plan = cu_seqlens.new_empty(plan_size(num_tokens, num_sequences))
    _function(PLAN, cu_seqlens.get_device())(cu_seqlens, plan, num_tokens)
    return plan


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_raw: Tensor,
    beta_logit: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state_pool: Tensor,
    cu_seqlens: Tensor,
    initial_slots: Tensor,
    final_slots: Tensor,
    checkpoint_indptr: Tensor | None,
    checkpoint_offsets: Tensor | None,
    checkpoint_slots: Tensor | None,
    plan: Tensor | None,
    *,
    lower_bound: float | None,
    scale: float,
) -> Tensor:
    """`ops.kda.kda_prefill` on a CUDA device.

    Refuses arguments that would lead outside a tensor with a ValueError or TypeError; most of that,
    shapes, dtypes, strides, alignment and devices, the compiled function does itself.
    """
    T, HV, V = v.shape
    N = initial_slots.shape[0]
    _check_counts(N, T, HV, q, cu_seqlens, checkpoint_indptr, plan, lower_bound)
    o = v.new_empty(T, HV, V)  # sizes as arguments: 0.4 us less than as a tuple
    if T == 0:
        return o
    index = q.get_device()
    variant = SOFTPLUS if lower_bound is None else BOUNDED
    here = _DEVICES.get(index)
    function = None if here is None else here.functions.get(variant.name)
    if here is None or function is None:
        function = _load(variant, index)
        here = _DEVICES[index]
    tiles = (T + TILE - 1) // TILE + N
    size = tiles * HV * RECORD_BYTES
    stages = WITH_PLAN
    if plan is None:
        stages = ALL_STAGES
        size += 4 * (4 * N + 2 * tiles)
        plan = here.no_checkpoints[1]
    if checkpoint_indptr is None and checkpoint_offsets is None and checkpoint_slots is None:
        checkpoint_indptr, checkpoint_offsets, checkpoint_slots = here.no_checkpoints
    records = here.no_bytes.new_empty(size)
    function(
        *(q, k, v, g_raw, beta_logit, A_log, dt_bias, state_pool),
        *(cu_seqlens, initial_slots, final_slots),
        *(checkpoint_indptr, checkpoint_offsets, checkpoint_slots),
        *(plan, records, o),
        *(0.0 if lower_bound is None else lower_bound, scale),
        *(stages, choose_scan_tile(N, HV, here.num_sms)),
    )
    return o


def launch_stages(
    tensors: tuple[Tensor | None, ...],
    plan: Tensor,
    records: Tensor,
    o: Tensor,
    *,
    lower_bound: float | None,
    scale: float,
    stages: int,
    scan_tile: int | None = None,
) -> None:
    """Launches some of STAGES on buffers that the caller keeps, for measurements.

    tensors: those of `kda_prefill` up to checkpoint_slots, checked by the caller.
    scan_tile: index into `tiles.SCAN_TILES`. None: chosen as in a call.
    """
    index = o.get_device()
    function = _function(PREFILL["softplus" if lower_bound is None else "bounded"], index)
    here = _DEVICES[index]
    csr = here.no_checkpoints if tensors[-1] is None else tensors[-3:]
    if scan_tile is None:
        N = (plan.shape[0] - 2 * num_tiles(o.shape[0], 0)) // 6
        scan_tile = choose_scan_tile(N, o.shape[1], here.num_sms)
    bound = 0.0 if lower_bound is None else lower_bound
    function(*tensors[:-3], *csr, plan, records, o, bound, scale, stages, scan_tile)


def _check_counts(
    N: int,
    T: int,
    HV: int,
    q: Tensor,
    cu_seqlens: Tensor,
    checkpoint_indptr: Tensor | None,
    plan: Tensor | None,
    lower_bound: float | None,
) -> None:
    """Relations of sizes that a compiled signature of symbols can't state."""
    if (
        N > MAX_SEQUENCES
        or HV % q.shape[1] != 0
        or cu_seqlens.shape[0] != N + 1
        or (checkpoint_indptr is not None and checkpoint_indptr.shape[0] != N + 1)
        or (plan is not None and plan.shape[0] != plan_size(T, N))
        or not (lower_bound is None or -5 <= lower_bound < 0)
    ):
        raise ValueError("kda_prefill: sizes or lower_bound do not fit together")


@dataclass(slots=True)
class _Device:
    """What calls on one device share."""

    num_sms: int
    no_checkpoints: tuple[
        Tensor, Tensor, Tensor
    ]  # a CSR without entries, for any number of sequences
    no_bytes: Tensor  # an empty uint8: what is allocated like it names neither dtype nor device
    functions: dict[str, Callable[..., None]] = field(default_factory=dict)


_DEVICES: dict[int, _Device] = {}


def _function(variant: objects.Variant, index: int) -> Callable[..., None]:
    """The host function of a variant, its kernels on the device."""
    here = _DEVICES.get(index)
    if here is not None:
        function = here.functions.get(variant.name)
        if function is not None:
            return function
    return _load(variant, index)


def _load(variant: objects.Variant, index: int) -> Callable[..., None]:
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"torch-kda: {variant.name} is not on the device yet, and nothing can be loaded while "
            "a CUDA graph is captured; call torch_kda.cute_kernels.kda_prefill.prepare first"
        )
    function = jit.load(variant, jit.device_arch(index))
    if index not in _DEVICES:
        _DEVICES[index] = _make_device(index)
    # an object brings its kernels onto the device in its first call: this one launches nothing
    function(*_empty_arguments(variant, torch.device("cuda", index)))
    _DEVICES[index].functions[variant.name] = function
    return function


def _make_device(index: int) -> _Device:
    device = torch.device("cuda", index)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    indptr = torch.zeros(MAX_SEQUENCES + 1, dtype=torch.int32, device=device)
    num_sms = torch.cuda.get_device_properties(index).multi_processor_count
    no_bytes = torch.empty(0, dtype=torch.uint8, device=device)
    return _Device(num_sms, (indptr, none, none), no_bytes)


def _empty_arguments(
    variant: objects.Variant, device: torch.device
) -> tuple[Tensor | float | int, ...]:
    """A call of no tokens."""
    ints = torch.zeros(2, dtype=torch.int32, device=device)
    if variant == PLAN:
        return ints, ints, -1
    rows = torch.empty((0, 1, 128), dtype=torch.bfloat16, device=device)
    gate = torch.zeros((1, 128), device=device)
    pool = torch.empty((0, 1, 128, 128), device=device)
    return (
        *(rows, rows, rows, rows, rows[..., 0], gate[:, 0], gate, pool),
        *(ints, ints[:1], ints[:1], ints, ints, ints, ints, rows.view(torch.uint8).flatten(), rows),
        *(0.0, 0.0, 0, 0),
    )
