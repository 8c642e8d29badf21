"""A twin of `jax.lax.ragged_all_to_all`, which XLA has on GPU only, for any platform."""

import jax
import jax.numpy as jnp

from moejax.sharding.axes import Names, all_gather, index


def emulated_ragged_all_to_all(
    operand: jax.Array,
    output: jax.Array,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
    *,
    axis_name: Names,
) -> jax.Array:
    """Emulates `jax.lax.ragged_all_to_all`, one slice a device, by all-gathers of everything: runs anywhere.

    Where the sender's and the receiver's sizes differ, which the real one forbids, rows are left out.
    """
    operands = all_gather(operand[None], axis_name)
    tables = all_gather(jnp.stack([input_offsets, send_sizes, output_offsets])[None], axis_name)
    row = jnp.arange(output.shape[0], dtype=jnp.int32)
    for source in range(operands.shape[0]):
        begin, sent, at = tables[source][:, index(axis_name)]
        within = row - at
        here = (within >= 0) & (within < jnp.minimum(sent, recv_sizes[source]))
        output = jnp.where(here[:, None], operands[source][jnp.where(here, begin + within, 0)], output)
    return output
