"""A search over settings: refused combinations do not end it, a killed study goes on, the best is told."""

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from experiments.launch.app import launch
from experiments.launch.schema import LatencyConfig, ThroughputConfig
from moejax.bench.objective import check_objective, known_objectives, objective_value
from moejax.core.errors import ConfigError
from moejax.results.metrics import Slo
from moejax.results.sweep import read_sweep
from tests.experiments.test_sweep import SCRIPT, environment, kill_in_job_of_seed, run, seeds

SEARCH = (
    "-m", "hydra/sweeper=optuna", "hydra/sweeper/sampler=tpe", "hydra.sweeper.sampler.seed=0",
    "hydra.sweeper.direction=maximize", "hydra.sweeper.study_name=s", "hydra.sweeper.n_jobs=1",
    "hydra.sweeper.storage=sqlite:///${hydra.sweep.dir}/study.db", "hydra.sweeper.max_failure_rate=1.0",
    "hydra.sweep.dir=here", "tracker=none",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _optuna() -> None:
    pytest.importorskip(
        "hydra_plugins.hydra_optuna_sweeper",
        reason="hydra-optuna-sweeper is not installed (make test installs it)",
    )


def trials(folder: Path) -> list[str]:
    with closing(sqlite3.connect(folder / "study.db")) as database:
        return [state for (state,) in database.execute("select state from trials order by number")]


@pytest.mark.slow
def test_refused_combinations_are_failed_trials_and_a_killed_study_goes_on(tmp_path: Path) -> None:
    """Seeds 1 to 3 by batch sizes of which 9 exceeds the engine's 8; killed in the first trial of seed 2."""
    swept = ("seed=choice(1,2,3)", "workload.batch_size=choice(1,9)", "engine.max_num_seqs=8")
    err = kill_in_job_of_seed(tmp_path, 2, *SEARCH, "hydra.sweeper.n_trials=7", *swept)
    assert "go on with: python -m experiments.latency --resume here" in err
    before = seeds(tmp_path)
    told = trials(tmp_path / "here")
    assert told[-1] == "RUNNING" and len(before) == 1 + told.count("COMPLETE")

    done = run(tmp_path, "--resume", "here")
    assert done.returncode == 0, done.stderr
    assert f"sweep of 7 jobs, {len(told) - 1} of them done" in done.stderr
    states = trials(tmp_path / "here")
    assert states[: len(told)] == told and states.count("COMPLETE") + states.count("FAIL") == 7
    assert states.count("FAIL") > 0, "the sampler has tried no refused combination"
    jobs = read_sweep(tmp_path / "here").jobs
    assert len({job["job"] for job in jobs}) == len(jobs) == 8
    assert [job["state"] for job in jobs].count("unfinished") == 1
    assert (
        "workload.batch_size 9 exceeds engine.max_num_seqs 8" in done.stderr
        and "Traceback" not in done.stderr
    )
    assert "\nbest value: " in done.stderr
    (command,) = [line for line in done.stderr.splitlines() if line.startswith("run it again: ")]
    for word in ("hydra.mode=RUN", "seed=3", "workload.batch_size=1", "engine.max_num_seqs=8"):
        assert word in command.split()


def test_a_sweeper_wants_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def main(config: ThroughputConfig) -> None:
        raise AssertionError("must not run")

    assert launch(main, "throughput", ["hydra/sweeper=optuna"]) == 2
    assert capsys.readouterr().err == "error: hydra/sweeper=optuna chooses the jobs of a sweep: add -m\n"
    for argv, text in (
        (["objective=request_godput"], "did you mean 'request_goodput'"),
        (["objective=request_goodput"], "none is set: add workload.slo.ttft_ms"),
        (["experiment=optuna_goodput", "objective=p99_ttft"], "did you mean 'p99_ttft_ms'"),
        (["objective=median_ttft_ms", "ramp.start=4"], "unknown metric 'median_ttft_ms' of a ramp run"),
        (
            ["experiment=optuna_goodput", "hydra.sweeper.n_trials=few"],
            "hydra.sweeper.n_trials: Value 'few' of type 'str'",
        ),
    ):
        assert launch(main, "throughput", argv) == 2
        err = capsys.readouterr().err
        assert text in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_without_the_plugin_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    hidden = (
        "import hydra_plugins, runpy, sys; hydra_plugins.__path__ = []\n"
        "sys.argv = ['x', '-m', 'hydra/sweeper=optuna', 'seed=1']\n"
        f"runpy.run_path({SCRIPT!r}, run_name='__main__')"
    )
    done = subprocess.run(
        [sys.executable, "-c", hidden],
        cwd=tmp_path,
        env=environment(tmp_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: hydra/sweeper=optuna: unknown option 'optuna'")
    assert "pip install 'moejax[sweep]'" in done.stderr


def test_objectives() -> None:
    for experiment in ("latency", "throughput", "ramp"):
        for name in known_objectives(experiment):
            check_objective(name, experiment, Slo(ttft_ms=1.0))
    check_objective(None, "latency", Slo())
    result = {"metrics": {"output_throughput": 3, "request_goodput": None}}
    assert objective_value(result, None) is None and objective_value(result, "output_throughput") == 3.0
    with pytest.raises(ConfigError, match="request_goodput has no value in this run"):
        objective_value(result, "request_goodput")


def test_a_cases_metric_needs_the_case_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen: list[int | None] = []

    def main(config: LatencyConfig) -> None:
        chosen.append(config.objective_case.batch_size)

    three = ["workload.batch_size=[1,4,8]"]
    for argv, text in (
        (
            [*three, "objective=median_tpot_ms"],
            "is of one case, and objective_case fits 3 of 3: add objective_case.batch_size=1 or "
            "objective_case.batch_size=4 or objective_case.batch_size=8",
        ),
        ([*three, "objective=median_tpot_ms", "objective_case.batch_size=2"], "fits 0 of 3"),
        (["objective_case.batch_size=1"], "and none is set"),
        ([*three, "objective_case.batch_siz=1"], "did you mean 'objective_case.batch_size'"),
        (["objective_case.batch_size=x"], "objective_case.batch_size must be an integer, got 'x'"),
        (["objective_case.batch_size=0"], "objective_case.batch_size must be an integer of at least 1"),
        ([*three, "objective=output_throughput"], None),
        ([*three, "objective=median_tpot_ms", "objective_case.batch_size=4"], None),
        (["workload.batch_size=8", "objective=median_tpot_ms"], None),
    ):
        code = launch(main, "latency", argv)
        err = capsys.readouterr().err
        assert code == (0 if text is None else 2), err
        assert text is None or (text in err and err.count("\n") == 1)
    assert chosen == [None, 4, None]
