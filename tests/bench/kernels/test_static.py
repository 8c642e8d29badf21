"""mode=static: selection, the gate, and the comparison with the committed reports."""

import dataclasses
import functools
import json
from collections.abc import Iterator

import pytest
from rich.console import Console

from moejax.bench.kernels import static
from moejax.bench.kernels.config import KernelSelection
from moejax.bench.kernels.occupancy import TARGETS, occupancy
from moejax.bench.kernels.row import Row, failures
from moejax.bench.kernels.select import select
from moejax.bench.kernels.static import (
    KernelGateError,
    compare_with_baseline,
    compile_all,
    read_baselines,
    run_static,
    write_baseline,
)
from moejax.bench.kernels.worker import Asked, answer, count_instructions
from moejax.core.errors import CompileError, ConfigError
from moejax.report.kernel_tables import static_table
from pallas_kernels.registry import OPS, load_op
from tests.bench.runs import run_into
from tests.gpu_compiler import needs_gpu_compiler

RMS_NORM = functools.partial(load_op, "rms_norm")


def row_of(asked: Asked) -> Row:
    """What XLA made of it, more or less."""
    spec = next(spec for spec in asked.load().specs if spec.name == asked.spec)
    return Row(
        asked.load().name, asked.implementation, asked.spec, asked.target, "rms_norm_residual",
        {"rows": 1, "num_warps": 4, "num_stages": 1}, "heuristic", "jaxlib 1", (16, 1, 1), 4,
        **dataclasses.asdict(spec.cost), registers=39, shared=16, blocks_per_sm=12, occupancy=0.75,
        limiter="registers", loads=6, vector_loads=6,
    )  # fmt: skip


@pytest.fixture
def rows() -> list[Row]:
    return [
        row_of(Asked(RMS_NORM, "pallas_triton", spec.name, target))
        for spec in RMS_NORM().specs if "decode_16" in spec.name for target in TARGETS
    ]  # fmt: skip


@pytest.fixture
def no_compiler(monkeypatch, tmp_path):
    """Compiles nothing: a process answers with `row_of`."""

    def ask(module, target, asked) -> Iterator[list[Row]]:
        yield []
        yield from ([row_of(one)] for one in asked)

    monkeypatch.setattr(static, "ask", ask)
    monkeypatch.setattr(static, "plugin_folder", lambda: tmp_path)


def selection(tmp_path, **more):
    return KernelSelection(ops=["rms_norm"], baseline_dir=str(tmp_path / "static"), **more)


def static_run(out):
    return run_into(out, "kernels", {"mode": "static"})


def _compiled(op, implementation, spec):
    return Asked(functools.partial(load_op, op), implementation, spec, "sm_80")


def _right(row: Row) -> bool:
    return bool(
        not row.error and row.kernel and row.registers and row.loads and row.occupancy and row.num_warps
    )


@needs_gpu_compiler
def test_xla_compiles_kernels():
    asked = [
        _compiled("rms_norm", "pallas_triton", "mixtral_8x7b/decode_16"),
        _compiled("grouped_swiglu", "pallas_triton", "olmoe_1b_7b/decode_16/skewed"),
        _compiled("moe_permute", "pallas_triton", "olmoe_1b_7b/prefill_4096/balanced"),
    ]
    (norm,), (swiglu,), permute = compile_all(asked, workers=1)
    assert [row.kernel for row in permute] == ["moe_permute_count", "moe_permute_place"]
    for row in (norm, swiglu, *permute):
        assert _right(row) and row.compiler.startswith("jaxlib ") and failures([row]) == []
        assert static.roofline_us(row) > 0
    assert (norm.products, norm.mma_sync, norm.cp_async, norm.vector_loads) == (0, 0, 0, norm.loads)
    assert swiglu.products == 2 and swiglu.mma_sync and swiglu.cp_async_16 and swiglu.shared


def test_the_wheel_compiles_a_twin():
    pytest.importorskip("triton")
    [ready, [row]] = answer([_compiled("grouped_swiglu", "triton_jit", "olmoe_1b_7b/decode_16/skewed")])
    assert ready == [] and _right(row) and row.compiler.startswith("triton ") and failures([row]) == []
    assert row.products == 2 and row.mma_sync and row.cp_async_16


def test_what_does_not_compile_is_a_row():
    def broken():
        op = load_op("grouped_swiglu")
        twin = dataclasses.replace(op.implementations["triton_jit"], sources=lambda spec, config: 1 / 0)
        return dataclasses.replace(op, implementations={"triton_jit": twin})

    spec = broken().specs[0].name
    [_, [row]] = answer([Asked(broken, "triton_jit", spec, "sm_90")])
    assert failures([row]) == [f"grouped_swiglu triton_jit {spec} sm_90: ZeroDivisionError: division by zero"]


def test_a_compiler_that_dies_is_a_row_and_the_next_one_goes_on(no_compiler, monkeypatch):
    asked = [Asked(RMS_NORM, "pallas_triton", spec.name, "sm_80") for spec in RMS_NORM().specs[:3]]

    def dies(module, target, questions):
        yield []
        for one in questions:
            if one == asked[1]:
                raise CompileError("the compiler's process ended with -11:\nsegmentation fault")
            yield [row_of(one)]

    monkeypatch.setattr(static, "ask", dies)
    rows = [row for (row,) in compile_all(asked, workers=2)]
    assert [row.spec for row in rows] == [one.spec for one in asked]
    assert [row.error for row in rows] == [
        "",
        "the compiler's process ended with -11: segmentation fault",
        "",
    ]

    def never_begins(*arguments):
        raise CompileError("no module")
        yield

    monkeypatch.setattr(static, "ask", never_begins)
    with pytest.raises(CompileError, match="no module"):
        compile_all(asked, workers=2)


def test_instructions_are_counted():
    ptx = """
	mov.u32 %r1, %r5; @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	ld.global.b16 %rs1, [%rd2];
	st.global.v2.b32 [ %rd3 ], {%r2};
	cp.async.cg.shared.global [ %r3 + 0 ], [ %rd4 + 0 ], 0x10, %r4;
	cp.async.ca.shared.global [ %r3 + 0 ], [ %rd4 + 0 ], 0x8, %r4;
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r5};
	wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r6};
"""
    assert count_instructions(ptx) == {
        "mma_sync": 1, "wgmma": 1, "cp_async": 2, "cp_async_16": 1, "loads": 2, "vector_loads": 1,
        "stores": 1, "vector_stores": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "change,text",
    [
        ({"spill_stores": 8}, "spills 8 B stores"),
        ({"shared": 164 * 1024}, "167936 B of shared memory, of 166912"),
        ({"products": 2, "unit": "bfloat16"}, "its 2 products miss the tensor cores"),
        ({"registers": None}, "no ptxas was found"),
        ({"error": "it died"}, "it died"),
    ],
)
def test_the_gate_finds(rows, change, text):
    bad = dataclasses.replace(rows[0], **change)
    assert bad.target == "sm_80"
    (line,) = failures([bad, *rows[1:]])
    assert text in line and line.startswith("rms_norm pallas_triton")
    assert failures([dataclasses.replace(rows[0], products=2, unit="float32")]) == []


def test_growth_against_the_committed_report(rows, tmp_path):
    write_baseline(rows, tmp_path)
    before = read_baselines(tmp_path, ["rms_norm", "no_file"])
    assert compare_with_baseline(rows, before) == ([], [])
    grown = [dataclasses.replace(rows[0], registers=rows[0].registers + 1), *rows[1:]]
    (line,), _ = compare_with_baseline(grown, before)
    assert f"registers grew from {rows[0].registers} to {rows[0].registers + 1}" in line
    others = [dataclasses.replace(row, compiler="jaxlib 2") for row in grown]
    none, (note,) = compare_with_baseline(others, before)
    assert none == [] and note.endswith(f"only faults are checked: {len(rows)} by jaxlib 1")
    # It is made to be read: a line a kernel.
    assert len((tmp_path / "rms_norm.json").read_text().splitlines()) == len(rows) + 2


def test_a_run(no_compiler, tmp_path, capsys):
    out = tmp_path / "out"
    with static_run(out) as run:
        result = run_static(selection(tmp_path, specs=["decode_16"]), run)
    assert result["metrics"]["kernels"] == 16 and result["metrics"]["failures"] == 0
    assert json.loads((out / "result.json").read_text())["cases"] == result["cases"]
    shown = capsys.readouterr().err
    assert "rms_norm_residual" in shown and "16 kernels: 16 by jaxlib 1" in shown


def test_a_run_that_fails_the_gate_writes_first(no_compiler, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(static, "failures", lambda rows: ["a kernel spills"])
    with pytest.raises(KernelGateError, match="failed in 1 places; first: a kernel spills"):
        run_static(selection(tmp_path, specs=["mixtral_8x7b/decode_16"]), static_run(out))
    assert json.loads((out / "result.json").read_text())["failures"] == ["a kernel spills"]


def test_updating_the_baseline(no_compiler, tmp_path):
    (tmp_path / "static").mkdir()
    file = tmp_path / "static" / "rms_norm.json"
    file.write_text('{"rows": [{"products_missed": 0}]}')
    with pytest.raises(ConfigError, match=r"rms_norm.json is no static report .* update_baseline=true"):
        run_static(selection(tmp_path), static_run(tmp_path / "none"))
    run_static(selection(tmp_path, update_baseline=True), static_run(tmp_path / "a"))
    content = json.loads(file.read_text())
    assert len(content["rows"]) == 2 * len(load_op("rms_norm").specs)
    result = run_static(selection(tmp_path), static_run(tmp_path / "b"))
    assert result["grown"] == result["notes"] == []


def test_compilers_that_are_missing_are_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("MOEJAX_GPU_COMPILER", str(tmp_path))
    with pytest.raises(ConfigError, match="make gpu-compiler"):
        run_static(selection(tmp_path), static_run(tmp_path / "a"))
    monkeypatch.setattr(static.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'moejax\[static\]'"):
        run_static(KernelSelection(ops=["grouped_swiglu"]), static_run(tmp_path / "a"))
    assert not (tmp_path / "a").exists()


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
