"""Chooses engines' constants on published points that count in no error, and the widths of intervals."""

import dataclasses
import datetime
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moejax.bench.simulate.points import CALIBRATION, simulate_point
from moejax.bench.simulate.published import Point, model_of, read_points
from moejax.bench.simulate.tables import table_spreads
from moejax.core.errors import ConfigError
from moejax.simulate.calibration import FILE, SPREADS, Calibration, kind_of
from moejax.simulate.step import HostCosts
from moejax.simulate.tables import FOLDER, rows_of

GRIDS: dict[str, tuple[float, ...]] = {
    "step_s": (0.0, 3e-4, 1e-3, 3e-3, 1e-2),
    "row_s": (0.0, 5e-6, 2e-5, 5e-5, 1e-4),
    "token_s": (0.0, 1e-5, 3e-5, 5e-5),
    "layer_s": (0.0, 1e-4, 3e-4, 1e-3),
    "request_s": (0.0, 3e-3, 1e-2, 3e-2, 1e-1),
}
"""What is tried for each constant, in seconds; `factor` follows from the others."""

Wanted = list[tuple[Point, str]]


def calibrate(folder: Path = FOLDER, stacks: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Returns an entry for each device, stack and kind of models of `calibration_points.csv`: `device`,
    `stack`, `models` ("moe": with experts, "dense": without), `host` (constants other than the defaults),
    `points`, and `residuals` (simulated over published time, less 1, by point and metric).

    A row of that file has a point's `id`, the `metric` that is fitted, and in `fits` which constants of its
    stack are free. Each takes its turn over `GRIDS`, with `factor` so that the median of the points is met.

    Args:
        stacks: those that are fitted; none: all.

    Raises:
        ConfigError: a file cannot be read, or a listed point cannot be simulated.
    """
    points = {point.id: point for point in read_points(folder)}
    wanted: defaultdict[tuple[str, str, str], Wanted] = defaultdict(list)
    fits: dict[tuple[str, str, str], tuple[str, ...]] = {}
    for row in rows_of(folder / CALIBRATION):
        point = points[row["id"]]
        if point.reason:
            raise ConfigError(f"{CALIBRATION}: {point.id} cannot be simulated: {point.reason}")
        key = point.device, point.stack, kind_of(model_of(point.model))
        wanted[key].append((point, row["metric"]))
        fits[key] = tuple(row["fits"].split())
    entries = []
    for (device, stack, models), given in wanted.items():
        if not stacks or stack in stacks:
            host, ratios = _fit(given, fits[device, stack, models])
            default = dataclasses.asdict(HostCosts())
            told = {k: float(f"{v:.3g}") for k, v in dataclasses.asdict(host).items() if v != default[k]}
            named = {
                f"{point.id} {metric}": round(r - 1, 4)
                for (point, metric), r in zip(given, ratios, strict=True)
            }
            figures = {"host": told, "points": len(given), "residuals": named}
            entries.append({"device": device, "stack": stack, "models": models, **figures})
    return entries


def _fit(given: Wanted, fits: Sequence[str]) -> tuple[HostCosts, list[float]]:
    host, ratios = _scaled(given, HostCosts(), "factor" in fits)
    for name in fits:
        if name == "factor":
            continue
        for value in GRIDS[name]:
            tried, found = _scaled(given, dataclasses.replace(host, **{name: value}), "factor" in fits)
            if _misfit(found) < 0.98 * _misfit(ratios):
                host, ratios = tried, found
    return host, ratios


def _scaled(given: Wanted, host: HostCosts, free: bool) -> tuple[HostCosts, list[float]]:
    """Returns costs with the factor at which the median point is met, if that is free, and simulated over
    published time of each point."""
    ratios = _ratios(given, host)
    for _ in range(2 * free):
        if abs(math.log(statistics.median(ratios))) < 0.005:
            break
        host = dataclasses.replace(host, factor=host.factor / statistics.median(ratios))
        ratios = _ratios(given, host)
    return host, ratios


def _ratios(given: Wanted, host: HostCosts) -> list[float]:
    ratios = []
    for point, metric in given:
        simulated = simulate_point(point, Calibration(host, SPREADS, ""))[0][metric]
        ratio = simulated / point.published[metric]
        ratios.append(ratio if metric.endswith("_ms") else 1 / ratio)
    return ratios


def _misfit(ratios: Sequence[float]) -> float:
    return statistics.fmean(abs(math.log(ratio)) for ratio in ratios)


def widths(devices: Sequence[str], entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns half of the relative widths of 90 % intervals: by device, operation and source from held-out
    cells of its tables; and of "engine" what fits of several points leave at the ninth of ten, together with
    the standard deviation of the device's stacks' factors."""
    left = sorted(
        abs(value) for entry in entries for value in entry["residuals"].values() if entry["points"] > 1
    )
    engine = left[min(len(left) - 1, int(0.9 * len(left)))] if left else 0.15
    told = {}
    for device in devices:
        measured = table_spreads(device)
        spreads = {op: {**SPREADS[op], **measured.get(op, {})} for op in SPREADS}
        # A constant is of one model and load: elsewhere it is off by about as much as stacks' lie apart.
        own = [entry for entry in entries if entry["device"] == device] or entries
        factors = [math.log(entry["host"].get("factor", 1.0)) for entry in own]
        apart = statistics.pstdev(factors) if factors else 0.0
        told[device] = {**spreads, "engine": {"all": round(math.hypot(engine, apart), 3)}}
    return told


def write_calibration(
    entries: Sequence[dict[str, Any]], spreads: dict[str, Any], path: Path = FOLDER / FILE
) -> None:
    """Writes what `load_calibration` reads."""
    date = datetime.date.today().isoformat()
    content = {"date": date, "points": CALIBRATION, "stacks": list(entries), "spreads": spreads}
    path.write_text(json.dumps(content, indent=1) + "\n")
