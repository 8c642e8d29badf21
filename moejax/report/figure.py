"""The parts of every plot here: a figure with the run's title, scales, legends, and the way into a file.

Figures are made without pyplot, so no backend or global state is touched. No JAX here.
"""

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
    StrMethodFormatter,
)
from numpy.typing import NDArray

from moejax.core.files import atomic_write_bytes
from moejax.report.style import COLORS, run_title
from moejax.results.metric_names import least_samples

_DPI, _CELL_DPI = 150, 90


class Plot(Figure):
    """A figure that a notebook shows by itself: no pyplot, no backend."""

    def _repr_png_(self) -> bytes:
        return _png(self, _CELL_DPI)


def new_figure(
    title: str,
    result: Mapping[str, Any],
    width: float,
    height: float,
    rows: int = 1,
    columns: int = 1,
    **grid: Any,
) -> tuple[Figure, list[Axes]]:
    """A figure of `width` x `height` inches and its axes, row by row; under its title the run's, which is
    model, device and commit. `grid` is for matplotlib's `subplots`."""
    figure = Plot(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **grid)
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


def log_scale(
    axis: Axis, values: Iterable[float | None], *, over: float = 10.0, margin: float = 1.25
) -> bool:
    """Makes an axis logarithmic, with round ticks, where its positive values span more than a factor of
    `over`; `margin` is the factor left free beyond them. Says whether it did."""
    known = [value for value in values if value]
    if not known or min(known) < 0 or max(known) <= over * min(known):
        return False
    low, high = min(known) / margin, max(known) * margin
    name = "x" if isinstance(axis, XAxis) else "y"
    axis.axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
    round_ticks(axis, low, high)
    return True


def legend_below(figure: Figure, axes: Iterable[Axes], columns: int = 4, **look: Any) -> None:
    """One legend below all panels; a label that several have is shown once."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        usual = {"loc": "outside lower center", "ncols": min(columns, len(handles)), "frameon": False}
        figure.legend(handles.values(), handles.keys(), **{**usual, **look})


def vertical_grid(axis: Axes) -> None:
    """Draws the faint lines of the x axis too."""
    axis.grid(axis="x", color="#dddddd", linewidth=0.7)


def thin_ticks(axis: Axis, labels: Sequence[Any] | NDArray[Any], most: int = 12) -> None:
    """Labels the places 0, 1, … of an axis, every second or third of them where there are many more than
    `most`."""
    shown = range(0, len(labels), max(1, len(labels) // most))
    axis.set_ticks(shown, [str(labels[place]) for place in shown], fontsize=8)


def heat_map(axis: Axes, values: NDArray[np.float64], **look: Any) -> AxesImage:
    """Draws a matrix as coloured cells; `look` is for matplotlib's `imshow`."""
    axis.grid(visible=False)
    return axis.imshow(values, **{"aspect": "auto", "cmap": "viridis", "interpolation": "nearest", **look})


def write_cells(
    axis: Axes, image: AxesImage, values: NDArray[np.float64], text: Callable[[float], str]
) -> None:
    """Writes each finite value of a heat map into its cell, white on dark colours."""
    colors = image.to_rgba(values)
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            red, green, blue, _ = colors[row, column]
            ink = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.55 else "black"
            axis.text(column, row, text(value), ha="center", va="center", fontsize=7, color=ink)


def draw_distributions(
    axis: Axes,
    curves: Iterable[tuple[str, str, NDArray[np.float64]]],
    *,
    points: int = 4000,
    limit: float | None = None,
) -> None:
    """Cumulative distributions of milliseconds, with points at the median and, where it exists, the 99th
    percentile.

    Args:
        curves: label, colour and samples of each; those without samples are left out.
        points: above so many samples a curve shows that many quantiles: a million inter-token latencies
            are no other curve than some thousand of them.
        limit: an objective, drawn as a dashed line.
    """
    known = [(label, color, np.sort(values)) for label, color, values in curves if values.size]
    for place, (label, color, values) in enumerate(known):
        style = "-" if place < len(COLORS) else "--"  # where colours come again
        shares = np.arange(1, values.size + 1) / values.size
        times = values
        if values.size > points:
            shares = np.linspace(0.0, 1.0, points)
            times = np.quantile(values, shares)
        axis.step(times, shares, where="post", color=color, linestyle=style, linewidth=1.5, label=label)
        marks = (0.5, 0.99) if values.size >= least_samples("p99") else (0.5,)
        look: dict[str, Any] = {"color": color, "markersize": 4.5, "markeredgecolor": "white"}
        axis.plot(np.quantile(values, marks), marks, "o", **look)
    if limit is not None:
        axis.axvline(limit, color="black", linestyle="--", linewidth=1, label="objective")
    axis.set_ylim(0, 1.02)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    vertical_grid(axis)
    extent = [value for _, _, values in known for value in (values[0], values[-1], limit or values[-1])]
    if extent and (min(extent) <= 0 or not log_scale(axis.xaxis, extent, over=30, margin=1.2)):
        # One slow token must not press all the others to the left.
        high = max(1.5 * np.percentile(values, 99.5) for _, _, values in known)
        axis.set_xlim(0, max(min(max(extent), high), limit or 0.0) * 1.05)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def distribution_panels(
    title: str,
    result: Mapping[str, Any],
    panels: Sequence[tuple[str, Sequence[tuple[str, str, NDArray[np.float64]]], float | None]],
    columns: int = 4,
    **look: Any,
) -> Figure | None:
    """Up to four panels of distributions with one legend below; None without any.

    Args:
        panels: title, curves and limit of each, as in `draw_distributions`.
        columns, look: of the legend.
    """
    if not panels:
        return None
    figure, axes = new_figure(title, result, 9.0, 7.0, 2, 2)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, (name, curves, limit) in zip(axes, panels, strict=False):
        draw_distributions(axis, curves, limit=limit)
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("milliseconds")
    legend_below(figure, axes[: len(panels)], columns, **look)
    return figure


def save_figures(figures: Mapping[str, Figure | None], out_dir: str | os.PathLike[str]) -> list[Path]:
    """Writes `NAME.png` atomically into `out_dir` for each figure that there is, and returns the files.

    Raises:
        OutputError: one cannot be written.
    """
    drawn = {name: figure for name, figure in figures.items() if figure is not None}
    return [atomic_write_bytes(Path(out_dir) / f"{name}.png", _png(f, _DPI)) for name, f in drawn.items()]


def _png(figure: Figure, dpi: float) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()
