"""Table and plots of `result["roofline"]`: operations against the device's roof, measured against bound.

Any result with a cost breakdown (`bench.common.roofline.cost_breakdown`) will do; a profile's has measured
times too.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console
from rich.table import Table

from moejax.core.errors import ConfigError
from moejax.report.figure import new_figure, save_figures
from moejax.report.style import COLORS, run_title
from moejax.report.tables import number, plain_table

_REST = {"launch_overhead": "between instructions", "host_gap": "host", "unattributed": "not attributed"}
_PHASE_COLORS = {"decode": COLORS[0], "prefill": COLORS[1], "mixed": COLORS[2]}
_REST_COLOR = "#bbbbbb"
# Operations whose marks a reader can tell apart; the rest share the last.
_MARKS = "os^vDPX*<>phd"
_LEAST_SHARE = 0.001


def print_profile(result: Mapping[str, Any], console: Console) -> None:
    """A table per phase, the operations ranked by what they take beyond their bound."""
    console.print(f"profile: {run_title(result)}", highlight=False, soft_wrap=True)
    for phase in result["roofline"]:
        console.print(profile_table(phase, result["hardware"]["kind"]))
        for line in _remarks(phase):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        console.print()
    slowdown = result["metrics"]["profiler_slowdown"]
    if slowdown > 1.05:
        console.print(
            f"the profiler slows a decode step {slowdown:.2f} times, small instructions more than large ones",
            style="yellow",
        )


def profile_table(phase: Mapping[str, Any], kind: str) -> Table:
    """One phase: measured, bound and excess of each operation, and the rest of the step."""
    what = "decode step" if phase["phase"] == "decode" else "prompts"
    table = plain_table(
        f"{what}: {number(phase['plain_ms'])} ms, {number(phase['measured_ms'])} under the profiler;"
        f" bound {number(phase['bound_ms'])} ms ({phase['limit']}, {kind})\n"
        f"MFU {_percent(phase['mfu'])}, MBU {_percent(phase['mbu'])}",
        "measured: under the profiler; bound: least time on the device, by FLOPs and by bytes\n"
        "of weights and cache; excess: measured - bound; rates: those over measured",
        collapse_padding=False,
    )
    table.add_column("operation", no_wrap=True)
    for name in ("measured\nms", "share\n%", "bound\nms", "limit", "excess\nms", "\nGFLOP/s", "\nGB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in ranked(phase):
        table.add_row(
            row["operation"],
            number(row["measured_ms"]),
            f"{100 * row['share']:.1f}",
            number(row["bound_ms"]),
            (row["limit"] or "–") if row["bound_ms"] else "–",
            number(row["excess_ms"]),
            _rate(row["flops"], row["measured_ms"]),
            _rate(row["weight_bytes"] + row["cache_bytes"], row["measured_ms"]),
        )
    table.add_section()
    for key, label in _REST.items():
        spent = phase[f"{key}_ms"]
        share = f"{100 * spent / phase['measured_ms']:.1f}"
        table.add_row(label, number(spent), share, "–", "–", number(spent), style="dim")
    return table


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


def _percent(part: float | None) -> str:
    return "–" if part is None else f"{100 * part:.1f} %"


def _rate(amount: float, ms: float | None) -> str:
    return number(amount / ms / 1e6) if ms and amount else "–"


def roofline_figure(result: Mapping[str, Any], case: int | None = None) -> Figure:
    """Arithmetic intensity against FLOP/s, both logarithmic: the device's roof, and a mark for each operation
    and phase. A filled one is measured; a hollow one, at the roof, is the bound of what was not. A star is
    the whole phase.

    Args:
        case: row of `cases` whose phases are shown, where the result has several; None: all.

    Raises:
        ConfigError: the result, or that case, has no cost breakdown, or its device no known peaks.
    """
    phases, hardware = _breakdowns(result, case), result.get("hardware") or {}
    dtype = phases[0]["dtype"]
    peak, bandwidth = (hardware.get("flops") or {}).get(dtype), hardware.get("bandwidth")
    if not peak or not bandwidth:
        raise ConfigError(f"a roofline needs the device's bandwidth and its peak for {dtype}; none is known")
    figure, (axis,) = new_figure("Roofline", result, 8.6, 5.6)
    points = [point for phase in phases for point in _points(phase, peak, bandwidth)]
    if not points:
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
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.grid(axis="both", color="#dddddd", linewidth=0.7)
    axis.set_xlim(low, high)
    axis.set_xlabel("FLOPs per byte of weights and cache")
    axis.set_ylabel("FLOP/s")
    source = f", {hardware['source']}" if hardware.get("source") else ""
    label = f"{hardware.get('kind')}{source}: {bandwidth / 1e9:,.0f} GB/s, {peak / 1e9:,.0f} GFLOP/s {dtype}"
    axis.set_title(label, fontsize=9, loc="left")
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
    """A bar for each operation, phases side by side: measured time, its bound in a darker shade, what is no
    operation in grey; ranked by excess.

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
            axis.barh(place, min(least, spent), color=color)
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
            f"{what}: {number(phase['measured_ms'])} ms ({number(phase['plain_ms'])} without the profiler)",
            fontsize=10,
        )
    return figure


def _bars(phase: Mapping[str, Any]) -> list[tuple[str, float, float, bool]]:
    """(name, ms, bound ms, whether it is an operation) of what takes a thousandth of the phase or more."""
    bars = [(row["operation"], row["measured_ms"], row["bound_ms"] or 0.0, True) for row in ranked(phase)]
    bars += [(label, phase[f"{key}_ms"], 0.0, False) for key, label in _REST.items()]
    least = _LEAST_SHARE * phase["measured_ms"]
    return sorted((bar for bar in bars if bar[1] >= least), key=lambda bar: bar[2] - bar[1])


def save_profile_plots(result: Mapping[str, Any], out_dir: Path) -> list[Path]:
    """`roofline.png` and `residuals.png`."""
    figures = {"roofline": roofline_figure(result), "residuals": residual_figure(result)}
    return save_figures(figures, out_dir)


def _breakdowns(result: Mapping[str, Any], case: int | None = None) -> list[Mapping[str, Any]]:
    phases = [phase for phase in result.get("roofline") or [] if phase.get("operations")]
    cases = sorted({phase["case"] for phase in phases if "case" in phase})
    if case is not None and phases:
        phases = [phase for phase in phases if phase.get("case") == case]
        if not phases:
            raise ConfigError(f"the result has no roofline of case {case} (it has {cases})")
    if not phases:
        raise ConfigError("the result has no roofline; it is older, or of an experiment without one")
    return phases
