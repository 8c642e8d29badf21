"""The plots of a result, the same for the command line, notebooks and W&B.

Each function takes a result (result.json's content) and returns a matplotlib `Figure`, or None where the
result has nothing for it. Figures are made without pyplot, so no backend or global state is touched.
No JAX here.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullLocator

from moejax.report.figure import (
    draw_distributions,
    heat_map,
    legend_below,
    log_scale,
    new_figure,
    round_ticks,
)
from moejax.report.style import COLORS, case_label, has_peers, nth_color, rows_by_case
from moejax.results.metric_names import least_samples
from moejax.results.metrics import relative_load

_PERCENTILES = (("median", "p50", "#9ecae1"), ("p90", "p90", "#4292c6"), ("p99", "p99", "#084594"))
_FEW_VALUES = (("median", "p50", "#9ecae1"), ("max", "max", "#084594"))


def latency_percentiles(result: Mapping[str, Any]) -> Figure | None:
    """TTFT, TPOT and E2E of each case in milliseconds: bars of the median, 90th and 99th percentile, where a
    case has too few values for one of the two of the median and the maximum."""
    cases = result.get("cases", [])
    panels = [
        (key, title)
        for key, title in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2el", "E2E"))
        if any(case.get(f"median_{key}_ms") is not None for case in cases)
    ]
    if not panels:
        return None
    # Side by side while that is readable; many cases go below one another.
    stacked = len(cases) > (2 if has_peers(result) else 5)
    shape = (len(panels), 1) if stacked else (1, len(panels))
    size = (
        (max(7.0, 1.0 + 0.6 * len(cases)), 1.2 + 2.4 * len(panels)) if stacked else (3.3 * len(panels), 4.0)
    )
    figure, axes = new_figure("Latency percentiles", result, *size, *shape)
    keys = [f"{name}_{key}_ms" for name in ("p90", "p99") for key, _ in panels]
    known = all(case.get(key) is not None for case in cases for key in keys)
    bars_shown = _PERCENTILES if known else _FEW_VALUES
    width = 0.8 / len(bars_shown)
    for axis, (key, title) in zip(axes, panels, strict=True):
        for offset, (statistic, label, color) in enumerate(bars_shown):
            heights = [case.get(f"{statistic}_{key}_ms") for case in cases]
            places = np.arange(len(cases)) + (offset - (len(bars_shown) - 1) / 2) * width
            bars = axis.bar(places, [h or 0.0 for h in heights], width * 0.92, color=color, label=label)
            if len(cases) <= 4:
                labels = [f"{h:.3g}" if h is not None and h < 1000 else f"{h or 0:.0f}" for h in heights]
                axis.bar_label(bars, labels, fontsize=7, padding=2, rotation=90 if len(cases) > 2 else 0)
        axis.set_title(title, fontsize=10)
        axis.set_xticks(
            range(len(cases)), [case_label(case, named=has_peers(result)) for case in cases], fontsize=8
        )
        margin = max(0.5, 1.0 - 0.25 * (len(cases) - 1))  # a single case is not blown up to fill the width
        axis.set_xlim(-margin, len(cases) - 1 + margin)
        axis.margins(y=0.15)
        axis.set_ylim(bottom=0)
        if has_peers(result):
            values = [case.get(f"{name}_{key}_ms") for case in cases for name, _, _ in bars_shown]
            log_scale(axis.yaxis, values, over=12, margin=2)
        if stacked or axis is axes[0]:
            axis.set_ylabel("milliseconds")
    legend_below(figure, axes, 3)
    return figure


def _token_matrix(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Inter-token latencies [requests, longest output - 1] in ms, NaN beyond a request's end."""
    matrix = np.full((len(rows), max((len(row["itl_ms"]) for row in rows), default=0)), np.nan)
    for index, row in enumerate(rows):
        matrix[index, : len(row["itl_ms"])] = row["itl_ms"]
    return matrix


def inter_token_latency(result: Mapping[str, Any], requests: Iterable[Mapping[str, Any]]) -> Figure | None:
    """Left: inter-token latency over the token's place in the output, median over requests with the 10th to
    90th percentile as a band, of all of fewer than ten requests. Right: its cumulative distribution over all
    tokens."""
    groups = [(label, _token_matrix(rows)) for label, rows in rows_by_case(result, requests)]
    groups = [(label, matrix) for label, matrix in groups if matrix.size]
    if not groups:
        return None
    figure, (over, cumulative) = new_figure("Inter-token latency", result, 10.0, 4.2, 1, 2)
    for index, (label, matrix) in enumerate(groups):
        style = "-" if index < len(COLORS) else "--"
        places = np.arange(2, matrix.shape[1] + 2)
        ends = (10, 50, 90) if len(matrix) >= least_samples("p90") else (0, 50, 100)
        low, middle, high = np.nanpercentile(matrix, ends, axis=0)
        over.fill_between(places, low, high, color=nth_color(index), alpha=0.18, linewidth=0)
        over.plot(places, middle, color=nth_color(index), linewidth=1.3, linestyle=style, label=label)
    over.set_xlabel("output token")
    over.set_ylabel("inter-token latency (ms)")
    over.set_title("median; band: p10 to p90, of under ten requests all", fontsize=9)
    over.xaxis.set_major_locator(MaxNLocator(integer=True))
    # From zero, so that a flat curve looks flat; one slow token must not press all the others down.
    over.set_ylim(0, max(np.nanpercentile(m, 90, axis=0).max() for _, m in groups) * 1.1)
    if has_peers(result):
        medians = [value for _, matrix in groups for value in np.nanmedian(matrix, axis=0)]
        log_scale(over.yaxis, medians, over=12, margin=2)
    curves = [(label, nth_color(i), m[~np.isnan(m)]) for i, (label, m) in enumerate(groups)]
    draw_distributions(cumulative, curves)
    cumulative.set(xlabel="inter-token latency (ms)", ylabel="share of tokens")
    legend_below(figure, [over], 3 if has_peers(result) else 4)
    return figure


def throughput_by_batch(result: Mapping[str, Any]) -> Figure | None:
    """Output tokens/s over the batch size, a line per prompt and output length, with the line that perfect
    scaling from the smallest batch would give. None below two batch sizes."""
    lines: dict[tuple[Any, Any, Any], dict[int, float]] = {}
    for case in result.get("cases", []):
        if case.get("output_throughput") is not None and case.get("batch_size"):
            key = (case.get("backend", "moejax"), case.get("prompt_len"), case.get("output_len"))
            lines.setdefault(key, {})[case["batch_size"]] = case["output_throughput"]
    sizes = sorted({size for line in lines.values() for size in line})
    if len(sizes) < 2:
        return None
    figure, (axis,) = new_figure("Throughput", result, 6.4, 4.2)
    for index, ((backend, prompt, output), line) in enumerate(lines.items()):
        places = sorted(line)
        label = (f"{backend}, " if has_peers(result) else "") + f"in={prompt}, out={output}"
        axis.plot(places, [line[p] for p in places], "o-", color=nth_color(index), label=label)
        if len(places) > 1:
            ideal = [line[places[0]] * p / places[0] for p in places]
            axis.plot(places, ideal, ":", color=nth_color(index), linewidth=1, alpha=0.7)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.xaxis.set_minor_locator(NullLocator())
    round_ticks(axis.yaxis, *axis.get_ylim())
    axis.set(xlabel="batch size (dotted: perfect scaling)", ylabel="output tokens/s")
    axis.legend(frameon=False)
    return figure


def expert_load(result: Mapping[str, Any]) -> Figure | None:
    """Heat map of the experts' load, layers x experts, from `routing["counts"]`: 1 is an even share, and the
    number beside each layer is its busiest expert's. A dense layer (all zero) is left blank."""
    load = relative_load(result)
    if load is None:
        return None
    layers, experts = load.shape
    width, height = min(14.0, 3.5 + 0.24 * experts), min(12.0, 2.2 + 0.28 * layers)
    figure, (axis,) = new_figure("Expert load", result, max(6.0, width), max(3.2, height))
    image = heat_map(axis, load, vmin=0.0, vmax=max(2.0, float(np.nanmax(load))))
    axis.set(xlabel="expert", ylabel="layer")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    axis.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=16))
    for layer, busiest in enumerate(load.max(axis=1) if layers <= 48 else ()):
        if np.isfinite(busiest):
            text = f"{busiest:.1f}x"
            axis.text(experts - 0.35, layer, text, va="center", fontsize=7, clip_on=False)
    figure.colorbar(image, ax=axis, pad=0.06, label="load / even share")
    return figure


def training_curve(result: Mapping[str, Any], steps: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Training loss, held-out loss and learning rate over the step, from `steps`, the rows of metrics.jsonl
    (this start's part of the run).

    A step that was logged twice (a run killed and resumed from an earlier checkpoint) counts with its last
    value.
    """

    def series(name: str) -> tuple[list[int], list[float]]:
        logged = [row for row in steps if row.get(name) is not None and row.get("step") is not None]
        values = {row["step"]: row[name] for row in logged}
        return sorted(values), [values[step] for step in sorted(values)]

    names = ("train/cross_entropy", "held_out/loss", "train/learning_rate")
    train, held_out, rates = (series(name) for name in names)
    if not train[0] and not held_out[0]:
        return None
    ratios, height = ((3, 1), 5.2) if rates[0] else ((1,), 4.2)
    panels = {"sharex": True, "height_ratios": ratios}
    figure, axes = new_figure("Training", result, 7.2, height, len(ratios), 1, **panels)
    _draw_losses(axes[0], train, held_out)
    if rates[0]:
        axes[1].plot(*rates, color=COLORS[2], linewidth=1.3)
        axes[1].set_ylabel("learning rate")
        axes[1].ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    axes[-1].set_xlabel("step")
    return figure


def _draw_losses(
    axis: Axes, train: tuple[list[int], list[float]], held: tuple[list[int], list[float]]
) -> None:
    steps, values = train
    if len(steps) >= 50:
        window = max(5, len(steps) // 50)
        smooth = np.convolve(values, np.ones(window) / window, mode="valid")
        axis.plot(steps, values, color=COLORS[0], linewidth=0.6, alpha=0.3)
        axis.plot(
            steps[window - 1 :], smooth, color=COLORS[0], linewidth=1.6, label=f"train (mean of {window})"
        )
    elif steps:
        axis.plot(steps, values, color=COLORS[0], linewidth=1.4, label="train")
    if held[0]:
        axis.plot(*held, "o-", color=COLORS[1], linewidth=1.4, markersize=3.5, label="held-out")
        axis.annotate(
            f"{held[1][-1]:.3f}", (held[0][-1], held[1][-1]), xytext=(4, 6), textcoords="offset points",
            color=COLORS[1], fontsize=9,
        )  # fmt: skip
    axis.set_ylabel("loss (nats per token)")
    axis.legend(frameon=False)
