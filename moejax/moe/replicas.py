"""Replicas of hot experts: which physical expert serves an assignment.

A layer with R redundant experts has P = E + R physical ones. Which of its experts each of them is can change
while the engine runs (`moejax.moe.placement`), so the tables are arrays that a step reads, not constants.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.nn.param import ParamSpec


class Placed(nnx.Variable):
    """An integer table that placement writes; not a weight."""


class ReplicaTable(nnx.Module):
    """`physical` int32 `[E, R + 1]`, each expert's physical ones (repeated to fill), and `count` int32 `[E]`.

    At first expert e is physical e, and the redundant ones are replicas of experts 0, 1, ….
    """

    def __init__(self, num_experts: int, redundant: int) -> None:
        E, R = num_experts, redundant
        self.num_experts, self.num_physical = E, E + R
        table, count = tables(np.concatenate([np.arange(E), np.arange(R) % E]), E)
        self.physical = Placed(jnp.asarray(table), spec=ParamSpec(table.shape, (None, None), jnp.int32))
        self.count = Placed(jnp.asarray(count), spec=ParamSpec(count.shape, (None,), jnp.int32))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Experts int32 `[N, k]`, E for none → physical experts, P for none.

        A token's place in the batch picks the replica, so that they share the load evenly.
        """
        inside = jnp.minimum(ids, self.num_experts - 1)
        turn = jnp.arange(ids.shape[0], dtype=jnp.int32)[:, None]
        physical = self.physical[...][inside, turn % self.count[...][inside]]
        return jnp.where(ids < self.num_experts, physical, self.num_physical)


def tables(expert_of: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Each physical expert's expert, int `[P]` → `ReplicaTable`'s two tables. Every expert must be there."""
    P = len(expert_of)
    table = np.zeros((num_experts, P - num_experts + 1), np.int32)
    count = np.zeros(num_experts, np.int32)
    for expert in range(num_experts):
        mine = np.flatnonzero(expert_of == expert)
        table[expert] = np.resize(mine, table.shape[1])
        count[expert] = len(mine)
    return table, count
