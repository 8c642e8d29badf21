"""The simulated engine beside the real one: what is noted of a run, told again, and learnt for other runs."""

import dataclasses
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moejax.bench.simulate.config import SimulateSection
from moejax.bench.simulate.machine import TimedBackend, judged, replay, run_machine, simulate, work_of
from moejax.bench.simulate.run import Asked
from moejax.bench.traffic import Lengths, ThroughputWorkload, plan_requests
from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError
from moejax.engine.llm import LLM
from moejax.report.experiments import print_result
from moejax.results.metrics import Slo
from moejax.simulate.measured import Loop, StepTable, TimedStep, Turn, Work, timed_steps, usual_steps
from tests.bench.runs import run_into
from tests.examples import slow_but

ENGINE = EngineConfig(
    max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32, block_size=16, seq_buckets=(4,),
    token_buckets=(32,), block_buckets=(16,), autotune="rules",
)  # fmt: skip
LOAD = ThroughputWorkload(num_requests=9, prompt_len=Lengths(4, 40), output_len=Lengths(2, 20), seed=3)
SMALL, LARGE = Work((1, 0, 16), 1), Work((4, 0, 16), 4)


def test_a_turn_is_parted_into_launch_device_and_what_comes_after() -> None:
    # Overlapped: the second step is launched before the first one's tokens are looked at.
    turns = [
        Loop(looked=0.0, woke=None, submit_s=0.1, launched=0.3, work=SMALL, delivered=0),
        Loop(looked=0.3, woke=None, submit_s=0.0, launched=0.5, work=LARGE, delivered=1),
        Loop(looked=1.4, woke=None, submit_s=0.0, launched=None, work=None, delivered=1),
    ]
    first, second = timed_steps(turns, [1.3, 2.4], 0.0)
    assert first.work == SMALL and second.work == LARGE
    assert first.turn == pytest.approx((0.2, 1.0, 0.1)) and second.turn == pytest.approx((0.2, 1.1, 0.0))


def test_the_usual_step_is_without_the_least_and_the_most() -> None:
    runs = [[TimedStep(SMALL, Turn(0.0, seconds, 0.0))] for seconds in (9.0, 1.0, 2.0, 3.0)]
    assert usual_steps(runs)[0].turn.device == 2.5
    with pytest.raises(ValueError, match="different steps"):
        usual_steps([runs[0], [TimedStep(LARGE, Turn(0, 1, 0))]])


def test_a_table_tells_a_bucket_that_it_knows_and_is_never_below_what_was_seen() -> None:
    steps = [TimedStep(Work((4, 0, 16), n), Turn(0.1, 1.0 + n, 0.0)) for n in (1, 2, 3, 4) for _ in range(4)]
    table = StepTable(steps)
    assert table(Work((4, 0, 16), 3)).device == pytest.approx(4.0)
    assert table(Work((4, 0, 16), 9)).device == pytest.approx(5.0)  # the last one met
    assert table(Work((1, 0, 16), 0)).device >= 2.0


def test_judging_knows_noise_from_a_miss() -> None:
    assert judged([1.0, 1.01, 1.02], 1.03, "duration_s")["verdict"] == "met"
    assert judged([1.0, 1.01, 1.02], 1.2, "duration_s")["verdict"] == "missed"
    assert judged([1.0, 1.01, 1.2], 1.2, "duration_s")["verdict"] == "unclear"
    assert judged([70, 70, 70], 71, "steps")["verdict"] == "met"
    assert judged([70, 70, 70], 71, "steps", exact=True)["verdict"] == "missed"


@pytest.mark.parametrize(
    "changes",
    slow_but([{}], [{}, {"overlap": False}, {"batching": "static"}]),
    ids=["overlap", "plain", "static"],
)
def test_a_run_that_is_told_again_is_the_run_and_a_learnt_one_has_its_steps(changes: dict[str, Any]) -> None:
    with LLM("tiny", engine=dataclasses.replace(ENGINE, **changes)) as llm:
        llm.warmup(max_total_len=64)
        plan = plan_requests(LOAD, llm.config.vocab_size)
        recorded = TimedBackend(llm).record(plan, LOAD)
        again = replay(llm, plan, LOAD, recorded)
        real, told = (run.metrics(Slo()) for run in (recorded.run, again))
        assert len(again.steps) == len(recorded.run.steps) == len(recorded.steps)
        for name in ("median_tpot_ms", "median_ttft_ms", "output_throughput"):
            assert told[name] == pytest.approx(real[name], rel=0.02), name
        table = StepTable(recorded.steps)
        learnt = simulate(
            llm, plan, LOAD, lambda step: table(work_of(llm, step)), repeat(1e-5), lambda at: at
        )
        assert len(learnt.steps) == len(recorded.steps)
        assert [s.sequences for s in learnt.steps] == [s.sequences for s in recorded.run.steps]
        # A step that takes twice as long is told apart.
        slow = [
            TimedStep(step.work, Turn(step.turn.launch, 2 * step.turn.device, step.turn.after))
            for step in recorded.steps
        ]
        slower = replay(llm, plan, LOAD, recorded._replace(steps=slow)).metrics(Slo())
        assert slower["median_tpot_ms"] > 1.2 * told["median_tpot_ms"]
        with pytest.raises(ValueError, match="are not its"):
            replay(llm, plan[:-1], LOAD, recorded._replace(steps=recorded.steps[3:]))


def machine(out: Path, file: Path | None = None, **changes: Any) -> dict[str, Any]:
    section = SimulateSection(mode="machine", **changes)
    config = {"simulate": dataclasses.asdict(section)}
    with run_into(out, "simulate", config) as run:
        asked = Asked("tiny", "auto", section, ENGINE, LOAD)
        return run_machine(asked, run, *([file] if file else []))


def test_an_unknown_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^simulate.groups=\['huge'\]: .*models: tiny, medium$"):
        machine(tmp_path, groups=["huge"])


@pytest.mark.slow
def test_a_file_of_cases_is_predicted_and_served(tmp_path: Path) -> None:
    (file := tmp_path / "cases.toml").write_text(
        "repeats = 3\n[engine]\nmax_model_len = 64\nmax_num_seqs = 4\nmax_num_batched_tokens = 32\n"
        "block_size = 16\n[models.tiny]\nsource = 'tiny'\n"
        "[calibration.some]\nnum_requests = 9\nprompt_len = {low = 4, high = 40}\noutput_len = 12\n"
        "[cases.'at once']\nnum_requests = 6\nprompt_len = 12\noutput_len = 8\n"
        "[cases.static]\nnum_requests = 6\nprompt_len = 12\noutput_len = 8\nload = 0.5\n"
        "engine = {batching = 'static'}\n"
    )
    result = machine(tmp_path / "out", file)
    rows = {(row["case"], row["metric"]): row for row in result["machine"]}
    steps = rows["at once", "steps"]
    assert steps["measured"] == steps["simulated"] and steps["verdict"] == "met"
    assert result["metrics"]["replay_worst_error"] < 0.03 and rows["static", "duration_s"]["simulated"] > 0
    console = Console(record=True, width=160)
    print_result(result, console)
    assert "recorded durations told again" in console.export_text()
