"""Tables and plots of simulated workloads."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..kda.command import make_folder
from ..kda.timeline import can_draw

if TYPE_CHECKING:
    from .simulate import Outcome, Workload

LOST = (
    "lost: tokens whose KV was in the cache, but with no state so deep: they are computed again. "
    "Who shares a beginning second finds it so: nobody knew before where prompts would part."
)
TWO_PASSES = (
    "two passes: this scheduler with num_prefill_checkpoint_blocks=0, so that a forward ends "
    "where a state is to be kept. These are not the rules of another engine."
)
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
    if any(total["tokens_lost"] for total in totals):
        console.print(LOST, highlight=False, soft_wrap=True)
    if not all(outcome.workload.has_exports for outcome in outcomes):
        console.print(TWO_PASSES, highlight=False, soft_wrap=True)


def _title(outcome: "Outcome") -> str:
    workload = outcome.workload
    streams = "1 stream" if workload.streams == 1 else f"{workload.streams} streams"
    return (
        f"{workload.name}, {streams}: {workload.start:,} + {workload.step:,} tokens\n"
        f"unit {workload.unit}, block {workload.kv_block}, budget {workload.budget:,}"
    )


def draw(outcomes: Sequence["Outcome"], path: Path) -> str:
    """Draws forwards and tokens of each round; says where the picture is, or why there is none."""
    if not can_draw():
        return "no picture: matplotlib is not installed; pip install 'torch-kda[plots]'"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), dpi=130, layout="constrained")
    axes = figure.subplots(3, 1, sharex=True)
    width = 0.8 / len(outcomes)
    for index, (outcome, colour) in enumerate(zip(outcomes, COLOURS, strict=False)):
        setting = "" if outcome.workload.has_exports else " (num_prefill_checkpoint_blocks=0)"
        places = [n + (index - (len(outcomes) - 1) / 2) * width for n in _numbers(outcome)]
        for axis, field in zip(axes, ("forwards", "tokens_computed", "tokens_lost"), strict=True):
            values = [getattr(a_round, field) for a_round in outcome.rounds]
            axis.bar(places, values, width, color=colour, label=mode_of(outcome) + setting)
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
    # wide units, each of one block
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


def write_report(
    simulate: Callable[["Workload"], "Outcome"], out: Path, origin: Mapping[str, str | None]
) -> list[Path]:
    """Runs the published workloads both ways; returns what it wrote: JSON, a page and a plot.

    Args:
        origin: command, commit and date, for the page.
    """
    make_folder(out)
    pairs = [
        (simulate(workload), simulate(replace(workload, has_exports=False)))
        for workload in published()
    ]
    data = {
        "origin": dict(origin),
        "workloads": [
            {
                "workload": asdict(single.workload),
                "single_pass": single.as_json(),
                "two_pass": two.as_json(),
            }
            for single, two in pairs
        ],
    }
    written = [out / "simulate.json", out / "simulate.md"]
    written[0].write_text(json.dumps(data, indent=1) + "\n")
    if can_draw():
        written.append(out / "simulate.png")
        draw(pairs[0], written[-1])
    written[1].write_text(_page(pairs, origin, has_plot=len(written) == 3))
    return written


def _page(
    pairs: Sequence[tuple["Outcome", "Outcome"]],
    origin: Mapping[str, str | None],
    *,
    has_plot: bool,
) -> str:
    head = (
        *("workload", "streams", "start + step", "unit / block", "slots", "rounds"),
        *("forwards", "two passes", "computed", "two passes", "cached", "lost", "two passes"),
        *("slots peak", "evictions"),
    )
    rule = ["---"] * 2 + ["---:"] * (len(head) - 2)
    lines = [_report_line(single, two) for single, two in pairs]
    table = "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))
    source = f"`{origin['command']}`, commit {origin['commit']}, {origin['date']}."
    plot = "\n![rounds of the first line](simulate.png)\n" if has_plot else ""
    return (
        f"# Simulated workloads\n\n{source} The real scheduler and cache, budget 8,192, no model. "
        "Numbers are sums over all rounds; the first prompts of growing-prefix are prefilled "
        "before the first round and not counted, the other workloads begin with a cold cache.\n\n"
        f"- {TWO_PASSES}\n- {LOST}\n\n{table}\n{plot}"
    )


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
