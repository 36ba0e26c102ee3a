"""Who may import whom: the arrows of the house, read from the sources without importing them."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kda", "ops", "cute_kernels", "scheduler", "cache", "profiles")

# arrows only go down; every room may import itself
ARROWS = {
    "profiles": {"kda", "ops", "cute_kernels", "scheduler", "cache"},
    "kda": {"ops", "cute_kernels", "scheduler", "cache"},
    "ops": {"cute_kernels"},
    "cute_kernels": set(),
    "scheduler": {"cache"},
    "cache": set(),
}
# modules that stand alone in their room: nothing of ours at all
ALONE = {"kda/config.py", "ops/reference.py", "scheduler/request.py"}
KERNEL_PACKAGES = {"cutlass", "tvm_ffi", "triton", "cuda"}


@dataclass(frozen=True)
class Import:
    source: str  # the file, relative to the root
    line: int
    level: int  # dots of a relative import; 0: absolute
    target: tuple[str, ...]  # absolute: the dotted name; relative: path from the root
    function: str | None  # the function that it sits in; None: runs at import
    is_typing: bool  # under `if TYPE_CHECKING`

    @property
    def room(self) -> str:
        return self.source.split("/")[0]

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {'.'.join(self.target)}"


class _Collector(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self.source, self.found = source, list[Import]()
        self.function: str | None = None
        self.is_typing = False

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self.function = self.function, self.function or node.name
        self.generic_visit(node)
        self.function = outer

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_If(self, node: ast.If) -> None:
        outer = self.is_typing
        self.is_typing = outer or "TYPE_CHECKING" in ast.unparse(node.test)
        self.generic_visit(node)
        self.is_typing = outer

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(node, 0, tuple(alias.name.split(".")))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = tuple(node.module.split(".")) if node.module else ()
        for alias in node.names:
            if node.level:
                folder = self.source.split("/")[:-1]
                assert node.level <= len(folder) + 1, (self.source, node.lineno)
                start = tuple(folder[: len(folder) + 1 - node.level])
                self._add(node, node.level, (*start, *module, alias.name))
            else:
                self._add(node, 0, (*module, alias.name))

    def _add(self, node: ast.stmt, level: int, target: tuple[str, ...]) -> None:
        at = (self.source, node.lineno, level, target, self.function, self.is_typing)
        self.found.append(Import(*at))


def imports_of(text: str, source: str) -> list[Import]:
    collector = _Collector(source)
    collector.visit(ast.parse(text, source))
    return collector.found


def sources() -> Iterator[Path]:
    for room in ROOMS:
        yield from sorted((ROOT / room).rglob("*.py"))
    yield ROOT / "__init__.py"


def violations(imports: list[Import]) -> list[str]:
    """Every broken rule, as a sentence."""
    return [f"{i}: {why}" for i in imports if (why := _violation(i))]


def _violation(i: Import) -> str | None:
    head = i.target[0]
    if i.level == 0:
        return _absolute_violation(i, head)
    if i.room == "__init__.py":
        is_lazy = i.function is not None or i.is_typing
        return None if is_lazy else "`import torch_kda` must stay light"
    if i.source in ALONE:
        return "this module imports nothing of ours"
    if head not in ROOMS:
        # names of the root itself, like __version__
        return None if head.startswith("__") else f"there is no room {head}"
    if i.source == "kda/__main__.py" and head == "profiles":
        return None if i.function else "profiles is imported inside the command that needs it"
    if head != i.room and head not in ARROWS[i.room]:
        return f"{i.room} may import {sorted(ARROWS[i.room])}"
    runs_at_import = i.function is None and not i.is_typing
    reaches_kernels = head == "cute_kernels" or i.target[:2] == ("ops", "triton")
    is_above = i.room in ("ops", "kda") and not i.source.startswith("ops/triton/")
    if runs_at_import and reaches_kernels and is_above:
        return "kernels are imported inside the CUDA path only"
    return None


def _absolute_violation(i: Import, head: str) -> str | None:
    if head == "torch_kda" or head in ROOMS:
        return "inside the house imports are relative"
    if head == "tests":
        return "no room imports the tests"
    has_tensors = i.room not in ("scheduler", "cache") or i.source == "cache/storage.py"
    if head in ("torch", "einops") and not has_tensors:
        return "bookkeeping knows no tensors"
    if i.room == "cute_kernels" and i.target[:2] in (("torch", "library"), ("torch", "nn")):
        return "a kernel knows no op registration and no module"
    is_kernel_code = i.room == "cute_kernels" or i.source.startswith("ops/triton/")
    if head in KERNEL_PACKAGES and not is_kernel_code and i.function is None and not i.is_typing:
        return "a machine without these packages must still import this"
    return None


@pytest.mark.parametrize("path", list(sources()), ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows(path: Path):
    found = imports_of(path.read_text(), str(path.relative_to(ROOT)))
    assert violations(found) == []


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("cache/policy.py", "from ..scheduler.request import Request"),
        ("cache/policy.py", "import torch"),
        ("scheduler/scheduler.py", "def f():\n    import torch.nn"),
        ("scheduler/scheduler.py", "from ..ops import kda"),
        ("scheduler/scheduler.py", "from .. import kda"),
        ("ops/kda.py", "from ..kda.config import ModelConfig"),
        ("ops/kda.py", "from ..cute_kernels import kda_scan"),
        ("ops/kda.py", "from .triton.conv import conv"),
        ("ops/norms.py", "import cutlass.cute as cute"),
        ("ops/reference.py", "from .library import define_op"),
        ("cute_kernels/jit.py", "from ..ops.library import define_op"),
        ("cute_kernels/jit.py", "from torch.library import Library"),
        ("kda/engine.py", "from torch_kda.scheduler.batch import ScheduledBatch"),
        ("kda/engine.py", "from scheduler.batch import ScheduledBatch"),
        ("kda/__main__.py", "from ..profiles import bench_ops"),
        ("kda/engine.py", "def f():\n    from ..profiles import bench_ops"),
        ("__init__.py", "from .kda.llm import LLM"),
        ("profiles/timing.py", "import tests"),
    ],
)
def test_arrows_catch(source: str, text: str):
    """The rules have teeth: each of these is refused."""
    assert len(violations(imports_of(text, source))) == 1


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("kda/__main__.py", "def bench():\n    from ..profiles import bench_ops"),
        ("ops/kda.py", "def _cuda():\n    from ..cute_kernels.kda_scan import run"),
        ("ops/triton/conv.py", "import triton"),
        ("cache/storage.py", "import torch"),
        ("kda/model.py", "from .. import __version__\nfrom ..ops import kda"),
        ("scheduler/scheduler.py", "from ..cache.policy import checkpoint_positions"),
    ],
)
def test_arrows_allow(source: str, text: str):
    assert violations(imports_of(text, source)) == []


def test_bookkeeping_loads_no_torch():
    """Not only in its own lines: nothing that scheduler and cache load loads torch."""
    modules = [
        ".".join(("torch_kda", *path.relative_to(ROOT).with_suffix("").parts))
        for room in ("scheduler", "cache")
        for path in sorted((ROOT / room).glob("*.py"))
        if path.name not in ("storage.py", "__init__.py")
    ]
    assert modules
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or "torch was loaded"


def test_packages_listed():
    """A folder with Python files that pyproject does not list would be missing from the wheel."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    for path in sources():
        package = ".".join(("torch_kda", *path.relative_to(ROOT).parent.parts))
        assert f'"{package}"' in pyproject, f"{path} is in no listed package"
        assert (path.parent / "__init__.py").is_file()


def test_root_holds_one_module():
    assert [path.name for path in ROOT.glob("*.py")] == ["__init__.py"]
