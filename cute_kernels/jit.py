"""Compiled kernels by name: find the object, or compile it once, and load it through tvm-ffi.

An object holds one `@cute.jit` host function with all its kernels, compiled from fake tensors: no
size is in its key. Where it comes from, first hit wins:

1. the folder that the environment variable TORCH_KDA_AOT names, made by
   `python -m torch_kda.cute_kernels.build`;
2. `cute_kernels/aot/` of the package, made likewise, if it was built from these sources;
3. the disk cache: $XDG_CACHE_HOME/torch-kda, by default ~/.cache/torch-kda;
4. compilation into that cache, by the CuTe DSL. With a C compiler the object becomes a shared
   library; without one it stays an object file, which the DSL's own loader takes.

1 and 2 need neither a C compiler nor the DSL: tvm-ffi and libcute_dsl_runtime.so are enough.
"""

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from . import objects

SHIPPED = objects.ROOM / "aot"
AOT_VARIABLE = "TORCH_KDA_AOT"
ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a"}  # compute capability to the arch that it runs
BUILD_COMMAND = "python -m torch_kda.cute_kernels.build --arch {arch} --out DIR"


def device_arch(device: torch.device | int) -> str:
    """The arch that kernels for this device are compiled for; RuntimeError if there is none."""
    capability = torch.cuda.get_device_capability(device)
    if capability not in ARCHS:
        supported = ", ".join(f"{x}.{y} ({arch})" for (x, y), arch in ARCHS.items())
        raise RuntimeError(
            f"torch-kda: {torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}; the kernels support {supported}. "
            "Run on the CPU instead: the ops have a reference there."
        )
    return ARCHS[capability]


def load(variant: objects.Variant, arch: str) -> Callable[..., None]:
    """The compiled host function, found or compiled; RuntimeError says what to do if it is not."""
    with _LOCK:
        key = (variant, arch)
        if key not in _LOADED:
            _LOADED[key] = _open(find(variant, arch), variant.name)
        return _LOADED[key]


_LOCK = threading.Lock()
_LOADED: dict[tuple[objects.Variant, str], Callable[..., None]] = {}


def find(variant: objects.Variant, arch: str) -> Path:
    """The checked object of a variant; compiled if no place has it."""
    named = os.environ.get(AOT_VARIABLE)
    if named is not None:
        return _from_named(Path(named), variant, arch)
    shipped = SHIPPED / arch
    if (shipped / objects.MANIFEST).is_file():
        if objects.read_manifest(shipped)["sources"] == objects.source_hash():
            return objects.checked_object(shipped, variant)
        warnings.warn(
            f"torch-kda: objects in {shipped} were built from other sources and are not used; "
            f"remove the folder or rebuild it: {BUILD_COMMAND.format(arch=arch)}",
            stacklevel=2,
        )
    return _from_cache(variant, arch)


def _from_named(folder: Path, variant: objects.Variant, arch: str) -> Path:
    place = folder / arch
    cure = f"build it ({BUILD_COMMAND.format(arch=arch)}) or unset {AOT_VARIABLE}"
    if not (place / objects.MANIFEST).is_file():
        raise RuntimeError(
            f"torch-kda: {AOT_VARIABLE}={folder} has no {arch}/{objects.MANIFEST}; {cure}"
        )
    if objects.read_manifest(place)["sources"] != objects.source_hash():
        raise RuntimeError(
            f"torch-kda: the objects in {place} ({AOT_VARIABLE}) were built from other sources "
            f"than these; {cure}"
        )
    return objects.checked_object(place, variant)


def _from_cache(variant: objects.Variant, arch: str) -> Path:
    if objects.package_version("nvidia-cutlass-dsl") is None:
        raise RuntimeError(
            f"torch-kda: no compiled {variant.name} for {arch}, and no CuTe DSL to compile it. "
            "pip install 'torch-kda[cuda]', or build objects elsewhere "
            f"({BUILD_COMMAND.format(arch=arch)}) and name their folder in {AOT_VARIABLE}."
        )
    folder = cache_root() / f"{variant.name}-{arch}-{_cache_key(variant, arch)}"
    if not (folder / objects.MANIFEST).is_file():
        with _file_lock(folder.with_suffix(".lock")):
            if not (folder / objects.MANIFEST).is_file():
                _fill_cache(folder, variant, arch)
    return objects.checked_object(folder, variant)


def _fill_cache(folder: Path, variant: objects.Variant, arch: str) -> None:
    """Compiles into a folder beside and renames it, so that no one sees half of it."""
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{variant.name}-") as work:
        fresh = Path(work) / "fresh"
        entry = objects.build_object(variant, arch, fresh)
        objects.write_manifest(fresh, arch, {variant.name: entry})
        shutil.rmtree(folder, ignore_errors=True)
        fresh.rename(folder)


def cache_root() -> Path:
    """Where compiled objects are kept."""
    base = os.environ.get("XDG_CACHE_HOME")
    if base is not None and not os.path.isabs(base):
        raise RuntimeError(f"torch-kda: XDG_CACHE_HOME must be an absolute path, got {base!r}")
    return (Path(base) if base else Path.home() / ".cache") / "torch-kda"


def _cache_key(variant: objects.Variant, arch: str) -> str:
    facts = [variant.builder, variant.facts, arch, objects.source_hash(), objects.versions()]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Holds a lock between processes; it ends with the process, so that none stays behind."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise RuntimeError(
            f"torch-kda: compiled kernels can't be kept in {path.parent} ({error}); "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _open(path: Path, name: str) -> Callable[..., None]:
    if path.suffix == ".o":
        from cutlass.cute.runtime import load_module

        return load_module(str(path), enable_tvm_ffi=True)[name]
    load_runtime()
    import tvm_ffi

    try:
        # named by its whole path: a bare file name would be searched in the system's folders
        return getattr(tvm_ffi.load_module(str(path.resolve())), name)
    except (RuntimeError, OSError, AttributeError) as error:
        raise RuntimeError(
            f"torch-kda: {path} does not load ({error}); remove {path.parent} or rebuild it"
        ) from error


@functools.cache
def load_runtime() -> str:
    """Loads libcute_dsl_runtime.so for all objects; returns where it was found.

    NVIDIA's licence keeps it out of our wheel: it comes with nvidia-cutlass-dsl, or lies on
    LD_LIBRARY_PATH.
    """
    name = "libcute_dsl_runtime.so"
    tried = []
    for path in [*_runtime_candidates(name), name]:
        try:
            ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            return str(path)
        except OSError as error:
            tried.append(f"{path}: {error}")
    raise RuntimeError(
        f"torch-kda: {name} does not load. pip install 'torch-kda[cuda]', or put its folder on "
        f"LD_LIBRARY_PATH. Tried: {'; '.join(tried)}"
    )


def _runtime_candidates(name: str) -> list[Path]:
    """In the installed DSL; the one of torch's CUDA version first."""
    spec = importlib.util.find_spec("nvidia_cutlass_dsl")
    if spec is None or spec.submodule_search_locations is None:
        return []
    major = (torch.version.cuda or "13").split(".")[0]
    folders = sorted(("cu13", "cu12"), key=lambda folder: folder != f"cu{major}")
    roots = [Path(root) for root in spec.submodule_search_locations]
    paths = [root / folder / "lib" / name for root in roots for folder in folders]
    return [path for path in paths if path.is_file()]
