"""The static gate over all kernels: what `experiments.kernels mode=static` fails on, CI fails on."""

from pathlib import Path

import pytest

pytest.importorskip("triton")

from moejax.bench.kernels.static import compare_with_baseline
from pallas_kernels.registry import OPS, load_op
from pallas_kernels.static import failures, report_op
from pallas_kernels.static.compiler import Compiler

BASELINE = Path(__file__).parents[2] / "results" / "static"
MODELS = ("mixtral_8x7b", "qwen3_30b_a3b", "olmoe_1b_7b", "wide64_ep8")


@pytest.fixture(scope="module")
def compiler():
    with Compiler(workers=2) as pool:
        yield pool


@pytest.mark.parametrize("name", OPS)
def test_gate(name, compiler):
    """Default configurations compile for sm_80 and sm_90, do not spill, fit, reach the tensor cores, and take
    no more than the committed report says."""
    op = load_op(name)
    report = report_op(op, compiler)
    compiled = {(row.implementation, row.spec, row.target) for row in report.rows}
    wanted = {
        (implementation, spec.name, target)
        for implementation, kind in op.implementations.items()
        for spec in op.specs
        if kind.supports(spec.problem) is None
        for target in ("sm_80", "sm_90")
    }
    assert compiled == wanted
    assert failures(report.rows) == []
    assert compare_with_baseline(report.rows, {"jax": report.jax, "triton": report.triton}, BASELINE) == []


@pytest.mark.parametrize("name", OPS)
def test_specs_are_named_and_costed(name):
    """Every model, decode and prefill; a cost above zero; shapes without making the data."""
    op = load_op(name)
    names = [spec.name for spec in op.specs]
    assert len(names) == len(set(names))
    for model in MODELS:
        assert any(model in n for n in names), model
    for phase in ("decode", "prefill"):
        assert any(phase in spec.tags for spec in op.specs) or (name, phase) == ("flash_attention", "decode")
    for spec in op.specs:
        assert spec.cost.bytes > 0 and spec.cost.flops >= 0
        assert spec.abstract
        for kind in op.implementations.values():
            if kind.supports(spec.problem) is None:
                space = list(kind.space(spec.problem))
                assert kind.heuristic(spec.problem) in space
                assert len(set(space)) == len(space) > 1


@pytest.mark.parametrize("name", OPS)
def test_every_operation_has_the_committed_report(name):
    assert (BASELINE / f"{name}.json").exists(), "run: python -m experiments.kernels update_baseline=true"
