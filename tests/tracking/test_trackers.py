"""The tracker protocol, the JSONL tracker and how trackers are chosen; no W&B here."""

import json
import subprocess
import sys

import numpy as np
import pytest

from moejax.core.errors import ConfigError, OutputError
from moejax.tracking.base import CompositeTracker, RunInfo, TrackerConfig
from moejax.tracking.factory import make_tracker
from moejax.tracking.jsonl import JsonlTracker, load_metrics


def info(path, **changes) -> RunInfo:
    return RunInfo("latency", "run", path, **changes)


def test_history_is_on_disk_after_each_row(tmp_path):
    tracker = JsonlTracker(info(tmp_path))
    tracker.log({"loss": np.float32(2.5), "note": "a"}, step=1)
    tracker.log({"loss": float("nan")}, step=2)
    rows = load_metrics(tmp_path)
    assert [(r["step"], r["loss"]) for r in rows] == [(1, 2.5), (2, None)]
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    tracker.summary({"final": np.int64(3)})
    tracker.finish()
    tracker.finish()
    assert json.loads((tmp_path / "summary.json").read_text()) == {"final": 3}


def test_a_new_run_does_not_keep_the_history_of_another(tmp_path):
    for step in (0, 1):
        tracker = JsonlTracker(info(tmp_path))
        tracker.log({"loss": 1.0}, step=step)
        tracker.finish()
        assert [row["step"] for row in load_metrics(tmp_path)] == [step]


def test_line_cut_short_by_a_kill_is_left_out_but_damage_is_an_error(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"st')
    assert load_metrics(file) == [{"step": 1}]
    file.write_text('{"st\n{"step": 2}\n')
    with pytest.raises(ConfigError, match="line 1 is not JSON"):
        load_metrics(file)
    with pytest.raises(ConfigError, match="no such file"):
        load_metrics(tmp_path / "none.jsonl")


def test_only_scalars_are_metrics(tmp_path):
    tracker = JsonlTracker(info(tmp_path))
    with pytest.raises(TypeError, match="'itl' must be a scalar, got list"):
        tracker.log({"itl": [1.0, 2.0]})
    tracker.finish()


def test_kind_none_writes_jsonl_alone_and_imports_no_wandb(tmp_path):
    code = """if True:
        import sys
        from pathlib import Path
        from moejax.tracking.base import RunInfo, TrackerConfig
        from moejax.tracking.factory import make_tracker
        info = RunInfo("latency", "run", Path(sys.argv[1]))
        with make_tracker(TrackerConfig(kind="none"), info) as tracker:
            tracker.log({"loss": 1.0}, step=0)
        assert tracker.hints() == []
        assert "wandb" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert len(load_metrics(tmp_path)) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "wandb_ofline"}, "did you mean 'wandb_offline'"),
        ({"tags": 3}, "tracker.tags must be a list, each a string"),
        ({"timeout_s": 0}, "tracker.timeout_s must be a positive number"),
        ({"project": ""}, "tracker.project"),
    ],
)
def test_wrong_configuration_is_one_clear_line(changes, message):
    with pytest.raises(ConfigError, match=message):
        TrackerConfig(**changes)


def test_unwritable_output_is_an_error_before_anything_starts(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write to the output folder"):
        make_tracker(TrackerConfig(kind="none"), info(tmp_path / "file" / "below"))


class Spy:
    def __init__(self, fails: bool = False) -> None:
        self.fails, self.codes = fails, []

    def finish(self, exit_code: int = 0) -> None:
        self.codes.append(exit_code)
        if self.fails:
            raise OutputError("full")


def test_composite_finishes_all_even_when_one_fails():
    first, second = Spy(fails=True), Spy()
    with pytest.raises(OutputError, match="full"):
        CompositeTracker([first, second]).finish(0)
    assert (first.codes, second.codes) == ([0], [0])


def test_a_tracker_that_goes_away_costs_neither_the_others_nor_the_run(tmp_path, caplog):
    gone, kept = JsonlTracker(info(tmp_path / "a")), JsonlTracker(info(tmp_path / "b"))
    composite = CompositeTracker([gone, kept])
    gone._file.close()  # what a full disk or a dead server looks like from here
    composite.log({"x": 1}, step=0)
    composite.log({"x": 2}, step=1)
    composite.summary({"x": 2})
    assert [record.message for record in caplog.records] == ["tracker: I/O operation on closed file."]
    with pytest.raises(ValueError, match="closed file"):
        composite.finish(0)
    assert [row["x"] for row in load_metrics(tmp_path / "b")] == [1, 2]
    assert (tmp_path / "b" / "summary.json").is_file()


def test_failing_body_ends_the_run_with_1_and_keeps_its_own_error():
    spy = Spy(fails=True)
    with pytest.raises(ZeroDivisionError), CompositeTracker([spy]):
        raise ZeroDivisionError
    assert spy.codes == [1]
