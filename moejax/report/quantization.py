"""Table and plots of `experiments.quantization`. No JAX here."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from moejax.report.figure import (
    heat_map,
    legend_below,
    new_figure,
    round_ticks,
    thin_ticks,
    write_cells,
)
from moejax.report.style import COLORS, nth_color, run_title
from moejax.report.tables import Column, column_table, metric_columns, print_lines, rounded


def _figure(value: float | str) -> str:
    return value if isinstance(value, str) else rounded(value, 100, 1000)


def loss_words(case: Mapping[str, Any]) -> str | None:
    """Writes a case's loss of perplexity with its interval, None where it has none."""
    if case.get("perplexity_loss_percent") is None:
        return None
    value, low, high = (case[f"perplexity_loss_percent{end}"] for end in ("", "_low", "_high"))
    digits = 2 if abs(value) < 10 else 1
    figures = f"{value:+.{digits}f} [{low:+.{digits}f} {high:+.{digits}f}]"
    return f"~{figures}" if case["inside_noise"] else figures


def _routing_part(case: Mapping[str, Any]) -> str | None:
    if case.get("routing_delta") is None:
        return None
    part = 100 * case["routing_delta"] / (case["perplexity"] - case["perplexity_delta"])
    return f"{'~' if case['routing_inside_noise'] else ''}{part:+.2f}"


# Two tables, each for 100 columns.
_LOSSES: tuple[Column, ...] = (
    *metric_columns("bits_per_weight", "cache_bits", "model_bytes", "perplexity", cell=_figure),
    Column("loss %\n\\[interval]", loss_words),
    Column("through\nrouting", _routing_part),
    Column("KL\nmnat", "kl", 1e3, _figure),
    Column("worst\ndoc. %", "document_loss_percent", 1, _figure),
    *metric_columns("top1_agreement", cell=_figure),
)
_ROUTING = metric_columns(
    "router_flips", "router_flips_replayed", "load_shift", "expert_error_rare", "expert_error_popular",
    "expert_error_weighted", "popularity_correlation", "quantize_seconds", "decode_tokens_per_s",
    "decode_ratio", "decode_percent_of_bound", cell=_figure,
)  # fmt: skip
_LOSSES_NOTE = """\
loss: of perplexity, % of full precision, with its bootstrap interval; ~ inside the noise
through routing: what of it full precision's routing, replayed, takes away: at times more than all
worst doc.: loss on the document of the text that loses most
"""
_ROUTING_NOTE = """\
flips: tokens whose set of experts differs; own: by a layer itself, the routing before it replayed
shift: of the experts' load; error: of the outputs of the rarest and the most popular experts
by load: as a token meets it, each expert's weighted with its load; rank corr.: of error with load
"""
_DECODE_NOTE = """\
decode: on this {device}, × full precision's; bound: what memory bandwidth and compute allow for what is held
"""


def _table(cases: Sequence[Mapping[str, Any]], columns: Sequence[Column], title: str) -> Table:
    several = len({case.get("cache_bits") for case in cases if case["error"] is None}) > 1
    return column_table(
        title,
        [Column("method", "name", left=True), *(c for c in columns if several or c.key != "cache_bits")],
        cases,
        style=lambda case: None if case["error"] is None else "red",
        padding=(0, 1, 0, 0),
        collapse_padding=False,
    )


def conclusions(result: Mapping[str, Any]) -> list[str]:
    """Says, a line each, what the intervals allow to conclude."""
    text, cases = result["text"], result["cases"]
    percent = f"{100 * text['confidence']:g} %"
    alike = [f"{d['second']} = {d['first']}" for d in result["differences"] if d["inside_noise"]]
    basis = f"{percent} intervals, {text['resamples']:,} resamples of {text['windows']} windows"
    lines = [f"inside the noise ({basis}): {', '.join(alike) if alike else 'no pair'}"]
    for case in cases:
        if case.get("loss_vs_rtn") is not None:
            low, high = case["loss_vs_rtn_low"], case["loss_vs_rtn_high"]
            lines.append(
                f"{case['name']} loses {case['loss_vs_rtn']:.2f} [{low:.2f}, {high:.2f}] times"
                f" what {case['rtn']} loses"
            )
        elif case.get("rtn") is not None:
            lines.append(
                f"{case['name']}: {case['rtn']}'s loss is inside the noise, so there is no share of it"
            )
    for key, text in (
        ("cold_experts", "{} experts saw too little calibration text (fallback)"),
        ("damping_raised", "damping raised for {} matrices"),
    ):
        lines += [f"{case['name']}: {text.format(case[key])}" for case in cases if case.get(key)]
    return lines


def print_quantization(result: Mapping[str, Any], console: Console) -> None:
    """A table of the methods' sizes and losses, one of their routing, experts' errors and time; what can be
    concluded, and in red what failed."""
    text, cases = result["text"], result["cases"]
    of = f"{text['tokens']:,} held-out tokens in {text['windows']} windows"
    console.print(_table(cases, _LOSSES, f"quantization: {run_title(result)}\n{of}"))
    console.print(_LOSSES_NOTE, highlight=False)
    if any(case.get("router_flips") is not None for case in cases):
        sound = [case for case in cases if case["error"] is None]
        console.print(_table(sound, _ROUTING, "routing, experts, time"))
        device = cases[0].get("decode_device")
        decode = _DECODE_NOTE.format(device=device.upper()) if device else ""
        trace = (result.get("popularity") or {}).get("routing_trace")
        console.print(_ROUTING_NOTE + decode, highlight=False)
        lines = [f"load, rare and popular: in the routing trace {trace}"] if trace else []
        unseen = max(case.get("expert_load_unmeasured") or 0.0 for case in cases)
        if unseen >= 0.001:
            lines.append(
                f"{100 * unseen:.1f} % of the load is on experts that the text does not visit: no error is"
                " known of them, and they are left out"
            )
        print_lines(console, lines)
    print_lines(console, conclusions(result))
    failed = [case for case in cases if case["error"] is not None]
    print_lines(console, [f"{case['name']} failed: {case['error']}" for case in failed], "red")
    if result.get("wandb_group"):
        print_lines(console, [f"W&B: one run per method, in group {result['wandb_group']}"])


def _sound(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Rows of the methods that ran."""
    return [case for case in result["cases"] if case["error"] is None and "perplexity_delta" in case]


def pareto_plot(result: Mapping[str, Any]) -> Figure | None:
    """Loss against bits, with intervals: of the weights, and in a panel of its own of the cache."""
    rows = _sound(result)
    weights = [row for row in rows if row["changes_weights"]]
    cached = [row for row in rows if row["kv_cache"] != "auto"]
    panels = [("bits per weight, scales included", "bits_per_weight", weights)] if weights else []
    panels += [("bits per cached number", "cache_bits", cached)] if cached else []
    if not panels:
        return None
    ratios = [3 if key == "bits_per_weight" else 2 for _, key, _ in panels]
    width = 3 + 2 * sum(ratios)
    figure, axes = new_figure(
        "Perplexity against size", result, width, 5, 1, len(panels), width_ratios=ratios
    )
    for axis, (label, key, chosen) in zip(axes, panels, strict=True):
        _pareto_panel(axis, key, chosen)
        axis.set_xlabel(label)
    axes[0].set_ylabel("perplexity lost, % of full precision")
    return figure


def _pareto_panel(axis: Axes, key: str, rows: Sequence[Mapping[str, Any]]) -> None:
    axis.axhline(0, color="#444444", linewidth=1)
    axis.set_xscale("log", base=2)
    best = sorted((r for r in rows if r.get("pareto")), key=lambda r: r[key])
    if key == "bits_per_weight" and len(best) > 1:
        axis.step(
            [r[key] for r in best], [r["perplexity_loss_percent"] for r in best], where="post",
            color="#999999", linewidth=1.2, linestyle="--", label="frontier",
        )  # fmt: skip
    axis.plot([], [], "o", color="#444444", markerfacecolor="white", label="inside the noise")
    axis.legend(frameon=False, fontsize=8, loc="upper right")
    sizes = [row[key] for row in rows]
    places, labels = [0.0] * len(rows), list[tuple[float, float, str, str]]()
    for size in set(sizes):
        # Points of one size stand a little apart, so that their intervals can be told apart.
        alike = sorted((i for i in range(len(rows)) if sizes[i] == size), key=lambda i: -_percent(rows[i]))
        for number, i in enumerate(alike):
            places[i] = size * (1 + 0.022 * (number - (len(alike) - 1) / 2))
        right = places[alike[-1]]
        labels += [(right, _percent(rows[i]), rows[i]["name"], nth_color(i)) for i in alike]
    for i, (place, row) in enumerate(zip(places, rows, strict=True)):
        value, low, high = (row[f"perplexity_loss_percent{end}"] for end in ("", "_low", "_high"))
        color = nth_color(i)
        axis.errorbar(
            [place], [value], yerr=[[max(value - low, 0)], [max(high - value, 0)]], fmt="o", capsize=3,
            color=color, markerfacecolor="white" if row["inside_noise"] else color, markersize=6,
        )  # fmt: skip
    _label_points(axis, labels)
    low, high = min(sizes) / 1.3, max(sizes) * 1.9
    axis.set_xlim(low, high)
    round_ticks(axis.xaxis, low, high)
    axis.set_xticks([b for b in (3, 4, 5, 6, 8, 10, 12, 16, 24, 32) if low <= b <= high])


def _percent(row: Mapping[str, Any]) -> float:
    return float(row["perplexity_loss_percent"])


def _label_points(axis: Axes, points: Sequence[tuple[float, float, str, str]]) -> None:
    """Names right of their places (place, height, name, colour), moved up where they would cover another."""
    axis.margins(y=0.15)
    axis.relim()
    axis.autoscale_view(scalex=False)
    bottom, top = axis.get_ylim()
    step, placed = (top - bottom) * 0.045, list[tuple[float, float]]()
    for x, y, name, color in sorted(points, key=lambda p: p[1]):
        at = y
        while any(abs(at - other) < step and 0.6 < x / where < 1.7 for where, other in placed):
            at += step / 4
        placed.append((x, at))
        axis.annotate(
            name, (x, at), xytext=(8, 0), textcoords="offset points", fontsize=8, va="center", color=color,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.85},
        )  # fmt: skip


def heatmaps(result: Mapping[str, Any], details: Mapping[str, Any]) -> Figure | None:
    """Layers × methods: router flips, free and with the layers before replayed, and the shift of load."""
    names = [r["name"] for r in _sound(result) if details.get(r["name"], {}).get("router_flips") is not None]
    if not names:
        return None
    first = details[names[0]]
    layers = [i for i, sparse in enumerate(first["moe_layers"]) if sparse]
    if not layers:
        return None
    panels = (
        ("router_flips", "tokens whose experts differ, %"),
        ("router_flips_replayed", "by a layer itself, %\n(routing before it replayed)"),
        ("load_shift", "shift of expert load, %"),
    )
    height = 2.4 + 0.32 * max(len(layers), 3)
    figure, axes = new_figure("Routing by layer", result, 3.2 + 3 * (1.2 + 0.42 * len(names)), height, 1, 3)
    for axis, (key, title) in zip(axes, panels, strict=True):
        values = 100 * np.array([[float(details[name][key][layer]) for name in names] for layer in layers])
        image = heat_map(axis, values, vmin=0, vmax=max(float(np.nanmax(values)), 1e-9))
        axis.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
        thin_ticks(axis.yaxis, layers)
        if values.size <= 320:
            write_cells(axis, image, values, lambda value: rounded(value, 1, 10))
        axis.set_title(title, fontsize=9)
    axes[0].set_ylabel("layer")
    return figure


def popularity_plot(result: Mapping[str, Any], details: Mapping[str, Any]) -> Figure | None:
    """Experts' output errors: by popularity group, and each expert of each layer for itself."""
    names = [r["name"] for r in _sound(result) if r.get("expert_error_rare") is not None]
    if not names:
        return None
    figure, (lines, cloud) = new_figure("Experts' errors by popularity", result, 11, 4.6, 1, 2)
    for i, name in enumerate(names):
        experts = details[name]
        style = "o-" if i < len(COLORS) else "s--"
        color = nth_color(i)
        bins = 100 * np.array(experts["popularity_bins"], float)
        lines.plot(range(1, len(bins) + 1), bins, style, color=color, linewidth=1.3, markersize=4, label=name)
        error, share = (np.array(experts[key], float) for key in ("expert_error", "expert_share"))
        seen = np.isfinite(error) & (share > 0)
        relative = (share * share.shape[1])[seen]
        cloud.plot(relative, 100 * error[seen], ".", color=color, markersize=4, alpha=0.7)
    count = len(details[names[0]]["popularity_bins"])
    lines.set_xticks(range(1, count + 1), ["rarest", *[""] * (count - 2), "most popular"][:count])
    lines.set_xlabel("experts of each layer, grouped by share of tokens")
    lines.set_ylabel("relative error of an expert's output, %")
    cloud.set_xlabel("an expert's load / even share")
    for axis in (lines, cloud):
        axis.set_yscale("log")
        round_ticks(axis.yaxis, *axis.get_ylim())
    legend_below(figure, [lines], fontsize=8)
    return figure


def replay_plot(result: Mapping[str, Any]) -> Figure | None:
    """Bars of the perplexity lost by the weights (routing replayed), by the routing and by both."""
    rows = [r for r in _sound(result) if r.get("replayed_delta") is not None]
    if not rows:
        return None
    figure, (axis,) = new_figure("Weights and routing", result, max(6.0, 2.5 + 0.95 * len(rows)), 4.6)
    places = np.arange(len(rows))
    base = [r["perplexity"] - r["perplexity_delta"] for r in rows]
    for offset, key, label, color in (
        (-0.27, "replayed_delta", "weights (routing replayed)", COLORS[0]),
        (0.0, "routing_delta", "routing (free less replayed)", COLORS[1]),
        (0.27, "perplexity_loss_percent", "both (routing free)", "#999999"),
    ):
        scale = 1.0 if key == "perplexity_loss_percent" else 100 / np.c_[base]
        values = scale * np.array([[r[key], r[f"{key}_low"], r[f"{key}_high"]] for r in rows])
        spans = np.abs(values[:, 1:].T - values[:, 0])
        axis.bar(places + offset, values[:, 0], 0.25, yerr=spans, color=color, label=label, capsize=2,
                 error_kw={"elinewidth": 1, "ecolor": "#333333"})  # fmt: skip
    axis.axhline(0, color="#444444", linewidth=1)
    axis.set_xticks(places, [r["name"] for r in rows], rotation=25, ha="right", fontsize=8)
    axis.set_ylabel("perplexity lost, % of full precision")
    axis.legend(frameon=False, fontsize=8)
    return figure
