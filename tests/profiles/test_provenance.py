"""What is noted beside a number."""

import sys

import pytest
import torch
from torch_kda.profiles.provenance import first_line, origin


def test_first_line() -> None:
    assert first_line(sys.executable, "-c", "print('one'); print('two')") == "one"
    assert first_line(sys.executable, "-c", "exit(3)") is None
    assert first_line("no-such-program") is None


def test_origin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command can be pasted into a shell; a commit that is named goes before git's."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Some GPU")
    found = origin(torch.device("cpu"), "abc", ["bench", "--cells", "H12-*"])
    assert (found["gpu"], found["commit"]) == ("Some GPU", "abc")
    assert found["command"] == "bench --cells 'H12-*'"
    assert found["torch"] == torch.__version__
