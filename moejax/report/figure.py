"""What every plot here is made of: a figure with the run's title, ticks, and the way into a file.

Figures are made without pyplot, so no backend or global state is touched. No JAX here.
"""

import io
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from moejax.core.files import atomic_write_bytes
from moejax.report.style import run_title

_DPI, _CELL_DPI = 150, 90


class Plot(Figure):
    """A figure that a notebook shows by itself: no pyplot, no backend."""

    def _repr_png_(self) -> bytes:
        return _png(self, _CELL_DPI)


def new_figure(
    title: str, result: Mapping[str, Any], width: float, height: float, rows: int = 1, columns: int = 1
) -> tuple[Figure, list[Axes]]:
    """A figure of `width` x `height` inches and its axes, row by row; under its title the run's, which is
    model, device and commit."""
    figure = Plot(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    subtitle = run_title(result)
    # A model's name may have dollar signs, which are no formula.
    figure.suptitle(title + (f"\n{subtitle}" if subtitle else ""), fontsize=11, parse_math=False)
    for axis in axes.flat:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", color="#dddddd", linewidth=0.7)
        axis.set_axisbelow(True)
    return figure, list(axes.flat)


def round_ticks(axis: Axis, low: float, high: float) -> None:
    """Ticks at 1, 2 and 5 times powers of ten on a logarithmic axis, written out plainly; at the powers alone
    where more than seven would run into each other along a panel's width."""
    ticks = [m * 10.0**e for e in range(-4, 10) for m in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= tick <= high]
    if isinstance(axis, XAxis) and len(ticks) > 7:
        ticks = [10.0**e for e in range(-4, 10) if low <= 10.0**e <= high]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}" if value < 1e6 else f"{value:.0e}"))
    axis.set_minor_locator(NullLocator())


def wide_scale(axis: Axes, values: Iterable[float | None]) -> bool:
    """Makes the y axis logarithmic where the positive values span more than a factor of twelve, below which
    the smallest can be read on a linear one too. Says whether it did."""
    known = [value for value in values if value]
    if not known or max(known) / min(known) <= 12:
        return False
    axis.set_yscale("log")
    axis.set_ylim(min(known) / 2, max(known) * 2)
    round_ticks(axis.yaxis, *axis.get_ylim())
    return True


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes a PNG atomically and returns its path.

    Raises:
        OutputError: it cannot be written.
    """
    return atomic_write_bytes(path, _png(figure, _DPI))


def save_figures(figures: Mapping[str, Figure | None], out_dir: str | os.PathLike[str]) -> list[Path]:
    """Writes `NAME.png` into `out_dir` for each figure that there is, and returns the files.

    Raises:
        OutputError: one cannot be written.
    """
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    return [save_figure(figure, Path(out_dir) / f"{name}.png") for name, figure in drawn.items()]


def _png(figure: Figure, dpi: float) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()
