"""The forwards of a run on a time axis, as a picture."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PREFILL, DECODE, CACHED, TOKEN = "#2b6cb0", "#a0aec0", "#68a47c", "#c53030"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """One forward of the model on behalf of one request. Times in seconds since its submission."""

    start_s: float
    end_s: float
    first_token: int  # position of the first token computed
    num_tokens: int  # tokens computed
    is_decode: bool
    exports: tuple[int, ...]  # positions whose state it wrote for the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The forwards of one request under one way of running it."""

    name: str
    forwards: Sequence[Forward]
    num_cached_tokens: int  # found in the cache, so not computed
    ttft_s: float  # from submission to the first token


def can_draw() -> bool:
    """Whether matplotlib (extra `plots`) is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw_timeline(path: str | Path, panels: Mapping[str, Sequence[Lane]]) -> None:
    """Write a picture: a panel for each request, a lane for each way of running it.

    Its format is what its name ends with.

    Raises:
        OSError: the file cannot be written.
    """
    # the object interface picks no window system and changes no global state
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    num_lanes = max(len(lanes) for lanes in panels.values())
    figure = Figure(figsize=(10, 1.1 + len(panels) * (0.7 + 0.65 * num_lanes)), dpi=130)
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for axis, (title, lanes) in zip(axes, panels.items(), strict=True):
        _draw_panel(axis, title, lanes)
    axes[-1].set_xlabel("milliseconds since the request was submitted")
    marks = {"linestyle": "none", "markersize": 8}
    legend = [
        Patch(color=PREFILL, label="prefill forward"),
        Patch(color=DECODE, label="decode forward"),
        Line2D([], [], marker="v", color=CACHED, label="state exported", **marks),
        Line2D([], [], marker="*", color=TOKEN, label="first token", **marks),
    ]
    figure.legend(handles=legend, loc="upper center", ncols=len(legend), frameon=False)
    figure.tight_layout(rect=(0, 0, 1, 1 - 0.35 / figure.get_figheight()))
    figure.savefig(path)


def _draw_panel(axis, title: str, lanes: Sequence[Lane]) -> None:
    axis.set_title(title, loc="left", fontsize=10)
    # the prefill fills the panel; of the decode that follows, its beginning is enough
    axis.set_xlim(0, max(lane.ttft_s for lane in lanes) * 1e3 * 1.25)
    for y, lane in enumerate(lanes):
        for forward in lane.forwards:
            _draw_forward(axis, y, forward)
        axis.plot(lane.ttft_s * 1e3, y, marker="*", color=TOKEN, markersize=11, zorder=4)
    axis.set_ylim(len(lanes) - 0.5, -0.6)
    names = [f"{lane.name}\n{lane.num_cached_tokens:,} cached" for lane in lanes]
    axis.set_yticks(range(len(lanes)), names, fontsize=9)
    axis.spines[["top", "right", "left"]].set_visible(False)


def _draw_forward(axis, y: int, forward: Forward) -> None:
    start, width = forward.start_s * 1e3, (forward.end_s - forward.start_s) * 1e3
    color = DECODE if forward.is_decode else PREFILL
    axis.barh(y, width, left=start, height=0.5, color=color, edgecolor="white", linewidth=0.8)
    if forward.is_decode:
        return
    if width > 0.1 * axis.get_xlim()[1]:
        label = f"{forward.num_tokens:,} tokens"
        axis.text(start + width / 2, y, label, ha="center", va="center", color="white", fontsize=8)
    for position in forward.exports:
        # where in the forward's tokens the state lies; its time is not known
        x = start + width * (position - forward.first_token) / forward.num_tokens
        axis.plot(x, y - 0.33, marker="v", color=CACHED, markersize=7)
        axis.text(x, y - 0.42, f"{position}", ha="center", va="bottom", fontsize=7)
