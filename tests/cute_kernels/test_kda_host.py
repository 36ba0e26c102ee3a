"""Every object compiles for every arch without a GPU, and its kernels are what was meant."""

from collections.abc import Callable

import pytest
from torch_kda.cute_kernels.jit import ARCHS
from torch_kda.cute_kernels.kda_prefill import GATES, VARIANTS
from torch_kda.cute_kernels.tiles import SCAN_TILES
from torch_kda.tests.cute_kernels.conftest import Built

SHARED_A_SM = 227 * 1024  # of both archs, what one CTA may take
REGISTERS_AN_SM = 65536
SCANS = [f"kda_scan_v{tile.rows}" for tile, _ in SCAN_TILES]

# what a kernel must be made of: an instruction that starts so, and how many at least
PREPARE = {"HMMA.16816.F32.BF16": 8, "LDSM": 4, "UBLKCP": 1, "MUFU.EX2": 16}
PREPARE |= {"VOTE": 2, "STG.E.128": 1}  # of the search for a tile, and of the order
SCAN = {"UBLKCP": 1, "SYNCS": 2, "STG.E.128": 4, "F2FP.BF16.F32.PACK_AB": 8}
MEANT = {
    "sm_90a": {"kda_prepare": PREPARE, "kda_scan": SCAN | {"HGMMA.64x": 8}},
    # wgmma is Hopper's alone
    "sm_100a": {
        "kda_prepare": PREPARE,
        "kda_scan": SCAN | {"HMMA.16816.F32.BF16": 16, "LDSM": 8},
    },
}


@pytest.fixture(params=sorted(ARCHS.values()))
def built(request: pytest.FixtureRequest, objects: Callable[[str], Built]) -> Built:
    return objects(request.param)


def kernels(built: Built) -> dict[str, dict[str, int]]:
    """All kernels of all objects: "object kernel" to what it takes."""
    return {
        f"{name} {kernel}": use
        for name, entry in built.entries.items()
        for kernel, use in entry["kernels"].items()
    }


def test_kernels_are_all_there(built: Built) -> None:
    """A call launches prepare and one of the scans; nothing else hides in an object."""
    assert list(built.entries) == [variant.name for variant in VARIANTS]
    names = {
        name: sorted(kernel.rsplit("_", 1)[0] for kernel in entry["kernels"])
        for name, entry in built.entries.items()
    }
    assert names == {
        f"kda_prefill_{gate}": sorted([f"kda_prepare_{gate}", *SCANS]) for gate in GATES
    }


def test_no_spills(built: Built) -> None:
    for name, use in kernels(built).items():
        assert use["stack_bytes"] == 0 and use["local_bytes"] == 0, f"{name}: {use}"
    for name, per_kernel in built.opcodes.items():
        for kernel, found in per_kernel.items():
            local = {op: n for op, n in found.items() if op.startswith(("LDL", "STL"))}
            assert not local, f"{name} {kernel} uses local memory: {local}"


def test_fits_an_sm(built: Built) -> None:
    for name, use in kernels(built).items():
        assert 0 < use["shared_bytes"] <= SHARED_A_SM, f"{name}: {use}"
        # registers are given out in 8 a thread
        taken = -(-use["registers"] // 8) * 8 * use["threads"]
        assert 0 < taken <= REGISTERS_AN_SM, f"{name}: {use}"


def test_instructions(built: Built) -> None:
    checked, meant = set(), MEANT[built.arch]
    for name, per_kernel in built.opcodes.items():
        for kernel, found in per_kernel.items():
            kind = next(kind for kind in meant if kernel.startswith(kind))
            checked.add(kind)
            for start, least in meant[kind].items():
                count = sum(n for op, n in found.items() if op.startswith(start))
                assert count >= least, f"{name} {kernel}: {count} {start}, meant {least}"
    assert checked == set(meant)
