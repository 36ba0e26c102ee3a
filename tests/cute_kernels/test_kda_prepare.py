"""The prepare kernel against its mirror: its PTX on the CPU, and the kernel on a GPU."""

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch_kda.cute_kernels.kda_prefill import (
    PREFILL,
    STAGES,
    launch_stages,
    workspace_bytes,
)
from torch_kda.ops.reference import kda_recurrent_ref
from torch_kda.tests.checks import assert_rms, assert_same
from torch_kda.tests.cute_kernels import mirror, ptx_machine
from torch_kda.tests.cute_kernels.conftest import Built

SCALE = 128**-0.5
RESERVED = 1024  # bytes of a CTA's shared memory that are the system's
GATES = {"bounded": -5.0, "softplus": None}
# added to normal gate logits; "extreme" decays by up to thousands a token beside some by nothing
SHIFTS = {
    "fast": 0.0,
    "slow": -4.0,
    "weak": -8.0,
    "faint": -12.0,
    "saturated": 40.0,
    "extreme": 0.0,
}


# of sequences; on both sides of what a round of the search for a tile's sequence tells apart
LENGTHS = {
    "1": [21],
    "first-empty": [0, 0, 5, 33],
    "middle-empty": [40, 0, 0, 0, 17],
    "last-empty": [16, 1, 0],
    "all-empty": [0, 0],
    **{str(n): [7 * i % 37 for i in range(n)] for n in (30, 31, 32, 33, 1000, 1022, 1023)},
    "many-empty": [30 * (i % 97 == 5) for i in range(2000)],
    "4096": [(37 * i) % 61 for i in range(4096)],
}


@dataclass(frozen=True)
class Case:
    """Rows past cu_seqlens[-1], and what rows are padded with, hold NaN."""

    cu_seqlens: list[int]
    q: Tensor
    k: Tensor
    v: Tensor
    g_raw: Tensor
    beta_logit: Tensor
    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None
    sequences: Tensor
    tiles: Tensor

    @property
    def heads(self) -> int:
        return self.g_raw.shape[1]

    @property
    def is_needed(self) -> Tensor:
        """Of tiles."""
        return self.tiles[:, 1] > 0

    def records(self) -> mirror.Records:
        return mirror.kda_prepare_mirror(
            self.q, self.k, self.g_raw, self.beta_logit, self.A_log, self.dt_bias, self.tiles,
            lower_bound=self.lower_bound, scale=SCALE,
        )  # fmt: skip


def make_case(
    lengths: list[int],
    gate: str = "bounded",
    shift: str = "slow",
    *,
    H: int = 1,
    HV: int = 1,
    spare_rows: int = 0,
    pad: int = 0,
    keys: str = "random",
    seed: int = 0,
) -> Case:
    gen = torch.Generator().manual_seed(seed)
    cu_seqlens = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    T = cu_seqlens[-1] + spare_rows

    def rows(*shape: int) -> Tensor:
        x = torch.full((T, *shape), float("nan"))
        x[: cu_seqlens[-1]] = torch.randn(cu_seqlens[-1], *shape, generator=gen)
        return x

    q, k, v, g_raw = rows(H, 128), rows(H, 128), rows(HV, 128), rows(HV, 128)
    beta_logit = rows(HV)
    if keys != "random":
        k[:] = k[:1] + (0.05 * k if keys == "near" else 0.0)
    if shift == "extreme":
        g_raw *= torch.exp(2.5 * torch.randn(g_raw.shape, generator=gen)) * 20
    return Case(
        cu_seqlens=cu_seqlens,
        q=pad_rows(q, pad),
        k=pad_rows(k, pad),
        v=pad_rows(v, pad),
        g_raw=pad_rows(g_raw + SHIFTS[shift], pad),
        beta_logit=pad_rows(beta_logit, pad),
        A_log=0.3 * torch.randn(HV, generator=gen),
        dt_bias=0.5 * torch.randn(HV, 128, generator=gen),
        lower_bound=GATES[gate],
        sequences=mirror.order_sequences(cu_seqlens),
        tiles=mirror.find_tiles(cu_seqlens, T),
    )


def pad_rows(x: Tensor, pad: int) -> Tensor:
    """bf16, with `pad` NaN between the rows."""
    wide = torch.full((x.shape[0], x[0].numel() + pad), float("nan"), dtype=torch.bfloat16)
    wide[:, : x[0].numel()] = x.flatten(1)
    return wide[:, : x[0].numel()].unflatten(1, x.shape[1:])


@pytest.mark.parametrize("keys", ["random", "near", "same"])
@pytest.mark.parametrize("shift", ["fast", "slow", "weak", "faint", "saturated", "extreme"])
@pytest.mark.parametrize("gate", GATES)
def test_mirror_follows_the_recurrence(gate: str, shift: str, keys: str) -> None:
    """At full length and with a tail; near-equal keys amplify every rounding, so they get more."""
    if (gate, shift) == ("bounded", "extreme") or (gate, shift) == ("softplus", "saturated"):
        pytest.skip("the bound makes it saturated; without a bound it is extreme")
    case = make_case([150, 0, 37], gate, shift, HV=2, keys=keys)
    pool = 0.1 * torch.randn(3, 2, 128, 128, generator=torch.Generator().manual_seed(1))
    truth_pool, slots = pool.double(), torch.arange(3, dtype=torch.int32)
    inputs = (case.q, case.k, case.v, case.g_raw, case.beta_logit, case.A_log, case.dt_bias)
    truth = kda_recurrent_ref(
        *(x.double() for x in inputs), truth_pool,
        torch.tensor(case.cu_seqlens, dtype=torch.int32), slots, slots,
        lower_bound=case.lower_bound, scale=SCALE,
    )  # fmt: skip
    o, states, _ = mirror.kda_scan_mirror(case.records(), case.v, case.sequences, pool)
    bound = 4.5e-3 if keys == "random" else 7e-3
    assert_rms("o", o, truth, bound)
    assert_rms("states", states, truth_pool, bound)


def test_mirror_checkpoints_are_final_states() -> None:
    case = make_case([64, 40], HV=2)
    pool = torch.zeros(2, 2, 128, 128)
    args = (case.records(), case.v)
    _, final, kept = mirror.kda_scan_mirror(*args, case.sequences, pool, checkpoints=(32, 64))
    assert set(kept) == {(0, 32), (0, 64), (1, 32)}
    assert torch.equal(kept[0, 64], final[0])
    shorter = case.sequences.clone()
    shorter[:, 2] = 32
    _, final, _ = mirror.kda_scan_mirror(*args, shorter, pool)
    assert torch.equal(kept[0, 32], final[0]) and torch.equal(kept[1, 32], final[1])


def test_record_layout() -> None:
    """The bytes of a record, said once more: the kernels and the mirror must agree with this."""
    records = make_case([16]).records()
    image = mirror.pack_records(records)
    assert image.shape == (2, mirror.RECORD_BYTES)  # one of them without rows
    for (name, x), (_, y) in zip(
        records.items(), mirror.unpack_records(image, 1).items(), strict=True
    ):
        assert torch.equal(x, y), name
    words = image[0].view(torch.bfloat16)
    # channel 87 = 64 + 16 + 4 + 2 + 1 is in the second half, group 1, t = 1, b = 1, e = 1:
    # place 16 + 8 + 2 + 1 = 27 of the half, so chunk 3 and the fourth of its eight
    chunk = 3 ^ (13 & 7)
    for tile, x in enumerate((records.k_decayed, records.q_decayed, records.k_update)):
        byte = 6144 + tile * 2048 + 13 * 128 + chunk * 16 + 3 * 2
        assert words[byte // 2] == x[0, 0, 13, 87]
    assert words[(12288 + 2 * 128 + 5 * 16 + 3 * 2) // 2] == records.mq[0, 0, 13, 3]
    assert image[0].view(torch.float32)[12800 // 4 + 87] == records.et[0, 0, 87]


CASES = {
    "one": make_case([16], shift="fast"),
    "tails": make_case([37, 1, 0, 5], shift="weak", HV=2, spare_rows=21, pad=8, seed=1),
    "gva": make_case([16, 18], shift="saturated", H=2, HV=4, spare_rows=3, seed=2),
    "sp-one": make_case([16], "softplus", "fast"),
    "sp-tails": make_case([37, 1, 0, 5], "softplus", "faint", HV=2, spare_rows=21, pad=8, seed=1),
    "sp-gva": make_case([16, 18], "softplus", "extreme", H=2, HV=4, spare_rows=3, seed=2),
}


@pytest.mark.parametrize(
    ("name", "order"),
    [*((name, (0, 1)) for name in CASES), ("tails", (1, 0)), ("sp-tails", (1, 0))],
    ids=lambda x: x if isinstance(x, str) else f"warp{x[0]}-first",
)
def test_kda_prepare_ptx(
    name: str, order: tuple[int, int], objects: Callable[[str], Built]
) -> None:
    case = CASES[name]
    gate = "softplus" if case.lower_bound is None else "bounded"
    built, variant = objects("sm_90a"), PREFILL[gate].name
    program = ptx_machine.Program(built.ptx[variant].read_text(), f"kda_prepare_{gate}")
    shared_bytes = prepare_resources(built, gate)["shared_bytes"] - RESERVED
    got = run_ptx(program, case, order, shared_bytes)
    check_records(case, got.records)
    check_padding(case, got.records, got.o)
    assert_same("order", got.order, case.sequences)


def prepare_resources(built: Built, gate: str) -> dict[str, int]:
    kernels = built.entries[PREFILL[gate].name]["kernels"]
    (use,) = [x for name, x in kernels.items() if name.startswith("kda_prepare")]
    return use


class Written(NamedTuple):
    """By prepare, in bytes that were 0xFF."""

    records: Tensor  # [TC * HV, 13312] uint8
    order: Tensor  # [N, 4] int32
    o: Tensor

    @staticmethod
    def empty(case: Case, device: str) -> tuple["Written", Tensor]:
        """And the workspace that the first two lie in."""
        T, HV = case.g_raw.shape[:2]
        N, num_records = len(case.cu_seqlens) - 1, case.tiles.shape[0] * HV
        size = workspace_bytes(T, N, HV)
        workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=device)
        records = workspace[: num_records * mirror.RECORD_BYTES].view(num_records, -1)
        order = workspace[records.numel() :].view(torch.int32).view(N, 4)
        o = torch.full((T, HV, 128), float("nan"), dtype=torch.bfloat16, device=device)
        return Written(records, order, o), workspace


def run_ptx(
    program: ptx_machine.Program,
    case: Case,
    order: tuple[int, int],
    shared_bytes: int,
    blocks: Iterable[int] | None = None,
) -> Written:
    """All CTAs of one launch, one after the other, or some of them."""
    HV, H, TC = case.heads, case.q.shape[1], case.tiles.shape[0]
    out, workspace = Written.empty(case, "cpu")
    memory = ptx_machine.Memory()

    def rows(x: Tensor) -> bytes:
        """A tensor argument: address, sizes, row stride."""
        raw = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,))
        address = memory.add(raw.view(torch.uint8).numpy())
        return struct.pack("<QiiQ", address, *x.shape[:2], x.stride(0))

    def flat(x: Tensor) -> bytes:
        return struct.pack("<Qi4x", memory.add(x.numpy()), x.shape[0])

    cu_seqlens = torch.tensor(case.cu_seqlens, dtype=torch.int32)
    at = memory.add(workspace.numpy())
    params = [
        *(rows(x) for x in (case.q, case.k, case.g_raw, case.beta_logit)),
        *(flat(x) for x in (case.A_log, case.dt_bias, cu_seqlens)),
        struct.pack("<Qi4x", at, workspace.shape[0]),
        struct.pack("<Qi4x", at + out.records.numel(), out.order.numel()),
        rows(out.o),
        struct.pack("<i", len(case.cu_seqlens) - 1),
        *(struct.pack("<f", x) for x in (case.lower_bound or 0.0, SCALE)),
        *(divisor(HV), struct.pack("<i", HV), divisor(HV // H), struct.pack("<i", HV // H)),
    ]
    num_blocks = 1 + TC * HV
    for block in range(num_blocks) if blocks is None else blocks:
        cta = ptx_machine.Cta(
            program, params, memory,
            block=block, num_blocks=num_blocks, threads=64, shared_bytes=shared_bytes,
        )  # fmt: skip
        cta.run(order)
    return out


def divisor(d: int) -> bytes:
    """CuTe's FastDivmodDivisor: x // d = (mulhi(x, m) + ((x - mulhi(x, m)) >> s1)) >> s2."""
    bits = (d - 1).bit_length()
    multiplier = (((1 << bits) - d) << 32) // d + 1
    return struct.pack("<IIBBxx", d, multiplier, min(bits, 1), max(bits - 1, 0))


def check_records(case: Case, image: Tensor) -> None:
    """Each field is the mirror's but for a few roundings to the neighbour; zeros are zeros."""
    want = case.records()
    got = mirror.unpack_records(needed(case, image), case.heads)
    for (name, x), (_, y) in zip(got.items(), want.items(), strict=True):
        y = y[case.is_needed]
        # G reaches -115, where a step of fp32 is 7.6e-6, and Et = 2^G is kept in fp32
        assert_rms(name, x, y, 3e-5 if name == "et" else 1e-3)
        # exponentials below the smallest normal number may or may not be flushed
        assert (x[y == 0].abs() < 1e-30).all(), f"{name}: not zero where the mirror is"
    above = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)
    assert (got.mq[..., above] == 0).all()
    rows = torch.arange(16) >= case.tiles[case.is_needed][:, 1:]
    for name in ("k_decayed", "q_decayed", "k_update"):
        assert (getattr(got, name).movedim(1, 2)[rows] == 0).all(), f"{name}: rows past the end"


def needed(case: Case, image: Tensor, *, which: bool = True) -> Tensor:
    """The records of the tiles that are needed, or of the others."""
    return image.unflatten(0, (-1, case.heads))[case.is_needed == which].flatten(0, 1)


def check_padding(case: Case, records: Tensor, o: Tensor) -> None:
    end = case.cu_seqlens[-1]
    assert (o[end:] == 0).all(), "rows of no sequence"
    assert o[:end].isnan().all(), "rows of sequences are the scan's"
    assert (needed(case, records, which=False) == 0xFF).all(), "records of other tiles"


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("lengths", "H", "HV", "spare_rows", "pad"),
    [
        pytest.param([1], 1, 1, 15, 0, id="T1"),
        pytest.param([1000], 2, 2, 8, 0, id="T1000"),
        pytest.param([37, 1, 0, 5, 64, 130, 3], 2, 4, 40, 8, id="mixed-gva-strided"),
        pytest.param([16] * 40, 3, 3, 0, 16, id="many"),
    ],
)
@pytest.mark.parametrize("shift", ["fast", "slow", "faint", "saturated", "extreme"])
@pytest.mark.parametrize("gate", GATES)
def test_kda_prepare(
    gate: str, shift: str, lengths: list[int], H: int, HV: int, spare_rows: int, pad: int
) -> None:
    if (gate, shift) == ("bounded", "extreme"):
        pytest.skip("the bound makes it saturated")
    case = make_case(lengths, gate, shift, H=H, HV=HV, spare_rows=spare_rows, pad=pad)
    first, second = launch(case), launch(case)
    assert torch.equal(first.records, second.records), "two runs differ"
    check_records(case, first.records)
    check_padding(case, first.records, first.o)
    assert_same("order", first.order, case.sequences)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_kda_prepare_finds_its_tiles(lengths: list[int]) -> None:
    case = make_case(lengths, spare_rows=37)
    got = launch(case)
    check_padding(case, got.records, got.o)
    if any(lengths):
        check_records(case, got.records)
    assert_same("order", got.order, case.sequences)


def launch(case: Case) -> Written:
    """What one launch of prepare alone writes, on the CPU."""
    HV, N = case.heads, len(case.cu_seqlens) - 1
    ints = torch.zeros(N + 1, dtype=torch.int32, device="cuda")
    # .cuda() would close the gaps between rows
    rows = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda").copy_(x)
        for x in (case.q, case.k, case.v, case.g_raw, case.beta_logit)
    ]
    tensors = (
        *(*rows, case.A_log.cuda(), case.dt_bias.cuda()),
        torch.empty(1, HV, 128, 128, device="cuda"),
        *(torch.tensor(case.cu_seqlens, dtype=torch.int32).cuda(), ints[:N], ints[:N]),
        *(ints, ints[:1], ints[:1]),
    )
    out, workspace = Written.empty(case, "cuda")
    launch_stages(
        tensors, workspace, out.o,
        lower_bound=case.lower_bound, scale=SCALE, stages=STAGES["prepare"],
    )  # fmt: skip
    return Written(*(x.cpu() for x in out))


def test_occupancy(objects: Callable[[str], Built]) -> None:
    """CTAs an SM by registers (given to warps in 256, to four partitions) and by shared memory."""
    for gate, least in (("bounded", 12), ("softplus", 10)):
        use = prepare_resources(objects("sm_90a"), gate)
        assert use["threads"] == 64
        warps = 4 * (16384 // (32 * -(-use["registers"] // 8) * 8))
        assert warps // 2 >= least, f"{gate}: {use}"
        assert 228 * 1024 // use["shared_bytes"] >= least, f"{gate}: {use}"
