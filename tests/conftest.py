"""Lets pytest run from a bare checkout: gives the checkout its import name without installing it.

Also one seed, one thread, the gpu and inductor markers, and NaN in fresh memory for tests that ask
for it.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

if importlib.util.find_spec("torch_kda") is None:
    links = Path(tempfile.mkdtemp(prefix="torch_kda-"))
    (links / "torch_kda").symlink_to(Path(__file__).resolve().parent.parent)
    sys.path.insert(0, str(links))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(links), os.environ.get("PYTHONPATH")])
    )

import pytest
import torch

# the default pool oversubscribes small machines: a decode step was seen 20-70x slower
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    has_gpu = torch.cuda.is_available()
    has_compiler = shutil.which("g++") is not None
    if not has_compiler and os.environ.get("TORCH_KDA_REQUIRE_INDUCTOR"):
        raise pytest.UsageError("TORCH_KDA_REQUIRE_INDUCTOR is set, but there is no g++")
    for item in items:
        if "gpu" in item.keywords and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
        if "inductor" in item.keywords and not has_compiler:
            item.add_marker(pytest.mark.skip(reason="no g++: Inductor can't build C++"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def nan_memory():
    """Fresh memory holds NaN, or the largest integer: a read of what was never written shows."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(deterministic)
