"""Times the prefill against its peers: `torch-kda bench ops`.

Every number comes after a check: two heads of the same cell, at full length, against float64.
Writes kda_prefill.json, and from it kda_prefill.md and a plot. Also runs as
`python -m torch_kda.profiles.bench_ops`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..cute_kernels import jit, kda_prefill, objects
from ..kda.command import clear_errors, make_folder
from . import kda_stages
from .kda_cells import (
    CELLS,
    CHECKPOINTS,
    GATES,
    MAX_CHECKPOINTS,
    QUICK,
    Cell,
    Inputs,
    Result,
    errors,
    make_inputs,
    select_cells,
    truth,
    truth_heads,
    with_exports,
)
from .kda_peers import OURS, PEERS, Call, Peer, find_peers
from .kda_report import merge, write_report
from .options import MAX_NUMBER, MAX_ROUNDS, Parser, integer, integers, names, some
from .provenance import origin
from .timing import (
    Timing,
    copy_bytes_per_second,
    l2_bytes,
    num_input_sets,
    require_cuda,
    time_calls,
)

# of relative RMS errors of output and states: beyond them no time is reported
LIMITS = {OURS: (5e-3, 4e-3)} | dict.fromkeys(PEERS, (3e-2, 3e-2))
NAMES = (OURS, *PEERS)
MEMORY_SHARE = (
    0.25  # of free memory, for inputs; outputs and workspaces of all variants come on top
)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exits with 1 if our own results are too far from the truth."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.render is not None:
        for file in write_report(merge(options.render, options.out), options.out):
            print(file)
        return
    device = require_cuda("torch-kda bench ops")
    make_folder(options.out)
    kda_prefill.prepare(device)
    speed = copy_bytes_per_second(device)
    meta = metadata(device, speed, options.commit, arguments)
    print(f"{meta['gpu']}, copy {speed / 1e12:.2f} TB/s, torch {meta['torch']}", flush=True)
    if options.stages:
        kda_stages.run(options.cells, options.gates, device, meta, options.out, options.rounds)
        return
    bench = Bench(find_peers(options.peers), speed, device, options.rounds)
    rows: list[dict[str, Any]] = []
    path = options.out / "kda_prefill.json"
    for cell in options.cells:
        for gates in options.gates:
            for row in bench.rows(cell, gates, options.checkpoints):
                rows.append(row)
                path.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    for file in write_report(path, options.out):
        print(file)
    if any(row["us"][OURS] is None for row in rows):
        raise SystemExit(1)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Checked options; a wrong one ends the program with what is right."""
    parser = Parser(
        prog="torch-kda bench ops", description="Time KDA prefill against its peers on one GPU."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--commit", help="what is measured (default: git's HEAD)")
    parser.add_argument(
        "--cells", type=some, help='names or patterns, comma between: "H12-*,H96-mixed"'
    )
    parser.add_argument("--gates", type=names(GATES), help=f"of {','.join(GATES)} (default: all)")
    parser.add_argument(
        "--checkpoints",
        type=integers(0, MAX_CHECKPOINTS),
        help="a sequence, comma between (default: 0,1,16)",
    )
    parser.add_argument(
        "--peers",
        type=names(PEERS, least=0),
        help=f"of {','.join(PEERS)} (default: those found; '' for none)",
    )
    parser.add_argument(
        "--rounds", type=integer(1, MAX_ROUNDS), default=30, help="graph replays a number"
    )
    parser.add_argument("--quick", action="store_true", help="few cells, slow gates, 1 checkpoint")
    parser.add_argument("--stages", action="store_true", help="prepare and scan by themselves")
    parser.add_argument(
        "--render", type=Path, nargs="+", metavar="JSON", help="only write the report of these"
    )
    options = parser.parse_args(arguments)
    parser.refuse_beside_render(options)
    if options.stages:
        parser.refuse(options, ("checkpoints", "peers"), "--stages, which times only ours")
    quick = options.quick
    wanted = options.cells or (QUICK if quick else [cell.name for cell in CELLS])
    try:
        options.cells = select_cells(wanted)
    except ValueError as error:
        parser.error(str(error))
    options.gates = options.gates or (["slow"] if quick else list(GATES))
    options.checkpoints = sorted({*(options.checkpoints or ([1] if quick else CHECKPOINTS))})
    return options


class Variant(NamedTuple):
    """What is timed of a cell: an implementation, with so many checkpoints a sequence."""

    name: str  # of NAMES
    num_checkpoints: int

    def __str__(self) -> str:
        return f"{self.name} with {self.num_checkpoints}"


Found = dict[Variant, tuple[float, float]]  # relative RMS errors of output and states


@dataclass(frozen=True, slots=True)
class Bench:
    """Times rows of the table on one device."""

    peers: dict[str, Peer]
    bytes_per_second: float  # of a copy
    device: torch.device
    num_rounds: int

    def rows(self, cell: Cell, gates: str, counts: Sequence[int]) -> list[dict[str, Any]]:
        """One row for each number of checkpoints. They share the truth, and are timed in turns, so
        that what a checkpoint costs can be read off their difference.
        """
        most = max(counts)
        full = truth(make_inputs(cell, gates, most, 0, self.device))
        found: Found = {}
        calls: dict[Variant, list[Call]] = {}
        for count in counts:
            expected = with_exports(full, cell, most, count)
            calls |= self.prepare(cell, gates, count, len(counts), expected, found)
        timings = self.time(calls)
        rows = [self.row(cell, gates, count, timings, found) for count in counts]
        torch.cuda.empty_cache()
        return rows

    def prepare(
        self,
        cell: Cell,
        gates: str,
        count: int,
        num_counts: int,
        expected: Result,
        found: Found,
    ) -> dict[Variant, list[Call]]:
        """Calls to time; puts into `found` how far their results are off."""
        free = int(torch.cuda.mem_get_info(self.device)[0] * MEMORY_SHARE / num_counts)
        sets = num_input_sets(cell.io_bytes(count), l2_bytes(self.device), free)
        inputs = [make_inputs(cell, gates, count, seed, self.device) for seed in range(sets)]
        variants = {}
        for name, peer in self.peers.items():
            variant = Variant(name, count)
            try:
                calls = peer(inputs)
                if calls and self.check(variant, calls[0], inputs[0], expected, found):
                    variants[variant] = calls
            except Exception as error:
                _leave_out(variant, error)
        return variants

    def row(
        self,
        cell: Cell,
        gates: str,
        count: int,
        timings: dict[Variant, Timing],
        found: Found,
    ) -> dict[str, Any]:
        variants = {name: Variant(name, count) for name in NAMES}
        row = {
            "heads": cell.heads,
            "lens": list(cell.lens),
            "gates": gates,
            "checkpoints": count,
            "floor_us": round(cell.io_bytes(count) / self.bytes_per_second * 1e6, 2),
            "us": {n: _rounded(timings.get(one), "median_us") for n, one in variants.items()},
            "eager_us": {n: _rounded(timings.get(one), "eager_us") for n, one in variants.items()},
            "err_out": {n: _digits(found, one, 0) for n, one in variants.items()},
            "err_state": {n: _digits(found, one, 1) for n, one in variants.items()},
            "err_tokens": cell.num_tokens,
        }
        _print_row(cell, row, {n: timings[one] for n, one in variants.items() if one in timings})
        return row

    def check(
        self, variant: Variant, call: Call, inputs: Inputs, expected: Result, found: Found
    ) -> bool:
        """Whether a variant may be timed: its results are near the truth."""
        with torch.inference_mode():
            got = errors(call(), expected, truth_heads(inputs.cell))
        limits = LIMITS[variant.name]
        found[variant] = got
        is_right = all(x <= limit for x, limit in zip(got, limits, strict=True))
        if not is_right:
            print(
                f"  {variant} is wrong and not timed: output {got[0]:.2e} (limit {limits[0]:.1e}), "
                f"states {got[1]:.2e} (limit {limits[1]:.1e})"
            )
        return is_right

    def time(self, variants: dict[Variant, list[Call]]) -> dict[Variant, Timing]:
        """All in turns. Ours are captured first, so that no peer's results take their memory."""
        ours_first = sorted(variants, key=lambda variant: variant.name != OURS)
        with torch.inference_mode():
            return time_calls(
                {variant: variants[variant] for variant in ours_first},
                rounds=self.num_rounds,
                on_failure=_leave_out,
            )


def metadata(
    device: torch.device, speed: float, commit: str | None, arguments: Sequence[str]
) -> dict[str, str | float | None]:
    """What a number depends on."""
    arch = jit.device_arch(device)
    manifest = jit.find(kda_prefill.PREFILL["bounded"], arch).parent / objects.MANIFEST
    return {
        **origin(device, commit, ["torch-kda", "bench", "ops", *arguments]),
        "cutlass_dsl": json.loads(manifest.read_text())["cutlass_dsl"],
        "copy_tb_s": round(speed / 1e12, 3),
    }


def _leave_out(variant: Variant, error: Exception) -> None:
    """A peer's failure is a fact to report; ours ends the bench."""
    if variant.name == OURS:
        raise error
    what = " ".join(str(error).split())
    print(f"  {variant} is not timed: {type(error).__name__}: {what[:200]}", flush=True)


def _rounded(timing: Timing | None, field: str) -> float | None:
    value = None if timing is None else getattr(timing, field)
    return None if value is None else round(value, 2)


def _digits(found: Found, variant: Variant, index: int) -> float | None:
    # capped: JSON has no infinity, and a result of NaN is infinitely wrong
    return float(f"{min(found[variant][index], MAX_NUMBER):.3e}") if variant in found else None


def _print_row(cell: Cell, row: dict[str, Any], timings: dict[str, Timing]) -> None:
    parts = [f"{cell.name:12s} {row['gates']:8s} {row['checkpoints']:2d} checkpoints"]
    parts.append(f"floor {row['floor_us']:.1f}")
    for name, timing in timings.items():
        spread = f"{timing.p10_us:.1f}..{timing.p90_us:.1f}"
        errs = f"{row['err_out'][name]:.1e}/{row['err_state'][name]:.1e}"
        parts.append(f"{name} {timing.median_us:.1f} ({spread}) eager {timing.eager_us:.0f} {errs}")
    print("  ".join(parts), flush=True)


if __name__ == "__main__":
    with clear_errors():
        main()
