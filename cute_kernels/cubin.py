"""Reads compiled kernels without a GPU: registers, stack and shared memory, and the instructions.

cuobjdump and nvdisasm come from triton's wheel or from PATH.
"""

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Resources:
    """Of one kernel."""

    registers: int  # a thread
    stack_bytes: int  # a thread
    local_bytes: int  # a thread
    shared_bytes: int  # a CTA, static and dynamic
    threads: int  # a CTA

    def asdict(self) -> dict[str, int]:
        return asdict(self)


def find_tool(name: str) -> str | None:
    """Path of a CUDA binary utility, or None."""
    spec = importlib.util.find_spec("triton")
    for root in (spec.submodule_search_locations or []) if spec else []:
        path = Path(root) / "backends" / "nvidia" / "bin" / name
        if path.is_file():
            return str(path)
    return shutil.which(name)


def _run(name: str, *arguments: str) -> str:
    tool = find_tool(name)
    if tool is None:
        raise RuntimeError(f"torch-kda: {name} not found; pip install triton, or put it on PATH")
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def resources(cubin: Path, compiled: Any) -> dict[str, Resources]:
    """Resources of each kernel; `compiled` is what `cute.compile` returned with this cubin."""
    launches = _launches(str(compiled.ir_module))
    found = {}
    text = _run("cuobjdump", "--dump-resource-usage", str(cubin))
    for name, line in re.findall(r"Function (\S+):\s*\n\s*(.*)", text):
        use = {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", line)}
        threads, dynamic = launches[name]
        found[name] = Resources(
            use["REG"], use["STACK"], use["LOCAL"], use["SHARED"] + dynamic, threads
        )
    return found


def _launches(ir: str) -> dict[str, tuple[int, int]]:
    """Threads a CTA and dynamic shared memory, from the constants of the launch configuration."""
    constants: dict[str, int] = {}
    fields: dict[str, str] = {}
    config: dict[str, int] = {}
    found: dict[str, tuple[int, int]] = {}
    name = ""
    for line in ir.splitlines():
        if match := re.match(r"\s*(%\d+) = llvm\.mlir\.constant\((-?\d+) : i(?:32|64)\)", line):
            constants[match[1]] = int(match[2])
        elif match := re.match(r"\s*(%\d+) = llvm\.getelementptr %\d+\[0, ([\d, ]+)\]", line):
            fields[match[1]] = match[2] if "array<3 x i32>" in line else ""
        elif match := re.match(r"\s*llvm\.store (%\w+), (%\d+) : i(?:32|64)", line):
            if (field := fields.get(match[2])) and match[1] in constants:
                config[field] = constants[match[1]]
        elif match := re.search(r"addressof @kernels_(\w+)", line):
            name = match[1]
        elif "call @_cudaLaunchKernelEx" in line:
            # of the configuration: field 1 has the block's sizes, field 2 the dynamic shared memory
            threads = config["1, 0"] * config["1, 1"] * config["1, 2"]
            found[name] = (threads, config["2"])
            config = {}
    return found


def opcodes(cubin: Path) -> dict[str, Counter[str]]:
    """How often each instruction (with its modifiers) stands in each kernel."""
    found: dict[str, Counter[str]] = {}
    name = ""
    for line in _run("nvdisasm", str(cubin)).splitlines():
        if match := re.match(r"\s*\.section\s+\.text\.(\w+)", line):
            name = match[1]
            found[name] = Counter()
        elif match := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", line):
            found[name][match[1]] += 1
    return found
