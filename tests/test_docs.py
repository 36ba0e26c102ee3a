"""Prose that is read by a test: every path, module and command that the documents name exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("kda", "ops", "cute_kernels", "scheduler", "cache", "profiles", "tests")
# written by programs, or made on the reader's machine
IGNORED = ("profiles/results/", ".venv/", "build/", "dist/")

MODULE = re.compile(r"\btorch_kda((?:\.\w+)+)")
PATH = re.compile(r"(?<![\w./$~<>-])(?:[\w.*-]+/)+(?:[\w.*-]+)?(?![\w/(<>])")
FILE = re.compile(r"(?<![\w./*-])[\w-]+\.(?:py|toml|md|in)\b(?![/(])")
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
ADDRESS = re.compile(r"https?://[^\s)>\"']+")
MAKE = re.compile(r"`(?:\w+=\S+ )*make ([a-z]\w*)|^(?:\$ )?(?:\w+=\S+ )*make ([a-z]\w*)", re.M)
PYTHON = re.compile(r"```python\n(.*?)```", re.S)
COMMAND = re.compile(r"(?:`|^|\$ |&& )torch-kda ([a-z]\w*)", re.M)


def documents() -> list[Path]:
    """Every Markdown file of ours; generated results are data, not prose."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    found += [path for room in ROOMS for path in (ROOT / room).rglob("*.md")]
    return sorted(path for path in found if "results" not in path.parts and not path.is_symlink())


def missing(text: str, folder: Path = ROOT) -> list[str]:
    """What a document names and the tree lacks."""
    bare = ADDRESS.sub(" ", text)
    lacks = [f"module torch_kda{m[1]}" for m in MODULE.finditer(bare) if not _has_module(m[1])]
    bare = MODULE.sub(" ", bare)
    names = [m[0] for m in PATH.finditer(bare)] + [m[1] for m in LINK.finditer(bare)]
    lacks += [f"path {name}" for name in dict.fromkeys(names) if not _has_path(name, folder)]
    bare = PATH.sub(" ", bare)
    lacks += [f"file {m[0]}" for m in FILE.finditer(bare) if not _has_file(m[0])]
    lacks += [f"make {name}" for name in _targets(bare) - _make_targets()]
    lacks += [f"torch-kda {m[1]}" for m in COMMAND.finditer(bare) if m[1] not in _commands()]
    return lacks


def _has_module(dotted: str) -> bool:
    """`.room.module`, what can be run as one, or `.room.module.name`, defined at its top level."""
    at = ROOT
    for n, part in enumerate(parts := dotted.strip(".").split(".")):
        if (at / part).is_dir():
            at = at / part
        elif (at / f"{part}.py").is_file():
            rest = parts[n + 1 :]
            return not rest or rest[0] in _top_names(at / f"{part}.py")
        else:
            return n == len(parts) - 1 and part in _top_names(at / "__init__.py")
    return any((at / name).is_file() for name in ("__init__.py", "__main__.py"))


def _top_names(path: Path) -> set[str]:
    names = set[str]()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {sub.id for t in targets for sub in ast.walk(t) if isinstance(sub, ast.Name)}
    if path == ROOT / "__init__.py":
        names |= {"LLM", "SamplingParams"}  # resolved on first use
    return names


def _has_path(name: str, folder: Path) -> bool:
    """A path counts as ours when its first part is: 24/7 and owner/name are left alone."""
    name = name.removeprefix("./").rstrip(".")
    if ":" in name or name.startswith(IGNORED):
        return True
    first = name.split("/")[0]
    is_ours = first in ROOMS or first in (".ci", "docs") or Path(name).suffix in (".py", ".md")
    if not is_ours:
        return True
    return any(any(start.glob(name.rstrip("/"))) for start in {ROOT, folder})


def _has_file(name: str) -> bool:
    return any(path.rsplit("/")[-1] == name for path in _tracked())


def _tracked() -> Iterator[str]:
    for start in (ROOT, *(ROOT / room for room in ROOMS)):
        pattern = "*" if start == ROOT else "**/*"
        yield from (str(path) for path in start.glob(pattern) if path.is_file())


def _targets(text: str) -> set[str]:
    return {m[1] or m[2] for m in MAKE.finditer(text)}


def _make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]\w*):", (ROOT / "Makefile").read_text(), re.M))


def _commands() -> set[str]:
    from torch_kda.kda.__main__ import app

    names = {info.name or info.callback.__name__ for info in app.registered_commands}
    return names | {info.name for info in app.registered_groups}


@pytest.mark.parametrize("path", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_documents(path: Path):
    assert missing(path.read_text(), path.parent) == []


@pytest.mark.parametrize(
    ("text", "lacks"),
    [
        ("see `kda/nowhere.py`", "path kda/nowhere.py"),
        ("[the tree](docs/gone.md)", "path docs/gone.md"),
        ("`python -m torch_kda.profiles.bench_nothing`", "module torch_kda.profiles.bench_nothing"),
        ("`torch_kda.kda.step.StepOutputs`", "module torch_kda.kda.step.StepOutputs"),
        ("  nothing_here.py   what it holds", "file nothing_here.py"),
        ("run `make coffee`", "make coffee"),
        ("```\nmake coffee\n```", "make coffee"),
        ("`torch-kda dance --fast`", "torch-kda dance"),
    ],
)
def test_missing_catches(text: str, lacks: str):
    assert missing(text) == [lacks]


@pytest.mark.parametrize(
    "text",
    [
        "`kda/step.py`, `ops/`, `tests/kda/test_*.py` and conftest.py",
        "`torch_kda.kda.step.StepInputs`, `torch_kda.LLM`, `torch_kda.ops`",
        "`make test`, `TORCH=torch==2.13.0 make demo`; make yourself at home",
        "https://github.com/owner/name/blob/main/kda/none.py and owner/name, 24/7, tokens/s",
        "`.venv/bin/pytest tests/ops -q` and profiles/results/kda_decode.md",
        "`torch-kda demo --json`; torch-kda runs models",
    ],
)
def test_missing_allows(text: str):
    assert missing(text) == []


def test_agents_page():
    """AGENTS.md stays short and points to the authority; CLAUDE.md is the same file."""
    assert (ROOT / "CLAUDE.md").resolve() == ROOT / "AGENTS.md"
    agents = (ROOT / "AGENTS.md").read_text()
    assert "CONTRIBUTING.md" in agents and len(agents.splitlines()) <= 10


@pytest.mark.parametrize("index", range(2), ids=["model", "op"])
def test_readme_example_runs(index: int) -> None:
    example = PYTHON.findall((ROOT / "README.md").read_text())[index]
    names: dict[str, Any] = {}
    exec(compile(example, "README.md", "exec"), names)
    if index == 0:
        assert len(names["out"].token_ids) == 16
    else:
        assert names["o"].shape == (100, 2, 128) and names["o"].isfinite().all()
        assert names["pool"].flatten(1).any(dim=1).all(), "every slot that is named is written"
