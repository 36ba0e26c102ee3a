"""`python -m torch_kda.tests.soak`: minutes of random traffic, aborts, preemptions and evictions.

Every sampled cached state is recomputed from the tokens that its key names. Exit code 1 if
anything is wrong, or if too little was looked at.
"""

import argparse
import json
import logging
import sys
import time
from pathlib import Path

import torch
from torch_kda.kda.command import clear_errors, make_folder
from torch_kda.kda.presets import PRESETS
from torch_kda.profiles.options import MAX_MINUTES, MAX_SEED, Parser, integer, positive
from torch_kda.profiles.provenance import origin
from torch_kda.tests.soak.run import Soak
from torch_kda.tests.soak.subject import make_setup
from torch_kda.tests.soak.witness import INJECTED

SLOTS_A_MINUTE = 125  # different states to look at: 500 in four minutes
MAX_SLOTS = 1_000_000


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    make_folder(options.out)
    logging.getLogger("torch_kda.engine").addFilter(_is_unexpected)
    started = time.monotonic()
    setup = make_setup(
        options.model,
        device=options.device,
        seed=options.seed,
        compiles=options.compile,
        dtype=options.dtype,
    )
    soak = Soak(setup, seed=options.seed)
    start_seconds = time.monotonic() - started
    _say(
        f"{setup.model.name} on {options.device}, seed {options.seed}; start: {start_seconds:.1f} s"
    )
    soak.run(60 * options.minutes, share=options.share, say=_say)
    failures = soak.violations
    least = options.min_slots
    if least is None:
        least = int(SLOTS_A_MINUTE * options.minutes)
    num_slots = len(soak.judge.found.slots)
    if num_slots < least:
        failures.append(f"only {num_slots} different slots were sampled, not {least}")
    command = ["python", "-m", "torch_kda.tests.soak", *sys.argv[1:]]
    report = {
        **origin(torch.device(options.device), options.commit, command),
        "seed": options.seed,
        "minutes": options.minutes,
        "seconds_to_start": round(start_seconds, 1),
        "peak_gib": _peak_gib(options.device),
        "is_ok": not failures,
        "failures": failures,
        **soak.as_json(),
    }
    path = options.out / "soak.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    for failure in failures:
        _say(f"FAILED: {failure}")
    _say(f"written: {path}")
    return 1 if failures else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m torch_kda.tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=positive(MAX_MINUTES), default=4.0)
    parser.add_argument("--model", choices=list(PRESETS), default="kimi-linear-48b-a3b")
    parser.add_argument("--device", default="cuda", help="cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="auto: the preset's; float32 or bfloat16")
    parser.add_argument("--compile", action="store_true", help="and CUDA graphs; else eager")
    parser.add_argument(
        "--seed", type=integer(0, MAX_SEED), default=0, help="of weights, sizes, traffic"
    )
    parser.add_argument("--share", type=positive(1), default=0.5, help="of time for recomputing")
    parser.add_argument(
        "--min-slots", type=integer(0, MAX_SLOTS), help=f"default: {SLOTS_A_MINUTE} a minute"
    )
    parser.add_argument("--out", type=Path, default=Path("."), help="folder for soak.json")
    parser.add_argument("--commit", help="what is tested; default: git's HEAD")
    return parser.parse_args(arguments)


def _peak_gib(device: str) -> float | None:
    if device == "cpu":
        return None
    return round(torch.cuda.max_memory_reserved(torch.device(device)) / 2**30, 2)


def _is_unexpected(record: logging.LogRecord) -> bool:
    """Errors that the soak makes itself are not worth a trace."""
    return not (record.exc_info and INJECTED in str(record.exc_info[1]))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    with clear_errors():
        sys.exit(main())
