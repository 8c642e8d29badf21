"""Replicas of hot experts: which physical expert serves an assignment.

A layer with R redundant experts has P = E + R physical ones, dealt out to devices in order. Which of its
experts each of them is can change while the engine runs (`moejax.moe.placement`,
`moejax.engine.routing.rebalance`): the tables are arrays that a step reads, not constants.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.moe.placement import Placement
from moejax.nn.param import ParamSpec, path_name


class Placed(nnx.Variable):
    """A table that the engine writes between two steps; not a weight."""


class ReplicaTable(nnx.Module):
    """`physical` int32 `[E, R + 1]`, each expert's physical ones (repeated to fill), and `count` int32 `[E]`.

    At first expert e is physical e, and the redundant ones are replicas of experts 0, 1, ….
    """

    def __init__(self, num_experts: int, redundant: int) -> None:
        self.num_experts, self.num_physical = num_experts, num_experts + redundant
        table, count = tables(np.arange(num_experts + redundant) % num_experts, num_experts)
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

    def expert_of(self) -> np.ndarray:
        """Returns int32 `[P]`: the expert that each physical one is."""
        table, count = np.asarray(self.physical[...]), np.asarray(self.count[...])
        experts = np.zeros(self.num_physical, np.int32)
        for expert in range(self.num_experts):
            experts[table[expert, : count[expert]]] = expert
        return experts


def tables(expert_of: np.ndarray, num_experts: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns `ReplicaTable`'s tables for the expert in each place, int `[P]`; every expert must be there."""
    placement = Placement(expert_of[None], num_experts, 1)
    table, count = placement.logical_to_physical(len(expert_of) - num_experts + 1)[0], placement.replicas[0]
    turn = np.arange(table.shape[1])[None, :] % count[:, None]
    return np.take_along_axis(table, turn, axis=1), count


def held_experts(model: nnx.Module) -> dict[str, list[int]] | None:
    """Returns, by dotted path, the expert in each place, of every stacked tensor that does not hold each once
    and in order; None if all do."""
    ids: dict[str, list[int]] = {}
    for path, node in nnx.iter_graph(model):
        if isinstance(node, ReplicaTable):
            experts = node.expert_of().tolist()
            if experts != list(range(node.num_experts)):
                layer = path_name(path[:-1])
                names = [f"{part}_{kind}" for part in ("gate", "up", "down") for kind in ("proj", "bias")]
                ids |= {f"{layer}.experts.{name}": experts for name in names}
    return ids or None
