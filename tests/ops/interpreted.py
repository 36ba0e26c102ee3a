"""Triton kernels for tests: compiled on CUDA, run by Triton's interpreter on a CPU."""

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

PACKAGE = "torch_kda.ops.triton"
MODULES = (
    *("functions", "search", "decode", "conv", "norms"),
    *("latents", "latent_decode", "latent_prefill", "experts", "activations"),
    *("router", "handover"),
)


def kernels(device: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The modules of `ops/triton` by name; on a CPU, interpreted until the test ends."""
    pytest.importorskip("triton")
    if device == "cuda":
        return {name: importlib.import_module(f"{PACKAGE}.{name}") for name in MODULES}
    _interpret_language(monkeypatch)
    return _interpreted_modules()


@functools.cache
def _interpreted_modules() -> dict[str, ModuleType]:
    """A second copy of the modules: it is when decorated that a kernel is to be interpreted."""
    from triton import knobs

    ops = importlib.import_module("torch_kda.ops")
    package, was_interpreted = vars(ops).get("triton"), knobs.runtime.interpret
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(PACKAGE)}
    knobs.runtime.interpret = True
    try:
        return {name: importlib.import_module(f"{PACKAGE}.{name}") for name in MODULES}
    finally:
        knobs.runtime.interpret = was_interpreted
        for name in [name for name in sys.modules if name.startswith(PACKAGE)]:
            del sys.modules[name]
        sys.modules.update(kept)
        if package is not None:
            ops.triton = package


def _interpret_language(monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of the language that are kernels themselves, such as tl.sum."""
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction

    importlib.import_module("triton.experimental.gluon")  # wants the language as it was
    # a device function patches the language, and leaves it so: compiling would fail from then on
    for owner in (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base):
        for name, value in list(vars(owner).items()):
            if not name.startswith("__"):
                monkeypatch.setattr(owner, name, value)
    for name, function in list(vars(tl.standard).items()):
        if isinstance(function, JITFunction):
            interpreted = interpreter.InterpretedFunction(function.fn)
            monkeypatch.setattr(tl.standard, name, interpreted)
            if vars(tl).get(name) is function:
                monkeypatch.setattr(tl, name, interpreted)

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        # as it is, int() of an array of one element, which numpy no longer takes
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor_and_index)
