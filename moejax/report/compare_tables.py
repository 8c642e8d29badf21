"""A comparison on the terminal, for a hundred columns."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from moejax.report.style import commit_name, device_name, model_name
from moejax.report.tables import Column, column_table, number, plain_table
from moejax.results.compare.comparison import MetricRow, RunComparison
from moejax.results.compare.inputs import MISSING, UNKNOWN, Difference
from moejax.results.compare.runs import Run
from moejax.results.metric_names import short_name
from moejax.results.statistics import Interval
from moejax.results.verdict import ALPHA, Verdict

_MOST_INPUTS = 40  # keys in the table; comparison.json has them all
_MOST_CASES = 24  # verdicts by case of one run
_MOST_METRICS = 60
_MOST_COLUMNS = 4  # runs side by side; more go below one another
_CELL = 34  # characters of an input's value
_COLORS = {"better": "green", "worse": "red", "too few": "yellow", "not comparable": "yellow"}


def comparison_tables(comparison: RunComparison) -> list[Table]:
    """The runs, the inputs that differ, the verdicts and the flat metrics; each where there is any."""
    tables = [runs_table(comparison)]
    if comparison.differences:
        tables.append(inputs_table(comparison))
    many = len(comparison.runs) > _MOST_COLUMNS
    if not many:
        tables += verdict_tables(
            comparison.verdicts, comparison.case_verdicts, _explained(comparison), most=_MOST_CASES
        )
    if many and comparison.verdicts:
        return [*tables, overview_table(comparison)]
    return [*tables, metrics_table(comparison)]


def verdict_tables(
    verdicts: Sequence[Verdict], each: Sequence[Verdict], caption: str, most: int | None = None
) -> list[Table]:
    """Two tables a run: its verdicts over all cases, the first with `caption`, and those by case, at most
    `most` of them."""
    tables: list[Table] = []
    tests = sum(verdict.p_adjusted is not None for verdict in each)
    for run in dict.fromkeys(verdict.trial.run for verdict in (*verdicts, *each)):
        mine = [verdict for verdict in verdicts if verdict.trial.run == run]
        cases = [verdict for verdict in each if verdict.trial.run == run]
        against = f"{run} against {(mine or cases)[0].trial.baseline}"
        if mine:
            where = ", all cases" if cases else ""
            tables.append(verdicts_table(mine, f"{against}{where}", None if tables else caption))
        if cases:
            note = f"p adjusted over {tests} tests"
            if most is not None and len(cases) > most:
                note += f"; {len(cases) - most} more verdicts in comparison.json"
            tables.append(verdicts_table(cases[:most], f"{against}, case by case", note))
    return tables


def _explained(comparison: RunComparison) -> str:
    tests = sum(verdict.p_adjusted is not None for verdict in comparison.verdicts)
    return (
        "values: medians over iterations, of all cases their geometric mean; ratio: with its 95 % bootstrap"
        " interval; effect: Cliff's delta, ±1 if no iteration of one lies among the other's; p: rank test,"
        f" adjusted (Holm) over {tests} tests; a winner needs p ≤ {ALPHA:g} and an interval beyond 1"
        f" and session noise ({comparison.floor.low:.2f}–{comparison.floor.high:.2f})"
    )


def runs_table(comparison: RunComparison) -> Table:
    """A line a run: letter, folder, start, model, device, commit, how often each case was measured."""
    columns = (
        Column("", lambda run: Text(run.label, style="bold"), left=True),
        Column("run", lambda run: run.name if run.source == "folder" else f"{run.name} (W&B)", fold=True),
        Column("began (UTC)", _began, left=True),
        Column("model", lambda run: model_name(run.result), fold=True),
        Column("device", lambda run: device_name(run.result), fold=True),
        Column("commit", lambda run: commit_name(run.result), left=True),
        Column("times", lambda run: times[run.label] or None),
    )
    times = {
        cases.run.label: min((cases.iterations(index) for index in range(len(cases.rows))), default=0)
        for cases in comparison.cases
    }
    return column_table(f"compare: {comparison.experiment}", columns, comparison.runs)


def _began(run: Run) -> str:
    return str(run.result["provenance"].get("time_utc") or "–")[:16].replace("T", " ")


def inputs_table(comparison: RunComparison) -> Table:
    """The inputs in which the runs differ, by kind; yellow where not the baseline's. Keys that a
    run does not have at all are drawn together by section."""
    rows = _collapsed(comparison.differences)
    caption = None
    if len(rows) > _MOST_INPUTS:
        caption = f"and {len(rows) - _MOST_INPUTS} more, in comparison.json"
    columns = [
        Column("kind", lambda difference: difference.kind, left=True, once=True),
        Column("key", lambda difference: difference.key, fold=True),
    ]
    if len(comparison.runs) > _MOST_COLUMNS:
        columns.append(Column("values", partial(_by_value, comparison.labels), fold=True))
    else:
        columns += [Column(r, partial(_value, i), fold=True) for i, r in enumerate(comparison.labels)]
    return column_table("inputs that differ", columns, rows[:_MOST_INPUTS], caption)


def _collapsed(differences: Sequence[Difference]) -> list[Difference]:
    """Keys that differ only in that some runs do not have them, as one line a section."""
    groups: dict[Any, list[Difference]] = {}
    for difference in differences:
        known = {str(value) for value in difference.values if value not in (MISSING, UNKNOWN)}
        section, dot, _ = difference.key.partition(".")
        shape = tuple(MISSING if value == MISSING else "set" for value in difference.values)
        alone = len(known) > 1 or not dot or MISSING not in shape
        key = difference.key if alone else (difference.kind, section, shape)
        groups.setdefault(key, []).append(difference)
    return [
        Difference(key[0], f"{key[1]}.* ({len(group)} keys)", key[2]) if len(group) > 1 else group[0]
        for key, group in groups.items()
    ]


def _short(value: Any) -> str:
    text = str(value)
    if len(text) >= 40 and set(text) <= set("0123456789abcdef"):
        return f"{text[:8]}…"
    return text if len(text) <= _CELL else f"{text[: _CELL - 1]}…"


def _value(run: int, difference: Difference) -> Text:
    value, first = difference.values[run], difference.values[0]
    faint = value in (MISSING, UNKNOWN) if isinstance(value, str) else False
    return Text(_short(value), style="dim" if faint else "" if value == first else "bold yellow")


def _by_value(labels: Sequence[str], difference: Difference) -> Text:
    """`8: A C · 16: B`."""
    groups: dict[str, list[str]] = {}
    for value, label in zip(difference.values, labels, strict=True):
        groups.setdefault(_short(value), []).append(label)
    return Text(" · ".join(f"{text}: {' '.join(runs)}" for text, runs in groups.items()))


def verdicts_table(verdicts: Sequence[Verdict], title: str, caption: str | None = None) -> Table:
    """A line a metric (and case) of one run: both values, their ratio's interval, effect size and verdict."""
    base, run = verdicts[0].trial.baseline, verdicts[0].trial.run

    def tested(verdict: Verdict) -> bool:
        return min(verdict.trial.samples) > 1

    def outcome(verdict: Verdict) -> Text:
        return Text(_brief(verdict), style=_COLORS.get(verdict.outcome, "dim"))

    columns = (
        Column("case", lambda verdict: verdict.trial.case, fold=True, once=True),
        Column("metric", lambda verdict: short_name(verdict.trial.metric), left=True),
        Column(base, lambda verdict: verdict.trial.base),
        Column(run, lambda verdict: verdict.trial.value),
        Column(f"{run} / {base}", lambda verdict: _interval(verdict.trial.ratio, bare=not tested(verdict))),
        Column(
            "effect", lambda verdict: verdict.trial.effect if tested(verdict) else None, 1, "{:+.2f}".format
        ),
        Column("p", lambda verdict: _p(verdict.p_adjusted) if tested(verdict) else None),
        Column("verdict", outcome, fold=True),
    )
    return column_table(title, columns, verdicts, caption)


def _brief(verdict: Verdict) -> str:
    """A verdict for a cell: its interval has a column, and its reason a line below the tables."""
    if verdict.outcome == "not comparable":
        return verdict.outcome
    if verdict.decided or verdict.outcome == "differs":
        return verdict.text.partition(" [")[0]
    if verdict.outcome == "no winner":
        return verdict.text.removeprefix("no winner: inside ").removeprefix("the ").partition(":")[0]
    return verdict.text


def _interval(ratio: Interval | None, *, bare: bool = False) -> str:
    """Three digits after the point only where the interval is narrow."""
    if ratio is None:
        return "–"
    if bare:
        return f"{ratio.estimate:.2f}"
    digits = 3 if ratio.high - ratio.low < 0.05 else 2
    return f"{ratio.estimate:.{digits}f} [{ratio.low:.{digits}f}, {ratio.high:.{digits}f}]"


def _p(value: float | None) -> str:
    if value is None:
        return "–"
    return "<.0001" if value < 1e-4 else f"{value:.4f}".lstrip("0") if value < 1 else "1"


def overview_table(comparison: RunComparison) -> Table:
    """Many runs: a line each with the ratios of the judged metrics, coloured where a winner is called."""
    by_column = {(v.trial.run, v.trial.metric, v.trial.case): v for v in comparison.verdicts}
    columns = list(dict.fromkeys((metric, case) for _, metric, case in by_column))[:6]
    table = plain_table(f"ratio to {comparison.labels[0]}", "green and red: beyond noise; else no winner")
    table.add_column("run", no_wrap=True)
    for metric, case in columns:
        table.add_column(short_name(metric) + (f"\n{case}" if case else ""), justify="right")
    for label in comparison.labels[1:]:
        cells = []
        for column in columns:
            verdict = by_column.get((label, *column))
            ratio = verdict.trial.ratio if verdict else None
            style = _COLORS.get(verdict.outcome, "dim") if verdict and verdict.decided else "dim"
            cells.append(Text(f"{ratio.estimate:.2f}" if ratio else "–", style=style))
        table.add_row(label, *cells)
    return table


def metrics_table(comparison: RunComparison) -> Table:
    """Metrics of every run with their ratio to the first, and counted metrics that differ; then case by case
    those that only cases have."""
    exact = {(v.trial.metric, v.trial.run): v for v in comparison.exact}
    left = len(comparison.metrics) - _MOST_METRICS
    caption = "a ratio here is no verdict" + (f"; {left} more in comparison.json" if left > 0 else "")
    table = plain_table("metrics, with ratio to the first", caption)
    table.add_column("metric", no_wrap=True)
    for label in comparison.labels:
        table.add_column(label, justify="right", overflow="fold")
    whole = [row for row in comparison.metrics if row.case is None]
    _add_ratios(table, whole)
    shown = {row.name for row in whole}
    for name in dict.fromkeys(v.trial.metric for v in comparison.exact):
        counted = [exact[name, label] for label in comparison.labels[1:]]
        if name not in shown and any(v.outcome == "differs" for v in counted):
            values = [Text(f"{number(v.trial.value)}  {v.text}") for v in counted]
            table.add_row(name, number(counted[0].trial.base), *values)
    _add_ratios(table, comparison.metrics[len(whole) : _MOST_METRICS])
    return table


def _add_ratios(table: Table, rows: Sequence[MetricRow]) -> None:
    """Adds a line per row, below the name of its case where that changes."""
    for above, row in zip((None, *rows), rows, strict=False):
        if row.case is not None and (above is None or above.case != row.case):
            table.add_section()
            table.add_row(Text(row.case, style="bold"))
        cells = [Text(number(row.values[0]))]
        for value, ratio in zip(row.values[1:], row.ratios[1:], strict=True):
            text = Text(number(value))
            cells.append(text if ratio is None else text.append(f"  {ratio:.2f}x", style="dim"))
        table.add_row(row.name, *cells)
