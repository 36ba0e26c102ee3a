"""The demo's time to first token, with our prefill and with the same steps in plain torch.

Runs as `python -m torch_kda.profiles.bench_demo --out DIR`; writes demo.json, and from it demo.md.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..kda.command import clear_errors, make_folder
from ..kda.demo import DemoResult, repository_text, run_demo
from ..ops import kda as ops
from ..ops.reference import kda_prefill_ref
from .options import MAX_TOKENS, Parser, integer
from .provenance import origin

NUM_TOKENS = 4000
PATHS = {"kernel": "CuTe DSL", "torch": "chunks of 16 in torch"}


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line. Exits with 1 if a run breaks one of the demo's promises."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    make_folder(options.out)
    device = torch.device(options.device)
    results = {"kernel": run(options)}
    with torch_prefill():
        results["torch"] = run(options)
    command = ["python", "-m", "torch_kda.profiles.bench_demo", *arguments]
    meta = {"tokens": options.tokens, **origin(device, options.commit, command)}
    data: dict[str, Any] = {"meta": meta}
    data |= {name: result.as_json() for name, result in results.items()}
    (options.out / "demo.json").write_text(json.dumps(data, indent=1) + "\n")
    (options.out / "demo.md").write_text(markdown(data))
    print(markdown(data))
    failures = [f"{name}: {line}" for name in results for line in results[name].failures()]
    if failures:
        raise SystemExit("\n".join(failures))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(prog="bench_demo", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--commit", help="what is measured (default: git's HEAD)")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument(
        "--tokens", type=integer(1, MAX_TOKENS), default=NUM_TOKENS, help="of the prompt"
    )
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> DemoResult:
    return run_demo(
        repository_text(), options.tokens, device=options.device, seed=0, say=lambda line: None
    )


@contextmanager
def torch_prefill() -> Iterator[None]:
    """Inside, eager prefills are the reference's, on whatever device."""
    before = ops._kda_prefill
    ops._kda_prefill = kda_prefill_ref
    try:
        yield
    finally:
        ops._kda_prefill = before


def markdown(data: dict[str, Any]) -> str:
    """The page of the results."""
    meta = data["meta"]
    lines = [
        "# The demo with our prefill, and with the same steps in torch",
        "",
        f"A prompt of {meta['tokens']:,} tokens, then its follow-up; eager, no CUDA graphs.",
        "",
        "| KDA prefill | pass | TTFT, prompt | TTFT, follow-up | forwards | from cache |",
        "|---|---|---|---|---|---|",
    ]
    for name, title in PATHS.items():
        for mode in ("single_pass", "two_pass"):
            figures = data[name][mode]
            first, follow_up = (f"{1e3 * s:.1f} ms" for s in figures["ttft_s"])
            forwards = " + ".join(map(str, figures["forwards"]))
            lines.append(
                f"| {title} | {mode.replace('_', ' ')} | {first} | {follow_up} | {forwards} "
                f"| {figures['tokens_cached'][1]:,} |"
            )
    kernel, plain = (data[name]["single_pass"]["ttft_s"][0] for name in PATHS)
    lines += ["", f"First token of the prompt: {plain / kernel:.1f} times as soon.", ""]
    lines += [f"{key}: {value}  " for key, value in meta.items() if key != "tokens"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with clear_errors():
        main()
