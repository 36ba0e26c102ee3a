"""Times the ops around prefill against the bytes that they must move.

Every number comes after a check against float64. Writes around.json, and from it around.md. Runs as
`python -m torch_kda.profiles.bench_around --out DIR`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kda.command import clear_errors, make_folder
from .around_cells import CELLS, OPS, POOLS, Cell, Inputs
from .options import MAX_ROUNDS, Parser, integer
from .provenance import origin
from .timing import (
    copy_bytes_per_second,
    l2_bytes,
    num_input_sets,
    require_cuda,
    time_calls,
)

MEMORY_SHARE = 0.25  # of free memory, for inputs
MAX_SETS = 16
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exits with 1 if a result is too far from the truth."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    device = require_cuda("bench_around")
    make_folder(options.out)
    speed, rate = copy_bytes_per_second(device), matmul_flops_per_second(device)
    command = ["python", "-m", "torch_kda.profiles.bench_around", *arguments]
    meta = {
        **origin(device, options.commit, command),
        "triton": version("triton"),
        "copy_tb_s": round(speed / 1e12, 3),
        "matmul_tflop_s": round(rate / 1e12, 1),
    }
    rows: list[Row] = []
    for cell in CELLS:
        if options.op and cell.op not in options.op:
            continue
        rows.append(measure(cell, device, speed, rate, options.rounds))
        print(line(rows[-1]), flush=True)
        data = {"meta": meta, "rows": rows}
        (options.out / "around.json").write_text(json.dumps(data, indent=1) + "\n")
        (options.out / "around.md").write_text(markdown(data))
    if any(row["us"] is None for row in rows):
        raise SystemExit(1)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="bench_around", description="Time the ops around prefill on one GPU.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--commit", help="what is measured (default: git's HEAD)")
    parser.add_argument("--op", nargs="+", choices=list(OPS), help="default: all")
    parser.add_argument(
        "--rounds", type=integer(1, MAX_ROUNDS), default=20, help="graph replays a number"
    )
    return parser.parse_args(arguments)


def measure(cell: Cell, device: torch.device, speed: float, rate: float, num_rounds: int) -> Row:
    """One line: a check, and if that is good, the time."""
    with torch.inference_mode():
        inputs = make(cell, device, 0)
        num_bytes = cell.num_bytes(inputs)
        floor_us = max(num_bytes / speed, cell.flops / rate) * 1e6
        error = error_of(cell, inputs)
        row: Row = {
            "op": cell.op,
            "cell": cell.name,
            "us": None,
            "floor_us": round(floor_us, 2),
            "error": float(f"{error:.3e}"),
            "limit": OPS[cell.op].limit,
        }
        if not error <= OPS[cell.op].limit:  # a NaN is wrong too
            return row
        free = int(torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE)
        set_bytes = sum(x.nbytes for x in inputs.values() if isinstance(x, Tensor))
        num_sets = min(MAX_SETS, num_input_sets(set_bytes, l2_bytes(device), free))
        sets = [inputs, *(make(cell, device, seed) for seed in range(1, num_sets))]
        call = OPS[cell.op].call
        calls = [lambda x=x: call(**x) for x in sets]
        timing = time_calls({cell.name: calls}, rounds=num_rounds)[cell.name]
    torch.cuda.empty_cache()
    row |= {
        "us": round(timing.median_us, 2),
        "p10_us": round(timing.p10_us, 2),
        "p90_us": round(timing.p90_us, 2),
        "eager_us": None if timing.eager_us is None else round(timing.eager_us, 2),
        "ratio": round(timing.median_us / floor_us, 3),
        "tflop_s": round(cell.flops / timing.median_us / 1e6, 1) if cell.flops else None,
    }
    return row


def make(cell: Cell, device: torch.device, seed: int) -> Inputs:
    """Inputs of a cell; the same seed gives the same."""
    rng = torch.Generator(device=device)
    rng.manual_seed(seed)
    return cell.make(rng)


def error_of(cell: Cell, inputs: Inputs) -> float:
    """The largest relative RMS error of output and pools against the reference in float64."""
    op = OPS[cell.op]
    found = run(op.call, inputs)
    true = run(op.reference, {n: _double(x) for n, x in inputs.items()})
    return max(_relative_rms(a, b) for a, b in zip(found, true, strict=True))


def run(op: Any, inputs: Inputs) -> list[Tensor]:
    """Output, if there is one, and pools; the inputs' own pools stay as they were."""
    inputs = {n: x.clone() if n in POOLS else x for n, x in inputs.items()}
    out = op(**inputs)
    return [x for x in (out, *(inputs.get(name) for name in POOLS)) if x is not None]


def _double(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def _relative_rms(x: Tensor, true: Tensor) -> float:
    """A part at a time: a pool in float64 twice over would not always fit."""
    error = size = 0.0
    for a, b in zip(x.flatten().split(2**26), true.flatten().split(2**26), strict=True):
        error += (a.double() - b).square().sum().item()
        size += b.square().sum().item()
    return (error / max(size, 1e-300)) ** 0.5


def matmul_flops_per_second(device: torch.device) -> float:
    """Of torch's own product of two bf16 matrices of 8192 x 8192."""
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    (timing,) = time_calls({"matmul": [lambda: a @ b] * 2}, rounds=10).values()
    return 2 * 8192**3 / (timing.median_us * 1e-6)


def line(row: Row) -> str:
    head = (
        f"{row['op']:20s} {row['cell']:24s} floor {row['floor_us']:9.1f}  error {row['error']:.1e}"
    )
    if row["us"] is None:
        return f"{head}  WRONG, not timed: the limit is {row['limit']:.1e}"
    speed = f"  {row['tflop_s']:.0f} TFLOP/s" if row["tflop_s"] else ""
    spread = f"({row['p10_us']:.1f}..{row['p90_us']:.1f})"
    return f"{head}  {row['us']:9.1f} us {spread}  x{row['ratio']:.2f}{speed}"


def markdown(data: dict[str, Any]) -> str:
    """The whole page."""
    parts = [
        "# Ops around prefill",
        "\n".join(f"- {key}: {value}" for key, value in data["meta"].items()),
        "us a call: medians of CUDA-graph replays over rotating inputs. Floor: what must move, "
        "once, at the speed of a copy, or the products at the rate of a large matmul, whichever is "
        "longer. Error: relative RMS of output and pools against float64, the larger one.",
    ]
    head = "| cell | us | p10..p90 | floor us | ratio | TFLOP/s | eager us | error |"
    rule = "|---|---|---|---|---|---|---|---|"
    for op in dict.fromkeys(row["op"] for row in data["rows"]):
        rows = [_table_row(row) for row in data["rows"] if row["op"] == op]
        parts += [f"## {op}", "\n".join([head, rule, *rows])]
    return "\n\n".join(parts) + "\n"


def _table_row(row: Row) -> str:
    if row["us"] is None:
        cells = [row["cell"], "wrong", "", row["floor_us"], "", "", "", f"{row['error']:.1e}"]
    else:
        cells = [row["cell"], row["us"], f"{row['p10_us']}..{row['p90_us']}", row["floor_us"]]
        cells += [row["ratio"], row["tflop_s"] or "", row["eager_us"] or "", f"{row['error']:.1e}"]
    return f"| {' | '.join(str(cell) for cell in cells)} |"


if __name__ == "__main__":
    with clear_errors():
        main()
