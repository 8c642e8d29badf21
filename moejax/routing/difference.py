"""Differences of two routing traces of one shape. Numpy only."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from moejax.core.errors import ConfigError
from moejax.routing.analysis import load_shares
from moejax.routing.capture import Floats, Ints, RoutingCapture, in_words

_CHUNK = 1 << 14


class TraceComparison(NamedTuple):
    """Two traces side by side. L layers.

    Attributes:
        divergence: float64 `[L]`, `js_divergence` of the loads.
        matched: tokens that both have: the same sample's same position in a request with the same prompt.
        flips: float64 `[L]`: share of the matched whose set of experts differs; NaN without any.
        overlap: float64 `[L]`: share of a matched token's experts that the other trace has too, in the mean.
    """

    divergence: Floats
    matched: int
    flips: Floats
    overlap: Floats


def js_divergence(one: ArrayLike, other: ArrayLike) -> Floats:
    """Returns float64 `[...]`: Jensen-Shannon divergence of two loads `[..., E]` in bits (Lin, 1991): 0 for
    the same distribution, 1 for two that share no expert; NaN where one has no load."""
    shares = [load_shares(loads, np.nan) for loads in (one, other)]
    middle = (shares[0] + shares[1]) / 2
    bits = [(p * np.log2(np.divide(p, middle, out=np.ones_like(p), where=p > 0))).sum(-1) for p in shares]
    return np.clip((bits[0] + bits[1]) / 2, 0.0, 1.0)


def compare_captures(one: RoutingCapture, other: RoutingCapture) -> TraceComparison:
    """Compares loads, and token by token where both computed the same token.

    Requests belong together by their prompts' hashes, the n-th with a hash to the n-th; generated ones, which
    have none, by their order.

    Raises:
        ConfigError: other layers or numbers of experts.
    """
    for what, first, second in (
        ("layers with experts", one.layers, other.layers),
        ("experts", one.num_experts, other.num_experts),
        ("experts per token", one.top_k, other.top_k),
    ):
        if first != second:
            raise ConfigError(
                f"routing traces cannot be compared: the first has {in_words(first)} {what}, the second"
                f" {in_words(second)}"
            )
    mine, theirs = _matching_rows(one, other)
    L, E = len(one.layers), one.num_experts
    differ, shared, visits = np.zeros(L, np.int64), np.zeros(L, np.int64), np.zeros(L, np.int64)
    for first in range(0, len(mine), _CHUNK):
        part = slice(first, first + _CHUNK)
        a, b = one.ids[mine[part]], other.ids[theirs[part]]
        differ += (np.sort(a, -1) != np.sort(b, -1)).any(-1).sum(0)
        real = a < E
        shared += ((a[..., :, None] == b[..., None, :]).any(-1) & real).sum((0, 2))
        visits += real.sum((0, 2))
    nothing = np.full(L, np.nan)
    return TraceComparison(
        js_divergence(one.counts(), other.counts()),
        len(mine),
        differ / len(mine) if len(mine) else nothing,
        np.divide(shared, visits, out=nothing.copy(), where=visits > 0),
    )


def _matching_rows(one: RoutingCapture, other: RoutingCapture) -> tuple[Ints, Ints]:
    """Returns the rows of both that are the same token; of a token computed twice the first computation."""
    names = ([request.prompt_hash for request in capture.requests] for capture in (one, other))
    mine, theirs = map(numbered, names)
    place = {key: number for number, key in enumerate(mine)}
    to_mine = np.array([place.get(key, -1) for key in theirs], np.int64)
    rows = np.flatnonzero(to_mine[other.request] >= 0) if len(theirs) else np.zeros(0, np.int64)
    tables = [
        (one.request.astype(np.int64), one.sample, one.position),
        (to_mine[other.request[rows]], other.sample[rows], other.position[rows]),
    ]
    spans = [1 + max(int(t[i].max(initial=0)) for t in tables) for i in (1, 2)]
    keys = [(t[0] * spans[0] + t[1]) * spans[1] + t[2] for t in tables]
    _, first, second = np.intersect1d(keys[0], keys[1], return_indices=True)
    return first, rows[second]


def numbered(names: Iterable[str]) -> list[tuple[str, int]]:
    """Returns each name with how many before are the same."""
    seen: Counter[str] = Counter()
    keys = []
    for name in names:
        keys.append((name, seen[name]))
        seen[name] += 1
    return keys
