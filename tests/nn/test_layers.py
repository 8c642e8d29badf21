"""Norm, projections, embedding, gated MLP and activations in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.nn.activation import ACTIVATIONS, activation
from moejax.nn.embedding import Embedding
from moejax.nn.linear import Linear
from moejax.nn.mlp import GatedMLP
from moejax.nn.norm import RMSNorm
from moejax.nn.param import initialize
from tests.numerics import assert_close, tolerance

erf = np.vectorize(math.erf)
FORMULAS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "swish": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * 0.5 * (1 + erf(x / math.sqrt(2))),
    "gelu_new": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu_pytorch_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.maximum(x, 0),
}


def filled(module, seed=0):
    initialize(module, seed)
    return module


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation(name):
    x = np.linspace(-6, 6, 241)
    got = activation(name)(jnp.asarray(x, jnp.float32))
    # Twelve operations or so, of which erf and tanh are good to a few roundings.
    assert_close(got, FORMULAS[name](x.astype(np.float32).astype(np.float64)), tolerance(12))


def test_unknown_activation_is_named():
    with pytest.raises(ConfigError, match=r"'siluu'.*did you mean 'silu'"):
        activation("siluu")


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_rms_norm(eps):
    norm = filled(RMSNorm(24, "embed", jnp.float32, eps))
    norm.scale.set_value(jnp.asarray(normal(24, seed=1)))
    x = normal(3, 5, 24) * np.array([1e-3, 1.0, 1e3], np.float32)[:, None, None]
    x64 = x.astype(np.float64)
    expected = x64 / np.sqrt((x64**2).mean(-1, keepdims=True) + eps) * np.asarray(norm.scale[...], np.float64)
    got = np.asarray(norm(jnp.asarray(x)))
    for part, whole in zip(got, expected, strict=True):  # each magnitude by itself
        assert_close(part, whole, tolerance(24))


def test_rms_norm_in_half_precision_computes_in_float32():
    """The squares of 300 overflow float16; the statistics must not be taken in it."""
    norm = filled(RMSNorm(16, "embed", jnp.float16, 1e-6))
    x = jnp.full((1, 16), 300.0, jnp.float16)
    got = norm(x)
    assert got.dtype == jnp.float16
    np.testing.assert_array_equal(got, np.ones((1, 16)))


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias):
    linear = filled(Linear((24, 10), ("embed", "mlp"), jnp.float32, bias=bias, scale=0.5))
    x = normal(3, 24)
    expected = x.astype(np.float64) @ np.asarray(linear.kernel[...], np.float64)
    if bias:
        linear.bias.set_value(jnp.asarray(normal(10, seed=2)))
        expected += np.asarray(linear.bias[...], np.float64)
    assert_close(linear(jnp.asarray(x)), expected, tolerance(24))


def test_embedding_and_its_transpose():
    embedding = filled(Embedding(20, 8, jnp.float32, 1.0))
    table = np.asarray(embedding.table[...])
    tokens = jnp.array([[0, 19], [7, 7]], jnp.int32)
    np.testing.assert_array_equal(embedding(tokens), table[np.asarray(tokens)])
    x = normal(3, 8)
    assert_close(
        embedding.attend(jnp.asarray(x)), x.astype(np.float64) @ table.T.astype(np.float64), tolerance(8)
    )


@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_gated_mlp(act):
    mlp = filled(GatedMLP(16, 24, act, jnp.float32, 0.5))
    gate, up, down = (
        np.asarray(p.kernel[...], np.float64) for p in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    )
    x = normal(5, 16)
    expected = (FORMULAS[act](x @ gate) * (x @ up)) @ down
    assert_close(jax.jit(mlp)(jnp.asarray(x)), expected, tolerance(16, 16, 24))
