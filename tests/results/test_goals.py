"""Goals: which are refused, what a result says of them, and where it is shown."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moejax.core.errors import ConfigError
from moejax.report.experiments import print_result
from moejax.results.goals import Goal
from moejax.results.result import load_result, write_result
from moejax.tracking.publish import publish
from tests.bench.runs import run_into
from tests.tracking.recorder import Recorder

GOAL: dict[str, Any] = {"metric": "median_tpot_ms", "op": "<=", "value": 2, "source": "a page"}
CASES = [
    {"backend": "moejax", "batch_size": 1, "median_tpot_ms": 1.0, "p99_itl_ms": None},
    {"backend": "moejax", "batch_size": 8, "median_tpot_ms": 3.0, "p99_itl_ms": 4.0},
    {"backend": "other", "batch_size": 8, "median_tpot_ms": 9.0, "p99_itl_ms": 4.0},
]
RESULT: dict[str, Any] = {
    "experiment": "latency", "cases": CASES,
    "metrics": {"failed": 3, "output_throughput": 50.0, "request_goodput": None},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "verdict", "actual", "factor"),
    [
        ({"metric": "output_throughput", "op": ">=", "value": 50}, "met", 50.0, None),
        ({"metric": "output_throughput", "op": ">", "value": 50}, "missed", 50.0, 1.0),
        ({"metric": "output_throughput", "op": ">=", "value": 100.0}, "missed", 50.0, 2.0),
        ({}, "missed", 3.0, 1.5),  # the worst of the first engine's cases
        ({"op": ">="}, "missed", 1.0, 2.0),
        ({"case": {"batch_size": 1}}, "met", 1.0, None),
        ({"case": {"backend": "other"}, "op": "<"}, "missed", 9.0, 4.5),
        ({"metric": "failed", "value": 0}, "missed", 3, None),  # no ratio to nothing
    ],
)
def test_a_goal_is_met_or_missed_by_a_factor(
    changed: dict[str, Any], verdict: str, actual: float, factor: float | None
) -> None:
    row = Goal(**{**GOAL, **changed}).verdict(RESULT)
    assert (row["verdict"], row["actual"], row["factor"], row["reason"]) == (verdict, actual, factor, None)
    assert row["source"] == "a page"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"metric": "request_goodput"}, "this latency run has no request_goodput"),
        ({"metric": "p99_itl_ms"}, "no value in 1 of 2 cases"),
        ({"case": {"batch_size": 2}}, "this latency run has no median_tpot_ms (batch_size=2)"),
        (
            {"metric": "total_token_throughput"},
            "this latency run has no total_token_throughput; did you mean 'output_throughput'?",
        ),
    ],
)
def test_what_has_no_value_is_not_measurable_here(changed: dict[str, Any], reason: str) -> None:
    row = Goal(**{**GOAL, **changed}).verdict(RESULT)
    assert (row["verdict"], row["actual"], row["reason"]) == ("not measurable here", None, reason)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"op": "=<"}, "goals.op: unknown value '=<'; did you mean '<'? (known: <, <=, >, >=)"),
        (
            {"metric": "median_tpt_ms"},
            "goals.metric: unknown metric 'median_tpt_ms'; did you mean 'median_tpot_ms'?",
        ),
        ({"case": {"batchsize": 1}}, "goals.metric: unknown metric 'batchsize'; did you mean 'batch_size'?"),
        ({"value": "fast"}, "goals.value must be a number, got 'fast'"),
        ({"value": float("nan")}, "goals.value must be a number, got nan"),
        ({"source": ""}, "goals.source must be a string that is not empty"),
    ],
)
def test_a_goal_that_is_none_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Goal(**{**GOAL, **changed})
    assert str(caught.value).startswith(message)


def test_a_run_has_verdicts_in_its_result_on_the_terminal_and_at_its_tracker(tmp_path: Path) -> None:
    goals = [GOAL, {**GOAL, "case": {"batch_size": 8}}, {**GOAL, "metric": "failed"}]
    run = run_into(tmp_path / "run", config={"goals": goals})
    result = run.result(metrics=RESULT["metrics"], cases=CASES)
    assert [row["verdict"] for row in result["goals"]] == ["missed"] * 3
    assert load_result(write_result(result, tmp_path))["goals"] == result["goals"]
    assert "goals" not in run_into(tmp_path / "run").result(metrics={}, cases=[])
    console = Console(width=140, record=True, file=io.StringIO())
    print_result({**result, "experiment": "none of ours"}, console)
    shown = console.export_text()
    assert "goals, measured on" in shown and "missed 1.5x" in shown and "(batch_size=8)" in shown
    recorder = Recorder()
    publish(recorder, result)  # type: ignore[arg-type]
    assert recorder.final["goal/median_tpot_ms (batch_size=8)"] == "missed"
    assert "verdict" in recorder.tables["goals"][0]
