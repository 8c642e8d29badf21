"""Tables and plot of `experiments.offload`. No JAX here."""

import math
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
and with the experts prefetched that the layer visited a token before, that a table foresees, or that the
next layer's router would choose by this layer's input
"""
_STALLS = (("", ""), ("previous", "_previous"), ("table", "_transition"), ("router", "_next_router"))

_TIERS = """\
hits of the experts needed, beside Belady's on the same routing; misses, bytes moved to the device and read
from disk a step; wait: of the time; precision and recall of what was prefetched"""


def _percent(value: float) -> str:
    return rounded(value, 100, 1000)


def _between(name: str, row: Mapping[str, Any], scale: float = 100) -> str | None:
    if row.get(name) is None:
        return None
    value, low, high = (row[f"{name}{end}"] for end in ("", "_low", "_high"))
    ends = "" if low is None else f" [{_percent(scale * low)}, {_percent(scale * high)}]"
    return f"{_percent(scale * value)}{ends}"


def print_offload(result: Mapping[str, Any], console: Console) -> None:
    """A row for each resident share and policy, and one for each predictor; or one for each engine."""
    if measured(result):
        console.print(_measured_table(result))
        return
    columns = (
        Column("resident\n%", "resident_share", 100, _percent, once=True),
        Column("policy", "policy", left=True),
        Column("hits %", partial(_between, "hit_rate")),
        Column("gap", partial(_between, "belady_gap")),
        Column("moved\nMB", "missed_bytes", 1e-6, _percent),
        *(
            Column(f"stall %\n{name}", f"stall_share{end}", 100, _percent)
            for name, end in _STALLS
            if f"stall_share{end}" in result["cases"][0]
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
    columns += _tiers_columns(rows)
    if any(row["kl"] is not None for row in rows):
        columns += metric_columns("kl")
    return column_table("experts in tiers: the largest batch, from empty slots", columns, rows, _TIERS)


def _tiers_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    names = ("hit_rate", "best_hit_rate", "step_misses", "step_moved_bytes", "step_read_bytes", "wait_share")
    columns = [Column("resident\n%", "resident_share", 100, _percent), *metric_columns(*names)]
    if any(row.get("precision") is not None for row in rows):
        columns += metric_columns("precision", "recall")
    return columns + metric_columns("slot_bytes", "below_bytes")


def measured(result: Mapping[str, Any]) -> bool:
    """Tells whether engines ran, and traces were not replayed."""
    return bool(result["offload"].get("mode") == "measured")


def _measured_table(result: Mapping[str, Any]) -> Table:
    columns = [Column(name, name, left=True) for name in ("tier", "prefetch", "policy")]
    columns += _tiers_columns(result["cases"])
    columns += metric_columns("median_tpot_ms")
    columns.append(Column("TPOT\nratio", partial(_between, "tpot_ratio", scale=1)))
    about = result["offload"]
    title = f"experts in tiers: {run_title(result)}\n{about['prompts']} prompts, each engine from empty slots"
    return column_table(title, columns, result["cases"], _TIERS, section=lambda row: row["resident_share"])


def hits_plot(result: Mapping[str, Any]) -> Figure:
    """Hit rate against the share of experts that have a slot, a line a policy, Belady's on top."""
    if measured(result):
        return _measured_plot(result)
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


def _measured_plot(result: Mapping[str, Any]) -> Figure:
    """Hit rate and time per token against the share of experts that have a slot, a line a policy and way."""
    figure, axes = new_figure("Experts in tiers", result, 11, 5, 1, 2)
    cases = [case for case in result["cases"] if case.get("policy")]
    for axis, key, scale, label in (
        (axes[0], "hit_rate", 100, "hits, % of needed experts"),
        (axes[1], "tpot_ratio", 1, "time per token, over all experts resident"),
    ):
        for i, name in enumerate(dict.fromkeys(map(_way, cases))):
            mine = sorted((case["resident_share"], case[key]) for case in cases if _way(case) == name)
            points = [(100 * share, scale * value) for share, value in mine]
            axis.plot(*zip(*points, strict=True), marker="os^"[i // 6 % 3], label=name, color=nth_color(i))
        axis.set_xlabel("experts with a slot, %")
        axis.set_ylabel(label)
    bound = sorted({(100 * case["resident_share"], 100 * (case["best_hit_rate"] or 0)) for case in cases})
    axes[0].plot(*zip(*bound, strict=True), "o--", color="#444444", label="Belady's bound")
    legend_below(figure, axes, fontsize=8)
    return figure


def _way(case: Mapping[str, Any]) -> str:
    return " ".join([case["policy"], case["tier"], *(["ahead"] if case["prefetch"] != "none" else [])])


def lookahead_plot(result: Mapping[str, Any]) -> Figure | None:
    """Recall of each predictor by layer."""
    if measured(result):
        return None
    figure, (axis,) = new_figure("Experts foreseen, by layer", result, 7, 4)
    layers = result["offload"]["layers"]
    for i, row in enumerate(result["predictors"]):
        recall = [math.nan if value is None else 100 * value for value in row["layer_recall"]]
        axis.plot(layers, recall, marker="o", label=row["predictor"], color=nth_color(i))
    axis.set_xlabel("layer")
    axis.set_xticks(layers)
    axis.set_ylabel("foreseen, % of the experts needed")
    axis.set_ylim(bottom=0)
    legend_below(figure, [axis], fontsize=8)
    return figure


def timeline_plot(result: Mapping[str, Any]) -> Figure | None:
    """Time of each step and what of it waits for experts, above its misses; of engines on a half or what is
    nearest to it, a column a way."""
    if not measured(result) or not any(result["timelines"]):
        return None
    cases, first = result["cases"], next(case for case in result["cases"] if case.get("policy"))
    nearest = min((case["resident_share"] for case in cases[1:]), key=lambda share: abs(share - 0.5))
    shown = [
        (case, line)
        for case, line in zip(cases, result["timelines"], strict=True)
        if case["resident_share"] == nearest and case.get("policy") == first["policy"]
    ]
    title = f"Steps with {100 * nearest:.0f} % of the experts resident"
    grid: dict[str, Any] = {"sharex": "col", "sharey": "row"}
    figure, axes = new_figure(title, result, 4 * len(shown) + 1, 6, 2, len(shown), **grid)
    for (case, line), above, below in zip(shown, axes[: len(shown)], axes[len(shown) :], strict=True):
        above.step(line["start_s"], line["step_ms"], where="post", color=nth_color(0), label="step")
        above.step(
            line["start_s"], line["wait_ms"], where="post", color=nth_color(1), label="waits for experts"
        )
        below.step(line["start_s"], line["misses"], where="post", color=nth_color(2), label="experts missed")
        above.set_title(_way(case), fontsize=10)
        above.set_yscale("log")
        below.set_xlabel("seconds")
    axes[0].set_ylabel("ms")
    axes[len(shown)].set_ylabel("experts")
    legend_below(figure, [axes[0], axes[len(shown)]], fontsize=8)
    return figure
