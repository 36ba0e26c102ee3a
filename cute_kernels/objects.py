"""Objects in folders: compiled from variants, with a manifest that says what they were made of."""

import functools
import hashlib
import importlib
import importlib.metadata
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import cubin

ROOM = Path(__file__).parent
# what these hold never gets into an object
NOT_COMPILED = {"__init__.py", "build.py", "cubin.py", "jit.py", "kda_prefill.py", "objects.py"}
MANIFEST = "manifest.json"
OPTIONS = "--enable-tvm-ffi"


@dataclass(frozen=True, slots=True)
class Variant:
    """One object: a host function and the facts that are fixed in it."""

    name: str  # of the object file and of the function in it
    builder: str  # "module.function" of this room: arch and facts to (host function, arguments)
    facts: tuple[tuple[str, Any], ...] = ()


@functools.cache
def source_hash() -> str:
    """Over every file of this room that can change an object."""
    digest = hashlib.sha256(OPTIONS.encode())
    for path in sorted(ROOM.glob("*.py")):
        if path.name not in NOT_COMPILED:
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def versions() -> dict[str, str | None]:
    """Of what an object is made with and runs on."""
    names = {"cutlass_dsl": "nvidia-cutlass-dsl", "tvm_ffi": "apache-tvm-ffi"}
    return {key: package_version(package) for key, package in names.items()}


def package_version(package: str) -> str | None:
    """Of an installed distribution; None where it is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def read_manifest(folder: Path) -> dict[str, Any]:
    """What `write_manifest` wrote; RuntimeError if that is something else."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if not {"sources", "objects"} <= manifest.keys():
            raise ValueError("fields are missing")
    except (ValueError, AttributeError) as error:
        raise RuntimeError(
            f"torch-kda: {path} is no manifest of ours ({error}); remove {folder}"
        ) from error
    return manifest


def write_manifest(folder: Path, arch: str, entries: dict[str, dict[str, Any]]) -> None:
    """States what a folder was built from; written last: a folder without it is unfinished."""
    manifest = {"arch": arch, "sources": source_hash(), **versions(), "objects": entries}
    part = folder / f".{MANIFEST}.part"
    part.write_text(json.dumps(manifest, indent=1) + "\n")
    part.replace(folder / MANIFEST)


def checked_object(folder: Path, variant: Variant) -> Path:
    """The object of a variant in a folder with a manifest; its bytes are what was written."""
    entry = read_manifest(folder)["objects"].get(variant.name)
    if entry is None:
        raise RuntimeError(f"torch-kda: {folder} has no object {variant.name}; rebuild the folder")
    path = folder / entry["file"]
    # a damaged library can end the process when it is opened: it must not come that far
    if not path.is_file() or _hash(path) != entry["sha256"]:
        raise RuntimeError(
            f"torch-kda: {path} is missing or damaged; remove {folder} or rebuild it"
        )
    return path


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def build_object(
    variant: Variant, arch: str, folder: Path, dump: Path | None = None
) -> dict[str, Any]:
    """Compiles a variant into `folder`, without a GPU, and returns its manifest entry.

    With an empty folder `dump` for cubin and PTX, the entry tells what each kernel takes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    compiled = compile_variant(variant, arch, dump)
    path = folder / f"{variant.name}.o"
    compiled.export_to_c(str(path), function_name=variant.name)
    if _linker() is not None:
        path = _link(path)
    entry = {"file": path.name, "sha256": _hash(path), "facts": dict(variant.facts)}
    if dump is not None and cubin.find_tool("cuobjdump") is not None:
        (binary,) = dump.glob("*.cubin")
        found = cubin.resources(binary, compiled)
        entry["kernels"] = {name: use.asdict() for name, use in found.items()}
    return entry


def compile_variant(variant: Variant, arch: str, dump: Path | None = None) -> Any:
    """What `cute.compile` returns for a variant; cubin and PTX go to `dump`."""
    import cutlass.cute as cute

    module, function = variant.builder.split(".")
    build = getattr(importlib.import_module(f".{module}", __package__), function)
    host, arguments = build(arch, **dict(variant.facts))
    options = f"{OPTIONS} --gpu-arch {arch}"
    if dump is not None:
        dump.mkdir(parents=True, exist_ok=True)
        options += f" --keep-cubin --keep-ptx --dump-dir {dump}"
    return cute.compile(host, *arguments, options=options)


@functools.cache
def _linker() -> str | None:
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def _link(path: Path) -> Path:
    """Object file to shared library; what it calls in tvm-ffi and the runtime is found at load."""
    library = path.with_suffix(".so")
    done = subprocess.run(
        [_linker() or "cc", "-shared", "-o", str(library), str(path)],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"torch-kda: linking {library} failed: {done.stderr.strip()}")
    path.unlink()
    return library
