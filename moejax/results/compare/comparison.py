"""The outcome of a comparison of runs, as data and in words."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moejax.results.compare.inputs import KINDS, UNKNOWN, Difference, between, same_inputs
from moejax.results.compare.runs import Run
from moejax.results.compare.samples import Cases, cases_apart, match_cases
from moejax.results.metric_names import short_name
from moejax.results.verdict import ALPHA, Floor, Trial, Verdict

SCHEMA = 2
"""Version of comparison.json."""

_EXACT_KEYS = ("metric", "run", "value", "baseline_value", "outcome", "text")


@dataclass(frozen=True)
class MetricRow:
    """One metric of every run: a flat one, or one of a case that all of them have."""

    name: str
    values: tuple[float | None, ...]
    case: str | None = None

    @property
    def ratios(self) -> tuple[float | None, ...]:
        """Each value over the first; None where it is not defined."""
        base = self.values[0]
        return tuple(None if value is None or not base else value / base for value in self.values)


@dataclass(frozen=True)
class RunComparison:
    """Runs side by side; the first is the baseline.

    Attributes:
        runs: in the order given; their labels are A, B, C, …
        cases: each run's cases and samples.
        differences: inputs in which any two runs differ.
        blocked: label → kind → why that run cannot be compared with the baseline.
        verdicts: of each judged metric, over all cases or of the only one; a family of tests.
        case_verdicts: the same in each of several cases; a family of its own.
        exact: of metrics that are counted or computed.
        metrics: metrics with their ratio to the baseline, without any verdict: flat ones, then those of each
            case that not every run has over all its cases.
        notes: what is to be known besides, a line each.
        floor: what counts as noise between two processes.
    """

    runs: tuple[Run, ...]
    cases: tuple[Cases, ...]
    differences: tuple[Difference, ...]
    blocked: Mapping[str, Mapping[str, str]]
    verdicts: tuple[Verdict, ...]
    case_verdicts: tuple[Verdict, ...]
    exact: tuple[Verdict, ...]
    metrics: tuple[MetricRow, ...]
    notes: tuple[str, ...]
    floor: Floor

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(run.label for run in self.runs)

    @property
    def experiment(self) -> str:
        return self.runs[0].experiment

    def identical_inputs(self, index: int) -> bool:
        """Whether run `index` had the first one's inputs, as far as is recorded. Where the results go (the
        tracker, the log) is no input."""
        return same_inputs(self.differences, index)

    def lines(self) -> list[str]:
        """The outcome in words: for each run the inputs that differ by kind, and who wins in what."""
        lines = []
        for index, run in enumerate(self.runs[1:], start=1):
            lines.append(f"{run.label} against {self.runs[0].label}: {self._inputs_line(index)}")
            mine = [verdict for verdict in self.verdicts if verdict.trial.run == run.label]
            lines += [f"  {verdict.sentence()}" for verdict in mine if verdict.decided]
            reasons = dict.fromkeys(verdict.text for verdict in mine if not verdict.decided)
            for text in reasons:
                lines.append(f"  {text}: {_named([v for v in mine if v.text == text], len(mine))}")
            if not mine:
                lines.append(f"  no verdict: {self._why_none(index)}")
        return lines

    def _why_none(self, index: int) -> str:
        """Says why nothing at all of a run could be judged."""
        base, other = self.cases[0], self.cases[index]
        without = [cases.run.label for cases in (base, other) if not cases.run.requests]
        if without:
            return f"nothing of {' and '.join(without)} was measured repeatedly"
        if not match_cases(base, other)[0]:
            return cases_apart(base, other)
        judged = (note for note in self.notes if " is not judged: " in note)
        return next(judged, "nothing that both have was measured repeatedly")

    def _inputs_line(self, index: int) -> str:
        apart = [d for d in between(self.differences, 0, index) if d.kind != "tracking"]
        if not apart:
            unsaid = any(UNKNOWN in (d.values[0], d.values[index]) for d in self.differences)
            unsaid = unsaid or bool(self.runs[index].unknown or self.runs[0].unknown)
            return "inputs are identical" + (" as far as recorded" if unsaid else "")
        counts = {kind: sum(d.kind == kind for d in apart) for kind in KINDS}
        return "inputs differ: " + ", ".join(f"{kind} ({n})" for kind, n in counts.items() if n)

    def to_dict(self) -> dict[str, Any]:
        """comparison.json's content."""
        return {
            "schema": SCHEMA,
            "experiment": self.experiment,
            "alpha": ALPHA,
            "runs": [
                {
                    "label": run.label,
                    "name": run.name,
                    "path": str(run.path),
                    "source": run.source,
                    "time_utc": run.result["provenance"].get("time_utc"),
                    "missing": list(run.missing),
                    "identical_inputs": self.identical_inputs(index),
                    "not_comparable": dict(self.blocked.get(run.label, {})),
                }
                for index, run in enumerate(self.runs)
            ],
            "differences": [asdict(difference) for difference in self.differences],
            "noise_floor": {"low": self.floor.low, "high": self.floor.high},
            "verdicts": [verdict.row() for verdict in self.verdicts],
            "case_verdicts": [verdict.row() for verdict in self.case_verdicts],
            "exact": [{key: verdict.row()[key] for key in _EXACT_KEYS} for verdict in self.exact],
            "metrics": {
                f"{row.name} [{row.case}]" if row.case else row.name: {
                    "values": list(row.values),
                    "ratios": list(row.ratios),
                }
                for row in self.metrics
            },
            "notes": list(self.notes),
            "summary": self.lines(),
        }

    def _repr_html_(self) -> str:
        """A card for notebooks: the tables of the terminal and the outcome in words."""
        from moejax.core import html
        from moejax.report.cards import table_html
        from moejax.report.compare_tables import comparison_tables

        parts = [html.note(line, strong=True) for line in self.lines()]
        parts += [table_html(table) for table in comparison_tables(self)]
        parts += [html.note(line, color="#b58900") for line in self.notes]
        return html.card(f"compare: {self.experiment}", *parts)


def _named(verdicts: Sequence[Verdict], total: int) -> str:
    """The verdicts' metrics, or "all" of them."""
    if len(verdicts) == total and total > 1:
        return "all metrics"
    names = dict.fromkeys(short_name(verdict.trial.metric) for verdict in verdicts)
    return ", ".join(names)


def exact_trial(name: str, run: Run, base: Run) -> Trial:
    """A counted metric of a run and the baseline."""
    values = (run.result["metrics"].get(name), base.result["metrics"].get(name))
    return Trial(name, None, run.label, base.label, *values)
