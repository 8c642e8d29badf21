"""A run's end: what fails costs nothing else, is told in a line each, and ends with an error at last."""

import json
from pathlib import Path

import pytest

from moejax.core.errors import OutputError, ReportError, TrackingError
from moejax.results.result import load_requests, load_result
from moejax.tracking.base import CompositeTracker, Tracker
from tests.bench.runs import run_into
from tests.results.simulated import latency_run


class Gone(Tracker):
    """A server that went away in the middle."""

    def summary(self, metrics) -> None:
        raise TrackingError("W&B: the server does not answer")


def finish(run, folder: Path) -> None:
    made = latency_run(folder)
    with run:
        run.start()
        run._tracker = CompositeTracker([*run._tracker.trackers, Gone()])
        run.finish(load_result(made), requests=load_requests(made))


def test_a_plot_and_a_tracker_that_fail_cost_nothing_else(tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    (out / "latency.png").mkdir(parents=True)  # nobody can write this file
    with pytest.raises(ReportError) as raised:
        finish(run_into(out), tmp_path / "made")
    assert str(raised.value) == (
        f"failed after the measurement: latency.png, tracking; its numbers are kept in {out}/result.json"
    )
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.startswith("failed: ")]
    assert lines == [
        f"failed: latency.png: cannot write {out}/latency.png: Is a directory",
        "failed: tracking: W&B: the server does not answer",
    ]
    assert "TPOT" in captured.err
    assert load_result(out)["metrics"] == json.loads((out / "summary.json").read_text())
    assert (out / "itl.png").is_file()
    where, line = captured.out.splitlines()
    assert where == f"results: {out}" and len(line) <= 300
    assert json.loads(line)["experiment"] == "latency"


def test_a_result_that_cannot_be_written_is_printed(tmp_path: Path, capsys) -> None:
    out = tmp_path / "run"
    (out / "result.json").mkdir(parents=True)
    with pytest.raises(OutputError, match=r"result\.json is not written .*what is printed is all there is"):
        finish(run_into(out), tmp_path / "made")
    assert "TPOT" in capsys.readouterr().err and (out / "requests.jsonl").is_file()


def test_a_defect_in_a_plot_is_raised_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moejax.report.plots.latency_percentiles", lambda result: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        finish(run_into(tmp_path / "run"), tmp_path / "made")
    assert (tmp_path / "run" / "result.json").is_file() and (tmp_path / "run" / "itl.png").is_file()
