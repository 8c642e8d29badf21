"""Loads, stages and scenarios: what a case is of, what does not fit, and goals on simulated figures."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments.launch.app import launch
from experiments.launch.command_line import translate
from experiments.launch.notebook import compose
from experiments.launch.validate import CONFIG_DIR, preset_goals
from experiments.launch.variants import compose_variants
from experiments.simulate import main
from moejax.bench.ab.config import AblationSection
from moejax.bench.simulate.config import SimulateSection
from moejax.bench.simulate.run import Asked, run_simulate
from moejax.bench.simulate.stages import run_stages
from moejax.core.errors import ConfigError
from moejax.report.experiments import print_result, save_plots
from moejax.results.goals import Goal
from moejax.simulate.kernels import HeadShape, Kernels
from tests.bench.runs import run_into
from tests.bench.simulate.test_run import ENGINE, LARGE, WORKLOAD

SCENARIOS = sorted(path.stem for path in (CONFIG_DIR / "scenario").glob("*.yaml"))
LOADS = {
    "alone": {"concurrency": 1, "request_rate": math.inf, "num_requests": 3},
    "busy": {"request_rate": 300.0},
}
SECTION = SimulateSection(layouts=["tp2"], laws=[], loads=LOADS)


def staged(out: Path, **stages: SimulateSection) -> dict[str, Any]:
    asked = {name: Asked(LARGE, "dummy", section, ENGINE, WORKLOAD) for name, section in stages.items()}
    ablation = AblationSection(stages={name: [] for name in stages})
    config = {"simulate": dataclasses.asdict(SECTION)}
    with run_into(out, "simulate", config, hardware_kind="h100") as run:
        return run_stages(asked, ablation, run)


def test_a_load_is_the_workload_with_its_own_fields(tmp_path: Path) -> None:
    with run_into(tmp_path, "simulate", {"simulate": {"mode": "run"}}, hardware_kind="h100") as run:
        result = run_simulate(Asked(LARGE, "dummy", SECTION, ENGINE, WORKLOAD), run)
    alone, busy = result["cases"]
    assert (alone["load"], alone["concurrency"], alone["num_requests"]) == ("alone", 1, 3)
    assert (busy["load"], busy["request_rate"], busy["num_requests"]) == ("busy", 300.0, 24)
    assert alone["median_tpot_ms"] < busy["median_tpot_ms"]
    assert 0 < alone["device_memory_use_peak"] < busy["device_memory_use_peak"] < 1
    console = Console(record=True, width=180)
    print_result(result, console)
    assert "alone: no layout" not in (text := console.export_text()) and "time (alone)" in text
    assert [path.name for path in save_plots(result, tmp_path)] == ["simulate.png"]


@pytest.mark.parametrize(
    ("loads", "message"),
    [
        (
            {"x": {"concurency": 1}},
            "simulate.loads.x: unknown field 'concurency'; did you mean 'concurrency'",
        ),
        ({"x": {"prompt_len": {"lo": 1}}}, "simulate.loads.x: "),
        ({"x": {"concurrency": 2}}, "simulate.loads.x: workload.concurrency excludes workload.request_rate"),
    ],
)
def test_a_load_that_is_no_workload_is_one_line(loads: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        dataclasses.replace(SECTION, loads=loads).asked(WORKLOAD)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"simulate.rates and simulate.loads exclude each other"):
        dataclasses.replace(SECTION, rates=[1.0]).asked(WORKLOAD)


def test_stages_have_gains_ratios_and_memory_and_one_that_does_not_fit_has_none(tmp_path: Path) -> None:
    tight = dataclasses.replace(SECTION, memory_share=0.001)
    int8 = dataclasses.replace(SECTION, weights="w8a16_int8", dense="w8a16_int8")
    result = staged(tmp_path, tight=tight, bf16=SECTION, int8=int8)
    first, second, third = result["stages"]
    assert (first["memory_gb"], first["latency_ms"]) == ("OOM", None) and "do not fit" in first["error"]
    assert (second["gain"], second["gain_low"]) == (1.0, 1.0)
    assert third["gain"] == pytest.approx(second["latency_ms"] / third["latency_ms"])
    assert third["gain_low"] < third["gain"] < third["gain_high"] and third["memory_gb"] < second["memory_gb"]
    assert result["metrics"]["cumulative_gain_int8"] == third["cumulative_gain"]
    rows = {(row["stage"], row.get("load")): row for row in result["cases"]}
    assert "ratio_output_throughput" not in rows["bf16", "busy"]
    for load in LOADS:
        mine, base = rows["int8", load], rows["bf16", load]
        assert mine["ratio_median_ttft_ms"] == mine["median_ttft_ms"] / base["median_ttft_ms"]
    goal = Goal("mean_e2el_ms", "<=", 1e9, "test", {"stage": "int8", "load": "busy"})
    verdict = goal.verdict(result)
    assert verdict["verdict"] == "met" and verdict["low"] < verdict["actual"] < verdict["high"]
    console = Console(record=True, width=180)
    print_result(result, console)
    text = console.export_text()
    assert "ablation, simulated on h100" in text and "OOM" in text and "SIMULATED" in text
    assert [path.name for path in save_plots(result, tmp_path)] == ["waterfall.png"]


def test_naive_attention_takes_the_time_of_its_scores_and_decodes_alike() -> None:
    flash, naive = (Kernels("a100_80gb", naive_attention=value) for value in (False, True))
    shape = HeadShape(32, 8, 128)
    extra = naive.prefill(shape, [(2048, 2048)]).seconds - flash.prefill(shape, [(2048, 2048)]).seconds
    # Four passes over 16 bits a score at the least.
    assert extra > 4 * 2 * 32 * 2048**2 / flash.bandwidth
    assert naive.decode(shape, 8, 2048) == flash.decode(shape, 8, 2048)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_composes_and_its_goals_name_cases_that_it_has(name: str) -> None:
    argv = [f"scenario={name}"]
    config = compose(argv, "simulate")
    stages = compose_variants(config, "simulate", translate(argv))
    loads = {load for load, _ in config.simulate.asked(config.workload)}
    assert config.goals == preset_goals()[name] and config.goals
    for goal in config.goals:
        case = goal.case or {}
        assert case.get("stage", next(iter(stages), None)) in (stages or {None: 0})
        assert case.get("load") in {*loads, None} and case.get("layout") in {*config.simulate.layouts, None}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["scenario=pplx"], "scenario=pplx: unknown preset 'pplx' (known: "),
        (
            [
                "simulate.layouts=[tp2]",
                "simulate.autoscale.layouts=[tp2,tp64]",
                "simulate.autoscale.queue_ms=9",
            ],
            "simulate.autoscale.layouts: tp64: ",
        ),
        (
            ["simulate.autoscale.layouts=[tp2,tp2]", "simulate.autoscale.queue_ms=9"],
            "simulate.autoscale.layouts=[tp2, tp2]: name two or more",
        ),
        (
            [
                "simulate.layouts=[tp2]",
                "simulate.autoscale.queue_ms=9",
                "ablation.stages.a=[]",
                "ablation.stages.b=[simulate.autoscale.layouts=[tp2,tp64]]",
            ],
            "simulate.autoscale.layouts: tp64: ",
        ),
        (["ablation.stages.a=[]"], "ablation.stages needs at least two"),
        (["scenario=ladder_175b", "simulate.mode=plan"], "ablation.stages: simulate.mode=plan has none"),
        (
            ["scenario=ladder_175b", "ablation.stages.x=[workload.num_requests=2]"],
            "ablation.stages.x changes 'workload', which all variants share",
        ),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch(main, "simulate", argv, ahead=True) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}") and error.count("\n") == 1, error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_has_a_verdict_on_each_of_its_goals(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        launch(main, "simulate", [f"scenario={name}", "tracker=none", "hydra.run.dir=out"], ahead=True) == 0
    )
    out = capsys.readouterr()
    assert "not measurable here" not in out.err and "simulated on" in out.err
