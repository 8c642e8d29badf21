"""Statistics of what weights read: the pure part of calibration.

`Statistics` sums over tokens, so that batches and processes can be added up in any order; leading axes
(experts) are optional. Nothing here knows of models; `moejax.ptq.observers` fills them in.

An expert that fewer than `min_tokens` tokens visit is COLD: its own statistics say little, and a Hessian of
fewer tokens than inputs is singular. It falls back to

* "shared": the statistics of all tokens of the layer, as if every token visited it: for its gate and up the
  layer's own input, for its down what its gate and up make of all these inputs. Its own tokens are among
  them, with no more weight than others;
* "all": its own tokens, and beside them an evenly spread sample of at most `SAMPLE_TOKENS` of the layer's
  tokens that are routed to it for this purpose.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

SAMPLE_TOKENS = 4096
"""Tokens routed to a cold expert by fallback "all"."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("gram", "sum_abs", "max_abs", "count"),
    meta_fields=(),
)
@dataclass(frozen=True)
class Statistics:
    """Sums over the tokens x that a weight has read.

    Attributes:
        gram: float32 `[..., D, D]`, sum of x xᵀ: GPTQ's Hessian up to a factor.
        sum_abs: float32 `[..., D]`, sum of |x|.
        max_abs: float32 `[..., D]`, largest |x|.
        count: int32 `[...]`, tokens.
    """

    gram: jax.Array
    sum_abs: jax.Array
    max_abs: jax.Array
    count: jax.Array

    @classmethod
    def zeros(cls, lead: tuple[int, ...], D: int) -> "Statistics":
        """Returns the statistics of no tokens."""
        return cls(
            jnp.zeros((*lead, D, D), jnp.float32),
            jnp.zeros((*lead, D), jnp.float32),
            jnp.zeros((*lead, D), jnp.float32),
            jnp.zeros(lead, jnp.int32),
        )

    def mean_gram(self) -> jax.Array:
        """Returns float32 `[..., D, D]`: mean over tokens of x xᵀ; 0 where there were none."""
        return self.gram / jnp.maximum(self.count, 1).astype(jnp.float32)[..., None, None]

    def mean_abs(self) -> jax.Array:
        """Returns float32 `[..., D]`: mean |x|; 0 where there were no tokens."""
        return self.sum_abs / jnp.maximum(self.count, 1).astype(jnp.float32)[..., None]

    def plus(self, other: "Statistics") -> "Statistics":
        """Returns the statistics over the tokens of both."""
        return Statistics(
            self.gram + other.gram,
            self.sum_abs + other.sum_abs,
            jnp.maximum(self.max_abs, other.max_abs),
            self.count + other.count,
        )

    def divided(self, scales: jax.Array) -> "Statistics":
        """Returns the statistics of x / scales, float32 `[..., D]` (or `[D]` for all) after folding."""
        s = jnp.broadcast_to(scales, self.sum_abs.shape)
        gram = self.gram / (s[..., :, None] * s[..., None, :])
        return Statistics(gram, self.sum_abs / s, self.max_abs / s, self.count)


def of_rows(x: jax.Array, mask: jax.Array) -> Statistics:
    """Returns the statistics of rows x `[N, D]`, mask bool `[N]` (False: no token), without leading axes."""
    x = jnp.where(mask[:, None], x.astype(jnp.float32), 0.0)
    # Highest precision: GPUs would multiply float32 in TF32 otherwise, and a Hessian's small eigenvalues are
    # what GPTQ inverts.
    gram = jnp.matmul(x.T, x, precision=jax.lax.Precision.HIGHEST)
    size = jnp.abs(x)
    return Statistics(gram, size.sum(0), size.max(0, initial=0.0), mask.sum(dtype=jnp.int32))


def add_at(stats: Statistics, index: jax.Array, other: Statistics) -> Statistics:
    """Adds statistics without leading axes to entry `index` of `[E, …]`; `index` = E adds to none."""
    return Statistics(
        stats.gram.at[index].add(other.gram, mode="drop"),
        stats.sum_abs.at[index].add(other.sum_abs, mode="drop"),
        stats.max_abs.at[index].max(other.max_abs, mode="drop"),
        stats.count.at[index].add(other.count, mode="drop"),
    )


def cover(visited: Statistics, other: Statistics, cold: jax.Array, fallback: str) -> Statistics:
    """Returns what to calibrate experts with: their own statistics, the fallback's in cold experts' place.

    Args:
        visited: `[E, …]`, of each expert's own tokens.
        other: `[E, …]`; at cold experts what the fallback has seen: all tokens ("shared") or the sample
            ("all"). Elsewhere it is not read.
        cold: bool `[E]`.
    """
    instead = other if fallback == "shared" else visited.plus(other)

    def pick(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(cold.reshape(-1, *(1,) * (a.ndim - 1)), b, a)

    return jax.tree.map(pick, visited, instead)
