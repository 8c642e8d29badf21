"""Exchange of tokens by `jax.lax.ragged_all_to_all`: exactly the rows there are, wherever they fit.

XLA has it on GPU only.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.moe.exchange_hops import Hop, Part, Run
from moejax.moe.exchange_pack import pack, unpack
from moejax.moe.exchange_plan import homes, plan_sends, sum_rows, tokens_at
from moejax.sharding.axes import all_gather, index


class Offsets(NamedTuple):
    """Arguments of one `ragged_all_to_all`, int32 `[R]` each, in its order.

    Attributes:
        input_offsets: where the rows for r begin in this device's operand.
        send_sizes: how many they are.
        output_offsets: where they go in r's output.
        recv_sizes: how many come from r.
    """

    input_offsets: jax.Array
    send_sizes: jax.Array
    output_offsets: jax.Array
    recv_sizes: jax.Array


def plan_ragged(sizes: jax.Array, me: jax.Array) -> tuple[Offsets, Offsets]:
    """Returns the way there and the way back of device `me`, from sizes int32 `[R, R]`: rows from s to d.

    A source's rows are sorted by destination, a destination's by source, both without gaps.
    """
    by_source = jnp.cumsum(sizes, axis=0) - sizes  # where s's rows begin at d
    by_destination = jnp.cumsum(sizes, axis=1) - sizes  # where the rows for d begin at s
    there = Offsets(by_destination[me], sizes[me], by_source[me], sizes[:, me])
    back = Offsets(by_source[:, me], sizes[:, me], by_destination[:, me], sizes[me])
    return there, back


def exchange_ragged(
    part: Part, hop: Hop, run: Run, overlapped: Callable[[Part], jax.Array] | None
) -> jax.Array:
    """Results `[N, D]`; nothing is dropped.

    Memory: at worst all tokens come here, so `run` gets R·N rows whatever their number; with their results
    that is R·N · (2·D·itemsize + 8·k) bytes, and min(k, R)·N rows each of the sent and the returned ones.
    """
    (N, D), k, R = part.x.shape, part.ids.shape[1], hop.size
    plan = plan_sends(part.ids // hop.experts_per_rank, R)
    sizes = all_gather(plan.counts[None], hop.names)
    there, back = plan_ragged(sizes, index(hop.names))

    row = jnp.arange(min(k, R) * N, dtype=jnp.int32)
    rank = jnp.sum(row[:, None] >= (plan.first + plan.counts)[None], axis=1, dtype=jnp.int32)
    token = tokens_at(plan, rank, row - plan.first[jnp.minimum(rank, R - 1)])
    mine = plan.dest[token] == rank[:, None]
    ids = jnp.where(mine, part.ids[token] - (rank * hop.experts_per_rank)[:, None], hop.experts_per_rank)
    weights = jnp.where(mine, part.weights[token], 0.0)
    words = pack(part.x[token], ids, weights)
    space = jnp.zeros((R * N, words.shape[1]), words.dtype)
    words = jax.lax.ragged_all_to_all(words, space, *there, axis_name=hop.names)

    x, ids, weights = unpack(words, (D, part.x.dtype), (k, jnp.int32), (k, jnp.float32))
    filled = (jnp.arange(R * N, dtype=jnp.int32) < jnp.sum(there.recv_sizes))[:, None]
    rows = run(x, jnp.where(filled, ids, hop.experts_per_rank), jnp.where(filled, weights, 0.0))
    words = pack(rows)
    space = jnp.zeros((row.shape[0], words.shape[1]), words.dtype)
    words = jax.lax.ragged_all_to_all(words, space, *back, axis_name=hop.names)

    home = homes(plan)
    position = plan.first[jnp.minimum(home.rank, R - 1)] + home.slot
    out = sum_rows(unpack(words, (rows.shape[1], rows.dtype))[0], position, home.rank < R)
    return out if overlapped is None else out + overlapped(part)
