"""The model as one compiled graph, and where its compilation is kept between processes."""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from torch import nn

from ..ops.library import OPS, STRIDES

log = logging.getLogger("torch_kda.compilation")


def compile_model(model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> Any:
    """`model` as one graph, traced at its first call for each kind of step.

    Raises:
        torch._dynamo.exc.Unsupported: at a call, if the model has a graph break.
    """
    # einops notes a kind of tensor at its first call; graphs traced before are guarded against it
    for x in (torch.empty(1), nn.Parameter(torch.empty(1), requires_grad=False)):
        rearrange(x, "a -> a")
    options = {}
    if backend == "inductor":
        _introduce_our_ops()
        # fused kernels round where eager does, so that both choose the same tokens
        options["options"] = {"emulate_precision_casts": True}
    return torch.compile(model, fullgraph=True, backend=backend, **options)


def _introduce_our_ops() -> None:
    """Tell Inductor about our ops before it meets them.

    torch 2.11 spells out all that an op it meets depends on, for a line of the log that nobody
    reads. With two paths through each layer that doubles twice a layer: hours for a few layers.
    """
    from torch._inductor.lowering import lowerings, make_fallback, tag_to_layout_constraint

    for op in OPS:
        if op not in lowerings:
            make_fallback(op, tag_to_layout_constraint(STRIDES))


def num_compilations() -> int:
    """Graphs that this process has compiled so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def num_graph_breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


class CompileCache:
    """What the compiler made, in a file of a folder that the user names.

    Its entries are found by the content of the graph, so one that doesn't fit is a miss and no
    harm. Unpickled: the folder must be trusted like the code.
    """

    def __init__(self, folder: str | Path, device: torch.device, *names: object) -> None:
        """
        Args:
            names: of what is compiled; another name is another file.
        """
        kind = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        facts = repr((torch.__version__, kind, *map(str, names)))
        key = hashlib.sha256(facts.encode()).hexdigest()[:16]
        self.path = Path(folder) / f"torch-kda-{key}.bin"
        self._misses_before = _num_misses()

    def load(self) -> bool:
        """Take over what is in the file; False if there is none, or it is of no use."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return False
        if torch.compiler.load_cache_artifacts(content) is None:
            log.warning("%s is no cache that this torch reads; it will be replaced", self.path)
            self.path.unlink()
            return False
        return True

    def save(self) -> None:
        """Write the file, if something was compiled that it lacks.

        Raises:
            OSError: the folder can't be written.
        """
        if self.path.is_file() and _num_misses() == self._misses_before:
            return
        saved = torch.compiler.save_cache_artifacts()
        if saved is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(f".{os.getpid()}.part")
        part.write_bytes(saved[0])
        part.replace(self.path)


def _num_misses() -> int:
    counters = torch._dynamo.utils.counters
    return (
        counters["inductor"]["fxgraph_cache_miss"] + counters["aot_autograd"]["autograd_cache_miss"]
    )
