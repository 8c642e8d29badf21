"""Reduces a quantization comparison to figures and their intervals, on plain arrays. No JAX here.

Two models score the same windows of text, so their difference is bootstrapped in pairs: a resample draws
windows with replacement and takes both models' losses on them (Koehn, 2004; Efron and Tibshirani, 1993). A
window, not a token, is drawn, because the losses within one go together. Windows of one document do as well,
so the intervals are a little too narrow where the text has few documents.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from moejax.results.statistics import Interval
from moejax.routing.analysis import load_shares
from moejax.routing.capture import Floats


@dataclass
class Evaluation:
    """Two models compared on a text. An axis of 2 is (free, replayed).

    Attributes:
        nats: float64 `[3, W]`, losses of the next token: full precision, free, replayed.
        kl: float64 `[2, W]`, KL(full precision || quantized) in nats. These three are sums over a window.
        agree: float64 `[2, W]`, tokens with the same likeliest next one.
        flipped: int64 `[2, L]`, tokens whose set of experts differs. Of "replayed": the set that its router
            would have chosen.
        changed: int64 `[2, L]`, assignments that went to an expert which full precision did not choose.
        counts: int64 `[2, L, E]`, assignments: of full precision, of free.
        squared_error, squared_norm: float64 `[L, E]`, of each expert's outputs, summed over its tokens.
        tokens: that were scored.
        document_nats: float64 `[3, W]` as `nats`, of the tokens of each of the text's documents.
    """

    nats: np.ndarray
    kl: np.ndarray
    agree: np.ndarray
    flipped: np.ndarray
    changed: np.ndarray
    counts: np.ndarray
    squared_error: np.ndarray
    squared_norm: np.ndarray
    tokens: int
    document_nats: Mapping[str, np.ndarray] = field(default_factory=dict)


class WindowBootstrap:
    """Intervals of figures that are ratios of sums over windows; every figure sees the same resamples.

    Args:
        tokens: `[W]`, tokens scored in each window.
    """

    def __init__(
        self, tokens: ArrayLike, *, resamples: int = 2000, confidence: float = 0.95, seed: int = 0
    ) -> None:
        self.tokens = np.asarray(tokens, np.float64)
        windows = self.tokens.size
        rng = np.random.default_rng(seed)
        # How often each resample has each window; the first row is the text itself.
        drawn = rng.multinomial(windows, np.full(windows, 1 / windows), size=resamples)
        self.counts = np.concatenate([np.ones((1, windows)), drawn]).astype(np.float64)
        self.scored = self.counts @ self.tokens
        self.confidence = confidence

    def means(self, sums: ArrayLike) -> Floats:
        """Sums over each window's tokens `[W]` → mean over tokens, of the text and of every resample."""
        return (self.counts @ np.asarray(sums, np.float64)) / self.scored

    def interval(self, values: Floats) -> Interval:
        """Returns a figure's interval from the text's value, which comes first, and every resample's."""
        tail = 50.0 * (1.0 - self.confidence)
        low, high = np.percentile(values[1:], (tail, 100.0 - tail))
        return Interval(float(values[0]), float(low), float(high), self.confidence, self.tokens.size)

    def mean(self, sums: ArrayLike) -> Interval:
        """Returns the interval of the mean over tokens."""
        return self.interval(self.means(sums))

    def difference(self, nats: ArrayLike, base: ArrayLike) -> Interval:
        """Returns the interval of a perplexity less the base's."""
        return self.interval(np.exp(self.means(nats)) - np.exp(self.means(base)))

    def ratio(self, nats: ArrayLike, base: ArrayLike) -> Interval:
        """Returns the interval of a perplexity over the base's. One that does not exclude 1 is inside the
        noise."""
        return self.interval(np.exp(self.means(nats) - self.means(base)))

    def loss_ratio(self, nats: ArrayLike, other: ArrayLike, base: ArrayLike) -> Interval | None:
        """Returns the interval of what one method loses against the base over what another loses: below 1 it
        loses less. None where the other's loss is inside the noise, and a ratio to it would be one to
        nothing."""
        if not self.difference(other, base).low > 0:
            return None
        bases = np.exp(self.means(base))
        lost = np.exp(self.means(nats)) - bases
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.interval(lost / (np.exp(self.means(other)) - bases))


def total_variation(counts: ArrayLike, base: ArrayLike) -> Floats:
    """Half the summed difference of two load distributions `[..., E]`: the share of assignments that would
    have to change experts to make one the other; 0 for a layer without assignments."""
    shares = [load_shares(c) for c in (counts, base)]
    return 0.5 * np.abs(shares[0] - shares[1]).sum(-1)


@dataclass(frozen=True)
class PopularityErrors:
    """Errors of experts' outputs against their popularity.

    Attributes:
        error: `[L, E]`, relative L2 error of each expert's output over the tokens routed to it; NaN without
            any, and for dense layers.
        share: `[L, E]` of the layer's assignments, in the text or in the loads given.
        bins: `[Q]`, root mean square of `error` over the experts of each popularity group, rarest first.
        bin_share: `[Q]`, mean share of those experts times E: 1 is an even load.
        correlation: Spearman's, of share and error within layers (both as ranks of their layer); None where
            it is not defined.
        weighted: root mean square of `error` over assignments: Σ share error² in a layer, in the mean over
            layers with experts. What a token meets, where the plain mean is what an expert has. NaN without.
        unmeasured: mean over those layers of the share on experts whose error the text did not measure.
    """

    error: Floats
    share: Floats
    bins: Floats
    bin_share: Floats
    correlation: float | None
    weighted: float = float("nan")
    unmeasured: float = 0.0


def popularity_errors(
    squared_error: ArrayLike,
    squared_norm: ArrayLike,
    counts: ArrayLike,
    num_bins: int,
    loads: ArrayLike | None = None,
) -> PopularityErrors:
    """From sums `[L, E]` over each expert's tokens: the squared error of its outputs, their squared norm, and
    the number of tokens. The experts of each layer are cut into `num_bins` groups by popularity.

    Args:
        loads: `[L, E]`, popularity in place of `counts`, as a routing trace has it.
    """
    wrong, norm, counts = (np.asarray(a, np.float64) for a in (squared_error, squared_norm, counts))
    seen = (counts > 0) & (norm > 0)
    error = np.sqrt(np.divide(wrong, norm, out=np.full_like(wrong, np.nan), where=seen))
    share = load_shares(counts if loads is None else loads)
    groups: list[list[tuple[float, float]]] = [[] for _ in range(min(num_bins, counts.shape[1]))]
    ranks: tuple[list[float], list[float]] = ([], [])
    for layer in range(counts.shape[0]):
        order = [e for e in np.argsort(share[layer], kind="stable") if seen[layer, e]]
        for group, members in zip(groups, np.array_split(np.array(order, int), len(groups)), strict=True):
            group += [(error[layer, e], share[layer, e] * counts.shape[1]) for e in members]
        if len(order) > 1:
            for places, values in zip(ranks, (share, error), strict=True):
                place = stats.rankdata(values[layer, order]) - (len(order) + 1) / 2
                places.extend(place / len(order))
    nothing = (float("nan"), float("nan"))
    table = [np.array(group or [nothing]) for group in groups]
    weighted, unmeasured = _weighted(error, share, seen)
    varied = len(ranks[0]) > 2 and all(np.ptp(r) > 0 for r in ranks)
    return PopularityErrors(
        error,
        share,
        np.array([np.sqrt(np.mean(np.square(part[:, 0]))) for part in table]),
        np.array([np.mean(part[:, 1]) for part in table]),
        float(np.corrcoef(*ranks)[0, 1]) if varied else None,
        weighted,
        unmeasured,
    )


def _weighted(error: Floats, share: Floats, seen: NDArray[np.bool_]) -> tuple[float, float]:
    """`PopularityErrors.weighted` and `unmeasured`."""
    known = np.where(seen, share, 0.0).sum(1)
    squares = (np.where(seen, share, 0.0) * np.nan_to_num(error) ** 2).sum(1)
    measured, loaded = known > 0, share.sum(1) > 0
    if not measured.any():
        return float("nan"), 0.0
    each = squares[measured] / known[measured]
    return float(np.sqrt(each.mean())), float((share.sum(1) - known)[loaded].mean())
