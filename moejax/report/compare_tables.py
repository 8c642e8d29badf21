"""A comparison on the terminal, for a hundred columns."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from moejax.report.style import commit_name, device_name, model_name
from moejax.report.tables import number, plain_table
from moejax.results.compare.comparison import RunComparison
from moejax.results.compare.inputs import MISSING, UNKNOWN, Difference
from moejax.results.compare.runs import Run
from moejax.results.metric_names import short_name
from moejax.results.statistics import Interval
from moejax.results.verdict import ALPHA, Verdict

_MOST_INPUTS = 40  # keys in the table; comparison.json has them all
_MOST_CASES = 24  # verdicts by case of one run
_MOST_COLUMNS = 4  # runs side by side; more go below one another
_CELL = 34  # characters of an input's value
_COLORS = {"better": "green", "worse": "red", "too few": "yellow", "not comparable": "yellow"}


def comparison_tables(comparison: RunComparison) -> list[Table]:
    """The runs, the inputs that differ, the verdicts and the flat metrics; each where there is any."""
    tables = [runs_table(comparison)]
    if comparison.differences:
        tables.append(inputs_table(comparison))
    many = len(comparison.runs) > _MOST_COLUMNS
    for label in comparison.labels[1:]:
        mine, each = (
            [verdict for verdict in verdicts if verdict.trial.run == label]
            for verdicts in (comparison.verdicts, comparison.case_verdicts)
        )
        against = f"{label} against {comparison.labels[0]}"
        where = ", all cases" if each else ""
        if mine and not many:
            caption = _explained(comparison) if label == comparison.labels[1] else None
            tables.append(verdicts_table(mine, f"{against}{where}", caption))
        if each and not many:
            tests = sum(verdict.p_adjusted is not None for verdict in comparison.case_verdicts)
            note = f"p adjusted over {tests} tests"
            if len(each) > _MOST_CASES:
                note += f"; {len(each) - _MOST_CASES} more verdicts in comparison.json"
            tables.append(verdicts_table(each[:_MOST_CASES], f"{against}, case by case", note))
    if many and comparison.verdicts:
        tables.append(overview_table(comparison))
    else:
        tables.append(metrics_table(comparison))
    return tables


def _explained(comparison: RunComparison) -> str:
    tests = sum(verdict.p_adjusted is not None for verdict in comparison.verdicts)
    return (
        "values: medians over iterations; ratio: with its 95 % bootstrap interval; effect: Cliff's delta, ±1"
        " if no iteration of one lies among the other's; p: rank test, adjusted (Holm) over"
        f" {tests} tests; a winner needs p ≤ {ALPHA:g} and an interval beyond 1 and session noise"
        f" ({comparison.floor.low:.2f}–{comparison.floor.high:.2f})"
    )


def runs_table(comparison: RunComparison) -> Table:
    """A line a run: letter, folder, start, model, device, commit, how often each case was measured."""
    table = plain_table(f"compare: {comparison.experiment}")
    table.add_column("", no_wrap=True)
    table.add_column("run", overflow="fold")
    table.add_column("began (UTC)", no_wrap=True)
    for name in ("model", "device"):
        table.add_column(name, overflow="fold")
    for name in ("commit", "times"):
        table.add_column(name, no_wrap=True)
    for run, cases in zip(comparison.runs, comparison.cases, strict=True):
        times = min((cases.iterations(index) for index in range(len(cases.rows))), default=0)
        table.add_row(
            Text(run.label, style="bold"),
            run.name if run.source == "folder" else f"{run.name} (W&B)",
            _began(run),
            model_name(run.result) or "–",
            device_name(run.result) or "–",
            commit_name(run.result) or "–",
            number(times or None),
        )
    return table


def _began(run: Run) -> str:
    return str(run.result["provenance"].get("time_utc") or "–")[:16].replace("T", " ")


def inputs_table(comparison: RunComparison) -> Table:
    """What differs in how the runs came about, by kind; yellow where not the baseline's. Keys that a
    run does not have at all are drawn together by section."""
    rows = _collapsed(comparison.differences)
    caption = None
    if len(rows) > _MOST_INPUTS:
        caption = f"and {len(rows) - _MOST_INPUTS} more, in comparison.json"
    table = plain_table("inputs that differ", caption)
    table.add_column("kind", no_wrap=True)
    table.add_column("key", overflow="fold")
    many = len(comparison.runs) > _MOST_COLUMNS
    for label in ("values",) if many else comparison.labels:
        table.add_column(label, overflow="fold")
    kind = ""
    for difference in rows[:_MOST_INPUTS]:
        values = difference.values
        cells: Iterable[Text] = [_value(value, values[0]) for value in values]
        if many:
            cells = [_by_value(values, comparison.labels)]
        table.add_row("" if difference.kind == kind else difference.kind, difference.key, *cells)
        kind = difference.kind
    return table


def _collapsed(differences: Sequence[Difference]) -> list[Difference]:
    """Keys that differ only in that some runs do not have them, as one line a section."""
    kept: list[Difference] = []
    counts: dict[tuple[Any, ...], int] = {}
    for difference in differences:
        known = {str(value) for value in difference.values if value not in (MISSING, UNKNOWN)}
        section, dot, _ = difference.key.partition(".")
        shape = tuple(MISSING if value == MISSING else "set" for value in difference.values)
        key = (difference.kind, section, shape)
        if len(known) > 1 or not dot or MISSING not in shape:
            kept.append(difference)
        elif key in counts:
            counts[key] += 1
        else:
            counts[key] = 1
            kept.append(difference)
    return [
        Difference(d.kind, f"{section}.* ({n} keys)", shape) if n > 1 else d
        for d in kept
        for section in [d.key.partition(".")[0]]
        for shape in [tuple(MISSING if value == MISSING else "set" for value in d.values)]
        for n in [counts.get((d.kind, section, shape), 1) if MISSING in shape else 1]
    ]


def _short(value: Any) -> str:
    text = str(value)
    if len(text) >= 40 and set(text) <= set("0123456789abcdef"):
        return f"{text[:8]}…"
    return text if len(text) <= _CELL else f"{text[: _CELL - 1]}…"


def _value(value: Any, first: Any) -> Text:
    faint = value in (MISSING, UNKNOWN) if isinstance(value, str) else False
    return Text(_short(value), style="dim" if faint else "" if value == first else "bold yellow")


def _by_value(values: Sequence[Any], labels: Sequence[str]) -> Text:
    """`8: A C · 16: B`."""
    groups: dict[str, list[str]] = {}
    for value, label in zip(values, labels, strict=True):
        groups.setdefault(_short(value), []).append(label)
    return Text(" · ".join(f"{text}: {' '.join(found)}" for text, found in groups.items()))


def verdicts_table(verdicts: Sequence[Verdict], title: str, caption: str | None = None) -> Table:
    """A line a metric (and case) of one run: both values, their ratio's interval, effect size and verdict."""
    base, run = verdicts[0].trial.baseline, verdicts[0].trial.run
    table = plain_table(title, caption)
    with_case = any(verdict.trial.case for verdict in verdicts)
    if with_case:
        table.add_column("case", overflow="fold")
    table.add_column("metric", no_wrap=True)
    for name in (base, run, f"{run} / {base}", "effect", "p"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", overflow="fold")
    case = None
    for verdict in verdicts:
        trial = verdict.trial
        cells = [] if not with_case else ["" if trial.case == case else (trial.case or "")]
        case = trial.case
        tested = min(trial.samples) > 1
        table.add_row(
            *cells,
            short_name(trial.metric),
            number(trial.base),
            number(trial.value),
            _interval(trial.ratio, bare=not tested),
            f"{trial.effect:+.2f}" if trial.effect is not None and tested else "–",
            _p(verdict.p_adjusted) if tested else "–",
            Text(_brief(verdict), style=_COLORS.get(verdict.outcome, "dim")),
        )
    return table


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
    found = {(v.trial.run, v.trial.metric, v.trial.case): v for v in comparison.verdicts}
    columns = list(dict.fromkeys((metric, case) for _, metric, case in found))[:6]
    table = plain_table(f"ratio to {comparison.labels[0]}", "green and red: beyond noise; else no winner")
    table.add_column("run", no_wrap=True)
    for metric, case in columns:
        table.add_column(short_name(metric) + (f"\n{case}" if case else ""), justify="right")
    for label in comparison.labels[1:]:
        cells = []
        for column in columns:
            verdict = found.get((label, *column))
            ratio = verdict.trial.ratio if verdict else None
            style = _COLORS.get(verdict.outcome, "dim") if verdict and verdict.decided else "dim"
            cells.append(Text(f"{ratio.estimate:.2f}" if ratio else "–", style=style))
        table.add_row(label, *cells)
    return table


def metrics_table(comparison: RunComparison) -> Table:
    """Flat metrics of every run with their ratio to the first, and counted metrics that differ."""
    exact = {(v.trial.metric, v.trial.run): v for v in comparison.exact}
    table = plain_table("metrics of the whole run, with ratio to the first", "a ratio here is no verdict")
    table.add_column("metric", no_wrap=True)
    for label in comparison.labels:
        table.add_column(label, justify="right", overflow="fold")
    for row in comparison.metrics:
        cells = [Text(number(row.values[0]))]
        for value, ratio in zip(row.values[1:], row.ratios[1:], strict=True):
            text = Text(number(value))
            cells.append(text if ratio is None else text.append(f"  {ratio:.2f}x", style="dim"))
        table.add_row(row.name, *cells)
    shown = {row.name for row in comparison.metrics}
    for name in dict.fromkeys(v.trial.metric for v in comparison.exact):
        found = [exact[name, label] for label in comparison.labels[1:]]
        if name not in shown and any(v.outcome == "differs" for v in found):
            values = [Text(f"{number(v.trial.value)}  {v.text}") for v in found]
            table.add_row(name, number(found[0].trial.base), *values)
    return table
