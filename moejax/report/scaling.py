"""Table and plots of `experiments.scaling`. No JAX here."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from moejax.report.figure import new_figure
from moejax.report.style import COLORS
from moejax.report.tables import Column, column_table, number, print_lines

_ROLES = ("tensor", "exchange", "node", "local", "pipeline", "data", "kv")
_PARTS = (
    ("roofline", "memory or compute", 0),
    ("link_ms", "links: bytes", 1),
    ("link_latency_ms", "links: latency", 4),
)


def _links(row: Mapping[str, Any]) -> float:
    return (row["decode_link_ms"] + row["decode_link_latency_ms"]) / row["decode_ms"]


_COLUMNS = (
    Column("layout", "layout", left=True),
    Column("GPUs", "devices"),
    Column("weights\nGB", "device_weight_bytes", 1e-9),
    Column(
        "+ cache\nGB",
        lambda row: number(row["device_memory_bytes"] / 1e9) + (" !" if row["fits"] is False else ""),
    ),
    Column("decode\nKB sent", "decode_comm_bytes", 1e-3),
    Column("ms", "decode_ms"),
    Column("of it\nlinks", _links, cell="{:.0%}".format),
    Column("tok/s\n/GPU", "tokens_per_s_device"),
    Column("prefill\nMB sent", "prefill_comm_bytes", 1e-6),
    Column("ms", "prefill_ms"),
    Column("CPU\nms", "cpu_decode_ms"),
    Column("bytes\nagree", "formulas_agree", cell=lambda agree: "yes" if agree else "NO"),
)
# Of a phase; keys are the ends of its fields' names.
_ROUTED = (
    Column("exchange", "exchange", left=True),
    Column("load", "load_imbalance", cell="{:.2f}".format),
    Column("even\nKB", "bytes_even", 1e-3),
    Column("mean\nKB", "bytes_mean", 1e-3),
    Column("max\nKB", "bytes_max", 1e-3),
    Column("max /\nmean", "imbalance", cell="{:.2f}".format),
    Column("sent\nKB", "wire_bytes", 1e-3),
    Column("if\neven", "wire_bytes_even", 1e-3),
)


def print_scaling(result: Mapping[str, Any], console: Console) -> None:
    """A row per layout, and why a layout has none."""
    kind, section = result["hardware"]["kind"], result["config"].get("scaling", {})
    load = f"{section.get('batch_size')} sequences of {section.get('context_len')} tokens"
    prompts = f"{section.get('num_prompts')} prompts of {section.get('prompt_len')}"
    fitting = [row for row in result["cases"] if row["error"] is None]
    console.print(
        column_table(
            f"Layouts, modelled on {kind} ({load}; {prompts})",
            _COLUMNS,
            fitting,
            "of one device (!: more memory than it has); ms modelled, nothing overlaps; even routing",
        )
    )
    for row in fitting:
        if "split_latents_decode_ms" in row:
            memory, took = row["split_latents_memory_bytes"] / 1e9, row["split_latents_decode_ms"]
            text = (
                f"latents split by tokens, {number(memory)} GB and {number(took)} ms a decode step (modelled)"
            )
            print_lines(console, [f"{row['layout']}: {text}"])
    if result.get("routing_trace"):
        _print_routed(result, console)
    for key in ("error", "not_measured"):
        without = [row for row in result["cases"] if row.get(key)]
        print_lines(console, [f"{row['layout']}: {row[key]}" for row in without], "yellow")
    small = [r for r in result["cases"] if r.get("measured_devices") not in (None, r["devices"])]
    smaller = "measured in a smaller form on {} virtual devices"
    print_lines(console, [f"{row['layout']}: {smaller.format(row['measured_devices'])}" for row in small])


def _print_routed(result: Mapping[str, Any], console: Console) -> None:
    """Prints the rows that the trace's own steps send, beside an even routing."""
    about = result["routing_trace"]
    rows = [
        {"layout": row["layout"], "phase": phase}
        | {str(column.key): row.get(f"routed_{phase}_{column.key}") for column in _ROUTED}
        for row in result["cases"]
        for phase in ("decode", "prefill")
        if row.get(f"routed_{phase}_load_imbalance") is not None
    ]
    table = column_table(
        f"Under the routing of {about['path']} ({about['requests']} requests, {about['steps']} steps)",
        (Column("layout", "layout", left=True), Column("phase", "phase", left=True), *_ROUTED),
        rows,
        "KB of a device and step, all layers. even: all choices equally likely; mean, max: of ranks\n"
        "sent: by the exchange, with room that stays empty; load: heaviest rank's assignments / mean",
    )
    console.print(table)
    idle = [row for row in result["cases"] if row.get("routed_idle_groups")]
    text = f"of its groups get none of the trace's {about['requests']} requests, which adds to its imbalance"
    print_lines(console, [f"{row['layout']}: {row['routed_idle_groups']} {text}" for row in idle])


def routed_plot(result: Mapping[str, Any]) -> Figure | None:
    """Bytes of a device under an even routing and under the trace; load of the heaviest rank."""
    rows = [row for row in result["cases"] if row.get("routed_decode_load_imbalance") is not None]
    sent = [row for row in rows if row.get("routed_decode_bytes_even") is not None]
    if not rows:
        return None
    columns = 3 if sent else 1
    figure, axes = new_figure("Expert parallelism under a trace", result, 4.2 * columns, 4.4, 1, columns)
    for axis, phase, unit, scale in zip(
        axes[1:], ("decode", "prefill"), ("KB", "MB"), (1e3, 1e6), strict=False
    ):
        bars = [("even routing", "bytes_even", 7), ("the trace, mean", "bytes_mean", 0),
                ("the trace, largest rank", "bytes_max", 1)]  # fmt: skip
        names = [row["layout"] for row in sent]
        values = [(label, [(row.get(f"routed_{phase}_{key}") or 0) / scale for row in sent], color)
                  for label, key, color in bars]  # fmt: skip
        _side_by_side(axis, names, values)
        axis.set_title(f"{phase}: {unit} of rows sent by a device in a step", fontsize=10)
    phases = [("decode", 0), ("prefill", 1)]
    loads = [(p, [row.get(f"routed_{p}_load_imbalance") or 0 for row in rows], c) for p, c in phases]
    _side_by_side(axes[0], [row["layout"] for row in rows], loads)
    axes[0].axhline(1, color="#444444", linewidth=1, linestyle="--")
    axes[0].set_title("assignments on the heaviest rank / mean", fontsize=10)
    return figure


def _side_by_side(axis: Any, names: Sequence[str], bars: Sequence[tuple[str, Sequence[float], int]]) -> None:
    width = 0.8 / len(bars)
    for number_, (label, values, color) in enumerate(bars):
        places = [i + (number_ - (len(bars) - 1) / 2) * width for i in range(len(names))]
        axis.bar(places, values, width * 0.92, color=COLORS[color], label=label)
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    axis.legend(fontsize=8, frameon=False)
    axis.set_ylim(top=max(max(values) for _, values, _ in bars) * 1.35 or None)


def layouts_plot(result: Mapping[str, Any]) -> Figure | None:
    """Bytes by axis, memory, and modelled times; a bar for each layout."""
    rows = [row for row in result["cases"] if row["error"] is None]
    if not rows:
        return None
    names = [row["layout"] for row in rows]
    figure, axes = new_figure("Layouts", result, 12, 9, rows=2, columns=3)
    for axis, phase, scale, unit in (
        (axes[0], "decode", 1e3, "KB"),
        (axes[3], "prefill", 1e6, "MB"),
    ):
        parts = [
            (role, [row.get(f"{phase}_comm_bytes_{role}", 0.0) / scale for row in rows]) for role in _ROLES
        ]
        _stack(axis, names, [(role, values, i) for i, (role, values) in enumerate(parts) if any(values)])
        axis.set_title(f"{phase}: {unit} sent by a device in a step", fontsize=10)
    for axis, phase in ((axes[1], "decode"), (axes[4], "prefill")):
        stacked = []
        for key, label, color in _PARTS:
            values = [
                max(row[f"{phase}_memory_ms"], row[f"{phase}_compute_ms"])
                if key == "roofline"
                else row[f"{phase}_{key}"]
                for row in rows
            ]
            stacked.append((label, values, color))
        waits = [row[f"{phase}_ms"] - sum(part[1][i] for part in stacked) for i, row in enumerate(rows)]
        if any(wait > 1e-9 for wait in waits):
            stacked.append(("other stages and microbatches", waits, 7))
        _stack(axis, names, stacked)
        axis.set_title(f"{phase}: modelled ms a step, {result['hardware']['kind']}", fontsize=10)
    experts, weights, cache = (
        np.array([row[f"device_{name}_bytes"] / 1e9 for row in rows])
        for name in ("expert_weight", "weight", "cache")
    )
    sizes = [("experts", experts, 0), ("other weights", weights - experts, 2), ("cache", cache, 1)]
    _stack(axes[2], names, sizes)
    axes[2].set_title("GB on a device", fontsize=10)
    memory = result["hardware"]["memory"]
    if memory:
        axes[2].axhline(memory / 1e9, color="#444444", linewidth=1, linestyle="--")
        axes[2].annotate("its memory", (0, memory / 1e9), va="bottom", fontsize=8)
    _stack(axes[5], names, [("", [row["tokens_per_s_device"] for row in rows], 0)])
    axes[5].set_title("decode: modelled tokens/s per GPU", fontsize=10)
    axes[5].yaxis.set_major_formatter("{x:,.0f}")
    return figure


def _stack(axis: Any, names: Sequence[str], parts: Sequence[tuple[str, Any, int]]) -> None:
    """Bars of stacked parts (label, values, colour)."""
    bottom = np.zeros(len(names))
    for label, values, color in parts:
        axis.bar(range(len(names)), values, bottom=bottom, color=COLORS[color], label=label, width=0.7)
        bottom = bottom + values
    axis.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8)
    if any(label for label, _, _ in parts):
        axis.legend(fontsize=8, frameon=False)
        axis.set_ylim(top=max(bottom) * 1.3 or None)  # room for the legend
