"""The gate of programs: faults, figures above the baseline, lost matrix instructions, files."""

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

from moejax.bench.program.config import ProgramSection
from moejax.bench.program.gate import (
    LIMITS,
    baseline_file,
    baseline_of,
    exceeded,
    is_comparable,
    read_baseline,
    write_baseline,
)  # fmt: skip
from moejax.core.errors import ConfigError

ROW: dict[str, Any] = {
    "bucket": "1", "kernels_with_spills": 0, "copies_of_pool_bytes": 0, "f32_weight_copy_bytes": 0,
    "launches_per_layer": 14, "launches_per_step": 687, "launches_outside": 0, "host_syncs": 0,
    "command_buffers": 1, "temp_bytes": 700,
}  # fmt: skip
KERNELS = [
    {"bucket": "1", "operation": "attention", "products": 4},
    {"bucket": "1", "operation": "norm", "products": 0},
    {"bucket": "8", "operation": "router", "products": 4},
]


def test_a_program_is_within_its_own_baseline() -> None:
    made = baseline_of([ROW], KERNELS)
    assert made["jaxlib"] == importlib.metadata.version("jaxlib")
    assert made["steps"]["1"] == {name: ROW[name] for name in LIMITS} | {"matrix_units": ["attention"]}
    assert exceeded([ROW], KERNELS, made) == []
    assert exceeded([ROW | {"temp_bytes": 600}], KERNELS, made) == [], "less is no fault"


@pytest.mark.parametrize("name", LIMITS)
def test_a_figure_above_the_baseline(name: str) -> None:
    grown = ROW | {name: ROW[name] + 1}
    [line] = exceeded([grown], KERNELS, baseline_of([ROW], KERNELS))
    assert line == f"step 1: {name} grew from {ROW[name]} to {grown[name]}"
    assert exceeded([grown], KERNELS, baseline_of([ROW], KERNELS) | {"jaxlib": "0.1"}) == []


@pytest.mark.parametrize("name", ["kernels_with_spills", "copies_of_pool_bytes", "f32_weight_copy_bytes"])
def test_a_fault_is_one_with_any_compiler(name: str) -> None:
    for baseline in (None, baseline_of([ROW], KERNELS) | {"jaxlib": "0.1"}):
        assert exceeded([ROW | {name: 2}], KERNELS, baseline) == [f"step 1: {name} is 2, not 0"]


def test_what_cannot_be_known_is_no_pass() -> None:
    [line] = exceeded([ROW | {"kernels_with_spills": None}], KERNELS, None)
    assert "no ptxas" in line


def test_an_operation_that_loses_its_matrix_instructions() -> None:
    without = [kernel | {"products": 0} for kernel in KERNELS]
    [line] = exceeded([ROW], without, baseline_of([ROW], KERNELS))
    assert line == "step 1: attention has no matrix instructions any more"


def test_files(tmp_path: Path) -> None:
    config = {
        "model": {"hf_config": {"_name_or_path": "Qwen/Qwen3-30B-A3B"}}, "target": "/x/a100.txtpb",
        "program": {"layers": None}, "parallel": {"ep": 8}, "quant": {"method": "rtn", "format": "int4_g64"},
    }  # fmt: skip
    path = baseline_file(str(tmp_path), config)
    assert path == tmp_path / "Qwen3-30B-A3B-int4_g64-ep8-a100.json"
    with pytest.raises(ConfigError, match=r"-a100\.json; program\.update_baseline"):
        read_baseline(path, ["1"])
    write_baseline(path, baseline_of([ROW], KERNELS))
    write_baseline(path, baseline_of([ROW | {"bucket": "8"}], KERNELS))
    steps = read_baseline(path, ["1", "8"])["steps"]
    assert (steps["1"]["matrix_units"], steps["8"]["matrix_units"]) == (["attention"], ["router"])
    with pytest.raises(ConfigError, match="has no step 64; it has 1, 8"):
        read_baseline(path, ["1", "64"])
    path.write_text(json.dumps({"jaxlib": "0.1", "steps": {"9": {}}}))
    assert not is_comparable(read_baseline(path, ["9"]))
    write_baseline(path, baseline_of([ROW], KERNELS))
    assert list(read_baseline(path, [])["steps"]) == ["1"], "another version's figures do not stay"


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"steps": {}}', '{"jaxlib": "0.1"}', '{"jaxlib": "0.1", "steps": 3}']
)
def test_a_corrupt_file_is_one_line_also_when_it_is_written_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m-a100.json"
    path.write_text(text)
    for use in (lambda: read_baseline(path, []), lambda: write_baseline(path, baseline_of([ROW], KERNELS))):
        with pytest.raises(
            ConfigError, match=r"m-a100\.json is no baseline of programs \(.*\); restore"
        ) as e:
            use()
        assert "\n" not in str(e.value) and path.read_text() == text


def test_a_baseline_is_updated_in_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"writes into program\.gate=FOLDER, and none is given"):
        ProgramSection(update_baseline=True)
