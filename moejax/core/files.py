"""Writing results: JSON that any reader accepts, and files that are either whole or not there.

It knows nothing of what is written. No JAX here.
"""

import dataclasses
import enum
import hashlib
import json
import math
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from moejax.core.errors import OutputError, os_errors


def to_jsonable(value: Any) -> Any:
    """Converts `value` to JSON's own types. NaN and infinities, which JSON does not have, become None.

    Dataclasses and mappings become dicts with string keys, tuples, sets (sorted) and arrays become lists,
    numpy scalars and 0-d arrays become numbers, paths and enum members their text and value.

    Raises:
        TypeError: for a type that has no such form.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, enum.Enum):
        return to_jsonable(value.value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, (np.ndarray, np.generic)):
        return to_jsonable(value.tolist())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_jsonable(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return [to_jsonable(item) for item in sorted(value, key=str)]
    if isinstance(value, (list, tuple)):
        return [to_jsonable(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """Returns `value` through `to_jsonable` as strict JSON text, keys in the order given."""
    return json.dumps(to_jsonable(value), indent=indent, allow_nan=False, ensure_ascii=False)


def canonical_json(value: Any) -> str:
    """Returns one text per value, for hashing: sorted keys, no spaces."""
    return json.dumps(
        to_jsonable(value), sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False
    )


def content_hash(value: Any) -> str:
    """Returns sha256 over the canonical JSON of a value: equal values, in whatever key order, hash alike."""
    return hashlib.sha256(canonical_json(value).encode("utf-8")).hexdigest()


@contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Yields a file beside `path`, renamed into place when the body ends, so that no reader sees half a file.

    The folder is made if it is missing.

    Raises:
        OutputError: the file cannot be written; nothing is left behind.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.tmp")
    with os_errors(OutputError, f"cannot write {target}"):
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            # "x" and not mkstemp: the file then gets the permissions of the user's umask.
            with open(temporary, "xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def atomic_write_bytes(path: str | os.PathLike[str], data: bytes) -> Path:
    """Writes `data` by `atomic_file` and returns the path."""
    with atomic_file(path) as file:
        file.write(data)
    return Path(path)


def atomic_write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Writes `text` in UTF-8 by `atomic_write_bytes`."""
    return atomic_write_bytes(path, text.encode("utf-8"))


@contextmanager
def whole_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a new folder beside `folder`, which it replaces with all that is in it once the body has ended.

    Raises:
        OSError: it cannot be written. What was there before is then untouched, as after an error of the body.
    """
    target = Path(os.path.realpath(folder))
    new, old = (target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.{end}") for end in ("tmp", "old"))
    try:
        new.mkdir(parents=True)
        yield new
        if existed := target.exists():  # a folder cannot be renamed onto one that is not empty
            target.rename(old)
        try:
            new.rename(target)
        except BaseException:
            if existed:
                old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def ensure_writable(directory: str | os.PathLike[str]) -> Path:
    """Makes `directory` if it is missing and proves that a file can be made in it. Call it before any work.

    Raises:
        OutputError: one line with the folder and the system's reason.
    """
    folder = Path(directory)
    probe = folder / f".moejax-{uuid.uuid4().hex[:12]}.tmp"
    with os_errors(OutputError, f"cannot write to the output folder {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.touch(exist_ok=False)
        finally:
            probe.unlink(missing_ok=True)
    return folder


def shown_path(path: Path) -> str:
    """Relative to the working directory where it lies below it."""
    here, there = Path.cwd().resolve(), path.resolve()
    return str(there.relative_to(here)) if there.is_relative_to(here) else str(path)


def cache_root() -> Path:
    """Returns the folder of what can be made again: `$MOEJAX_CACHE_DIR`, or `moejax` in the user's caches."""
    base = os.environ.get("MOEJAX_CACHE_DIR")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moejax"
