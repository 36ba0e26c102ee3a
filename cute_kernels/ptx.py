"""Single PTX instructions as functions, for kernels that place every fragment by hand.

Shared-memory addresses are Int32 (byte address in the shared window), global ones Int64.
Instructions without memory effects are not volatile, so the compiler may move and merge them.
"""

from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op


def _asm(
    result: Any, operands: list[Any], text: str, constraints: str, effects: bool, loc: Any, ip: Any
) -> Any:
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _unpack(struct: Any, kinds: list[Any], loc: Any, ip: Any) -> tuple[Any, ...]:
    return tuple(
        kind(llvm.extractvalue(kind.mlir_type, struct, [i], loc=loc, ip=ip))
        for i, kind in enumerate(kinds)
    )


def _i32(x: Any, loc: Any, ip: Any) -> Any:
    return Int32(x).ir_value(loc=loc, ip=ip)


def _i64(x: Any, loc: Any, ip: Any) -> Any:
    return Int64(x).ir_value(loc=loc, ip=ip)


def _f32(x: Any, loc: Any, ip: Any) -> Any:
    return Float32(x).ir_value(loc=loc, ip=ip)


@dsl_user_op
def mma_bf16(acc: Any, a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, ...]:
    """acc + a b, m16n8k16: acc 4 Float32, a 4 Int32 (bf16 pairs), b 2 Int32 -> 4 Float32."""
    struct = llvm.StructType.get_literal([T.f32()] * 4)
    operands = [_i32(x, loc, ip) for x in (*a, *b)] + [_f32(x, loc, ip) for x in acc]
    out = _asm(
        struct,
        operands,
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        False,
        loc,
        ip,
    )
    return _unpack(out, [Float32] * 4, loc, ip)


@dsl_user_op
def ldmatrix_x4(
    address: Any, trans: bool = False, *, loc: Any = None, ip: Any = None
) -> tuple[Any, ...]:
    """Four 8x8 bf16 matrices from shared memory; lane i gives row i % 8 of matrix i // 8."""
    struct = llvm.StructType.get_literal([T.i32()] * 4)
    kind = ".trans" if trans else ""
    out = _asm(
        struct,
        [_i32(address, loc, ip)],
        f"ldmatrix.sync.aligned.m8n8.x4{kind}.shared.b16 {{$0, $1, $2, $3}}, [$4];",
        "=r,=r,=r,=r,r,~{memory}",
        True,
        loc,
        ip,
    )
    return _unpack(out, [Int32] * 4, loc, ip)


@dsl_user_op
def stmatrix_x4_trans(address: Any, r: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Four 8x8 bf16 matrices to shared memory, each transposed."""
    _asm(
        None,
        [_i32(address, loc, ip)] + [_i32(x, loc, ip) for x in r],
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0], {$1, $2, $3, $4};",
        "r,r,r,r,r,~{memory}",
        True,
        loc,
        ip,
    )


@dsl_user_op
def pack_bf16(low: Any, high: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two Float32 rounded to nearest even, low in the lower half."""
    return Int32(
        _asm(
            T.i32(),
            [_f32(high, loc, ip), _f32(low, loc, ip)],
            "cvt.rn.bf16x2.f32 $0, $1, $2;",
            "=r,f,f",
            False,
            loc,
            ip,
        )
    )


@dsl_user_op
def unpack_bf16(pair: Any, *, loc: Any = None, ip: Any = None) -> tuple[Float32, Float32]:
    """The low and the high half of a bf16 pair as Float32."""
    value = _i32(pair, loc, ip)
    struct = llvm.StructType.get_literal([T.f32()] * 2)
    out = _asm(
        struct,
        [value],
        "{ .reg .b32 lo, hi; shl.b32 lo, $2, 16; and.b32 hi, $2, 0xffff0000; "
        "mov.b32 $0, lo; mov.b32 $1, hi; }",
        "=f,=f,r",
        False,
        loc,
        ip,
    )
    low, high = _unpack(out, [Float32] * 2, loc, ip)
    return low, high


@dsl_user_op
def lds_f32x4(address: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, ...]:
    struct = llvm.StructType.get_literal([T.f32()] * 4)
    out = _asm(
        struct,
        [_i32(address, loc, ip)],
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,r,~{memory}",
        True,
        loc,
        ip,
    )
    return _unpack(out, [Float32] * 4, loc, ip)


@dsl_user_op
def lds_b32x4(address: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, ...]:
    struct = llvm.StructType.get_literal([T.i32()] * 4)
    out = _asm(
        struct,
        [_i32(address, loc, ip)],
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,r,~{memory}",
        True,
        loc,
        ip,
    )
    return _unpack(out, [Int32] * 4, loc, ip)


@dsl_user_op
def ldg_f32x4(address: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, ...]:
    struct = llvm.StructType.get_literal([T.f32()] * 4)
    out = _asm(
        struct,
        [_i64(address, loc, ip)],
        "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,l,~{memory}",
        True,
        loc,
        ip,
    )
    return _unpack(out, [Float32] * 4, loc, ip)


@dsl_user_op
def ldg_b32x4(address: Any, *, loc: Any = None, ip: Any = None) -> tuple[Any, ...]:
    struct = llvm.StructType.get_literal([T.i32()] * 4)
    out = _asm(
        struct,
        [_i64(address, loc, ip)],
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l,~{memory}",
        True,
        loc,
        ip,
    )
    return _unpack(out, [Int32] * 4, loc, ip)


@dsl_user_op
def stg_f32x4(address: Any, r: Any, *, loc: Any = None, ip: Any = None) -> None:
    _asm(
        None,
        [_i64(address, loc, ip)] + [_f32(x, loc, ip) for x in r],
        "st.global.v4.f32 [$0], {$1, $2, $3, $4};",
        "l,f,f,f,f,~{memory}",
        True,
        loc,
        ip,
    )


@dsl_user_op
def stg_b32x4(address: Any, r: Any, *, loc: Any = None, ip: Any = None) -> None:
    _asm(
        None,
        [_i64(address, loc, ip)] + [_i32(x, loc, ip) for x in r],
        "st.global.v4.b32 [$0], {$1, $2, $3, $4};",
        "l,r,r,r,r,~{memory}",
        True,
        loc,
        ip,
    )


@dsl_user_op
def cp_async_16(
    shared: Any, address: Any, num_bytes: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """16 bytes global -> shared, asynchronous; num_bytes 0 writes zeros and reads nothing."""
    _asm(
        None,
        [_i32(shared, loc, ip), _i64(address, loc, ip), _i32(num_bytes, loc, ip)],
        "cp.async.cg.shared.global [$0], [$1], 16, $2;",
        "r,l,r,~{memory}",
        True,
        loc,
        ip,
    )


@dsl_user_op
def bulk_load(
    shared: Any, address: Any, num_bytes: Any, barrier: Any, *, loc: Any = None, ip: Any = None
) -> None:
    """A contiguous piece global -> shared by the copy engine; completes on an mbarrier."""
    _asm(
        None,
        [
            _i32(shared, loc, ip),
            _i64(address, loc, ip),
            _i32(num_bytes, loc, ip),
            _i32(barrier, loc, ip),
        ],
        "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3];",
        "r,l,r,r,~{memory}",
        True,
        loc,
        ip,
    )


@dsl_user_op
def mbarrier_init(barrier: Any, count: Any, *, loc: Any = None, ip: Any = None) -> None:
    _asm(
        None,
        [_i32(barrier, loc, ip), _i32(count, loc, ip)],
        "mbarrier.init.shared::cta.b64 [$0], $1;",
        "r,r,~{memory}",
        True,
        loc,
        ip,
    )


@dsl_user_op
def mbarrier_expect(barrier: Any, num_bytes: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Arrive once and expect num_bytes of asynchronous copies in this phase."""
    _asm(
        None,
        [_i32(barrier, loc, ip), _i32(num_bytes, loc, ip)],
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;",
        "r,r,~{memory}",
        True,
        loc,
        ip,
    )


@dsl_user_op
def mbarrier_arrive(barrier: Any, *, loc: Any = None, ip: Any = None) -> None:
    _asm(
        None,
        [_i32(barrier, loc, ip)],
        "mbarrier.arrive.shared::cta.b64 _, [$0];",
        "r,~{memory}",
        True,
        loc,
        ip,
    )


@dsl_user_op
def mbarrier_wait(barrier: Any, parity: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Wait until the phase of this parity has completed."""
    _asm(
        None,
        [_i32(barrier, loc, ip), _i32(parity, loc, ip)],
        "{\n\t.reg .pred done;\nWAIT_${:uid}:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1;\n\t"
        "@done bra DONE_${:uid};\n\tbra WAIT_${:uid};\nDONE_${:uid}:\n}",
        "r,r,~{memory}",
        True,
        loc,
        ip,
    )


def _inout(text: str, inouts: list[Any], ins: list[Any], loc: Any, ip: Any) -> list[Any]:
    """Volatile asm whose first operands are read and written, in place, and then read-only ones."""
    code = {Float32: "f", Int32: "r"}
    kinds = [type(x) for x in inouts]
    values = [x.ir_value(loc=loc, ip=ip) for x in inouts]
    read = [x.ir_value(loc=loc, ip=ip) for x in ins]
    constraints = [f"={code[k]}" for k in kinds] + [code[type(x)] for x in ins]
    constraints += [str(i) for i in range(len(inouts))] + ["~{memory}"]
    types = [k.mlir_type for k in kinds]
    result = types[0] if len(types) == 1 else llvm.StructType.get_literal(types)
    operands = read + values
    out = _asm(result if types else None, operands, text, ",".join(constraints), True, loc, ip)
    if len(types) == 1:
        return [kinds[0](out)]
    return [
        k(llvm.extractvalue(k.mlir_type, out, [i], loc=loc, ip=ip)) for i, k in enumerate(kinds)
    ]


@dsl_user_op
def wgmma(
    acc: Any, a: Any, low: Any, high: int, negate: bool = False, b_mn_major: bool = False,
    zero: bool = False, *, loc: Any = None, ip: Any = None,
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
    return _inout(text, list(acc), list(a) + [Int32(low)], loc, ip)


@dsl_user_op
def wgmma_fence(values: Any, *, loc: Any = None, ip: Any = None) -> list[Any]:
    """Orders register writes before the next wgmma; `values` may not be moved across."""
    return _inout("wgmma.fence.sync.aligned;", list(values), [], loc, ip)


@dsl_user_op
def wgmma_commit(*, loc: Any = None, ip: Any = None) -> None:
    _inout("wgmma.commit_group.sync.aligned;", [], [], loc, ip)


@dsl_user_op
def wgmma_wait(pending: int, values: Any, *, loc: Any = None, ip: Any = None) -> list[Any]:
    """Waits until at most `pending` groups run; `values` may not be moved across."""
    return _inout(f"wgmma.wait_group.sync.aligned {pending};", list(values), [], loc, ip)


@dsl_user_op
def edge(value: Any, barrier: Any, *, loc: Any = None, ip: Any = None) -> None:
    """Ends a basic block, so that ptxas can't move code across.

    It is a wait on the barrier that is never entered, as value >= 0; the compiler can't know.
    """
    _asm(
        None,
        [_i32(value, loc, ip), _i32(barrier, loc, ip)],
        "{\n.reg .pred p;\nsetp.ge.s32 p, $0, 0;\n@p bra EDGE_${:uid};\nSPIN_${:uid}:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [$1], 0;\n@!p bra SPIN_${:uid};\n"
        "EDGE_${:uid}:\n}",
        "r,r,~{memory}",
        True,
        loc,
        ip,
    )


@dsl_user_op
def mbarrier_test(barrier: Any, parity: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """1 if the phase of this parity has completed, else 0, without waiting."""
    return Int32(
        _asm(
            T.i32(),
            [_i32(barrier, loc, ip), _i32(parity, loc, ip)],
            "{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [$1], $2; "
            "selp.b32 $0, 1, 0, done; }",
            "=r,r,r,~{memory}",
            True,
            loc,
            ip,
        )
    )
