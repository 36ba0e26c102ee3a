"""Every object, compiled once a session and arch, without a GPU."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch_kda.cute_kernels import cubin, objects
from torch_kda.cute_kernels.kda_prefill import VARIANTS


@dataclass(frozen=True)
class Built:
    """The objects of one arch, as `build` leaves them, and what is in them."""

    arch: str
    out: Path  # holds the folder <arch>
    entries: dict[str, dict[str, Any]]  # variant name: manifest entry
    opcodes: dict[str, dict[str, Counter[str]]]  # variant name: kernel name: instructions
    ptx: dict[str, Path]  # variant name: what its kernels were compiled from

    @property
    def folder(self) -> Path:
        return self.out / self.arch


@pytest.fixture(scope="session", name="objects")
def _objects(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Built]:
    """Builds all variants for an arch at first use."""
    pytest.importorskip("cutlass", reason="the CuTe DSL compiles the kernels")

    @cache
    def build(arch: str) -> Built:
        out = tmp_path_factory.mktemp(f"aot-{arch}")
        entries, opcodes, ptx = {}, {}, {}
        for variant in VARIANTS:
            dump = tmp_path_factory.mktemp(variant.name)
            entries[variant.name] = objects.build_object(variant, arch, out / arch, dump)
            (binary,) = dump.glob("*.cubin")
            opcodes[variant.name] = cubin.opcodes(binary)
            (ptx[variant.name],) = dump.glob("*.ptx")
        objects.write_manifest(out / arch, arch, entries)
        return Built(arch, out, entries, opcodes, ptx)

    return build
