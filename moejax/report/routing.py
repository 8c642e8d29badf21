"""Figures of routing traces: loads, who goes with whom, working sets, locality, bursts. No JAX here.

Each takes one `RoutingCapture` or several by name, and gives a matplotlib `Figure`, or None where the trace
has nothing for it. `result`, if there is one, says under the title which run it is; otherwise the trace does.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from moejax.core.config import ModelConfig
from moejax.report.figure import heat_map, legend_below, new_figure, round_ticks, thin_ticks
from moejax.report.style import COLORS, nth_color
from moejax.routing import analysis, locality
from moejax.routing.capture import RoutingCapture

Captures = RoutingCapture | Mapping[str, RoutingCapture]

_MOST_TICKS = 16
_MOST_PAIRED = 2048  # experts whose pairs are counted and drawn
_RATIOS = (0.02, 0.05, 0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 1, 1.25, 1.5, 2, 3, 5, 10, 20, 50)
_GREY = "#dddddd"


def _named(captures: Captures) -> dict[str, RoutingCapture]:
    """By name, those that have rows."""
    named = {"": captures} if isinstance(captures, RoutingCapture) else dict(captures)
    return {name: capture.computed() for name, capture in named.items() if capture.num_rows}


def _about(captures: Mapping[str, RoutingCapture], result: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Returns a result for the line under the title: the given one, or the traces' common model."""
    if result is not None:
        return result
    models = {str(capture.meta.get("model") or "") for capture in captures.values()}
    return {"config": {"model": models.pop()}} if len(models) == 1 else {}


def load_heatmap(captures: Captures, result: Mapping[str, Any] | None = None) -> Figure | None:
    """Left: each expert's load over the even share, by layer. Right: the same ranked, a line a layer."""
    named = _named(captures)
    if not named:
        return None
    layers = max(len(c.layers) for c in named.values())
    height = 1.0 + len(named) * max(2.6, 1.0 + 0.2 * min(layers, 32))
    figure, axes = new_figure(
        "Load of the experts / even share", _about(named, result), 11, height, len(named), 2,
        width_ratios=(3, 2),
    )  # fmt: skip
    for row, (name, capture) in enumerate(named.items()):
        heat, ranked = axes[2 * row : 2 * row + 2]
        loads = capture.counts().astype(float)
        share = loads / np.maximum(loads.mean(1, keepdims=True), 1e-9)
        image = heat_map(heat, share, vmin=0, vmax=max(2.0, float(share.max())))
        figure.colorbar(image, ax=heat, shrink=0.9)
        thin_ticks(heat.xaxis, range(capture.num_experts), _MOST_TICKS)
        thin_ticks(heat.yaxis, capture.layers)
        heat.set(xlabel="expert", ylabel="layer")
        skew = analysis.skew(loads)
        title = (
            f"max/mean {np.nanmean(skew.max_over_mean):.2f}, entropy {np.nanmean(skew.entropy):.3f} of even"
        )
        heat.set_title(f"{name}: {title}" if name else title, fontsize=9)
        rising = -np.sort(-share, axis=1)
        ranks = np.arange(1, capture.num_experts + 1)
        for line in rising:
            ranked.plot(ranks, np.maximum(line, 1e-3), color=COLORS[0], linewidth=0.9, alpha=0.6)
        ranked.axhline(1, color="#444444", linewidth=1, linestyle="--")
        ranked.annotate("even", (ranks[-1], 1), ha="right", va="bottom", fontsize=8)
        ranked.set_yscale("log")
        low = max(float(rising[rising > 0].min()) / 1.3, 1e-3)
        ranked.set_ylim(low, float(rising.max()) * 1.3)
        round_ticks(ranked.yaxis, *ranked.get_ylim())
        ranked.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        ranked.set(xlabel="experts of a layer, most loaded first", ylabel="load / even share")
    return figure


def co_activation_heatmap(
    captures: Captures, result: Mapping[str, Any] | None = None, layers: tuple[int, ...] | None = None
) -> Figure | None:
    """How many times as often two experts serve the same token as their popularity alone would have it.

    Experts stand in an order that brings those together which go together. None for more than can be told
    apart.

    Args:
        layers: of the model; None: the first, the middle and the last of each trace.

    Raises:
        ConfigError: a trace does not have such a layer.
    """
    named = {n: c for n, c in _named(captures).items() if c.top_k > 1 and c.num_experts <= _MOST_PAIRED}
    if not named:
        return None
    columns = max(len(layers or _three(c)) for c in named.values())
    size = 3.5
    figure, axes = new_figure(
        "Experts of a token: how often they meet, × independence", _about(named, result),
        1.2 + size * columns, 0.9 + (size + 0.1) * len(named), len(named), columns,
    )  # fmt: skip
    for row, (name, capture) in enumerate(named.items()):
        panels = axes[row * columns : (row + 1) * columns]
        chosen = layers or _three(capture)
        lifts = [analysis.co_activation_lift(analysis.co_activation(capture, layer)) for layer in chosen]
        top = max(1.5, *(float(np.nanpercentile(lift, 99.5)) for lift in lifts if np.isfinite(lift).any()))
        for axis, layer, lift in zip(panels, chosen, lifts, strict=False):
            order = _together(lift)
            shown = np.clip(lift[np.ix_(order, order)], 1 / top, top)
            image = heat_map(axis, shown, cmap="RdBu_r", norm=LogNorm(1 / top, top), aspect="equal")
            axis.set_facecolor(_GREY)
            axis.set_title(f"{name}, layer {layer}" if name else f"layer {layer}", fontsize=9)
            for side in (axis.xaxis, axis.yaxis):
                thin_ticks(side, order, _MOST_TICKS)
            axis.tick_params(axis="x", rotation=90)
        for axis in panels[len(chosen) :]:
            axis.set_visible(False)
        ticks = [tick for tick in _RATIOS if 1 / top <= tick <= top]
        bar = figure.colorbar(image, ax=panels, label="× independence", shrink=0.8, ticks=ticks)
        bar.ax.set_yticklabels([f"{tick:g}" for tick in ticks])
        bar.ax.minorticks_off()
        panels[0].set_ylabel("expert")
    return figure


def working_set_plot(
    captures: Captures, result: Mapping[str, Any] | None = None, model: ModelConfig | None = None
) -> Figure | None:
    """Distinct experts that a window visits, against its length: tokens of one sequence, and the engine's
    steps. A band from the least layer to the most; dashed, what independent, even choices would visit.

    Args:
        model: its bytes stand on the right, if it has the shape of all the traces.
    """
    named = _named(captures)
    if not named:
        return None
    figure, axes = new_figure("Working set of experts", _about(named, result), 11, 4.4, 1, 2)
    for axis, unit, label in zip(
        axes, ("tokens", "steps"), ("consecutive tokens of a sequence", "consecutive steps of the engine"),
        strict=True,
    ):  # fmt: skip
        longest = 1
        for i, (name, capture) in enumerate(named.items()):
            curve = locality.working_set(capture, unit=unit)
            share = 100 * curve.experts / capture.num_experts
            color = nth_color(i)
            look: dict[str, Any] = {"color": color, "markersize": 4, "linewidth": 1.4, "label": name}
            axis.plot(curve.windows, share.mean(0), "o-", **look)
            axis.fill_between(curve.windows, share.min(0), share.max(0), color=color, alpha=0.15, linewidth=0)
            longest = max(longest, int(curve.windows[-1]))
            if unit == "tokens":
                missed = (1 - capture.top_k / capture.num_experts) ** curve.windows
                axis.plot(curve.windows, 100 * (1 - missed), "--", color=color, linewidth=1, alpha=0.8)
        axis.set_xscale("log", base=2)
        axis.set_xticks([2**i for i in range(longest.bit_length())])
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set(ylim=(0, 102), xlabel=label)
        if model is not None:
            _bytes_axis(axis, named, model)
    axes[0].plot([], [], "--", color="#666666", linewidth=1, label="independent, even choices")
    axes[0].set_ylabel("experts visited, % of a layer's")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def temporal_locality_plot(captures: Captures, result: Mapping[str, Any] | None = None) -> Figure | None:
    """Left: how likely a sequence's next token visits an expert again, by layer, beside chance. Right: how
    far back the last visit to an expert lies, cumulated."""
    named = {name: c for name, c in _named(captures).items() if len(c.position) > len(c.requests)}
    if not named:
        return None
    figure, (reuse, distance) = new_figure("Temporal locality", _about(named, result), 11, 4.4, 1, 2)
    for i, (name, capture) in enumerate(named.items()):
        reused, layers, color = locality.temporal_locality(capture), capture.layers, nth_color(i)
        reuse.plot(layers, 100 * reused.reuse, "o-", color=color, markersize=4, linewidth=1.3, label=name)
        reuse.plot(layers, 100 * reused.chance, "_--", color=color, markersize=7, linewidth=1, alpha=0.8)
        summed = 100 * np.cumsum(np.nanmean(reused.distances, axis=0))
        distance.plot(np.arange(1, len(summed) + 1), summed, color=color, linewidth=1.4, label=name)
    reuse.plot([], [], "_--", color="#666666", linewidth=1, label="by popularity alone")
    reuse.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    reuse.set_ylim(bottom=0)
    reuse.margins(y=0.2)
    reuse.set(xlabel="layer", ylabel="visits repeated by the next token, %")
    distance.set_xscale("log", base=2)
    distance.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    distance.set(ylim=(0, 102), xlabel="tokens since the sequence's last visit, at most")
    distance.set_ylabel("visits, % (the rest is farther or the first)")
    reuse.legend(frameon=False, fontsize=8)
    return figure


def load_over_time_plot(captures: Captures, result: Mapping[str, Any] | None = None) -> Figure | None:
    """Left: each expert's load over its own mean share, window by window, in the layer where it changes most.
    Right: the skew within a window, in the mean over layers, beside that of as many tokens drawn from the
    whole trace: few tokens are never even."""
    named = {name: c for name, c in _named(captures).items() if c.num_steps > 1}
    if not named:
        return None
    about, height = _about(named, result), 1.0 + 2.9 * len(named)
    figure, axes = new_figure("Load over time", about, 11, height, len(named), 2, width_ratios=(3, 2))
    for row, (name, capture) in enumerate(named.items()):
        heat, line = axes[2 * row : 2 * row + 2]
        loads, starts = analysis.load_over_time(capture)
        burst = analysis.burstiness(capture)
        at = int(np.nanargmax(burst)) if np.isfinite(burst).any() else 0
        share = loads[:, at] / np.maximum(loads[:, at].sum(1, keepdims=True), 1)
        ratio = share * capture.num_experts
        image = heat_map(heat, ratio.T, vmin=0, vmax=max(2.0, float(np.percentile(ratio, 99.5))))
        figure.colorbar(image, ax=heat, label="load / even share", shrink=0.9)
        title = f"layer {capture.layers[at]}: {burst[at]:.1f} × the changes of chance"
        heat.set_title(f"{name}, {title}" if name else title, fontsize=9)
        thin_ticks(heat.xaxis, starts, 8)
        thin_ticks(heat.yaxis, range(capture.num_experts), _MOST_TICKS)
        heat.set(xlabel="step", ylabel="expert")
        within = np.nanmean(analysis.skew(loads).max_over_mean, axis=1)
        mixed = _shuffled_skew(capture, len(starts))
        whole = float(np.nanmean(analysis.skew(capture.counts()).max_over_mean))
        line.plot(starts, within, "o-", color=COLORS[0], markersize=3, linewidth=1.2, label="in a window")
        line.plot(starts, mixed, color="#666666", linewidth=1.2, label="as many tokens of any time")
        line.axhline(whole, color=COLORS[1], linewidth=1.2, linestyle="--", label="in the whole trace")
        line.set_ylim(bottom=1)
        line.margins(y=0.2)
        line.set(xlabel="step", ylabel="most loaded expert / mean")
    legend_below(figure, axes[1:2], 3, loc="outside lower right", fontsize=8)
    return figure


def placement_over_time_plot(result: Mapping[str, Any]) -> Figure | None:
    """The heaviest device's load under each placement, with dots where experts have moved."""
    if not result.get("placement_over_time"):
        return None
    figure, (axis,) = new_figure("Placement over time", result, 8, 3.8)
    for i, row in enumerate(result["placement_over_time"]):
        look: dict[str, Any] = {"color": nth_color(i), "markersize": 4, "linewidth": 1.3}
        axis.plot(row["imbalances"], "-o", markevery=row["moved_at"], label=row["placement"], **look)
    axis.set(ylim=(1, None), xlabel="window", ylabel="heaviest device / mean")
    legend_below(figure, [axis])
    return figure


def _shuffled_skew(capture: RoutingCapture, windows: int) -> np.ndarray:
    """float64 `[W]`: max/mean of windows as long, whose tokens are of any time; the mean over layers."""
    order = np.random.default_rng(0).permutation(capture.num_rows)
    mixed = dataclasses.replace(capture, ids=capture.ids[order])
    return np.nanmean(analysis.skew(analysis.load_over_time(mixed, windows)[0]).max_over_mean, axis=1)


def _three(capture: RoutingCapture) -> tuple[int, ...]:
    """The first, the middle and the last layer."""
    at = sorted({0, len(capture.layers) // 2, len(capture.layers) - 1})
    return tuple(capture.layers[i] for i in at)


def _together(lift: np.ndarray) -> np.ndarray:
    """Experts in the order of a tree of average linkage, so that those that meet often are neighbours."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    if len(lift) < 3:
        return np.arange(len(lift))
    near = np.nan_to_num(lift, nan=1.0)
    apart = 1 / (1 + (near + near.T) / 2)
    np.fill_diagonal(apart, 0.0)
    return leaves_list(linkage(squareform(apart, checks=False), "average", optimal_ordering=len(lift) <= 256))


def _bytes_axis(axis: Axes, named: Mapping[str, RoutingCapture], model: ModelConfig) -> None:
    """Bytes of the experts of all layers, on the right; only where all traces have the model's shape."""
    from moejax.perf.sizes import DTYPE_BYTES, expert_params

    layers = sum(model.moe_layers)
    if any((len(c.layers), c.num_experts) != (layers, model.num_experts) for c in named.values()):
        return
    whole = layers * model.num_experts * expert_params(model) * DTYPE_BYTES[model.dtype]
    unit, scale = ("GB", 1e9) if whole >= 1e9 else ("MB", 1e6)

    def size_of(share: Any) -> Any:
        return share / 100 * whole / scale

    def share_of(size: Any) -> Any:
        return size * scale / whole * 100

    right = axis.secondary_yaxis("right", functions=(size_of, share_of))
    right.set_ylabel(f"weights of all layers, {unit} in {model.dtype}", fontsize=8)
