"""Where a number comes from: what other programs say about this machine and this checkout."""

import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent  # of the checkout, if it is one


def origin(
    device: torch.device, commit: str | None, command: Sequence[str]
) -> dict[str, str | float | None]:
    """What a number depends on: `gpu` and `driver`, or on a CPU `cpu`, and what ran there.

    Args:
        commit: what is measured. None: git's HEAD.
    """
    return {
        **_machine(device),
        "torch": torch.__version__,
        "commit": commit or head_commit(),
        "command": shlex.join(command),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _machine(device: torch.device) -> dict[str, str | None]:
    if device.type == "cpu":
        return {"gpu": None, "cpu": platform.processor() or platform.machine()}
    return {
        "gpu": torch.cuda.get_device_name(device),
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }


def head_commit(root: Path = ROOT) -> str | None:
    """HEAD of the checkout that this code is run from; None if it isn't run from one.

    The caller's folder plays no part: it may be another project's checkout, as may the folder
    that an installed package lies in.
    """
    if not (root / ".git").exists():
        return None
    return first_line("git", "-C", str(root), "rev-parse", "--short", "HEAD")


def first_line(*command: str) -> str | None:
    """First line that a program prints; None where it can't tell."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().split("\n")[0]
