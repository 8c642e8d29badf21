"""mode=static: selection, the gate, and the comparison with the committed reports."""

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("triton")

from moejax.bench.kernels import static
from moejax.bench.kernels.config import KernelSelection
from moejax.bench.kernels.select import select
from moejax.bench.kernels.static import KernelGateError, compare_with_baseline, run_static, write_baseline
from moejax.core.errors import ConfigError
from moejax.core.files import cache_root
from moejax.engine.opening.resolve import default_cache_dir
from moejax.report.kernel_tables import static_table
from pallas_kernels.registry import OPS, load_op
from pallas_kernels.static import failures, report_op
from pallas_kernels.static.compiler import Compiler
from pallas_kernels.static.targets import TARGETS, occupancy
from tests.bench.runs import run_into


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    with Compiler(1, tmp_path_factory.mktemp("cache")) as compiler:
        return report_op(load_op("rms_norm"), compiler, select=lambda i, s: "decode" in s.name)


def selection(tmp_path, **more):
    paths = {"cache_dir": str(tmp_path / "cache"), "baseline_dir": str(tmp_path / "static")}
    return KernelSelection(ops=["rms_norm"], workers=1, **paths, **more)


def static_run(out):
    return run_into(out, "kernels", {"mode": "static"})


def test_rows_say_what_the_compiler_said(rows):
    assert {row.target for row in rows} == {"sm_80", "sm_90"} and len(rows) == 8
    for row in rows:
        assert row.kernel == "rms_norm_residual" and not row.error
        assert 16 <= row.registers <= 128 and row.loads > 0 and row.stores > 0
        assert row.vector_loads == row.loads and row.products == 0
        assert 0 < row.occupancy <= 1 and row.limiter
        assert static.roofline_us(row) > 0
    assert failures(rows) == []


@pytest.mark.parametrize(
    "change,text",
    [
        ({"spill_stores": 8}, "spills 8 B stores"),
        ({"shared": 164 * 1024}, "167936 B of shared memory, of 166912"),
        ({"products": 2, "products_missed": 1, "unit": "bfloat16"}, "1 of 2 products miss the tensor cores"),
        ({"error": "it died"}, "it died"),
    ],
)
def test_the_gate_finds(rows, change, text):
    bad = dataclasses.replace(rows[0], **change)
    assert bad.target == "sm_80"
    (line,) = failures([bad, *rows[1:]])
    assert text in line and line.startswith("rms_norm pallas_triton")


def test_growth_against_the_committed_report(rows, tmp_path):
    about = {"jax": "1", "triton": "2"}
    write_baseline(rows, about, tmp_path)
    assert compare_with_baseline(rows, about, tmp_path) == []
    grown = [dataclasses.replace(rows[0], registers=rows[0].registers + 1), *rows[1:]]
    (line,) = compare_with_baseline(grown, about, tmp_path)
    assert f"registers grew from {rows[0].registers} to {rows[0].registers + 1}" in line
    assert compare_with_baseline(grown, {**about, "triton": "3"}, tmp_path) == []
    # It is made to be read: a line a kernel.
    assert len((tmp_path / "rms_norm.json").read_text().splitlines()) == len(rows) + 4


def test_a_run(tmp_path, capsys):
    out = tmp_path / "out"
    with static_run(out) as run:
        result = run_static(selection(tmp_path, specs=["decode_16"]), run)
    assert result["metrics"]["kernels"] == 8 and result["metrics"]["failures"] == 0
    assert json.loads((out / "result.json").read_text())["cases"] == result["cases"]
    shown = capsys.readouterr().err
    assert "rms_norm_residual" in shown and "8 kernels, triton" in shown


def test_a_run_that_fails_the_gate_writes_first(tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(static, "failures", lambda rows: ["a kernel spills"])
    with pytest.raises(KernelGateError, match="failed in 1 places; first: a kernel spills"):
        run_static(selection(tmp_path, specs=["mixtral_8x7b/decode_16"]), static_run(out))
    assert json.loads((out / "result.json").read_text())["failures"] == ["a kernel spills"]


def test_updating_the_baseline(tmp_path):
    run_static(selection(tmp_path, update_baseline=True), static_run(tmp_path / "a"))
    content = json.loads((tmp_path / "static" / "rms_norm.json").read_text())
    assert len(content["rows"]) == 2 * len(load_op("rms_norm").specs)
    result = run_static(selection(tmp_path), static_run(tmp_path / "b"))
    assert result["grown"] == []


def test_a_compiler_that_dies_is_a_row(tmp_path, monkeypatch, rows):
    """A module without a kernel crashes Triton 3.9 (segmentation fault). The next one gets a new process."""
    job = {"ttir": "module {}", "capability": 80, "num_warps": 1, "num_stages": 1}
    with Compiler(1) as compiler:
        with monkeypatch.context() as patch:
            patch.setattr("pallas_kernels.static.compiler.SECONDS_PER_KERNEL", 0.0)  # killed at once
            assert "the compiler died with exit code" in compiler.compile([job])[0]["error"]
        assert "error" in compiler.compile([job])[0]
        rows = report_op(load_op("rms_norm"), compiler, select=lambda i, s: s.name.startswith("olmoe"))
        assert failures(rows) == []


@pytest.mark.parametrize(
    "target,registers,shared,warps,want",
    [
        ("sm_80", 32, 0, 8, (8, 1.0, "registers")),
        ("sm_80", 255, 0, 4, (2, 0.125, "registers")),
        ("sm_80", 32, 81 * 1024, 4, (2, 0.125, "shared memory")),
        ("sm_80", 32, 164 * 1024, 4, (0, 0.0, "shared memory")),
        ("sm_90", 16, 0, 1, (32, 0.5, "blocks")),
        ("sm_90", 24, 0, 16, (4, 1.0, "warps")),
    ],
)
def test_occupancy(target, registers, shared, warps, want):
    """By hand from the tables of the CUDA programming guide."""
    assert tuple(occupancy(TARGETS[target], registers, shared, warps)) == want


@pytest.mark.parametrize(
    "change,text",
    [
        ({"ops": ["rmsnorm"]}, "ops: unknown kernel 'rmsnorm'; did you mean 'rms_norm'"),
        ({"implementations": ["mosaic"]}, "implementations: unknown implementation 'mosaic'"),
        ({"specs": ["decode_17"]}, "specs: unknown part of a spec 'decode_17'; did you mean 'decode_1"),
        ({"specs": ["decode", "nothing"]}, "unknown part of a spec 'nothing' .known: .*mixtral_8x7b"),
    ],
)
def test_unknown_names(change, text):
    with pytest.raises(ConfigError, match=text):
        KernelSelection(**{"ops": ["rms_norm"], **change})


@pytest.mark.parametrize(
    "change,text",
    [
        ({"mode": "fast"}, "mode"),
        ({"targets": ["sm_70"]}, "targets"),
        ({"targets": []}, "targets is empty"),
        ({"workers": 0}, "workers"),
        ({"specs": ["decode"], "update_baseline": True}, "update_baseline=true writes whole operations"),
    ],
)
def test_bad_configurations(change, text):
    with pytest.raises(ConfigError, match=text):
        KernelSelection(**change)


def test_where_compiled_results_are_kept(monkeypatch, tmp_path):
    """One root for all caches."""
    monkeypatch.setenv("MOEJAX_CACHE_DIR", str(tmp_path))
    assert static.cache_folder(None) == cache_root() / "kernels" == tmp_path / "kernels"
    assert Path(default_cache_dir()).is_relative_to(cache_root() / "xla")
    monkeypatch.delenv("MOEJAX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "moejax"
    assert static.cache_folder("none") is None and static.cache_folder("x") == Path("x")


def test_the_table_fits_100_columns(rows, capsys):
    """Names in words, no figure cut off."""
    cases = [
        static.case(dataclasses.replace(row, spec="qwen3_30b_a3b/prefill_4096/balanced")) for row in rows
    ]
    Console(stderr=True, width=100).print(static_table("rms_norm", cases))
    shown = capsys.readouterr().err
    assert "prefill_4096/balanced " in shown and "…" not in shown
    assert "rms_norm_residual" in shown
    assert " warps" in shown and " reg " in shown and "\n  rows " in shown
    assert max(len(line) for line in shown.splitlines()) <= 100


def test_all_operations_are_selected():
    assert [item.op.name for item in select([], [], [])] == list(OPS)
