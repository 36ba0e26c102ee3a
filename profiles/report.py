"""What the traces of a prefill say: tables and a picture, as Markdown and as one HTML file."""

import base64
import html
import io
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..kda.timeline import can_draw
from .provenance import head_commit
from .timing import copy_bytes_per_second
from .trace import Event, busy_us, device_events, forwards, gaps_us, kernel_rows, span_us

if TYPE_CHECKING:
    from .trace import Scenario

WARM = "Each is one recording, made after one of both modes that was thrown away, to warm up."
NUM_KERNELS = 12  # in a table
COLORS = {
    "kda_prefill": "#0b6e4f",
    "causal_conv_prefill": "#68a47c",
    "gated_rms_norm": "#a3c9a8",
    "mla_prefill": "#2b6cb0",
    "mla_store": "#90b4d8",
    "moe": "#d08c2f",
    "": "#a0aec0",
}


def write_report(traces: Mapping[str, Sequence[Event]], found: "Scenario", out: Path) -> list[Path]:
    """report.md, report.html and, where matplotlib is, timeline.png; returns what was written."""
    sections = _sections(traces, found)
    picture = draw(traces) if can_draw() else None
    written = [out / "report.md", out / "report.html"]
    link = ["![time lines](timeline.png)"] if picture else []
    title, *rest = (_as_markdown(section) for section in sections)
    written[0].write_text("\n\n".join([title, *link, *rest]) + "\n")
    written[1].write_text(_page(sections, picture))
    if picture:
        (out / "timeline.png").write_bytes(picture)
        written.append(out / "timeline.png")
    return written


def _sections(
    traces: Mapping[str, Sequence[Event]], found: "Scenario"
) -> list[tuple[str, list[str], list[list[str]]]]:
    """(title, lines, table) of each section; the table's first row is its head."""
    runner, config = found.runner, found.runner.model.config
    unit = found.config.prefix_match_unit
    is_cuda = found.config.device != "cpu"
    facts = {
        "machine": torch.cuda.get_device_name() if is_cuda else "CPU",
        "torch": torch.__version__,
        "commit": found.facts["commit"] or head_commit() or "not known; --commit names it",
        "command": found.facts["command"],
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "model": f"{config.name}, {config.num_hidden_layers} layers, {config.dtype}",
        "prompt": f"{found.num_tokens:,} tokens, states on a grid of {unit:,}",
    }
    sections = [
        (
            "Prefill in a single pass and in two",
            [f"{key}: {value}" for key, value in facts.items()],
            [],
        ),
        ("Time", [WARM], _summary(traces)),
    ]
    speed = copy_bytes_per_second(runner.device) if is_cuda else None
    for name, events in traces.items():
        if name.endswith("eager"):
            table = _ops(events, found, found.num_tokens, speed)
            lines = ["Floor: inputs, outputs and states moved once at the speed of a copy."]
            sections.append((f"Ops: {name}", lines if speed else [], table))
    for name, events in traces.items():
        head = ["op", "kernel", "calls", "us", "share"]
        rows = [
            [op, kernel[:100], str(calls), f"{us:,.1f}", f"{share:.1%}"]
            for op, kernel, calls, us, share in kernel_rows(events)[:NUM_KERNELS]
        ]
        sections.append((f"Longest kernels: {name}", [], [head, *rows]))
    return sections


def _summary(traces: Mapping[str, Sequence[Event]]) -> list[list[str]]:
    rows = [["trace", "forwards", "ms", "busy", "gaps", "longest gap us", "kernels"]]
    for name, events in traces.items():
        device = device_events(events)
        span, gaps = span_us(device), gaps_us(device)
        rows.append(
            [
                name,
                str(len(forwards(events))),
                f"{span / 1e3:,.2f}",
                f"{busy_us(device) / span:.1%}" if span else "",
                str(len(gaps)),
                f"{max(gaps, default=0):,.1f}",
                f"{len(device):,}",
            ]
        )
    return rows


def _ops(
    events: Sequence[Event], found: "Scenario", tokens: int, speed: float | None
) -> list[list[str]]:
    """Our ops, their time on the device and how far it is from their floor."""
    sums: dict[str, float] = {}
    for op, _, _, us, _ in kernel_rows(events):
        sums[op] = sums.get(op, 0.0) + us
    floors = op_bytes(found.runner.model.config, tokens, len(forwards(events)))
    rows = [["op", "us", "floor us", "times the floor"]]
    for op, us in sorted(sums.items(), key=lambda item: -item[1]):
        floor = 1e6 * floors[op] / speed if speed and op in floors else None
        rows.append(
            [
                op or "everything else",
                f"{us:,.1f}",
                "" if floor is None else f"{floor:,.1f}",
                "" if floor is None else f"{us / floor:.2f}",
            ]
        )
    return rows


def op_bytes(config: Any, tokens: int, num_forwards: int) -> dict[str, float]:
    """Bytes that the ops around KDA move at least for a prompt, all layers together."""
    size = 2 if config.dtype == "bfloat16" else 4
    heads, width, channels = config.linear_num_heads, config.linear_dim, config.conv_dim
    state = heads * config.linear_head_dim**2 * 4
    # each forward writes its final state, and one is kept on the way, or read by the second
    states = 2 * state
    windows = 2 * 3 * channels * size
    layers = config.num_kda_layers
    return {
        # q, k, v, the gate and beta in, the output out
        "kda_prefill": layers * (tokens * (channels + 2 * width + heads) * size + states)
        + layers * (num_forwards - 1) * state,
        "causal_conv_prefill": layers * (2 * tokens * channels * size + windows),
        "gated_rms_norm": layers * 3 * tokens * width * size,
    }


def draw(traces: Mapping[str, Sequence[Event]]) -> bytes:
    """The time lines of all traces, one below the other, as a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 1.2 + 0.9 * len(traces)), dpi=130)
    axis = figure.subplots()
    longest = 0.0
    for y, events in enumerate(traces.values()):
        device = device_events(events)
        if not device:
            continue
        start = device[0].start
        longest = max(longest, span_us(device))
        for op, ranges in _lanes(events, start).items():
            axis.broken_barh(ranges, (y - 0.3, 0.6), color=COLORS.get(op, COLORS[""]))
        for i, forward in enumerate(forwards(events)):
            x = max(0.0, (forward.start - start) / 1e3)
            axis.plot([x, x], [y - 0.42, y + 0.42], color="#c53030", linewidth=1.2)
            axis.text(x, y - 0.44, f" forward {i}", fontsize=7, color="#c53030", va="bottom")
    axis.set_yticks(range(len(traces)), list(traces), fontsize=9)
    axis.set_ylim(len(traces) - 0.5, -0.75)
    axis.set_xlim(0, longest / 1e3 * 1.02)
    axis.set_xlabel("milliseconds since the device began; a forward is marked where it is launched")
    axis.spines[["top", "right"]].set_visible(False)
    names = [op for op in COLORS if op]
    patches = [Patch(color=COLORS[op], label=op) for op in names]
    patches.append(Patch(color=COLORS[""], label="others (all of a replay)"))
    where = {"loc": "upper center", "ncols": len(patches), "frameon": False, "fontsize": 7}
    figure.legend(handles=patches, **where)
    figure.tight_layout(rect=(0, 0, 1, 0.93))
    with io.BytesIO() as file:
        figure.savefig(file, format="png")
        return file.getvalue()


def _lanes(events: Sequence[Event], start: float) -> dict[str, list[tuple[float, float]]]:
    """Bars in ms by op, neighbours joined where less than a pixel lies between them."""
    from .trace import OUR_OPS, op_of_kernels

    ops = op_of_kernels(events)
    lanes: dict[str, list[tuple[float, float]]] = {}
    for event in device_events(events):
        op = ops.get(event.correlation or -1, "")
        if event.name.startswith(OUR_OPS):
            op = event.name.removeprefix(OUR_OPS)
        lane = lanes.setdefault(op, [])
        begin, length = (event.start - start) / 1e3, event.us / 1e3
        if lane and begin - sum(lane[-1]) < 0.002:
            lane[-1] = (lane[-1][0], begin + length - lane[-1][0])
        else:
            lane.append((begin, length))
    return lanes


def _as_markdown(section: tuple[str, list[str], list[list[str]]]) -> str:
    title, lines, table = section
    parts = ["# " + title if not table else "## " + title]
    if lines:
        parts.append("\n".join(f"- {line}" for line in lines))
    if table:
        head, *rows = table
        rows = [head, ["---"] * len(head), *rows]
        parts.append("\n".join("| " + " | ".join(row) + " |" for row in rows))
    return "\n\n".join(parts)


def _page(sections: Sequence[tuple[str, list[str], list[list[str]]]], picture: bytes | None) -> str:
    parts = [
        "<!doctype html><meta charset='utf-8'><title>Prefill</title>",
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:70em;margin:2em auto;padding:0 "
        "1em}table{border-collapse:collapse}td,th{padding:.2em .8em;border-bottom:1px solid #ddd;"
        "text-align:left}img{max-width:100%}</style>",
    ]
    for i, (title, lines, table) in enumerate(sections):
        level = 1 if i == 0 else 2
        parts.append(f"<h{level}>{html.escape(title)}</h{level}>")
        if lines:
            items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
            parts.append(f"<ul>{items}</ul>")
        if i == 0 and picture:
            data = base64.b64encode(picture).decode()
            parts.append(f"<img alt='time lines' src='data:image/png;base64,{data}'>")
        if table:
            head, *rows = table
            cells = [f"<tr>{_cells('th', head)}</tr>"]
            cells += [f"<tr>{_cells('td', row)}</tr>" for row in rows]
            parts.append(f"<table>{''.join(cells)}</table>")
    return "\n".join(parts) + "\n"


def _cells(tag: str, row: Sequence[str]) -> str:
    return "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row)
