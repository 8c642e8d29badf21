"""Table and plots of `experiments.scaling`. No JAX here."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from moejax.report.figure import new_figure, save_figures
from moejax.report.style import COLORS
from moejax.report.tables import number

_ROLES = ("tensor", "exchange", "node", "local", "pipeline", "data", "kv")
_PARTS = (
    ("roofline", "memory or compute", 0),
    ("link_ms", "links: bytes", 1),
    ("link_latency_ms", "links: latency", 4),
)


def print_scaling(result: Mapping[str, Any], console: Console) -> None:
    """A row per layout, and why a layout has none."""
    kind, section = result["hardware"]["kind"], result["config"].get("scaling", {})
    load = f"{section.get('batch_size')} sequences of {section.get('context_len')} tokens"
    prompts = f"{section.get('num_prompts')} prompts of {section.get('prompt_len')}"
    table = Table(
        title=f"Layouts, modelled on {kind} ({load}; {prompts})",
        box=box.SIMPLE_HEAD,
        caption="of one device (!: more memory than it has); ms modelled, nothing overlaps; even routing",
    )
    measured = any(row.get("measured_devices") for row in result["cases"])
    columns = ["layout", "GPUs", "weights\nGB", "+ cache\nGB", "decode\nKB sent", "ms", "of it\nlinks",
               "tok/s\n/GPU", "prefill\nMB sent", "ms"]  # fmt: skip
    if measured:
        columns += ["CPU\nms", "bytes\nagree"]
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i == 0 else "right", no_wrap=True)
    for row in result["cases"]:
        if row["error"] is None:
            table.add_row(*_cells(row, measured))
    console.print(table)
    if result.get("routing_trace"):
        _print_routed(result, console)
    for row in result["cases"]:
        for key in ("error", "not_measured"):
            if row.get(key):
                console.print(f"{row['layout']}: {row[key]}", style="yellow", markup=False, soft_wrap=True)
    small = [r for r in result["cases"] if r.get("measured_devices") not in (None, r["devices"])]
    for row in small:
        console.print(
            f"{row['layout']}: measured in a smaller form on {row['measured_devices']} virtual devices",
            markup=False,
        )


def _cells(row: Mapping[str, Any], measured: bool) -> list[str]:
    links = row["decode_link_ms"] + row["decode_link_latency_ms"]
    cells = [
        row["layout"],
        str(row["devices"]),
        number(row["weights_bytes"] / 1e9),
        number(row["memory_bytes"] / 1e9) + ("" if row["fits"] is not False else " !"),
        number(row["decode_comm_bytes"] / 1e3),
        number(row["decode_ms"]),
        f"{links / row['decode_ms']:.0%}",
        number(row["tokens_per_s_device"]),
        number(row["prefill_comm_bytes"] / 1e6),
        number(row["prefill_ms"]),
    ]
    if measured:
        agree = row.get("formulas_agree")
        cells += [number(row.get("cpu_decode_ms")), "–" if agree is None else "yes" if agree else "NO"]
    return cells


def _print_routed(result: Mapping[str, Any], console: Console) -> None:
    """Prints the rows that the trace's own steps send, beside an even routing."""
    about = result["routing_trace"]
    table = Table(
        title=f"Under the routing of {about['path']} ({about['requests']} requests, {about['steps']} steps)",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        caption="KB of a device and step, all layers. even: all choices equally likely; mean, max: of ranks\n"
        "sent: by the exchange, with room that stays empty; load: heaviest rank's assignments / mean",
    )
    columns = ["layout", "phase", "exchange", "load", "even\nKB", "mean\nKB", "max\nKB", "max /\nmean",
               "sent\nKB", "if\neven"]  # fmt: skip
    for i, name in enumerate(columns):
        table.add_column(name, justify="left" if i < 3 else "right", no_wrap=True)
    for row in result["cases"]:
        for phase in ("decode", "prefill"):
            key = f"routed_{phase}_"
            if row.get(f"{key}load_imbalance") is None:
                continue
            sizes = ["bytes_even", "bytes_mean", "bytes_max", "imbalance", "wire_bytes", "wire_bytes_even"]
            values = [row.get(key + name) for name in sizes]
            table.add_row(
                row["layout"], phase, row[f"{key}exchange"], f"{row[f'{key}load_imbalance']:.2f}",
                *("–" if v is None else f"{v:.2f}" if n == "imbalance" else number(v / 1e3)
                  for n, v in zip(sizes, values, strict=True)),
            )  # fmt: skip
    console.print(table)
    for row in result["cases"]:
        if row.get("routed_idle_groups"):
            console.print(
                f"{row['layout']}: {row['routed_idle_groups']} of its groups get none of the trace's"
                f" {about['requests']} requests, which adds to its imbalance",
                markup=False, highlight=False, soft_wrap=True,
            )  # fmt: skip


def _routed_plot(result: Mapping[str, Any]) -> Figure | None:
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


def save_scaling_plots(result: Mapping[str, Any], out_dir: Path) -> list[Path]:
    """Bytes by axis, memory, and modelled times; a bar for each layout. Under a trace, a second picture."""
    rows = [row for row in result["cases"] if row["error"] is None]
    if not rows:
        return []
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
        np.array([row[f"{name}_bytes"] / 1e9 for row in rows])
        for name in ("expert_weights", "weights", "cache")
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
    return save_figures({"scaling": figure, "routing": _routed_plot(result)}, out_dir)


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
