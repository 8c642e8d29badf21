"""The pictures of `report.html`: runs laid over each other, as SVG. A run keeps its colour in all of them.

No JAX here, and no pyplot.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moejax.report.figure import (
    draw_distributions,
    heat_map,
    legend_below,
    log_scale,
    new_figure,
    vertical_grid,
)
from moejax.report.style import nth_color
from moejax.results.compare.runs import Run
from moejax.results.compare.samples import Cases, case_name, latency_values, shared_cases
from moejax.results.machine import has_same_roof, roof_line
from moejax.results.metric_names import lower_is_better, short_name
from moejax.results.metrics import LATENCIES, is_number, relative_load
from moejax.results.pareto import pareto

_MARKERS = "osD^vP*X"
_MOST_CASES = 4
_CDF_POINTS = 201
# Latency, then rate: the first pair that every run's cases have is drawn.
_TRADE_OFFS = (
    ("median_tpot_ms", "output_throughput"), ("median_ttft_ms", "output_throughput"),
    ("median_e2el_ms", "request_throughput"), ("bits_per_weight", "perplexity"),
)  # fmt: skip


def svg(figure: Figure) -> bytes:
    """The figure as SVG with letters as outlines, so that it looks the same everywhere; the same figure gives
    the same bytes."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "moejax"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def trade_off(runs: Sequence[Run]) -> Figure | None:
    """Each case of each run as a point, latency across and throughput up (or size and perplexity), and the
    Pareto frontier of all of them: the points that none beats in both."""
    for x, y in _TRADE_OFFS:
        points = [
            (index, place, float(row[x]), float(row[y]), case_name(Cases(run).fields(place)))
            for index, run in enumerate(runs)
            for place, row in enumerate(run.result.get("cases") or ())
            if _positive(row.get(x)) and _positive(row.get(y))
        ]
        if len(points) > 1 and {point[0] for point in points} == set(range(len(runs))):
            return _draw_trade_off(runs, points, x, y)
    return None


def _positive(value: Any) -> bool:
    return is_number(value) and value > 0


def _draw_trade_off(
    runs: Sequence[Run], points: Sequence[tuple[int, int, float, float, str]], x: str, y: str
) -> Figure:
    figure, (axis,) = new_figure(f"{short_name(y)} against {short_name(x)}", {}, 8.0, 5.0)
    for index, run in enumerate(runs):
        mine = [point for point in points if point[0] == index]
        axis.plot(
            [p[2] for p in mine], [p[3] for p in mine], _MARKERS[index % len(_MARKERS)],
            color=nth_color(index), markersize=8, markeredgecolor="white", label=run.title,
        )  # fmt: skip
        for point in mine if len(points) <= 24 else ():
            axis.annotate(
                point[4], point[2:4], xytext=(0, 8), textcoords="offset points", ha="center", fontsize=7,
                color="#555555",
            )  # fmt: skip
    losses = [point[3] if lower_is_better(y) else -point[3] for point in points]
    front = [points[place][2:4] for place in pareto([point[2] for point in points], losses)]
    if len(front) > 1:
        axis.step(*zip(*front, strict=True), where="post", color="#888888", linewidth=1, linestyle="--",
                  label="Pareto frontier", zorder=0)  # fmt: skip
    axis.margins(0.12)
    log_scale(axis.xaxis, [point[2] for point in points])
    log_scale(axis.yaxis, [point[3] for point in points])
    axis.set(xlabel=short_name(x), ylabel=short_name(y))
    vertical_grid(axis)
    legend_below(figure, [axis], 3, fontsize=9)
    return figure


def distributions(cases: Sequence[Cases]) -> Figure | None:
    """Cumulative distributions of TTFT, TPOT, inter-token latency and E2E: a column each, a row per case that
    all runs have (at most four, evenly chosen), a curve per run. Points are medians and 99th percentiles."""
    shared = shared_cases(cases)
    evenly = np.linspace(0, len(shared) - 1, min(len(shared), _MOST_CASES)).round().astype(int)
    places = [shared[place] for place in evenly]
    columns = [pair for pair in LATENCIES.items() if any(latency_values(c, pair[0]).size for c in cases)]
    if not places or not columns:
        return None
    figure, axes = new_figure(
        "Cumulative distributions", {}, 1.0 + 2.9 * len(columns), 1.2 + 2.2 * len(places), len(places),
        len(columns),
    )  # fmt: skip
    for row, (text, indices) in enumerate(places):
        for column, (name, title) in enumerate(columns):
            axis = axes[row * len(columns) + column]
            samples = [(c.run.title, latency_values(c, name, i)) for c, i in zip(cases, indices, strict=True)]
            curves = [(label, nth_color(run), values) for run, (label, values) in enumerate(samples)]
            draw_distributions(axis, curves, points=_CDF_POINTS)
            axis.tick_params(labelsize=8)
            axis.set_title(f"{title} · {text}" if len(places) > 1 else title, fontsize=9)
            if row == len(places) - 1:
                axis.set_xlabel("milliseconds", fontsize=9)
    legend_below(figure, axes)
    return figure


def expert_loads(runs: Sequence[Run]) -> Figure | None:
    """Heat maps of the experts' load, layers x experts, of all runs that recorded it, on one colour scale: 1
    is an even share."""
    loads = [(run, relative_load(run.result)) for run in runs]
    maps = [(run, load) for run, load in loads if load is not None]
    if not maps:
        return None
    layers = max(load.shape[0] for _, load in maps)
    height = 1.0 + len(maps) * min(5.0, max(1.6, 0.9 + 0.16 * layers))
    figure, axes = new_figure("Expert load", {}, 9.0, height, len(maps), 1)
    top = max(2.0, *(float(np.nanmax(load)) for _, load in maps))
    for axis, (run, load) in zip(axes, maps, strict=True):
        image = heat_map(axis, load, vmin=0.0, vmax=top)
        busiest = np.mean(np.nanmax(load[~np.isnan(load).all(axis=1)], axis=1))  # of the layers with experts
        axis.set_title(f"{run.title} · busiest expert {busiest:.2f}x the even share", fontsize=9)
        axis.set_ylabel("layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    axes[-1].set_xlabel("expert")
    figure.colorbar(image, ax=axes, label="load / even share")
    return figure


def roof(runs: Sequence[Run]) -> Figure | None:
    """Measured time per output token over its bound, case by case: the share of the roof that each run
    reaches. Runs with roofs of their own have panels of their own."""
    rows: list[tuple[int, str, float]] = []
    for index, run in enumerate(runs):
        cases = Cases(run)
        for place, row in enumerate(cases.rows):
            if _positive(row.get("roofline_percent")):
                rows.append((index, case_name(cases.fields(place)), float(row["roofline_percent"])))
    shown = sorted({index for index, _, _ in rows})
    if not rows:
        return None
    one = has_same_roof(runs[index].result for index in shown)
    panels = [shown] if one else [[index] for index in shown]
    size = 8.0, 1.2 + 0.4 * len(panels) + 0.32 * len(rows)
    figure, axes = new_figure("Share of the roofline reached in decoding", {}, *size, len(panels), 1)
    for axis, members in zip(axes, panels, strict=True):
        names = list(dict.fromkeys(name for index, name, _ in rows if index in members))
        height = 0.8 / len(members)
        for turn, index in enumerate(members):
            mine = {name: value for i, name, value in rows if i == index}
            places = [names.index(name) + (turn - (len(members) - 1) / 2) * height for name in mine]
            look: dict[str, Any] = {"color": nth_color(index), "label": runs[index].title}
            bars = axis.barh(places, list(mine.values()), 0.92 * height, **look)
            axis.bar_label(bars, [f"{value:.0f} %" for value in mine.values()], fontsize=7, padding=2)
        axis.set_yticks(range(len(names)), names, fontsize=8)
        axis.invert_yaxis()
        axis.grid(visible=False, axis="y")
        vertical_grid(axis)
        axis.set_title(roof_line(runs[members[0]].result) or "", fontsize=8, loc="left")
        axis.margins(x=0.1)
    axes[-1].set_xlabel("% of the least time that memory and compute allow")
    legend_below(figure, axes, 3)
    return figure


_SERIES = (
    ("cpu_percent", "CPU of this process (% of a core)", 1.0),
    ("process_rss_bytes", "resident memory (GB)", 1e-9),
    ("gpu0_power_w", "GPU 0 power (W)", 1.0), ("gpu0_sm_clock_mhz", "GPU 0 clock (MHz)", 1.0),
    ("cpu_power_w", "CPU power (W)", 1.0),
)  # fmt: skip


def telemetry(runs: Sequence[Run]) -> Figure | None:
    """CPU, memory and power over the measured time, a curve per run."""
    series: list[Mapping[str, Any]] = [
        (run.result.get("telemetry") or {}).get("series") or {} for run in runs
    ]
    panels = [s for s in _SERIES if any(len(one.get(s[0]) or ()) > 2 for one in series)]
    if not panels:
        return None
    figure, axes = new_figure(
        "Machine over the measured time", {}, 8.0, 1.0 + 1.7 * len(panels), len(panels), 1
    )
    for axis, (name, title, scale) in zip(axes, panels, strict=True):
        for index, (run, one) in enumerate(zip(runs, series, strict=True)):
            if len(one.get(name) or ()) > 2:
                values = [np.nan if v is None else v * scale for v in one[name]]
                axis.plot(one["time_s"], values, color=nth_color(index), linewidth=1.3, label=run.title)
        axis.set_title(title, fontsize=9, loc="left")
        axis.margins(y=0.15)
        axis.set_ylim(bottom=0)
    axes[-1].set_xlabel("seconds since the first measured part")
    legend_below(figure, axes, 3)
    return figure
