"""Goals and their verdicts as tables. No JAX here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from moejax.report.style import device_name, preset
from moejax.report.tables import Column, column_table, number
from moejax.results.goals import Goal
from moejax.results.result import RESULT_FILE, load_result

_COLORS = {"met": "green", "missed": "red", "not measurable here": "yellow"}
# What a command line may have beside a preset that measures the same.
_SAME = ("experiment=", "scenario=", "goals=", "tracker", "hydra", "overwrite=", "verbose=", "-")


def _verdict(row: Mapping[str, Any]) -> Text:
    text = row["verdict"] + (f" {row['factor']:.3g}x" if row["factor"] else "")
    return Text(text + (f": {row['reason']}" if row["reason"] else ""), _COLORS.get(row["verdict"], "dim"))


def _actual(row: Mapping[str, Any]) -> str | None:
    if row["actual"] is None:
        return None
    ends = [row.get(end) for end in ("low", "high")]
    return number(row["actual"]) + ("" if None in ends else f" [{number(ends[0])}, {number(ends[1])}]")


def goals_table(goals: Sequence[Mapping[str, Any]], title: str) -> Table:
    """A line for each goal with its verdict, `of` what it is and `on` what it stands where it says so."""
    columns = (
        Column("of", "of", fold=True, once=True),
        Column("metric", "name", fold=True),
        Column("goal", lambda row: f"{row['op']} {row['value']:,g}"),
        Column("actual", _actual),
        Column("verdict", _verdict, fold=True),
        Column("stands on", "on", fold=True),
        Column("source", lambda row: Text(row["source"]), fold=True),
    )
    return column_table(title, columns, goals)


def stands_on(result: Mapping[str, Any]) -> str:
    """Returns `measured on` or `simulated on` a device."""
    hardware = result.get("hardware") or {}
    simulated = hardware.get("simulated")
    return f"simulated on {hardware['kind']}" if simulated else f"measured on {device_name(result)}"


def _stands_on(result: Mapping[str, Any]) -> str:
    """Returns the same, and how the command line had changed the preset."""
    words = (result["provenance"].get("argv") or ())[1:]
    changes = [word for word in words if "=" in word and not word.startswith(_SAME)]
    return " ".join([stands_on(result), *(["with", *changes] if changes else [])])


def newest_goals(presets: Mapping[str, Sequence[Goal]], folders: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the goals of presets, and of runs below `folders` that have their own, as rows of
    `goals_table`: each on its newest run. Raises `ConfigError` for a result that cannot be read."""
    results = [load_result(file) for folder in folders for file in Path(folder).rglob(RESULT_FILE)]
    goals, newest = dict(presets), dict[str, Mapping[str, Any]]()
    for result in sorted(results, key=lambda result: str(result["provenance"].get("time_utc"))):
        name = preset(result["provenance"]) or ""
        if name not in presets or "goals=" in " ".join(result["provenance"].get("argv") or ()):
            name = str(result.folder)
            goals[name] = [Goal(**goal) for goal in result["config"].get("goals") or ()]
        newest[name] = result
    rows = []
    for name, goal in ((name, goal) for name, each in goals.items() for goal in each):
        nothing = {"experiment": name, "metrics": {}, "cases": []}
        row = {"of": name, **goal.verdict(newest.get(name, nothing))}
        has_none = {"verdict": "no run yet", "reason": None}
        rows.append(row | ({"on": _stands_on(newest[name])} if name in newest else has_none))
    return rows
