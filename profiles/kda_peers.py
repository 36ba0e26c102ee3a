"""Implementations of KDA prefill that the bench runs side by side, each from raw inputs.

A call of an implementation works on one input set; all sets are of one cell.
A peer is found by what is installed: FLA and cudnn-frontend if they import, FlashKDA as vLLM builds
it if VLLM_FLASHKDA_SO names the library.
"""

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ops.kda import kda_prefill
from .kda_cells import DIM, Inputs, Result

OURS = "torch_kda"
SCALE = DIM**-0.5
VLLM_VARIABLE = "VLLM_FLASHKDA_SO"

Call = Callable[[], Result]
# a call for each input set; none where the peer has no such thing
Peer = Callable[[Sequence[Inputs]], list[Call]]


def torch_kda(sets: Sequence[Inputs]) -> list[Call]:
    """Ours: eager entry of the op."""
    return [_torch_kda(inputs) for inputs in sets]


def _torch_kda(inputs: Inputs) -> Call:
    tensors: tuple[Any, ...] = inputs.tensors()
    N = len(inputs.cell.lens)
    states = inputs.state_pool[N : 2 * N]
    checkpoints = None if inputs.checkpoint_slots is None else inputs.state_pool[2 * N :]

    def call() -> Result:
        out = kda_prefill(*tensors, lower_bound=inputs.lower_bound, scale=SCALE)
        return Result(out, states, checkpoints)

    return call


def vllm(sets: Sequence[Inputs]) -> list[Call]:
    """vLLM's FlashKDA, with its one checkpoint where the row has one."""
    first = sets[0]
    exports = first.checkpoint_offsets
    has_many = exports is not None and exports.shape[0] != len(first.cell.lens)
    if first.lower_bound is None or has_many:
        return []
    return [_vllm(inputs) for inputs in sets]


def _vllm(inputs: Inputs) -> Call:
    ops = torch.ops._flashkda_C
    exports, N = inputs.checkpoint_offsets, len(inputs.cell.lens)
    T, H = inputs.beta_logit.shape
    q, k, v, g, beta = (x[None] for x in _rows(inputs))
    cu = inputs.cu_seqlens.long()
    h0 = inputs.initial_state.contiguous()
    offsets = None if exports is None else exports.long()

    def call() -> Result:
        space = ops.get_workspace_size(T, H, N)
        workspace = torch.empty(space, dtype=torch.uint8, device=q.device)
        out, final = torch.empty_like(v), torch.empty_like(h0)
        checkpoint = None if offsets is None else torch.empty_like(h0)
        ops.fwd(
            *(q, k, v, g, beta, SCALE, out, workspace, inputs.A_log, inputs.dt_bias),
            *(inputs.lower_bound, h0, final, cu, checkpoint, offsets),
        )
        return Result(out[0], final, checkpoint)

    return call


def fla(sets: Sequence[Inputs]) -> list[Call]:
    """FLA's Triton path; it has no checkpoints.

    What it derives from cu_seqlens it keeps for the last four tensors it saw (`tensor_cache` of
    fla.utils 0.6.0), and making it anew is a copy from the host, which no graph can capture. So all
    calls have the same two tensors.
    """
    if sets[0].checkpoint_offsets is not None:
        return []
    cu_seqlens = sets[0].cu_seqlens.long()
    on_host = cu_seqlens.cpu()
    return [_fla(inputs, cu_seqlens, on_host) for inputs in sets]


def _fla(inputs: Inputs, cu_seqlens: Tensor, cu_seqlens_on_host: Tensor) -> Call:
    from fla.ops.kda import chunk_kda

    q, k, v, g, beta = (x[None] for x in _rows(inputs))
    h0 = inputs.initial_state.contiguous()

    def call() -> Result:
        out, final = chunk_kda(
            *(q, k, v, g, beta),
            scale=SCALE,
            initial_state=h0,
            output_final_state=True,
            use_gate_in_kernel=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=inputs.lower_bound is not None,
            lower_bound=inputs.lower_bound,
            state_v_first=True,
            A_log=inputs.A_log,
            dt_bias=inputs.dt_bias.flatten(),
            cu_seqlens=cu_seqlens,
            cu_seqlens_cpu=cu_seqlens_on_host,
        )[:2]
        return Result(out[0], final)

    return call


def cudnn(sets: Sequence[Inputs]) -> list[Call]:
    """cudnn-frontend's fused op for the bounded gate; it has no checkpoints."""
    if sets[0].checkpoint_offsets is not None or sets[0].lower_bound is None:
        return []
    return [_cudnn(inputs) for inputs in sets]


def _cudnn(inputs: Inputs) -> Call:
    from cudnn.linear_attention.ops import kimi_delta_attention

    rows, h0 = _rows(inputs), inputs.initial_state.contiguous()

    def call() -> Result:
        out, final = kimi_delta_attention(
            *rows,
            inputs.cu_seqlens,
            scale=SCALE,
            initial_state=h0,
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=True,
            gate_lower_bound=inputs.lower_bound,
            a_log=inputs.A_log,
            dt_bias=inputs.dt_bias,
        )[:2]
        return Result(out, final)

    return call


PEERS: dict[str, Peer] = {"vllm": vllm, "fla": fla, "cudnn": cudnn}


def find_peers(wanted: list[str] | None) -> dict[str, Peer]:
    """Ours, then the peers that are there; those that were asked for by name must be."""
    found = {name: peer for name, peer in PEERS.items() if _is_there(name)}
    for name in wanted or []:
        if name not in PEERS:
            raise ValueError(f"--peers: {name!r} is none of {', '.join(PEERS)}")
        if name not in found:
            cure = f"set {VLLM_VARIABLE}" if name == "vllm" else "install it"
            raise RuntimeError(f"--peers: {name} is not here; {cure}")
    chosen = found if wanted is None else {name: found[name] for name in wanted}
    return {OURS: torch_kda, **chosen}


def _is_there(name: str) -> bool:
    if name != "vllm":
        return importlib.util.find_spec(name) is not None
    library = os.environ.get(VLLM_VARIABLE)
    if library is None:
        return False
    if not Path(library).is_file():
        raise RuntimeError(f"{VLLM_VARIABLE}={library} is no file; unset it or name the library")
    torch.ops.load_library(library)
    return True


def _rows(inputs: Inputs) -> tuple[Tensor, ...]:
    return inputs.q, inputs.k, inputs.v, inputs.g_raw, inputs.beta_logit
