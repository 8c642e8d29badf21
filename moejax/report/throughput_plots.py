"""The plots of a throughput result: latency distributions, and what went on in the engine over time.

Each function takes a result (result.json's content), some also the rows of requests.jsonl, and returns a
matplotlib `Figure`, or None where there is nothing to draw. A batching mode and a backend keep their colour
in all of them. No JAX here.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter
from numpy.typing import NDArray

from moejax.report.figure import distribution_panels, legend_below, new_figure, vertical_grid
from moejax.report.style import COLORS, mode_label, nth_color
from moejax.results.metrics import LATENCIES, samples_by_case

Rows = Sequence[Mapping[str, Any]]

_QUEUED, _PREFILL, _DECODE, _PADDING = "#bdbdbd", COLORS[1], COLORS[0], "#d9d9d9"
# Where the engine idles for longer than this share of the run, a curve is broken instead of drawn through.
_IDLE = 0.005
_TOKEN_BINS = 160
_MOST_BARS = 400
_THOUSANDS = StrMethodFormatter("{x:,g}")


def latency_distributions(result: Mapping[str, Any], requests: Rows) -> Figure | None:
    """Cumulative distribution of TTFT, TPOT, ITL and E2E: a curve per batching mode with points at its median
    and 99th percentile; objectives are dashed. All iterations pooled."""
    modes = _modes(result)
    panels = []
    for name, title in LATENCIES.items():
        samples = samples_by_case(requests, f"{name}_ms")
        curves = [(label, nth_color(case), samples[case]) for case, label in modes if case in samples]
        panels += [(title, curves, (result.get("slo") or {}).get(f"{name}_ms"))] if curves else []
    return distribution_panels("Latency distributions", result, panels)


def load_over_time(result: Mapping[str, Any]) -> Figure | None:
    """Sequences running and requests waiting over time, a curve per batching mode. Breaks are idle times;
    adaptive batching's limit is dotted."""
    timelines = _timelines(result)
    if not timelines:
        return None
    figure, axes = new_figure("Load over time", result, 8.0, 5.4, 2, 1)
    for axis, column, label in zip(
        axes, ("running_max", "waiting_max"), ("sequences running", "requests waiting"), strict=True
    ):
        for index, timeline in enumerate(timelines):
            times, values = _curve(timeline, timeline[column])
            axis.plot(times, values, color=_color(timeline, index), linewidth=1.3, label=timeline["label"])
            if column == "running_max" and "most_running_max" in timeline:
                limit = _curve(timeline, timeline["most_running_max"])
                axis.plot(*limit, ":", color=_color(timeline, index), linewidth=1.0)
        axis.set(ylabel=label, ylim=(0, None))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    _share_time(axes, timelines)
    legend_below(figure, axes)
    return figure


def cache_over_time(result: Mapping[str, Any]) -> Figure | None:
    """The share of the cache's blocks in use over time, a curve per batching mode; crosses at the top are
    preemptions."""
    timelines = [timeline for timeline in _timelines(result) if timeline["num_blocks"]]
    if not timelines:
        return None
    figure, (axis,) = new_figure("Cache use over time", result, 8.0, 3.8)
    top = 0.0
    for index, timeline in enumerate(timelines):
        use = np.asarray(timeline["used_blocks_max"]) / timeline["num_blocks"]
        top = max(top, float(use.max()))
        times, values = _curve(timeline, use)
        axis.plot(times, values, color=_color(timeline, index), linewidth=1.3, label=timeline["label"])
        places = np.asarray(timeline["time_s"])[np.asarray(timeline["preempted"]) > 0]
        if places.size:
            label = f"{timeline['label']}: {sum(timeline['preempted']):.0f} preemptions"
            heights = np.full(places.size, 1.03 + 0.04 * index)
            axis.plot(places, heights, "x", color=_color(timeline, index), markersize=5, label=label)
    axis.set_ylabel("blocks in use")
    # The whole cache where it matters; a use of a few per cent would be a line on the axis there.
    axis.set_ylim(0, 1.12 if top > 0.4 else 1.15 * top or 1.0)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    _share_time([axis], timelines)
    legend_below(figure, [axis])
    return figure


def tokens_over_time(result: Mapping[str, Any]) -> Figure | None:
    """Tokens computed per second over time, a panel per batching mode: decode, prefill, and the padding that
    the shape buckets add."""
    timelines = _timelines(result)
    if not timelines:
        return None
    figure, axes = new_figure(
        "Tokens computed over time", result, 8.0, 1.4 + 2.2 * len(timelines), len(timelines), 1
    )
    edges = np.linspace(0.0, _end(timelines), _TOKEN_BINS + 1)
    for axis, timeline in zip(axes, timelines, strict=True):
        prefill, decode, padded = (
            _rate(timeline, f"{kind}_tokens", edges) for kind in ("prefill", "decode", "padded")
        )
        layers = (
            ("decode", decode, _DECODE),
            ("prefill", prefill, _PREFILL),
            ("padding", np.maximum(padded - prefill - decode, 0.0), _PADDING),
        )
        base = np.zeros(_TOKEN_BINS)
        for label, values, color in layers:
            axis.stairs(base + values, edges, baseline=base, fill=True, color=color, label=label)
            base = base + values
        axis.set_ylabel("tokens/s")
        axis.set_title(timeline["label"], fontsize=10, loc="left")
        axis.yaxis.set_major_locator(MaxNLocator(nbins=5))
        axis.yaxis.set_major_formatter(_THOUSANDS)
    _share_time(axes, timelines)
    top = max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(0, top)
    legend_below(figure, axes)
    return figure


def request_spans(result: Mapping[str, Any], requests: Rows) -> Figure | None:
    """Each request of the first iteration as a bar from its arrival to its last token, a panel per batching
    mode, in order of arrival: waiting, first step to first token, further tokens. A red cross is a request
    that was not completed. More than 400 requests are thinned out evenly."""
    panels = []
    for case, name in _modes(result):
        rows = [row for row in requests if row["case"] == case and not row.get("iteration")]
        places = np.unique(np.linspace(0, len(rows) - 1, min(len(rows), _MOST_BARS)).round().astype(int))
        panels.append((name, [rows[place] for place in places]))
    panels = [(name, rows) for name, rows in panels if rows]
    if not panels:
        return None
    figure, axes = new_figure("Requests", result, 8.0, 1.4 + 2.6 * len(panels), len(panels), 1)
    for axis, (name, rows) in zip(axes, panels, strict=True):
        _draw_spans(axis, rows)
        axis.set_title(name, fontsize=10, loc="left")
        axis.set(ylabel="request", ylim=(len(rows) - 0.5, -0.5))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        axis.grid(visible=False)
        vertical_grid(axis)
    right = max(axis.get_xlim()[1] for axis in axes)
    for axis in axes:
        axis.set_xlim(0, right)
        axis.tick_params(labelbottom=axis is axes[-1])
    axes[-1].set_xlabel("seconds")
    legend_below(figure, axes)
    return figure


def _draw_spans(axis: Axes, rows: Rows) -> None:
    places = np.arange(len(rows))
    done = np.array([row["ttft_ms"] is not None for row in rows])
    arrival = np.array([row["arrival_s"] for row in rows])
    first, end = (
        arrival + np.array([row[key] or 0.0 for row in rows]) / 1e3 for key in ("ttft_ms", "e2el_ms")
    )
    # A server does not say when it took a request in: all the time to its first token is waiting.
    waited = [row["ttft_ms"] if row["queue_ms"] is None else row["queue_ms"] for row in rows]
    queue = arrival + np.array([value or 0.0 for value in waited]) / 1e3
    spans = (
        ("waiting", arrival, queue, _QUEUED),
        ("first step to first token", queue, first, _PREFILL),
        ("further tokens", first, end, _DECODE),
    )
    for label, left, right, color in spans:
        # One collection and not a rectangle a request: those take most of a second to make and draw.
        corners = [(left, places - 0.4), (right, places - 0.4), (right, places + 0.4), (left, places + 0.4)]
        bars = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)[done]
        # Not snapped to pixels: of bars less than a pixel high some would vanish.
        look: dict[str, Any] = {"facecolors": color, "linewidths": 0, "snap": False, "label": label}
        axis.add_collection(PolyCollection(list(bars), **look))
    if not done.all():
        axis.plot(arrival[~done], places[~done], "x", color="#c00000", markersize=5, label="not completed")
    axis.autoscale_view()


def _modes(result: Mapping[str, Any]) -> list[tuple[int, str]]:
    return [(index, mode_label(result, case)) for index, case in enumerate(result.get("cases", []))]


def _timelines(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        {**timeline, "label": mode_label(result, timeline)}
        for timeline in result.get("timeline", [])
        if timeline["time_s"]
    ]


def _color(timeline: Mapping[str, Any], index: int) -> str:
    return nth_color(timeline.get("case", index))


def _end(timelines: Sequence[Mapping[str, Any]]) -> float:
    return max(timeline["time_s"][-1] for timeline in timelines) or 1.0


def _curve(timeline: Mapping[str, Any], values: Any) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Each row's value over the time that it stands for, with a break where the engine idled."""
    ends, y = np.asarray(timeline["time_s"]), np.asarray(values, dtype=np.float64)
    busy = timeline["bin_s"] or np.asarray(timeline["seconds"])
    before = np.concatenate(([0.0], ends[:-1]))
    starts = np.maximum(ends - busy, before)
    starts = np.where(starts - before > _IDLE * ends[-1], starts, before)
    gap = starts > before
    x = np.stack([np.where(gap, before, starts), starts, ends], axis=1).ravel()
    return x, np.stack([np.where(gap, np.nan, y), y, y], axis=1).ravel()


def _rate(timeline: Mapping[str, Any], column: str, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Tokens per second between each two edges. A row's tokens are spread over the time it took: a long step
    gathered at its end would look like a peak."""
    ends, busy = np.asarray(timeline["time_s"]), np.asarray(timeline["seconds"])
    before = np.concatenate(([0.0], ends[:-1]))
    starts = np.clip(ends - busy, before, ends)
    total = np.concatenate(([0.0], np.cumsum(timeline[column])))
    times = np.stack([starts, ends], axis=1).ravel()
    sums = np.stack([total[:-1], total[1:]], axis=1).ravel()
    return np.diff(np.interp(edges, times, sums)) / np.diff(edges)


def _share_time(axes: Sequence[Axes], timelines: Sequence[Mapping[str, Any]]) -> None:
    for axis in axes:
        axis.set_xlim(0, _end(timelines))
        axis.tick_params(labelbottom=axis is axes[-1])
    axes[-1].set_xlabel("seconds")
