"""Statistics of a routing trace's experts: loads and their skew, bursts, who goes with whom. Numpy only.

How soon experts are visited again is `moejax.routing.locality`, what two traces differ in
`moejax.routing.difference`. R rows (tokens), L layers, E experts, k visited by a
token. Where no expert ran (id E) nothing is counted.
"""

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from moejax.core.errors import ConfigError
from moejax.routing.capture import Floats, Ints, RoutingCapture, count_experts

PHASES = ("prefill", "decode")
TOP_SHARE = 0.1
"""Part of the experts whose share of the load is the skew's `top_share`."""

_CHUNK = 1 << 16
_TABLES = 10


class Skew(NamedTuple):
    """Unevenness of loads `[..., E]`; each float64 `[...]`, NaN where there is no load.

    Attributes:
        max_over_mean: 1 is even, E the worst; what a step waits for where each expert is a device's.
        entropy_bits: Shannon's, -Σ p log2 p; log2 E is even.
        entropy: the same over log2 E, so that 1 is even; 1 for a single expert.
        gini: Gini's coefficient, the mean absolute difference of two experts' loads over twice the mean: 0 is
            even, 1 - 1/E the worst.
        top_share: share of the load on the most loaded tenth of the experts (at least one).
    """

    max_over_mean: Floats
    entropy_bits: Floats
    entropy: Floats
    gini: Floats
    top_share: Floats


def loads_of(capture: RoutingCapture, num_layers: int) -> Ints:
    """Returns loads int64 `[num_layers, E]`, a row for every layer of the model, zeros where it is dense.

    What `LLM.rebalance` and other places want that count all layers.

    Raises:
        ConfigError: the trace has a layer beyond that number.
    """
    if max(capture.layers) >= num_layers:
        raise ConfigError(
            f"routing trace: it has layer {max(capture.layers)}, and the model has {num_layers} layers"
        )
    loads = np.zeros((num_layers, capture.num_experts), np.int64)
    loads[list(capture.layers)] = capture.counts()
    return loads


def load_shares(loads: ArrayLike, no_load: float = 0.0) -> Floats:
    """Returns each expert's share of its layer's load `[..., E]`: 1/E if even, `no_load` without any."""
    values = np.asarray(loads, np.float64)
    total = values.sum(-1, keepdims=True)
    return np.divide(values, total, out=np.full_like(values, no_load), where=total > 0)


def skew(counts: ArrayLike) -> Skew:
    """Returns the skew of loads `[..., E]`, all >= 0."""
    share = load_shares(counts, np.nan)
    E = share.shape[-1]
    bits = -(share * np.log2(share, out=np.zeros_like(share), where=share > 0)).sum(-1)
    rising = np.sort(share, axis=-1)
    # The mean absolute difference, by ranks: Σ (2 i - E - 1) x_i / (E Σ x), i from 1.
    gini = ((2 * np.arange(1, E + 1) - E - 1) * rising).sum(-1) / E
    top = max(1, round(TOP_SHARE * E))
    even = np.log2(E) if E > 1 else 1.0
    return Skew(
        share.max(-1) * E,
        bits + 0.0,
        bits / even if E > 1 else share[..., 0],
        gini,
        rising[..., E - top :].sum(-1),
    )


def zipf_exponent(counts: ArrayLike) -> Floats:
    """Returns float64 `[...]`: the exponent of Zipf's law that makes the loads `[..., E]`, ranked, likeliest.

    Where the mean of log rank under p_i ∝ i^-s is the observed one (maximum likelihood; least squares through
    a log-log plot is biased: Clauset, Shalizi and Newman, 2009, appendix A). Ranking noise makes an even load
    come out a little above 0. NaN without load; at most 20.
    """
    loads = -np.sort(-np.asarray(counts, np.float64), axis=-1)
    logs = np.log(np.arange(1, loads.shape[-1] + 1))
    total = loads.sum(-1)
    seen = np.divide((loads * logs).sum(-1), total, out=np.full(total.shape, np.nan), where=total > 0)
    low, high = np.zeros_like(seen), np.full_like(seen, 20.0)
    for _ in range(50):
        middle = (low + high) / 2
        law = np.exp(-middle[..., None] * logs)
        steep = (law * logs).sum(-1) / law.sum(-1) > seen
        low, high = np.where(steep, middle, low), np.where(steep, high, middle)
    return np.where(np.isnan(seen), np.nan, (low + high) / 2)


# -- over time -----------------------------------------------------------------------------------------------


def load_over_time(capture: RoutingCapture, windows: int = 64) -> tuple[Ints, Ints]:
    """Returns the loads of consecutive parts of the trace.

    Args:
        windows: at most; each has as nearly the same number of steps.

    Returns:
        int64 `[W, L, E]` assignments, and int64 `[W]`, each window's first step (numbered from 0).

    Raises:
        ConfigError: the trace has no rows.
    """
    capture.require_rows()
    starts = capture.step_starts
    parts = min(windows, len(starts))
    edges = np.linspace(0, len(starts), parts + 1).round().astype(np.int64)
    rows = np.append(starts, capture.num_rows)[edges]
    loads = [
        count_experts(capture.ids[first:last], capture.num_experts)
        for first, last in itertools.pairwise(rows.tolist())
    ]
    return np.stack(loads), edges[:-1]


def burstiness(capture: RoutingCapture, windows: int = 32) -> Floats:
    """Returns float64 `[L]`: how much more the experts' loads differ from window to window than by chance.

    Pearson's statistic of homogeneity over what it is in the mean for independent tokens of a popularity that
    stands still, an index of dispersion: Σ_w Σ_e (n_we - N_w p_e)² / (N_w p_e) / ((W - 1)(E - k)), where the
    windows w of `load_over_time` have N_w assignments and the whole trace a share p_e on expert e; E - k and
    not E - 1, because the k experts of a token differ. So 1 is chance; it is many times that in bursts, and
    above it also where the tokens of a sequence resemble each other. NaN with fewer than two windows, or
    without k + 1 loaded experts.
    """
    loads, _ = load_over_time(capture, windows)
    counts = loads.astype(np.float64)
    each = counts.sum(2, keepdims=True)
    share = counts.sum(0) / np.maximum(counts.sum((0, 2))[:, None], 1)
    expected = each * share
    terms = np.divide((counts - expected) ** 2, expected, out=np.zeros_like(counts), where=expected > 0)
    freedom = ((each[:, :, 0] > 0).sum(0) - 1) * ((share > 0).sum(1) - capture.top_k)
    return np.divide(terms.sum((0, 2)), freedom, out=np.full(len(freedom), np.nan), where=freedom > 0)


# -- who goes with whom --------------------------------------------------------------------------------------


def co_activation(capture: RoutingCapture, layer: int) -> Ints:
    """Counts tokens that visit both experts of a layer, int64 `[E, E]`; on the diagonal, the one.

    Raises:
        ConfigError: the trace does not have the layer.
    """
    E, at = capture.num_experts, capture.layer_index(layer)
    pairs = np.zeros((E, E), np.int64)
    for first in range(0, capture.num_rows, _CHUNK):
        ids = capture.ids[first : first + _CHUNK, at].astype(np.int64)
        visited = np.zeros((len(ids), E + 1), np.float32)
        np.put_along_axis(visited, ids, np.float32(1), axis=1)
        # Sums of at most 2^16 ones are exact in float32.
        pairs += (visited[:, :E].T @ visited[:, :E]).astype(np.int64)
    return pairs


def co_activation_lift(counts: ArrayLike) -> Floats:
    """Returns, float64 `[E, E]`, how many times as often two experts meet as popularity alone would have it.

    The expected numbers are a_i a_j with the a for which every expert meets others as often as it did:
    independence but for an expert never meeting itself (quasi-independence; Goodman, 1968). Against plain
    n_i n_j / R even choices that are as independent as can be come out below 1, at (k - 1) E / (k (E - 1)).
    NaN on the diagonal, and for experts that meet no other.

    Args:
        counts: `co_activation`'s.
    """
    met = np.array(counts, np.float64)
    np.fill_diagonal(met, 0.0)
    margin = met.sum(1)
    total = margin.sum()
    a = margin / np.sqrt(total) if total else margin
    for _ in range(200):
        rest = a.sum() - a
        ratio = np.divide(margin, rest, out=np.zeros_like(a), where=rest > 0)
        a = np.sqrt(a * ratio)
    expected = np.outer(a, a)
    np.fill_diagonal(expected, 0.0)
    return np.divide(met, expected, out=np.full_like(met, np.nan), where=expected > 0)


def transition(capture: RoutingCapture, layer: int, *, visited: bool = False) -> Ints:
    """Returns int64 `[E, E]`: tokens whose likeliest expert is one (row) in a layer and the other (column) in
    the next layer with experts. Each token counts once. With `visited` others have no row and no column.

    Raises:
        ConfigError: the trace does not have the layer, or none after it.
    """
    at = capture.layer_index(layer)
    if at + 1 == len(capture.layers):
        raise ConfigError(f"routing trace: layer {layer} is its last, so no layer follows it")
    E = capture.num_experts
    first, second = (capture.ids[:, i, 0].astype(np.int64) for i in (at, at + 1))
    routed = (first < E) & (second < E)
    first, second = first[routed], second[routed]
    rows = columns = E
    if visited:
        (one, first), (two, second) = (np.unique(ids, return_inverse=True) for ids in (first, second))
        rows, columns = len(one), len(two)
    return np.bincount(first * columns + second, minlength=rows * columns).reshape(rows, columns)


def mutual_information(table: ArrayLike) -> float:
    """Bits that row and column of a table of counts `[A, B]` tell of each other, at least 0.

    The plug-in estimate less what it is in the mean of tables with the same margins and no dependence, which
    is far from 0 where there are few counts to a cell (Vinh, Epps and Bailey, 2010, adjust by the same; here
    from `_TABLES` random tables of a fixed seed, Patefield, 1981). The counts should be of independent pairs,
    as `transition`'s are.
    """
    from scipy.stats import random_table  # half a second, which only this needs

    counts = np.asarray(table, np.int64)
    counts = counts[counts.sum(1) > 0][:, counts.sum(0) > 0]
    if min(counts.shape) < 2:
        return 0.0
    law = random_table(counts.sum(1), counts.sum(0), seed=np.random.default_rng(0))
    chance = np.mean([_plain_information(drawn) for drawn in law.rvs(_TABLES, method="patefield")])
    return max(0.0, _plain_information(counts) - float(chance))


def _plain_information(counts: NDArray[np.integer]) -> float:
    """Returns the entropy in bits of the shares as they are."""
    joint = counts / counts.sum()
    seen = joint > 0
    apart = np.outer(joint.sum(1), joint.sum(0))
    return float((joint[seen] * np.log2(joint[seen] / apart[seen])).sum())
