"""The static gate: of all kernels `make static`; here of those that are not in the steps of `make gate`."""

import functools
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from moejax.bench.kernels.row import failures
from moejax.bench.kernels.static import compare_with_baseline, compile_all, read_baselines
from moejax.bench.kernels.worker import Asked
from pallas_kernels.models import DEEPSEEK_V2_LITE, DEEPSEEK_V3, MIXTRAL
from pallas_kernels.ragged_paged_attention import specs as attention
from pallas_kernels.registry import OPS, load_op
from tests.gpu_compiler import needs_gpu_compiler

BASELINE = Path(__file__).parents[2] / "results" / "static"
MODELS = ("mixtral_8x7b", "qwen3_30b_a3b", "olmoe_1b_7b", "wide64_ep8")
BESIDE_STEPS = ("flash_attention", "quantized_matmul", "quantized_grouped_matmul", "quantized_grouped_swiglu")


EXPERTS = ("grouped_swiglu", "grouped_matmul", "quantized_grouped_swiglu", "quantized_grouped_matmul")


def _gpt_oss(name):
    """Names of specs with biases, of many rows and of few; SwiGLU's is clamped."""
    return {s.name for s in load_op(name).specs if s.name.startswith("gpt_oss_20b") and "_1/" not in s.name}


def _first_of_each_phase(op):
    first = {phase: spec.name for spec in reversed(op.specs) for phase in spec.tags}
    return {first[phase] for phase in ("decode", "prefill") if phase in first}


def _attention_specs():
    chunk, mixed = [(512, 4096)], [(1, 8192), (1, 700), (64, 1024)]
    yield attention.make_spec(MIXTRAL, "512_sinks", chunk, sinks=True)
    yield attention.make_spec(MIXTRAL, "mixed_float16", mixed, kv=jnp.float16)
    yield attention.make_spec(MIXTRAL, "8x8192_float16", [(1, 8192)] * 8, kv=jnp.float16)
    wide, options = replace(MIXTRAL, head_dim=256), {"window": 4096, "sinks": True}
    yield attention.make_spec(wide, "512_256_e4m3", [(512, 8192)], kv=jnp.float8_e4m3fn, **options)
    yield attention.make_spec(DEEPSEEK_V3, "mixed", mixed)
    yield attention.make_spec(DEEPSEEK_V2_LITE, "mixed_int8", mixed, kv=jnp.int8)


def _gelu_specs():
    for spec in load_op("quantized_grouped_swiglu").specs:
        if spec.name.startswith("mixtral"):
            gelu = {"activation": "gelu"}
            yield replace(spec, static={**spec.static, **gelu}, problem={**spec.problem, **gelu})


NEWER = {
    "topk_router": ("deepseek_v3/decode_64", "narrow_4096/decode_64"),
    "moe_permute": ("narrow_4096/decode_64/balanced",),
    "rms_norm": ("gemma3_12b/decode_16", "phi3_5_moe/decode_16"),
    "rope_kv_write": ("glm_4_5/decode_64", "minimax_m2/decode_64", "deepseek_v3/decode_64"),
}
"""Specs of what the model of `make gate` does not have."""


def _newer(name):
    return (spec for spec in load_op(name).specs if spec.name in NEWER[name])


OTHER_SHAPES = {"ragged_paged_attention": _attention_specs, "quantized_grouped_swiglu": _gelu_specs}
OTHER_SHAPES |= {name: functools.partial(_newer, name) for name in NEWER}


def of_other_shapes(name):
    """An operation with the shapes beside its specs that spilled or did not lower once."""
    return replace(load_op(name), specs=tuple(OTHER_SHAPES[name]()))


@needs_gpu_compiler
def test_gate():
    """Default configurations compile for sm_80 and sm_90, do not spill, fit, reach the tensor cores, and take
    no more than the committed report says."""
    loads = [(functools.partial(load_op, name), _first_of_each_phase(load_op(name))) for name in BESIDE_STEPS]
    loads += [(functools.partial(load_op, name), _gpt_oss(name)) for name in EXPERTS]
    loads += [
        (functools.partial(of_other_shapes, name), {spec.name for spec in specs()})
        for name, specs in OTHER_SHAPES.items()
    ]
    asked = [
        Asked(load, "pallas_triton", spec, target)
        for load, specs in loads
        for spec in specs
        for target in ("sm_80", "sm_90")
    ]
    rows = [row for rows in compile_all(asked, workers=2) for row in rows]
    known = {(one.load().name, one.implementation, one.spec, one.target) for one in asked}
    assert {(row.op, row.implementation, row.spec, row.target) for row in rows} == known
    assert all(row.compiler.startswith("jaxlib") and row.registers for row in rows if not row.error)
    assert failures(rows) == []
    grown, _ = compare_with_baseline(rows, read_baselines(BASELINE, {*BESIDE_STEPS, *EXPERTS}))
    assert grown == []


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
