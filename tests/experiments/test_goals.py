"""`goals:` of an experiment's config, and `python -m experiments.goals` over presets and runs."""

import json
from pathlib import Path

import pytest

from experiments import goals as goals_experiment
from experiments import latency as latency_experiment
from experiments.launch.app import launch
from experiments.launch.notebook import compose, main_of, names
from experiments.launch.validate import preset_goals
from tests.results.simulated import CONFIG, PROVENANCE, latency_run


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def launch_goals(*argv: str) -> int:
    return launch(goals_experiment.main, "goals", list(argv), positional="runs")


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            '[{metric:median_tpt_ms,op:"<=",value:1,source:x}]',
            "goals[0].metric: unknown metric 'median_tpt_ms'; did you mean 'median_tpot_ms'?",
        ),
        ('[{metric:median_tpot_ms,op:"=",value:1,source:x}]', "goals[0].op: unknown value '='"),
        (
            '[{metric:median_tpot_ms,op:"<=",value:fast,source:x}]',
            "goals[0].value must be a number, got 'fast'",
        ),
        (
            '[{metric:median_tpot_ms,op:"<=",value:1}]',
            "'goals[0].source' has no value yet: every item of that list needs one",
        ),
        (
            '[{metrics:median_tpot_ms,op:"<="}]',
            "goals must be a list, each a section with keys metric, op, value, source, case, got [{'metrics'",
        ),
        ("3", "goals must be a list, each a section with keys metric, op, value, source, case, got 3"),
    ],
)
def test_a_wrong_goal_is_one_line_and_leaves_nothing(argument: str, message: str, capsys) -> None:
    assert launch(latency_experiment.main, "latency", [f"goals={argument}"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}") and captured.err.count("\n") == 1, captured.err
    assert captured.out == "" and list(Path.cwd().iterdir()) == []


def test_every_experiment_with_a_result_takes_goals() -> None:
    goal = '[{metric:compile_seconds,op:"<",value:9,source:x}]'
    without = {"compare", "dashboard", "doctor", "generate", "goals", "models", "routing", "serve"}
    for name in sorted({*names()} - without):
        config = compose([f"goals={goal}"], name)
        assert [item.metric for item in config.goals] == ["compile_seconds"], name
        assert (config.tracker.kind, config.goals[0].op) == ("wandb_offline", "<")


def test_a_preset_has_its_goals_or_those_of_the_one_that_it_is_made_of() -> None:
    goals = preset_goals()
    assert goals["quick"] == compose(["experiment=quick"], "latency").goals
    assert goals["peers"] and goals["peers_medium"] == [] and goals["latency_matrix_a100"] == []


def test_presets_and_runs_are_listed_with_the_newest_verdict_and_nothing_is_written(tmp_path, capsys) -> None:
    def run(folder: str, time: str, *argv: str, **extra) -> None:
        provenance = {**PROVENANCE, "time_utc": time, "argv": ["experiments/latency.py", *argv]}
        latency_run(tmp_path / folder, requests=False, provenance=provenance, **extra)

    cases = ((1, 64, 32), (8, 64, 32))
    run("outputs/old", "2026-01-01", "experiment=quick", "tracker=none", cases=cases)
    words = ["experiment=quick", "workload.iterations=2", 'hydra.run.dir="x"']
    simulated = {"kind": "a100_80gb", "simulated": True}
    run("outputs/new", "2026-01-02", *words, cases=cases, hardware=simulated)
    goal = {"metric": "median_tpot_ms", "op": "<=", "value": 9, "source": "me"}
    run("outputs/mine", "2026-01-03", "goals=[…]", config={**CONFIG, "goals": [goal]})
    before = sorted(tmp_path.rglob("*"))
    assert launch_goals("tracker=none") == 0
    out, err = capsys.readouterr()
    assert sorted(tmp_path.rglob("*")) == before
    counts = json.loads(out)
    assert counts["experiment"] == "goals" and counts["met"] == 1 and counts["missed"] == 2
    assert counts["not_measurable_here"] == 1 and counts["no_run_yet"] > 10
    shown = " ".join(err.split())
    assert "simulated on a100_80gb" in shown and "workload.iterations=2" in shown and "hydra" not in shown
    assert "measured on NVIDIA" in shown and "[…]" not in shown
    assert launch_goals("outputs/old") == 0
    assert "simulated" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("nowhere", "runs[0] must be a folder that is there, got 'nowhere'"),
        ("tracker=wandb", "this experiment tracks nothing: leave out tracker=wandb"),
        ("hydra.run.dir=x", "experiments.goals has no run folder: leave out hydra.run.dir=x"),
        ("-m", "experiments.goals has no run folder: leave out -m"),
        ("overwrite=true", "unknown key 'overwrite' (known: runs)"),
    ],
)
def test_its_own_mistakes_are_one_line(argument: str, message: str, capsys) -> None:
    assert launch_goals(argument) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert main_of("goals") is goals_experiment.main and list(Path.cwd().iterdir()) == []
