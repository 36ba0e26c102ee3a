"""What commands share: where they may write, asked before the work, and how an error ends them."""

import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

PICTURES = (".png", ".svg", ".pdf", ".jpg")


@contextmanager
def clear_errors() -> Iterator[None]:
    """An error ends in one line: code 2 if the caller is at fault, code 1 if the machine is.

    The trace is logged at level DEBUG.
    """
    try:
        yield
        sys.stdout.flush()  # a full disk shows here, not at the interpreter's end
    except (ValueError, OSError, RuntimeError) as error:
        logging.getLogger("torch_kda").debug("trace", exc_info=True)
        _close_if_full(sys.stdout)
        print(f"torch-kda: {error}", file=sys.stderr)
        is_machine = isinstance(error, RuntimeError) and not isinstance(error, NotImplementedError)
        raise SystemExit(1 if is_machine else 2) from None


def _close_if_full(stream: TextIO) -> None:
    """The interpreter would try once more at its end to write what can't be written, and say so."""
    try:
        stream.flush()
    except OSError:
        with suppress(OSError):
            stream.close()


def make_folder(path: Path, option: str = "--out") -> None:
    """Makes a folder for results if there is none, and tries to write there.

    Raises:
        ValueError: it can't, and why.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        why = error.strerror or error
        raise ValueError(f"{option}: {path} is no folder that can be written: {why}") from None


def check_file(path: Path, option: str = "--out") -> None:
    """Whether a file can be written there; an old one stays as it is.

    Raises:
        ValueError: it can't, and why.
    """
    is_new = not path.exists()
    try:
        path.open("ab").close()
    except OSError as error:
        raise ValueError(f"{option}: {path} can't be written: {error.strerror}") from None
    if is_new:
        path.unlink()


def check_picture(path: Path) -> None:
    """Whether a picture can be written there, in the format that its name says.

    Raises:
        ValueError: it can't, and why.
    """
    if path.suffix.lower() not in PICTURES:
        raise ValueError(f"--picture: {path} must end with one of {', '.join(PICTURES)}")
    check_file(path, "--picture")
