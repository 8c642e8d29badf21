"""The tracker that always runs: one JSON object per logged step in `metrics.jsonl`, readable by anything."""

import os
import time
from collections.abc import Mapping
from typing import Any

from moejax.core.errors import OutputError, os_errors
from moejax.core.files import atomic_write_text, dump_json, ensure_writable
from moejax.results.result import load_rows
from moejax.tracking.base import RunInfo, Scalar, Tracker, plain_scalars

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"


class JsonlTracker(Tracker):
    """Appends the history to `metrics.jsonl` and writes `summary.json` when the run ends.

    Rows are `{"step": …, "time": UNIX seconds, …metrics}`, each flushed, so that a killed run keeps what it
    logged. A file from an earlier run is replaced. Tables, pictures and artifacts are files in the output
    folder already and are not copied.
    """

    def __init__(self, info: RunInfo) -> None:
        self._dir = ensure_writable(info.output_dir)
        self.path = self._dir / METRICS_FILE
        self._summary: dict[str, Scalar] = {}
        with os_errors(OutputError, f"cannot write {self.path}"):
            self._file = open(self.path, "w", encoding="utf-8")

    def log(self, metrics: Mapping[str, Scalar], step: int | None = None) -> None:
        row = {"step": step, "time": round(time.time(), 3), **plain_scalars(metrics)}
        self._file.write(dump_json(row) + "\n")
        self._file.flush()

    def summary(self, metrics: Mapping[str, Scalar]) -> None:
        self._summary.update(plain_scalars(metrics))

    def finish(self, exit_code: int = 0) -> None:
        if self._file.closed:
            return
        self._file.close()
        if self._summary:
            atomic_write_text(self._dir / SUMMARY_FILE, dump_json(self._summary, indent=2) + "\n")


def load_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the rows of a metrics.jsonl, or of the one in a folder. A last line that a kill cut short is
    left out.

    Raises:
        ConfigError: there is no such file, or another line than the last is not JSON.
    """
    return load_rows(path, METRICS_FILE, torn=True)
