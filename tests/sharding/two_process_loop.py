"""Sums over all devices for ever, or until told: `python two_process_loop.py [fail|exit INDEX CODE]`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moejax.sharding.distributed import initialize_from_environment


def main() -> None:
    info = initialize_from_environment()
    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    run = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x, "x") * 0.1, mesh=mesh, in_specs=P("x"), out_specs=P())
    )
    ones = np.ones(len(jax.devices()), np.float32)
    x = jax.make_array_from_callback(
        ones.shape, NamedSharding(mesh, P("x")), lambda index: jnp.asarray(ones[index])
    )
    for number in range(100_000):
        run(x).block_until_ready()
        if number == 5:
            print("looping", flush=True)
        if number == 20 and sys.argv[1:2] == ["fail"] and info.index == int(sys.argv[2]):
            raise ValueError("on purpose")


if __name__ == "__main__":
    main()
