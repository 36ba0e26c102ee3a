"""profiles/results/modelcheck.md, written from the results of a full search."""

import platform
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path

from torch_kda.tests.modelcheck.run import Result, Task, fingerprint
from torch_kda.tests.modelcheck.scope import DISTURBANCES, Act, Scope, Template
from torch_kda.tests.modelcheck.scopes import SCOPES

HEAD = """# Model checking of scheduler and cache

The real scheduler and cache with a ghost worker, whose states and KV are hashes of the tokens.
Every order of actions within a scope is gone through, depth first over distinct canonical states:
names of slots, blocks, steps and requests are replaced by the order of their first use, times by
their rank. A transition is one action on one distinct canonical state. After each, what
`tests/scheduler/INVARIANTS.md` lists is asserted as far as a transition can show it; what only an
action as a whole shows (a hit, an export, a victim) is held against rules that
`tests/modelcheck/*_rules.py` say a second time.
"""
INVARIANTS = """
Asserted after every transition: I01, I03 to I07, I14 to I17, I25 and I27 by the books
(`check_integrity`) and by contents (`check_visible`, running slots and their KV; steps run as
late as they can, what is freed or fails is poison); I02, I08 and I13 follow from these contents
and from rules on what an action may make visible; I09, I10, I12 and I18 to I24 by rules on
actions; I11 by scopes with salts and forks. Of the new states one in 32 is run to the end of all
requests, and then nothing may be held; one in 512 is reached again from the start, with the same
result (I26).
"""
DEFAULTS = {field.name: field.default for field in fields(Scope)}
SHORT = {"exports_per_step": "exports a step", "num_slots": "slots", "num_blocks": "blocks"}


def write_report(path: Path, results: list[tuple[Task, Result]], seconds: float) -> None:
    by_kind: dict[str, list[tuple[Task, Result]]] = {"scope": [], "walks": [], "faults": []}
    for task, result in results:
        by_kind[task.kind].append((task, result))
    parts = [HEAD, _summary(by_kind, seconds), INVARIANTS]
    parts += [text for text in (_scopes(by_kind["scope"]), _faults(by_kind["faults"])) if text]
    failures = [result["violation"] for _, result in results if "violation" in result]
    if failures:
        parts.insert(1, "\n**FAILED**\n\n" + "\n".join(f"- {failure}" for failure in failures))
    path.write_text("\n".join(parts).rstrip() + "\n")


def _summary(by_kind: dict[str, list[tuple[Task, Result]]], seconds: float) -> str:
    scopes = [result for _, result in by_kind["scope"] if "transitions" in result]
    walks = [result for _, result in by_kind["walks"] if "steps" in result]
    faults = [fault for _, result in by_kind["faults"] for fault in result["faults"]]
    transitions = sum(result["transitions"] for result in scopes)
    states = sum(result["states"] for result in scopes)
    cpu = sum(result["cpu_seconds"] for result in [*scopes, *walks])
    is_complete = all(result["is_complete"] for result in scopes)
    rate = transitions / max(sum(result["cpu_seconds"] for result in scopes), 1e-9)
    lines = [
        f"- `make modelcheck`, {datetime.now(UTC):%Y-%m-%d}, sources {fingerprint()} (sha256 of "
        f"cache, scheduler and their checkers), Python {platform.python_version()}",
        f"- **{transitions:,} transitions** on {states:,} distinct states in {len(scopes)} scopes, "
        f"{'each to its end' if is_complete else 'NOT all to their end'}; "
        f"{sum(result['drained'] for result in scopes):,} states run to the end, "
        f"{sum(result['replayed'] for result in scopes):,} reached twice",
        f"- **{sum(result['steps'] for result in walks):,} random steps** in "
        f"{sum(result['walks'] for result in walks):,} walks at larger sizes, with all checks",
        f"- **{sum(fault['by'] is not None for fault in faults)} of {len(faults)} seeded faults** "
        f"caught",
        f"- {rate:,.0f} transitions a second of one core with all checks; {cpu / 60:,.0f} minutes "
        f"of processor time, {seconds / 60:,.0f} minutes in this run",
        "- chance that two of all states fell together in 64 bits of hash: "
        f"{states * states / 2**65:.0e}",
    ]
    return "\n".join(lines)


def _scopes(results: list[tuple[Task, Result]]) -> str:
    by_name = {task.name: result for task, result in results if "transitions" in result}
    lines = []
    for scope in SCOPES:
        if scope.name in by_name:
            result = by_name[scope.name]
            lines.append(
                f"| {scope.name} | {_requests(scope)} | {_sizes(scope)} | {_disturbances(scope)} "
                f"| {result['states']:,} | {result['transitions']:,} | {result['longest']} "
                f"| {result['cpu_seconds']:,.0f} |"
            )
    totals: dict[str, int] = {}
    for result in by_name.values():
        for name, count in result["by_action"].items():
            totals[name] = totals.get(name, 0) + count
    by_action = ", ".join(f"{name.lower()} {count:,}" for name, count in sorted(totals.items()))
    sizes = (
        f"unit {DEFAULTS['unit']}, block = unit, alignment {DEFAULTS['alignment']}, "
        f"{DEFAULTS['num_slots']} slots, {DEFAULTS['num_blocks']} blocks, budget "
        f"{DEFAULTS['budget']}, {DEFAULTS['max_num_seqs']} seats, 2 steps in flight"
    )
    return (
        "\n## Scopes\n\n"
        f"Where a line doesn't say otherwise: {sizes}. A request `0 x 4 + 1 x 2 -> 3` has a prompt "
        "of four zeros, a one and a zero, and generates three zeros. `up to n of` is how many "
        "disturbances one run has.\n\n"
        "| scope | requests | sizes | disturbances | states | transitions | longest | seconds |\n"
        "|---|---|---|---|---:|---:|---:|---:|\n" + "\n".join(lines) + "\n\n"
        f"By action: {by_action}."
    )


def _requests(scope: Scope) -> str:
    return "; ".join(_request(template) for template in scope.requests)


def _request(template: Template) -> str:
    shared = next((i for i, token in enumerate(template.prompt) if token), len(template.prompt))
    own = len(template.prompt) - shared
    text = f"0 x {shared}" if shared else ""
    text += (" + " if shared and own else "") + (f"1 x {own}" if own else "")
    text += f" -> {template.max_tokens}"
    if template.priority:
        text += f", priority {template.priority}"
    if template.named:
        text += f", named {', '.join(map(str, template.named))}"
    return text + (f", salt {template.salt}" if template.salt else "")


def _sizes(scope: Scope) -> str:
    skipped = {"name", "requests", "disturbances", "max_disturbances"}
    parts = []
    for name, default in DEFAULTS.items():
        value = getattr(scope, name)
        if name not in skipped and value != default:
            label = SHORT.get(name, name.replace("_", " "))
            parts.append(label if value is True else f"{label} {value}")
    return ", ".join(parts) or "-"


def _disturbances(scope: Scope) -> str:
    acts: tuple[Act, ...] = scope.disturbances
    names = "all" if acts == DISTURBANCES else ", ".join(act.name.lower() for act in acts)
    most = scope.max_disturbances
    return f"any number of {names}" if most is None else f"up to {most} of {names}"


def _faults(results: list[tuple[Task, Result]]) -> str:
    lines = []
    for _, result in results:
        for fault in result["faults"]:
            caught = fault["by"] or "**MISSED**"
            lines.append(
                f"| {fault['name']} | `{fault['where']}` | {fault['scope']} | {caught} "
                f"| {fault.get('transitions', 0):,} | {fault.get('actions', 0)} |"
            )
    if not lines:
        return ""
    return (
        "\n## Seeded faults\n\n"
        "Each is a small change of one function. Searched in the named scope with one disturbance, "
        "then with more. `rules` are those of `tests/modelcheck`, `ghost` compares "
        "contents, `integrity` compares books.\n\n"
        "| fault | where | scope | caught by | transitions until then | actions |\n"
        "|---|---|---|---|---:|---:|\n" + "\n".join(lines)
    )
