"""Single PTX instructions as functions, for kernels that place every fragment by hand.

Shared-memory addresses are Int32 (byte address in the shared window), global ones Int64.
Instructions without memory effects are not volatile, so the compiler may move and merge them.
"""

from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm


def op(results: list[Any], text: str, *args: Any, memory: bool = False) -> Any:
    """One instruction; operands $0.. are the results, then the arguments. Its one result, or all.

    Without effects on memory the compiler may move and merge it.
    """
    letters = {Float32: "f", Int32: "r", Int64: "l"}
    constraints = ["=" + letters[kind] for kind in results] + [letters[type(arg)] for arg in args]
    out = _asm(results, text, args, constraints + ["~{memory}"] * memory, has_effects=memory)
    return out[0] if len(out) == 1 else out or None


def _asm(
    results: list[Any], text: str, args: Any, constraints: list[str], *, has_effects: bool
) -> list[Any]:
    types = [kind.mlir_type for kind in results]
    result_type = llvm.StructType.get_literal(types) if len(types) > 1 else (types or [None])[0]
    out = llvm.inline_asm(
        result_type,
        [arg.ir_value() for arg in args],
        text,
        ",".join(constraints),
        has_side_effects=has_effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if len(results) < 2:
        return [kind(out) for kind in results]
    return [kind(llvm.extractvalue(kind.mlir_type, out, [i])) for i, kind in enumerate(results)]


def ex2(x: Any) -> Any:
    return op([Float32], "ex2.approx.ftz.f32 $0, $1;", Float32(x))


def lg2(x: Any) -> Any:
    return op([Float32], "lg2.approx.ftz.f32 $0, $1;", Float32(x))


def rcp(x: Any) -> Any:
    return op([Float32], "rcp.approx.ftz.f32 $0, $1;", Float32(x))


def rsqrt(x: Any) -> Any:
    return op([Float32], "rsqrt.approx.ftz.f32 $0, $1;", Float32(x))


def mma_bf16(acc: Any, a: Any, b: Any) -> Any:
    """acc + a b, m16n8k16: acc 4 Float32, a 4 Int32 (bf16 pairs), b 2 Int32 -> 4 Float32."""
    text = (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return op([Float32] * 4, text, *map(Int32, (*a, *b)), *map(Float32, acc))


def mma_bf16_k8(acc: Any, a: Any, b: Any) -> Any:
    """acc + a b for one m16n8k8 tile: half of `ptx.mma_bf16`'s depth."""
    text = (
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};"
    )
    return op([Float32] * 4, text, *map(Int32, (*a, b)), *map(Float32, acc))


def pack_bf16(low: Any, high: Any) -> Any:
    """Two Float32 rounded to nearest even, low in the lower half."""
    return op([Int32], "cvt.rn.bf16x2.f32 $0, $1, $2;", Float32(high), Float32(low))


def unpack_bf16(pair: Any) -> Any:
    """The low and the high half of a bf16 pair as Float32."""
    text = (
        "{ .reg .b32 lo, hi; shl.b32 lo, $2, 16; and.b32 hi, $2, 0xffff0000; "
        "mov.b32 $0, lo; mov.b32 $1, hi; }"
    )
    return op([Float32] * 2, text, Int32(pair))


def ldmatrix_x4(address: Any, trans: bool = False) -> Any:
    """Four 8x8 bf16 matrices from shared memory; lane i gives row i % 8 of matrix i // 8."""
    kind = ".trans" if trans else ""
    text = f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4];"
    return op([Int32] * 4, text, Int32(address), memory=True)


def stmatrix_x4_trans(address: Any, r: Any) -> None:
    """Four 8x8 bf16 matrices to shared memory, each transposed."""
    text = "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};"
    op([], text, Int32(address), *map(Int32, r), memory=True)


def lds_b32(address: Any) -> Any:
    return op([Int32], "ld.shared.b32 $0, [$1];", Int32(address), memory=True)


def lds_f32(address: Any) -> Any:
    return op([Float32], "ld.shared.f32 $0, [$1];", Int32(address), memory=True)


def lds_f32x2(address: Any) -> Any:
    return op([Float32] * 2, "ld.shared.v2.f32 {$0, $1}, [$2];", Int32(address), memory=True)


def sts_b32(address: Any, x: Any) -> None:
    op([], "st.shared.b32 [$0], $1;", Int32(address), Int32(x), memory=True)


def sts_f32(address: Any, x: Any) -> None:
    op([], "st.shared.f32 [$0], $1;", Int32(address), Float32(x), memory=True)


def sts_f32x2(address: Any, x: Any) -> None:
    op([], "st.shared.v2.f32 [$0], {$1, $2};", Int32(address), *map(Float32, x), memory=True)


def sts_f32x4(address: Any, x: Any) -> None:
    text = "st.shared.v4.f32 [$0], {$1, $2, $3, $4};"
    op([], text, Int32(address), *map(Float32, x), memory=True)


def ldg_b32(address: Any) -> Any:
    return op([Int32], "ld.global.b32 $0, [$1];", Int64(address), memory=True)


def ldg_f32(address: Any) -> Any:
    return op([Float32], "ld.global.f32 $0, [$1];", Int64(address), memory=True)


def ldg_bf16(address: Any) -> Any:
    text = "{ .reg .b16 x; ld.global.b16 x, [$1]; mov.b32 $0, {0, x}; }"
    return op([Float32], text, Int64(address), memory=True)


def stg_b32(address: Any, x: Any) -> None:
    op([], "st.global.b32 [$0], $1;", Int64(address), Int32(x), memory=True)


def lds_f32x4(address: Any) -> Any:
    return op(
        [Float32] * 4, "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", Int32(address), memory=True
    )


def lds_b32x4(address: Any) -> Any:
    return op([Int32] * 4, "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", Int32(address), memory=True)


def ldg_f32x4(address: Any) -> Any:
    return op(
        [Float32] * 4, "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", Int64(address), memory=True
    )


def ldg_b32x4(address: Any) -> Any:
    return op([Int32] * 4, "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", Int64(address), memory=True)


def stg_f32x4(address: Any, x: Any) -> None:
    text = "st.global.v4.f32 [$0], {$1, $2, $3, $4};"
    op([], text, Int64(address), *map(Float32, x), memory=True)


def stg_b32x4(address: Any, x: Any) -> None:
    text = "st.global.v4.b32 [$0], {$1, $2, $3, $4};"
    op([], text, Int64(address), *map(Int32, x), memory=True)


def cp_async_16(shared: Any, address: Any, num_bytes: Any) -> None:
    """16 bytes global -> shared, asynchronous; num_bytes 0 writes zeros and reads nothing."""
    text = "cp.async.cg.shared.global [$0], [$1], 16, $2;"
    op([], text, Int32(shared), Int64(address), Int32(num_bytes), memory=True)


def bulk_load(shared: Any, address: Any, num_bytes: Any, barrier: Any) -> None:
    """A contiguous piece global -> shared by the copy engine; completes on an mbarrier."""
    text = "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];"
    op([], text, Int32(shared), Int64(address), Int32(num_bytes), Int32(barrier), memory=True)


def bulk_store(address: Any, shared: Any, num_bytes: int) -> None:
    """A contiguous piece shared -> global by the copy engine."""
    text = f"cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], {num_bytes};"
    op([], text, Int64(address), Int32(shared), memory=True)


def mbarrier_init(barrier: Any, count: Any) -> None:
    op([], "mbarrier.init.shared::cta.b64 [$0], $1;", Int32(barrier), Int32(count), memory=True)


def mbarrier_expect(barrier: Any, num_bytes: Any) -> None:
    """Arrive once and expect num_bytes of asynchronous copies in this phase."""
    text = "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;"
    op([], text, Int32(barrier), Int32(num_bytes), memory=True)


def mbarrier_arrive(barrier: Any) -> None:
    op([], "mbarrier.arrive.shared::cta.b64 _, [$0];", Int32(barrier), memory=True)


def mbarrier_wait(barrier: Any, parity: Any) -> None:
    """Wait until the phase of this parity has completed."""
    text = (
        "{\n\t.reg .pred done;\nWAIT_${:uid}:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n\t"
        "@done bra DONE_${:uid};\n\tbra WAIT_${:uid};\nDONE_${:uid}:\n}"
    )
    op([], text, Int32(barrier), Int32(parity), memory=True)


def mbarrier_test(barrier: Any, parity: Any) -> Any:
    """1 if the phase of this parity has completed, else 0, without waiting."""
    text = (
        "{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [$1], $2; "
        "selp.b32 $0, 1, 0, done; }"
    )
    return op([Int32], text, Int32(barrier), Int32(parity), memory=True)


def edge(value: Any, barrier: Any) -> None:
    """Ends a basic block, so that ptxas can't move code across.

    It is a wait on the barrier that is never entered, as value >= 0; the compiler can't know.
    """
    text = (
        "{\n.reg .pred p;\nsetp.ge.s32 p, $0, 0;\n@p bra EDGE_${:uid};\nSPIN_${:uid}:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [$1], 0;\n@!p bra SPIN_${:uid};\n"
        "EDGE_${:uid}:\n}"
    )
    op([], text, Int32(value), Int32(barrier), memory=True)


def _inout(text: str, inouts: list[Any], ins: list[Any]) -> list[Any]:
    """Volatile asm whose first operands are read and written, in place, and then read-only ones."""
    code = {Float32: "f", Int32: "r"}
    kinds = [type(x) for x in inouts]
    constraints = [f"={code[k]}" for k in kinds] + [code[type(x)] for x in ins]
    constraints += [str(i) for i in range(len(inouts))] + ["~{memory}"]
    return _asm(kinds, text, [*ins, *inouts], constraints, has_effects=True)


def wgmma(
    acc: Any, a: Any, low: Any, high: int, negate: bool = False, b_mn_major: bool = False,
    zero: bool = False,
) -> list[Any]:  # fmt: skip
    """acc (+|-)= a B: m64, n = 2 * len(acc), k16; a 4 Int32 (bf16 pairs), B by its descriptor."""
    n = len(acc)
    regs = ", ".join(f"${i}" for i in range(n))
    a_regs = ", ".join(f"${n + i}" for i in range(4))
    text = (
        "{\n.reg .pred p;\n.reg .b32 h;\n.reg .b64 d;\n"
        f"setp.ne.b32 p, {0 if zero else 1}, 0;\nmov.b32 h, {high};\nmov.b64 d, {{${n + 4}, h}};\n"
        f"wgmma.mma_async.sync.aligned.m64n{2 * n}k16.f32.bf16.bf16 "
        f"{{{regs}}}, {{{a_regs}}}, d, p, {-1 if negate else 1}, 1, {1 if b_mn_major else 0};\n}}"
    )
    return _inout(text, list(acc), list(a) + [Int32(low)])


def wgmma_fence(values: Any) -> list[Any]:
    """Orders register writes before the next wgmma; `values` may not be moved across."""
    return _inout("wgmma.fence.sync.aligned;", list(values), [])


def wgmma_commit() -> None:
    _inout("wgmma.commit_group.sync.aligned;", [], [])


def wgmma_wait(pending: int, values: Any) -> list[Any]:
    """Waits until at most `pending` groups run; `values` may not be moved across."""
    return _inout(f"wgmma.wait_group.sync.aligned {pending};", list(values), [])
