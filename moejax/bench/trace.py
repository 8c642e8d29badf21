"""Reads recorded traffic: when requests came, and what they asked. Knows nothing of engines. No JAX here."""

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from moejax.bench.workload import numbered_lines, parse_line
from moejax.core.errors import ConfigError, unknown

TraceFormat = Literal["auto", "moejax", "mooncake", "azure", "burstgpt", "sharegpt", "messages"]
MOONCAKE_BLOCK = 512
"""Tokens to each of Mooncake's hash ids."""

_PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_len")
_KEYS = ("time", *_PROMPT_KEYS, "output_len")
# Columns of the time, the prompt's length and the output's.
_COLUMNS = {
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
}
# Keys of a conversation's messages, of who says something, and of what.
_CONVERSATIONS = {"sharegpt": ("conversations", "from", "value"), "messages": ("messages", "role", "content")}
_FIRST_KEYS = {"mooncake": ("input_length",), **_CONVERSATIONS}
_ANSWERS = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")


@dataclass(frozen=True)
class TraceRow:
    """One recorded request; None is left to the workload.

    Attributes:
        time: seconds (any origin); None in a file of conversations, which has no times.
        prompt: text or token ids; of a conversation's later turn what is new.
        prompt_len, output_len: tokens.
        continues: whether it is the next turn of the row before it.
        answer: text that is as long as the output.
        hash_ids: of the prompt's blocks of `MOONCAKE_BLOCK` tokens: equal ones stand for equal tokens.
    """

    time: float | None
    prompt: str | list[int] | None = None
    prompt_len: int | None = None
    output_len: int | None = None
    continues: bool = False
    answer: str | None = None
    hash_ids: tuple[int, ...] = ()


def load_trace(path: str | Path, trace_format: TraceFormat = "auto") -> list[TraceRow]:
    """The rows of a trace in order of time, of conversations in the file's.

    `moejax` is JSONL. A line is an object with `time` in seconds; optionally one of `prompt` (text),
    `prompt_token_ids` or `prompt_len`; optionally `output_len`; nothing else, since a length under another
    name would be replaced by the workload's unnoticed. Blank lines are skipped. `mooncake` is the JSONL of
    arXiv 2407.00079, `azure` the CSV of arXiv 2311.18677 and 2408.00741, `burstgpt` that of 2401.17644.
    `sharegpt` is a JSON array, or JSONL, of `conversations`, `messages` the same of `messages`: a request for
    each answer, of what was said since the one before.

    Args:
        trace_format: `auto` goes by the first line: a CSV's columns, an object's keys.

    Raises:
        ConfigError: the file cannot be read or holds no row, or a line is wrong (named by file and number).
    """
    lines = numbered_lines(path, "workload.trace_file", "request")
    header, kind = {*lines[0][1].strip().split(",")}, str(trace_format)
    if kind == "auto":
        kind = next((name for name, columns in _COLUMNS.items() if {*columns} <= header), kind)
    rows = _table(lines, kind) if kind in _COLUMNS else _objects(lines, kind, path)
    if not rows:
        raise ConfigError(f"workload.trace_file: {str(path)!r} holds no request")
    # Stable: equal times keep the file's order, and conversations, without times, theirs.
    return sorted(rows, key=lambda row: row.time or 0.0)


def _objects(lines: Sequence[tuple[str, str]], kind: str, path: str | Path) -> list[TraceRow]:
    """Returns the rows of a file of JSON's objects."""
    whole = lines[0][1].lstrip().startswith("[") and kind in ("auto", *_CONVERSATIONS)
    values = _array(path) if whole else ((where, parse_line(line, where)) for where, line in lines)
    rows: list[TraceRow] = []
    for where, value in values:
        if kind == "auto":
            keys = value if isinstance(value, dict) else {}
            kind = next((name for name, (key, *_) in _FIRST_KEYS.items() if key in keys), "moejax")
        if kind in _CONVERSATIONS:
            rows += _turns(value, where, *_CONVERSATIONS[kind])
        else:
            rows.append(_mooncake(value, where) if kind == "mooncake" else _parse(value, where))
    return rows


def _array(path: str | Path) -> Iterator[tuple[str, Any]]:
    """Yields the items of a JSON array, each with where it begins."""
    text = Path(path).read_text(encoding="utf-8")
    place, line = text.index("[") + 1, 1 + text.count("\n", 0, text.index("["))
    while True:
        begin = re.compile(r"[\s,]*").match(text, place).end()  # type: ignore[union-attr]
        line += text.count("\n", place, begin)
        if text[begin : begin + 1] == "]":
            return
        where = f"workload.trace_file: {path}:{line}"
        try:
            value, place = json.JSONDecoder().raw_decode(text, begin)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where}: not JSON ({error.msg})") from error
        yield where, value
        line += text.count("\n", begin, place)


def _table(lines: Sequence[tuple[str, str]], kind: str) -> list[TraceRow]:
    """Returns the rows of a CSV file, whose fields are without quotes."""
    (time, *lengths), names = _COLUMNS[kind], lines[0][1].strip().split(",")
    if missing := {time, *lengths} - {*names}:
        raise ConfigError(f"{lines[0][0]}: no column {min(missing)!r}, which trace_format={kind} has")
    rows = []
    for where, line in lines[1:]:
        row = dict(zip(names, line.strip().split(","), strict=False))
        try:
            when = row[time]
            as_date = kind == "azure"
            at = datetime.fromisoformat(when).replace(tzinfo=UTC).timestamp() if as_date else float(when)
            prompt, output = (int(row[name]) for name in lengths)
        except KeyError as error:
            raise ConfigError(f"{where}: no {error.args[0]}") from error
        except ValueError as error:
            raise ConfigError(f"{where}: {error}") from error
        if min(prompt, output) < 1 or not math.isfinite(at):
            text = f"{prompt} tokens in, {output} out: a request that failed is not replayed"
            raise ConfigError(f"{where}: {text}; leave its row out")
        rows.append(TraceRow(at, prompt_len=prompt, output_len=output))
    return rows


def _mooncake(row: Any, where: str) -> TraceRow:
    names = ("timestamp", "input_length", "output_length")
    for name, low in zip(names, (0, 1, 1), strict=True):
        if not isinstance(row, dict) or not _whole(row.get(name), low):
            raise ConfigError(f"{where}: `{name}` must be an integer of at least {low}")
    time, prompt_len, output_len = (row[name] for name in names)
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(_whole(i, 0) for i in ids):
        raise ConfigError(f"{where}: `hash_ids` must be a list of integers of at least 0")
    if len(ids) > math.ceil(prompt_len / MOONCAKE_BLOCK):
        raise ConfigError(f"{where}: {len(ids)} `hash_ids`, each of {MOONCAKE_BLOCK} of {prompt_len} tokens")
    return TraceRow(time / 1e3, None, prompt_len, output_len, hash_ids=tuple(ids))


def _turns(value: Any, where: str, key: str, who: str, what: str) -> list[TraceRow]:
    """Returns a conversation's rows."""
    said = value.get(key) if isinstance(value, dict) else None
    items = said if isinstance(said, list) else []
    texts = [(one.get(who), one.get(what)) for one in items if isinstance(one, dict)]
    if not texts or len(texts) < len(items) or not all(isinstance(t, str) for pair in texts for t in pair):
        raise ConfigError(f"{where}: `{key}` must be a list of objects with the texts `{who}` and `{what}`")
    rows: list[TraceRow] = []
    asked: list[str] = []

    def ask(answer: str | None) -> None:
        rows.append(TraceRow(None, "\n".join(asked), continues=bool(rows), answer=answer))
        asked.clear()

    for name, text in texts:
        if name in _ANSWERS and asked:
            ask(text)
        elif text:
            asked.append(text)
    if asked:
        ask(None)
    return rows


def _parse(row: Any, where: str) -> TraceRow:
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
