"""Reads recorded traffic: when requests came, and what they asked. Knows nothing of engines. No JAX here."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moejax.bench.workload import numbered_lines, parse_line
from moejax.core.errors import ConfigError, unknown

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_len")
_KEYS = ("time", *_PROMPT_KEYS, "output_len")


@dataclass(frozen=True)
class TraceRow:
    """One recorded request: its time in seconds (any origin), its prompt as text or token ids, or only its
    length, and the length of its output. None is left to the workload."""

    time: float
    prompt: str | list[int] | None = None
    prompt_len: int | None = None
    output_len: int | None = None


def load_trace(path: str | Path) -> list[TraceRow]:
    """The rows of a JSONL trace in order of time.

    A line is an object with `time` in seconds; optionally one of `prompt` (text), `prompt_token_ids` or
    `prompt_len`; optionally `output_len`; nothing else, since a length under another name would be replaced
    by the workload's unnoticed. Blank lines are skipped.

    Raises:
        ConfigError: the file cannot be read or holds no row, or a line is wrong (named by file and number).
    """
    lines = numbered_lines(path, "workload.trace_file", "request")
    rows = [_parse(line, where) for where, line in lines]
    return sorted(rows, key=lambda row: row.time)  # stable: equal times keep the file's order


def _parse(line: str, where: str) -> TraceRow:
    row = parse_line(line, where)
    if not isinstance(row, dict):
        raise ConfigError(f'{where}: not an object such as {{"time": 0.5, "prompt_len": 64}}')
    for key in row:
        if key not in _KEYS:
            raise ConfigError(f"{where}: {unknown('key', key, _KEYS)}")
    time = row.get("time")
    if not isinstance(time, (int, float)) or isinstance(time, bool) or not math.isfinite(time):
        raise ConfigError(f"{where}: `time` must be a number of seconds, got {time!r}")
    given = [key for key in _PROMPT_KEYS if row.get(key) is not None]
    if len(given) > 1:
        raise ConfigError(f"{where}: {' and '.join(given)} exclude each other")
    for key in ("prompt_len", "output_len"):
        if row.get(key) is not None and not _whole(row[key], 1):
            raise ConfigError(f"{where}: `{key}` must be an integer of at least 1, got {row[key]!r}")
    return TraceRow(float(time), _prompt(row, where), row.get("prompt_len"), row.get("output_len"))


def _prompt(row: dict[str, Any], where: str) -> str | list[int] | None:
    text, ids = row.get("prompt"), row.get("prompt_token_ids")
    if text is not None and not (isinstance(text, str) and text):
        raise ConfigError(f"{where}: `prompt` must be a text that is not empty, got {text!r}")
    if ids is not None and not (isinstance(ids, list) and ids and all(_whole(i, 0) for i in ids)):
        raise ConfigError(f"{where}: `prompt_token_ids` must be a list of token ids")
    return text if text is not None else ids


def _whole(value: object, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
