"""Where objects come from, and what is said when they can't be had."""

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_kda.cute_kernels import jit, objects
from torch_kda.cute_kernels.kda_prefill import PREFILL, VARIANTS
from torch_kda.tests.cute_kernels.conftest import Built

ARCH = "sm_90a"
BOUNDED = PREFILL["bounded"]


@pytest.fixture
def built(objects: Callable[[str], Built]) -> Built:
    return objects(ARCH)


@pytest.fixture(autouse=True)
def _places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No place of this machine has an object."""
    monkeypatch.delenv(jit.AOT_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(jit, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(jit, "_LOADED", {})


def copy(built: Built, out: Path, change: Callable[[dict[str, Any]], object] = id) -> Path:
    """The objects in another place, their manifest changed."""
    folder = out / built.arch
    folder.mkdir(parents=True)
    for path in built.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    manifest = json.loads((folder / objects.MANIFEST).read_text())
    change(manifest)
    (folder / objects.MANIFEST).write_text(json.dumps(manifest))
    return folder


def refuse(*_: Any) -> None:
    raise AssertionError("compiled, though an object is there")


def assert_is_ours(function: Callable[..., None]) -> None:
    """The function is ours: it names its arguments."""
    with pytest.raises(TypeError, match="mCuSeqlens"):
        function()


def test_find_named(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "compile_variant", refuse)
    monkeypatch.setenv(jit.AOT_VARIABLE, str(built.out))
    for variant in VARIANTS:
        assert jit.find(variant, ARCH) == built.folder / f"{variant.name}.so"
    assert_is_ours(jit.load(BOUNDED, ARCH))
    assert jit.load(BOUNDED, ARCH) is jit.load(BOUNDED, ARCH)


def test_find_named_before_shipped(
    built: Built, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy(built, jit.SHIPPED)
    monkeypatch.setenv(jit.AOT_VARIABLE, str(built.out))
    assert jit.find(BOUNDED, ARCH).parent == built.folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(sources="0"), "built from other sources"),
        (lambda m: m["objects"].pop(BOUNDED.name), "has no object kda_prefill_bounded"),
        (lambda m: m["objects"][BOUNDED.name].update(sha256="0"), "missing or damaged"),
        (lambda m: m["objects"][BOUNDED.name].update(file="gone.so"), "missing or damaged"),
        (lambda m: m.clear(), "is no manifest of ours"),
    ],
    ids=["other-sources", "no-object", "damaged", "gone", "no-manifest"],
)
def test_find_named_refuses(
    built: Built,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], object],
    message: str,
) -> None:
    copy(built, tmp_path / "aot", change)
    monkeypatch.setattr(objects, "compile_variant", refuse)
    monkeypatch.setenv(jit.AOT_VARIABLE, str(tmp_path / "aot"))
    with pytest.raises(RuntimeError, match=message):
        jit.find(BOUNDED, ARCH)


@pytest.mark.parametrize("value", ["/nowhere", "", "relative"])
def test_find_named_wrong_value(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(jit.AOT_VARIABLE, value)
    with pytest.raises(RuntimeError, match=r"TORCH_KDA_AOT=.* has no sm_90a/manifest.json; build"):
        jit.find(BOUNDED, ARCH)


@pytest.mark.parametrize("content", [b"", b"not a library"], ids=["empty", "text"])
def test_load_no_library(built: Built, tmp_path: Path, content: bytes) -> None:
    """The loader's own error gets a cure. A library that is cut short would end this process."""
    path = tmp_path / f"{BOUNDED.name}.so"
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match=r"does not load .*; remove"):
        jit._open(path, BOUNDED.name)


def test_find_shipped(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = copy(built, jit.SHIPPED)
    monkeypatch.setattr(objects, "compile_variant", refuse)
    assert jit.find(BOUNDED, ARCH).parent == folder


def test_find_shipped_from_other_sources(built: Built) -> None:
    copy(built, jit.SHIPPED, lambda m: m.update(sources="0"))
    with pytest.warns(UserWarning, match="built from other sources and are not used"):
        path = jit.find(BOUNDED, ARCH)
    assert path.is_relative_to(jit.cache_root())


def test_find_cached(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jit.find(BOUNDED, ARCH)
    assert path.is_relative_to(jit.cache_root()) and path.suffix == ".so"
    assert_is_ours(jit.load(BOUNDED, ARCH))
    monkeypatch.setattr(objects, "compile_variant", refuse)
    assert jit.find(BOUNDED, ARCH) == path
    # nothing unfinished is left behind
    assert [p for p in jit.cache_root().iterdir() if p.name.startswith(".")] == []
    path.unlink()  # a file of its own: the other is mapped, and used once more at exit
    path.write_bytes(b"not a library")
    with pytest.raises(RuntimeError, match="missing or damaged; remove"):
        jit.find(BOUNDED, ARCH)


@pytest.mark.parametrize("name", ["source_hash", "versions"])
def test_cache_key(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = jit._cache_key(BOUNDED, ARCH)
    monkeypatch.setattr(objects, name, lambda: "another")
    assert jit._cache_key(BOUNDED, ARCH) != before
    assert jit._cache_key(BOUNDED, "sm_100a") != jit._cache_key(BOUNDED, ARCH)


def test_source_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A change of a kernel changes it; a change of what only launches does not."""
    for path in objects.ROOM.glob("*.py"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(objects, "ROOM", tmp_path)
    take = objects.source_hash.__wrapped__
    assert take() == objects.source_hash()
    (tmp_path / "kda_prefill.py").write_text("")
    assert take() == objects.source_hash()
    (tmp_path / "kda_layout.py").write_text("")
    assert take() != objects.source_hash()


def test_find_without_linker(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_linker", lambda: None)
    assert jit.find(BOUNDED, ARCH).suffix == ".o"
    assert_is_ours(jit.load(BOUNDED, ARCH))


def test_find_without_dsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "package_version", lambda _: None)
    with pytest.raises(RuntimeError, match=r"no CuTe DSL .*pip install .*or build objects"):
        jit.find(BOUNDED, ARCH)


@pytest.mark.parametrize(
    ("value", "message"), [("relative", "must be an absolute path"), ("file", "can't be kept in")]
)
def test_find_cache_place(
    value: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("cutlass")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / value) if value == "file" else value)
    with pytest.raises(RuntimeError, match=message):
        jit.find(BOUNDED, ARCH)


COMPILE_AND_TELL = """
from torch_kda.cute_kernels import jit, objects
from torch_kda.cute_kernels.kda_prefill import PREFILL
inner = objects.build_object
def tell(*args):
    print("compiled")
    return inner(*args)
objects.build_object = tell
jit.load(PREFILL["bounded"], "sm_90a")
"""


def test_find_from_two_processes(built: Built) -> None:
    """Two ranks that start together compile once."""
    command = [sys.executable, "-c", COMPILE_AND_TELL]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    texts = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert sorted(texts) == ["", "compiled\n"]


LOAD_BARE = """
import sys
class Refuse:
    def find_spec(self, name, *_):
        if name.split(".")[0] in ("cutlass", "triton"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
from torch_kda.cute_kernels import jit, kda_prefill
for variant in kda_prefill.VARIANTS:
    print(jit.load(variant, "sm_90a"))
"""


def test_load_without_compilers(built: Built) -> None:
    """Prebuilt objects load where there is neither the CuTe DSL in Python nor a C compiler."""
    env = os.environ | {jit.AOT_VARIABLE: str(built.out), "PATH": "/nowhere"}
    command = [sys.executable, "-c", LOAD_BARE]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Function") == len(VARIANTS)


@pytest.mark.parametrize(
    ("capability", "arch"), [((9, 0), "sm_90a"), ((10, 0), "sm_100a")], ids=["9.0", "10.0"]
)
def test_device_arch(
    capability: tuple[int, int], arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert jit.device_arch(0) == arch


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)], ids=["8.0", "8.9", "12.0"])
def test_device_arch_unsupported(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    message = rf"Some GPU has compute capability {capability[0]}\.{capability[1]}.*9\.0 \(sm_90a\)"
    with pytest.raises(RuntimeError, match=message):
        jit.device_arch(0)


def test_load_runtime_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: str, mode: int) -> None:
        raise OSError(f"{path} not found")

    monkeypatch.setattr(ctypes, "CDLL", fail)
    with pytest.raises(RuntimeError, match=r"libcute_dsl_runtime.so does not load\. pip install"):
        jit.load_runtime.__wrapped__()
