"""The plots of a comparison, the same for the command line, notebooks and report.html. No JAX here.

Each function returns a matplotlib `Figure`, or None where there is nothing to draw. A run keeps its colour.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from moejax.report.figure import (
    distribution_panels,
    new_figure,
    round_ticks,
    save_figures,
    vertical_grid,
)
from moejax.report.style import commit_name, device_name, model_name, nth_color
from moejax.results.compare.comparison import RunComparison
from moejax.results.compare.samples import Cases, case_name, latency_values, match_cases
from moejax.results.metric_names import lower_is_better, short_name
from moejax.results.metrics import LATENCIES
from moejax.results.verdict import Verdict

_MOST_ROWS = 40
_MOST_RUNS = 8
_MOST_FIGURES = 6
_DECIDED = {"better": "#1a7f37", "worse": "#c62828"}


def ratio_forest(comparison: RunComparison) -> Figure | None:
    """A forest plot: each judged metric's ratio to the baseline with its interval, all cases and each; the
    band is what counts as noise. Green and red where a winner is called."""
    verdicts = [*comparison.verdicts, *comparison.case_verdicts]
    verdicts = [v for v in verdicts if v.trial.ratio is not None][:_MOST_ROWS]
    first = comparison.runs[0]
    return forest(verdicts, shared_title(comparison), f"Ratio to {first.label}: {first.name}")


def forest(verdicts: Sequence[Verdict], result: Mapping[str, Any], title: str) -> Figure | None:
    """`ratio_forest` of any verdicts; `result` gives the line under the title."""
    rows = [(verdict, verdict.trial.ratio) for verdict in verdicts]
    if not rows:
        return None
    several = len({verdict.trial.run for verdict in verdicts}) > 1
    figure, (axis,) = new_figure(title, result, 8.6, 1.9 + 0.32 * len(rows))
    extent = [1.0]
    for place, (verdict, ratio) in enumerate(rows):
        if ratio is None:
            continue
        tone = _DECIDED.get(verdict.outcome, "#6e6e6e")
        floor = verdict.trial.floor
        axis.fill_betweenx([place - 0.42, place + 0.42], floor.low, floor.high, color="#e8e8e8", linewidth=0)
        axis.plot([ratio.low, ratio.high], [place, place], color=tone, linewidth=1.8, solid_capstyle="butt")
        axis.plot(ratio.estimate, place, "o" if verdict.decided else "s", color=tone, markersize=5)
        text = verdict.text if verdict.decided else verdict.outcome
        where: dict[str, Any] = {"xycoords": ("axes fraction", "data"), "va": "center"}
        axis.annotate(text, (1.01, place), color=tone, fontsize=7.5, **where)
        extent += [ratio.low, ratio.high, floor.low, floor.high]
    axis.axvline(1.0, color="black", linewidth=0.9)
    axis.set_yticks(range(len(rows)), [_row_name(v, several) for v, _ in rows], fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    low, high = min(extent) / 1.03, max(extent) * 1.03
    axis.set(xscale="log", xlim=(low, high))
    _ratio_ticks(axis, low, high)
    axis.grid(axis="y", visible=False)
    vertical_grid(axis)
    axis.set_xlabel(
        "ratio with its 95 % interval; ▼ less is better, ▲ more is better; grey band: noise", fontsize=8.5
    )
    return figure


def _row_name(verdict: Verdict, several: bool) -> str:
    trial = verdict.trial
    arrow = {True: " ▼", False: " ▲", None: ""}[lower_is_better(trial.metric)]
    parts = [f"{trial.run}: " if several else "", short_name(trial.metric), arrow]
    return "".join(parts) + (f"   {trial.case}" if trial.case else "")


def _ratio_ticks(axis: Axes, low: float, high: float) -> None:
    """Plain factors: finer steps near 1."""
    spread = max(high, 1.0 / low)
    if spread > 3:
        round_ticks(axis.xaxis, low, high)
        return
    step = 0.02 if spread < 1.12 else 0.05 if spread < 1.3 else 0.1 if spread < 1.8 else 0.25
    ticks = np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step
    axis.set_xticks(ticks, [f"{tick:.2f}" for tick in ticks], fontsize=8)
    axis.set_xticks([], minor=True)


def latency_cdfs(comparison: RunComparison, case: int = 0) -> Figure | None:
    """Cumulative distributions of TTFT, TPOT, ITL and E2E of one of the baseline's cases, a curve a run, all
    iterations pooled. None where fewer than two runs have samples of it."""
    places = _same_case(comparison, case)
    panels = []
    for name, title in LATENCIES.items():
        samples = [(cases.run.title, latency_values(cases, name, index)) for cases, index in places]
        curves = [(label, nth_color(run), values) for run, (label, values) in enumerate(samples)]
        panels += [(title, curves, None)] if sum(values.size > 0 for _, values in samples) > 1 else []
    if not panels:
        return None
    columns = 1 if max(len(cases.run.title) for cases, _ in places) > 60 else 2
    title = f"Latency distributions, {case_name(comparison.cases[0].fields(case))}"
    return distribution_panels(title, shared_title(comparison), panels, columns=columns, fontsize=8)


def _same_case(comparison: RunComparison, case: int) -> list[tuple[Cases, int]]:
    """Each run's cases with the place in them of what is the baseline's case."""
    base = comparison.cases[0]
    matches = [(base, case)] if base.rows else []
    for other in comparison.cases[1:]:
        matches += [(other, two) for one, two, _ in match_cases(base, other)[0] if one == case]
    return matches[:_MOST_RUNS]


def shared_title(comparison: RunComparison) -> dict[str, Any]:
    """As much of a result as the line under a title needs: what all runs have in common of model, device and
    commit."""
    names = [(model_name(r.result), device_name(r.result), commit_name(r.result)) for r in comparison.runs]
    model, device, commit = (of[0] if len(set(of)) == 1 else None for of in zip(*names, strict=True))
    git = {"commit": commit.rstrip("+"), "dirty": commit.endswith("+")} if commit else {}
    return {
        "config": {"model": model},
        "provenance": {"device": {"kind": device}, "git": git},
    }


def save_compare_plots(comparison: RunComparison, out_dir: str | os.PathLike[str]) -> list[Path]:
    """Draws every plot that there is data for into `out_dir` and returns the files: `ratios.png`, and
    `distributions.png` or, of several cases, `distributions_0.png` and so on in the baseline's order."""
    figures = {"ratios": ratio_forest(comparison)}
    several = len(comparison.cases[0].rows) > 1
    for case in range(min(len(comparison.cases[0].rows), _MOST_FIGURES)):
        figures[f"distributions_{case}" if several else "distributions"] = latency_cdfs(comparison, case)
    return save_figures(figures, out_dir)
