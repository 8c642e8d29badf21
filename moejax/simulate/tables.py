"""Measured kernel times of GPUs, read from `moejax/assets/gpu_tables` (units, sources and licences: README
there) and interpolated. Host arithmetic without NumPy, since it runs in every simulated step.

A row of a table is a curve: key columns, then one column for each value of the axis, in microseconds of one
layer on one device. Between two points a time is a straight line over the work that an axis value stands for;
below the first it is the first, above the last it grows in proportion to the work.
"""

import csv
import functools
import gzip
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

from moejax.core.errors import ConfigError

FOLDER = Path(__file__).parent.parent / "assets" / "gpu_tables"

Source = Literal["table", "interpolated", "nearest", "roofline"]
SOURCES: tuple[Source, ...] = ("table", "interpolated", "nearest", "roofline")
"""Where a time comes from: a measured cell, the line between two, a curve of another shape at the same share
of its bound, or a bound with an efficiency alone."""

Key = tuple[str, ...]


_TILE, _TOKEN = 64, 1000


def _tiles(rows: float) -> float:
    """Work of a product: its rows, in whole tiles."""
    return rows if rows <= _TILE else math.ceil(rows / _TILE) * _TILE


def _pairs(length: float) -> float:
    """Work of attention over a prompt: every pair, and what a token alone costs (in pairs)."""
    return length * (length + _TOKEN)


class Curve:
    """Seconds over an axis.

    Args:
        points: rising axis values with microseconds above 0.
        work: what a value's time is a straight line over.
    """

    __slots__ = ("seconds", "work", "xs")

    def __init__(self, points: list[tuple[float, float]], work: Callable[[float], float] = float) -> None:
        self.xs = [x for x, _ in points]
        self.seconds = [1e-6 * us for _, us in points]
        self.work = work

    def at(self, x: float) -> float:
        """Returns the seconds at `x` > 0."""
        place, work = bisect_left(self.xs, x), self.work
        if place == len(self.xs):
            return self.seconds[-1] * work(x) / work(self.xs[-1])
        if place == 0 or self.xs[place] == x:
            return self.seconds[place]
        low, high = work(self.xs[place - 1]), work(self.xs[place])
        share = (work(x) - low) / (high - low) if high > low else 0.0
        return self.seconds[place - 1] * (1 - share) + self.seconds[place] * share

    def measured(self, x: float) -> bool:
        """Tells whether `x` is a point of the curve."""
        place = bisect_left(self.xs, x)
        return place < len(self.xs) and self.xs[place] == x

    def without(self, place: int) -> "Curve":
        """Returns the curve with one point left out."""
        cells = enumerate(zip(self.xs, self.seconds, strict=True))
        return Curve([(x, 1e6 * s) for i, (x, s) in cells if i != place], self.work)


class Table(NamedTuple):
    """Curves by their key columns, whose names are `keys`."""

    name: str
    keys: Key
    curves: Mapping[Key, Curve]


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    """Yields the rows of a CSV file, compressed or not, by column.

    Raises:
        ConfigError: it cannot be read as one.
    """
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else open(path, newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                if None in row or None in row.values():
                    raise ConfigError(f"{path}: line {reader.line_num} does not have the header's columns")
                yield row
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as a table: {error}") from None


def read_table(
    path: Path, axis: str, least_ratio: float = 0.0, work: Callable[[float], float] = float
) -> Table:
    """Reads a file of curves.

    Args:
        axis: the letter before the axis's values in column names, such as "t" of "t64".
        least_ratio: a cell whose right neighbour is below so much of it is left out: a kernel that was not
            tuned was measured there.

    Raises:
        ConfigError: a column, a value or a repeated key is wrong; the line says which.
    """
    curves: dict[Key, Curve] = {}
    keys: Key = ()
    for number, row in enumerate(rows_of(path), start=2):
        columns = {name: int(name[len(axis) :]) for name in row if name[:1] == axis and name[1:].isdigit()}
        keys = tuple(name for name in row if name not in columns)
        key = tuple(row[name] for name in keys)
        try:
            cells = [(float(x), float(row[name])) for name, x in columns.items() if row[name]]
        except ValueError as error:
            raise ConfigError(f"{path}: line {number}: {error}") from None
        if not cells or cells != sorted(cells) or min(us for _, us in cells) <= 0:
            raise ConfigError(f"{path}: line {number} has no rising axis with times above 0")
        if key in curves:
            raise ConfigError(f"{path}: line {number} repeats the key {','.join(key)}")
        after = [us for _, us in cells[1:]] + [math.inf]
        kept = [cell for cell, later in zip(cells, after, strict=True) if later >= least_ratio * cell[1]]
        curves[key] = Curve(kept, work)
    if not curves:
        raise ConfigError(f"{path} has no rows")
    return Table(path.name, keys, curves)


_WORK = {"gemm": _tiles, "attention_prefill": _pairs, "mla_prefill": _pairs}
_AXES = {"moe": "t", "attention": "n", "mla": "n", "gemm": "m", "collectives": "b"}


@functools.cache
def load(device: str, kind: str) -> Table | None:
    """Returns a device's table of a kind ("moe", "attention_decode", "gemm", …); None where there is none."""
    path = FOLDER / f"{device}_{kind}.csv.gz"
    # TensorRT-LLM's experts have cells three to ten times too slow.
    ratio = 0.6 if kind.startswith("moe") else 0.0
    axis, work = _AXES[kind.split("_")[0]], _WORK.get(kind, float)
    return read_table(path, axis, ratio, work) if path.exists() else None
