"""Exchange of tokens by all-to-alls of equal parts: in one hop over all expert ranks, or first between nodes.

A hop sends each token once to each destination that holds any of its experts, in a buffer `[R, C, …]` with
capacity for C rows a pair; the destination's one result row travels back through the same places. A two-hop
exchange is a hop whose "experts" are the second hop, whose tokens are in the order of their source node, then
of their token there (two hops: Rajbhandari et al., DeepSpeed-MoE, arXiv 2201.05596; once a node: DeepSeek-V3,
arXiv 2412.19437, section 3.2.2).

    there  node hop    to the device of the same local rank on each node with any of the token's experts
           local hop   from there to the node's devices that have them
    back   local hop   results are summed over the node's devices: one row a token leaves the node
           node hop    and summed over nodes at home

C is chosen while the program runs, among a few sizes (`exchange_size.capacity_buckets`): the least that holds
the greatest number of rows between any pair of devices. All devices agree on it, so that collectives may
stand in the branches.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.moe.exchange_pack import pack, unpack
from moejax.moe.exchange_plan import SendPlan, homes, overflow, plan_sends, send_counts, sum_rows, tokens_at
from moejax.moe.exchange_size import HopSize, capacity_buckets, fixed_capacities
from moejax.sharding.axes import Axes, Names, all_to_all, pmax, psum

Run = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class Part(NamedTuple):
    """Tokens that travel together: x `[N, D]`, ids int32 and weights float32 `[N, k]`."""

    x: jax.Array
    ids: jax.Array
    weights: jax.Array


class Hop(NamedTuple):
    """An all-to-all over the axes `names`; `size` and `experts_per_rank` as in `HopSize`."""

    names: Names
    size: int
    experts_per_rank: int


def make_hops(axes: Axes, num_local: int, nodes_first: bool) -> list[Hop]:
    """Returns one hop, or with `nodes_first` two where the expert axis has both a node and a local part."""
    if not nodes_first or not axes.node or not axes.local:
        return [Hop(axes.exchange, axes.size(axes.exchange), num_local)]
    local = axes.size(axes.local)
    return [Hop(axes.node, axes.size(axes.node), local * num_local), Hop(axes.local, local, num_local)]


def exchange_hops(
    parts: Sequence[Part],
    hops: Sequence[Hop],
    run: Run,
    overlapped: Callable[[Part], jax.Array] | None,
    capacity: float | None,
) -> tuple[list[jax.Array], jax.Array]:
    """Returns every part's results `[N, D]`, and the number of assignments beyond the capacity, int32.

    Parts do not wait for each other: all stand in one branch, with capacity for the fullest. `overlapped` is
    computed there too, and added. Without a capacity `run` is traced once for each bucket.
    """
    tokens, top_k = max(part.x.shape[0] for part in parts), parts[0].ids.shape[1]
    plans = [plan_sends(part.ids // hops[0].experts_per_rank, hops[0].size) for part in parts]
    sizes = [HopSize(hop.size, hop.experts_per_rank) for hop in hops]
    buckets = (
        [fixed_capacities(tokens, top_k, sizes, capacity)]
        if capacity
        else capacity_buckets(tokens, top_k, sizes)
    )

    def exchange(capacities: tuple[int, ...]) -> tuple[list[jax.Array], jax.Array]:
        outs, dropped = [], jnp.zeros((), jnp.int32)
        for part, plan in zip(parts, plans, strict=True):
            out, lost = _through(part, plan, hops, capacities, run, capacity is not None)
            outs.append(out if overlapped is None else out + overlapped(part))
            dropped = dropped if lost is None else dropped + jnp.sum(lost)
        return outs, dropped

    if len(buckets) == 1:
        return exchange(buckets[0])
    bucket = _bucket(parts, plans, hops, buckets)
    return jax.lax.switch(
        bucket, [lambda capacities=capacities: exchange(capacities) for capacities in buckets]
    )


def _bucket(
    parts: Sequence[Part], plans: Sequence[SendPlan], hops: Sequence[Hop], buckets: Sequence[tuple[int, ...]]
) -> jax.Array:
    """Returns the lowest bucket, int32, that holds all rows of all devices, the same on all of them."""
    needs = [jnp.max(jnp.stack([plan.counts for plan in plans]))]
    if len(hops) == 2:
        # The rows of a device's second hop are those that its partners on all nodes have for a rank.
        nodes, local = hops
        ranks = nodes.size * local.size
        counts = jnp.stack([send_counts(part.ids // local.experts_per_rank, ranks) for part in parts])
        needs.append(jnp.max(psum(counts, nodes.names)))
    short = [
        need > jnp.asarray(capacities, jnp.int32)
        for need, capacities in zip(needs, zip(*buckets, strict=True), strict=True)
    ]
    # Buckets rise, so those that are too low for one hop or the other are the first few.
    bucket = jnp.sum(jnp.any(jnp.stack(short), axis=0), dtype=jnp.int32)
    return pmax(bucket, tuple(name for hop in hops for name in hop.names))


def _through(
    part: Part, plan: SendPlan, hops: Sequence[Hop], capacities: tuple[int, ...], run: Run, lossy: bool
) -> tuple[jax.Array, jax.Array | None]:
    """Returns results `[N, D]`, and if `lossy` each token's assignments beyond the capacity, int32 `[N]`."""
    hop, capacity = hops[0], capacities[0]
    arrived = _send(part, plan, hop, capacity)
    lost: jax.Array | None = None
    if hops[1:]:
        further = plan_sends(arrived.ids // hops[1].experts_per_rank, hops[1].size)
        rows, lost = _through(arrived, further, hops[1:], capacities[1:], run, lossy)
    else:
        rows = run(*arrived)
    fields = [rows] if lost is None else [rows, lost[:, None]]
    words = pack(*fields)
    back = all_to_all(words.reshape(hop.size, capacity, -1), hop.names).reshape(words.shape)
    returned = unpack(back, *((field.shape[1], field.dtype) for field in fields))

    home = homes(plan)
    sent, position = (home.rank < hop.size) & (home.slot < capacity), home.rank * capacity + home.slot
    out = sum_rows(returned[0], position, sent)
    if not lossy:
        return out, None
    late = overflow(plan, capacity)
    return out, late if lost is None else late + sum_rows(returned[1], position, sent)[:, 0]


def _send(part: Part, plan: SendPlan, hop: Hop, capacity: int) -> Part:
    """Sends rows; returns what this device receives, `[R·C, …]`, ids of its own numbering, `experts_per_rank`
    for none."""
    (_, D), k = part.x.shape, part.ids.shape[1]
    slot, rank = jnp.arange(capacity, dtype=jnp.int32), jnp.arange(hop.size, dtype=jnp.int32)
    token = tokens_at(plan, *jnp.broadcast_arrays(rank[:, None], slot[None]))  # [R, C]
    filled = slot[None] < plan.counts[:, None]
    visits = (plan.dest[token] == rank[:, None, None]) & filled[:, :, None]
    ids = jnp.where(
        visits, part.ids[token] - (rank * hop.experts_per_rank)[:, None, None], hop.experts_per_rank
    )
    weights = jnp.where(visits, part.weights[token], 0.0)
    words = all_to_all(pack(part.x[token], ids, weights), hop.names)
    words = words.reshape(hop.size * capacity, -1)
    return Part(*unpack(words, (D, part.x.dtype), (k, jnp.int32), (k, jnp.float32)))
