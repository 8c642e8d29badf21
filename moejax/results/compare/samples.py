"""Samples of a run's metrics: one number an iteration, case by case.

The requests of an iteration are measured at the same moment of the machine and, in a batch, by the same
steps, so that the iteration is what counts as one sample, however many requests it holds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moejax.results.compare.runs import Run
from moejax.results.metric_names import CASE_FIELDS, LATENCIES, RATES, latency_name, least_samples
from moejax.results.metrics import statistic_of

Values = NDArray[np.float64]
Rows = Sequence[Mapping[str, Any]]

_SHORT = {
    "bucket": "rows", "batch_size": "bs", "prompt_len": "in", "output_len": "out", "request_rate": "rate",
    "concurrency": "users",
}  # fmt: skip
_MODES = ("variant", "backend", "batching")


class Cases:
    """A run's cases and the samples of each.

    Attributes:
        run: what it is of.
        rows: result.json's `cases`.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.rows: list[Mapping[str, Any]] = list(run.result.get("cases") or [])
        # Where a case's row has no inter-token latency, those of its requests are made up (`itl_known`).
        self._made_up = {i for i, row in enumerate(self.rows) if row.get("mean_itl_ms", 0.0) is None}
        rows = run.requests or ()
        if self._made_up:
            rows = [{**r, "itl_ms": ()} if r.get("case", 0) in self._made_up else r for r in rows]
        self._iterations = _by_iteration(self.rows, rows)
        self._rates: dict[int, list[Mapping[str, Any]]] = {}
        for row in run.result.get("iterations") or ():
            self._rates.setdefault(int(row.get("case", 0)), []).append(row)

    def fields(self, index: int) -> dict[str, Any]:
        """Returns the fields that tell a case from others. In a throughput run the batch is a limit and
        lengths are means, which follow from the configuration."""
        row = self.rows[index]
        kept = CASE_FIELDS[: 5 if "batching" in row or "request_rate" in row else None]
        return {name: row[name] for name in kept if row.get(name) is not None}

    def requests(self, index: int) -> Rows:
        """A case's finished requests, all iterations."""
        return [row for rows in self._iterations.get(index, []) for row in rows]

    def lengths(self, index: int) -> set[tuple[int, ...]]:
        """The output lengths that the finished requests of an iteration had, of all iterations; one where the
        work was the same every time, none without requests."""
        groups = self._iterations.get(index, [])
        return {tuple(sorted(int(row["output_len"]) for row in rows)) for rows in groups}

    def iterations(self, index: int) -> int:
        """How often a case was measured."""
        return max(len(self._iterations.get(index, ())), len(self._rates.get(index, ())))

    def samples(self, index: int, metric: str) -> tuple[Values, str | None]:
        """A metric's value in each iteration of a case, and why there are none if there are none."""
        if metric in RATES:
            return self._rate(index, metric), None
        parts = latency_name(metric)
        if parts is None:
            return np.empty(0), "measured once a run"
        statistic, latency = parts
        if latency == "itl" and index in self._made_up:
            return np.empty(0), "the tokens' instants are not known"
        groups = [_latencies(rows, latency) for rows in self._iterations.get(index, [])]
        groups = [group for group in groups if group.size]
        needed, least = least_samples(statistic), min((group.size for group in groups), default=100)
        if least < needed:
            return np.empty(0), f"needs {needed} values an iteration, has {least}"
        return np.array([statistic_of(group, statistic) for group in groups]), None

    def _rate(self, index: int, metric: str) -> Values:
        noted = [row.get(metric) for row in self._rates.get(index, ())]
        if any(value is not None for value in noted):
            return np.array([value for value in noted if value is not None], dtype=np.float64)
        if metric == "request_goodput" or self._rates.get(index):
            return np.empty(0)
        return np.array([_rate(rows, metric) for rows in self._iterations.get(index, []) if rows])


def _by_iteration(cases: Rows, requests: Rows) -> dict[int, list[list[Mapping[str, Any]]]]:
    """case → iterations → rows of the requests that ended by themselves."""
    grouped: dict[int, dict[int, list[Mapping[str, Any]]]] = {}
    seen: dict[int, int] = {}
    for row in requests:
        case = int(row.get("case", 0))
        place = seen.get(case, 0)
        seen[case] = place + 1
        iteration = row.get("iteration")
        if iteration is None:
            # A latency run's file has its batches one after the other.
            size = (cases[case].get("batch_size") if case < len(cases) else None) or 1
            iteration = place // int(size)
        if row.get("e2el_ms") is not None:
            grouped.setdefault(case, {}).setdefault(int(iteration), []).append(row)
    return {case: [rows[i] for i in sorted(rows)] for case, rows in grouped.items()}


def _latencies(rows: Rows, name: str) -> Values:
    if name == "itl":
        parts = [np.asarray(row.get("itl_ms") or (), dtype=np.float64) for row in rows]
        return np.concatenate(parts) if parts else np.empty(0)
    values = [row.get(f"{name}_ms") for row in rows]
    return np.array([value for value in values if value is not None], dtype=np.float64)


def _rate(rows: Rows, metric: str) -> float:
    """A rate of one iteration from its requests: from the first arrival to the last token."""
    arrivals = [float(row.get("arrival_s") or 0.0) for row in rows]
    ends = [start + row["e2el_ms"] / 1e3 for start, row in zip(arrivals, rows, strict=True)]
    count = {
        "request_throughput": lambda row: 1,
        "output_throughput": lambda row: row["output_len"],
        "total_token_throughput": lambda row: row["output_len"] + row["prompt_len"],
    }[metric]
    return sum(count(row) for row in rows) / (max(ends) - min(arrivals))


def latency_values(cases: Cases, name: str, index: int | None = None) -> Values:
    """All values of `ttft`, `tpot`, `itl` or `e2el` in milliseconds, of one case or of all."""
    if name not in LATENCIES:
        raise ValueError(f"no latency {name!r} (known: {', '.join(LATENCIES)})")
    chosen = range(len(cases.rows) or 1) if index is None else [index]
    parts = [_latencies(cases.requests(i), name) for i in chosen]
    return np.concatenate(parts) if parts else np.empty(0)


def match_cases(base: Cases, other: Cases) -> tuple[list[tuple[int, int, str]], list[str], list[str]]:
    """Which case of one run is which of the other's.

    A field that is the same throughout a run but another in the other run (one run static, the other
    continuous) is what the runs differ in, and does not keep their cases apart.

    Returns:
        (base's index, other's index, label) of each pair, and the labels of cases that only one has.
    """
    keys = [[cases.fields(i) for i in range(len(cases.rows))] for cases in (base, other)]
    names = [
        name
        for name in CASE_FIELDS
        if name not in _MODES or any(len({str(key.get(name)) for key in side}) > 1 for side in keys)
    ]
    places: dict[tuple[str, ...], int] = {}
    for index, key in enumerate(keys[1]):
        places.setdefault(tuple(str(key.get(name)) for name in names), index)
    pairs, taken, only_base = [], set(), []
    for index, key in enumerate(keys[0]):
        match = places.get(tuple(str(key.get(name)) for name in names))
        text = case_name({name: key[name] for name in names if name in key})
        if match is None or match in taken:
            only_base.append(text)
        else:
            pairs.append((index, match, text))
            taken.add(match)
    keys[1] = [{name: key[name] for name in names if name in key} for key in keys[1]]
    only_other = [case_name(key) for index, key in enumerate(keys[1]) if index not in taken]
    return pairs, only_base, only_other


def shared_cases(cases: Sequence[Cases]) -> list[tuple[str, tuple[int, ...]]]:
    """Label and each run's place of the cases that all runs have; `match_cases` says which is which."""
    base, matched = cases[0], [match_cases(cases[0], other)[0] for other in cases[1:]]
    places = [{one: two for one, two, _ in pairs} for pairs in matched]
    labels = {one: text for pairs in matched for one, _, text in pairs}
    return [
        (labels.get(i, case_name(base.fields(i))), (i, *(of[i] for of in places)))
        for i in range(len(base.rows))
        if all(i in of for of in places)
    ]


def cases_apart(base: Cases, other: Cases) -> str:
    """Says why two runs have no case in common: in which fields, and how, their cases differ."""
    parts = []
    for name in CASE_FIELDS:
        values = [
            dict.fromkeys(str(cases.fields(i).get(name, "none")) for i in range(len(cases.rows)))
            for cases in (base, other)
        ]
        if name not in _MODES and set(values[0]) != set(values[1]):
            texts = [", ".join(side) or "of no case" for side in values]
            parts.append(f"{name} is {texts[0]} in {base.run.label} and {texts[1]} in {other.run.label}")
    return "no case in common: " + ("; ".join(parts) or "each value is in both, but not together")


def case_name(fields: Mapping[str, Any]) -> str:
    """Such as `bs=8 in=64 out=32` or `continuous rate=8`."""
    parts = []
    for name, value in fields.items():
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        parts.append(f"{_SHORT[name]}={shown}" if name in _SHORT else shown)
    return " ".join(parts)


def short_case_name(row: Mapping[str, Any]) -> str:
    """A case by what it is offered: its request rate or users, or the batch and the lengths."""
    names = ("request_rate", "concurrency") if "request_rate" in row else CASE_FIELDS[-3:]
    return case_name({name: row[name] for name in names if row.get(name) is not None})


def modes_differ(cases: Cases) -> bool:
    """Whether a run's cases are different ways of serving, of which no average says anything."""
    keys = [cases.fields(index) for index in range(len(cases.rows))]
    return any(len({str(key.get(name)) for key in keys}) > 1 for name in (*_MODES, *CASE_FIELDS[3:5]))
