"""Plan of an exchange: which of a device's tokens go to which destination, and where results come back from.

    token                 0   1   2   3
    goes to               a   ab  -   b
    rows, by destination  a: 0 1 | b: 1 3          a token goes once to a destination, in token order

Everything is a running count and searches in it: no scatter, which XLA:CPU does element by element.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Up to this many tokens are searched in one step.
_ONE_BLOCK = 64


class SendPlan(NamedTuple):
    """N tokens to R destinations.

    Attributes:
        dest: int32 `[N, k]`: destination of each assignment, R for none.
        upto: int32 `[R, N]`: rows up to and with token n's for r, those for destinations before r included.
        first: int32 `[R]`: rows for the destinations before r.
        counts: int32 `[R]`: rows for r.
    """

    dest: jax.Array
    upto: jax.Array
    first: jax.Array
    counts: jax.Array


class Homes(NamedTuple):
    """Places of each token's rows, J = min(k, R) at most, by rising destination.

    Attributes:
        rank: int32 `[J, N]`: destination; R where the token has fewer.
        slot: int32 `[J, N]`: place among the rows for that destination.
    """

    rank: jax.Array
    slot: jax.Array


def send_hits(dest: jax.Array, size: int) -> jax.Array:
    """Maps int32 `[N, k]` destinations to bool `[R, N]`: whether a token goes to r."""
    return jnp.any(dest[None] == jnp.arange(size, dtype=jnp.int32)[:, None, None], axis=2)


def send_counts(dest: jax.Array, size: int) -> jax.Array:
    """Maps int32 `[N, k]` destinations to int32 `[R]`: tokens that go to each."""
    return jnp.sum(send_hits(dest, size), axis=1, dtype=jnp.int32)


def plan_sends(dest: jax.Array, size: int) -> SendPlan:
    """Plans sends to int32 `[N, k]` destinations in [0, R], R = `size` for none."""
    hits = send_hits(dest, size)
    upto = jnp.cumsum(hits.reshape(-1), dtype=jnp.int32).reshape(hits.shape)
    ends = upto[:, -1]
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    return SendPlan(dest, upto, first, ends - first)


def tokens_at(plan: SendPlan, rank: jax.Array, slot: jax.Array) -> jax.Array:
    """Returns the token of the row in place `slot` among those for `rank`; any token without such a row.

    The token is the first up to which there are that many rows. Searched in two steps, in the ends of about
    √N blocks of tokens and then within one: a few operations that vectorise, where halving takes log₂ N
    gathers one after another.
    """
    R, N = plan.upto.shape
    rank = jnp.minimum(rank, R - 1)
    ordinal = (plan.first[rank] + slot + 1)[..., None]
    length = N if N <= _ONE_BLOCK else 1 << math.ceil(math.log2(N) / 2)
    blocks = -(-N // length)
    padding = ((0, 0), (0, blocks * length - N))
    upto = jnp.pad(plan.upto, padding, constant_values=jnp.iinfo(jnp.int32).max).reshape(R, blocks, length)
    block = jnp.sum(upto[:, :, -1][rank] < ordinal, axis=-1, dtype=jnp.int32)
    within = jnp.sum(upto[rank, jnp.minimum(block, blocks - 1)] < ordinal, axis=-1, dtype=jnp.int32)
    return jnp.minimum(block * length + within, N - 1)


def homes(plan: SendPlan) -> Homes:
    """Returns the places of each token's rows."""
    (R, N), k = plan.upto.shape, plan.dest.shape[1]
    before = jnp.cumsum(send_hits(plan.dest, R), axis=0, dtype=jnp.int32)
    order = jnp.arange(min(k, R), dtype=jnp.int32)
    # The token's j-th destination is the number of destinations up to which it has at most j.
    rank = jnp.sum(before[None] <= order[:, None, None], axis=1, dtype=jnp.int32)
    token = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[None], rank.shape)
    return Homes(rank, slots(plan, rank, token))


def slots(plan: SendPlan, rank: jax.Array, token: jax.Array) -> jax.Array:
    """Returns a token's place among the rows for a destination it goes to; any number elsewhere."""
    rank = jnp.minimum(rank, plan.first.shape[0] - 1)
    return plan.upto[rank, token] - plan.first[rank] - 1


def overflow(plan: SendPlan, capacity: int) -> jax.Array:
    """Counts each token's assignments, int32 `[N]`, whose row is beyond the `capacity` of its destination."""
    (N, k), R = plan.dest.shape, plan.first.shape[0]
    token = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[:, None], (N, k))
    late = slots(plan, plan.dest, token) >= capacity
    return jnp.sum((plan.dest < R) & late, axis=1, dtype=jnp.int32)


def sum_rows(rows: jax.Array, position: jax.Array, sent: jax.Array) -> jax.Array:
    """Returns the sum of each token's rows, in the order of their destinations, in float32 at least.

    rows `[M, D]`, position int32 and sent bool `[J, N]` → `[N, D]` of the rows' dtype. Rows that were not
    made may hold anything.
    """
    narrow = jnp.issubdtype(rows.dtype, jnp.floating) and rows.dtype.itemsize < 4
    wide = jnp.float32 if narrow else rows.dtype
    total = jnp.zeros((position.shape[1], rows.shape[1]), wide)
    for at, valid in zip(jnp.where(sent, position, 0), sent, strict=True):
        total = total + jnp.where(valid[:, None], rows[at].astype(wide), 0)
    return total.astype(rows.dtype)
