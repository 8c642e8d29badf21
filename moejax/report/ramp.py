"""The table and plots of a throughput ramp. No JAX here."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.console import Console
from rich.table import Table

from moejax.report.figure import log_scale, new_figure, save_figures, vertical_grid
from moejax.report.style import COLORS, run_title
from moejax.report.tables import Column, add_columns, plain_table, share, stderr_console, three_digits

Row = Mapping[str, Any]

_COLUMNS = (
    Column("req/s\noffered", "request_rate", cell=three_digits),
    Column("\nserved", "request_throughput", cell=three_digits),
    Column("\ngood", "request_goodput", cell=three_digits),
    Column("kept\nup, %", "followed", cell=share),
    Column("TTFT\np50", "median_ttft_ms", cell=three_digits),
    Column("\np99", "p99_ttft_ms", cell=three_digits),
    Column("TPOT\np50", "median_tpot_ms", cell=three_digits),
    Column("\np99", "p99_tpot_ms", cell=three_digits),
    Column("tok/s\nuser", "tokens_per_s_per_user", cell=three_digits),
    Column("\ndevice", "tokens_per_s_per_device", cell=three_digits),
)


def ramp_table(result: Mapping[str, Any]) -> Table:
    """A line per rate in rising order, mode by mode; the knee and saturated rates are marked."""
    table = plain_table(
        f"ramp: {run_title(result)}",
        "times in ms; kept up: requests ended over requests come, while they came;\n"
        "tok/s user: a request's output over its time from asking to the last token",
    )
    rows = result["cases"]
    columns = add_columns(table, _COLUMNS, rows)
    table.add_column("")
    modes = result["ramp"]
    for mode in modes:
        for row in _rising(rows, mode):
            cells = [column.text(row) for column in columns]
            mark = "knee" if row["case"] == mode["knee_case"] else "saturated" if row["saturated"] else ""
            name = f"{_name(mode)} " if len(modes) > 1 else ""
            table.add_row(*cells, f"{name}{mark}".strip(), style="bold" if mark == "knee" else None)
        table.add_section()
    return table


def print_ramp(result: Mapping[str, Any], console: Console | None = None) -> None:
    """The table, and a line per mode that says where its knee is."""
    console = console or stderr_console()
    console.print(ramp_table(result))
    for line in ramp_lines(result):
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def ramp_lines(result: Mapping[str, Any]) -> list[str]:
    """A sentence per mode."""
    lines = []
    for mode in result["ramp"]:
        if mode["knee_rate"] is None:
            text = "saturated at the lowest rate already: lower ramp.start"
        elif mode["saturated"]:
            text = f"follows up to {mode['knee_rate']:.3g} requests/s"
        else:
            text = (
                f"follows {mode['knee_rate']:.3g} requests/s, the highest offered: no saturation found, "
                "raise ramp.max_steps"
            )
        if mode["max_goodput"] is not None:
            rate = mode["max_goodput_rate"]
            text += f"; most good requests/s: {mode['max_goodput']:.3g} at {rate:.3g} offered"
        lines.append(f"{_name(mode)}: {text}")
    return lines


def ramp_figure(result: Mapping[str, Any]) -> Figure:
    """Served and good requests/s, times to the first token and per token, how far the engine kept up, over
    the offered rate. Dashed: all that was offered, and the objectives; the vertical line is the knee."""
    figure, axes = new_figure("Throughput ramp", result, 9.0, 7.0, 2, 2)
    served, ttft, tpot, kept = axes
    slo = result.get("slo") or {}
    modes = result["ramp"]
    for index, mode in enumerate(modes):
        rows = _rising(result["cases"], mode)
        rates = [row["request_rate"] for row in rows]
        color, name = COLORS[index % len(COLORS)], f"{_name(mode)}: " if len(modes) > 1 else ""
        series = (
            (served, "request_throughput", "-", f"{name}served"),
            (served, "request_goodput", ":", f"{name}within the objectives"),
            (ttft, "median_ttft_ms", "-", f"{name}p50"),
            (ttft, "p99_ttft_ms", ":", f"{name}p99"),
            (tpot, "median_tpot_ms", "-", f"{name}p50"),
            (tpot, "p99_tpot_ms", ":", f"{name}p99"),
            (kept, "followed", "-", f"{name}kept up"),
        )
        for axis, key, style, label in series:
            values: list[Any] = [row.get(key) for row in rows]
            if any(value is not None for value in values):
                axis.plot(rates, values, "o" + style, color=color, label=label, markersize=3.5)
        for axis in axes if mode["knee_rate"] is not None else ():
            axis.axvline(mode["knee_rate"], color=color, linewidth=1, alpha=0.4)
    every = [row["request_rate"] for row in result["cases"]]
    served.plot(sorted(every), sorted(every), "--", color="#999999", linewidth=1, label="offered")
    for axis, key in ((ttft, "ttft_ms"), (tpot, "tpot_ms")):
        if slo.get(key) is not None:
            axis.axhline(slo[key], color="black", linestyle="--", linewidth=1, label="objective")
    for axis, title in zip(axes, ("requests/s", "TTFT, ms", "TPOT, ms", "share kept up"), strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("offered requests/s")
        log_scale(axis.xaxis, every)
        axis.set_ylim(bottom=0)
        axis.legend(frameon=False, fontsize=8)
    times = [row[key] for row in result["cases"] for key in ("median_ttft_ms", "p99_ttft_ms") if row[key]]
    log_scale(ttft.yaxis, times)
    served.set_ylim(0, 1.3 * max(row["request_throughput"] or 0.0 for row in result["cases"]) or None)
    kept.yaxis.set_major_formatter(PercentFormatter(1.0))
    kept.set_ylim(0, 1.05)
    return figure


def pareto_figure(result: Mapping[str, Any]) -> Figure | None:
    """Output tokens/s of the device against those of a user, a point per offered rate: filled from asking to
    the last token, hollow while tokens come (one over TPOT). The line joins what no other rate beats."""
    rows = result["cases"]
    if not any(row["tokens_per_s_per_user"] for row in rows):
        return None
    figure, (axis,) = new_figure("Tokens/s per device against tokens/s per user", result, 7.0, 5.0)
    for index, mode in enumerate(result["ramp"]):
        mine = [row for row in _rising(rows, mode) if row["tokens_per_s_per_user"]]
        color = COLORS[index % len(COLORS)]
        name = f"{_name(mode)}: " if len(result["ramp"]) > 1 else ""
        device = [row["tokens_per_s_per_device"] for row in mine]
        user = [row["tokens_per_s_per_user"] for row in mine]
        decode = [row["decode_tokens_per_s_per_user"] for row in mine]
        axis.plot(decode, device, "o", color=color, mfc="none", alpha=0.5, label=f"{name}while tokens come")
        axis.plot(user, device, "o", color=color, label=f"{name}from asking to the last token")
        front = [rows[case] for case in mode["pareto"]]
        axis.plot(
            [row["tokens_per_s_per_user"] for row in front],
            [row["tokens_per_s_per_device"] for row in front], "-", color=color, linewidth=1.2,
        )  # fmt: skip
        for row, x, y in zip(mine, user, device, strict=True):
            text = f"{row['request_rate']:.3g}/s" + (" knee" if row["case"] == mode["knee_case"] else "")
            place = (5, -10) if row["saturated"] and row["case"] % 2 else (5, 5)  # those crowd at the left
            axis.annotate(text, (x, y), xytext=place, textcoords="offset points", fontsize=7)
    axis.set_xlabel("output tokens/s per user")
    axis.set_ylabel("output tokens/s per device")
    axis.set_xlim(left=0)
    axis.set_ylim(bottom=0)
    vertical_grid(axis)
    axis.legend(frameon=False, fontsize=8)
    return figure


def save_ramp_plots(result: Mapping[str, Any], out_dir: str | os.PathLike[str]) -> list[Path]:
    """`ramp.png` and `pareto.png` in `out_dir`; returns what was drawn.

    Raises:
        OutputError: one cannot be written.
    """
    figures = {"ramp": ramp_figure(result), "pareto": pareto_figure(result)}
    return save_figures(figures, out_dir)


def _rising(rows: Sequence[Row], mode: Row) -> list[Row]:
    mine = [r for r in rows if (r["backend"], r["batching"]) == (mode["backend"], mode["batching"])]
    return sorted(mine, key=lambda row: row["request_rate"])


def _name(mode: Row) -> str:
    return str(mode["batching"] if mode["backend"] == "moejax" else mode["backend"])
