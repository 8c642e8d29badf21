"""The table and plots of a throughput ramp. No JAX here."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.console import Console
from rich.table import Table

from moejax.report.figure import log_scale, new_figure, vertical_grid
from moejax.report.style import nth_color, run_title, tail_key
from moejax.report.tables import (
    Column,
    case_notes,
    column_table,
    metric_columns,
    print_lines,
    share,
    three_digits,
)
from moejax.results.metrics import objectives

Row = Mapping[str, Any]

_COLUMNS = (
    Column("req/s\nasked", "request_rate", cell=three_digits),
    Column("\ncame", "offered_rate", cell=three_digits),
    Column("\nserved", "request_throughput", cell=three_digits),
    Column("\ngood", "request_goodput", cell=three_digits),
    Column("kept\nup %", "followed", cell=share),
    *metric_columns(
        "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms", "tokens_per_s_per_user",
        "tokens_per_s_per_device",
    ),
)  # fmt: skip


def ramp_table(result: Mapping[str, Any]) -> Table:
    """A line per rate in rising order, mode by mode; the knee and saturated rates are marked."""
    modes = {(mode["backend"], mode["batching"]): mode for mode in result["ramp"]}

    def mode_of(row: Row) -> Row:
        return modes[row["backend"], row["batching"]]

    def mark(row: Row) -> str:
        knee = row["case"] == mode_of(row)["knee_case"]
        word = "knee" if knee else "behind" if row["saturated"] else ""
        return f"{_prefix(result, mode_of(row), ' ')}{word}".strip()

    return column_table(
        f"ramp: {run_title(result)}",
        (*_COLUMNS, Column("", mark, left=True)),
        [row for mode in result["ramp"] for row in _rising(result["cases"], mode)],
        "times in ms; kept up: requests ended over come, in the arrivals' second half;\n"
        "behind: saturated, it did not follow the rate; "
        "tok/s user: a request's output over its time from asking to the last token" + case_notes(result),
        section=lambda row: (row["backend"], row["batching"]),
        style=lambda row: "bold" if row["case"] == mode_of(row)["knee_case"] else None,
    )


def print_ramp(result: Mapping[str, Any], console: Console) -> None:
    """The table, and a line per mode that says where its knee is."""
    console.print(ramp_table(result))
    print_lines(console, ramp_lines(result))


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
                f"follows {mode['knee_rate']:.3g} requests/s, the highest asked: no saturation found, "
                "raise ramp.max_steps"
            )
        if mode["max_goodput"] is not None:
            rate = mode["max_goodput_rate"]
            text += f"; most good requests/s: {mode['max_goodput']:.3g} at {rate:.3g} asked"
        lines.append(f"{_name(mode)}: {text}")
    return lines


def ramp_figure(result: Mapping[str, Any]) -> Figure:
    """Served and good requests/s, times to the first token and per token, how far the engine kept up, over
    the rate asked for. Dashed: arrivals as they came, and the objectives; the vertical line is the knee."""
    figure, axes = new_figure("Throughput ramp", result, 9.0, 7.0, 2, 2)
    served, ttft, tpot, kept = axes
    slo = result.get("slo") or {}
    for index, mode in enumerate(result["ramp"]):
        rows = _rising(result["cases"], mode)
        rates = [row["request_rate"] for row in rows]
        slow = tail_key("p99_ttft_ms", rows)
        color, name = nth_color(index), _prefix(result, mode)
        series = (
            (served, "request_throughput", "-", f"{name}served"),
            (served, "request_goodput", ":", f"{name}{objectives(result)}"),
            (ttft, "median_ttft_ms", "-", f"{name}p50"),
            (ttft, slow, ":", f"{name}{slow[:3]}"),
            (tpot, "median_tpot_ms", "-", f"{name}p50"),
            (tpot, slow.replace("ttft", "tpot"), ":", f"{name}{slow[:3]}"),
            (kept, "followed", "-", f"{name}kept up"),
        )
        for axis, key, style, label in series:
            values: list[Any] = [row.get(key) for row in rows]
            if any(value is not None for value in values):
                axis.plot(rates, values, "o" + style, color=color, label=label, markersize=3.5)
        for axis in axes if mode["knee_rate"] is not None else ():
            axis.axvline(mode["knee_rate"], color=color, linewidth=1, alpha=0.4)
    every = [row["request_rate"] for row in result["cases"]]
    came = sorted((row["request_rate"], row["offered_rate"]) for row in result["cases"])
    served.plot(*zip(*came, strict=True), "--", color="#999999", linewidth=1, label="came")
    for axis, key in ((ttft, "ttft_ms"), (tpot, "tpot_ms")):
        if slo.get(key) is not None:
            axis.axhline(slo[key], color="black", linestyle="--", linewidth=1, label="objective")
    for axis, title in zip(axes, ("requests/s", "TTFT, ms", "TPOT, ms", "share kept up"), strict=True):
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("requests/s asked for, in the mean")
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
    """Output tokens/s of the device against those of a user, a point per rate: filled from asking to
    the last token, hollow while tokens come (one over TPOT). The line joins what no other rate beats."""
    rows = result["cases"]
    if not any(row["tokens_per_s_per_user"] for row in rows):
        return None
    figure, (axis,) = new_figure("Tokens/s per device against tokens/s per user", result, 7.0, 5.0)
    for index, mode in enumerate(result["ramp"]):
        mine = [row for row in _rising(rows, mode) if row["tokens_per_s_per_user"]]
        color, name = nth_color(index), _prefix(result, mode)
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
    axis.set(xlabel="output tokens/s per user", ylabel="output tokens/s per device", xlim=(0, None))
    axis.set_ylim(bottom=0)
    vertical_grid(axis)
    axis.legend(frameon=False, fontsize=8)
    return figure


def _rising(rows: Sequence[Row], mode: Row) -> list[Row]:
    mine = [r for r in rows if (r["backend"], r["batching"]) == (mode["backend"], mode["batching"])]
    return sorted(mine, key=lambda row: row["request_rate"])


def _name(mode: Row) -> str:
    return str(mode["batching"] if mode["backend"] == "moejax" else mode["backend"])


def _prefix(result: Mapping[str, Any], mode: Row, end: str = ": ") -> str:
    """Names a mode in front of a label; a single one goes without saying."""
    return f"{_name(mode)}{end}" if len(result["ramp"]) > 1 else ""
