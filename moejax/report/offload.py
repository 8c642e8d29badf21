"""Tables and plot of `experiments.offload`. No JAX here."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from moejax.report.figure import legend_below, new_figure
from moejax.report.style import nth_color, run_title
from moejax.report.tables import Column, column_table, metric_columns, rounded

_NOTE = """\
hits: % of the accesses; gap: to Belady's, in points; both with their bootstrap interval over traces
moved: MB of experts without prefetch; stall: % of the time that waits for experts, without prefetch
and with the experts prefetched that the layer visited a token before, or that a table foresees
"""

_TIERS = """\
hits of the experts needed, beside Belady's on the same routing; misses, bytes moved to the device and read
from disk a step; wait: of the time; precision and recall of what was prefetched"""


def _percent(value: float) -> str:
    return rounded(value, 100, 1000)


def _between(name: str, row: Mapping[str, Any]) -> str | None:
    if row.get(name) is None:
        return None
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    ends = "" if low is None else f" [{_percent(100 * low)}, {_percent(100 * high)}]"
    return f"{_percent(100 * value)}{ends}"


def print_offload(result: Mapping[str, Any], console: Console) -> None:
    """A row for each resident share and policy, and one for each predictor."""
    columns = (
        Column("resident\n%", "resident_share", 100, _percent, once=True),
        Column("policy", "policy", left=True),
        Column("hits %", partial(_between, "hit_rate")),
        Column("gap", partial(_between, "belady_gap")),
        Column("moved\nMB", "missed_bytes", 1e-6, _percent),
        *(
            Column(f"stall %\n{name}", f"stall_share{end}", 100, _percent)
            for name, end in (("", ""), ("previous", "_previous"), ("table", "_transition"))
        ),
    )
    about = result["offload"]
    of = f"{about['accesses']:,} accesses in {about['traces']} traces"
    title = f"experts resident: {run_title(result)}\n{of}"
    console.print(column_table(title, columns, result["cases"], section=lambda row: row["resident_share"]))
    predictors = [Column("predictor", "predictor", left=True)]
    predictors += [Column(f"{key} %", partial(_between, key)) for key in ("precision", "recall")]
    console.print(column_table(None, predictors, result["predictors"]))
    console.print(_NOTE, highlight=False)


def tiers_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a line for each engine with experts in tiers: what it finds resident, and what it waits for."""
    columns = [Column(name, name, left=True) for name in ("variant", "tier", "policy")]
    columns.append(Column("resident\n%", "resident_share", 100, _percent))
    names = ("hit_rate", "best_hit_rate", "step_misses", "step_moved_bytes", "step_read_bytes", "wait_share")
    columns += metric_columns(*names)
    if any(row["precision"] is not None for row in rows):
        columns += metric_columns("precision", "recall")
    columns += metric_columns("slot_bytes", "below_bytes")
    if any(row["kl"] is not None for row in rows):
        columns += metric_columns("kl")
    return column_table("experts in tiers: the largest batch, from empty slots", columns, rows, _TIERS)


def hits_plot(result: Mapping[str, Any]) -> Figure:
    """Hit rate against the share of experts that have a slot, a line a policy, Belady's on top."""
    figure, (axis,) = new_figure("Hits of resident experts", result, 7, 5)
    names = list(dict.fromkeys(case["policy"] for case in result["cases"]))
    for i, name in enumerate(names):
        cases = [case for case in result["cases"] if case["policy"] == name]
        cases.sort(key=lambda case: case["resident_share"])
        bound = name == "belady"
        axis.plot(
            [100 * case["resident_share"] for case in cases], [100 * case["hit_rate"] for case in cases],
            marker="os^"[i // 6 % 3], label=name, color="#444444" if bound else nth_color(i),
            linestyle="--" if bound else "-",
        )  # fmt: skip
    axis.set_xlabel("experts with a slot, %")
    axis.set_ylabel("hits, % of accesses")
    legend_below(figure, [axis], fontsize=8)
    return figure
