"""Reads W&B runs back from disk, finished or not, without a server.

The log of a run is binary and W&B's own; its documented reader is the command `wandb leet inspect --json`,
which is what is called here, in a process of its own, so that this module imports no wandb.
"""

import base64
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moejax.core.errors import ConfigError

_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class OfflineRun:
    """A W&B run as its log describes it.

    Attributes:
        log: the `.wandb` file.
        job_type, started: W&B's own words for it; `started` is ISO 8601.
        config: as passed to `wandb.init`, with what was changed later.
        summary: dotted name → last value.
        tables: name → file of each logged table that is there, as `{"columns": […], "data": […]}`.
        files: name → path of each artifact file that still lies where W&B staged it, its digest checked.
        finished: whether the run has said that it ended.
    """

    log: Path
    job_type: str | None
    started: str | None
    config: dict[str, Any]
    summary: dict[str, Any]
    tables: dict[str, Path] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    finished: bool = True


def find_log(path: str | os.PathLike[str]) -> Path | None:
    """The `.wandb` log that a path is or that its folder holds; None if there is none."""
    place = Path(path)
    if place.suffix == ".wandb" and place.is_file():
        return place
    logs = sorted(place.glob("run-*.wandb")) if place.is_dir() else []
    return logs[0] if logs else None


def read_offline_run(path: str | os.PathLike[str]) -> OfflineRun:
    """Reads a W&B run's folder or log.

    Raises:
        ConfigError: there is no log, or it cannot be read.
    """
    log = find_log(path)
    if log is None:
        raise ConfigError(f"{path} holds no W&B run: there is no run-*.wandb in it")
    run: dict[str, Any] = {}
    config: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    files: dict[str, Path] = {}
    finished = False
    for record in _records(log):
        kind = str(record.get("type"))
        content = record.get(kind) or {}
        if kind == "run":
            run = content
            config.update((content.get("config") or {}).get("update") or {})
        elif kind == "config":
            _apply(config, content)
        elif kind == "summary":
            _apply(summary, content)
        elif kind == "artifact":
            files.update(_staged(content))
        elif kind == "exit":
            finished = True
    if not run:
        raise ConfigError(f"{log}: the log has no run in it; it was cut off at its start")
    config.pop("_wandb", None)
    return OfflineRun(
        log=log,
        job_type=run.get("job_type"),
        started=run.get("start_time"),
        config=config,
        summary=summary,
        tables=_tables(summary, log.parent / "files"),
        files=files,
        finished=finished,
    )


def read_table(path: Path) -> list[dict[str, Any]]:
    """A logged table's rows.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no W&B table: {error}") from error


def _records(log: Path) -> Iterator[Mapping[str, Any]]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(log)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"cannot read {log}: `wandb leet inspect` failed: {error}") from error
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    if done.returncode or not lines:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        reason = said[-1] if said else f"`wandb leet inspect` ended with {done.returncode}"
        raise ConfigError(f"cannot read {log}: {reason}")
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # a notice between the records
        if isinstance(record, dict):
            yield record


def _apply(values: dict[str, Any], change: Mapping[str, Any]) -> None:
    values.update(change.get("update") or {})
    for key in change.get("remove") or ():
        values.pop(key, None)


def _staged(artifact: Mapping[str, Any]) -> dict[str, Path]:
    """Files of an artifact by name that are still there and still what was logged."""
    entries = (artifact.get("manifest") or {}).get("contents") or ()
    places = [(entry, Path(str(entry.get("local_path") or ""))) for entry in entries]
    return {
        str(entry.get("path")): place
        for entry, place in places
        if place.is_file() and _digest(place) == entry.get("digest")
    }


def _digest(path: Path) -> str | None:
    """W&B's digest of a file: base64 of its MD5."""
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, functools.partial(hashlib.md5, usedforsecurity=False))
    except OSError:
        return None
    return base64.b64encode(digest.digest()).decode("ascii")


def _tables(summary: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    names = [k.removesuffix("._type") for k, kind in summary.items() if kind == "table-file"]
    places = {name: folder / str(summary.get(f"{name}.path")) for name in names}
    return {name: place for name, place in places.items() if place.is_file()}
