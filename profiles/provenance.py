"""Where a number comes from: what other programs say about this machine and this checkout."""

import subprocess


def first_line(*command: str) -> str | None:
    """First line that a program prints; None where it can't tell."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip().split("\n")[0]
