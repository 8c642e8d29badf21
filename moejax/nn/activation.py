"""Activation functions by their Hugging Face name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from moejax.core.config import ClampedSwiglu
from moejax.core.errors import ConfigError, unknown
from moejax.ops.grouped_matmul import Gated

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}

# The same functions by the names that `pallas_kernels` has for them.
KERNEL_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def activation(name: str) -> Callable[[jax.Array], jax.Array]:
    """Raises `ConfigError` for a name that is not known."""
    if name not in ACTIVATIONS:
        raise ConfigError(f"hidden_act: {unknown('activation', name, ACTIVATIONS)}")
    return ACTIVATIONS[name]


def gated(name: str, clamped: ClampedSwiglu | None = None) -> Gated:
    """Returns `act(gate) · up` with the activation of that name, or else what `clamped` describes."""
    if clamped is None:
        act = activation(name)
        return lambda gate, up: act(gate) * up
    limit, alpha = clamped.limit, clamped.alpha

    def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return (up + 1) * (gate * jax.nn.sigmoid(alpha * gate))

    return swiglu
