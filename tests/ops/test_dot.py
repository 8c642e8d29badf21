"""Products of rows with a dense matrix on a CPU: equal to numpy's, and free of XLA's slow forms."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.nn.activation import gated
from moejax.ops.dot import dot, dot_by_rows
from moejax.ops.expert_stack import Stack
from moejax.ops.grouped_matmul import Blocks, grouped_swiglu_blocks

# One rounding to the output's dtype, and sums of up to 14,336 products in float32.
_TOLERANCE = {"float32": 2e-5, "bfloat16": 8e-3, "float16": 1e-3}


def _close(y: jax.Array, x: jax.Array, weight: np.ndarray) -> None:
    exact = np.asarray(x, np.float64) @ weight.astype(np.float64)
    bound = np.abs(np.asarray(x, np.float64)) @ np.abs(weight.astype(np.float64))
    assert y.shape == exact.shape
    tolerance = _TOLERANCE[str(x.dtype)]
    np.testing.assert_array_less(np.abs(np.asarray(y, np.float64) - exact), tolerance * bound + 1e-12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rows", [(), (1,), (1, 1), (2,), (3, 5), (0,)])
def test_dot_is_numpys(rows: tuple[int, ...], dtype: str) -> None:
    x = jax.random.normal(jax.random.key(0), (*rows, 48)).astype(dtype)
    weight = jax.random.normal(jax.random.key(1), (48, 40)).astype(dtype)
    for out in (None, jnp.float32):
        y = jax.jit(dot, static_argnums=2)(x, weight, out)
        assert y.dtype == jnp.dtype(out or dtype)
        _close(y, x, np.asarray(weight, np.float64))
        _close(jax.jit(dot_by_rows, static_argnums=2)(x, weight.T, out), x, np.asarray(weight, np.float64))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dot_of_each_expert(dtype: str) -> None:
    x = jax.random.normal(jax.random.key(0), (3, 1, 16)).astype(dtype)
    weight = jax.random.normal(jax.random.key(1), (3, 16, 24)).astype(dtype)
    for y, rows, one in zip(jax.jit(dot)(x, weight), x, weight, strict=True):
        _close(y, rows, np.asarray(one, np.float64))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("D", [4095, 4096, 8127, 8190, 14336])
def test_no_long_row_is_multiplied_by_rows_in_one_dot(D: int, rows: int) -> None:
    x = jax.random.normal(jax.random.key(0), (rows, D))
    stored = jax.random.normal(jax.random.key(1), (8, D))
    program = jax.jit(dot_by_rows).lower(x, stored).compile()
    _close(program(x, stored), x, np.asarray(stored.T))
    dots = len(re.findall(r" dot\(", program.as_text()))
    assert dots == (-(-D // 4032) if rows == 1 and D >= 4096 else 1)


@pytest.mark.optimized
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("heights", [(), (4,)])
def test_no_stack_of_bfloat16_is_converted_whole(heights: tuple[int, ...], transposed: bool) -> None:
    E, D, F = 6, 40, 24
    shapes = [(E, D, F), (E, D, F), (E, F, D)]
    keys = jax.random.split(jax.random.key(0), 4)
    weights = [jax.random.normal(k, s).astype(jnp.bfloat16) for k, s in zip(keys, shapes, strict=False)]
    rows = jax.random.normal(keys[3], (8, D)).astype(jnp.bfloat16)
    stored = [w.swapaxes(1, 2) if transposed else w for w in weights]
    at = jnp.arange(8, dtype=jnp.int32)
    experts = jnp.asarray([0, 0, 2, 2, 3, 3, 5, 5], jnp.int32)
    single = Blocks(experts, at, at + 1, jnp.asarray(0 if heights else 8, jnp.int32))
    pairs = Blocks(experts[::2], at[::2], at[::2] + 2, jnp.asarray(4, jnp.int32))

    @jax.jit
    def run(rows: jax.Array, *stored: jax.Array) -> jax.Array:
        gate, up, down = (Stack(w, transposed=transposed) for w in stored)
        blocks = [pairs] if heights else []
        return grouped_swiglu_blocks(rows, gate, up, down, single, blocks, heights=heights, act=gated("silu"))

    program = run.lower(rows, *stored).compile()
    # Inside a fusion it is of the slice; what a fusion hands on is written down.
    assert not re.findall(rf"= f32\[{E},(?:{D},{F}|{F},{D})\]\S* fusion\(", program.as_text())
    for row, expert, y in zip(rows, experts, program(rows, *stored), strict=False):
        gate, up, down = (np.asarray(w[expert], np.float64) for w in weights)
        row = np.asarray(row, np.float64)
        hidden = row @ gate
        exact = (hidden / (1 + np.exp(-hidden)) * (row @ up)) @ down
        np.testing.assert_allclose(
            np.asarray(y, np.float64), exact, rtol=0.05, atol=0.05 * np.abs(exact).max()
        )
