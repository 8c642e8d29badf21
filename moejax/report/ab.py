"""An A/B result's tables and plots. No JAX here."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.text import Text

from moejax.report.compare_plots import forest
from moejax.report.compare_tables import verdict_tables, verdicts_table
from moejax.report.determinism import determinism_table, eviction_table, mismatch_table
from moejax.report.figure import legend_below, new_figure
from moejax.report.offload import tiers_table
from moejax.report.speculation import speculation_table
from moejax.report.style import COLORS, run_title
from moejax.report.tables import (
    Column,
    case_notes,
    column_table,
    groups_table,
    metric_columns,
    number,
    print_lines,
)
from moejax.results.compare.samples import short_case_name
from moejax.results.metric_names import short_name
from moejax.results.statistics import Interval
from moejax.results.verdict import ALPHA, OF_TRIAL, Floor, Trial, Verdict


def _agreement(row: Mapping[str, Any]) -> Text | None:
    equal = row["equal_requests"]
    return None if equal is None else Text(f"{100 * equal:.0f}%", style="" if equal == 1 else "yellow")


_COLUMNS = (
    Column("variant", "variant", fold=True),
    Column("case", short_case_name, left=True),
    *metric_columns(
        "median_ttft_ms", "median_tpot_ms", "p99_itl_ms", "median_e2el_ms", "output_throughput",
        "request_goodput", cell=number,
    ),
    *metric_columns("slo_attainment", "service_gap", "jain_index"),
    Column("same\ntokens", _agreement),
    Column("rounds", "rounds"),
)  # fmt: skip


def verdict_of(row: Mapping[str, Any]) -> Verdict:
    """A verdict from its row in a result, see `Verdict.row`."""
    ratio = None
    if row["ratio"] is not None:
        ratio = Interval(
            row["ratio"], row["ratio_low"], row["ratio_high"], row["confidence"], min(row["samples"])
        )
    trial = Trial(
        **{name: row[name] for name in OF_TRIAL},
        base=row["baseline_value"],
        ratio=ratio,
        samples=tuple(row["samples"]),
        paired=True,
        floor=Floor(row["noise_low"], row["noise_high"], ""),
    )
    return Verdict(trial, row["outcome"], row["p_adjusted"], row["text"])


def print_ab(result: Mapping[str, Any], console: Console) -> None:
    """The variants' figures, medians over rounds, and how far their tokens are the baseline's; each one's
    verdicts against the baseline, over all cases and by case; the verdicts in words."""
    note = "medians over rounds, times in ms; same: requests with the baseline's tokens throughout"
    title = f"{result['experiment']}: {run_title(result)}"
    tables = [column_table(title, _COLUMNS, result["cases"], note + case_notes(result))]
    if (groups := groups_table(result)) is not None:
        tables.append(groups)
    if result.get("speculation"):
        tables.append(speculation_table(result["speculation"]))
    if result.get("determinism"):
        tables.append(determinism_table(result["determinism"]))
    if result.get("mismatch"):
        tables.append(mismatch_table(result["mismatch"]))
    if result.get("eviction"):
        tables.append(eviction_table(result["eviction"]))
    if result.get("tiers"):
        tables.append(tiers_table(result["tiers"]))
    if result.get("reconfigured"):
        names = [name for name in result["reconfigured"][0] if name.endswith(("ms", "bytes"))]
        columns = [Column("variant", "variant", left=True), *metric_columns(*names)]
        tables.append(column_table("changes of layout under load", columns, result["reconfigured"]))
    if result.get("disaggregated"):
        columns = [
            Column("variant", "variant", left=True),
            *metric_columns(*[*result["disaggregated"][0]][1:]),
        ]
        tables.append(column_table("prompts computed by another engine", columns, result["disaggregated"]))
    verdicts, each = ([verdict_of(row) for row in result[key]] for key in ("verdicts", "case_verdicts"))
    control = [verdict_of(row) for row in result["control"]]
    tables += verdict_tables(verdicts, each, _explained(len(verdicts)))
    if control:
        base = control[0].trial.baseline
        title = f"control: a second engine of {base} against the first; its interval is what noise is here"
        tables.append(verdicts_table(control, title))
    for table in tables:
        console.print(table)
    print_lines(console, ab_lines(result))


def _explained(tests: int) -> str:
    return (
        "values: medians over rounds; ratio: median of the rounds' ratios with its 95 % bootstrap interval;"
        " effect: share of rounds above less share below; p: signed-rank test, adjusted (Holm) over"
        f" {tests} tests; a winner needs p ≤ {ALPHA:g} and an interval beyond 1 and beyond the control's"
    )


def ab_lines(result: Mapping[str, Any]) -> list[str]:
    """The outcome in words."""
    verdicts = [verdict_of(row) for row in result["verdicts"]]
    lines = [verdict.sentence() for verdict in verdicts if verdict.decided]
    others: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        if not verdict.decided:
            key = (verdict.trial.run, verdict.text)
            others.setdefault(key, []).append(short_name(verdict.trial.metric))
    base = verdicts[0].trial.baseline if verdicts else ""
    lines += [f"{run} against {base}: {text}: {', '.join(m)}" for (run, text), m in others.items()]
    if left := result.get("not_judged"):
        why = "a pass without them, or with too few values for the percentile"
        lines.append(f"not judged: {', '.join(map(short_name, left))}: {why}")
    for verdict in map(verdict_of, result["control"]):
        trial = verdict.trial
        if verdict.decided and trial.ratio is not None:
            lines.append(
                f"careful: two engines of {trial.baseline} differ in {short_name(trial.metric)} by"
                f" {trial.ratio.estimate:.3f}x; smaller differences mean nothing here"
            )
    return lines


def ratios_plot(result: Mapping[str, Any]) -> Figure | None:
    """Every variant's ratios to the baseline with their intervals; the band is the control's interval."""
    rows = [*result["verdicts"], *result["case_verdicts"]]
    verdicts = [verdict_of(row) for row in rows]
    base = verdicts[0].trial.baseline if verdicts else ""
    return forest(verdicts[:40], result, f"Ratio to {base}, measured in turns")


def rounds_plot(result: Mapping[str, Any]) -> Figure | None:
    """Each judged metric's ratio to the baseline round by round, in the mean over cases: a drift, a warm-up
    that was too short or two modes of the machine show here."""
    metrics = list(dict.fromkeys(row["metric"] for row in result["verdicts"]))[:4]
    if not metrics:
        return None
    base = result["verdicts"][0]["baseline"]
    names = [variant["name"] for variant in result["variants"] if variant["name"] != base]
    height = 0.9 + 1.7 * len(metrics)
    figure, axes = new_figure(f"Ratio to {base}, round by round", result, 8.4, height, len(metrics), 1)
    for axis, metric in zip(axes, metrics, strict=True):
        bottom = _series(result, base, metric)
        for index, name in enumerate(names):
            ratios = _series(result, name, metric) / bottom
            axis.plot(ratios, "o-", color=COLORS[index], markersize=3, linewidth=0.9, label=name)
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_ylabel(short_name(metric), fontsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[-1].set_xlabel("round")
    legend_below(figure, axes)
    return figure


def _series(result: Mapping[str, Any], name: str, metric: str) -> np.ndarray:
    """A variant's metric in each round: the geometric mean over cases."""
    by_round: dict[int, list[float]] = {}
    for row in result["iterations"]:
        if row["variant"] == name:
            by_round.setdefault(row["iteration"], []).append(row[metric])
    return np.exp([np.log(by_round[round_]).mean() for round_ in sorted(by_round)])
