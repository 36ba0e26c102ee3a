"""Tables and plots of simulated workloads."""

import importlib.util
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .simulate import Outcome, Workload

RESULTS = Path(__file__).parent / "results"
COLOURS = ("#2b6cb0", "#a0aec0")
MAX_ROUNDS_SHOWN = 40


def mode_of(outcome: "Outcome") -> str:
    return "single pass" if outcome.workload.has_exports else "two passes"


def print_table(outcomes: Sequence["Outcome"]) -> None:
    """A line a round, and the totals; of a second way of running it only the forwards."""
    from rich.console import Console
    from rich.table import Table

    first, others = outcomes[0], outcomes[1:]
    table = Table(title=_title(first))
    table.add_column("round")
    for column in ("prompts", "forwards", "computed", "cached", "lost", "evicted"):
        table.add_column(column, justify="right", no_wrap=True)
    for outcome in others:
        table.add_column(f"{mode_of(outcome)}", justify="right")
    for number in range(min(len(first.rounds), MAX_ROUNDS_SHOWN)):
        cells = [*first.rounds[number], *(outcome.rounds[number].forwards for outcome in others)]
        table.add_row(str(number + 1), *(f"{cell:,}" for cell in cells))
    table.add_section()
    totals = [outcome.as_json() for outcome in outcomes]
    keys = ("forwards", "tokens_computed", "tokens_cached", "tokens_lost", "evictions")
    sent = sum(a_round.prompt_tokens for a_round in first.rounds)
    cells = [sent, *(totals[0][key] for key in keys), *(total["forwards"] for total in totals[1:])]
    table.add_row("all", *(f"{cell:,}" for cell in cells))
    console = Console()
    console.print(table)
    for outcome, total in zip(outcomes, totals, strict=True):
        console.print(
            f"{mode_of(outcome)}: {total['forwards']} forwards in {total['rounds']} rounds, "
            f"{total['tokens_lost']:,} tokens lost to a missing state, "
            f"{total['slots_peak']} of {outcome.workload.slots} slots at most",
            highlight=False,
            soft_wrap=True,
        )


def _title(outcome: "Outcome") -> str:
    workload = outcome.workload
    streams = "1 stream" if workload.streams == 1 else f"{workload.streams} streams"
    return (
        f"{workload.name}, {streams}: {workload.start:,} + {workload.step:,} tokens\n"
        f"unit {workload.unit}, block {workload.kv_block}, budget {workload.budget:,}"
    )


def can_draw() -> bool:
    """Whether matplotlib (extra `plots`) is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(outcomes: Sequence["Outcome"], path: Path) -> str:
    """Draws forwards and tokens of each round; says where the picture is, or why there is none."""
    if not can_draw():
        return "no picture: matplotlib is not installed; pip install 'torch-kda[plots]'"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), dpi=130, layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    width = 0.8 / len(outcomes)
    for index, (outcome, colour) in enumerate(zip(outcomes, COLOURS, strict=False)):
        places = [n + (index - (len(outcomes) - 1) / 2) * width for n in _numbers(outcome)]
        for axis, field in zip(axes, ("forwards", "tokens_computed", "tokens_lost"), strict=True):
            values = [getattr(a_round, field) for a_round in outcome.rounds]
            axis.bar(places, values, width, color=colour, label=mode_of(outcome))
    for axis, title in zip(
        axes, ("forwards", "tokens computed", "tokens lost to a missing state"), strict=True
    ):
        axis.set_ylabel(title)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(0, max(1.0, 1.25 * axis.get_ylim()[1]))
        axis.yaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(frameon=False, ncols=len(outcomes), loc="upper right")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    axes[-1].set_xlabel("round")
    axes[0].set_title(_title(outcomes[0]), fontsize="medium")
    try:
        figure.savefig(path)
    except OSError as error:
        return f"no picture: {error}"
    return f"rounds as a picture: {path.resolve()}"


def _numbers(outcome: "Outcome") -> range:
    return range(1, len(outcome.rounds) + 1)


def published() -> list["Workload"]:
    """The workloads of the report."""
    from .simulate import make_workload

    growing = [make_workload("growing-prefix", kv_block=block) for block in (16, 32, 64, 128)]
    growing += [
        make_workload("growing-prefix", kv_block=block, start=119_937, step=2_017)
        for block in (16, 128)
    ]
    # vLLM's block sizes as units: ours has one size for both
    growing += [
        make_workload("growing-prefix", unit=unit, kv_block=unit) for unit in (768, 1536, 2304)
    ]
    growing += [
        make_workload("growing-prefix", has_draft_layer=True),
        make_workload("growing-prefix", streams=8),
        make_workload("growing-prefix", streams=8, slots=24),
    ]
    eight = [make_workload("eight-k", streams=streams) for streams in (1, 4, 16)]
    shared = [make_workload("shared-prefix", streams=streams) for streams in (1, 4, 16)]
    return growing + eight + shared


def write_report(simulate: Callable[["Workload"], "Outcome"]) -> None:
    """Runs the published workloads both ways; writes results/simulate.md and a plot."""
    from dataclasses import replace

    lines = []
    for workload in published():
        single = simulate(workload)
        two = simulate(replace(workload, has_exports=False))
        lines.append(_report_line(single, two))
        if workload.name == "growing-prefix" and workload.streams == 1 and len(lines) == 1:
            draw([single, two], RESULTS / "simulate.png")
    head = (
        *("workload", "streams", "start + step", "unit / block", "slots", "rounds"),
        *("forwards", "two passes", "computed", "two passes", "cached", "lost", "two passes"),
        *("slots peak", "evictions"),
    )
    rule = ["---"] * 2 + ["---:"] * (len(head) - 2)
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    path = RESULTS / "simulate.md"
    path.write_text(
        "# Simulated workloads\n\n"
        f"`torch-kda bench simulate report`, {date}. The real scheduler and cache, budget 8,192, "
        "no model. Numbers are sums over all rounds; what is prefilled before the first round is "
        "not counted. `two passes` is the same scheduler without exports: a forward ends where a "
        "state is to be kept. `lost` tokens have KV but no state.\n\n"
        f"{table}\n\n![rounds](simulate.png)\n"
    )
    print(f"{path.resolve()}")


def _report_line(single: "Outcome", two: "Outcome") -> list[str]:
    workload, ours, base = single.workload, single.as_json(), two.as_json()
    sizes = f"{workload.start:,} + {workload.step:,}"
    name = workload.name + (", draft layer" if workload.has_draft_layer else "")
    return [
        name,
        str(workload.streams),
        sizes,
        f"{workload.unit} / {workload.kv_block}",
        str(workload.slots),
        str(ours["rounds"]),
        f"**{ours['forwards']}**",
        str(base["forwards"]),
        f"{ours['tokens_computed']:,}",
        f"{base['tokens_computed']:,}",
        f"{ours['tokens_cached']:,}",
        f"{ours['tokens_lost']:,}",
        f"{base['tokens_lost']:,}",
        str(ours["slots_peak"]),
        str(ours["evictions"]),
    ]
