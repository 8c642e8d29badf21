"""Routings for the tests of expert kernels, and which slots of a result are defined."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.group_specs import Groups, lay_out


def patterns(rng: np.random.Generator, tokens: int, k: int, experts: int = 8) -> Iterator[np.ndarray]:
    """For every subset of experts, ids `[tokens, k]` that hit just those; the rest are not here (-1, E)."""
    A = tokens * k
    for subset in range(2**experts):
        hit = np.array([e for e in range(experts) if subset >> e & 1], np.int32)
        some = rng.choice(np.append(hit, [-1, experts]), size=A)
        some[: len(hit)] = hit
        yield rng.permutation(some).reshape(tokens, k).astype(np.int32)


def one_hot(tokens: int, k: int, expert: int) -> np.ndarray:
    """All assignments to one expert."""
    return np.full((tokens, k), expert, np.int32)


def table(groups: Groups, k: int) -> dict[str, np.ndarray]:
    """Arguments of `grouped_swiglu` that describe the groups: slots read tokens."""
    return {
        "rows": (groups.row_assignment // k).astype(np.int32),
        "block_expert": groups.block_expert,
        "num_blocks": groups.num_blocks,
    }


def only_defined(api: Callable[..., Any]) -> Callable[..., Any]:
    """The operation with 0 in the slots whose content is undefined, as its reference has there."""

    def call(
        x: jax.Array, *, rows: jax.Array, num_blocks: jax.Array, block_m: int, **others: Any
    ) -> jax.Array:
        out = api(x=x, rows=rows, num_blocks=num_blocks, block_m=block_m, **others)
        made = (rows >= 0) & (rows < x.shape[0]) & (jnp.arange(len(rows)) < num_blocks[0] * block_m)
        return jnp.where(made[:, None], out, jnp.zeros((), out.dtype))

    return call


__all__ = ["lay_out", "one_hot", "only_defined", "patterns", "table"]
