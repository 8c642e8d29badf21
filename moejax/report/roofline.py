"""Table and plots of `result["roofline"]`: operations against the device's roof, measured against bound.

Any result with a cost breakdown (`bench.common.roofline.cost_breakdown`) will do; a profile's has measured
times too.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console
from rich.table import Table

from moejax.core.errors import ConfigError
from moejax.report.figure import new_figure
from moejax.report.style import COLORS, run_title
from moejax.report.tables import Column, column_table, number, print_lines
from moejax.results.machine import roof_line

_REST = {"launch_overhead": "between instructions", "host_gap": "host", "unattributed": "not attributed"}
_PHASE_COLORS = {"decode": COLORS[0], "prefill": COLORS[1], "mixed": COLORS[2]}
_REST_COLOR = "#bbbbbb"
# Operations whose marks a reader can tell apart; the rest share the last.
_MARKS = "os^vDPX*<>phd"
_LEAST_SHARE = 0.001


def print_profile(result: Mapping[str, Any], console: Console) -> None:
    """A table per phase, the operations ranked by what they take beyond their bound."""
    print_lines(console, [f"profile: {run_title(result)}"])
    for phase in result["roofline"]:
        console.print(profile_table(phase, result["hardware"]["kind"]))
        print_lines(console, _remarks(phase))
        console.print()
    slowdown = result["metrics"]["profiler_slowdown"]
    if slowdown > 1.05:
        slowed = f"the profiler slows a decode step {slowdown:.2f} times"
        print_lines(console, [f"{slowed}, small instructions more than large ones"], "yellow")


def profile_table(phase: Mapping[str, Any], kind: str) -> Table:
    """One phase: measured, bound and excess of each operation, and the rest of the step."""

    spent = {label: phase[f"{key}_ms"] for key, label in _REST.items()}
    rest = [
        {"operation": label, "measured_ms": ms, "share": ms / phase["measured_ms"], "excess_ms": ms}
        for label, ms in spent.items()
    ]
    what = "decode step" if phase["phase"] == "decode" else "prompts"
    columns = (
        Column("operation", "operation", left=True),
        Column("measured\nms", "measured_ms"),
        Column("share\n%", "share", 100, "{:.1f}".format),
        Column("bound\nms", "bound_ms"),
        Column("limit", lambda row: row["limit"] if row.get("bound_ms") else None),
        Column("excess\nms", "excess_ms"),
        Column("\nGFLOP/s", lambda row: _rate(row, "flops")),
        Column("\nGB/s", lambda row: _rate(row, "weight_bytes", "cache_bytes")),
    )
    return column_table(
        f"{what}: {number(phase['plain_ms'])} ms, {number(phase['measured_ms'])} under the profiler;"
        f" bound {number(phase['bound_ms'])} ms ({phase['limit']}, {kind})\n"
        + ", ".join(f"{name.upper()} {_percent(phase, name)}" for name in ("mfu", "mbu")),
        columns,
        [*ranked(phase), *rest],
        "measured: under the profiler; bound: least time on the device, by FLOPs and by bytes\n"
        "of weights and cache; excess: measured - bound; rates: those over measured",
        section=lambda row: row in rest,
        style=lambda row: "dim" if row in rest else None,
        collapse_padding=False,
    )


def ranked(phase: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A profiled phase's operations, the greatest excess first."""
    return sorted(phase["operations"], key=lambda row: -(row["excess_ms"] or row["measured_ms"] or 0.0))


def _remarks(phase: Mapping[str, Any]) -> Iterable[str]:
    what = "steps" if phase["phase"] == "decode" else "batches of prompts"
    steps = phase["steps_per_unit"]
    each = f", {steps:g} steps each" if steps > 1 else ""
    counts = f"{phase['units']} of {phase['measured_units']}"
    yield f"mean of {counts} profiled {what}, the middle half by time{each}"
    if any((row["excess_ms"] or 0.0) < 0 for row in phase["operations"]):
        yield (
            "excess below 0: weights that stay in the processor's caches are read faster than memory, and"
            " peaks that were measured on a busy machine are too low"
        )
    if phase["unattributed_ms"] > 0.05 * phase["measured_ms"]:
        yield (
            "not attributed: instructions without a scope; a program that the compilation cache kept from an"
            " older version has none (engine.compile_cache=false compiles it anew)"
        )
    if phase["inferred_ms"] > 0.01 * phase["measured_ms"]:
        share = 100 * phase["inferred_ms"] / phase["measured_ms"]
        yield f"{share:.1f} % is of instructions without a scope, counted with their neighbours"
    if phase["devices"]:
        each = ", ".join(f"{kind} {number(other['bound_ms'])}" for kind, other in phase["devices"].items())
        yield f"bound of the same work on other devices, ms ({phase['dtype']}): {each}"


def _percent(phase: Mapping[str, Any], name: str) -> str:
    part = phase[name]
    return phase.get("roofline_doubt") or "–" if part is None else f"{100 * part:.1f} %"


def _rate(row: Mapping[str, Any], *keys: str) -> float | None:
    """Billions a second of what an operation's row counts under `keys`."""
    amount = sum(row.get(key, 0.0) for key in keys)
    return amount / row["measured_ms"] / 1e6 if row["measured_ms"] and amount else None


def roofline_figure(result: Mapping[str, Any]) -> Figure:
    """Arithmetic intensity against FLOP/s, both logarithmic: the device's roof, and a mark for each operation
    and phase. A filled one is measured; a hollow one, at the roof, is the bound of what was not. A star is
    the whole phase. Phases that exceeded the roof, or found it unstable, are left out and said to be.

    Raises:
        ConfigError: the result has no cost breakdown, or its device no known peaks.
    """
    phases, hardware = _breakdowns(result), result.get("hardware") or {}
    dtype = phases[0]["dtype"]
    peak, bandwidth = (hardware.get("flops") or {}).get(dtype), hardware.get("bandwidth")
    if not peak or not bandwidth:
        raise ConfigError(f"a roofline needs the device's bandwidth and its peak for {dtype}; none is known")
    figure, (axis,) = new_figure("Roofline", result, 8.6, 5.6)
    sound = [phase for phase in phases if not phase.get("roofline_doubt")]
    left = [f"{p['phase']} (the roof was {p['roofline_doubt']})" for p in phases if p not in sound]
    points = [point for phase in sound for point in _points(phase, peak, bandwidth)]
    if sound and not points:
        raise ConfigError("the result's cost breakdown has no operation with both FLOPs and bytes")
    names = list(dict.fromkeys(name for _, name, *_ in points))
    marks = {name: "*" if name == "all" else _MARKS[min(i, len(_MARKS) - 1)] for i, name in enumerate(
        sorted(names, key=lambda name: name == "all"))}  # fmt: skip
    xs = [point[2] for point in points]
    low, high = min([*xs, peak / bandwidth]) / 3, max([*xs, peak / bandwidth]) * 3
    line = np.geomspace(low, high, 200)
    axis.plot(line, np.minimum(peak, bandwidth * line), color="#444444", linewidth=1.5)
    for phase, name, x, y, filled in points:
        color = _PHASE_COLORS.get(phase, COLORS[3])
        roof = min(peak, bandwidth * x)
        axis.plot([x, x], [y, roof], color=color, linewidth=0.6, alpha=0.5)
        axis.plot(x, y, marks[name], color=color, markersize=13 if name == "all" else 8,
                  markerfacecolor=color if filled else "none", alpha=0.85)  # fmt: skip
    axis.set(xscale="log", yscale="log")
    axis.grid(axis="both", color="#dddddd", linewidth=0.7)
    axis.set(xlim=(low, high), xlabel="FLOPs per byte of weights and cache", ylabel="FLOP/s")
    title = f"{roof_line(result)}; {peak / 1e9:,.0f} GFLOP/s {dtype}"
    title += f"\nleft out: {', '.join(left)}" if left else ""
    axis.set_title(title, fontsize=9, loc="left")
    _legend(axis, list(dict.fromkeys(point[0] for point in points)), marks, points)
    return figure


def _points(
    phase: Mapping[str, Any], peak: float, bandwidth: float
) -> list[tuple[str, str, float, float, bool]]:
    """(phase, operation, FLOPs a byte, FLOP/s, measured) of what has both FLOPs and bytes."""
    points = []
    whole = {**phase, "operation": "all", "measured_ms": 1e3 * phase["seconds"] if phase["seconds"] else None}
    written = sum(row["cache_bytes"] for row in phase["operations"] if row["operation"] == "kv_write")
    for row in [*phase["operations"], whole]:
        moved = row["weight_bytes"] + row["cache_bytes"]
        if row["operation"] == "attention":
            moved += written  # what a prompt attends to is what it writes
        if row["flops"] and moved:
            x, ms = row["flops"] / moved, row.get("measured_ms")
            y = row["flops"] / ms * 1e3 if ms else min(peak, bandwidth * x)
            points.append((phase["phase"], row["operation"], x, y, bool(ms)))
    return points


def _legend(axis: Axes, phases: Sequence[str], marks: Mapping[str, str], points: Sequence[Any]) -> None:
    handles = [
        Line2D([], [], marker="s", linestyle="", color=_PHASE_COLORS.get(p, COLORS[3]), label=p)
        for p in phases
    ]
    handles += [
        Line2D([], [], marker=mark, linestyle="", color="#555555", markerfacecolor="#bbbbbb",
               label="whole phase" if name == "all" else name)
        for name, mark in marks.items()
    ]  # fmt: skip
    if not all(point[4] for point in points):
        label = "bound, not measured"
        handles.append(
            Line2D([], [], marker="o", linestyle="", color="#555555", markerfacecolor="none", label=label)
        )
    axis.legend(handles=handles, fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def residual_figure(result: Mapping[str, Any]) -> Figure:
    """A bar for each operation, phases side by side: measured time, its bound (where it can be believed) in a
    darker shade, what is no operation in grey; ranked by excess.

    Raises:
        ConfigError: the result has no measured times.
    """
    phases = [phase for phase in _breakdowns(result) if phase.get("measured_ms")]
    if not phases:
        raise ConfigError("the result has no time of single operations; python -m experiments.profile has")
    most = max(len(_bars(phase)) for phase in phases)
    size = 5.4 * len(phases) + 1, 0.3 * most + 1.8
    figure, axes = new_figure("Measured against bound", result, *size, columns=len(phases))
    for axis, phase in zip(axes, phases, strict=True):
        bars = _bars(phase)
        places = range(len(bars))
        color = _PHASE_COLORS.get(phase["phase"], COLORS[3])
        for place, (_, spent, least, known) in zip(places, bars, strict=True):
            axis.barh(place, spent, color=color if known else _REST_COLOR, alpha=0.45 if known else 1.0)
            axis.barh(place, 0.0 if phase.get("roofline_doubt") else min(least, spent), color=color)
            share = f" {100 * spent / phase['measured_ms']:.0f} %"
            axis.annotate(share, (spent, place), va="center", fontsize=8, color="#333333")
        axis.set_yticks(places, [name for name, *_ in bars], fontsize=9)
        axis.invert_yaxis()
        axis.grid(axis="y", visible=False)
        axis.grid(axis="x", color="#dddddd", linewidth=0.7)
        axis.margins(x=0.12)
        axis.set_xlabel("ms under the profiler; dark: least time that the device allows")
        what = "a decode step" if phase["phase"] == "decode" else "the prompts of a batch"
        axis.set_title(
            f"{what}: {number(phase['measured_ms'])} ms ({number(phase['plain_ms'])} without the profiler)"
            + (f"\nno bounds: the roof was {phase['roofline_doubt']}" if phase.get("roofline_doubt") else ""),
            fontsize=10,
        )
    return figure


def _bars(phase: Mapping[str, Any]) -> list[tuple[str, float, float, bool]]:
    """(name, ms, bound ms, whether it is an operation) of what takes a thousandth of the phase or more."""
    bars = [(row["operation"], row["measured_ms"], row["bound_ms"] or 0.0, True) for row in ranked(phase)]
    bars += [(label, phase[f"{key}_ms"], 0.0, False) for key, label in _REST.items()]
    least = _LEAST_SHARE * phase["measured_ms"]
    return sorted((bar for bar in bars if bar[1] >= least), key=lambda bar: bar[2] - bar[1])


def _breakdowns(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    phases = [phase for phase in result.get("roofline") or [] if phase.get("operations")]
    if not phases:
        raise ConfigError("the result has no roofline; it is older, or of an experiment without one")
    return phases
