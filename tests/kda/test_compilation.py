"""Compilations that outlive a process."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from torch_kda.kda.compilation import CompileCache, compile_model, num_compilations
from torch_kda.ops.norms import gated_rms_norm

CPU = torch.device("cpu")


class Gated(nn.Module):
    """An op of ours alone: whatever the compiler fuses would take a C++ compiler half a minute."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return gated_rms_norm(x, x, x[0], eps=1e-5)


def compiled_anew(folder: Path) -> tuple[bool, torch.Tensor]:
    """As in another process: without what this one has in memory or on disk."""
    torch._dynamo.reset()
    counters.clear()
    with fresh_cache(), torch.inference_mode():
        cache = CompileCache(folder, CPU, "gated", 8)
        is_warm = cache.load()
        out = compile_model(Gated())(torch.linspace(-1, 1, 16).view(2, 8))
        cache.save()
    return is_warm, out


@pytest.mark.inductor
def test_second_start_compiles_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "not there yet"
    is_warm, first = compiled_anew(folder)
    assert not is_warm and counters["inductor"]["fxgraph_cache_miss"] == 1
    (file,) = folder.iterdir()
    written = file.stat().st_mtime_ns
    is_warm, second = compiled_anew(folder)
    assert is_warm and num_compilations() == 1
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert counters["inductor"]["fxgraph_cache_hit"] == 1
    assert torch.equal(first, second)
    assert [path.stat().st_mtime_ns for path in folder.iterdir()] == [written]


def test_names_tell_caches_apart(tmp_path: Path) -> None:
    paths = {CompileCache(tmp_path, CPU, *names).path for names in (("a",), ("b",), ("a", 1))}
    assert len(paths) == 3


def test_damaged_file_is_a_cold_start(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path, CPU, "a")
    cache.path.write_bytes(b"not a cache")
    assert not cache.load()
    assert not cache.path.exists()
