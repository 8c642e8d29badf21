"""`report.html`: runs side by side as one file that needs nothing else, for those without a W&B server.

No script, style, font or picture is fetched; the page forbids itself to. All that comes from a run is
escaped. No JAX here.
"""

import base64
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from moejax.core.errors import ConfigError
from moejax.core.files import atomic_write_text, ensure_writable
from moejax.core.words import cut
from moejax.report import html_figures
from moejax.report.compare_plots import ratio_forest
from moejax.report.roofline import roofline_figure
from moejax.report.style import nth_color, run_title
from moejax.report.tables import number
from moejax.results.compare import SHOWN_FIRST, RunComparison, compare, numeric_metrics
from moejax.results.compare.comparison import MetricRow
from moejax.results.compare.inputs import flatten
from moejax.results.compare.runs import Run, load_runs
from moejax.results.compare.samples import Cases
from moejax.results.metric_names import lower_is_better, short_name
from moejax.results.metrics import is_number

TEMPLATE = Path(__file__).resolve().parents[1] / "assets" / "report.html.j2"

_MOST_CASES, _MOST_COLUMNS, _MOST_RUNS = 100, 20, 24
_MOST_ROOFLINES = 4
_LONGEST = 400
# In a case's table, in front: what it is, then what is looked at first.
_CASE_FIRST = (
    "case", "name", "variant", "backend", "batching", "request_rate", "concurrency", "batch_size",
    "prompt_len", "output_len", *SHOWN_FIRST, "roofline_percent",
)  # fmt: skip


def write_report(
    paths: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    comparison: RunComparison | None = None,
) -> Path:
    """Writes the report of one run or of several of one experiment; the first is the baseline.

    Args:
        paths: run folders, result.json files or offline W&B runs.
        out: the file, or a folder for `report.html`.
        comparison: of these runs, where it has been made already.

    Returns:
        The file.

    Raises:
        ConfigError: no path, one that is no run, or different experiments.
        OutputError: the file cannot be written.
    """
    if not paths:
        raise ConfigError("a report needs at least one run folder")
    if len(paths) > _MOST_RUNS:
        raise ConfigError(f"a report shows at most {_MOST_RUNS} runs, got {len(paths)}; choose some of them")
    target = Path(out)
    if target.suffix not in (".html", ".htm"):
        target = target / "report.html"
    ensure_writable(target.parent)
    if comparison is None and len(paths) > 1:
        comparison = compare(paths)
    runs = list(comparison.runs) if comparison is not None else load_runs(paths)
    return atomic_write_text(target, render_report(runs, comparison))


def render_report(runs: Sequence[Run], comparison: RunComparison | None) -> str:
    """The page of `write_report` as text."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {
        "cell": lambda value: number(value) if is_number(value) or value is None else _cut(value),
        "cut": _cut,
        "raw": lambda value: repr(float(value)) if is_number(value) else "",  # that a table sorts by
        "short_name": short_name,
        "lower_is_better": lower_is_better,
    }
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return template.render(**_page(runs, comparison))


def _page(runs: Sequence[Run], comparison: RunComparison | None) -> dict[str, Any]:
    """Returns what the template lays out."""
    first = runs[0]
    several = len(runs) > 1
    figures = _figures(runs, comparison)
    verdicts = [*comparison.verdicts, *comparison.case_verdicts] if comparison is not None else []
    contents = [("runs", "Runs")]
    contents += [("outcome", "Outcome"), ("differences", "Inputs that differ")] if several else []
    contents += [("metrics", "Metrics"), *([("figures", "Figures")] if figures else [])]
    contents += [("cases", "Cases"), ("provenance", "Provenance")]
    return {
        "title": f"{first.experiment}: {f'{len(runs)} runs compared' if several else first.name}",
        "subtitle": " · ".join(dict.fromkeys(filter(None, (run_title(run.result) for run in runs)))),
        "contents": contents,
        "runs": [_run(run, index) for index, run in enumerate(runs)],
        "lines": "\n".join(comparison.lines()) if comparison is not None else "",
        "notes": list(comparison.notes) if comparison is not None else [],
        "verdicts": verdicts,
        "differences": comparison.differences if comparison is not None else (),
        "metrics": _metrics(runs, comparison),
        "figures": figures,
        "cases": [_case_table(run, index) for index, run in enumerate(runs) if run.result.get("cases")],
    }


def _run(run: Run, index: int) -> dict[str, Any]:
    provenance = run.result.get("provenance") or {}
    known = {key: value for key, value in provenance.items() if key != "config"}
    facts = [(f"config.{key}", value) for key, value in flatten(run.result.get("config") or {}).items()]
    facts += list(flatten(known).items())
    return {
        "label": run.label,
        "name": run.name,
        "path": str(run.path),
        "color": nth_color(index),
        "title": run_title(run.result),
        "time": provenance.get("time_utc"),
        "command": _cut(" ".join(str(word) for word in provenance.get("argv") or ())),
        "cases": len(run.result.get("cases") or ()),
        "missing": "; ".join(run.missing),
        "facts": facts,
    }


def _metrics(runs: Sequence[Run], comparison: RunComparison | None) -> list[list[MetricRow]]:
    """Every flat metric of any run: the usual ones (all where none is usual) with those of cases, and the
    rest."""
    known = numeric_metrics(runs)
    usual = [name for name in SHOWN_FIRST if name in known] or list(known)
    rows = [
        MetricRow(name, tuple(run.result["metrics"].get(name) for run in runs))
        for name in dict.fromkeys([*usual, *known])
    ]
    of_cases = [row for row in (comparison.metrics if comparison is not None else ()) if row.case]
    return [[*rows[: len(usual)], *of_cases], rows[len(usual) :]]


def _case_table(run: Run, index: int) -> dict[str, Any]:
    """A run's cases, its most telling columns in front; what is left out is said."""
    rows = list(run.result["cases"])
    keys = dict.fromkeys(
        key
        for row in rows
        for key, value in row.items()
        if value is not None and not isinstance(value, (list, tuple, Mapping))
    )
    ordered = [key for key in _CASE_FIRST if key in keys] + [key for key in keys if key not in _CASE_FIRST]
    columns = ordered[:_MOST_COLUMNS]
    left = [
        f"{len(ordered) - len(columns)} more columns" if len(ordered) > len(columns) else "",
        f"{len(rows) - _MOST_CASES} more cases" if len(rows) > _MOST_CASES else "",
    ]
    said = " and ".join(filter(None, left))
    return {
        "name": run.title,
        "color": nth_color(index),
        "columns": columns,
        "rows": [[row.get(key) for key in columns] for row in rows[:_MOST_CASES]],
        "left_out": f"In result.json: {said}." if said else "",
    }


def _rooflines(runs: Sequence[Run]) -> list[tuple[str, Figure, str]]:
    """One for each of the first runs whose device's peaks are known."""
    drawn = []
    for run in runs[:_MOST_ROOFLINES]:
        try:
            figure = roofline_figure(run.result)
        except ConfigError:  # no cost breakdown, or no peaks: the page is no worse for it
            continue
        text = (
            f"{run.label}: operations by phase against what memory and compute allow; stars are whole phases."
        )
        drawn.append((f"Roofline of {run.label}", figure, text))
    return drawn


def _figures(runs: Sequence[Run], comparison: RunComparison | None) -> list[dict[str, str]]:
    cases = comparison.cases if comparison is not None else [Cases(run) for run in runs]
    drawn = (
        ("Ratios", ratio_forest(comparison) if comparison is not None else None,
         "Each judged metric over the baseline's, with its interval; the band is what counts as noise."),
        ("Trade-off", html_figures.trade_off(runs),
         "Each point is a case of a run; the dashed line joins the points that none beats in both."),
        ("Distributions", html_figures.distributions(cases),
         "Share of requests (of tokens, for inter-token latency) that took no longer; points at the median"
         " and the 99th percentile; all iterations pooled."),
        ("Expert load", html_figures.expert_loads(runs),
         "Tokens per expert over the even share, one colour scale for all; blank layers have no experts."),
        ("Share of the roofline", html_figures.roof(runs),
         "The least time per output token that memory and compute allow, over the measured. Runs whose roofs"
         " differ have an axis each; without cases that exceeded the roof or found it unstable."),
        ("Telemetry", html_figures.telemetry(runs),
         "Sampled while something was measured; the time between measured parts is left out of the means."),
    )  # fmt: skip
    return [
        {
            "title": title,
            "caption": caption,
            "width": str(round(96 * figure.get_size_inches()[0])),
            "data": base64.b64encode(html_figures.svg(figure)).decode("ascii"),
        }
        for title, figure, caption in (*drawn, *_rooflines(runs))
        if figure is not None
    ]


def _cut(value: Any) -> str:
    return cut(value, _LONGEST)
