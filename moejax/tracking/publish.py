"""A finished result to a tracker, the same way for every experiment, so that a workspace can compare runs:

    summary             the flat metrics, under their own names
    case/NAME           history over the workload's cases, `case/index` apart
    timeline/NAME       history over time, of the first case or mode that has one; telemetry/NAME likewise
    cases, …_cdf, …     tables of bounded size
    plots               pictures, by file name

Nothing here is called while something is measured. No JAX here.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejax.core.files import to_jsonable
from moejax.results.compare.samples import case_name
from moejax.results.metric_names import CASE_FIELDS, lower_is_better
from moejax.results.metrics import LATENCIES, is_number, objectives, relative_load, samples_by_case
from moejax.tracking.base import Scalar, Tracker

_CDF_ROWS = 1_000  # of one metric's table, all cases together
_CURVE_POINTS = 240
_LOAD_ROWS = 10_000
# Of the cases' figures these have their best in the summary; with all of them it could not be read.
_SUMMARIZED = (
    "median_", "p99_", "output_throughput", "request_", "roofline_percent", "mfu", "mbu", "energy_per",
    "cost_", "tokens_per_s", "perplexity",
)  # fmt: skip
# A table's cells are numbers and words; lists and sections stay in result.json.
_PLAIN = (int, float, str, bool)


def publish(
    tracker: Tracker,
    result: Mapping[str, Any],
    *,
    requests: Iterable[Mapping[str, Any]] = (),
    plots: Sequence[Path] = (),
    files: Sequence[Path] = (),
    timeline: Mapping[str, Any] | None = None,
    tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> None:
    """Says all of a result to `tracker`.

    Args:
        result: the content of result.json.
        requests: rows of requests.jsonl, for the distributions.
        timeline: columns over `time_s` instead of the result's first timeline, which is finer.
        tables: an experiment's own ones, name → rows; lists and sections in them are said as JSON.
        plots, files: written ones; pictures are shown, files kept as the artifact `EXPERIMENT-result`.
    """
    cases = result.get("cases", [])
    names = dict.fromkeys(key for row in cases for key, value in row.items() if is_number(value))
    tracker.define_metric("case/index")
    for name in names:
        best = {True: "min", False: "max", None: "none"}[lower_is_better(name)]
        if not name.startswith(_SUMMARIZED):
            best = "none"
        tracker.define_metric(f"case/{name}", step_metric="case/index", summary=best)
    step = 0
    for step, row in enumerate(cases, start=1):
        values = {f"case/{name}": row[name] for name in names if is_number(row.get(name))}
        tracker.log({"case/index": step - 1, **values}, step=step - 1)
    if timeline is None:
        timeline = next((line for line in result.get("timeline") or () if line.get("time_s")), {})
    series = (result.get("telemetry") or {}).get("series") or {}
    telemetry = series if len(series.get("time_s", ())) > 1 else {}
    for prefix, curves in (("timeline", _columns(timeline)), ("telemetry", _columns(telemetry))):
        step = _log_curves(tracker, prefix, curves, step)
    summary: dict[str, Scalar] = {k: v for k, v in result["metrics"].items() if v is not None}
    goal = {"goodput_objectives": text} if (text := objectives(result)) else {}
    verdicts = {f"goal/{row['name']}": row["verdict"] for row in result.get("goals") or ()}
    tracker.summary({**expert_load_metrics(result), **summary, **goal, **verdicts})
    for name, (columns, lines) in result_tables(result, requests).items():
        tracker.table(name, columns, lines)
    for name, rows in (tables or {}).items():
        columns = list(dict.fromkeys(key for row in rows for key in row))
        tracker.table(name, columns, [[_as_cell(row.get(key)) for key in columns] for row in rows])
    for plot in plots:
        tracker.image(plot.stem, plot)
    if files:
        tracker.artifact(f"{result['experiment']}-result", "result", list(files))


Table = tuple[list[str], list[list[Any]]]


def result_tables(result: Mapping[str, Any], requests: Iterable[Mapping[str, Any]] = ()) -> dict[str, Table]:
    """Name → (columns, rows) of all tables that the result has something for."""
    tables: dict[str, Table] = {}
    for name in ("cases", "iterations", "differences", "goals"):
        if result.get(name):
            tables[name] = _rows_table(result[name])
    tables.update(cdf_tables(result, requests))
    load = expert_load_table(result)
    if load[1]:
        tables["expert_load_table"] = load
    devices = (result.get("telemetry") or {}).get("devices")
    if devices:
        tables["telemetry_devices"] = _rows_table(devices)
    return tables


def cdf_tables(result: Mapping[str, Any], requests: Iterable[Mapping[str, Any]]) -> dict[str, Table]:
    """`ttft_cdf`, `tpot_cdf`, `itl_cdf`, `e2el_cdf`: milliseconds, share of the requests (of the tokens, for
    `itl`) that took no longer, and case; quantiles at even distances, at most 1,000 rows a table."""
    rows = list(requests)
    keys = ("name", *CASE_FIELDS)
    fields = [
        {key: case[key] for key in keys if case.get(key) is not None} for case in result.get("cases", [])
    ]
    tables: dict[str, Table] = {}
    for metric in LATENCIES:
        samples = samples_by_case(rows, f"{metric}_ms")
        if not samples:
            continue
        points = max(11, min(101, _CDF_ROWS // len(samples)))
        shares = np.linspace(0.0, 1.0, points)
        lines = []
        for case in sorted(samples)[: _CDF_ROWS // points]:
            label = (case < len(fields) and case_name(fields[case])) or f"case {case}"
            quantiles = np.quantile(samples[case], shares)
            lines += [
                [float(f"{quantile:.6g}"), round(float(share), 4), label]
                for quantile, share in zip(quantiles, shares, strict=True)
            ]
        tables[f"{metric}_cdf"] = (["milliseconds", "share", "case"], lines)
    return tables


def expert_load_table(result: Mapping[str, Any]) -> Table:
    """Layer, expert, tokens, and the load relative to an even share; empty where nothing was recorded or the
    model has more experts than a table takes rows."""
    load = relative_load(result)
    columns = ["layer", "expert", "tokens", "load"]
    if load is None or load.size > _LOAD_ROWS:
        return columns, []
    return columns, [
        [layer, expert, int(result["routing"]["counts"][layer][expert]), float(f"{value:.4g}")]
        for (layer, expert), value in np.ndenumerate(load)
        if np.isfinite(value)
    ]


def expert_load_metrics(result: Mapping[str, Any]) -> dict[str, Scalar]:
    """`expert_load_max` (the busiest expert's load over an even share, mean over the layers) and
    `expert_load_entropy` (of the shares, 1 is even, mean over the layers); nothing without a recorded
    pass."""
    load = relative_load(result)
    if load is None or load.shape[1] < 2:
        return {}
    load = load[np.isfinite(load).all(axis=1)]
    shares = load / load.shape[1]
    logs = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    entropy = -(shares * logs).sum(axis=1) / np.log(load.shape[1])
    return {"expert_load_max": float(load.max(axis=1).mean()), "expert_load_entropy": float(entropy.mean())}


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    plain = [k for k in columns if all(row.get(k) is None or isinstance(row[k], _PLAIN) for row in rows)]
    return plain, [[row.get(key) for key in plain] for row in rows]


def _as_cell(value: Any) -> Any:
    return value if value is None or isinstance(value, _PLAIN) else json.dumps(to_jsonable(value))


def _columns(curves: Mapping[str, Any]) -> Mapping[str, Sequence[Any]]:
    """Returns the curves that have a value for each instant."""
    count = len(curves.get("time_s", ()))
    return {k: v for k, v in curves.items() if isinstance(v, Sequence) and len(v) == count and count}


def _log_curves(tracker: Tracker, prefix: str, curves: Mapping[str, Sequence[Any]], step: int) -> int:
    """Curves over `time_s` as rows of the history, thinned evenly to at most 240; returns the next step."""
    if not curves:
        return step
    for name in curves:
        if name != "time_s":
            tracker.define_metric(f"{prefix}/{name}", step_metric=f"{prefix}/time_s", summary="mean")
    count = len(curves["time_s"])
    places = np.unique(np.linspace(0, count - 1, min(count, _CURVE_POINTS)).round().astype(int))
    for place in places:
        row = {f"{prefix}/{k}": v[place] for k, v in curves.items() if is_number(v[place])}
        tracker.log(row, step=step)
        step += 1
    return step
