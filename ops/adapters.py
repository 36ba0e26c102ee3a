"""The prefill under the names and argument lists that other projects call: FLA and FlashKDA.

Each turns its arguments into those of `kda_prefill` and its states into slots of a temporary pool.
What the op can't do is refused by name. Both work on a CPU too, and inside compiled graphs.
"""

from typing import Any

import torch
from torch import Tensor

from .kda import kda_prefill
from .library import FLOATS, INT, check_number, check_tensor, require, wide_dtype

_INTS = (torch.int32, torch.int64)  # of cu_seqlens and offsets in both projects


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: object | None = None,
    use_graph: bool = False,
    max_num_seqs: int | None = None,
    *,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor | None]:
    """flash-linear-attention's `fla.ops.kda.chunk_kda`, for inference from raw inputs.

    B rows of T tokens; with cu_seqlens B is 1 and the row holds N packed sequences, else N = B.
    H query/key heads, HV value heads (HV % H == 0), K key dim, V value dim.

    Args:
        q, k: [B, T, H, K]. Normalised here: use_qk_l2norm_in_kernel must be True.
        v: [B, T, HV, V].
        g: [B, T, HV, K] of q's dtype. Raw gate: use_gate_in_kernel must be True.
        beta: [B, T, HV] of q's dtype. Logits: use_beta_sigmoid_in_kernel must be True.
        scale: Default: K ** -0.5.
        initial_state: [N, HV, K, V] fp32, or [N, HV, V, K] if state_v_first. None: zeros.
        output_final_state: Whether to return the states after the last tokens.
        lower_bound: In [-5, 0), for lower_bound * sigmoid(exp(A_log) * (g + dt_bias)). None, for
            -exp(A_log) * softplus(g + dt_bias).
        safe_gate: True demands a lower_bound; the result is the same.
        cu_seqlens: [N+1] int32 or int64. Start of each sequence, and the end.
        cu_seqlens_cpu, use_graph, chunk_size: Make no difference: lengths are never read on the
            host, every call can be captured, and the chunk is 16.
        max_num_seqs: N, where given.
        A_log: [HV] fp32. None, with a lower_bound: zeros.
        dt_bias: [HV * K] or [HV, K] fp32. None: zeros.

    Returns:
        o: [B, T, HV, V] of q's dtype; rows of no sequence are 0.
        final_state: like initial_state, or None.

    Raises:
        ValueError: as `kda_prefill`, and where arguments contradict each other.
        NotImplementedError: allow_neg_eigval, disable_recompute, return_intermediate_states,
            cp_context, a gradient, a lower_bound below -5, or one of the three switches above off.
    """
    op, raw = "chunk_kda", {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    dims = _check_raw(op, raw, cu_seqlens)
    if initial_state is not None:
        shape = "N HV V K" if state_v_first else "N HV K V"
        check_tensor(op, "initial_state", initial_state, shape, wide_dtype(q), dims)
    _refuse_chunk_kda(
        {
            "use_qk_l2norm_in_kernel=False": not use_qk_l2norm_in_kernel,
            "use_gate_in_kernel=False": not use_gate_in_kernel,
            "use_beta_sigmoid_in_kernel=False": not use_beta_sigmoid_in_kernel,
            "allow_neg_eigval": allow_neg_eigval,
            "disable_recompute": disable_recompute,
            "return_intermediate_states": return_intermediate_states,
            "cp_context": cp_context is not None,
            "a gradient": torch.is_grad_enabled()
            and any(x is not None and x.requires_grad for x in (*raw.values(), initial_state)),
        }
    )
    _check_gate(op, A_log, dt_bias, lower_bound, wide_dtype(q), dims)
    require(chunk_size in (32, 64), op, "chunk_size", "32 or 64", chunk_size)
    require(not safe_gate or lower_bound is not None, op, "lower_bound", "given", None)
    has_gate = A_log is not None or lower_bound is not None
    require(has_gate, op, "A_log", "given where there is no lower_bound", None)
    B, T, HV, V, K, N = (dims[letter] for letter in ("B", "T", "HV", "V", "K", "N"))
    if cu_seqlens is None:
        cu_seqlens = torch.arange(B + 1, dtype=INT, device=q.device) * T
    require(max_num_seqs in (None, N), op, "max_num_seqs", f"N={N} of cu_seqlens", max_num_seqs)

    wide = wide_dtype(q)
    if initial_state is None:
        pool = v.new_empty((N if output_final_state else 0, HV, V, K), dtype=wide)
    else:
        pool = initial_state if state_v_first else initial_state.mT
        pool = pool.clone(memory_format=torch.contiguous_format)
    slots = torch.arange(N, dtype=INT, device=q.device)
    none = torch.full_like(slots, -1)
    o = kda_prefill(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        g.flatten(0, 1),
        beta.flatten(0, 1),
        v.new_zeros(HV, dtype=wide) if A_log is None else A_log,
        v.new_zeros(HV, K, dtype=wide) if dt_bias is None else dt_bias.reshape(HV, K),
        pool,
        cu_seqlens.to(INT),
        none if initial_state is None else slots,
        slots if output_final_state else none,
        lower_bound=lower_bound,
        scale=scale,
    )
    final = (pool if state_v_first else pool.mT.contiguous()) if output_final_state else None
    return o.unflatten(0, (B, T)), final


def _refuse_chunk_kda(asked: dict[str, bool]) -> None:
    refused = [name for name, is_asked in asked.items() if is_asked]
    if refused:
        raise NotImplementedError(
            f"chunk_kda: {', '.join(refused)} is not built; built is inference from raw inputs: "
            "use_qk_l2norm_in_kernel, use_gate_in_kernel and use_beta_sigmoid_in_kernel"
        )


def _check_raw(op: str, raw: dict[str, Any], cu_seqlens: Any) -> dict[str, int]:
    """Checks the inputs, q first, and returns what the letters are, N among them."""
    dims: dict[str, int] = {}
    q = raw["q"]
    check_tensor(op, "q", q, "B T H K", FLOATS, dims)
    if cu_seqlens is not None:
        check_tensor(op, "cu_seqlens", cu_seqlens, "N+1", _INTS, dims)
        require(dims["N+1"] > 0, op, "cu_seqlens", "[N+1] int32 or int64", "no entry")
        require(q.shape[0] == 1, op, "q", "one row with cu_seqlens, [1, T, H, K]", list(q.shape))
    shapes = {"k": "B T H K", "v": "B T HV V", "g": "B T HV K", "beta": "B T HV"}
    for name, shape in shapes.items():
        check_tensor(op, name, raw[name], shape, q.dtype, dims)
    dims["N"] = dims["B"] if cu_seqlens is None else dims["N+1"] - 1
    return dims


def _check_gate(
    op: str,
    A_log: Any,
    dt_bias: Any,
    lower_bound: Any,
    wide: torch.dtype,
    dims: dict[str, int],
) -> None:
    if lower_bound is not None:
        check_number(op, "lower_bound", lower_bound, "in [-5, 0) or None")
        if lower_bound < -5:
            raise NotImplementedError(
                f"{op}: lower_bound below -5 is not built, got {lower_bound}; built is [-5, 0)"
            )
    if A_log is not None:
        check_tensor(op, "A_log", A_log, "HV", wide, dims)
    if dt_bias is not None:
        dims["HV*K"] = dims["HV"] * dims["K"]
        is_flat = isinstance(dt_bias, Tensor) and dt_bias.ndim == 1
        check_tensor(op, "dt_bias", dt_bias, "HV*K" if is_flat else "HV K", wide, dims)


def flash_kda_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float,
    out: Tensor,
    workspace: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float,
    initial_state: Tensor | None = None,
    final_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    checkpoint_state: Tensor | None = None,
    checkpoint_offsets: Tensor | None = None,
) -> None:
    """FlashKDA's `fwd` as vLLM's fork has it: writes out, final_state and checkpoint_state.

    B rows of T tokens; with cu_seqlens B is 1 and the row holds N packed sequences, else N = B.
    H heads, K = V = 128. (HV value heads and V of their own work too.)

    Args:
        q, k, v, g: [B, T, H, K] bf16, raw.
        beta: [B, T, H] bf16 logits.
        out: [B, T, H, K], written; rows of no sequence are left as they are.
        scale: Of q, finite: K ** -0.5 as a rule. None is refused.
        workspace: Not used: the op brings its own.
        A_log, dt_bias: [H] and [H, K] fp32.
        lower_bound: In [-5, 0). None is refused: there is no softplus gate here.
        initial_state: [N, H, K, K] bf16 or fp32, V first. None: zeros.
        final_state: Likewise, written. None: not wanted. May be initial_state itself.
        cu_seqlens: [N+1] int32 or int64.
        checkpoint_state: [N, H, K, K], written with the state after checkpoint_offsets tokens.
        checkpoint_offsets: [N], dtype of cu_seqlens. From the sequence's start; 0, past the end, or
            no multiple of 16: that checkpoint is left as it is.

    States are all of one dtype; a bf16 one is rounded once, when it is written.

    Raises:
        ValueError: as `kda_prefill`, states of several dtypes, or one checkpoint argument alone.
    """
    op, raw = "flash_kda_fwd", {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    dims = _check_raw(op, raw, cu_seqlens)
    check_tensor(op, "out", out, "B T HV V", q.dtype, dims)
    check_tensor(op, "A_log", A_log, "HV", wide_dtype(q), dims)
    check_tensor(op, "dt_bias", dt_bias, "HV K", wide_dtype(q), dims)
    check_number(op, "lower_bound", lower_bound, "in [-5, 0)")
    check_number(op, "scale", scale)
    together = (checkpoint_state is None) == (checkpoint_offsets is None)
    require(together, op, "checkpoint_state", "given with checkpoint_offsets", "one alone")
    B, T, HV, V, K, N = (dims[letter] for letter in ("B", "T", "HV", "V", "K", "N"))
    is_packed = cu_seqlens is not None
    if cu_seqlens is None:
        cu_seqlens = torch.arange(B + 1, dtype=INT, device=q.device) * T
    states = {"initial_state": initial_state, "final_state": final_state}
    states["checkpoint_state"] = checkpoint_state
    _check_states(op, states, (N, HV, V, K))
    if checkpoint_offsets is not None:
        kind = cu_seqlens.dtype if is_packed else _INTS
        check_tensor(op, "checkpoint_offsets", checkpoint_offsets, "N", kind, dims)

    # slots 0..N: initial, then final states; from N on: checkpoints
    slots = torch.arange(N, dtype=INT, device=q.device)
    none = torch.full_like(slots, -1)
    num_slots = N if checkpoint_state is None else 2 * N
    pool = torch.empty((num_slots, HV, V, K), dtype=wide_dtype(q), device=q.device)
    if initial_state is not None:
        pool[:N] = initial_state
    csr = (None, None, None)
    if checkpoint_state is not None and checkpoint_offsets is not None:
        pool[N:] = checkpoint_state  # comes back where no offset matches
        indptr = torch.arange(N + 1, dtype=INT, device=q.device)
        csr = (indptr, checkpoint_offsets.to(INT), slots + N)
    o = kda_prefill(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        g.flatten(0, 1),
        beta.flatten(0, 1),
        A_log,
        dt_bias,
        pool,
        cu_seqlens.to(INT),
        none if initial_state is None else slots,
        none if final_state is None else slots,
        *csr,
        lower_bound=lower_bound,
        scale=scale,
    ).unflatten(0, (B, T))
    if is_packed:
        is_row = torch.arange(T, device=q.device) < cu_seqlens[-1]
        o = torch.where(is_row[:, None, None], o, out)
    out.copy_(o)
    if final_state is not None:
        final_state.copy_(pool[:N])
    if checkpoint_state is not None:
        checkpoint_state.copy_(pool[N:])


def _check_states(
    op: str, states: dict[str, Tensor | None], shape: tuple[int, int, int, int]
) -> None:
    """All states that are given have one shape and one dtype."""
    first = None
    for name, state in states.items():
        if state is None:
            continue
        require(isinstance(state, Tensor), op, name, "a Tensor", type(state).__name__)
        first = state.dtype if first is None else first
        is_right = state.shape == shape and state.dtype == first and state.is_floating_point()
        got = f"{list(state.shape)} {state.dtype}"
        require(is_right, op, name, f"{list(shape)} of one dtype, {first}", got)
