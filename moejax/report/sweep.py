"""A sweep's jobs side by side: rows, a table, and plots chosen by what was swept.

Two axes of numbers give heat maps, one gives lines, names give bars. `sweep_figure` and `sweep_rows` take
what `sweep.json` holds. No JAX here.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moejax.core.errors import ConfigError
from moejax.report.figure import heat_map, legend_below, log_scale, new_figure, save_figures, write_cells
from moejax.report.style import COLORS, nth_color, tail_key
from moejax.report.tables import number, plain_table, print_lines, stderr_console
from moejax.results.machine import has_same_roof, is_share_of_roof
from moejax.results.metric_names import lower_is_better, short_name
from moejax.results.metrics import is_number, objectives
from moejax.results.result import load_result
from moejax.results.sweep import swept_keys

Row = dict[str, Any]
Metrics = Sequence[tuple[str, str]]
"""Heading and key of each."""
Panels = Callable[..., tuple[Figure, list[Axes]]]
"""`new_figure` with the sweep's title."""

PLOT_FILE = "sweep.png"

# What a case is of, apart from what was swept; in the order in which they make good axes.
_USERS = {"request_rate": "rate", "concurrency": "users"}
_CASE_AXES = ("prompt_len", "batch_size", "output_len", *_USERS, "batching", "backend", "phase")
_SHORT = {"prompt_len": "in", "output_len": "out", "batch_size": "batch", **_USERS}
# Each experiment's columns; the first ones that occur are also plotted.
_METRICS = {
    "latency": (
        "median_ttft_ms", "median_tpot_ms", "output_throughput", "request_goodput", "roofline_percent"
    ),
    "throughput": (
        "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "request_goodput", "request_throughput",
        "output_throughput",
    ),
    "profile": (
        "plain_ms", "router_ms", "experts_dispatch_ms", "experts_gate_up_ms", "experts_down_ms",
        "attention_ms",
    ),
}  # fmt: skip
_MOST_METRICS, _PLOTTED, _MOST_PANELS = 6, 3, 4


def sweep_rows(sweep: Mapping[str, Any]) -> list[Row]:
    """A row per case of each finished job: `job`, the swept keys (by their last part where that is unique),
    and the case's own fields and metrics, without shares of roofs that differ. A job without cases is one row
    with its flat metrics."""
    jobs = [job for job in sweep["jobs"] if job["state"] == "finished"]
    one_roof = has_same_roof(jobs)
    names = _short_names(swept_keys(sweep["jobs"]))
    rows = []
    for job in jobs:
        swept = {short: job["overrides"].get(key) for key, short in names.items()}
        for case in job.get("cases") or [job.get("metrics") or {}]:
            kept = {key: case[key] for key in case if one_roof or not is_share_of_roof(key)}
            rows.append({"job": job["job"], **swept, **kept})
    return rows


def axes_of(sweep: Mapping[str, Any], rows: Sequence[Row], *, every: bool = False) -> list[str]:
    """The keys that tell the rows apart: swept ones first, then the cases' own. Of two that always vary
    together only the first, but with `every` each that was swept."""
    swept = list(_short_names(swept_keys(sweep["jobs"])).values())
    by_pattern: dict[tuple[int, ...], str] = {}
    for name in dict.fromkeys([*swept, *_CASE_AXES]):
        column = tuple(str(row.get(name)) for row in rows)
        if len(set(column)) > 1:
            # Where each value comes first: equal for columns that vary together.
            by_pattern.setdefault(tuple(map(column.index, column)), name)
    kept = list(by_pattern.values())
    if every:
        varied = [name for name in swept if len({str(row.get(name)) for row in rows}) > 1]
        return [*varied, *(name for name in kept if name not in varied)]
    return kept


def metrics_of(sweep: Mapping[str, Any], rows: Sequence[Row]) -> list[tuple[str, str]]:
    """(heading, key) of the metrics to show: the experiment's usual ones, else the first that vary."""
    usual = _METRICS.get(sweep["experiment"])
    if usual is None:
        axes = {"job", "case", *axes_of(sweep, rows)}
        keys = dict.fromkeys(key for row in rows for key in row if key not in axes)
        usual = tuple(key for key in keys if _varies(rows, key))[:_MOST_METRICS]
    goals = {objectives(job) or "none" for job in sweep["jobs"] if job["state"] == "finished"}
    goal = ", ".join(goals) if len(goals) == 1 else "each job's own objectives"
    tailed = [tail_key(key, rows) for key in usual]
    shown = [(short_name(key) + (f"\n{goal}" if "goodput" in key else ""), key) for key in tailed]
    return [item for item in shown if any(is_number(row.get(item[1])) for row in rows)]


def sweep_table(sweep: Mapping[str, Any]) -> Table:
    """A line per case of each finished job; the best of each metric is bold."""
    rows = sweep_rows(sweep)
    axes, metrics = axes_of(sweep, rows, every=True), metrics_of(sweep, rows)
    differ = not has_same_roof(job for job in sweep["jobs"] if job["state"] == "finished")
    caption = "no shares of the roof: each job measured its own" if differ else None
    table = plain_table(f"sweep: {sweep['experiment']}, {len(sweep['jobs'])} jobs", caption)
    for name in ("job", *(_SHORT.get(axis, axis) for axis in axes)):
        table.add_column(name, justify="right")
    for heading, _ in metrics:
        table.add_column(heading.replace(" (ms)", "\n(ms)"), justify="right", no_wrap=True)
    best = {key: _best(rows, key) for _, key in metrics}
    for row in rows:
        cells = [escape(_axis_value(row.get(axis))) for axis in axes]
        for _, key in metrics:
            text = number(row.get(key))
            cells.append(f"[bold]{text}[/bold]" if row is best[key] else text)
        table.add_row(str(row["job"]), *cells)
    return table


def sweep_figure(sweep: Mapping[str, Any], result: Mapping[str, Any] | None = None) -> Figure | None:
    """The plot that fits what was swept, or None below two rows. `result`, one of the jobs', gives the
    title's model, device and commit."""
    rows = sweep_rows(sweep)
    axes, metrics = axes_of(sweep, rows), metrics_of(sweep, rows)[:_PLOTTED]
    if len(rows) < 2 or not axes or not metrics:
        return None
    numeric = [axis for axis in axes if all(is_number(row.get(axis)) for row in rows)]
    panels = partial(new_figure, f"Sweep of {sweep['experiment']}", result or {})
    if len(numeric) >= 2:
        return _heat_maps(panels, rows, axes, _best_axes(numeric), metrics)
    if numeric:
        return _lines(panels, rows, [a for a in axes if a != numeric[0]], numeric[0], metrics)
    return _bars(panels, rows, axes, metrics)


def report_sweep(
    sweep: Mapping[str, Any], folder: Path, *, objective: bool = False, console: Console | None = None
) -> list[Path]:
    """Prints the table, the jobs that did not finish and, of a search, the best one's command; draws the
    plot. Returns the files.

    Raises:
        OutputError: the plot cannot be written.
    """
    console = console or stderr_console()
    if sweep_rows(sweep):
        console.print(sweep_table(sweep))
    for job in sweep["jobs"]:
        if job["state"] != "finished":
            keys = swept_keys(sweep["jobs"]) or list(job["overrides"])
            told = " ".join(f"{key}={job['overrides'].get(key)}" for key in keys)
            reason = f": {job['error']}" if job["error"] else ""
            print_lines(console, [f"job {job['job']} ({told}) {job['state']}{reason}"], "yellow")
    if objective:
        print_lines(console, best_lines(sweep))
    return save_figures({Path(PLOT_FILE).stem: sweep_figure(sweep, _title_source(sweep, folder))}, folder)


def best_lines(sweep: Mapping[str, Any]) -> list[str]:
    """Says which job of a search has the best value, and which command runs it again."""
    jobs = [job for job in sweep["jobs"] if job["state"] == "finished" and job["value"] is not None]
    if not jobs:
        return ["no job gave a value"]
    least = any("direction=minimize" in text for text in sweep["argv"])
    best = (min if least else max)(jobs, key=lambda job: job["value"])
    name = best.get("objective") or "value"
    swept = [key for key in swept_keys(sweep["jobs"]) if key in best["overrides"]]
    told = {key: f"{key}={_plain(value)}" for key, value in best["overrides"].items()}
    fixed = [text for key, text in told.items() if key not in swept]
    settings = [told[key] for key in swept]
    words = " ".join(shlex.quote(word) for word in [*fixed, "hydra.mode=RUN", *settings])
    return [
        f"best {name}: {number(best['value'])} (job {best['job']}: {' '.join(settings)})",
        f"run it again: python -m experiments.{sweep['experiment']} {words}",
    ]


def _heat_maps(
    panels: Panels, rows: Sequence[Row], axes: Sequence[str], pair: tuple[str, str], metrics: Metrics
) -> Figure:
    """A row of panels per metric, a column per value of what else varies."""
    down, across = pair
    others = [axis for axis in axes if axis not in pair]
    facets = list(dict.fromkeys(tuple(row.get(axis) for axis in others) for row in rows))[:_MOST_PANELS]
    ys, xs = _values(rows, down), _values(rows, across)
    width = 1.6 + len(facets) * max(2.2, 0.62 * len(xs) + 1.0)
    height = 1.0 + len(metrics) * max(1.7, 0.36 * len(ys) + 0.9)
    figure, places = panels(max(6.0, width), height, len(metrics), len(facets))
    for line, (heading, key) in enumerate(metrics):
        grids = [
            _grid([row for row in rows if tuple(row.get(a) for a in others) == facet], pair, ys, xs, key)
            for facet in facets
        ]
        known = np.concatenate([grid[np.isfinite(grid)] for grid in grids])
        low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
        norm = LogNorm(low, high) if 0 < low and high > 10 * low else None
        scale: dict[str, Any] = {"norm": norm} if norm else {"vmin": min(low, 0.0), "vmax": high or 1.0}
        for column, (facet, grid) in enumerate(zip(facets, grids, strict=True)):
            axis = places[line * len(facets) + column]
            image = heat_map(axis, grid, origin="lower", **scale)
            write_cells(axis, image, grid, lambda v: f"{v:,.0f}" if abs(v) >= 100 else f"{v:.3g}")
            axis.set_xticks(range(len(xs)), [_axis_value(x) for x in xs], fontsize=8)
            axis.set_yticks(range(len(ys)), [_axis_value(y) for y in ys], fontsize=8)
            names = ", ".join(f"{a} {_axis_value(v)}" for a, v in zip(others, facet, strict=True))
            axis.set_title(f"{heading}{f' ({names})' if names else ''}", fontsize=9)
            if line == len(metrics) - 1:
                axis.set_xlabel(across)
            if column == 0:
                axis.set_ylabel(down)
    return figure


def _grid(
    rows: Sequence[Row], pair: tuple[str, str], ys: Sequence[Any], xs: Sequence[Any], key: str
) -> np.ndarray:
    """Means [len(ys), len(xs)], NaN where there is no row."""
    grid = np.full((len(ys), len(xs)), np.nan)
    for i, y in enumerate(ys):
        for j, x in enumerate(xs):
            values = [row.get(key) for row in rows if row.get(pair[0]) == y and row.get(pair[1]) == x]
            numbers: list[Any] = [value for value in values if is_number(value)]
            if numbers:
                grid[i, j] = np.mean(numbers)
    return grid


def _lines(
    panels: Panels, rows: Sequence[Row], others: Sequence[str], across: str, metrics: Metrics
) -> Figure:
    """A panel per metric over the one axis of numbers, a line per combination of the names."""
    figure, places = panels(max(6.0, 3.4 * len(metrics)), 3.8, 1, len(metrics))
    series = list(dict.fromkeys(tuple(row.get(axis) for axis in others) for row in rows))
    xs = _values(rows, across)
    for axis, (heading, key) in zip(places, metrics, strict=True):
        for index, which in enumerate(series):
            mine = [row for row in rows if tuple(row.get(a) for a in others) == which]
            points = sorted((row[across], row[key]) for row in mine if is_number(row.get(key)))
            label = ", ".join(_axis_value(value) for value in which)
            if points:
                x, y = zip(*points, strict=True)
                axis.plot(x, y, "o-", color=nth_color(index), label=label, markersize=4)
        axis.set_title(heading, fontsize=10)
        axis.set(xlabel=across, ylim=(0, None))
        if xs[0] > 0:
            log_scale(axis.xaxis, xs)
    if others:
        legend_below(figure, places)
    return figure


def _bars(panels: Panels, rows: Sequence[Row], axes: Sequence[str], metrics: Metrics) -> Figure:
    """A panel per metric, a bar per row."""
    labels = [", ".join(_axis_value(row.get(axis)) for axis in axes) for row in rows]
    height = 1.6 + 0.28 * len(rows)
    figure, places = panels(max(6.0, 3.4 * len(metrics)), height, 1, len(metrics))
    for axis, (heading, key) in zip(places, metrics, strict=True):
        values = [row[key] if is_number(row.get(key)) else 0.0 for row in rows]
        bars = axis.barh(range(len(rows)), values, color=COLORS[0])
        axis.bar_label(bars, [number(row.get(key)) for row in rows], fontsize=7, padding=2)
        axis.set_yticks(range(len(rows)), labels if axis is places[0] else [""] * len(rows), fontsize=8)
        axis.invert_yaxis()
        axis.margins(x=0.2)
        axis.set_title(heading, fontsize=10)
        axis.grid(visible=False)
    return figure


def _best_axes(numeric: Sequence[str]) -> tuple[str, str]:
    """(down, across): prompt length against batch size where both vary, else the first two."""
    preferred = [axis for axis in _CASE_AXES if axis in numeric]
    order = [*preferred, *(axis for axis in numeric if axis not in preferred)]
    return order[0], order[1]


def _short_names(keys: Sequence[str]) -> dict[str, str]:
    """Each dotted key by its last part, or whole where two would share it."""
    last = [key.rpartition(".")[2] for key in keys]
    return {key: short if last.count(short) == 1 else key for key, short in zip(keys, last, strict=True)}


def _values(rows: Sequence[Row], axis: str) -> list[Any]:
    return sorted({row[axis] for row in rows if is_number(row.get(axis))})


def _best(rows: Sequence[Row], key: str) -> Row | None:
    """The row with the best value, where better has a direction and the rows differ."""
    known = [row for row in rows if is_number(row.get(key))]
    lower = lower_is_better(key)
    if lower is None or not _varies(known, key):
        return None
    return (min if lower else max)(known, key=lambda row: row[key])


def _varies(rows: Sequence[Row], key: str) -> bool:
    return len({row.get(key) for row in rows if is_number(row.get(key))}) > 1


def _axis_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else "–" if value is None else str(value)


def _plain(value: Any) -> str:
    """As it is written on the command line."""
    if isinstance(value, float) and value.is_integer():
        return f"{value:g}"
    return str(value).lower() if str(value) in ("True", "False") else str(value)


def _title_source(sweep: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    for job in sweep["jobs"]:
        if job["state"] == "finished":
            try:
                return load_result(folder / job["job"])
            except ConfigError:
                continue
    return {}
