"""Quantization of one stage of the model: statistics, scales, folding, rounding.

In this order, as GPTQ and AWQ have it: the stage's float weights see what the quantized stages before it
give out; all its statistics are taken at once; scales of all sites are found from the weights as they are and
folded together; each weight is then rounded with its statistics divided by its site's scales. Experts go
through in chunks, so that the Gram matrices held are bounded (`collect_statistics.GRAM_BYTES`).
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.core.errors import ConfigError
from moejax.core.quant import QuantConfig
from moejax.ptq.collect_statistics import StatisticsCollector
from moejax.ptq.fold import Folds, canonical, tie
from moejax.ptq.methods import Rounded, joined, quantize
from moejax.ptq.sites import EXPERTS_HIDDEN, EXPERTS_IN, QuantizationSite, Stage, statistics_of
from moejax.quantization.awq import best_scales, scale_errors
from moejax.quantization.calibration import Statistics
from moejax.quantization.rules import Chosen
from moejax.quantization.smoothquant import row_maxima, scales_of_maxima

SCALED = ("awq", "smoothquant")
"""Methods that scale what a weight reads."""


class QuantizedStage(NamedTuple):
    """Quantized stage: quantized weights by their path in the stage, the folds of the others, folded sites,
    and notes."""

    rounded: dict[str, Rounded]
    folds: Folds
    folded: list[str]
    notes: list[str]


def scaling_method(site: QuantizationSite, chosen: Mapping[str, Chosen], prefix: str = "") -> str | None:
    """Returns the method that scales a site; None where none does.

    Raises:
        ConfigError: two methods want to.
    """
    methods = {chosen[reader].method for reader in site.readers if reader in chosen} & set(SCALED)
    if len(methods) > 1:
        raise ConfigError(
            f"quant.rules: {prefix}{site.name}: weights that read one input cannot be scaled by both awq and "
            "smoothquant; choose one for them"
        )
    return methods.pop() if methods else None


class StageWork:
    """Quantizes one stage's `chosen` weights; the model is only read."""

    def __init__(
        self, stage: Stage, chosen: Mapping[str, Chosen], quant: QuantConfig, collector: StatisticsCollector
    ) -> None:
        self.stage, self.chosen, self.quant, self.collector = stage, chosen, quant, collector
        self.params = stage.params()
        self.folds = Folds()
        self.folded: list[str] = []
        self.notes: list[str] = []

    def run(self) -> QuantizedStage:
        """Quantizes all weights of the stage."""
        experts = next((site for site in self.stage.sites if site.name == EXPERTS_HIDDEN), None)
        for site in self.stage.sites:
            if site is not experts:
                self._scale(site)
        rounded = self._experts(experts)
        for site in self.stage.sites:
            for reader in site.readers:
                if reader in self.chosen and reader not in rounded:
                    stats = self._divided(self.collector.plain.get(site.name), reader)
                    rounded[reader] = self._round(reader, slice(None), stats)
        return QuantizedStage(rounded, self.folds, self.folded, self.notes)

    # --- Scales ---------------------------------------------------------------------------------------------

    def _method(self, site: QuantizationSite) -> str | None:
        """Returns what finds a site's scales; None, perhaps with a note, where nothing does."""
        method = scaling_method(site, self.chosen, self.stage.prefix)
        if method is None or site.blocked is None:
            return method
        self.notes.append(f"{site.name} is not scaled ({method}), because {site.blocked}")
        return None

    def _scale(self, site: QuantizationSite) -> None:
        """Finds and adds the scales of a site that all tokens pass."""
        method = self._method(site)
        if method is None:
            return
        readers = [r for r in site.readers if r in self.chosen and self.chosen[r].method == method]
        stats = self.collector.plain[site.name]
        if method == "smoothquant":
            rows = row_maxima([canonical(self.params[r]) for r in readers], 0)
            scales = scales_of_maxima(
                tie(stats.max_abs, site, "max"), tie(rows, site, "max"), alpha=self.quant.smoothing
            )
        else:
            activations = tie(stats.mean_abs(), site, "mean")
            scales = best_scales(activations, self._errors(site, readers, activations))
        self._fold(site, scales)

    def _errors(self, site: QuantizationSite, readers: list[str], activations: jax.Array) -> jax.Array:
        """Returns AWQ's output error of each exponent, summed over a site's readers and their experts."""
        routed = [r for r in readers if statistics_of(r, site) == EXPERTS_IN]
        others = [r for r in readers if r not in routed]
        total = jnp.zeros(self.quant.awq_grid + 1, jnp.float32)
        if others:
            weights = [canonical(self.params[r]) for r in others]
            grams = [self.collector.plain[site.name].gram] * len(others)
            total += self._scale_errors(weights, grams, activations, others)
        for part in self.collector.chunks if routed else ():
            weights = [canonical(self.params[r])[part] for r in routed]
            stats = self.collector.experts(part)[EXPERTS_IN]
            # What a fallback saw stands for the expert's own tokens, and counts as they do.
            visits = jnp.asarray(self.collector.visits[part], jnp.float32)
            gram = stats.mean_gram() * visits[:, None, None]
            total += self._scale_errors(weights, [gram] * len(routed), activations, routed)
        return total

    def _scale_errors(
        self, weights: list[jax.Array], grams: list[jax.Array], activations: jax.Array, readers: list[str]
    ) -> jax.Array:
        formats, quant = tuple(self.chosen[r].format for r in readers), self.quant
        ranges = {"clip": quant.clip, "percentile": quant.percentile}
        return scale_errors(weights, grams, activations, formats, grid=quant.awq_grid, **ranges)

    def _fold(self, site: QuantizationSite, scales: jax.Array) -> None:
        self.folds.add(site, scales)
        self.folded.append(site.name)

    # --- Experts --------------------------------------------------------------------------------------------

    def _experts(self, site: QuantizationSite | None) -> dict[str, Rounded]:
        """Quantizes the experts' weights, chunk by chunk; down's inputs have scales for each expert."""
        if site is None:
            return {}
        names = [f"moe.experts.{name}_proj" for name in ("gate", "up", "down")]
        names = [name for name in names if name in self.chosen]
        method = self._method(site)
        chunks = self.collector.chunks
        if method is not None:
            self._fold(site, jnp.concatenate([self._down_scales(method, part) for part in chunks]))
        rounded: dict[str, list[Rounded]] = {name: [] for name in names}
        for part in (chunks or [slice(None)]) if names else ():  # all at once where none is calibrated
            collected = self.collector.experts(part) if chunks else {}
            for name in names:
                key = EXPERTS_HIDDEN if name.endswith("down_proj") else EXPERTS_IN
                rounded[name].append(self._round(name, part, self._divided(collected.get(key), name, part)))
        return {name: joined(done) for name, done in rounded.items()}

    def _down_scales(self, method: str, part: slice) -> jax.Array:
        """Returns the scales of the down projections' inputs, float32 `[C, F]`, of a chunk of experts."""
        name = "moe.experts.down_proj"
        stats = self.collector.experts(part)[EXPERTS_HIDDEN]
        w = canonical(self.params[name])[part]
        if method == "smoothquant":
            return scales_of_maxima(stats.max_abs, row_maxima([w], 1), alpha=self.quant.smoothing)
        activations = stats.mean_abs()
        return best_scales(activations, self._scale_errors([w], [stats.gram], activations, [name]))

    # --- Rounding -------------------------------------------------------------------------------------------

    def _divided(self, stats: Statistics | None, reader: str, part: slice = slice(None)) -> Statistics | None:
        """Returns the statistics of what a weight reads after folding."""
        if stats is None or reader not in self.folds.rows:
            return stats
        scales = self.folds.rows[reader]
        return stats.divided(scales[part] if scales.ndim == 2 else scales)

    def _round(self, name: str, part: slice, stats: Statistics | None) -> Rounded:
        value = canonical(self.params[name])
        value = value if part == slice(None) else value[part]
        if not self.chosen[name].calibrated:
            stats = None
        return quantize(name, self.folds.apply(name, value, part), self.chosen[name], self.quant, stats)


def expert_counts(collector: StatisticsCollector) -> tuple[list[int] | None, list[int]]:
    """Returns the tokens of each expert, None where none is calibrated, and the experts that fell back."""
    if not collector.num_experts or (collector.visits < 0).all():
        return None, []
    return [int(n) for n in collector.visits], [int(e) for e in np.flatnonzero(collector.cold)]
