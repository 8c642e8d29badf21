"""Runs to compare, read from where they lie: run folders, result.json files, offline W&B runs."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moejax.core.errors import ConfigError
from moejax.results.result import REQUESTS_FILE, RESULT_FILE, SCHEMA, load_requests, load_result
from moejax.results.run_folders import check_run, run_names
from moejax.results.wandb_runs import OfflineRun, find_log, read_offline_run, read_table

_NOT_METRICS = ("_", "timeline/", "telemetry/", "case/")


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        label: its letter; name: the shortest end of its path that tells it from the others.
        path: as given; source: `folder` or `wandb`.
        result: result.json's content, or as much of it as W&B has.
        requests: rows of requests.jsonl; None where there are none.
        missing: what could not be had of it, a line each.
    """

    label: str
    name: str
    path: Path
    source: str
    result: Mapping[str, Any]
    requests: Sequence[Mapping[str, Any]] | None = None
    missing: tuple[str, ...] = ()
    unknown: frozenset[str] = field(default_factory=frozenset)
    """Keys of a result that this source does not have, so that they are not taken for a difference."""

    @property
    def experiment(self) -> str:
        return str(self.result["experiment"])

    @property
    def title(self) -> str:
        """The run's letter and name, for legends and headings."""
        return f"{self.label}: {self.name}"


def label(index: int) -> str:
    """A, B, …, Z, AA, AB, …"""
    letters = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        letters = chr(ord("A") + rest) + letters
    return letters


def load_runs(paths: Sequence[str | os.PathLike[str]]) -> list[Run]:
    """Reads runs of one experiment; the first is the baseline.

    Raises:
        ConfigError: a path that is no run, a damaged file, or different experiments.
    """
    runs = []
    for index, (path, name) in enumerate(zip(paths, run_names(paths), strict=True)):
        if not check_run(path):
            raise ConfigError(
                f"{path} is no run: there is no {RESULT_FILE} in it; it failed or is not finished"
            )
        runs.append(_load(Path(path), label(index), name))
    first = runs[0]
    for run in runs[1:]:
        if run.experiment != first.experiment:
            raise ConfigError(
                f"{run.path} is of experiment {run.experiment!r} and {first.path} of {first.experiment!r}:"
                " no metric of one means the same in the other; compare runs of one experiment"
            )
    return runs


def _load(path: Path, letter: str, name: str) -> Run:
    log = find_log(path)
    if log is not None and not (path.is_dir() and (path / RESULT_FILE).is_file()):
        return _from_wandb(path, letter, name)
    result = load_result(path)
    folder = path if path.is_dir() else path.parent
    rows = load_requests(folder) if (folder / REQUESTS_FILE).is_file() else None
    missing = () if rows else (f"no {REQUESTS_FILE}: nothing to judge latencies by",)
    return Run(letter, name, path, "folder", result, rows or None, missing if _timed(result) else ())


def _timed(result: Mapping[str, Any]) -> bool:
    rows = (result["metrics"], *(result.get("cases") or ()))
    return any(name.endswith("_ttft_ms") for row in rows for name in row)


def _from_wandb(path: Path, letter: str, name: str) -> Run:
    run = read_offline_run(path)
    missing = [] if run.finished else ["the run has not said that it ended"]
    if RESULT_FILE in run.files:
        result = load_result(run.files[RESULT_FILE])
        rows = load_requests(run.files[REQUESTS_FILE]) if REQUESTS_FILE in run.files else None
        if rows is None and _timed(result):
            missing.append(f"no {REQUESTS_FILE} among the staged artifacts: nothing to judge latencies by")
        return Run(letter, name, path, "wandb", result, rows, tuple(missing))
    missing.append(
        "the artifact's files are no longer staged here, so there are no samples of requests, kernel choices"
        " and compiled programs: its metrics get no verdict"
    )
    unknown = frozenset({"resolved", "compile_ledger"})
    return Run(letter, name, path, "wandb", _summary_result(run), None, tuple(missing), unknown)


def _summary_result(run: OfflineRun) -> dict[str, Any]:
    """A result from what the log itself holds."""
    config = dict(run.config)
    provenance = config.pop("provenance", None) or {}
    cases = read_table(run.tables["cases"]) if "cases" in run.tables else []
    fields = {"case", "batch_size", "prompt_len", "output_len"} if cases else {"case"}
    metrics = {
        key: value
        for key, value in run.summary.items()
        if isinstance(value, (int, float))
        and not key.startswith(_NOT_METRICS)
        and key not in fields
        and f"{key.rpartition('.')[0]}._type" not in run.summary
        and not key.partition(".")[2].startswith("_")
    }
    if not metrics:
        raise ConfigError(f"{run.log}: the run has no metrics; it ended before it had measured anything")
    if not run.job_type:
        raise ConfigError(f"{run.log}: the run names no experiment (its job type): it is none of moejax's")
    return {
        "schema": SCHEMA,
        "experiment": run.job_type,
        "metrics": metrics,
        "cases": cases,
        "config": config,
        "provenance": {"time_utc": run.started, **provenance},
    }
