"""The ramp: when an engine is saturated, which rates are offered, what is reported."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax.bench.driver import ServedRequest, TrafficRun
from moejax.bench.ramp.config import RampConfig
from moejax.bench.ramp.rule import best_goodput, judge, knee, pareto_front, user_rates
from moejax.bench.ramp.run import run_ramp
from moejax.bench.throughput import measure
from moejax.bench.traffic import ThroughputWorkload
from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError
from moejax.engine.requests.api import RequestMetrics
from moejax.report.ramp import pareto_figure, ramp_figure, ramp_lines, ramp_table
from moejax.results.metrics import RequestRecord, Slo
from moejax.results.result import load_requests, load_result
from moejax.tracking.base import TrackerConfig
from tests.bench.fake_llm import FakeLLM, VirtualClock
from tests.bench.runs import run_into

NO_TRACKER = TrackerConfig(kind="none")


def served(arrival: float, first_step: float, end: float, tokens: int = 2) -> ServedRequest:
    times = RequestMetrics(arrival)
    times.token_times.extend(np.linspace(first_step, end, tokens).tolist())
    return ServedRequest(RequestRecord("r", 0, 4, tokens, times, "length"), first_step - arrival, 0)


def queue(rate: float, capacity: float, count: int = 100) -> TrafficRun:
    """Requests at an even rate through a server that takes 1/capacity seconds for each, one at a time."""
    free, run = 0.0, []
    for i in range(count):
        arrival = i / rate
        free = max(free, arrival) + 1 / capacity
        run.append(served(arrival, free - 1 / capacity, free))
    return TrafficRun(0.0, tuple(run), ())


@pytest.mark.parametrize(
    ("rate", "saturated"), [(1.0, False), (9.9, False), (10.5, False), (12.0, True), (20.0, True)]
)
def test_saturated_is_ten_per_cent_behind_with_a_queue(rate: float, saturated: bool) -> None:
    """Worked out: of the arrivals of the second half, capacity/rate have ended."""
    verdict = judge(queue(rate, 10.0), 0.9)
    assert verdict.saturated == saturated
    assert verdict.offered_rate == pytest.approx(rate)
    assert verdict.followed == pytest.approx(min(1.0, 10.0 / rate), abs=0.03)


def test_long_requests_without_a_queue_are_no_saturation() -> None:
    """Each starts at once and takes longer than all the arrivals: none has ended, none has waited."""
    run = TrafficRun(0.0, tuple(served(i / 10, i / 10, 100.0 + i) for i in range(50)), ())
    verdict = judge(run, 0.9)
    assert verdict.followed == 0 and verdict.waiting == 0 and not verdict.saturated


def test_a_backlog_that_is_being_worked_off_is_saturation() -> None:
    """Nothing runs in the first half; then as many end as come, but a queue is left all the while."""
    items = [served(i / 10, max(5.0, i / 10) + 4.0, max(5.0, i / 10) + 0.1 * (i % 50)) for i in range(100)]
    verdict = judge(TrafficRun(0.0, tuple(items), ()), 0.9)
    assert verdict.waiting > 30 and verdict.saturated
    few = [served(i / 10, i / 10 + 0.5, i / 10 + 0.9) for i in range(100)]  # five wait at any instant
    assert not judge(TrafficRun(0.0, tuple(few), ()), 0.9).saturated


def test_a_failed_request_has_not_ended_and_all_at_once_is_no_rate() -> None:
    broken = [
        ServedRequest(RequestRecord("r", 0, 4, 0, RequestMetrics(i / 10), "error"), None, 0)
        for i in range(40)
    ]
    assert judge(TrafficRun(0.0, tuple(broken), ()), 0.9).saturated
    assert judge(TrafficRun(0.0, (served(0, 0, 1), served(0, 0, 1)), ()), 0.9).saturated


def test_user_rates_count_the_wait_and_decode_rates_do_not() -> None:
    items = [served(0.0, 1.0, 2.0, 4), served(0.0, 0.0, 1.0, 4), served(0.0, 3.0, 4.0, 4)]
    assert user_rates(items, 250.0) == {"tokens_per_s_per_user": 2.0, "decode_tokens_per_s_per_user": 4.0}
    assert user_rates([], None) == {"tokens_per_s_per_user": None, "decode_tokens_per_s_per_user": None}


def row(rate: float, user: float | None, device: float, **fields: Any) -> dict[str, Any]:
    return {"request_rate": rate, "tokens_per_s_per_user": user, "tokens_per_s_per_device": device,
            "saturated": False, "request_goodput": None, **fields}  # fmt: skip


def test_knee_goodput_and_front() -> None:
    rows = [
        row(1, 100.0, 10.0, request_goodput=1.0), row(2, 90.0, 20.0, request_goodput=1.9),
        row(4, 80.0, 15.0, request_goodput=1.0), row(8, 5.0, 30.0, request_goodput=0.1, saturated=True),
        row(16, None, 0.0, saturated=True),
    ]  # fmt: skip
    at, best = knee(rows), best_goodput(rows)
    assert at is not None and at["request_rate"] == 4 and best is not None and best["request_rate"] == 2
    assert pareto_front(rows) == [3, 1, 0]
    assert knee([row(1, 1.0, 1.0, saturated=True)]) is None and best_goodput([row(1, 1.0, 1.0)]) is None


# --- experiment ---------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualClock]:
    virtual = VirtualClock()
    real = measure.drive
    monkeypatch.setattr(measure, "drive", lambda *a, **k: real(*a, **k, clock=virtual, sleep=virtual.sleep))
    yield virtual


def ramp(
    clock: VirtualClock, out: Path, config: RampConfig, **workload: Any
) -> tuple[dict[str, Any], FakeLLM]:
    """Four at a time, 10 ms a step, 10 tokens a request: the engine serves 40 requests/s."""
    llm = FakeLLM(EngineConfig(max_num_seqs=4), clock=clock, advance=clock.advance)
    fields = {"prompt_len": 8, "output_len": 10, "slo": Slo(ttft_ms=100), **workload}
    with run_into(out, "throughput", {"model": {"name": "fake"}}) as run:
        result = run_ramp([llm], ThroughputWorkload(**fields), config, run)  # type: ignore[list-item]
    return result, llm


def test_climbs_until_saturated_then_between(
    clock: VirtualClock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = RampConfig(start=8, max_steps=9, refine=2, duration_s=4, min_requests=32)
    result, llm = ramp(clock, tmp_path, config)
    assert load_result(tmp_path) == result
    rates = [case["request_rate"] for case in result["cases"]]
    # 8, 16, 32 are followed, 64 is not; then sqrt(32 · 64), and on to the side on which the knee is.
    assert rates[:5] == pytest.approx([8, 16, 32, 64, 2048**0.5]) and len(rates) == 6
    assert [case["saturated"] for case in result["cases"][:4]] == [False, False, False, True]
    assert [case["num_requests"] for case in result["cases"][:4]] == [32, 64, 128, 256]
    (mode,) = result["ramp"]
    assert mode["saturated"] and 32 <= mode["knee_rate"] < 46
    knee_row = result["cases"][mode["knee_case"]]
    assert result["metrics"]["knee_rate"] == knee_row["request_rate"]
    # Six rates have no latency in common.
    assert not any(name.endswith("_ms") for name in result["metrics"])
    assert result["metrics"]["completed"] == sum(case["completed"] for case in result["cases"])
    assert 20 < result["metrics"]["max_goodput"] <= 40
    assert max(case["output_throughput"] for case in result["cases"]) == pytest.approx(400, rel=0.05)
    # One engine, one warm-up, and the same prompts at every rate.
    assert len(llm.warmups) == 1
    first = [prompt for prompt, _, _ in llm.submitted if len(prompt) == 8][8:16]
    assert len({tuple(prompt) for prompt in first}) == 8
    requests = load_requests(tmp_path)
    assert len(requests) == sum(case["num_requests"] for case in result["cases"])
    assert {request["case"] for request in requests} == set(range(6))
    assert {path.name for path in tmp_path.glob("*.png")} == {"ramp.png", "pareto.png"}
    err = capsys.readouterr().err
    assert "knee" in err and "came" in err and "behind: saturated" in err
    assert "continuous: follows up to" in err
    json.dumps(result, allow_nan=False)


def test_rates_of_ones_own_without_saturation_and_two_modes(clock: VirtualClock, tmp_path: Path) -> None:
    config = RampConfig(rates=[4, 10], duration_s=3, min_requests=8)
    result, _ = ramp(clock, tmp_path, config, compare=("continuous", "static"), output_len=4)
    assert [(case["batching"], case["request_rate"]) for case in result["cases"]] == [
        ("continuous", 4), ("continuous", 10), ("static", 4), ("static", 10)
    ]  # fmt: skip
    assert [mode["knee_rate"] for mode in result["ramp"]] == [10, 10]
    assert "no saturation found, raise ramp.max_steps" in ramp_lines(result)[0]
    assert ramp_figure(result) is not None and pareto_figure(result) is not None
    assert len(ramp_table(result).columns) > 8


def test_saturated_from_the_start(clock: VirtualClock, tmp_path: Path) -> None:
    result, _ = ramp(clock, tmp_path, RampConfig(start=500, max_steps=2, duration_s=0.3))
    assert len(result["cases"]) == 1 and result["ramp"][0]["knee_rate"] is None
    assert result["metrics"]["knee_rate"] is None
    assert "lower ramp.start" in ramp_lines(result)[0]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"start": 1, "rates": [1]}, "exclude each other"),
        ({"start": 0}, "ramp.start"),
        ({"start": 1, "factor": 1.0}, "ramp.factor must be a number above 1"),
        ({"rates": [2, 1]}, "ramp.rates must be a list of requests per second that rise"),
        ({"rates": [0, 1]}, r"ramp.rates\[0\] must be a positive number, got 0"),
        ({"rates": []}, "ramp.rates must be a list"),
        ({"start": 1, "refine": -1}, "ramp.refine"),
        ({"start": 1, "followed": 1.5}, r"ramp.followed must be a share in \(0, 1\]"),
        ({"start": 1, "max_steps": 30}, "the ramp's last step has .* requests"),
        ({"start": 1, "max_steps": 2000}, "the ramp's last step has .* requests"),
    ],
)
def test_bad_config(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        RampConfig(**fields)


def test_conversations_are_ramped_by_their_first_turns(clock: VirtualClock, tmp_path: Path) -> None:
    """40 requests/s are 20 conversations of two turns, and the think time is no load."""
    config = RampConfig(start=5, max_steps=6, refine=2, duration_s=4)
    result, _ = ramp(clock, tmp_path, config, turns=2, think_s=0.3)
    assert [case["saturated"] for case in result["cases"][:4]] == [False, False, False, True]
    assert 17 < result["ramp"][0]["knee_rate"] <= 28 and result["cases"][1]["num_requests"] == 80
    assert result["cases"][1]["offered_rate"] == pytest.approx(10, rel=0.3)


def test_a_ramp_has_arrivals_of_its_own(clock: VirtualClock, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workload.request_rate=3 and a ramp exclude each other"):
        ramp(clock, tmp_path, RampConfig(start=1), request_rate=3.0)
    for name in ("concurrency", "duration_s"):
        with pytest.raises(ConfigError, match=f"leave out workload.{name}"):
            ramp(clock, tmp_path, RampConfig(start=1), **{name: 2})
    assert list(tmp_path.iterdir()) == []
