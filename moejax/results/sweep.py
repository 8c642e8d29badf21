"""Reads and writes a sweep's records, by which it can be resumed and reported: `sweep.json` in its folder,
and a `job.json` in each job's.

A job is finished once its `job.json` says so, which is written after everything else, and its result can be
read; whatever a kill leaves is therefore done again. Files are whole or not there. No JAX, no Hydra here.
"""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from moejax.core.errors import ConfigError
from moejax.core.files import atomic_write_text, content_hash, dump_json
from moejax.results.result import RESULT_FILE, load_result

SWEEP_FILE = "sweep.json"
JOB_FILE = "job.json"
SCHEMA = 1

# None changes what is measured: a sweep may be resumed with another tracker.
_NOT_PART_OF_A_JOB = ("tracker", "verbose", "overwrite")
_CLOCK_S = 10.0  # by which the times of two clocks may differ


@dataclass(frozen=True)
class JobRecord:
    """A job of a sweep.

    Attributes:
        key: hash of its configuration, see `job_key`; `config` is what was hashed.
        overrides: its KEY=VALUE arguments.
        state: "running", "finished" or "failed"; "running" without a process is what a kill leaves.
        git: the code it ran with, see `moejax.tracking.provenance.git_state`.
        has_result: it wrote a result.json.
        value: what the experiment returned, a sweep's objective.
        error: one line if it failed.
        traceback: of an error that is a defect and no mistake of the user's.
        seconds: how long it took.
    """

    key: str
    config: dict[str, Any]
    overrides: list[str]
    state: str = "running"
    git: dict[str, Any] = field(default_factory=dict)
    has_result: bool = False
    value: float | None = None
    error: str | None = None
    traceback: str | None = None
    seconds: float | None = None


def job_key(config: Any, folder: Path) -> tuple[str, dict[str, Any]]:
    """A job's configuration (a dataclass) as plain values, and sixteen hex digits that stand for it.

    What names the job's own folder counts as the same in every folder; where figures are tracked does not
    count at all.
    """
    values = {name: value for name, value in asdict(config).items() if name not in _NOT_PART_OF_A_JOB}
    text = json.dumps(values, default=str).replace(json.dumps(str(folder))[1:-1], ".")
    plain = json.loads(text, parse_constant=str)  # infinities keep their name, which strict JSON lacks
    return content_hash(plain)[:16], plain


def changed_keys(old: Any, new: Any, key: str = "", *, common: bool = False) -> Iterator[str]:
    """`KEY was X, is Y` for every leaf in which two configurations differ; with `common` only of keys that
    both have."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in dict.fromkeys([*old, *new]):
            if common and (name not in old or name not in new):
                continue
            nested = f"{key}.{name}" if key else name
            yield from changed_keys(old.get(name), new.get(name), nested, common=common)
    elif old != new:
        yield f"{key} was {_shown(old)}, is {_shown(new)}"


def write_job(folder: Path, record: JobRecord) -> None:
    """Raises `OutputError` if it cannot be written."""
    atomic_write_text(folder / JOB_FILE, dump_json(asdict(record), indent=1) + "\n")


def read_job(folder: Path) -> JobRecord | None:
    """The record, or None where there is none that can be read."""
    try:
        content = json.loads((folder / JOB_FILE).read_text(encoding="utf-8"))
        return JobRecord(**content)
    except (OSError, ValueError, TypeError):
        return None


def is_finished(folder: Path, record: JobRecord | None) -> bool:
    """Whether a job needs not be done again: it ended well, and its result is still there and whole."""
    if record is None or record.state != "finished":
        return False
    if not record.has_result:
        return True
    try:
        return bool(json.loads((folder / RESULT_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


@dataclass(frozen=True)
class SweepRecord:
    """A sweep: what started it and how far it got.

    Attributes:
        experiment: the name after `python -m experiments.`.
        argv: its command line, without `--resume`.
        state: "running", "complete" or "incomplete" (a job failed, or it was interrupted). A kill leaves
            "running", with a process that is no more.
        host, pid: the process that runs it.
        started: seconds since 1970.
        expected: number of jobs; None where a sweeper chooses them one after the other.
        jobs: a row per job, see `job_rows`.
    """

    experiment: str
    argv: list[str]
    state: str = "running"
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    started: float = field(default_factory=time.time)
    expected: int | None = None
    jobs: list[dict[str, Any]] = field(default_factory=list)
    schema: int = SCHEMA

    @property
    def alive(self) -> bool:
        """Whether its process runs; one on another machine is taken to. Another process may have its number
        by now: one that began later."""
        if self.state != "running" or self.host != socket.gethostname():
            return self.state == "running"
        try:
            return psutil.Process(self.pid).create_time() <= self.started + _CLOCK_S
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True

    @property
    def process(self) -> str:
        """Names the process that runs it, for a message, with what to do where it cannot be asked."""
        if self.host == socket.gethostname():
            return f"process {self.pid}"
        remedy = f'if it was killed there, set "state" to "incomplete" in {SWEEP_FILE}'
        return f"process {self.pid} on {self.host}; {remedy}"


def write_sweep(folder: Path, record: SweepRecord) -> Path:
    """Raises `OutputError` if it cannot be written."""
    return atomic_write_text(folder / SWEEP_FILE, dump_json(asdict(record), indent=1) + "\n")


def read_sweep(folder: str | os.PathLike[str]) -> SweepRecord:
    """A sweep's record.

    Raises:
        ConfigError: the folder is none of a sweep, or its record cannot be read.
    """
    path = Path(folder) / SWEEP_FILE
    if not Path(folder).is_dir():
        raise ConfigError(f"there is no folder {str(folder)!r}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("schema") != SCHEMA:
            raise ConfigError(f"{path} has schema {content.get('schema')}; this moejax reads {SCHEMA}")
        return SweepRecord(**content)
    except FileNotFoundError as error:
        where = Path(folder).parent
        hint = f"; did you mean {str(where)!r}?" if (where / SWEEP_FILE).is_file() else ""
        raise ConfigError(f"{str(folder)!r} is not a sweep's folder: it has no {SWEEP_FILE}{hint}") from error
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is not a sweep's record: {error}") from error


def job_folders(folder: Path) -> list[Path]:
    """Folders below a sweep's that hold a job, in the order of their numbers."""

    def order(path: Path) -> tuple[list[int], str]:
        name = str(path.relative_to(folder))
        numbers = name.split("+")  # a search that goes on: FIRST+NUMBER
        return ([int(text) for text in numbers] if all(map(str.isdigit, numbers)) else [2**63], name)

    return sorted((path.parent for path in folder.glob(f"**/{JOB_FILE}")), key=order)


def job_rows(folder: Path) -> list[dict[str, Any]]:
    """A row per job that has been started: `job` (its folder's name), `state`, its overrides, `value`,
    `error`, `seconds`, `commit`, and under `metrics` and `cases` what its result has."""
    rows = []
    for place in job_folders(folder):
        record = read_job(place)
        if record is None:
            continue
        state = "unfinished" if record.state in ("running", "finished") else record.state
        row: dict[str, Any] = {
            "job": str(place.relative_to(folder)),
            "state": "finished" if is_finished(place, record) else state,
            "overrides": dict(_split(text) for text in record.overrides),
            "value": record.value,
            "objective": record.config.get("objective"),
            "error": record.error,
            "seconds": record.seconds,
            "commit": record.git.get("commit"),
            "dirty": record.git.get("dirty"),
        }
        if row["state"] == "finished":
            try:
                result: Mapping[str, Any] = load_result(place)
            except ConfigError:
                result = {}
            row |= {name: result.get(name) for name in ("experiment", "metrics", "cases", "hardware", "slo")}
        rows.append(row)
    return rows


def swept_keys(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The overrides in which the jobs differ, in the order in which they were given."""
    keys = dict.fromkeys(key for row in rows for key in row["overrides"])
    return [key for key in keys if len({str(row["overrides"].get(key)) for row in rows}) > 1]


def _split(override: str) -> tuple[str, Any]:
    """`KEY=VALUE` with the value as a number where it is one."""
    key, _, text = override.partition("=")
    for kind in (int, float):
        try:
            return key.lstrip("+"), kind(text)
        except ValueError:
            continue
    return key.lstrip("+"), text


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
