"""Statistics of one stage: of all that is to be calibrated there, the experts' a bounded number at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.core.quant import CalibrationConfig
from moejax.ptq.batches import HiddenStates
from moejax.ptq.observers import Stats, collect, collect_unrouted, of_experts
from moejax.ptq.sites import EXPERTS_HIDDEN, Stage, statistics_of
from moejax.quantization.calibration import SAMPLE_TOKENS, Statistics, cover
from moejax.quantization.rules import Chosen

GRAM_BYTES = 2 << 30
"""Bound on the Gram matrices of experts that are held at a time (GPTQ holds a few copies of them); those of a
single expert are held in any case."""


class StatisticsCollector:
    """Runs the calibration set through a stage of the float model.

    Args:
        batched: called with the share of the calibration set that a pass has seen.

    Attributes:
        plain: statistics over all tokens, by site.
        chunk: experts whose statistics are held at a time; 0 where none are calibrated.
        visits: tokens that each expert has seen, as far as it was looked at; -1 before.
        cold: experts that fell back.
    """

    def __init__(
        self,
        stage: Stage,
        chosen: Mapping[str, Chosen],
        calibration: CalibrationConfig,
        hidden: HiddenStates,
        batched: Callable[[float], None] = lambda share: None,
    ) -> None:
        self._graph, self._state = nnx.split(stage.module)
        self._share = stage.share
        self._calibration, self._hidden, self._batched = calibration, hidden, batched
        self._widths = _widths(stage, chosen)
        self._observers = tuple(
            (site.name, site.observed)
            for site in stage.sites
            if site.name in self._widths and site.name != EXPERTS_HIDDEN
        )
        self._min_tokens = calibration.min_tokens
        if any(c.format.activations == "static" for c in chosen.values()):
            # One scale serves every token to come: an expert without any cannot do without a fallback.
            self._min_tokens = max(self._min_tokens, 1)
        per_expert = of_experts(self._widths).values()
        E = int(stage.params()["moe.experts.down_proj"].shape[0]) if per_expert else 0
        self.num_experts = E
        self.chunk = chunk_of(E, 4 * sum(width**2 for width in per_expert)) if E else 0
        self.visits, self.cold = np.full(E, -1, np.int64), np.zeros(E, bool)
        self._held: tuple[int, Stats] | None = None
        self.plain: Stats = {}

    @property
    def chunks(self) -> list[slice]:
        """Experts of each chunk; none where no expert is calibrated."""
        return [slice(first, first + self.chunk) for first in range(0, self.num_experts, self.chunk or 1)]

    def run(self) -> None:
        """Collects the plain statistics, and those of the first chunk of experts on the way."""
        stats = {name: Statistics.zeros((), self._widths[name]) for name, _ in self._observers}
        stats |= self._empty_experts()
        stats = self._collect(stats, 0, self._observers)
        self.plain = {name: stats[name] for name, _ in self._observers}
        if self.num_experts:
            self._held = 0, self._covered(self.chunks[0], stats)

    def experts(self, part: slice) -> Stats:
        """Returns the statistics of one of the `chunks` after the fallback, by name."""
        if self._held is None or self._held[0] != part.start:
            self._held = None  # before the next ones take memory
            stats = self._collect(self._empty_experts(), part.start, ())
            self._held = part.start, self._covered(part, stats)
        return self._held[1]

    def _empty_experts(self) -> Stats:
        widths = of_experts(self._widths)
        return {name: Statistics.zeros((self.chunk,), width) for name, width in widths.items()}

    def _collect(self, stats: Stats, first: int, observers: Any) -> Stats:
        for batch in self._hidden.batches():
            inputs = batch.x, batch.valid, self._share, jnp.int32(first)
            stats = collect(self._graph, self._state, stats, *inputs, observers=observers)
            self._batched(batch.rows.stop / len(self._hidden.values))
        return stats

    def _covered(self, part: slice, stats: Stats) -> Stats:
        visited = of_experts(stats)
        count = next(iter(visited.values())).count
        cold = count < self._min_tokens
        self.visits[part], self.cold[part] = np.asarray(count), np.asarray(cold)
        other = self._fallback(part.start, np.flatnonzero(np.asarray(cold))) if bool(cold.any()) else visited
        fallback = self._calibration.fallback
        return {name: cover(visited[name], other[name], cold, fallback) for name in visited}

    def _fallback(self, first: int, experts: np.ndarray) -> Stats:
        """Returns the cold experts' statistics over all tokens, or over a sample of them."""
        stats, stride = self._empty_experts(), 1
        if self._calibration.fallback == "all":
            stride = max(1, -(-self._hidden.num_tokens // SAMPLE_TOKENS))
        numbers = np.zeros(self.chunk, np.int32)
        numbers[: len(experts)] = experts
        which = jnp.asarray(numbers), jnp.int32(len(experts)), jnp.int32(first)
        for batch in self._hidden.batches():
            inputs = batch.x, batch.valid, self._share, *which
            stats = collect_unrouted(self._graph, self._state, stats, *inputs, stride=stride)
        return stats


def chunk_of(num_experts: int, bytes_each: int) -> int:
    """Returns the most experts (a divisor of all) whose Gram matrices stay below the bound; at least 1."""
    fitting = [n for n in range(1, num_experts + 1) if num_experts % n == 0 and n * bytes_each <= GRAM_BYTES]
    return max(fitting, default=1)


def _widths(stage: Stage, chosen: Mapping[str, Chosen]) -> dict[str, int]:
    """Returns the statistics that the stage's calibrated weights need, and the channels of each."""
    params, widths = stage.params(), dict[str, int]()
    for site in stage.sites:
        for reader in site.readers:
            if reader in chosen and chosen[reader].calibrated:
                width = int(params[reader].get_metadata("spec").canonical_shape[-2])
                # The experts' common input has common scales, from the statistics of all tokens.
                widths |= {site.name: width, statistics_of(reader, site): width}
    return widths
