"""`simulate.mode=validate` and `calibrate`: the simulator beside what was measured; its constants anew."""

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.simulate.calibrate import calibrate, widths, write_calibration
from moejax.bench.simulate.points import CALIBRATION, rows_of_point, summary, write_rows
from moejax.bench.simulate.published import read_points
from moejax.bench.simulate.run import Asked, start_simulated
from moejax.bench.simulate.tables import table_errors
from moejax.bench.simulate.trace import rows as trace_rows
from moejax.core.errors import ConfigError
from moejax.report.progress import progress
from moejax.results.result import Result
from moejax.simulate.kernels import TABLES
from moejax.simulate.tables import FOLDER, rows_of


def run_validate(asked: Asked, run: ExperimentRun) -> Result:
    """Holds out tables' cells and shapes, simulates published points and a published trace, and finishes
    `run`; points.csv and tables.csv lie beside result.json. The configured model and engine are not used.

    Raises:
        ConfigError: `simulate.points` is no folder, or a file in it cannot be read.
    """
    section = asked.section
    folder = Path(section.points or FOLDER)
    if not folder.is_dir():
        raise ConfigError(
            f"simulate.points={section.points}: no such folder; give one with files e2e_*.csv[.gz]"
        )
    points = [
        point
        for point in read_points(folder)
        if not section.groups or point.group.startswith(tuple(section.groups))
    ]
    if not points:
        groups = ", ".join(dict.fromkeys(point.group for point in read_points(folder)))
        raise ConfigError(
            f"simulate.groups={section.groups}: no point of {folder} is in them; groups: {groups}"
        )
    start_simulated(run, asked.workload, "/".join(TABLES))
    used = {row["id"] for row in rows_of(FOLDER / CALIBRATION)}
    with progress("validating", total=len(points) + len(TABLES) + 1) as task:
        tables: list[dict[str, Any]] = []
        for device in TABLES if section.points is None else ():
            task.describe(f"held-out cells of {device}")
            tables += table_errors(device, section.seed)
            task.advance()
        task.describe("a published trace")
        trace = trace_rows() if section.points is None else []
        rows = []
        for point in points:
            task.describe(point.group)
            rows += rows_of_point(point, used=point.id in used)
            task.advance()
    files = {"points.csv": rows, **({"tables.csv": tables} if tables else {})}
    for name, content in files.items():
        write_rows(run.out_dir / name, content)
    judged = [row for row in rows if row["simulated"] is not None and not row["used_for_calibration"]]
    metrics = {
        "points": len(judged),
        "points_median_error": _median([abs(row["error"]) for row in judged]),
        "points_inside": _share([row["inside"] for row in judged]),
        "points_median_width": _median([row["high"] / row["low"] - 1 for row in judged]),
    }
    result = run.result(
        metrics=metrics,
        hardware={"kind": "validation", "simulated": True},
        tables=tables,
        trace=trace,
        points_by_group=summary(rows),
    )
    return run.finish(result, files=[run.out_dir / name for name in files])


def run_calibrate(asked: Asked, run: ExperimentRun) -> Result:
    """Chooses the constants of engines on the listed points, writes the package's calibration.json, and
    finishes `run`. The configured model and engine are not used."""
    start_simulated(run, asked.workload, "/".join(TABLES))
    entries = calibrate()
    write_calibration(entries, widths(list(TABLES), entries))
    result = run.result(metrics={"points": sum(entry["points"] for entry in entries)}, calibration=entries,
                        hardware={"kind": "validation", "simulated": True})  # fmt: skip
    return run.finish(result)


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
