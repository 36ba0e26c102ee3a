"""Times the whole model: `torch-kda bench model`.

One runner serves everything: what is compared differs in nothing but what is named. Writes
model.json, and from it model.md. Also runs as `python -m torch_kda.profiles.bench_model`.
"""

import argparse
import json
import logging
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..kda.command import clear_errors, make_folder
from ..kda.config import MAX_LAYERS
from . import peer_fla
from .model_report import merge, read
from .model_stages import STAGES, Bench, Sizes, write
from .options import MAX_MINUTES, MAX_SEED, Parser, integer, integers, names, positive, read_results
from .timing import require_cuda

MAX_STREAMS = 256

log = logging.getLogger("torch_kda.profiles.bench_model")

FULL = Sizes(
    prompt=8000,
    new=256,
    unit=1536,
    budget=8192,
    streams=(1, 4, 16),
    requests=8,
    burst_new=32,
    prefill=(1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072),
    turns=(8192, 32768, 65536),
    turn=300,
    batches=(1, 2, 4, 8, 16, 32, 64, 128, 256),
    context=1024,
    decode_steps=64,
    greedy=(32, 256, 512),
    kv_block=64,
    num_slots=320,
    num_blocks=7000,
    prefill_buckets=(16, 64, 128, 256, 320, 512, 1024, 2048, 4096, 7680, 8000, 8192),
)
QUICK = Sizes(
    prompt=500,
    new=6,
    unit=96,
    budget=512,
    streams=(1, 2),
    requests=2,
    burst_new=3,
    prefill=(64, 1000),
    turns=(200,),
    turn=20,
    batches=(1, 4),
    context=40,
    decode_steps=4,
    greedy=(2, 40, 12),
    kv_block=16,
    num_slots=40,
    num_blocks=300,
    prefill_buckets=(32, 480, 512),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.render is not None:
        for file in write(merge([read(path) for path in options.render]), options.out):
            print(file)
        return
    if options.device.startswith("cuda"):
        require_cuda("torch-kda bench model, but for --quick --device cpu,")
    make_folder(options.out)
    peer = run_peer(options)
    bench = Bench(options, arguments)
    bench.data["meta"]["peer"] = peer
    for file in bench.run():
        print(file)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Checked options; a wrong one ends the program with what is right."""
    parser = Parser(
        prog="torch-kda bench model", description="Time the whole model, random weights."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--commit", help="what is measured (default: git's HEAD)")
    parser.add_argument(
        "--model", help="a preset (default: Kimi-Linear; tiny with --quick on a CPU)"
    )
    parser.add_argument("--layers", type=integer(1, MAX_LAYERS), help="of the stack (default: all)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for a look or a test")
    parser.add_argument("--device", help="cuda; or cpu, with --quick (default: what is there)")
    parser.add_argument(
        "--stages", type=names(STAGES), help=f"of {','.join(STAGES)} (default: all)"
    )
    parser.add_argument(
        "--streams",
        type=integers(1, MAX_STREAMS),
        help="for the workload, comma between (default: 1,4,16)",
    )
    parser.add_argument(
        "--minutes", type=positive(MAX_MINUTES), default=8, help="no stage starts after these"
    )
    compiled = parser.add_mutually_exclusive_group()
    compiled.add_argument("--compile-cache", type=Path, help="folder of kept compilations")
    compiled.add_argument("--no-compile", action="store_true", help="eager, for a look or a test")
    peer = parser.add_mutually_exclusive_group()
    peer.add_argument("--no-peer", action="store_true", help="do not run transformers with FLA")
    peer.add_argument("--peer", type=Path, help="JSON of a run of the peer")
    parser.add_argument("--seed", type=integer(0, MAX_SEED), default=0)
    parser.add_argument(
        "--render", type=Path, nargs="+", metavar="JSON", help="only write one report of these"
    )
    options = parser.parse_args(arguments)
    parser.refuse_beside_render(options)
    if options.device == "cpu" and not options.quick:
        parser.error("argument --device: on a CPU there is only --quick")
    is_small = options.quick and not torch.cuda.is_available()
    options.device = options.device or ("cpu" if is_small else "cuda")
    options.sizes = QUICK if options.quick else FULL
    options.stages = options.stages or list(STAGES)
    if options.streams:
        options.sizes = replace(options.sizes, streams=options.streams)
    options.model = options.model or ("tiny" if options.device == "cpu" else "kimi-linear-48b-a3b")
    return options


def run_peer(options: argparse.Namespace) -> dict[str, Any] | None:
    """What the peer takes, measured in its own process before ours needs the memory."""
    if options.peer is not None:
        return read_results(options.peer, peer_fla.SHAPE, option="--peer", what="a run of the peer")
    if options.no_peer or not peer_fla.is_there():
        return None
    sizes, path = options.sizes, options.out / "peer.json"
    command = [sys.executable, "-m", "torch_kda.profiles.peer_fla", "--out", str(path)]
    command += ["--model", options.model, "--device", options.device]
    command += ["--prefill", f"{sizes.prompt},{min(8192, sizes.budget)}"]
    command += ["--decode", ",".join(map(str, sizes.batches)), "--context", str(sizes.context)]
    if options.layers is not None:
        command += ["--layers", str(options.layers)]
    try:
        subprocess.run(command, check=True, timeout=150)
    except (subprocess.SubprocessError, OSError) as error:
        log.warning("the peer fails or takes too long: %s", error)
    return json.loads(path.read_text()) if path.is_file() else None


if __name__ == "__main__":
    with clear_errors():
        main()
