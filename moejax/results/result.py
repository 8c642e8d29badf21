"""A run's `result.json` and `requests.jsonl`: building, writing and reading back.

Both are written whole or not at all. No JAX here.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax.core.errors import ConfigError, os_errors
from moejax.core.files import atomic_write_text, dump_json, shown_path, to_jsonable
from moejax.results.metric_names import JUDGED
from moejax.results.metrics import RequestRecord, record_row

SCHEMA = 1
"""Version of result.json. It grows when a key's meaning changes, not when a key is added."""

RESULT_FILE = "result.json"
REQUESTS_FILE = "requests.jsonl"
_LONGEST_LINE = 300  # characters, of the last line of stdout

_REQUIRED: dict[str, type] = {
    "schema": int, "experiment": str, "metrics": dict, "cases": list, "config": dict, "provenance": dict,
}  # fmt: skip


class Result(dict[str, Any]):
    """The content of a result.json: a dictionary that shows itself in a notebook as its experiment's tables.

    Attributes:
        folder: the run's folder where it was read from one, else None.
    """

    folder: Path | None = None

    def __repr__(self) -> str:
        where = f" in {self.folder}" if self.folder else ""
        cases, metrics = len(self.get("cases") or ()), len(self.get("metrics") or ())
        return f"<{self.get('experiment')} result: {cases} cases, {metrics} metrics{where}>"

    def _repr_html_(self) -> str:
        from moejax.report.cards import result_card  # which lays out what this module only holds

        return result_card(self, self.folder)


def build_result(
    experiment: str,
    *,
    metrics: Mapping[str, Any],
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    cases: Sequence[Mapping[str, Any]] = (),
    routing: Mapping[str, Any] | None = None,
    **extra: Any,
) -> Result:
    """The content of result.json as JSON's own types.

    Args:
        experiment: its name, such as "latency".
        metrics: flat name → number or None; names as in `moejax.results.metrics`.
        config: the resolved configuration.
        provenance: from `moejax.tracking.provenance.collect`.
        cases: one row per workload case.
        routing: `counts` [layers, experts], tokens routed to each expert, and whatever else was traced.
        extra: further top-level keys, such as `compile_ledger`, a row per compilation.

    Raises:
        ValueError: `metrics` is not flat, or an extra key is one of the above.
    """
    for name, value in metrics.items():
        if isinstance(value, (Mapping, list, tuple)):
            raise ValueError(f"metrics must be flat; {name!r} holds a {type(value).__name__}")
    if "schema" in extra:
        raise ValueError("the schema's version is not the caller's to set")
    result: dict[str, Any] = {
        "schema": SCHEMA,
        "experiment": experiment,
        "metrics": metrics,
        "cases": list(cases),
        "config": config,
        "provenance": provenance,
    }
    if routing is not None:
        result["routing"] = routing
    return Result(to_jsonable({**result, **extra}))


def write_result(result: Mapping[str, Any], directory: str | os.PathLike[str]) -> Path:
    """Writes `directory/result.json` atomically and returns its path.

    Raises:
        OutputError: it cannot be written.
    """
    return atomic_write_text(Path(directory) / RESULT_FILE, dump_json(result, indent=2) + "\n")


def request_rows(records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Returns the rows of requests.jsonl, one per request; arrivals are counted from the first one."""
    origin = min((record.metrics.arrival_time for record in records), default=0.0)
    return [record_row(record, origin) for record in records]


def write_request_rows(rows: Iterable[Mapping[str, Any]], directory: str | os.PathLike[str]) -> Path:
    """Writes `directory/requests.jsonl` from finished rows and returns its path.

    Raises:
        OutputError: it cannot be written.
    """
    lines = [dump_json(row) + "\n" for row in rows]
    return atomic_write_text(Path(directory) / REQUESTS_FILE, "".join(lines))


def print_ending(experiment: str, folder: Path, metrics: Mapping[str, Any]) -> None:
    """Prints stdout's last two lines: `results: FOLDER`, and for programs one of JSON with the experiment and
    its first metrics, those that runs are judged by before others, as far as 300 characters hold them."""
    names = sorted(metrics, key=lambda name: JUDGED.index(name) if name in JUDGED else len(JUDGED))
    line: dict[str, Any] = {"experiment": experiment}
    for name in names:
        value = to_jsonable(metrics[name])
        more = {**line, name: float(f"{value:.6g}") if isinstance(value, float) else value}
        if value is not None and len(dump_json(more)) <= _LONGEST_LINE:
            line = more
    print(f"results: {shown_path(folder)}\n{dump_json(line)}", flush=True)


def _read(path: str | os.PathLike[str], name: str) -> tuple[Path, str]:
    """Returns a file, or the one called `name` in a folder, and its text."""
    file = Path(path) / name if Path(path).is_dir() else Path(path)
    if not file.exists():
        raise ConfigError(f"no result at {file}: no such file")
    with os_errors(ConfigError, f"cannot read {file}"):
        return file, file.read_text(encoding="utf-8")


def load_result(path: str | os.PathLike[str]) -> Result:
    """Reads a result.json, or the one in a folder, and checks its shape.

    Raises:
        ConfigError: there is none, it is not JSON, a key is missing or of the wrong type, or its schema is
            another version's.
    """
    file, text = _read(path, RESULT_FILE)
    try:
        result = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is not JSON: {error}") from error
    if not isinstance(result, dict):
        raise ConfigError(f"{file} holds a {type(result).__name__} where a result is an object")
    schema = result.get("schema")
    if isinstance(schema, int) and not isinstance(schema, bool) and schema != SCHEMA:
        raise ConfigError(f"{file} has schema {schema}; this moejax reads schema {SCHEMA}")
    for key, kind in _REQUIRED.items():
        if key not in result:
            raise ConfigError(f"{file} is not a moejax result: it has no {key!r}")
        if not isinstance(result[key], kind) or isinstance(result[key], bool):
            actual = type(result[key]).__name__
            raise ConfigError(f"{file}: {key!r} must be of type {kind.__name__}, not {actual}")
    loaded = Result(result)
    loaded.folder = file.parent
    return loaded


def load_requests(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Reads the rows of a requests.jsonl, or of the one in a folder; raises as `load_rows`."""
    return load_rows(path, REQUESTS_FILE)


def load_rows(path: str | os.PathLike[str], name: str, *, torn: bool = False) -> list[dict[str, Any]]:
    """Reads the rows of a file of JSON lines, or of the one called `name` in a folder. With `torn`, a last
    line that a kill cut short is left out.

    Raises:
        ConfigError: there is none, or a line is not JSON (named by its number).
    """
    file, text = _read(path, name)
    lines, rows = text.split("\n"), []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if not torn or number < len(lines):
                raise ConfigError(f"{file}, line {number} is not JSON: {error}") from error
    return rows
