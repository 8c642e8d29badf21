"""Weights of experts with the inputs that they were calibrated on, as tests of GPTQ, AWQ and SmoothQuant
take."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from moejax.quantization.arithmetic import dequantize
from moejax.quantization.formats import QTensor
from moejax.quantization.output_error import output_error

FORMATS = (
    "int8_asym", "int4_g16", "float8_e4m3fn_b24", "nvfp4",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in (
            "int8", "int8_tensor", "int4", "int4_g16_asym", "int4_tensor", "fp8", "fp8_e5m2", "mxfp4",
        )
    ),
)  # fmt: skip
"""Of each way to scale and to count one; the others are slow together."""


class Calibrated(NamedTuple):
    """`w` `[*lead, D, F]`, `x` `[*lead, T, D]`, `gram` = xᵀx `[*lead, D, D]`, all float32."""

    w: jax.Array
    x: jax.Array
    gram: jax.Array


@functools.partial(jax.jit, static_argnames=("lead", "D", "F", "T"))
def calibrated(
    lead: tuple[int, ...] = (3,), D: int = 64, F: int = 40, T: int = 160, *, seed: int = 0
) -> Calibrated:
    """Inputs of a quarter of the rank of D, with noise, whose magnitudes differ by a factor of about 100."""
    keys = jax.random.split(jax.random.key(seed), 5)
    w = jax.random.normal(keys[0], (*lead, D, F))
    few = jax.random.normal(keys[1], (*lead, T, D // 4))
    x = few @ jax.random.normal(keys[2], (*lead, D // 4, D)) + 0.3 * jax.random.normal(keys[3], (*lead, T, D))
    x *= jnp.exp(jax.random.normal(keys[4], (*lead, 1, D)))
    return Calibrated(w, x, jnp.swapaxes(x, -1, -2) @ x)


@jax.jit
def error_of(tensor: QTensor, case: Calibrated) -> jax.Array:
    """Output error `[*lead]` of a quantized `case.w`."""
    return output_error(dequantize(tensor) - case.w, case.gram)


@jax.jit
def weight_error(tensor: QTensor, case: Calibrated) -> jax.Array:
    """Squared error of the weights `[*lead]`."""
    return jnp.sum(jnp.square(dequantize(tensor) - case.w), axis=(-2, -1))
