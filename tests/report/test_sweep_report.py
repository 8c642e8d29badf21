"""A sweep's rows, table and plots: which axes, which metrics, which kind of plot."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from moejax.core.errors import ConfigError
from moejax.report.sweep import (
    axes_of,
    best_lines,
    metrics_of,
    report_sweep,
    sweep_figure,
    sweep_rows,
    sweep_table,
)
from moejax.results.sweep import JobRecord, SweepRecord, job_rows, read_sweep, write_job, write_sweep


def job(number: int, overrides: dict[str, Any], cases: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    return {
        "job": str(number), "state": "finished", "overrides": overrides, "value": None, "error": None,
        "metrics": cases[0] if cases else {}, "cases": cases, **fields,
    }  # fmt: skip


def case(batch: int, prompt: int, output: int = 16) -> dict[str, Any]:
    return {
        "case": 0, "batch_size": batch, "prompt_len": prompt, "output_len": output, "mean_ttft_ms": 1.0,
        "median_ttft_ms": float(batch * prompt), "median_tpot_ms": float(batch),
        "output_throughput": 100.0 * batch,
    }  # fmt: skip


def matrix(*batches: int, prompts: tuple[int, ...] = (16, 64)) -> dict[str, Any]:
    jobs = [
        job(i, {"workload.prompt_len": p, "tracker": "none"}, [case(b, p) for b in batches])
        for i, p in enumerate(prompts)
    ]
    return {"experiment": "latency", "argv": [], "jobs": jobs}


def test_two_axes_of_numbers_are_a_heat_map() -> None:
    sweep = matrix(1, 4, 16)
    rows = sweep_rows(sweep)
    assert len(rows) == 6 and axes_of(sweep, rows) == ["prompt_len", "batch_size"]
    assert [key for _, key in metrics_of(sweep, rows)][:2] == ["median_ttft_ms", "median_tpot_ms"]
    figure = sweep_figure(sweep)
    assert figure is not None
    images = [image for axis in figure.axes for image in axis.get_images()]
    assert len(images) == 3
    np.testing.assert_array_equal(images[0].get_array(), [[16, 64, 256], [64, 256, 1024]])


def test_a_third_axis_is_panels_and_an_axis_that_follows_another_is_left_out() -> None:
    jobs = [
        job(
            i,
            {"workload.prompt_len": p, "engine.max_num_seqs": p},
            [case(b, p, o) for b in (1, 4) for o in (2, 8)],
        )
        for i, p in enumerate((16, 64))
    ]
    sweep = {"experiment": "latency", "argv": [], "jobs": jobs}
    rows = sweep_rows(sweep)
    assert axes_of(sweep, rows) == ["prompt_len", "batch_size", "output_len"]
    assert axes_of(sweep, rows, every=True) == ["prompt_len", "max_num_seqs", "batch_size", "output_len"]
    figure = sweep_figure(sweep)
    assert figure is not None
    assert sum(len(axis.get_images()) for axis in figure.axes) == 3 * 2


def test_shares_of_roofs_that_differ_are_in_no_column() -> None:
    """Each job measured its own; of one data sheet they can be compared."""
    jobs = [job(i, {"workload.prompt_len": n}, [case(1, n)]) for i, n in enumerate((16, 64))]
    for item in jobs:
        item["cases"][0]["roofline_percent"] = 40.0
    sweep = {"experiment": "latency", "argv": [], "jobs": jobs}
    assert ("% of roof", "roofline_percent") in metrics_of(sweep, sweep_rows(sweep))
    jobs[1]["hardware"] = {"bandwidth": 1.4e9, "source": "measured"}
    assert ("% of roof", "roofline_percent") not in metrics_of(sweep, sweep_rows(sweep))
    assert sweep_table(sweep).caption == "no shares of the roof: each job measured its own"


def test_values_in_brackets_are_no_markup() -> None:
    jobs = [job(i, {"stress.phases": f"[{name}]"}, [case(1, 16)]) for i, name in enumerate(("abort", "/x"))]
    jobs[1]["cases"][0]["output_throughput"] = 5.0
    console = Console(file=io.StringIO(), width=100)
    console.print(sweep_table({"experiment": "latency", "argv": [], "jobs": jobs}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[abort]" in text and "[/x]" in text


def test_one_axis_is_lines_and_names_are_bars() -> None:
    figure = sweep_figure(matrix(4, prompts=(16, 64, 256)))
    assert figure is not None
    (line,) = figure.axes[0].get_lines()
    assert list(line.get_xdata()) == [16, 64, 256] and list(line.get_ydata()) == [64, 256, 1024]
    names = [
        job(i, {"engine.batching": n}, [case(1, 16 + i)]) for i, n in enumerate(("continuous", "static"))
    ]
    for item in names:
        item["cases"][0]["prompt_len"] = 16
    figure = sweep_figure({"experiment": "latency", "argv": [], "jobs": names})
    assert figure is not None
    assert [bar.get_width() for bar in figure.axes[0].patches] == [16.0, 17.0]


def test_nothing_to_compare_has_no_plot_and_an_unknown_experiment_shows_what_varies() -> None:
    assert sweep_figure({"experiment": "latency", "argv": [], "jobs": []}) is None
    assert sweep_figure(matrix(4, prompts=(16,))) is None
    jobs = [job(i, {"x": i}, [], metrics={"same": 1.0, "loss": float(i), "name": "a"}) for i in range(3)]
    sweep = {"experiment": "train", "argv": [], "jobs": jobs}
    assert metrics_of(sweep, sweep_rows(sweep)) == [("loss", "loss")]


def test_the_best_job_has_a_command() -> None:
    jobs = [
        job(i, {"experiment": "optuna_goodput", "engine.max_num_seqs": n, "engine.overlap": "True"},
            [case(1, 1)], value=float(n), objective="request_goodput")
        for i, n in enumerate((4, 16, 8))
    ]  # fmt: skip
    best, command = best_lines({"experiment": "throughput", "argv": [], "jobs": jobs})
    assert best == "best request_goodput: 16.00 (job 1: engine.max_num_seqs=16)"
    assert command.endswith(
        "experiment=optuna_goodput engine.overlap=true hydra.mode=RUN engine.max_num_seqs=16"
    )
    least = {"experiment": "throughput", "argv": ["hydra.sweeper.direction=minimize"], "jobs": jobs}
    assert "(job 0:" in best_lines(least)[0]


def test_report_of_a_folder(tmp_path: Path) -> None:
    """A finished job, one that failed, one that was killed."""
    for number, state in enumerate(("finished", "failed", "running")):
        folder = tmp_path / str(number)
        record = JobRecord("k", {}, [f"workload.prompt_len={16 + number}"], state, has_result=number == 0,
                           error="bad luck" if number == 1 else None)  # fmt: skip
        write_job(folder, record)
    result = {"schema": 1, "experiment": "latency", "metrics": {}, "cases": [case(1, 16), case(4, 16)],
              "config": {"model": {"name": "tiny"}}, "provenance": {}}  # fmt: skip
    (tmp_path / "0" / "result.json").write_text(json.dumps(result))
    write_sweep(tmp_path, SweepRecord("latency", ["-m"]))
    sweep = dataclasses.asdict(dataclasses.replace(read_sweep(tmp_path), jobs=job_rows(tmp_path)))
    assert [row["state"] for row in sweep["jobs"]] == ["finished", "failed", "unfinished"]
    console = Console(width=100, record=True, file=io.StringIO())
    (plot,) = report_sweep(sweep, tmp_path, console=console)
    text = console.export_text()
    assert plot == tmp_path / "sweep.png" and plot.stat().st_size > 1000
    assert "TTFT p50" in text and "job 1 (workload.prompt_len=17) failed: bad luck" in text
    assert "job 2 (workload.prompt_len=18) unfinished" in text


def test_no_sweep(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it has no sweep\.json"):
        read_sweep(tmp_path)
