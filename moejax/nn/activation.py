"""Activation functions by their Hugging Face name."""

from collections.abc import Callable

import jax

from moejax.core.errors import ConfigError, unknown

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
