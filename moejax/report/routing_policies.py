"""Table and plot of `experiments.routing_policies`. No JAX here."""

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from moejax.report.figure import legend_below, new_figure
from moejax.report.quantization import loss_words
from moejax.report.style import COLORS, nth_color, run_title
from moejax.report.tables import Column, column_table, metric_columns, print_lines, rounded

_NOTE = """\
loss: of perplexity, % of the model's own choice, with its bootstrap interval; ~ inside the noise
flips: tokens whose set of experts differs; max / mean: load of the busiest expert
hit: distinct experts of a decode step in a layer; decode: speed beside the model's own choice
best: nothing has less KL at that speed (time), at so few experts, or both
"""


def _cell(value: float | str) -> str:
    return value if isinstance(value, str) else rounded(value, 100, 1000)


def _best(case: Mapping[str, Any]) -> str | None:
    best = [name for name, key in (("time", "pareto_time"), ("hit", "pareto_experts")) if case[key]]
    return "both" if len(best) > 1 else "".join(best) or None


def print_routing_policies(result: Mapping[str, Any], console: Console) -> None:
    """A row a policy: what it loses, which experts it visits, and its decode speed."""
    text, cases = result["text"], result["cases"]
    columns = (
        Column("policy", "name", left=True),
        Column("loss %\n\\[interval]", loss_words),
        Column("KL\nmnat", "kl", 1e3, _cell),
        *metric_columns(
            "router_flips", "experts_per_token", "max_over_mean", "mean_experts_hit", cell=_cell
        ),
        Column("drop\n%", "dropped_share", 100, _cell),
        *metric_columns("decode_ratio", cell=_cell),
        Column("best", _best, left=True),
    )  # fmt: skip
    batch = result["config"]["routing_policies"]["speed"]["batch_size"]
    of = f"{text['tokens']:,} held-out tokens in {text['windows']} windows, steps of {batch} tokens"
    title = f"routing policies: {run_title(result)}\n{of}"
    console.print(column_table(title, columns, cases, padding=(0, 1, 0, 0), collapse_padding=False))
    console.print(_NOTE, highlight=False)
    alike = [case["name"] for case in cases if case.get("inside_noise")]
    percent = f"{100 * text['confidence']:g} %"
    print_lines(console, [f"loss inside the noise ({percent}): {', '.join(alike) if alike else 'none'}"])


def pareto_plot(result: Mapping[str, Any]) -> Figure | None:
    """KL against decode speed, and against the experts that a step visits; the best joined by a line."""
    cases = [case for case in result["cases"] if case["kl"] > 0]
    panels = [("time", "decode_ratio", "decode speed, × the model's own choice")]
    panels = [panel for panel in panels if any(panel[1] in case for case in cases)]
    panels += [("experts", "mean_experts_hit", "distinct experts of a decode step in a layer")]
    if not cases:
        return None
    figure, axes = new_figure("Predictions against work", result, 5.5 * len(panels), 5, 1, len(panels))
    for axis, (name, key, label) in zip(axes, panels, strict=True):
        best = sorted((case for case in cases if case[f"pareto_{name}"]), key=lambda case: case[key])
        axis.plot(
            [case[key] for case in best], [1e3 * case["kl"] for case in best], color="#999999", linestyle="--"
        )
        own = result["cases"][0][key]
        axis.axvline(own, color="#444444", linewidth=1)
        for i, case in enumerate(cases):
            low, high = (case.get(f"{key}_{end}") or case[key] for end in ("low", "high"))
            spans, mark = [[case[key] - low], [high - case[key]]], "o" if i < len(COLORS) else "s"
            look: dict[str, Any] = {"color": nth_color(i), "capsize": 3, "label": case["name"]}
            axis.errorbar([case[key]], [1e3 * case["kl"]], xerr=spans, fmt=mark, **look)
        axis.set_yscale("log")
        axis.set_xlabel(label)
    axes[0].set_ylabel("KL from the model's own choice, mnat")
    legend_below(figure, axes[:1], fontsize=8)
    return figure
