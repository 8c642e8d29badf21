"""Token embedding and the projection back to the vocabulary."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.nn.param import ParamSpec, declare


class Embedding(nnx.Module):
    """A table `[V, D]`; `attend` reuses it as output projection where embeddings are tied."""

    def __init__(self, vocab_size: int, dim: int, dtype: Any, scale: float) -> None:
        self.table = declare(ParamSpec((vocab_size, dim), ("vocab", "embed"), dtype, "normal", scale))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """int32 `[...]` → `[..., D]`."""
        return jnp.take(self.table[...], tokens, axis=0, mode="clip")

    def attend(self, x: jax.Array) -> jax.Array:
        """`[..., D]` → logits `[..., V]`."""
        return x @ self.table[...].T
