"""JAX's non-public parts that `moejax.sharding` uses; tried with JAX 0.10.2, 0.11 and 0.12."""

from typing import Any

import jax


def coordination_client() -> Any:
    """Returns the client of JAX's coordination service: a key-value store that all processes share.

    JAX exports `jax.distributed.initialize` and nothing that reaches what it has made.
    """
    from jax._src import distributed

    return distributed.global_state.client


def slurm_coordinator() -> str:
    """Returns HOST:PORT on the job's first node, the same in every task, by JAX's own detection.

    `jax.distributed.initialize()` alone would use it too, but would also hide all GPUs but one from each
    task, even where a task has a whole node.
    """
    from jax._src.clusters.slurm_cluster import SlurmCluster

    return str(SlurmCluster.get_coordinator_address(None, None))


def compiles_only(device: jax.Device) -> bool:
    """Tells whether programs can be compiled for a device that is not here, and nothing can run on it."""
    return type(device.client).__name__ == "CompileOnlyPyClient"
