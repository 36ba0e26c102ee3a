"""The command line: `torch-kda`, or `python -m torch_kda.kda`."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .command import check_picture, clear_errors

if TYPE_CHECKING:
    from .demo import DemoResult

# torch takes seconds to import, so each command imports what it needs
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Kimi Delta Attention language models in PyTorch: one forward per prompt.",
)

bench = typer.Typer(
    no_args_is_help=True,
    help="Time ops and models on a GPU; simulate workloads without one.",
)
app.add_typer(bench, name="bench")

# of commands whose options are those of a program in profiles
PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True}
Seed = Annotated[
    int, typer.Option(min=0, max=2**63 - 1, help="Of the random weights and of draws.")
]
Device = Annotated[str, typer.Option(help="auto (CUDA where there is one), cpu or cuda.")]


def _version(is_asked: bool) -> None:
    if is_asked:
        from .. import __version__

        typer.echo(f"torch-kda {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and end.")
    ] = False,
) -> None:
    """Kimi Delta Attention language models in PyTorch: one forward per prompt."""


@app.command()
def demo(
    tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt.")] = 4000,
    file: Annotated[
        Path | None, typer.Option(help="Text to take it from. Default: this package's own.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")
    ] = False,
    picture: Annotated[
        Path, typer.Option(help="Where the timeline is drawn: .png, .svg, .pdf or .jpg.")
    ] = Path("torch-kda-demo.png"),
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Prefill a prompt and a follow-up, in one pass and in two, and compare.

    Exits with 1 if greedy tokens with and without the cache differ, or a promise is not kept.
    """
    with clear_errors():
        from .demo import NUM_STAGES, repository_text, run_demo
        from .timeline import can_draw

        if can_draw():
            check_picture(picture)
        text = _read(file) if file else repository_text()
        available = len(text.encode())  # a byte is a token
        if available == 0:
            raise ValueError(f"--file: {file} is empty; the demo needs text to prefill")
        if available < tokens:
            _say(f"the text has only {available:,} tokens")
        with _progress(NUM_STAGES) as say:
            result = run_demo(text, tokens, device=_one_thread(device), seed=seed, say=say)
        if as_json:
            typer.echo(json.dumps(result.as_json()))
        else:
            _print_result(result)
    _say(_draw(result, picture))
    failures = result.failures()
    for failure in failures:
        _say(f"FAILED: {failure}")
    raise typer.Exit(1 if failures else 0)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to go on from.")],
    model: Annotated[str, typer.Option(help="A preset, or the folder of a checkpoint.")] = "tiny",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Go on from a prompt. Presets have random weights: their text means nothing."""
    with clear_errors():
        from .build import describe
        from .llm import LLM, SamplingParams

        if not prompt:
            raise ValueError("PROMPT must not be empty")
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        _say(f"loading {model}")  # a large preset takes minutes on a CPU
        llm = LLM(model, device=_device(device), seed=seed)
        for line in describe(llm.engine):
            _say(line)
        output = llm.generate(prompt, sampling)[0]
        typer.echo(output.text)
    usage = output.usage
    _say(
        f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} generated, "
        f"finished by {output.finish_reason}"
    )
    if output.error:
        _say(f"FAILED: {output.error}")
        raise typer.Exit(1)


@bench.command("ops", add_help_option=False, context_settings=PASS_ON)
def bench_ops(context: typer.Context) -> None:
    """KDA prefill against its peers, correctness before time; --help lists its options."""
    with clear_errors():
        from ..profiles.bench_ops import main as run

        run(context.args)


@bench.command("simulate", add_help_option=False, context_settings=PASS_ON)
def bench_simulate(context: typer.Context) -> None:
    """Forwards and cached tokens of a workload, without a model or a GPU; --help for more."""
    with clear_errors():
        from ..profiles.simulate import main as run

        run(context.args)


@bench.command("model", add_help_option=False, context_settings=PASS_ON)
def bench_model(context: typer.Context) -> None:
    """Single pass against two, prefill, decode, compilation; --help lists its options."""
    with clear_errors():
        from ..profiles.bench_model import main as run

        run(context.args)


@app.command(add_help_option=False, context_settings=PASS_ON)
def profile(context: typer.Context) -> None:
    """Trace single-pass and two-pass prefill of a prompt; --help lists the options."""
    with clear_errors():
        from ..profiles.trace import main as run

        run(context.args)


def main() -> None:
    """Entry point of the `torch-kda` script."""
    with clear_errors():
        app()


@contextmanager
def _progress(num_stages: int) -> Iterator:
    """A function that names the next stage on stderr: with a bar on a terminal, else by lines."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _say
        return
    with Progress(console=console) as bar:
        task = bar.add_task("starting", total=num_stages + 1)

        def say(stage: str) -> None:
            bar.update(task, description=stage, advance=1)

        yield say
        bar.update(task, description="done", completed=num_stages + 1)


def _print_result(result: "DemoResult") -> None:
    from rich.console import Console
    from rich.table import Table

    from .demo import describe_result

    model = result.model_config
    title = f"{model.name}, {model.num_hidden_layers} layers, {model.dtype}, {result.config.device}"
    table = Table(title=title)
    table.add_column("prefill", no_wrap=True)
    table.add_column("request")
    for column in ("forwards", "exports", "computed", "cached", "TTFT ms"):
        table.add_column(column, justify="right")
    for mode, runs in (("single pass", result.single_pass), ("two passes", result.two_pass)):
        for request, run in zip(("first", "follow-up"), runs, strict=True):
            table.add_row(
                mode if request == "first" else "",
                request,
                str(len(run.prefills)),
                str(run.num_exports),
                f"{run.num_computed_tokens:,}",
                f"{run.num_cached_tokens:,}",
                f"{run.ttft_s * 1e3:,.1f}",
            )
    console = Console()
    console.print(table)
    for line in describe_result(result):
        console.print(line, highlight=False, soft_wrap=True)


def _draw(result: "DemoResult", path: Path) -> str:
    """Draws the timeline, and says where it is or why there is none."""
    from .timeline import can_draw, draw_timeline

    if not can_draw():
        return "no picture: matplotlib is not installed; pip install 'torch-kda[plots]'"
    try:
        draw_timeline(path, result.panels())
    except OSError as error:
        return f"no picture: {error}"
    return f"timeline of forwards: {path.resolve()}"


def _device(name: str) -> str:
    import torch

    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def _one_thread(device: str) -> str:
    """The device that is meant. The tiny model on a CPU gets one thread."""
    import torch

    device = _device(device)
    if device == "cpu":
        # two threads on two busy cores wait for each other: 27 s instead of 0.9 s were seen
        torch.set_num_threads(1)
    return device


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--file: {file} can't be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--file: {file} is not UTF-8 text: {error}") from None


def _say(line: str) -> None:
    typer.echo(line, err=True)


if __name__ == "__main__":
    main()
