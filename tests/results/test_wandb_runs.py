"""W&B runs read back from disk are what was told to W&B."""

import base64
import functools
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from moejax.core.errors import ConfigError
from moejax.results import wandb_runs as offline
from moejax.results.compare import compare
from moejax.results.compare.inputs import UNKNOWN, between
from moejax.results.wandb_runs import find_log, read_offline_run, read_table
from moejax.tracking.base import RunInfo, TrackerConfig
from moejax.tracking.factory import make_tracker
from tests.results.simulated import CONFIG, PROVENANCE, changed, latency_run


def track(folder: Path, root: Path, *, artifact: bool = True) -> Path:
    """The W&B run of a run folder, as `run_latency` makes it."""
    result = json.loads((folder / "result.json").read_text())
    config = {**result["config"], "provenance": result["provenance"]}
    info = RunInfo("latency", "tiny", folder, config=config)
    tracker = make_tracker(TrackerConfig(dir=str(root)), info)
    with tracker:
        for index, row in enumerate(result["cases"]):
            tracker.log({k: v for k, v in row.items() if isinstance(v, (int, float))}, step=index)
        tracker.summary(result["metrics"])
        columns = list(result["cases"][0])
        tracker.table("cases", columns, [[row.get(c) for c in columns] for row in result["cases"]])
        if artifact:
            tracker.artifact("latency-result", "result", [folder / "result.json", folder / "requests.jsonl"])
    return tracker.trackers[1].run_dir


@pytest.fixture(scope="module", autouse=True)
def _each_log_is_read_once() -> Iterator[None]:
    """By W&B's command, which takes a second to start."""
    read = offline._records
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offline, "_records", functools.cache(lambda log: tuple(read(log))))
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("wandb")
    staging = tmp_path_factory.mktemp("staging")
    patch = pytest.MonkeyPatch()
    patch.setenv("WANDB_DATA_DIR", str(staging))
    patch.setenv("WANDB_CACHE_DIR", str(staging))
    try:
        configs = {"a": CONFIG, "b": changed(CONFIG, engine__overlap=False)}
        folders = {
            name: latency_run(root / name, seed=i, factor=1 + i, config=config)
            for i, (name, config) in enumerate(configs.items())
        }
        found = {f"{name}_run": folder for name, folder in folders.items()}
        found |= {name: track(folder, root) for name, folder in folders.items()}
        found["bare"] = track(folders["a"], root, artifact=False)
    finally:
        patch.undo()
    return found


def test_config_summary_and_tables_come_back(runs):
    run = read_offline_run(runs["a"])
    assert (run.job_type, run.finished) == ("latency", True)
    assert run.config["engine"] == CONFIG["engine"] and run.config["provenance"]["git"] == PROVENANCE["git"]
    assert run.summary["model_bytes"] == 1000
    assert [row["batch_size"] for row in read_table(run.tables["cases"])] == [1, 4]
    assert {"result.json", "requests.jsonl"} <= set(run.files)


def test_a_run_is_its_folder_or_its_log(runs):
    log = find_log(runs["a"])
    assert log.suffix == ".wandb" and find_log(log) == log and find_log(runs["a_run"]) is None
    assert read_offline_run(log).summary == read_offline_run(runs["a"]).summary


def test_with_its_staged_files_a_run_compares_like_its_folder(runs):
    found, direct = compare([runs["a"], runs["b"]]), compare([runs["a_run"], runs["b_run"]])
    assert [run.source for run in found.runs] == ["wandb", "wandb"] and not found.notes
    assert [v.row() for v in found.verdicts] == [v.row() for v in direct.verdicts]
    assert {v.outcome for v in found.verdicts} == {"worse"}
    mixed = compare([runs["a"], runs["a_run"]])
    assert mixed.identical_inputs(1) and {v.outcome for v in mixed.verdicts} == {"no winner"}


def test_without_them_it_has_inputs_and_metrics_and_says_what_it_lacks(runs):
    found = compare([runs["bare"], runs["a_run"]])
    assert not found.verdicts and found.identical_inputs(1)
    assert "no longer staged here" in found.notes[0] and "get no verdict" in found.notes[0]
    rows = {row.name: row for row in found.metrics}
    assert rows["median_tpot_ms"].ratios == (1.0, 1.0) and rows["compile_seconds"].ratios == (1.0, 1.0)
    assert not any("cases" in name or name.startswith("_") for name in rows)
    assert "inputs are identical as far as recorded" in found.lines()[0]


def test_what_a_source_does_not_record_is_no_difference(runs, tmp_path):
    extra = {"resolved": {"engine.kernels": {"value": "xla", "reason": ""}}, "compile_ledger": []}
    found = compare([runs["bare"], latency_run(tmp_path / "x", **extra)])
    assert not between(found.differences, 0, 1)
    assert all(UNKNOWN in d.values for d in found.differences)
    other = latency_run(tmp_path / "y", config=changed(CONFIG, engine__overlap=False))
    assert [d.key for d in between(compare([runs["bare"], other]).differences, 0, 1)] == ["engine.overlap"]


def test_a_staged_file_that_changed_is_not_taken_for_the_run(tmp_path):
    place = tmp_path / "result.json"
    place.write_text("{}")
    digest = base64.b64encode(hashlib.md5(b"{}", usedforsecurity=False).digest()).decode()
    entry = {"path": "result.json", "local_path": str(place), "digest": digest}
    assert offline._staged({"manifest": {"contents": [entry]}}) == {"result.json": place}
    place.write_text("{ }")
    assert offline._staged({"manifest": {"contents": [entry]}}) == {}
    assert offline._staged({}) == {}


def test_what_is_no_log_or_a_broken_one_is_one_line(tmp_path, runs):
    with pytest.raises(ConfigError, match=r"holds no W&B run: there is no run-\*\.wandb"):
        read_offline_run(tmp_path)
    broken = tmp_path / "run-x.wandb"
    broken.write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"cannot read .*run-x\.wandb|cut off at its start"):
        read_offline_run(broken)
    table = tmp_path / "t.table.json"
    table.write_text("[]")
    with pytest.raises(ConfigError, match="is no W&B table"):
        read_table(table)


def test_a_run_that_was_cut_off_says_so(runs, tmp_path, monkeypatch):
    records = list(offline._records(find_log(runs["bare"])))
    cut = [record for record in records if record["type"] != "exit"]
    monkeypatch.setattr(offline, "_records", lambda log: iter(cut))
    assert not read_offline_run(runs["bare"]).finished
    assert "A: the run has not said that it ended" in compare([runs["bare"], runs["a_run"]]).notes
    early = [record for record in cut if record["type"] != "summary"]
    monkeypatch.setattr(offline, "_records", lambda log: iter(early))
    with pytest.raises(ConfigError, match="the run has no metrics; it ended before"):
        compare([runs["bare"], runs["a_run"]])
