"""Stages that build on each other, measured, simulated or published: a table and a waterfall. No JAX here.

A stage is a row with `stage` and `latency_ms`, and as far as they are known `overrides`, `memory_gb`, metrics
of the glossary, and `gain` and `cumulative_gain` with the ends of their intervals.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from moejax.report.ab import ab_lines
from moejax.report.figure import new_figure
from moejax.report.goals import stands_on
from moejax.report.style import COLORS
from moejax.report.tables import Column, column_table, metric_columns, number, print_lines
from moejax.results.metric_names import find_metric

_FASTER, _SLOWER, _EITHER = "#1a7f37", "#c62828", "#6e6e6e"


def with_gains(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns stages with the gain of each over the stage before, and over the first: what rows say
    themselves, else the ratio of their `latency_ms`; none where a stage did not run."""
    told: list[dict[str, Any]] = []
    first = last = None
    for row in rows:
        time = row["latency_ms"]
        if time is None:  # it did not run
            told.append({"gain": None, "cumulative_gain": None, **row})
            continue
        first, last = first or time, last or time
        told.append({"gain": last / time, "cumulative_gain": first / time, **row})
        last = time
    return told


def _gain(row: Mapping[str, Any]) -> str | None:
    if row["gain"] is None:
        return None
    ends = [row.get(f"gain_{end}") for end in ("low", "high")]
    return f"{row['gain']:.2f}x" + (f" [{ends[0]:.2f}, {ends[1]:.2f}]" if all(ends) else "")


def stages_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """A line for each stage: its metrics, and its gain over the stage before and over the first."""
    hidden = ("stage", "error", "relative_spread")
    shown = (name for row in rows for name in row if find_metric(name) and name not in hidden)
    names = [name for name in shown if "gain" not in name]
    columns = [
        Column("stage", "stage", left=True),
        *metric_columns(*dict.fromkeys(names), cell=number),
        Column("gain", _gain),
        Column("in all", "cumulative_gain", cell="{:.2f}x".format),
    ]
    note = "times in ms; gain: latency of the stage before over the stage's, in all: of the first"
    return column_table(title, columns, with_gains(rows), f"{note};\nabove 1 is faster")


def print_ablation(result: Mapping[str, Any], console: Console) -> None:
    """Prints the stages, what each adds, those that are published, and of turns the verdicts in words."""
    console.print(stages_table(result["stages"], f"ablation, {stands_on(result)}"))
    print_lines(
        console, [f"{row['stage']}: {', '.join(row.get('overrides') or ())}" for row in result["stages"]]
    )
    if result.get("reference"):
        console.print(stages_table(result["reference"], "published"))
    if result.get("verdicts"):
        print_lines(console, ab_lines(result))


def waterfall_plot(result: Mapping[str, Any]) -> Figure:
    """The latency from stage to stage and each one's gain, grey where its interval holds 1; beside it what is
    published."""
    ladders = [(stands_on(result), result["stages"]), ("published", result.get("reference") or ())]
    ladders = [(name, with_gains(rows)) for name, rows in ladders if rows]
    width = 2.6 + 1.15 * sum(len(rows) for _, rows in ladders)
    figure, axes = new_figure("Stage by stage", result, width, 4.6, 1, len(ladders))
    axes[0].set_ylabel("latency, ms")
    for axis, (name, rows) in zip(axes, ladders, strict=True):
        last = {**rows[-1], "stage": "all", "gain": rows[-1]["cumulative_gain"]}
        before, ticks = 0.0, []
        for place, row in enumerate([*rows, last]):
            memory = row.get("memory_gb")
            ticks.append(f"{row['stage']}\n{memory if isinstance(memory, str) else number(memory) + ' GB'}")
            if (time := row["latency_ms"]) is None:
                axis.annotate("none", (place, 0), (0, 3), textcoords="offset points", ha="center", fontsize=8)
                continue
            ends = (row.get("gain_low") or row["gain"], row.get("gain_high") or row["gain"])
            color = _FASTER if ends[0] > 1 else _SLOWER if ends[1] < 1 else _EITHER
            whole = row is last or not before
            low, high = (0.0, time) if whole else sorted((before, time))
            axis.bar(place, high - low, 0.7, low, color=COLORS[0] if whole else color)
            text = f"{time:,.4g} ms\n{row['gain']:.2f}x" if place else f"{time:,.4g} ms"
            axis.annotate(text, (place, high), (0, 3), textcoords="offset points", ha="center", fontsize=8)
            before = time
        axis.set_xticks(range(len(ticks)), ticks, fontsize=8, rotation=30, ha="right")
        axis.set_ylim(0, 1.15 * max(row["latency_ms"] or 0.0 for row in rows))
        axis.set_title(name, fontsize=10)
    return figure
