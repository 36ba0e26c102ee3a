"""Where a number comes from: what other programs say about this machine and this checkout."""

import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime

import torch


def origin(
    device: torch.device, commit: str | None, command: Sequence[str]
) -> dict[str, str | float | None]:
    """What a number measured on a GPU depends on.

    Args:
        commit: what is measured. None: git's HEAD.
    """
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "commit": commit or first_line("git", "rev-parse", "--short", "HEAD"),
        "command": shlex.join(command),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def first_line(*command: str) -> str | None:
    """First line that a program prints; None where it can't tell."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().split("\n")[0]
