"""The simulator's error: held-out cells, published points and a published trace, and what counts in it."""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moejax.bench.simulate.calibrate import calibrate
from moejax.bench.simulate.config import SimulateSection
from moejax.bench.simulate.points import CALIBRATION, rows_of_point, summary
from moejax.bench.simulate.published import Point, read_points
from moejax.bench.simulate.run import Asked
from moejax.bench.simulate.tables import table_errors
from moejax.bench.simulate.validate import run_validate
from moejax.bench.traffic import ThroughputWorkload
from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError
from moejax.report.experiments import print_result
from moejax.results.result import Result
from moejax.simulate.calibration import load_calibration
from moejax.simulate.kernels import EFFICIENCY, Kernels
from moejax.simulate.tables import FOLDER, rows_of
from tests.bench.runs import run_into


def validate(out: Path, section: SimulateSection) -> Result:
    config = {"simulate": {"mode": "validate"}}
    with run_into(out, "simulate", config) as run:
        return run_validate(Asked(None, "auto", section, EngineConfig(), ThroughputWorkload()), run)


A100 = "trtllm-0.14 a100_sxm_fp16"


@pytest.fixture
def few_points(tmp_path: Path) -> Path:
    """Returns a folder with a row of TensorRT-LLM's throughputs."""
    folder = tmp_path / "points"
    folder.mkdir()
    lines = (FOLDER / "e2e_trtllm_0.14.csv").read_text().splitlines()
    mixtral = next(line for line in lines if line.startswith("Mixtral 8x7B"))
    (folder / "e2e_trtllm_0.14.csv").write_text("\n".join([lines[0], mixtral, ""]))
    return folder


@pytest.fixture(scope="module")
def simulated() -> list[tuple[Point, dict[str, Any]]]:
    """Two points with what they are simulated to be, the first of them as if constants were chosen on it."""
    points = [point for point in read_points() if point.group == A100][:2]
    return [(point, row) for n, point in enumerate(points) for row in rows_of_point(point, used=n == 0)]


def test_points_have_names_of_their_own_and_calibration_names_them() -> None:
    points = read_points()
    ids = [point.id for point in points]
    assert len(ids) == len(set(ids)) > 1000
    listed = list(rows_of(FOLDER / CALIBRATION))
    assert listed and {row["id"] for row in listed} <= set(ids)
    assert not any(point.reason for point in points if point.id in {row["id"] for row in listed})
    assert all(point.reason or point.published for point in points)


def test_a_folder_of_points_is_simulated_and_judged(tmp_path: Path, few_points: Path) -> None:
    result = validate(
        tmp_path / "out", SimulateSection(mode="validate", points=str(few_points), groups=[A100])
    )
    assert result["metrics"]["points"] > 0 and result["metrics"]["points_median_error"] < 0.2
    assert not result["tables"] and not result["trace"]
    assert (tmp_path / "out" / "points.csv").read_text().startswith("id,group")
    console = Console(record=True, width=160)
    print_result(result, console)
    assert "Published points" in console.export_text()


def test_constants_are_chosen_on_points_that_can_be_simulated(few_points: Path) -> None:
    pcie = next(point.id for point in read_points(few_points) if point.reason)
    (few_points / CALIBRATION).write_text(f"id,metric,fits\n{pcie},output_throughput,factor\n")
    with pytest.raises(ConfigError, match="cannot be simulated: PCIe without NVLink"):
        calibrate(few_points)


def test_constants_are_a_kind_of_models_own_where_they_are_known() -> None:
    dense, moe = (load_calibration("h100", "vllm", kind) for kind in ("dense", "moe"))
    assert dense.host != moe.host and "dense models" in dense.origin and "with experts" in moe.origin
    # Of the other kind where these are missing, of another device where the stack was met there alone.
    assert load_calibration("a100_80gb", "vllm", "moe").origin.startswith("vllm on a100_80gb, dense models")
    assert load_calibration("l40s", "vllm", "moe").host
    assert load_calibration("a100_80gb", "none such", "moe").origin == "default"


def test_groups_choose_among_the_points(tmp_path: Path, few_points: Path) -> None:
    with pytest.raises(ConfigError, match=r"simulate\.groups=\['none'\]: no point .* groups: "):
        validate(tmp_path / "out", SimulateSection(points=str(few_points), groups=["none"]))


def test_no_folder_of_points(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        validate(tmp_path / "out", SimulateSection(points=str(tmp_path / "absent")))


def test_a_broken_file_of_points_is_one_line(tmp_path: Path, few_points: Path) -> None:
    file = few_points / "e2e_trtllm_0.14.csv"
    file.write_text(file.read_text().replace("Mixtral 8x7B,", "Mixtral 8x7B,many"))
    with pytest.raises(ConfigError, match=r"e2e_trtllm_0\.14\.csv") as caught:
        validate(tmp_path / "out", SimulateSection(points=str(few_points)))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_calibration_points_count_in_no_error(simulated: list[tuple[Point, dict[str, Any]]]) -> None:
    rows = [row for _, row in simulated]
    assert [row["used_for_calibration"] for row in rows] == [True, False]
    (told,) = summary(rows)
    assert told["count"] == 1 and told["median_error"] == pytest.approx(abs(rows[1]["error"]))


def test_what_cannot_be_simulated_is_a_row_with_the_reason() -> None:
    point = next(point for point in read_points() if point.reason)
    assert all(row["simulated"] is None and row["note"] == point.reason for row in rows_of_point(point))


@pytest.mark.slow
def test_a_figure_that_the_simulator_made_itself_has_no_error(
    simulated: list[tuple[Point, dict[str, Any]]],
) -> None:
    point, row = simulated[0]
    again = dataclasses.replace(point, published={row["metric"]: row["simulated"]})
    (same,) = rows_of_point(again)
    assert same["error"] == 0.0 and same["inside"]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["a100_80gb", "h100"])
def test_tables_carry_as_far_as_their_page_says(device: str) -> None:
    errors = {(row["operation"], row["held_out"]): row["median_error"] for row in table_errors(device)}
    within = {operation: error for (operation, what), error in errors.items() if what == "point"}
    assert len(within) >= 5 and max(within.values()) <= 0.045
    assert errors["experts", "shape"] <= 0.06


@pytest.mark.slow
def test_efficiencies_are_medians_of_the_tables() -> None:
    kernels = Kernels("a100_80gb")
    products = [curve for curve in kernels._gemms(4096, 4096) if curve.away < 3]  # of models' sizes
    places: dict[str, tuple[Any, list[tuple[float, ...]]]] = {
        "gemm": (products, [(m,) for m in (1, 16, 64, 512, 4096)]),
        "experts": (kernels._experts(2048, 768, 128), [(rows,) for rows in (0.1, 1, 4, 32, 256)]),
        "decode": (
            kernels._heads("decode", 32, 4, 128, 2),
            [(4 * b, n) for b in (1, 16, 64, 256) for n in (512, 2048, 8192)],
        ),
        "prefill": (
            kernels._heads("prefill", 32, 4, 128, 2),
            [(4 * b, n) for b in (1, 4) for n in (512, 2048, 8192)],
        ),
    }
    for name, (curves, at) in places.items():
        shares = [curve.bound(*place) / curve.seconds(*place) for curve in curves for place in at]
        assert statistics.median(shares) == pytest.approx(EFFICIENCY[name], abs=0.02), name


def test_shipped_tables_keep_their_licences() -> None:
    assert {"README.md", "LICENSES.md"} <= {path.name for path in FOLDER.iterdir()}
