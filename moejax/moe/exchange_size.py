"""Capacity that an exchange of tokens needs, and bytes that it moves. Plain numbers, no JAX.

A device has N tokens (rows of `hidden` elements), each with k experts, and R expert ranks exchange them.
Bytes are those that a device sends to the others, every pair exchanging directly; what stays at home is not
counted. A row on its way to experts takes its k ids and k weights along (4 bytes each).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

# Capacity for a pair of ranks comes in blocks of this many rows, as the experts' products do.
BLOCK_ROWS = 8
# Buckets at most: each is one more copy of the experts' program to compile.
MOST_BUCKETS = 4


class HopSize(NamedTuple):
    """One all-to-all of an exchange.

    Attributes:
        size: devices that take part.
        experts_per_rank: experts behind each of them, itself and, if the hop is between nodes, its node's
        other devices.
    """

    size: int
    experts_per_rank: int


def share(top_k: int, experts_per_rank: int, num_experts: int) -> float:
    """Returns the probability that one of a token's k experts is among `experts_per_rank` given ones, if all
    choices of k different experts are equally likely."""
    if top_k > num_experts - experts_per_rank:
        return 1.0
    return 1.0 - math.comb(num_experts - experts_per_rank, top_k) / math.comb(num_experts, top_k)


def mean_rows(tokens: int, top_k: int, hops: Sequence[HopSize]) -> list[float]:
    """Counts the rows that a device sends another on each hop, in the mean of evenly spread choices.

    After a hop a device holds what its G partners sent it: rows of G·N tokens.
    """
    num_experts, rows, means = hops[0].size * hops[0].experts_per_rank, tokens, []
    for hop in hops:
        means.append(rows * share(top_k, hop.experts_per_rank, num_experts))
        rows *= hop.size
    return means


def most_rows(tokens: int, hops: Sequence[HopSize]) -> list[int]:
    """Counts the rows that a device can have to send another on each hop: all that it holds."""
    return [tokens * math.prod(hop.size for hop in hops[:number]) for number in range(len(hops))]


def fixed_capacities(tokens: int, top_k: int, hops: Sequence[HopSize], capacity: float) -> tuple[int, ...]:
    """Counts the rows between two devices on each hop: ceil(capacity · mean), at least 1, at most all."""
    means, capacities, rows = mean_rows(tokens, top_k, hops), [], tokens
    for hop, mean in zip(hops, means, strict=True):
        capacities.append(min(rows, max(1, math.ceil(capacity * mean))))
        rows = hop.size * capacities[-1]
    return tuple(capacities)


def capacity_buckets(tokens: int, top_k: int, hops: Sequence[HopSize]) -> list[tuple[int, ...]]:
    """Choices of the rows between a pair of devices, one number a hop, rising to where nothing can be lost.

    The first holds an even spread: the mean and four standard deviations of a binomial, in whole blocks. The
    others follow in even ratios of about 2, `MOST_BUCKETS` in all. Few tokens need one bucket only.
    """
    most = most_rows(tokens, hops)
    first = []
    for top, mean in zip(most, mean_rows(tokens, top_k, hops), strict=True):
        first.append(min(top, _blocks(mean + 4 * math.sqrt(mean * (1 - mean / top)))))
    ratio = max(top / low for top, low in zip(most, first, strict=True))
    steps = min(MOST_BUCKETS - 1, math.ceil(math.log2(ratio)))
    buckets: list[tuple[int, ...]] = []
    for step in range(steps + 1):
        capacities: list[int] = []
        for number, (low, top) in enumerate(zip(first, most, strict=True)):
            rows = top if step == steps else min(top, _blocks(low * (top / low) ** (step / steps)))
            # Not more than what the hop before it brings.
            capacities.append(min(rows, hops[number - 1].size * capacities[-1]) if capacities else rows)
        if tuple(capacities) not in buckets:
            buckets.append(tuple(capacities))
    return buckets


def _blocks(rows: float) -> int:
    """Rounds rows up to whole blocks."""
    return BLOCK_ROWS * max(1, math.ceil(rows / BLOCK_ROWS))


def exchanged_bytes(rows: int, ranks: int, hidden: int, itemsize: int, top_k: int) -> int:
    """Returns the bytes of `rows` from a device to each other of `ranks`, with their ids and weights, and of
    their results back.

    The rows are all N tokens under an all-gather, a bucket under an all-to-all or one hop of two; with a
    capacity the way back between nodes has 4 bytes more a row (`exchange_hops`).
    """
    return (ranks - 1) * rows * (2 * hidden * itemsize + 8 * top_k)
