"""Stored choices by time, of kernels' configurations and of others: one format, one place to look.

What a problem runs with is explicit, measured by this user, shipped, or by a heuristic, in this order; of
what is measured or shipped the nearest problem counts. Tables are `<device>/<op>.json`, in
`measured_tables()` and in `data/`; `python -m experiments.kernels mode=tune` writes them on that device.
"""

import json
import math
import os
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pallas_kernels.errors import KernelError
from pallas_kernels.op import Op, Problem

DATA = Path(__file__).parent / "data"

# How far the nearest problem may be, in doublings of its sizes taken together.
FARTHEST = 2.0


class Entry(NamedTuple):
    """One row of a table. `microseconds` is the median time."""

    implementation: str
    problem: dict[str, int | str]
    config: dict[str, Any]
    microseconds: float


class Configured(NamedTuple):
    """A configuration and where it came from."""

    config: Any
    reason: str


def device_key() -> str:
    """Returns the folder of the device's tables: "a100", "h100", "h200", or its kind in lower case."""
    kind = jax.devices()[0].device_kind.lower()
    for known in ("a100", "h100", "h200"):
        if known in kind:
            return known
    return kind.replace(" ", "_")


def measured_tables() -> Path:
    """Returns the user's own tables' folder: `tuned` in `$MOEJAX_CACHE_DIR`, or in the user's caches."""
    base = os.environ.get("MOEJAX_CACHE_DIR")
    caches = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return (Path(base) if base else caches / "moejax") / "tuned"


def configure(
    op: Op,
    implementation: str,
    problem: Problem,
    *,
    config: Any = None,
    device: str | None = None,
    data: Path | None = None,
) -> Configured:
    """Returns the configuration to run `problem` with, and why.

    Args:
        data: the only tables to look in.

    Raises:
        TypeError: an explicit `config` of another implementation.
    """
    kind = op.implementations[implementation]
    if config is not None:
        if not isinstance(config, kind.config_type):
            raise TypeError(
                f"{op.name}: config is a {type(config).__name__}; "
                f"{implementation} takes {kind.config_type.__name__}"
            )
        return Configured(config, "explicit")
    device = device or device_key()
    match = None
    for folder in (measured_tables(), DATA) if data is None else (data,):
        rows = [row for row in read_table(folder, device, op.name) if row.implementation == implementation]
        match = match or _nearest(rows, problem, op.sizes)
    if match is None:
        return Configured(
            kind.heuristic({**problem, "device": device}),
            f"heuristic: no table of {device} has a similar problem",
        )
    entry, distance = match
    where = (
        "for this problem" if distance == 0 else f"for the nearest problem {_sizes(entry.problem, op.sizes)}"
    )
    return Configured(kind.config_type(**entry.config), f"tuned {where} on {device}")


@lru_cache(maxsize=256)
def read_table(data: Path, device: str, op: str) -> tuple[Entry, ...]:
    """Returns a device's table for an operation; empty if there is none.

    Raises:
        KernelError: the file is no such table.
    """
    path = data / device / f"{op}.json"
    if not path.exists():
        return ()
    try:
        return tuple(Entry(**row) for row in json.loads(path.read_text())["entries"])
    except (ValueError, KeyError, TypeError):
        raise KernelError(op, "table", path, "a table of choices; remove the file") from None


def write_table(data: Path, device: str, op: str, entries: Iterable[Entry], **about: Any) -> Path:
    """Writes a table, atomically. `about`: versions, date, commit."""
    path = data / device / f"{op}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = sorted((entry._asdict() for entry in entries), key=lambda row: json.dumps(row, sort_keys=True))
    text = json.dumps({**about, "entries": rows}, indent=1)
    partial = path.with_suffix(".part")
    partial.write_text(text + "\n")
    partial.replace(path)
    read_table.cache_clear()
    return path


def add_entries(data: Path, device: str, op: str, entries: Iterable[Entry], **about: Any) -> Path:
    """Writes a table with its old entries and new ones, which take the places of those for the same
    implementation and problem; arguments as of `write_table`."""
    both = (*read_table(data, device, op), *entries)
    kept = {(e.implementation, tuple(sorted(e.problem.items()))): e for e in both}
    return write_table(data, device, op, kept.values(), **about)


def _nearest(rows: Iterable[Entry], problem: Problem, sizes: tuple[str, ...]) -> tuple[Entry, float] | None:
    """Returns the row equal in all but sizes, whose sizes are nearest in their logarithms, and that distance;
    None if none is near enough."""
    best = None
    for row in rows:
        if row.problem.keys() != problem.keys():
            continue
        if any(row.problem[key] != problem[key] for key in problem if key not in sizes):
            continue
        ratios = [max(int(row.problem[k]), 1) / max(int(problem[k]), 1) for k in sizes]
        distance = sum(abs(math.log2(ratio)) for ratio in ratios)
        if distance > FARTHEST:
            continue
        if best is None or distance < best[1]:
            best = row, distance
    return best


def _sizes(problem: Problem, sizes: tuple[str, ...]) -> str:
    return ", ".join(f"{key}={problem[key]}" for key in sizes)
