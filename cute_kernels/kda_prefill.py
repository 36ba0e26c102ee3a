"""The prefill on a CUDA device: one call of one host function, which launches all kernels.

Knows nothing of the CuTe DSL: a machine with prebuilt objects runs this without it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import jit, objects
from .kda_record import RECORD_BYTES, TILE
from .tiles import choose_scan_tile

MAX_SEQUENCES = 4096
GATES = ("bounded", "softplus")
STAGES = {"prepare": 1, "scan": 2}  # bits of what a call launches
ALL_STAGES = sum(STAGES.values())
ENTRY_BYTES = 16  # of a sequence in the order that prepare hands to the scan, behind the records

PREFILL = {
    gate: objects.Variant(f"kda_prefill_{gate}", "kda_host.prefill", (("gate", gate),))
    for gate in GATES
}
VARIANTS = tuple(PREFILL.values())


def workspace_bytes(num_tokens: int, n_cap: int, num_v_heads: int) -> int:
    """Memory of a call of these capacities beside its output: records, and the order behind them.

    The number of tiles suffices for any sequences: `kda_layout`.
    """
    num_tiles = (num_tokens + TILE - 1) // TILE + n_cap
    return num_tiles * num_v_heads * RECORD_BYTES + n_cap * ENTRY_BYTES


def prepare(device: torch.device | int | str | None = None, gates: Iterable[str] = GATES) -> None:
    """Loads the kernels onto a device, so that no later call loads or compiles.

    Once at the start of an engine, before any capture. Raises RuntimeError, saying what to do: no
    CUDA device, an arch without kernels, no objects and no compiler.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("torch-kda: prepare needs a CUDA device, and torch sees none")
    index = torch.device("cuda" if device is None else device).index
    index = torch.cuda.current_device() if index is None else index
    for gate in gates:
        if (gate, index) not in _FUNCTIONS:
            _load(gate, index)


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
    *,
    lower_bound: float | None,
    scale: float,
) -> Tensor:
    """`ops.kda.kda_prefill` on a CUDA device.

    Refuses arguments that would lead outside a tensor with a ValueError or TypeError; most of that,
    shapes, dtypes, strides, alignment and devices, the compiled function does itself.
    """
    T, HV, V = v.shape
    # numel: half the time of a shape; the compiled function sees that these have one dimension
    N = initial_slots.numel()
    # relations that a compiled signature of symbols can't state
    if (
        N > MAX_SEQUENCES
        or HV % q.shape[1] != 0
        or cu_seqlens.numel() != N + 1
        or (checkpoint_indptr is not None and checkpoint_indptr.numel() != N + 1)
        or not (lower_bound is None or -5 <= lower_bound < 0)
    ):
        raise ValueError("kda_prefill: sizes or lower_bound do not fit together")
    o = v.new_empty(T, HV, V)  # sizes as arguments: 0.4 us less than as a tuple
    if T == 0:
        return o
    key = "softplus" if lower_bound is None else "bounded", q.get_device()
    function, here = _FUNCTIONS.get(key) or _load(*key)
    if checkpoint_indptr is None and checkpoint_offsets is None and checkpoint_slots is None:
        checkpoint_indptr, checkpoint_offsets, checkpoint_slots = here.no_checkpoints
    function(
        q, k, v, g_raw, beta_logit, A_log, dt_bias, state_pool,
        cu_seqlens, initial_slots, final_slots,
        checkpoint_indptr, checkpoint_offsets, checkpoint_slots,
        here.no_bytes.new_empty(workspace_bytes(T, N, HV)), o,
        0.0 if lower_bound is None else lower_bound, scale,
        ALL_STAGES, choose_scan_tile(N, HV, here.num_sms),
    )  # fmt: skip
    return o


def launch_stages(
    tensors: tuple[Tensor | None, ...],
    workspace: Tensor,
    o: Tensor,
    *,
    lower_bound: float | None,
    scale: float,
    stages: int,
    scan_tile: int | None = None,
) -> None:
    """Launches some of STAGES on buffers that the caller keeps, for measurements.

    tensors: those of `kda_prefill`, checked by the caller.
    workspace: [workspace_bytes] uint8, with what an earlier stage left in it.
    scan_tile: index into `tiles.SCAN_TILES`. None: chosen as in a call.
    """
    key = "softplus" if lower_bound is None else "bounded", o.get_device()
    function, here = _FUNCTIONS.get(key) or _load(*key)
    csr = here.no_checkpoints if tensors[-1] is None else tensors[-3:]
    if scan_tile is None:
        initial_slots = tensors[-5]
        assert initial_slots is not None
        scan_tile = choose_scan_tile(initial_slots.shape[0], o.shape[1], here.num_sms)
    bound = 0.0 if lower_bound is None else lower_bound
    function(*tensors[:-3], *csr, workspace, o, bound, scale, stages, scan_tile)


@dataclass(slots=True)
class _Device:
    """What calls on one device share."""

    num_sms: int
    # a CSR without entries, for any number of sequences
    no_checkpoints: tuple[Tensor, Tensor, Tensor]
    no_bytes: Tensor  # an empty uint8: what is allocated like it names neither dtype nor device


_DEVICES: dict[int, _Device] = {}
# by gate and device, with its kernels on the device
_FUNCTIONS: dict[tuple[str, int], tuple[Callable[..., None], _Device]] = {}


def _load(gate: str, index: int) -> tuple[Callable[..., None], _Device]:
    """Brings a gate's kernels onto a device, once."""
    variant = PREFILL[gate]
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"torch-kda: {variant.name} is not on the device yet, and nothing can be loaded while "
            "a CUDA graph is captured; call torch_kda.cute_kernels.kda_prefill.prepare first"
        )
    function = jit.load(variant, jit.device_arch(index))
    if index not in _DEVICES:
        _DEVICES[index] = _make_device(index)
    # an object brings its kernels onto the device in its first call: this one launches nothing
    function(*_empty_arguments(torch.device("cuda", index)))
    loaded = _FUNCTIONS[gate, index] = function, _DEVICES[index]
    return loaded


def _make_device(index: int) -> _Device:
    device = torch.device("cuda", index)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    indptr = torch.zeros(MAX_SEQUENCES + 1, dtype=torch.int32, device=device)
    num_sms = torch.cuda.get_device_properties(index).multi_processor_count
    no_bytes = torch.empty(0, dtype=torch.uint8, device=device)
    return _Device(num_sms, (indptr, none, none), no_bytes)


def _empty_arguments(device: torch.device) -> tuple[Tensor | float | int, ...]:
    """A call of no tokens."""
    ints = torch.zeros(2, dtype=torch.int32, device=device)
    rows = torch.empty((0, 1, 128), dtype=torch.bfloat16, device=device)
    gate = torch.zeros((1, 128), device=device)
    pool = torch.empty((0, 1, 128, 128), device=device)
    return (
        *(rows, rows, rows, rows, rows[..., 0], gate[:, 0], gate, pool),
        *(ints, ints[:1], ints[:1], ints, ints, ints, rows.view(torch.uint8).flatten(), rows),
        *(0.0, 0.0, 0, 0),
    )
