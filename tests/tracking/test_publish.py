"""What a tracker hears of a finished result."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax.tracking.publish import cdf_tables, expert_load_metrics, publish, result_tables
from tests.tracking.recorder import Recorder


def result(**extra: Any) -> dict[str, Any]:
    cases = [
        {"case": i, "batching": "continuous", "batch_size": 4, "prompt_len": 8, "output_len": 2,
         "median_tpot_ms": 2.0 - i, "output_throughput": 10.0 * i, "request_goodput": None, "lengths": [1, 2]}
        for i in range(2)
    ]  # fmt: skip
    return {
        "experiment": "latency",
        "metrics": {"median_tpot_ms": 1.5, "output_throughput": 5.0, "request_goodput": None},
        "cases": cases,
        **extra,
    }


def requests(count: int, tokens: int, cases: int = 1) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {"case": i % cases, "ttft_ms": float(i + 1), "tpot_ms": None, "e2el_ms": 100.0 + i,
         "itl_ms": rng.random(tokens).tolist()}
        for i in range(count)
    ]  # fmt: skip


def test_flat_metrics_are_the_summary_and_cases_have_names_of_their_own() -> None:
    tracker = Recorder()
    publish(tracker, result())
    assert tracker.final == {"median_tpot_ms": 1.5, "output_throughput": 5.0}
    assert tracker.column("case/median_tpot_ms") == [2.0, 1.0] and tracker.column("case/index") == [0, 1]
    assert not any("median_tpot_ms" in row for _, row in tracker.rows)  # it would overwrite the summary
    assert tracker.defined["case/median_tpot_ms"] == {"step_metric": "case/index", "summary": "min"}
    assert tracker.defined["case/output_throughput"]["summary"] == "max"
    assert tracker.defined["case/batch_size"]["summary"] == "none"
    columns, rows = tracker.tables["cases"]
    assert "lengths" not in columns and rows[1][columns.index("output_throughput")] == 10.0


def test_steps_never_fall_and_curves_are_thinned_to_their_ends() -> None:
    times = np.linspace(0, 9, 1000).tolist()
    timeline = [{"case": 0, "num_blocks": 8, "time_s": times, "running_max": times, "note": ["x"] * 1000}]
    series = {"time_s": [1.0, 2.0, 3.0], "cpu_percent": [50.0, None, 70.0]}
    tracker = Recorder()
    publish(tracker, result(timeline=timeline, telemetry={"series": series}))
    steps = [step for step, _ in tracker.rows]
    assert steps == list(range(len(steps)))
    assert len(tracker.column("timeline/time_s")) == 240
    assert (tracker.column("timeline/running_max")[0], tracker.column("timeline/running_max")[-1]) == (0, 9)
    assert tracker.column("telemetry/cpu_percent") == [50.0, 70.0]
    assert not {"timeline/note", "timeline/num_blocks"} & tracker.names
    assert tracker.defined["telemetry/cpu_percent"]["step_metric"] == "telemetry/time_s"


def test_a_finer_timeline_is_replaced_by_the_one_that_is_given() -> None:
    tracker = Recorder()
    publish(tracker, result(timeline=[{"time_s": [0.0] * 50}]), timeline={"time_s": [1.0], "bins": [4.0]})
    assert tracker.column("timeline/time_s") == [1.0] and tracker.column("timeline/bins") == [4.0]
    publish(tracker, result(), timeline={"time_s": []})


def test_distributions_are_exact_quantiles_and_bounded() -> None:
    found = cdf_tables(result(), requests(10, 5))
    columns, rows = found["ttft_cdf"]
    assert columns == ["milliseconds", "share", "case"]
    assert rows[0][:2] == [1.0, 0.0] and rows[50][:2] == [5.5, 0.5] and rows[-1][:2] == [10.0, 1.0]
    assert rows[0][2] == "continuous bs=4 in=8 out=2"
    assert "tpot_cdf" not in found and len(found["itl_cdf"][1]) == 101
    many = result(cases=[{"batch_size": i} for i in range(50)])
    assert all(len(rows) <= 1000 for _, rows in cdf_tables(many, requests(500, 4, cases=50)).values())


def test_expert_load_as_table_and_as_two_figures() -> None:
    routed = result(routing={"counts": [[6, 2, 0, 0], [0, 0, 0, 0], [2, 2, 2, 2]]})
    columns, rows = result_tables(routed)["expert_load_table"]
    assert columns == ["layer", "expert", "tokens", "load"]
    assert rows[0] == [0, 0, 6, 3.0] and {row[0] for row in rows} == {0, 2}  # a dense layer has no row
    found = expert_load_metrics(routed)
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25)) / np.log(4)
    assert found == pytest.approx({"expert_load_max": 2.0, "expert_load_entropy": (entropy + 1) / 2})
    assert expert_load_metrics(result()) == {} and "expert_load_table" not in result_tables(result())
    wide = result(routing={"counts": np.ones((100, 256)).tolist()})
    assert "expert_load_table" not in result_tables(wide)  # more rows than a table keeps


def test_pictures_and_files_go_by_their_names(tmp_path: Path) -> None:
    for name in ("latency.png", "result.json"):
        (tmp_path / name).write_bytes(b"x")
    tracker = Recorder()
    publish(tracker, result(), plots=[tmp_path / "latency.png"], files=[tmp_path / "result.json"])
    assert tracker.images == ["latency"] and tracker.artifacts == {"latency-result": ["result.json"]}
