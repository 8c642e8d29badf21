"""A `shard_map` program with every collective that the engine uses, on all devices; prints what comes out.

Run by `test_distributed` in one process of eight devices and in two of four. Many steps are under way
at once.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.sharding.distributed import (
    agree,
    broadcast,
    initialize_from_environment,
    reserve_cpu_threads,
)

STEPS = 40


def step(x: jax.Array) -> jax.Array:
    """`[8, 16]`, a row a device → the same shape, every value mixed with every other device's.

    On whole numbers below 97, so that every sum is exact and the order of the devices does not show.
    """
    total = jax.lax.psum(x, ("node", "ep"))
    node = jax.lax.all_gather(x, "ep", axis=0, tiled=True)  # [4, 16]
    swapped = jax.lax.all_to_all(x.reshape(8, 2), ("node", "ep"), 0, 0, tiled=True)  # [8, 2]
    part = jax.lax.psum_scatter(node, "ep", scatter_dimension=0, tiled=True)  # [1, 16]
    mixed = total + 3.0 * node[1:2] + 5.0 * swapped.reshape(1, 16) + 7.0 * part
    return jnp.mod(mixed + jax.lax.pmax(mixed.max(), ("node", "ep")), 97.0)


def main() -> None:
    reserve_cpu_threads()
    info = initialize_from_environment()
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("node", "ep"), axis_types=(AxisType.Auto,) * 2)
    spec = P(("node", "ep"))
    run = jax.jit(functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)(step))
    start = np.random.default_rng(0).integers(97, size=(8, 16)).astype(np.float32)
    x = jax.make_array_from_callback(start.shape, NamedSharding(mesh, spec), lambda index: start[index])
    for _ in range(STEPS):
        x = run(x)
    whole = multihost_utils.process_allgather(x, tiled=True)
    agreed = [agree(1000 * info.index + n) for n in range(600)]  # over twice as many as are reclaimed at once
    print(
        json.dumps(
            {
                "index": info.index,
                "count": info.count,
                "local_devices": info.local_devices,
                "devices": len(jax.devices()),
                "agreed": agreed == list(range(600)),
                "text": broadcast(f"from {info.index}"),
                "values": np.asarray(whole).ravel().tolist(),
            }
        )
    )


if __name__ == "__main__":
    main()
