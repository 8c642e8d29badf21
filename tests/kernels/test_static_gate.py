"""The static gate over all kernels: what `experiments.kernels mode=static` fails on, CI fails on."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton")

from moejax.bench.kernels.static import compare_with_baseline
from moejax.core.files import cache_root
from pallas_kernels.models import MIXTRAL
from pallas_kernels.ragged_paged_attention import specs as attention
from pallas_kernels.registry import OPS, load_op
from pallas_kernels.static import failures, report_op
from pallas_kernels.static.compiler import Compiler

BASELINE = Path(__file__).parents[2] / "results" / "static"
MODELS = ("mixtral_8x7b", "qwen3_30b_a3b", "olmoe_1b_7b", "wide64_ep8")


@pytest.fixture(scope="module")
def compiler():
    """Results stay in the run's cache, by IR and compiler, for all tests that compile kernels."""
    with Compiler(workers=2, cache=cache_root() / "kernels") as pool:
        yield pool


def one_of_each_phase(op):
    """The first spec of decode and of prefill."""
    first = {phase: spec.name for spec in reversed(op.specs) for phase in spec.tags}
    return tuple(spec for spec in op.specs if spec.name in (first.get("decode"), first.get("prefill")))


# In whole steps, and by the compiler that a GPU machine has, `make gate` compiles the others.
BESIDE_STEPS = ("flash_attention", "quantized_matmul", "quantized_grouped_matmul", "quantized_grouped_swiglu")
SLOW = pytest.mark.slow


@pytest.mark.parametrize("every_spec", [False, pytest.param(True, marks=SLOW)])
@pytest.mark.parametrize("name", [op if op in BESIDE_STEPS else pytest.param(op, marks=SLOW) for op in OPS])
def test_gate(name, every_spec, compiler):
    """Default configurations compile for sm_80 and sm_90, do not spill, fit, reach the tensor cores, and take
    no more than the committed report says. `make static` gates every spec, too."""
    op = load_op(name)
    if not every_spec:
        op = replace(op, specs=one_of_each_phase(op))
    rows = report_op(op, compiler)
    compiled = {(row.implementation, row.spec, row.target) for row in rows}
    wanted = {
        (implementation, spec.name, target)
        for implementation, kind in op.implementations.items()
        for spec in op.specs
        if kind.supports(spec.problem) is None
        for target in ("sm_80", "sm_90")
    }
    assert compiled == wanted
    assert failures(rows) == []
    made_with = {"jax": jax.__version__, "triton": compiler.version}
    assert compare_with_baseline(rows, made_with, BASELINE) == []


def _attention_specs():
    chunk, mixed = [(512, 4096)], [(1, 8192), (1, 700), (64, 1024)]
    yield attention.make_spec(MIXTRAL, "512_sinks", chunk, sinks=True)
    yield attention.make_spec(MIXTRAL, "mixed_float16", mixed, kv=jnp.float16)
    yield attention.make_spec(MIXTRAL, "8x8192_float16", [(1, 8192)] * 8, kv=jnp.float16)
    wide, options = replace(MIXTRAL, head_dim=256), {"window": 4096, "sinks": True}
    yield attention.make_spec(wide, "512_256_e4m3", [(512, 8192)], kv=jnp.float8_e4m3fn, **options)


def _gelu_specs():
    for spec in load_op("quantized_grouped_swiglu").specs:
        if spec.name.startswith("mixtral"):
            gelu = {"activation": "gelu"}
            yield replace(spec, static={**spec.static, **gelu}, problem={**spec.problem, **gelu})


@pytest.mark.parametrize(
    "name,specs", [("ragged_paged_attention", _attention_specs), ("quantized_grouped_swiglu", _gelu_specs)]
)
def test_gate_of_other_shapes(name, specs, compiler):
    """Shapes beside the specs that spilled or did not lower once."""
    op = replace(load_op(name), specs=tuple(specs()))
    assert op.specs
    assert failures(report_op(op, compiler)) == []


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
