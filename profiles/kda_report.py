"""Tables and plot of the prefill bench, written from its JSON."""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..kda.command import make_folder
from ..kda.timeline import can_draw
from .kda_cells import GATES, MAX_CHECKPOINTS, Cell
from .options import (
    MaybeKey,
    NotNegative,
    Number,
    Positive,
    check_distinct,
    count,
    one_of,
    read_results,
)

PEERS = ("vllm", "fla", "cudnn")
COLORS = {"torch_kda": "#0b6e4f", "vllm": "#d08c2f", "fla": "#6b7a8f", "cudnn": "#8f5b8a"}
STATE_BYTES = 4 * 128 * 128

Row = dict[str, Any]

_ERRORS = dict.fromkeys(("torch_kda", *PEERS), NotNegative | None)
_TIMES = dict.fromkeys(_ERRORS, Positive | None)
SHAPE = {
    "meta": {
        **{key: str for key in ("gpu", "torch", "command")},
        **{key: str | None for key in ("driver", "commit")},
        "copy_tb_s": Positive,
        **{MaybeKey(key): str | None for key in ("date", "cutlass_dsl")},
        str: str | Number | None,
    },
    "rows": (
        {
            "heads": count(1),
            "lens": (count(1),),
            "gates": one_of(GATES),
            "checkpoints": count(0, MAX_CHECKPOINTS),
            "floor_us": Positive,
            **{key: _TIMES for key in ("us", "eager_us")},
            **{key: _ERRORS for key in ("err_out", "err_state")},
            "err_tokens": count(1),
        },
    ),
}


def merge(sources: Sequence[Path], out: Path) -> Path:
    """One kda_prefill.json of several that measured parts, on one GPU at one commit."""
    parts = [_read(source) for source in sources]
    for part, source in zip(parts, sources, strict=True):
        for key in ("gpu", "driver", "torch", "commit"):
            if part["meta"][key] != parts[0]["meta"][key]:
                raise ValueError(f"--render: {source} and {sources[0]} differ in {key}")
    meta = parts[0]["meta"] | {"command": "; ".join(part["meta"]["command"] for part in parts)}
    rows = [row for part in parts for row in part["rows"]]
    check_distinct(rows, ("heads", "lens", "gates", "checkpoints"), "--render")
    make_folder(out)
    merged = out / "kda_prefill.json"
    merged.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    return merged


def _read(source: Path) -> dict[str, Any]:
    what = "a kda_prefill.json of torch-kda bench ops"
    return read_results(source, SHAPE, option="--render", what=what, check=_unlike_rows)


def _unlike_rows(data: dict[str, Any]) -> str | None:
    """Where a row isn't as the bench writes it: both errors come together, before any time."""
    for i, row in enumerate(data["rows"]):
        if row["err_tokens"] != sum(row["lens"]):  # so are exports as few as tokens
            return f"rows[{i}].err_tokens is {row['err_tokens']}, and not the sum of its lens"
        for name in _ERRORS:
            known = [key for key in ("err_out", "err_state", "us") if row[key][name] is not None]
            for key in ("err_out", "err_state"):
                if known and key not in known:
                    return f"rows[{i}].{key}.{name} is null beside its {known[0]}"
    return None


def write_report(source: Path, out: Path) -> list[Path]:
    """kda_prefill.md and, where matplotlib is, kda_prefill.png; returns what was written."""
    data = json.loads(source.read_text())
    make_folder(out)
    table = out / "kda_prefill.md"
    table.write_text(markdown(data))
    picture = out / "kda_prefill.png"
    if not draw(data["rows"], picture):
        print("no plot: pip install 'torch-kda[plots]', then --render the JSON")
        return [source, table]
    return [source, table, picture]


def markdown(data: dict[str, Any]) -> str:
    """The whole page."""
    meta, rows = data["meta"], data["rows"]
    parts = [
        "# KDA prefill: torch-kda and its peers",
        "\n".join(f"- {key}: {value}" for key, value in meta.items()),
        "Whole op from raw inputs (gate, norms, beta, states in and out), us a call: medians "
        "of CUDA-graph replays over rotating inputs, variants in turns. Floor: inputs, output, "
        "states and checkpoints moved once at the speed of a copy. Eager: wall clock of a call in "
        "a row of eager ones, so the host's time where that is longer. Errors: relative RMS "
        "against float64, first and last head, all tokens of the cell.",
    ]
    for gates in dict.fromkeys(row["gates"] for row in rows):
        here = [row for row in rows if row["gates"] == gates]
        parts += [f"## {gates} gates", time_table(here), error_table(here)]
    parts += [text for text in (ratios(rows), export_costs(rows, meta["copy_tb_s"])) if text]
    return "\n\n".join(parts) + "\n"


def name_of(row: Row) -> str:
    """Of its cell."""
    return Cell(row["heads"], tuple(row["lens"])).name


def time_table(rows: Sequence[Row]) -> str:
    """Times of ours and of each peer, in Markdown."""
    head = ["cell", "checkpoints", "floor", "torch-kda", "share of floor", "eager"]
    for peer in PEERS:
        head += [peer, f"ratio to {peer}"]
    lines = []
    for row in rows:
        us, ours = row["us"], row["us"]["torch_kda"]
        line = [name_of(row), str(row["checkpoints"]), f"{row['floor_us']:.1f}", _us(ours)]
        line += ["-" if ours is None else f"{row['floor_us'] / ours:.0%}"]
        line += [_us(row["eager_us"]["torch_kda"])]
        for peer in PEERS:
            ratio = None if ours is None or us[peer] is None else ours / us[peer]
            line += [_us(us[peer]), "-" if ratio is None else f"{ratio:.2f}"]
        lines.append(line)
    return _table(head, lines)


def error_table(rows: Sequence[Row]) -> str:
    """Errors of ours and of each peer, in Markdown."""
    names = ("torch_kda", *PEERS)
    head = ["cell", "checkpoints", "tokens", *(f"{name}, output / states" for name in names)]
    lines = []
    for row in rows:
        errs = [(row["err_out"][name], row["err_state"][name]) for name in names]
        cells = ["-" if out is None else f"{out:.1e} / {state:.1e}" for out, state in errs]
        lines.append([name_of(row), str(row["checkpoints"]), str(row["err_tokens"]), *cells])
    return _table(head, lines)


def ratios(rows: Sequence[Row]) -> str:
    """The headline: ours to vLLM's where both export one checkpoint a sequence."""
    found = {}
    for row in rows:
        ours, theirs = row["us"]["torch_kda"], row["us"]["vllm"]
        if row["checkpoints"] == 1 and ours is not None and theirs is not None:
            found.setdefault(row["gates"], {})[name_of(row)] = ours / theirs
    lines = [
        f"- {gates}: geometric mean {statistics.geometric_mean(by.values()):.3f} over {len(by)} "
        f"cells, best {min(by.values()):.2f} ({min(by, key=by.__getitem__)}), "
        f"worst {max(by.values()):.2f} ({max(by, key=by.__getitem__)})"
        for gates, by in found.items()
    ]
    title = "## Time as a share of vLLM's, one checkpoint a sequence"
    return "\n".join([title, "", *lines]) if lines else ""


def export_costs(rows: Sequence[Row], copy_tb_s: float) -> str:
    """What checkpoints cost beyond the same call without them, and their bytes at copy speed."""
    bare = {(name_of(r), r["gates"]): r["us"]["torch_kda"] for r in rows if r["checkpoints"] == 0}
    lines = []
    for row in rows:
        before, after = bare.get((name_of(row), row["gates"])), row["us"]["torch_kda"]
        if row["checkpoints"] == 0 or before is None or after is None:
            continue
        cell = Cell(row["heads"], tuple(row["lens"]))
        exported = sum(len(offsets) for offsets in cell.exports(row["checkpoints"]))
        moved = exported * row["heads"] * STATE_BYTES / (copy_tb_s * 1e6)
        line = [cell.name, row["gates"], str(row["checkpoints"]), f"{after - before:.1f}"]
        lines.append([*line, f"{moved:.1f}", f"{1.3 * moved + 2:.1f}"])
    head = ["cell", "gates", "checkpoints", "cost", "their bytes", "1.3 x bytes + 2"]
    return f"## What exports cost, us\n\n{_table(head, lines)}" if lines else ""


def draw(rows: Sequence[Row], path: Path) -> bool:
    """Bars of one checkpoint a sequence, or of the fewest there are; False without matplotlib."""
    if not can_draw():
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    gates = list(dict.fromkeys(row["gates"] for row in rows))
    figure, axes = pyplot.subplots(len(gates), 1, figsize=(12, 3.6 * len(gates)), squeeze=False)
    for axis, name in zip(axes[:, 0], gates, strict=True):
        _draw_gates(axis, [row for row in rows if row["gates"] == name], name)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True


def _draw_gates(axis: Any, rows: Sequence[Row], gates: str) -> None:
    counts = {row["checkpoints"] for row in rows}
    count = 1 if 1 in counts else min(counts)
    shown = [row for row in rows if row["checkpoints"] == count]
    # FLA and cudnn have no checkpoints: their bars are of the row without
    bare = {name_of(row): row for row in rows if row["checkpoints"] == min(counts)}
    names = [name for name in COLORS if any(_bar(row, bare, name) for row in shown)]
    width = 0.8 / max(len(names), 1)
    for i, name in enumerate(names):
        heights = [_bar(row, bare, name) or float("nan") for row in shown]
        places = [x + (i - (len(names) - 1) / 2) * width for x in range(len(shown))]
        axis.bar(places, heights, width, label=name, color=COLORS[name])
    for x, row in enumerate(shown):
        axis.hlines(row["floor_us"], x - 0.42, x + 0.42, color="black", lw=1)
    axis.set_xticks(range(len(shown)), [name_of(row) for row in shown], rotation=30, ha="right")
    axis.set_yscale("log")
    axis.set_ylabel("us")
    kind = "checkpoint" if count == 1 else "checkpoints"
    axis.set_title(f"KDA prefill, {gates} gates, {count} {kind} a sequence; line: byte floor")
    if names:
        axis.legend(ncols=len(names), fontsize=8)


def _bar(row: Row, bare: dict[str, Row], name: str) -> float | None:
    if name in ("fla", "cudnn"):
        row = bare.get(name_of(row), row)
    return row["us"][name]


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))
