"""Compiles every kernel ahead of time, without a GPU: `python -m torch_kda.cute_kernels.build`.

DIR/<arch>/ gets a library for each object and a manifest.json that says what they were built from.
At run time TORCH_KDA_AOT=DIR names them; in `cute_kernels/aot/` of the package they need no name.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

from . import jit, objects
from .kda_prefill import VARIANTS


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m torch_kda.cute_kernels.build",
        description="Compile every kernel ahead of time; needs no GPU.",
    )
    parser.add_argument(
        *("--arch", "-a"),
        action="append",
        choices=sorted(jit.ARCHS.values()),
        help="architecture, once or more (default: sm_90a)",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for objects")
    options = parser.parse_args(arguments)
    if objects.package_version("nvidia-cutlass-dsl") is None:
        cure = "pip install 'torch-kda[cuda]'"
        parser.exit(1, f"{parser.prog}: there is no CuTe DSL to compile with; {cure}\n")
    archs = options.arch or ["sm_90a"]
    for folder in (options.out / arch for arch in archs):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            why = f"{folder} is no folder that can be written: {error.strerror}"
            parser.exit(2, f"{parser.prog}: --out: {why}\n")
    for arch in archs:
        build(arch, options.out)


def build(arch: str, out: Path) -> Path:
    """Builds all variants for an arch into `out`/`arch`, which is replaced; returns that folder."""
    folder = out / arch
    shutil.rmtree(folder, ignore_errors=True)
    entries = {}
    for i, variant in enumerate(VARIANTS, 1):
        print(f"[{i}/{len(VARIANTS)}] {variant.name} {arch} ...", flush=True)
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as dump:
            entry = objects.build_object(variant, arch, folder, Path(dump))
        size = (folder / entry["file"]).stat().st_size
        took = time.perf_counter() - started
        print(f"    {entry['file']}: {size / 1024:.0f} KiB in {took:.1f} s", flush=True)
        _print_kernels(entry.get("kernels", {}))
        entries[variant.name] = entry
    objects.write_manifest(folder, arch, entries)
    print(f"{folder}: {len(entries)} objects; use them with {jit.AOT_VARIABLE}={out.resolve()}")
    return folder


def _print_kernels(kernels: dict[str, dict[str, int]]) -> None:
    if not kernels:
        print("    (no cuobjdump: registers, stack and shared memory are unknown)")
    for name, use in sorted(kernels.items()):
        print(
            "    {name:28s} {threads:4d} threads  {registers:3d} registers  "
            "{shared_bytes:6d} B shared  {stack_bytes} B stack  {local_bytes} B local".format(
                name=name, **use
            )
        )


if __name__ == "__main__":
    main()
