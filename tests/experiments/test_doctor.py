"""`python -m experiments.doctor`: exit codes, output, and that it writes nothing."""

import json
from pathlib import Path

import pytest

from experiments import doctor as doctor_experiment
from experiments.launch.app import launch
from moejax.results.diagnosis import Finding
from moejax.tracking import doctor
from tests.results.simulated import latency_run


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(*argv: str) -> int:
    return launch(doctor_experiment.main, "doctor", list(argv))


def test_machine_and_run_as_a_table_and_as_json(tmp_path: Path, capsys) -> None:
    latency_run(tmp_path / "run", requests=False)
    before = sorted(tmp_path.rglob("*"))
    assert run("run=run", "json=true") in (0, 1)
    told = json.loads(capsys.readouterr().out)
    assert {"devices", "versions", "bound", "waiting"} <= {row["check"] for row in told["checks"]}
    assert sum(told.get(state, 0) for state in ("ok", "warn", "fail", "unknown")) == len(told["checks"])
    assert run() in (0, 1)
    out, err = capsys.readouterr()
    assert "checks" not in json.loads(out) and "clock source" in err and sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("warn", 0), ("unknown", 0), ("fail", 1)])
def test_only_a_check_that_fails_makes_the_exit_code(state, code, monkeypatch, capsys) -> None:
    monkeypatch.setattr(doctor, "check_machine", lambda *_: [Finding("x", state, "words", "key")])
    assert run() == code
    assert json.loads(capsys.readouterr().out) == {"experiment": "doctor", state: 1}


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("run=nowhere", "run must be a folder that is there, got 'nowhere'"),
        ("run=.", "no result at result.json: no such file"),
        ("tracker=wandb", "this experiment tracks nothing: leave out tracker=wandb"),
        ("hydra.run.dir=x", "experiments.doctor has no run folder: leave out hydra.run.dir=x"),
        ("jsn=true", "unknown key 'jsn'; did you mean 'json'? (known: json, run)"),
    ],
)
def test_its_own_mistakes_are_one_line(argument: str, message: str, capsys) -> None:
    assert run(argument) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
