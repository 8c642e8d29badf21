"""The open-loop driver, reductions of steps and the experiment around them, on an engine without a model."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.bench.backends.base import BackendError
from moejax.bench.common.timeline import bin_steps, step_metrics
from moejax.bench.driver import TrafficRun, drive
from moejax.bench.throughput import measure, run_throughput
from moejax.bench.traffic import Lengths, PlannedRequest, ThroughputWorkload
from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError, RequestError
from moejax.engine.stats import StepRecord
from moejax.results.metrics import Slo, compute_metrics
from moejax.results.result import load_requests, load_result
from moejax.tracking.base import TrackerConfig
from tests.bench.fake_llm import FakeLLM, VirtualClock
from tests.bench.runs import run_into

SAMPLING = ThroughputWorkload().sampling
NO_TRACKER = TrackerConfig(kind="none")


def plan(*rows: tuple[float, int, int]) -> list[PlannedRequest]:
    """Requests of (arrival, prompt length, output length)."""
    return [PlannedRequest(arrival, [1] * prompt, output) for arrival, prompt, output in rows]


def run(asked: list[PlannedRequest], **fields: Any) -> tuple[TrafficRun, FakeLLM, VirtualClock]:
    """Serves `asked` with ten-millisecond steps on a virtual clock."""
    clock = VirtualClock()
    batching = fields.pop("batching", "continuous")
    engine = EngineConfig(max_num_seqs=fields.pop("max_num_seqs", 4), batching=batching)
    llm = FakeLLM(engine, clock=clock, advance=clock.advance, **fields)
    return drive(llm, asked, SAMPLING, clock=clock, sleep=clock.sleep), llm, clock


# --- driver -------------------------------------------------------------------------------------------------


def test_requests_come_at_their_times_and_the_engine_sleeps_between() -> None:
    done, llm, clock = run(plan((0.0, 4, 2), (0.005, 4, 1), (0.1, 4, 1)))
    # Step 1 ends at 10 ms with request 0's first token; request 1 came at 5 ms, during it.
    assert [item.record.metrics.ttft for item in done.served] == pytest.approx([0.010, 0.015, 0.010])
    assert [item.queue_s for item in done.served] == pytest.approx([0.0, 0.005, 0.0])
    assert [arrival - done.start for _, _, arrival in llm.submitted] == pytest.approx([0.0, 0.005, 0.1])
    # Two steps; then nothing to do until the third request's instant.
    assert clock.sleeps == pytest.approx([0.08])
    assert done.duration_s == pytest.approx(0.11) and len(done.steps) == 3
    assert llm.on_step is None


def test_an_overloaded_engine_does_not_slow_its_own_load_down() -> None:
    """Ten requests of one step each, one at a time, all due at once: the k-th waits for k - 1 steps."""
    done, _, _ = run(plan(*[(0.0, 4, 1)] * 10), max_num_seqs=1)
    assert [item.record.metrics.ttft for item in done.served] == pytest.approx(
        [0.01 * (k + 1) for k in range(10)]
    )


def test_continuous_takes_in_what_static_lets_wait() -> None:
    asked = plan((0.0, 4, 2), (0.0, 4, 10), (0.0, 4, 2))
    ends = {
        batching: run(asked, batching=batching, max_num_seqs=2)[0].served[2].record.metrics.e2e
        for batching in ("continuous", "static")
    }
    assert ends == pytest.approx({"continuous": 0.04, "static": 0.12})


def test_what_does_not_end_well_is_counted_and_explained() -> None:
    asked = plan(*[(0.0, 4, 3)] * 5)
    done, _, _ = run(asked, refuse=[0], fail=[1], abort_after=[2], forget=[3])
    assert [item.record.finish_reason for item in done.served] == [
        "error", "error", "abort", "error", "length"
    ]  # fmt: skip
    assert [item.error for item in done.served] == [
        "refused", "a step failed: out of luck", None,
        "the engine had nothing left to do before this request was finished", None,
    ]  # fmt: skip
    assert [item.failed for item in done.served] == [True, True, False, True, False]
    assert compute_metrics(done.records, done.duration_s)["completed"] == 1
    rows = [item.row(done.start, Slo(ttft_ms=1000)) for item in done.served]
    assert [row["slo_met"] for row in rows] == [False, False, False, False, True]
    assert rows[0]["ttft_ms"] is None and rows[4]["queue_ms"] == 0.0 and rows[4]["preemptions"] == 0
    assert rows[4]["slo_met"] != done.served[4].row(done.start, Slo())["slo_met"] is None


def test_progress_adds_up_to_every_request() -> None:
    clock, counts = VirtualClock(), []
    llm = FakeLLM(EngineConfig(max_num_seqs=2), clock=clock, advance=clock.advance, refuse=[3], step_s=0.15)
    drive(llm, plan(*[(0.0, 4, 3)] * 6), SAMPLING, clock=clock, sleep=clock.sleep, on_progress=counts.append)
    assert sum(counts) == 6 and len([count for count in counts if count]) > 2


def test_leaving_early_aborts_what_runs_and_gives_the_hook_back() -> None:
    def stop(record: StepRecord) -> None:
        raise KeyboardInterrupt

    clock = VirtualClock()
    llm = FakeLLM(clock=clock, advance=clock.advance)
    llm.on_step = hook = lambda record: None
    llm.step = lambda: stop(None)  # type: ignore[method-assign, arg-type]
    with pytest.raises(KeyboardInterrupt):
        drive(llm, plan((0.0, 4, 3), (0.0, 4, 3), (9.0, 4, 3)), SAMPLING, clock=clock, sleep=clock.sleep)
    assert llm.aborted == ["0", "1"] and llm.on_step is hook


def test_goodput_worked_out_by_hand() -> None:
    """One at a time, 3 tokens each in 10 ms steps: TTFT 10, 40, 70 ms, E2E 30, 60, 90, in 90 ms together."""
    done, _, _ = run(plan(*[(0.0, 4, 3)] * 3), max_num_seqs=1)
    for slo, good in (
        (Slo(ttft_ms=45), 2), (Slo(e2el_ms=61), 2), (Slo(ttft_ms=15, e2el_ms=61), 1), (Slo(tpot_ms=9), 0)
    ):  # fmt: skip
        metrics = compute_metrics(done.records, done.duration_s, slo)
        assert metrics["request_goodput"] == pytest.approx(good / 0.09)
        assert sum(item.row(0.0, slo)["slo_met"] for item in done.served) == good
    assert metrics["output_throughput"] == pytest.approx(9 / 0.09)


# --- conversations and users --------------------------------------------------------------------------------


def drive_with(
    asked: list[PlannedRequest], workload: ThroughputWorkload, **fields: Any
) -> tuple[TrafficRun, FakeLLM]:
    """`run` as a workload says."""
    clock = VirtualClock()
    llm = FakeLLM(EngineConfig(max_num_seqs=4), clock=clock, advance=clock.advance, **fields)
    return drive(llm, asked, SAMPLING, workload=workload, clock=clock, sleep=clock.sleep), llm


TURNS = [
    PlannedRequest(0.0, [5, 6], 3),
    PlannedRequest(0.1, [7], 2, follows=0, history_len=5),
    PlannedRequest(0.0, [8], 1, follows=1, history_len=8),
    PlannedRequest(0.2, [9], 1),
]


def test_a_turn_continues_what_was_answered_when_it_was() -> None:
    done, llm = drive_with(TURNS, ThroughputWorkload())
    # The first answer is there after three steps, the second turn 0.1 s later and answered after two.
    assert [(prompt, arrival - done.start) for prompt, _, arrival in llm.submitted] == [
        ([5, 6], 0.0), ([5, 6, 1, 1, 1, 7], pytest.approx(0.13)),
        ([5, 6, 1, 1, 1, 7, 1, 1, 8], pytest.approx(0.15)), ([9], pytest.approx(0.2)),
    ]  # fmt: skip
    assert [item.record.prompt_len for item in done.served] == [2, 6, 9, 1]
    assert [row["turn"] for row in done.rows(Slo())] == [0, 1, 2, 0]
    assert all(item.record.completed for item in done.served)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"refuse": [0]}, "request 0, which it continues, was refused: refused"),
        ({"fail": [0]}, "request 0, which it continues, failed: a step failed: out of luck"),
        ({"abort_after": [0]}, "request 0, which it continues, was aborted"),
        ({"forget": [0]}, "request 0, which it continues, was lost"),
    ],
)
def test_what_continues_a_lost_request_is_lost_too(fields: dict[str, Any], text: str) -> None:
    done, llm = drive_with(TURNS, ThroughputWorkload(), **fields)
    assert len(llm.submitted) == 2 and [item.record.completed for item in done.served] == [False] * 3 + [True]
    assert [item.error for item in done.served[1:3]] == [text, text.replace("request 0", "request 1")]
    assert [item.record.finish_reason for item in done.served[1:3]] == ["error", "error"]


def test_outputs_without_token_ids_cannot_be_continued() -> None:
    clock = VirtualClock()
    llm = FakeLLM(clock=clock, advance=clock.advance)
    llm.name = "mute"
    asked = [PlannedRequest(0.0, [5], 1), PlannedRequest(0.0, [7], 2, follows=0)]
    step = llm.step

    def mute() -> bool:
        busy = step()
        llm.outputs[0].outputs[0].token_ids.clear()
        return busy

    llm.step = mute  # type: ignore[method-assign]
    with pytest.raises(BackendError, match="backend mute does not tell its outputs' token ids"):
        drive(llm, asked, SAMPLING, clock=clock, sleep=clock.sleep)


def test_processes_send_the_same_turns_before_the_same_steps() -> None:
    """Whatever their own clocks say: process 0's decides, also when an answer came and who takes too long."""
    decisions: list[int] = []

    def submitted(step_s: float, decide: Callable[[int], int]) -> list[tuple[int, list[int]]]:
        clock, sent = VirtualClock(1e4 * step_s), []
        llm = FakeLLM(EngineConfig(max_num_seqs=2), clock=clock, advance=clock.advance, step_s=step_s)
        submit = llm.submit
        llm.submit = lambda prompt, *rest, **more: (  # type: ignore[method-assign]
            sent.append((llm.stats()["steps"], prompt)), submit(prompt, *rest, **more)
        )[1]  # fmt: skip
        workload = ThroughputWorkload(concurrency=2, timeout_s=0.2)
        asked = [
            PlannedRequest(0.02 * i, [i], 1 + 5 * i % 7, follows=i - 1 if i % 3 else None) for i in range(12)
        ]
        drive(llm, asked, SAMPLING, workload=workload, clock=clock, sleep=clock.sleep, agree=decide)
        return sent

    first = submitted(0.03, lambda value: decisions.append(value) or value)  # type: ignore[func-returns-value]
    replayed = iter(decisions)
    assert submitted(0.07, lambda _: next(replayed)) == first and next(replayed, None) is None
    assert submitted(0.07, lambda value: value) != first


def test_users_wait_for_their_answers_and_think() -> None:
    """Two users, the second from 0.05 s on; ten requests of two steps, and a tenth of a second between."""
    asked = [PlannedRequest(0.1, [i], 2) for i in range(5)]
    done, _ = drive_with(asked, ThroughputWorkload(concurrency=2, think_s=0.1, ramp_up_s=0.1))
    arrivals = [item.record.metrics.arrival_time - done.start for item in done.served]
    assert arrivals == pytest.approx([0.0, 0.05, 0.12, 0.17, 0.24])
    assert done.duration_s == pytest.approx(0.26)


def test_rates_are_of_the_window_and_latencies_of_what_arrived_in_it() -> None:
    """One user, requests of four steps without end: a token each 10 ms. Sending ends after 0.5 s; the first
    0.1 s do not count. Of the request that was sent at 0.48 s two tokens come too late."""
    workload = ThroughputWorkload(None, concurrency=1, warmup_s=0.1, duration_s=0.5)
    done, _ = drive_with([PlannedRequest(0.0, [1], 4)], workload)
    metrics = done.metrics(Slo(ttft_ms=1000))
    assert len(done.served) == 13 and done.duration_s == pytest.approx(0.4)
    assert metrics["ttft_samples"] == len(done.rows(Slo())) == 10  # of 0.12 s and later
    assert metrics["output_throughput"] == pytest.approx(40 / 0.4, rel=0.03)
    assert metrics["request_throughput"] == pytest.approx(10 / 0.4) and metrics["completed"] == 13
    assert metrics["total_output_tokens"] == 52 and metrics["request_goodput"] == pytest.approx(10 / 0.4)
    assert 39 <= len(done.measured_steps) <= 41


def test_what_takes_too_long_is_given_up() -> None:
    asked = [
        PlannedRequest(0.0, [1], 3),
        PlannedRequest(0.0, [2], 50),
        PlannedRequest(0.0, [3], 1, follows=1),
    ]
    done, llm = drive_with(asked, ThroughputWorkload(timeout_s=0.1))
    assert [item.record.completed for item in done.served] == [True, False, False]
    assert done.served[1].error == "no end within 0.1 s (workload.timeout_s)" and llm.aborted == ["1"]
    assert done.served[2].error == f"request 1, which it continues, {done.served[1].error}"


# --- steps --------------------------------------------------------------------------------------------------


def record(time: float, seconds: float = 0.01, **fields: int) -> StepRecord:
    values = dict(
        prefill_tokens=0, decode_tokens=2, padded_tokens=4, sequences=2, running=2, waiting=0, used_blocks=5,
        num_blocks=10, stored_tokens=60, preempted=0,
    )  # fmt: skip
    return StepRecord(time, seconds, **{**values, **fields})


def test_step_metrics_worked_out_by_hand() -> None:
    steps = [
        record(0.1, 0.1, running=2, sequences=2, used_blocks=4, stored_tokens=48, waiting=3, left_waiting=1,
               preempted=1),
        record(0.4, 0.3, running=4, sequences=6, used_blocks=8, stored_tokens=96, prefill_tokens=4,
               padded_tokens=16),
    ]  # fmt: skip
    assert step_metrics(steps, block_size=16) == pytest.approx({
        "steps": 2, "mean_batch_size": 4.0, "mean_running": 3.5, "max_running": 4, "max_waiting": 3,
        "cache_use_mean": 0.7, "cache_use_peak": 0.8, "cache_use_saturated": 0.4, "cache_fill": 0.75,
        "padding_waste": 1 - 8 / 20, "preemptions": 1,
    })  # fmt: skip


def test_step_metrics_of_nothing_are_null_and_saturation_needs_a_queue() -> None:
    assert step_metrics([record(0.1)], 16)["cache_use_saturated"] is None
    nothing = step_metrics([], 16)
    assert nothing["steps"] == 0 and nothing["padding_waste"] is None
    assert nothing.keys() == step_metrics([record(0.1)], 16).keys()


STEPS = st.lists(
    st.builds(
        record,
        st.floats(0.0, 100.0), st.floats(0.0, 1.0), prefill_tokens=st.integers(0, 500),
        decode_tokens=st.integers(0, 64), padded_tokens=st.integers(0, 999), running=st.integers(0, 64),
        waiting=st.integers(0, 99), used_blocks=st.integers(0, 10), preempted=st.integers(0, 3),
    ),
    min_size=1, max_size=60,
)  # fmt: skip


@given(STEPS, st.integers(1, 70))
def test_binning_conserves_sums_means_and_peaks(steps: list[StepRecord], points: int) -> None:
    binned = bin_steps(steps, 0.0, points)
    assert 1 <= len(binned["time_s"]) <= min(points, len(steps))
    assert sum(binned["steps"]) == len(steps)
    assert binned["time_s"] == sorted(binned["time_s"]) and binned["time_s"][-1] == max(s.time for s in steps)
    for name in ("seconds", "prefill_tokens", "decode_tokens", "padded_tokens", "preempted"):
        assert sum(binned[name]) == pytest.approx(sum(getattr(s, name) for s in steps))
    for name in ("running", "waiting", "used_blocks"):
        assert max(binned[f"{name}_max"]) == max(getattr(s, name) for s in steps)
        assert all(
            m <= top + 1e-9 for m, top in zip(binned[f"{name}_mean"], binned[f"{name}_max"], strict=True)
        )
    if sum(binned["seconds"]) > 1e-6:
        weighed = np.dot(binned["running_mean"], binned["seconds"])
        assert weighed == pytest.approx(sum(s.running * s.seconds for s in steps), abs=1e-6)
    assert (binned["bin_s"] is None) == (len(steps) <= points)
    json.dumps(binned, allow_nan=False)


def test_rows_are_steps_while_there_are_few() -> None:
    binned = bin_steps([record(5.1, running=3), record(5.2, running=1)], 5.0)
    assert binned["time_s"] == pytest.approx([0.1, 0.2]) and binned["running_mean"] == [3.0, 1.0]
    assert binned["num_blocks"] == 10 and binned["bin_s"] is None
    assert "most_running_max" not in bin_steps([record(5.1)], 5.0)
    limits = bin_steps([record(5.1, most_running=4, most_prefill=16)], 5.0)
    assert (limits["most_running_max"], limits["most_prefill_max"]) == ([4.0], [16.0])
    assert bin_steps([], 0.0)["time_s"] == []
    with pytest.raises(ValueError, match="max_points"):
        bin_steps([], 0.0, 0)


# --- experiment ---------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualClock]:
    """The experiment on a virtual clock: `run_throughput` itself has no use for one."""
    virtual = VirtualClock()
    real = measure.drive
    monkeypatch.setattr(measure, "drive", lambda *a, **k: real(*a, **k, clock=virtual, sleep=virtual.sleep))
    yield virtual


def fake(clock: VirtualClock, **fields: Any) -> FakeLLM:
    engine = EngineConfig(max_num_seqs=fields.pop("max_num_seqs", 4))
    return FakeLLM(engine, clock=clock, advance=clock.advance, **fields)


def experiment(llm: FakeLLM, workload: ThroughputWorkload, out: Path, **fields: Any) -> dict[str, Any]:
    with run_into(out, "throughput", {"model": {"name": "fake"}}, **fields) as run:
        return run_throughput([llm], workload, run)  # type: ignore[list-item]


WORKLOAD = ThroughputWorkload(
    num_requests=12, prompt_len=8, output_len=Lengths(2, 40), compare=("continuous", "static"), iterations=2,
    slo=Slo(ttft_ms=200),
)  # fmt: skip


def test_experiment_compares_modes_on_the_same_requests(
    clock: VirtualClock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = fake(clock)
    result = experiment(llm, WORKLOAD, tmp_path)
    assert load_result(tmp_path) == result and result["experiment"] == "throughput"
    first, second = result["cases"]
    assert (first["batching"], second["batching"]) == ("continuous", "static")
    assert first["request_rate"] == "inf" and first["num_requests"] == 12
    assert (first["batch_size"], first["prompt_len"]) == (4, 8)
    assert first["completed"] == 24 and first["failed"] == first["aborted"] == 0
    assert first["total_output_tokens"] == second["total_output_tokens"]
    metrics = result["metrics"]
    assert metrics["output_throughput"] == first["output_throughput"] > second["output_throughput"]
    ratio = first["output_throughput"] / second["output_throughput"]
    assert metrics["speedup_over_static"] == pytest.approx(ratio)
    assert metrics["p99_ttft_ratio"] is first["p99_ttft_ms"] is None, "of 24 requests there is no p99"
    assert first["ttft_samples"] == 24 and first["max_ttft_ms"] < second["max_ttft_ms"]
    assert metrics["recompiles_after_warmup"] == 0 and metrics["request_goodput"] > 0
    assert metrics["max_waiting"] == 12 and 1 < metrics["mean_batch_size"] <= 4
    assert [(row["batching"], row["iteration"]) for row in result["iterations"]] == [
        ("continuous", 0), ("continuous", 1), ("static", 0), ("static", 1)
    ]  # fmt: skip
    assert [timeline["batching"] for timeline in result["timeline"]] == ["continuous", "static"]
    assert sum(result["timeline"][0]["decode_tokens"]) + 12 == first["total_output_tokens"] / 2

    rows = load_requests(tmp_path)
    assert len(rows) == 48 and {row["case"] for row in rows} == {0, 1}
    assert all(row["slo_met"] == (row["ttft_ms"] <= 200) for row in rows)
    assert sorted(row["queue_ms"] for row in rows[:4]) == pytest.approx([0.0] * 4)
    assert {path.name for path in tmp_path.glob("*.png")} == {
        "latency.png", "load.png", "cache.png", "tokens.png", "requests.png"
    }  # fmt: skip
    err = capsys.readouterr().err
    assert "continuous" in err and "static" in err and "ratio" in err

    # Both engines got the same traffic, the variant as a static twin of the first's configuration.
    (variant,) = llm.variants
    assert variant.engine_config == EngineConfig(max_num_seqs=4, batching="static")
    asked = [[(prompt, params) for prompt, params, _ in one.submitted] for one in (llm, variant)]
    assert asked[0] == asked[1] and len(asked[0]) == 8 + 2 * 12
    longest = max(params.max_tokens for _, params in asked[0])
    assert llm.warmups[0]["max_total_len"] == 8 + longest


def test_the_engines_own_mode_comes_first(clock: VirtualClock, tmp_path: Path) -> None:
    llm = fake(clock)
    llm.engine_config = EngineConfig(max_num_seqs=4, batching="static")
    result = experiment(llm, WORKLOAD, tmp_path)
    assert [case["batching"] for case in result["cases"]] == ["static", "continuous"]
    assert result["metrics"]["output_throughput"] == result["cases"][0]["output_throughput"]
    assert result["metrics"]["speedup_over_static"] > 1  # continuous over static, whichever came first


def test_one_mode_has_no_ratio_and_a_rate_makes_the_engine_wait(clock: VirtualClock, tmp_path: Path) -> None:
    workload = ThroughputWorkload(num_requests=20, request_rate=2.0, prompt_len=8, output_len=4)
    result = experiment(fake(clock), workload, tmp_path)
    assert len(result["cases"]) == 1 and result["cases"][0]["request_rate"] == 2.0
    assert "speedup_over_static" not in result["metrics"] and clock.sleeps
    assert result["metrics"]["duration_s"] > 3 and result["metrics"]["request_goodput"] is None


def test_failures_are_in_the_result_and_on_the_screen(
    clock: VirtualClock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = ThroughputWorkload(num_requests=12, prompt_len=8, output_len=4, warmup=0)
    result = experiment(fake(clock, fail=[2, 5], abort_after=[3]), workload, tmp_path)
    metrics = result["metrics"]
    assert (metrics["completed"], metrics["failed"], metrics["aborted"]) == (9, 2, 1)
    assert metrics["failed_steps"] == 2 and metrics["total_output_tokens"] == 36
    err = " ".join(capsys.readouterr().err.split())
    assert "2 failed, 1 aborted, 2 failed steps of 12 requests; first error: a step failed" in err
    assert sum(row["error"] is not None for row in load_requests(tmp_path)) == 2


def test_nothing_completed_is_an_error(clock: VirtualClock, tmp_path: Path) -> None:
    workload = ThroughputWorkload(num_requests=3, prompt_len=8, output_len=4, warmup=0)
    with pytest.raises(
        RequestError, match=r"none of 3 requests was completed \(continuous\); first: refused"
    ):
        experiment(fake(clock, refuse=range(3)), workload, tmp_path)


def test_warmup_zero_measures_a_cold_engine(clock: VirtualClock, tmp_path: Path) -> None:
    llm = fake(clock)
    experiment(llm, ThroughputWorkload(num_requests=3, prompt_len=8, output_len=4, warmup=0), tmp_path)
    assert llm.warmups == [] and len(llm.submitted) == 3


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"max_model_len": 20},
            r"longest request: 8 \+ 20 tokens exceed the limit of 20 .*workload.output",
        ),
        ({"num_blocks": 1}, "2 cache blocks of 16, and the cache has 1; raise engine.num_blocks"),
    ],
)
def test_lengths_are_checked_before_anything_runs(
    clock: VirtualClock, tmp_path: Path, fields: dict[str, int], text: str
) -> None:
    llm = fake(clock, **fields)
    with pytest.raises(ConfigError, match=text):
        experiment(llm, ThroughputWorkload(num_requests=3, prompt_len=8, output_len=20), tmp_path)
    assert llm.submitted == [] and llm.warmups == []
    assert list(tmp_path.iterdir()) == []


def test_a_request_that_just_fits_is_taken(clock: VirtualClock, tmp_path: Path) -> None:
    """12 + 21 tokens, the last of which is not stored: two blocks of 16."""
    llm = fake(clock, num_blocks=2, max_model_len=33)
    experiment(llm, ThroughputWorkload(num_requests=1, prompt_len=12, output_len=21), tmp_path)
    assert math.isfinite(load_result(tmp_path)["metrics"]["mean_e2el_ms"])


def test_each_number_of_users_is_a_case(
    clock: VirtualClock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step of four takes as long as one of one: two users get twice the tokens of one."""
    workload = ThroughputWorkload(
        None, concurrency=[1, 2], turns=2, prompt_len=8, output_len=4, warmup_s=0.2, duration_s=1.2
    )
    result = experiment(fake(clock), workload, tmp_path)
    one, two = result["cases"]
    assert (one["concurrency"], two["concurrency"]) == (1, 2)
    assert one["output_throughput"] == pytest.approx(100, rel=0.05)
    assert two["output_throughput"] == pytest.approx(200, rel=0.05)
    assert one["num_requests"] == 30 and one["ttft_samples"] == 25 and two["mean_running"] == 2
    assert result["metrics"]["completed"] == one["completed"] + two["completed"]
    assert result["metrics"]["max_output_throughput"] == two["output_throughput"]
    assert "median_ttft_ms" not in result["metrics"] and result["metrics"]["max_goodput"] is None
    assert {row["turn"] for row in load_requests(tmp_path)} == {0, 1}
    err = " ".join(capsys.readouterr().err.split())
    assert "30 requests of users in turn" in err and "users" in err and "ratio" not in err
