"""Products with quantized weights: every implementation and execution against dequantize-then-multiply."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.moe.experts import Experts
from moejax.moe.router import Routing
from moejax.nn.param import initialize, iter_params
from moejax.nn.quantized import QuantizedWeight, replace_weights
from moejax.ops.quantized_matmul import exact_terms, matmul
from moejax.quantization.arithmetic import dequantize, quantize_activations
from moejax.quantization.formats import QTensor, WeightFormat, parse_format
from moejax.quantization.kernel_formats import why_no_kernel
from moejax.quantization.rtn import round_to_nearest
from tests.examples import in_turns, slow_but
from tests.model_shapes import experts_only
from tests.numerics import UNIT_ROUNDOFF, assert_close, tolerance

FORMATS = (
    "int8", "int8_asym", "int8_tensor", "int8_g64", "int8_g64_asym", "int4", "int4_g32", "int4_g64_asym",
    "fp8", "fp8_e5m2", "fp8_block128", "w8a8", "w8a8_static", "int8_asym_a8", "int8_tensor_a8", "int8_g64_a8",
    "float8_e4m3fn_a8", "float8_e5m2_a8", "float8_e4m3fn_a8static", "mxfp4", "nvfp4",
    "bf16_2of4", "w8a8_2of4",
)  # fmt: skip

GROUP_INDEX = dataclasses.replace(parse_format("int4_g32"), indexed=True)


# Whole functions compiled once, in place of each of their operations.
_rounded = jax.jit(round_to_nearest, static_argnums=1)
_values = jax.jit(dequantize)


@jax.jit
def _rounded_inputs(x: jax.Array, q: QTensor) -> jax.Array:
    codes, scale = quantize_activations(x, q.format, q.input_scale)
    return codes.astype(jnp.float32) * scale


def format_of(name: str) -> WeightFormat:
    return GROUP_INDEX if name == "indexed" else parse_format(name)


def quantized(w: jax.Array, fmt: WeightFormat, input_scale: float = 0.03) -> QTensor:
    """Rounded to nearest, with static scales that saturate a little and differ from expert to expert, and
    groups that do not go by place where the format has an index."""
    q = _rounded(w, fmt)
    if fmt.activations == "static":
        lead = q.input_scale.shape
        steps = 1.0 + jnp.arange(np.prod(lead), dtype=jnp.float32).reshape(lead) / 7
        # Largest codes 127 and 448 or 57344.
        largest = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}[fmt.numbers]
        q = dataclasses.replace(q, input_scale=input_scale * 127.0 / largest * steps)
    if fmt.indexed:
        order = np.random.default_rng(1).permutation(q.group_index.shape[-1])
        q = dataclasses.replace(q, group_index=q.group_index[..., order])
    return q


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def twin(x: jax.Array, q: QTensor) -> np.ndarray:
    """The product in float64, of the very numbers that are multiplied."""
    if q.format.activations != "none":
        x = _rounded_inputs(x, q)
    return np.asarray(x, np.float64) @ np.asarray(_values(q), np.float64)


class TestMatmul:
    @pytest.mark.parametrize("name", [*FORMATS, "indexed"])
    def test_each_implementation_is_the_twin(self, name: str) -> None:
        D, F = 128, 96
        q, x = quantized(draw(D, F), format_of(name)), draw(2, 3, D, seed=1)
        expected = twin(x, q)
        with_kernel = why_no_kernel(q.format, D) is None
        for implementation in ("dequantize", "xla", *(["pallas_triton"] if with_kernel else [])):
            y = jax.jit(functools.partial(matmul, implementation=implementation))(x, q)
            assert y.shape == (2, 3, F) and y.dtype == x.dtype
            assert_close(y, expected, tolerance(D))

    @pytest.mark.parametrize(
        ("name", "rows"),
        in_turns(
            [(n,) for n in ("int8_asym", "int8_tensor", "int4_g32", "fp8_block128")]
            + [(n,) for n in ("w8a8_static", "nvfp4", "indexed")],
            [1, 3],
        ),
    )
    def test_pieces_of_the_outputs_are_the_whole(
        self, name: str, rows: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two pieces that have whole blocks of scales and a shorter one at the end; one expert, and two."""
        D, F = 128, 300
        q, x = quantized(draw(2, D, F), format_of(name)), draw(2, rows, D, seed=1)
        monkeypatch.setattr("moejax.ops.quantized_matmul._PIECE", 4 * D * 128)
        y = jax.jit(matmul)(x, q)
        first = jax.tree.map(lambda a: a[0], q)
        assert_close(y[0], twin(x[0], first), tolerance(D))
        assert y.shape == (2, rows, F)
        assert_close(jax.jit(matmul)(x[0], first), twin(x[0], first), tolerance(D))

    @pytest.mark.parametrize("name", ["int8", "int4_g32", "w8a8", "fp8"])
    def test_bfloat16(self, name: str) -> None:
        """Weights and fake-quantized activations are rounded to x's dtype by the twin, not by the others."""
        D, F = 128, 64
        q, x = quantized(draw(D, F), format_of(name)), draw(4, D, seed=1).astype(jnp.bfloat16)
        expected = twin(x, q)
        for implementation in ("dequantize", "xla", "pallas_triton"):
            y = jax.jit(functools.partial(matmul, implementation=implementation))(x, q)
            assert y.dtype == jnp.bfloat16
            # Three roundings of operands and result, the first two averaging out over the sum.
            assert_close(y.astype(jnp.float32), expected, 4 * UNIT_ROUNDOFF["bfloat16"])

    @pytest.mark.parametrize("name", ["w8a8", "int8_asym_a8"])
    @pytest.mark.parametrize("parts", [1, 3])
    def test_integer_products_are_exact(self, name: str, parts: int) -> None:
        """Codes at their bounds, over a reduction of one part or of several: the sum itself is exact."""
        fmt = format_of(name)
        D = exact_terms(symmetric=fmt.symmetric) * parts - 1
        q = quantized(draw(D, 4), fmt)
        low = -127 if fmt.symmetric else -128
        values = jnp.where(draw(4, D, seed=2) > -0.5, low, 127).astype(jnp.int8)
        ones = jnp.ones_like(q.scales)
        zeros = None if fmt.symmetric else jnp.full_like(q.zeros, 127)
        q = dataclasses.replace(q, values=values, scales=ones, zeros=zeros)
        x = jnp.where(values[:3] == low, -126.0, 127.0)  # so that a row and an output add up far
        y = jax.jit(matmul)(x, q)
        exact = np.asarray(x, np.int64) @ (np.asarray(values, np.int64).T - (0 if fmt.symmetric else 127))
        assert (np.abs(exact).max() > 2**24) == (parts > 1)
        # A token's scale is 127 · (1/127), one rounding from 1; the sum and the scaled result are rounded.
        np.testing.assert_allclose(np.asarray(y), exact, rtol=3 * UNIT_ROUNDOFF["float32"])

    def test_a_row_of_zeros(self) -> None:
        q = quantized(draw(64, 8), format_of("w8a8"))
        for implementation in ("dequantize", "xla", "pallas_triton"):
            y = matmul(jnp.zeros((2, 64)), q, implementation)
            assert (np.asarray(y) == 0).all()

    def test_a_format_without_a_kernel_is_named(self) -> None:
        q = quantized(draw(64, 8), format_of("nvfp4"))
        with pytest.raises(ConfigError, match=r"pallas_triton: nvfp4: .*no kernel"):
            matmul(jnp.zeros((2, 64)), q, "pallas_triton")

    def test_a_float_weight_is_an_ordinary_product(self) -> None:
        x, w = draw(3, 8), draw(8, 4, seed=1)
        np.testing.assert_array_equal(matmul(x, w), x @ w)


D, F, E = 64, 128, 6


@functools.cache
def experts_of(
    formats: tuple[str, str, str], implementation: str = "xla", layout: str = "edf", floats: bool = False
) -> Experts:
    """Gate, up and down in these formats ("" for floats); with `floats`, the dequantized weights instead."""
    config = experts_only(D, F, E, k=2).replace(initializer_range=0.15)
    experts = Experts(config, layout, jnp.float32)  # type: ignore[arg-type]
    initialize(experts, seed=1)
    chosen = {
        f"{name}_proj": format_of(form)
        for name, form in zip(("gate", "up", "down"), formats, strict=True)
        if form
    }
    values = {name: param[...] for name, param in iter_params(experts)}
    if layout == "efd":
        values = {name: jnp.swapaxes(value, 1, 2) for name, value in values.items()}
    tensors = {name: quantized(values[name], fmt) for name, fmt in chosen.items()}
    if floats:
        for name, q in tensors.items():
            getattr(experts, name).set_value(_values(q))
        return experts
    for name, weight in replace_weights(experts, chosen).items():
        weight.set(tensors[name])
        weight.implementation = implementation
    return experts


def routing(N: int, k: int = 2, seed: int = 0) -> Routing:
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((N, E)), axis=1)[:, :k].astype(np.int32)
    ids[0] = E  # a padding token
    weights = np.where(ids < E, rng.dirichlet(np.ones(k), N), 0).astype(np.float32)
    return Routing(jnp.asarray(ids), jnp.asarray(weights), jnp.asarray(rng.normal(size=(N, E)), jnp.float32))


EXECUTIONS = {
    "dense": MoeConfig("dense"),
    "capacity": MoeConfig("capacity", capacity_factor=float(E)),
    "blocks_mixed": MoeConfig("grouped", grouped_matmul="blocks_mixed"),
    "blocks_uniform": MoeConfig("grouped", grouped_matmul="blocks_uniform", block_rows=4),
    "ragged_dot": MoeConfig("grouped", grouped_matmul="ragged_dot"),
    "pallas_triton": MoeConfig("grouped", grouped_matmul="pallas_triton"),
}


def run(experts: Experts, x: jax.Array, chosen: Routing, names: Any) -> dict[str, np.ndarray]:
    """Every execution in one compilation."""
    graph, state = nnx.split(experts)

    def all_of(state: Any, x: jax.Array, chosen: Routing) -> dict[str, jax.Array]:
        merged = nnx.merge(graph, state)
        return {name: merged(x, chosen, EXECUTIONS[name]).out for name in names}

    return {name: np.asarray(out) for name, out in jax.jit(all_of)(state, x, chosen).items()}


def loops(formats: tuple[str, str, str], x: jax.Array, chosen: Routing) -> np.ndarray:
    """Token by token in float64, activations rounded as each product's format says."""
    experts = experts_of(formats)

    def product(rows: np.ndarray, weight: Any, e: int) -> np.ndarray:
        if not isinstance(weight, QuantizedWeight):
            return rows @ np.asarray(weight[...][e], np.float64)
        one = jax.tree.map(lambda a: a[e], weight.tensor())
        return twin(jnp.asarray(rows, jnp.float32), one)

    out = np.zeros(x.shape, np.float64)
    for n, (ids, weights) in enumerate(zip(np.asarray(chosen.ids), np.asarray(chosen.weights), strict=True)):
        for e, weight in zip(ids, weights, strict=True):
            if e < E:
                row = np.asarray(x[n : n + 1], np.float64)
                gate = product(row, experts.gate_proj, e)
                hidden = gate / (1 + np.exp(-gate)) * product(row, experts.up_proj, e)
                out[n] += weight * product(hidden, experts.down_proj, e)[0]
    return out


def assert_twin(out: Any, expected: Any, formats: tuple[str, str, str]) -> None:
    """Two chained sums and one over the experts. Where hidden values are rounded to codes, one next to the
    middle of two may round to either; so of 20 tokens one may be off by such a step. A hidden value is at
    most about 4 of its standard deviations, so is a weight, and the largest output about 3 of its own, which
    are those two times sqrt(F): 16 / 3 steps over sqrt(F) of it."""
    base = tolerance(D, F, 2)
    down = formats[2] and format_of(formats[2])
    if not down or down.activations == "none":
        assert_close(out, expected, base)
        return
    step = {"int8": 1 / 127, "float8_e4m3fn": 2.0**-3, "float8_e5m2": 2.0**-2}[down.numbers]
    assert_close(out, expected, base + 16 / 3 * step / F**0.5)
    off = np.abs(np.asarray(out, np.float64) - expected).max(axis=1) > base * np.abs(expected).max()
    assert off.sum() <= max(1, len(off) // 20), f"{off.sum()} of {len(off)} tokens differ by a code"


MIXED = (
    ("int4_g32", "int8", "fp8"),
    ("", "int8", ""),
    ("int8", "int8", ""),
    ("", "", "w8a8"),
    ("w8a8", "w8a8", "int8"),
    ("w8a8_static", "int8", "w8a8"),
)


class TestExperts:
    @pytest.mark.parametrize(
        ("name", "tokens"),
        slow_but([("int4_g32", 3), ("w8a8", 40)], [(n, t) for n in (*FORMATS, "indexed") for t in (3, 40)]),
    )
    def test_every_execution_is_the_twin(self, name: str, tokens: int) -> None:
        formats, x, chosen = (name, name, name), draw(tokens, D, seed=2), routing(tokens)
        expected = loops(formats, x, chosen)
        for implementation in ("dequantize", "xla"):
            for got, out in run(experts_of(formats, implementation), x, chosen, EXECUTIONS).items():
                assert (out[0] == 0).all(), got
                assert_twin(out, expected, formats)

    @pytest.mark.parametrize(
        "name",
        slow_but(
            ["int8", "int4_g64_asym", "w8a8_static", "fp8_block128"],
            ["int8", "int4_g32", "int4_g64_asym", "w8a8", "w8a8_static", "fp8_block128", "mxfp4"],
        ),
    )
    def test_gpu_kernels(self, name: str) -> None:
        formats, x, chosen = (name, name, name), draw(20, D, seed=3), routing(20)
        found = run(experts_of(formats, "pallas_triton"), x, chosen, ["pallas_triton"])
        assert_twin(found["pallas_triton"], loops(formats, x, chosen), formats)

    @pytest.mark.parametrize("layout", ["edf", pytest.param("efd", marks=pytest.mark.slow)])
    @pytest.mark.parametrize(
        "formats",
        [pytest.param(f, marks=[pytest.mark.slow] if f in MIXED[2:] else [], id="-".join(f)) for f in MIXED],
    )
    def test_a_format_of_its_own_for_each(self, formats: tuple[str, str, str], layout: str) -> None:
        x, chosen = draw(9, D, seed=4), routing(9)
        expected = loops(formats, x, chosen)
        for out in run(experts_of(formats, "xla", layout), x, chosen, EXECUTIONS).values():
            assert_twin(out, expected, formats)
        found = run(experts_of(formats, "pallas_triton", layout), x, chosen, ["pallas_triton"])
        assert_twin(found["pallas_triton"], expected, formats)

    @pytest.mark.slow
    def test_the_dequantized_weights_give_the_same(self) -> None:
        formats, x, chosen = ("int4_g32",) * 3, draw(9, D, seed=5), routing(9)
        floats = run(experts_of(formats, floats=True), x, chosen, EXECUTIONS)
        codes = run(experts_of(formats), x, chosen, EXECUTIONS)
        for name, out in codes.items():
            assert_twin(out, floats[name], formats)

    def test_sizes(self) -> None:
        experts = experts_of(("int4_g32", "int8_asym", "nvfp4"))
        assert experts.num_experts == E
        assert [array[...].shape[0] for array in experts.arrays()] == [E] * 8
