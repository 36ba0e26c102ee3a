"""Prepare and scan of the prefill timed by themselves, the scan with every tile there is."""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..cute_kernels.kda_prefill import STAGES, launch_stages, workspace_bytes
from ..cute_kernels.tiles import SCAN_TILES, choose_scan_tile
from ..ops.kda import kda_prefill
from .kda_cells import DIM, Cell, Inputs, make_inputs
from .kda_peers import SCALE
from .timing import Call, l2_bytes, num_input_sets, time_calls, time_host

MEMORY_SHARE = 0.25  # of free memory, for inputs and the buffers between stages


def run(
    cells: Sequence[Cell],
    gates: Sequence[str],
    device: torch.device,
    meta: dict[str, Any],
    out: Path,
    rounds: int,
) -> None:
    """Prints a line a cell and writes kda_prefill_stages.json."""
    rows = []
    for cell in cells:
        for name in gates:
            rows.append(time_stages(cell, name, device, rounds))
            print(describe(cell, rows[-1]), flush=True)
            torch.cuda.empty_cache()
    path = out / "kda_prefill_stages.json"
    path.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    print(path)


def time_stages(cell: Cell, gates: str, device: torch.device, rounds: int) -> dict[str, Any]:
    """us of each stage, of the whole call, and of the host's part of an eager call."""
    T, N, H = cell.num_tokens, len(cell.lens), cell.heads
    free = int(torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE)
    set_bytes = cell.io_bytes(0) + workspace_bytes(T, N, H)
    sets = num_input_sets(set_bytes, l2_bytes(device), free)
    buffers = [_buffers(make_inputs(cell, gates, 0, seed, device)) for seed in range(sets)]
    tiles = {f"scan_v{tile.rows}": i for i, (tile, _) in enumerate(SCAN_TILES)}
    with torch.inference_mode():
        for one in buffers:
            _call(one, sum(STAGES.values()), None)()
        variants: dict[str, list[Call]] = {
            "prepare": [_call(one, STAGES["prepare"], None) for one in buffers],
            **{
                name: [_call(one, STAGES["scan"], i) for one in buffers]
                for name, i in tiles.items()
            },
            "all": [_call(one, sum(STAGES.values()), None) for one in buffers],
        }
        timings = time_calls(variants, rounds=rounds, eager_rounds=1)
        inputs = buffers[0][0]
        bound = inputs.lower_bound
        # nothing around the op but the call itself
        eager = functools.partial(kda_prefill, *inputs.tensors(), lower_bound=bound, scale=SCALE)
        host_us = time_host(eager, rounds=100)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return {
        "heads": H,
        "lens": list(cell.lens),
        "gates": gates,
        "chosen": f"scan_v{SCAN_TILES[choose_scan_tile(N, H, sms)][0].rows}",
        "us": {name: round(timing.median_us, 2) for name, timing in timings.items()},
        "host_us": round(host_us, 1),
    }


def describe(cell: Cell, row: dict[str, Any]) -> str:
    """A line: stages in us, prepare in ns a token-head, the scan in us a step of the longest."""
    us, steps = row["us"], -(-max(cell.lens) // 16)
    ns = us["prepare"] * 1e3 / (cell.num_tokens * cell.heads)
    scans = "  ".join(
        f"{name} {value:.1f} ({value / steps:.3f} a step){'*' if name == row['chosen'] else ''}"
        for name, value in us.items()
        if name.startswith("scan")
    )
    return (
        f"{cell.name:12s} {row['gates']:8s} all {us['all']:.1f} us  "
        f"prepare {us['prepare']:.1f} ({ns:.3f} ns a token-head)  {scans}  host {row['host_us']}"
    )


def _buffers(inputs: Inputs) -> tuple[Inputs, torch.Tensor, torch.Tensor]:
    """Inputs, and workspace and output that stay from stage to stage."""
    T, N, H = inputs.cell.num_tokens, len(inputs.cell.lens), inputs.cell.heads
    workspace = inputs.v.new_empty(workspace_bytes(T, N, H), dtype=torch.uint8)
    return inputs, workspace, inputs.v.new_empty(T, H, DIM)


def _call(
    buffers: tuple[Inputs, torch.Tensor, torch.Tensor],
    stages: int,
    scan_tile: int | None,
) -> Call:
    inputs, workspace, o = buffers
    tensors = inputs.tensors()

    def call() -> None:
        launch_stages(
            *(tensors, workspace, o),
            lower_bound=inputs.lower_bound,
            scale=SCALE,
            stages=stages,
            scan_tile=scan_tile,
        )

    return call
