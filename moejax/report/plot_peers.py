"""The plot of backends side by side, for latency and for throughput. No JAX here."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moejax.report.figure import legend_below, log_scale, new_figure
from moejax.report.style import case_label, has_peers, mode_label, nth_color, tail_key

_PANELS = (
    ("median_ttft_ms", "p99_ttft_ms", "TTFT (ms), less is better"),
    ("median_tpot_ms", "p99_tpot_ms", "TPOT (ms), less is better"),
    ("output_throughput", None, "output tokens/s, more is better"),
)


def backends_beside(result: Mapping[str, Any]) -> Figure | None:
    """TTFT and TPOT (the median, and a line up to the 99th percentile or the maximum) and output tokens/s: a
    group for each case, in it one bar or point for each backend. None without peers."""
    if not has_peers(result):
        return None
    groups = _groups(result)
    names = list(dict.fromkeys(name for _, bars in groups for name, _ in bars))
    width = max(9.0, 2.0 + 0.5 * len(groups) * len(names) * len(_PANELS))
    figure, axes = new_figure("Backends side by side", result, min(width, 16.0), 4.2, 1, len(_PANELS))
    for axis, (key, p99, title) in zip(axes, _PANELS, strict=True):
        high = tail_key(p99, result["cases"]) if p99 else None
        _draw(axis, groups, names, key, high)
        axis.set_title(f"{title}; line: to {high[:3]}" if high else title, fontsize=10)
    legend_below(figure, axes)
    return figure


def _groups(result: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, Mapping[str, Any]]]]]:
    """(label, (backend, row)s) of each case; a throughput result's rows are one case."""
    if result.get("experiment") == "throughput":
        return [("", [(mode_label(result, row), row) for row in result["cases"]])]
    groups: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for row in result["cases"]:
        groups.setdefault(case_label(row), []).append((str(row["backend"]), row))
    return list(groups.items())


def _draw(
    axis: Axes,
    groups: Sequence[tuple[str, Sequence[tuple[str, Mapping[str, Any]]]]],
    names: Sequence[str],
    key: str,
    high: str | None,
) -> None:
    """One panel. Where the figures span orders of magnitude points on a logarithmic axis, since a bar's
    length means nothing there."""
    width = 0.8 / len(names)
    rows = [dict(bars) for _, bars in groups]
    every = [row[name].get(key) for row in rows for name in row]
    tops = [row[name].get(high) for row in rows for name in row if high]
    wide = log_scale(axis.yaxis, [*every, *tops], over=12, margin=2)
    for index, name in enumerate(names):
        known = [(place, row[name]) for place, row in enumerate(rows) if row.get(name, {}).get(key)]
        places = np.array([place for place, _ in known]) + (index - (len(names) - 1) / 2) * width
        values = [row[key] for _, row in known]
        ends = [(row.get(high) if high else None) or row[key] for _, row in known]
        if wide:
            axis.plot(places, values, "o", color=nth_color(index), markersize=6, label=name)
        else:
            axis.bar(places, values, width * 0.92, color=nth_color(index), label=name)
        axis.vlines(places, values, ends, color="black", linewidth=1)
        if len(names) * len(groups) > 12:
            continue
        for place, value in zip(places, values, strict=True):
            text = f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
            where: dict[str, Any] = (
                {"xytext": (6, -3)} if wide else {"xytext": (0, -3), "va": "top", "ha": "center"}
            )
            ink = "black" if wide else "white"
            axis.annotate(text, (place, value), textcoords="offset points", color=ink, fontsize=7, **where)
    axis.set_xticks(range(len(groups)), [label for label, _ in groups], fontsize=8)
    axis.set_xlim(-0.6, len(groups) - 0.4)
    if not wide:
        axis.margins(y=0.15)
        axis.set_ylim(bottom=0)
