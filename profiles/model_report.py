"""The page of the model bench, written from its JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..kda.config import MAX_LAYERS
from .options import (
    MaybeKey,
    NotNegative,
    Number,
    Positive,
    Share,
    check_distinct,
    count,
    one_of,
    read_results,
)

_TIME = Positive | None
_MODES = ("single_pass", "two_pass")
DETAIL = {
    **dict.fromkeys(("ttft_ms_mean", "ttft_ms_p50", "ttft_ms_p90"), Positive),
    "queue_ms_mean": NotNegative,
    **{"requests": count(1), "steps": count(1), "prefill_steps": count(0)},
    **dict.fromkeys(("prefill_step_ms_p50", "decode_step_ms_p50"), _TIME),
    "model_ttft_ms_mean": Positive,
}
SHAPE = {
    "meta": {
        **{key: str | None for key in ("gpu", "torch", "commit", "command")},
        **{"model": str, "layers": count(1, MAX_LAYERS), "decode_context": count(1)},
        "ttft_detail": {str: dict.fromkeys(_MODES, DETAIL)},
        **{MaybeKey(key): _TIME for key in ("weights_gib", "pools_gib")},
        **{MaybeKey(key): _TIME for key in ("copy_tb_s", "matmul_tflop_s")},
        **{MaybeKey(key): str | None for key in ("driver", "cpu", "date")},
        **{MaybeKey(key): str | None for key in ("dtype", "graphs", "workload")},
        str: str | Number | dict | list | None,  # lists and objects are not shown
        MaybeKey("engine"): [str],
        MaybeKey("eager_prefill_ms"): {str: _TIME},
        MaybeKey("eager_decode_us"): {str: _TIME},
        MaybeKey("turns"): [
            {
                **{"context": count(1), "new": count(1), "cached": count(0)},
                **dict.fromkeys(("context_ms", "ms", "forwards"), Positive),
            }
        ],
        MaybeKey("host_detail"): {
            str: {
                "cores": count(0),
                **dict.fromkeys(("least_us", "median_us", "most_us"), Positive),
            }
        },
        MaybeKey("greedy"): {
            "mismatches": [
                {
                    **{"prompt": count(0), "position": count(0), "is_near_tie": bool},
                    **dict.fromkeys(("gap", "noise"), NotNegative),
                }
            ]
        },
    },
    "ttft": [
        {
            **{"workload": one_of(("closed", "burst")), "concurrency": count(1)},
            **{f"{mode}_ms": Positive for mode in _MODES},
            **{f"{way}_forwards": Positive for way in ("single", "two")},
            "eager_fla_ms": _TIME,
        }
    ],
    "prefill": [{"tokens": count(1), "ms": Positive, "matmul_share": Share | None}],
    "decode": [
        {
            **{"batch": count(1), "step_us": Positive},
            **{key: _TIME for key in ("floor_us", "host_us", "kda_us", "kda_floor_us")},
            "eager_fla_step_us": _TIME,
        }
    ],
    "compile": {
        **dict.fromkeys(("graph_breaks", "recompiles"), count(0) | None),
        **dict.fromkeys(("cold_s", "warm_s"), NotNegative | None),
    },
    "idle_share": Share | None,
    "greedy_equal_share": Share | None,
}
CASES = {"ttft": ("workload", "concurrency"), "prefill": ("tokens",), "decode": ("batch",)}


def read(path: Path) -> dict[str, Any]:
    """The model.json of a run. Raises ValueError for another file."""
    what = "a model.json of torch-kda bench model"
    return read_results(path, SHAPE, option="--render", what=what, check=_missing_detail)


def _missing_detail(data: Mapping[str, Any]) -> str | None:
    """Of a row that is on the page."""
    names = [_name(row) for row in data["ttft"]]
    details = data["meta"]["ttft_detail"]
    return next(
        (f"it has no meta.ttft_detail.{name}" for name in names if name not in details), None
    )


def _name(row: Mapping[str, Any]) -> str:
    """Of a row's detail."""
    return f"{row['workload']} {row['concurrency']}"


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result of several runs of one model and commit that measured different stages.

    Raises:
        ValueError: they are not of one model, machine and commit, or measured the same.
    """
    first, *others = parts
    found: dict[str, Any] = {**first, "meta": dict(first["meta"])}
    meta = found["meta"]
    for part in others:
        for key in ("gpu", "torch", "commit", "model", "layers"):
            if part["meta"][key] != meta[key]:
                raise ValueError(f"--render: the results differ in {key}")
        for key in CASES:
            found[key] = [*found[key], *part[key]]
        found["compile"] = {
            key: _sum(value, part["compile"][key])
            if key in ("graph_breaks", "recompiles")
            else _first(value, part["compile"][key])
            for key, value in found["compile"].items()
        }
        for key in ("idle_share", "greedy_equal_share"):
            found[key] = _first(found[key], part[key])
        commands = f"{meta['command']}; {part['meta']['command']}"
        details = {**meta["ttft_detail"], **part["meta"]["ttft_detail"]}
        meta |= {**part["meta"], **meta, "command": commands, "ttft_detail": details}
    for key, case in CASES.items():
        check_distinct(found[key], case, "--render")
    return found


def _first(value: Any, other: Any) -> Any:
    return other if value is None else value


def _sum(value: int | None, other: int | None) -> int | None:
    return None if value is None and other is None else (value or 0) + (other or 0)


def markdown(data: Mapping[str, Any]) -> str:
    """The whole page."""
    meta = data["meta"]
    shown = {key: value for key, value in meta.items() if not isinstance(value, dict | list)}
    parts = [
        "# The whole model",
        "\n".join(f"- {key}: {value}" for key, value in shown.items() if value is not None),
        "\n".join(f"- {line}" for line in meta.get("engine", [])),
        *_first_tokens(data),
        *_prefill(data),
        *_turns(meta.get("turns", [])),
        *_decode(data),
        *_rest(data),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _first_tokens(data: Mapping[str, Any]) -> list[str]:
    rows = data["ttft"]
    if not rows:
        return []
    details = data["meta"]["ttft_detail"]
    table = [
        [
            row["workload"],
            row["concurrency"],
            _ms(row["single_pass_ms"]),
            _ms(row["two_pass_ms"]),
            f"{1 - row['single_pass_ms'] / row['two_pass_ms']:.1%}",
            row["single_forwards"],
            row["two_forwards"],
            _ms(row["eager_fla_ms"]),
            _model(details[_name(row)]["two_pass"]),
        ]
        for row in rows
    ]
    heads = ["workload", "streams", "single pass ms", "two passes ms", "less", "forwards"]
    heads += ["forwards, two", "transformers + FLA ms", "two passes by step times ms"]
    text = (
        "## Time to the first token\n\nMeans over all measured requests. The last column is the "
        "same workload through the same scheduler on a simulated device that takes the median "
        "time of each shape of step in that run."
    )
    return [text, _table(heads, table), _details(details)]


def _model(two: Mapping[str, Any]) -> str:
    error = two["model_ttft_ms_mean"] / two["ttft_ms_mean"] - 1
    return f"{two['model_ttft_ms_mean']:,.1f} ({error:+.1%})"


def _details(details: Mapping[str, Any]) -> str:
    rows = [
        [name, mode.replace("_", " "), *(_number(modes[mode][key]) for key in DETAIL)]
        for name, modes in details.items()
        for mode in _MODES
    ]
    return _table(["workload", "mode", *DETAIL], rows) if rows else ""


def _prefill(data: Mapping[str, Any]) -> list[str]:
    rows = data["prefill"]
    if not rows:
        return []
    table = [
        [
            f"{row['tokens']:,}",
            _ms(row["ms"]),
            f"{1e3 * row['tokens'] / row['ms']:,.0f}",
            "" if row["matmul_share"] is None else f"{row['matmul_share']:.1%}",
        ]
        for row in rows
    ]
    heads = ["tokens", "ms", "tokens/s", "of the bf16 matmul rate"]
    eager = data["meta"].get("eager_prefill_ms", {})
    note = "".join(f"Eager, {tokens} tokens: {_ms(ms)} ms. " for tokens, ms in eager.items())
    return ["## Prefill of one prompt", _table(heads, table), note.strip()]


def _turns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    if not rows:
        return []
    table = [
        [
            *(f"{row[key]:,}" for key in ("context", "cached", "new")),
            _ms(row["ms"]),
            row["forwards"],
            _ms(row["context_ms"]),
        ]
        for row in rows
    ]
    heads = ["context", "of it cached", "new tokens", "first token ms", "forwards"]
    heads.append("context alone, nothing cached, ms")
    text = "## A turn\n\nA prompt that goes on from one that was answered."
    return [text, _table(heads, table)]


def _decode(data: Mapping[str, Any]) -> list[str]:
    rows = data["decode"]
    if not rows:
        return []
    eager, hosts = (data["meta"].get(name, {}) for name in ("eager_decode_us", "host_detail"))
    table = [
        [
            row["batch"],
            _number(row["step_us"]),
            _number(row["floor_us"]),
            _ratio(row["step_us"], row["floor_us"]),
            _number(row["host_us"]),
            _cores(hosts.get(str(row["batch"]))),
            _number(row["kda_us"]),
            _ratio(row["kda_us"], row["kda_floor_us"]),
            _number(eager.get(str(row["batch"]))),
            _number(row["eager_fla_step_us"]),
        ]
        for row in rows
    ]
    heads = ["batch", "step us", "floor us", "step/floor", "host us", "all cores"]
    heads += ["KDA op us", "KDA/floor", "eager us", "transformers + FLA us"]
    text = (
        f"## Decode after {data['meta'].get('decode_context')} tokens\n\nFloor: weights of the "
        "experts that the step wakes and all others once, states and windows read and written, "
        "the cache read, at the speed of a copy. Host: all that it does for a step but wait for "
        "the device; the median of the steps on one core, of several the one where it is least. "
        "Other people's work on a core may empty its caches while the device works, and can only "
        "add to it. All cores: the least and the greatest of their medians, and the median of "
        "these."
    )
    return [text, _table(heads, table)]


def _rest(data: Mapping[str, Any]) -> list[str]:
    greedy = data["meta"].get("greedy", {})
    units = {"graph_breaks": "", "recompiles": "", "cold_s": " s", "warm_s": " s"}
    breaks, again, cold, warm = (
        "not measured" if (value := data["compile"][key]) is None else f"{value}{unit}"
        for key, unit in units.items()
    )
    lines = [
        f"- graph breaks: {breaks}; recompilations after the start: {again}",
        f"- cold start: {cold}; warm start: {warm}",
        f"- idle share of a prefill step: {_percent(data['idle_share'])}",
        f"- prompts with equal greedy tokens, as run and eagerly: "
        f"{_percent(data['greedy_equal_share'])}",
    ]
    lines += [
        f"  - prompt {one['prompt']} parts at token {one['position']}, where the first two differ "
        f"by {one['gap']} in log probability; noise {one['noise']}"
        + (": a near tie" if one["is_near_tie"] else ": NO near tie")
        for one in greedy.get("mismatches", [])
    ]
    return ["## The rest", "\n".join(lines)]


def _table(heads: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _cores(host: Mapping[str, float | None] | None) -> str:
    if host is None:
        return ""
    if host["cores"] == 0:
        return "can't be chosen"
    least, middle, most = (_number(host[f"{name}_us"]) for name in ("least", "median", "most"))
    return f"{least}..{most}, median {middle}"


def _ratio(value: float | None, floor: float | None) -> str:
    return "" if not value or not floor else f"{value / floor:.2f}"


def _percent(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.1%}"
