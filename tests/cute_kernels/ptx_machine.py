"""Runs a CTA of compiled PTX on the CPU, so that a kernel's own code is tested without a GPU.

Lanes of a warp run together at the lowest place that any of them has reached; a warp runs until it
ends or waits at a barrier, so warps get as far apart as their barriers let them. Shared memory
starts as NaN, asynchronous copies land when they are waited for, and an access outside a given
tensor, or not aligned, raises. What only a GPU can show: races within a warp, missing proxy fences.

It knows the instructions that `kda_prepare` compiles to, and raises on any other.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
U32, U64, F32, F64 = np.uint32, np.uint64, np.float32, np.float64
LANES = 32
SHARED_BASE = 1024
SIZES = {"b8": 1, "b16": 2, "b32": 4, "f32": 4, "b64": 8}


class Memory:
    """Global memory: tensors at addresses of its own."""

    def __init__(self) -> None:
        self.next = 1 << 40
        self.pieces: list[tuple[int, Array]] = []

    def add(self, data: Array) -> int:
        """Puts a contiguous array into memory (no copy) and returns its address."""
        raw = data.reshape(-1).view(np.uint8)
        address = self.next
        self.pieces.append((address, raw))
        self.next += (raw.size // 4096 + 2) * 4096
        return address

    def at(self, address: int, size: int) -> Array:
        assert address % min(size, 16) == 0, f"{size} bytes at {address:#x}"
        for base, raw in self.pieces:
            if base <= address and address + size <= base + raw.size:
                return raw[address - base : address - base + size]
        raise IndexError(f"{size} bytes at {address:#x} are outside every tensor")


class Program:
    """The kernel of a PTX file whose name starts so."""

    def __init__(self, text: str, name: str) -> None:
        head, body = text[text.index(f".entry {name}") :].split("\n{", 1)
        body = body[: body.index("\n}")]
        self.params = re.findall(r"\.param (?:\.align \d+ )?\.\w+ (\w+)(?:\[(\d+)\])?", head)
        self.code: list[tuple[str, list[str], str]] = []  # opcode, operands, predicate
        self.labels: dict[str, int] = {}
        for statement in re.sub(r"//[^\n]*", "", body).split(";"):
            self._add(statement.strip())

    def _add(self, text: str) -> None:
        while match := re.match(r"([$\w]+):\s*|[{}]\s*", text):
            if match[1]:
                self.labels[match[1]] = len(self.code)
            text = text[match.end() :]
        if not text or text[0] == ".":
            return
        predicate = ""
        if text[0] == "@":
            predicate, text = text[1:].split(None, 1)
        opcode, _, rest = text.partition(" ") if " " in text else text.partition("\t")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)
        self.code.append((opcode.strip(), operands, predicate))


class Warp:
    def __init__(self, index: int) -> None:
        self.index = index
        self.place = np.zeros(LANES, np.int64)
        self.alive = np.ones(LANES, bool)
        self.registers: dict[str, Array] = {}
        self.copies: list[tuple[int, Array]] = []  # asynchronous, not yet committed
        self.groups: list[list[tuple[int, Array]]] = []


class Cta:
    """One CTA of a kernel; `params` are the bytes of its parameters."""

    def __init__(
        self,
        program: Program,
        params: Sequence[bytes],
        memory: Memory,
        *,
        block: int,
        num_blocks: int,
        threads: int,
        shared_bytes: int,
    ) -> None:
        for (name, size), value in zip(program.params, params, strict=True):
            assert int(size or 4) == len(value), f"{name[-9:]} has {size or 4} bytes, {len(value)=}"
        self.program, self.memory = program, memory
        self.params = {name: v for (name, _), v in zip(program.params, params, strict=True)}
        self.special = {"%ctaid.x": block, "%nctaid.x": num_blocks}
        self.shared = np.full(shared_bytes, 0xFF, np.uint8)
        self.warps = [Warp(i) for i in range(threads // LANES)]

    def run(self, order: Sequence[int]) -> None:
        """To the end; `order` says which warp goes first between two barriers."""
        waiting = dict.fromkeys(order, False)
        while waiting:
            for i in list(waiting):
                if not self._run_warp(self.warps[i]):
                    del waiting[i]

    def _run_warp(self, warp: Warp) -> bool:
        """False if it has ended, True at a barrier."""
        while warp.alive.any():
            place = int(warp.place[warp.alive].min())
            here = warp.alive & (warp.place == place)
            if place == len(self.program.code):
                return False
            opcode, operands, predicate = self.program.code[place]
            active = here
            if predicate:
                value = warp.registers[predicate.lstrip("!")].astype(bool)
                active = here & (~value if predicate[0] == "!" else value)
            warp.place[here] += 1
            if opcode.startswith("bar.sync"):
                assert here.all(), "only a part of a warp is at bar.sync"
                return True
            with np.errstate(all="ignore"):
                Step(self, warp, active, opcode.split("."), operands).run()
        return False


def bf16(x: Array) -> Array:
    """fp32 to the bits of bf16, to nearest even."""
    u = x.astype(F32).view(U32).astype(U64)
    u = (u + U64(0x7FFF) + ((u >> U64(16)) & U64(1))) >> U64(16)
    return np.where(np.isnan(x), U64(0x7FFF), u).astype(U32)


def halves(x: Array) -> tuple[Array, Array]:
    """The two bf16 of a register as fp32."""
    return (x << U32(16)).view(F32), (x & U32(0xFFFF0000)).view(F32)


FLOAT: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.fmax,
    "min": np.fmin,
    "fma": lambda a, b, c: a.astype(F64) * b + c,
    "ex2": lambda a: np.exp2(a.astype(F64)),
    "lg2": lambda a: np.log2(a.astype(F64)),
    "rcp": lambda a: 1 / a.astype(F64),
    "rsqrt": lambda a: 1 / np.sqrt(a.astype(F64)),
}
INTEGER: dict[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "neg": np.negative,
    "shl": np.left_shift,
    "shr": np.right_shift,
    "min": np.minimum,
    "max": np.maximum,
    "not": np.invert,
}
COMPARE: dict[str, Callable[..., Array]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
}
NOTHING = {"griddepcontrol", "fence", "bar"}


class Step:
    """One instruction of one warp."""

    def __init__(
        self, cta: Cta, warp: Warp, active: Array, opcode: list[str], operands: list[str]
    ) -> None:
        self.cta, self.warp, self.active = cta, warp, active
        self.opcode, self.operands = opcode, operands
        self.name, self.kind = opcode[0], opcode[-1]

    def run(self) -> None:
        name, kind = self.name, self.kind
        method = getattr(self, f"_{name}", None)
        if name in NOTHING:
            return
        if kind == "f32" and name in FLOAT:
            self.put(FLOAT[name](*(self.get(x).view(F32) for x in self.operands[1:])).astype(F32))
        elif method is not None:
            method()
        elif name in INTEGER:
            dtype = self.integer(kind)
            value = INTEGER[name](*(self.get(x, dtype) for x in self.operands[1:])).astype(dtype)
            self.put(np.maximum(value, 0) if "relu" in self.opcode else value)
        else:
            raise NotImplementedError(".".join(self.opcode))

    # registers

    def integer(self, kind: str) -> Any:
        wide = kind.endswith("64")
        if kind[0] == "s":
            return np.int64 if wide else np.int32
        return U64 if wide else U32

    def get(self, operand: str, dtype: Any = U32) -> Array:
        """A register, a special one, or a constant, in all lanes."""
        if operand in self.warp.registers:
            value = self.warp.registers[operand]
            same_size = value.itemsize == np.dtype(dtype).itemsize
            return value.view(dtype) if same_size else value.astype(dtype)
        if operand == "%tid.x":
            return (np.arange(LANES) + LANES * self.warp.index).astype(dtype)
        if operand == "%laneid":
            return np.arange(LANES).astype(dtype)
        if operand in self.cta.special:
            return np.full(LANES, self.cta.special[operand], dtype)
        if operand == "__dynamic_shmem__0":
            return np.full(LANES, SHARED_BASE, dtype)
        number = int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)
        return np.full(LANES, number & 0xFFFFFFFFFFFFFFFF, U64).astype(dtype)

    def put(self, value: Array, to: str | None = None) -> None:
        to = self.operands[0] if to is None else to
        if to == "_":
            return
        value = value if value.dtype == bool else value.view(U64 if value.itemsize == 8 else U32)
        old = self.warp.registers.get(to)
        merged = value if old is None else np.where(self.active, value, old)
        self.warp.registers[to] = merged

    def names(self, operand: str) -> list[str]:
        return [x.strip() for x in operand.strip("{}").split(",")]

    def address(self, operand: str) -> Array:
        base, _, offset = operand.strip("[]").partition("+")
        wide = base in self.warp.registers and self.warp.registers[base].itemsize == 8
        return self.get(base, U64 if wide else U32).astype(np.int64) + int(offset or 0)

    # memory

    def shared(self, addresses: Array, size: int) -> Array:
        """Indices of `size` bytes at each address."""
        assert (addresses % size == 0).all(), f"{size} bytes at {addresses}"
        at = addresses - SHARED_BASE
        assert at.min() >= 0 and at.max() + size <= self.cta.shared.size, f"{size} bytes at {at}"
        return at[:, None] + np.arange(size)

    def _ld(self) -> None:
        if self.opcode[1] == "param":
            return self._ld_param()
        size, width = SIZES[self.kind], len(self.names(self.operands[0]))
        data = np.zeros((LANES, size * width), np.uint8)
        addresses = self.address(self.operands[1])
        if self.active.any() and self.opcode[1] == "shared":
            data[self.active] = self.cta.shared[self.shared(addresses[self.active], size * width)]
        elif self.opcode[1] == "global":
            for lane in np.flatnonzero(self.active):
                data[lane] = self.cta.memory.at(int(addresses[lane]), size * width)
        words = data.view(f"u{size}")
        for i, name in enumerate(self.names(self.operands[0])):
            self.put(words[:, i].astype(U64 if size == 8 else U32), name)

    def _ld_param(self) -> None:
        name, _, offset = self.operands[1].strip("[]").partition("+")
        size = SIZES[self.kind]
        for i, to in enumerate(self.names(self.operands[0])):
            at = int(offset or 0) + i * size
            number = int.from_bytes(self.cta.params[name][at : at + size], "little")
            self.put(np.full(LANES, number, U64 if size == 8 else U32), to)

    def _st(self) -> None:
        words = np.stack([self.get(x) for x in self.names(self.operands[1])], 1)
        data = np.ascontiguousarray(words).view(np.uint8)
        addresses = self.address(self.operands[0])
        if self.opcode[1] == "global":
            for lane in np.flatnonzero(self.active):
                self.cta.memory.at(int(addresses[lane]), data.shape[1])[:] = data[lane]
        elif self.active.any():
            to = self.shared(addresses[self.active], data.shape[1])
            self.cta.shared[to] = data[self.active]

    def _cp(self) -> None:
        warp = self.warp
        if self.opcode[2] == "commit_group":
            warp.groups.append(warp.copies)
            warp.copies = []
        elif self.opcode[2] == "wait_group":
            while len(warp.groups) > int(self.operands[0]):
                for to, data in warp.groups.pop(0):
                    self.cta.shared[to : to + data.size] = data
        elif self.opcode[2] == "cg":
            to, source = self.address(self.operands[0]), self.address(self.operands[1])
            sizes = self.get(self.operands[3])
            for lane in np.flatnonzero(self.active):
                zeros = np.zeros(16, np.uint8)
                data = self.cta.memory.at(int(source[lane]), 16) if sizes[lane] else zeros
                warp.copies.append((int(self.shared(to[lane : lane + 1], 16)[0, 0]), data.copy()))
        elif self.opcode[3] == "global":
            (lane,) = np.flatnonzero(self.active)
            size = int(self.operands[2])
            at = int(self.address(self.operands[1])[lane]) - SHARED_BASE
            to = self.cta.memory.at(int(self.address(self.operands[0])[lane]), size)
            to[:] = self.cta.shared[at : at + size]

    def _ldmatrix(self) -> None:
        assert self.active.all()
        addresses = self.address(self.operands[1])
        for i, name in enumerate(self.names(self.operands[0])):
            rows = self.cta.shared[self.shared(addresses[8 * i : 8 * i + 8], 16)]
            self.put(rows.reshape(-1).view(U32), name)

    # arithmetic

    def _mma(self) -> None:
        assert self.active.all()
        depth = 16 if "m16n8k16" in self.opcode else 8
        a, b, c = ([self.get(x) for x in self.names(y)] for y in self.operands[1:])
        g, t = np.arange(LANES) // 4, np.arange(LANES) % 4
        A, B, C = np.zeros((16, depth)), np.zeros((depth, 8)), np.zeros((16, 8))
        for i, x in enumerate(a):
            for e, value in enumerate(halves(x)):
                A[g + 8 * (i % 2), 2 * t + 8 * (i // 2) + e] = value
        for i, x in enumerate(b):
            for e, value in enumerate(halves(x)):
                B[2 * t + 8 * i + e, g] = value
        places = [(g + 8 * (i // 2), 2 * t + i % 2) for i in range(4)]
        for place, x in zip(places, c, strict=True):
            C[place] = x.view(F32)
        out = (C + A @ B).astype(F32)
        for place, name in zip(places, self.names(self.operands[0]), strict=True):
            self.put(out[place], name)

    def _mul(self) -> None:
        self._mad()

    def _mad(self) -> None:
        if self.kind == "bf16x2":
            pairs = zip(*(halves(self.get(x)) for x in self.operands[1:]), strict=True)
            low, high = (bf16(x * y) for x, y in pairs)
            return self.put(low | (high << U32(16)))
        form, dtype = self.opcode[1], self.integer(self.kind)
        # a product of two 32-bit numbers fits 64 bits, of which "lo" wants the lower half
        wide = np.int64 if self.kind[0] == "s" else U64
        x, y = (self.get(z, dtype).astype(wide) for z in self.operands[1:3])
        x = (x * y).view(U64)
        if form == "hi":
            return self.put((x >> U64(32)).astype(U32))
        out = U64 if form == "wide" or self.kind.endswith("64") else U32
        if self.name == "mad":
            x = x + self.get(self.operands[3], out).astype(U64)
        self.put(x.astype(out))

    def _cvt(self) -> None:
        to, source = self.opcode[-2], self.kind
        x = self.operands[1]
        if to == "bf16x2":
            high, low = (bf16(self.get(y).view(F32)) for y in self.operands[1:])
            self.put(low | (high << U32(16)))
        elif (to, source) == ("f32", "bf16"):
            self.put(self.get(x) << U32(16))
        elif (to, source) == ("u32", "u16"):
            self.put(self.get(x) & U32(0xFFFF))
        elif (to, source) == ("s64", "s32"):
            self.put(self.get(x, np.int32).astype(np.int64))
        elif (to, source) == ("u64", "u32"):
            self.put(self.get(x).astype(U64))
        else:
            raise NotImplementedError(".".join(self.opcode))

    def _mov(self) -> None:
        parts = self.names(self.operands[1])
        if len(parts) == 2:
            low, high = (self.get(x) & U32(0xFFFF) for x in parts)
            return self.put(low | (high << U32(16)))
        self.put(self.get(parts[0], self.integer(self.kind)))

    def _selp(self) -> None:
        dtype = self.integer(self.kind)
        chosen = self.warp.registers[self.operands[3]].astype(bool)
        x, y = (self.get(z, dtype) for z in self.operands[1:3])
        self.put(np.where(chosen, x, y))

    def _setp(self) -> None:
        is_float = self.kind == "f32"
        dtype = U32 if is_float else self.integer(self.kind)
        x, y = (self.get(z, dtype) for z in self.operands[1:])
        if is_float:
            x, y = x.view(F32), y.view(F32)
        self.put(COMPARE[self.opcode[1]](x, y))

    def _shfl(self) -> None:
        assert self.active.all() and self.opcode[2] in ("idx", "up")
        lanes, by = np.arange(LANES), self.get(self.operands[2], np.int32)
        source = by & 31 if self.opcode[2] == "idx" else np.where(lanes >= by, lanes - by, lanes)
        self.put(self.get(self.operands[1])[source])

    def _vote(self) -> None:
        assert self.active.all() and self.opcode[2] == "ballot"
        votes = self.get(self.operands[1]).astype(U64) << np.arange(LANES, dtype=U64)
        self.put(np.full(LANES, votes.sum(), U64).astype(U32))

    def _clz(self) -> None:
        value = self.get(self.operands[1]).astype(F64)
        self.put(np.where(value > 0, 31 - np.floor(np.log2(np.fmax(value, 1))), 32).astype(U32))

    def _bra(self) -> None:
        self.warp.place[self.active] = self.cta.program.labels[self.operands[0]]

    def _ret(self) -> None:
        self.warp.alive &= ~self.active
