"""Token embedding and the projection back to the vocabulary."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.nn.param import ParamSpec, declare
from moejax.ops.dot import dot_by_rows
from moejax.sharding.axes import Names, all_gather, index, psum


class Embedding(nnx.Module):
    """A table `[V, D]`; `attend` reuses it as output projection where embeddings are tied.

    `split` names mesh axes that the vocabulary, with its `padding`, is split over.
    """

    def __init__(
        self, vocab_size: int, dim: int, dtype: Any, scale: float, split: Names = (), padding: int = 0
    ) -> None:
        spec = ParamSpec((vocab_size, dim), ("vocab", "embed"), dtype, "normal", scale)
        self.table = declare(spec.padded(padding))
        self.split = split

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Looks up int32 `[...]`; returns `[..., D]`."""
        table = self.table[...]
        if not self.split:
            return jnp.take(table, tokens, axis=0, mode="clip")
        # One device has a token's row, the others add 0.
        local = tokens - index(self.split) * table.shape[0]
        mine = (local >= 0) & (local < table.shape[0])
        rows = jnp.take(table, local, axis=0, mode="clip")
        return psum(jnp.where(mine[..., None], rows, jnp.zeros((), table.dtype)), self.split)

    def attend(self, x: jax.Array) -> jax.Array:
        """Maps `[..., D]` to logits `[..., V]`, those of padding included."""
        return all_gather(dot_by_rows(x, self.table[...]), self.split, axis=-1)
