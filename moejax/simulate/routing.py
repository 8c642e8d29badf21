"""How many experts a step hits and how many rows the fullest device computes, by a routing law. NumPy only.

Time of a layer's experts is decided by the experts that are visited and by the device with the most to do,
not by the number of tokens alone. Both are means over draws of a law's trace or of a captured one, at
tokens of powers of two, and straight lines over the logarithm of the tokens between.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from moejax.core.errors import ConfigError, unknown
from moejax.routing.capture import RoutingCapture, count_experts
from moejax.routing.generate import KINDS, generate

_MOST_KEYS, _LAYERS = 1 << 21, 4


class Load(NamedTuple):
    """One layer's work on the device that the others wait for: experts visited, and rows computed."""

    hits: float
    rows: float


@dataclass(frozen=True)
class RoutingLaw:
    """Which experts tokens visit.

    Attributes:
        kind: "even" (all experts alike, to the row), one of `moejax.routing.generate.KINDS`, "power", or
            "capture".
        params: of the kind; of "power" the collectors' `exponent` of the measured tables (README there).
        capture: the trace of "capture", whose steps' tokens are drawn together.
    """

    kind: str = "zipf"
    params: Mapping[str, Any] = field(default_factory=dict)
    capture: RoutingCapture | None = None

    def __post_init__(self) -> None:
        if self.kind not in (kinds := ("even", *KINDS, "power", "capture")):
            raise ConfigError(f"simulate.routing.kind: {unknown('law', self.kind, kinds)}")

    def __str__(self) -> str:
        told = ", ".join(f"{name} {value:g}" for name, value in self.params.items())
        return f"{self.kind} ({told})" if told else self.kind

    def loads(self, num_experts: int, top_k: int, ranks: int, seed: int = 0) -> "Loads":
        """Returns the loads of a layer of so many experts, dealt out to `ranks` devices in order."""
        return Loads(self, num_experts, top_k, ranks, seed)


class Loads:
    """A law's loads of one layer by the number of tokens that come together."""

    def __init__(self, law: RoutingLaw, num_experts: int, top_k: int, ranks: int, seed: int) -> None:
        self.law, self.shape, self.seed = law, (num_experts, top_k, ranks), seed
        self._points: dict[int, Load] = {}

    @functools.lru_cache(maxsize=4096)  # noqa: B019 (lives as long as the simulator)
    def at(self, tokens: int) -> Load:
        """Returns the load of a step of so many tokens."""
        if tokens < 1:
            return Load(0.0, 0.0)
        E, k, ranks = self.shape
        if self.law.kind == "even":
            rows = tokens * k / ranks
            return Load(min(E / ranks, max(1.0, rows)), max(1.0, rows))
        exponent = math.log2(tokens)
        low, share = int(exponent), exponent - int(exponent)
        first = self._point(1 << low)
        if not share:
            return first
        second = self._point(2 << low)
        return Load(*(a * (b / a) ** share for a, b in zip(first, second, strict=True)))

    def _point(self, tokens: int) -> Load:
        if tokens not in self._points:
            E, _, ranks = self.shape
            counts = self._counts(tokens).reshape(-1, ranks, E // ranks)
            rows, hits = counts.sum(axis=2), np.count_nonzero(counts, axis=2)
            # Who waits for the fullest does so where memory decides, and where arithmetic does.
            self._points[tokens] = Load(float(hits.max(axis=1).mean()), float(rows.max(axis=1).mean()))
        return self._points[tokens]

    def _counts(self, tokens: int) -> np.ndarray:
        """Returns rows of each expert, `[draws, E]`."""
        E, k, _ = self.shape
        rng = np.random.default_rng((self.seed, tokens))
        if self.law.kind == "power":
            return self._power(rng, tokens)
        if self.law.kind == "capture":
            trace = self.law.capture
            assert trace is not None
            starts = rng.integers(0, max(1, trace.num_rows - tokens + 1), 32)
            picks = [
                np.take(trace.ids, np.arange(start, start + tokens), axis=0, mode="wrap") for start in starts
            ]
            return np.concatenate([count_experts(ids, E) for ids in picks])
        # Many tokens' counts are near their expectation: those of fewer, times as many.
        drawn = min(tokens, max(1, _MOST_KEYS // (E * _LAYERS)))
        steps = max(1, min(16, _MOST_KEYS // (E * _LAYERS * drawn)))
        shape = {"num_experts": E, "top_k": k, "layers": _LAYERS, "requests": drawn, "prompt_len": 1}
        trace = generate(self.law.kind, **shape, output_len=steps, seed=self.seed, **self.law.params)
        counts = np.concatenate(
            [count_experts(trace.ids[trace.step == step], E) for step in np.unique(trace.step)]
        )
        return counts * (tokens / drawn)

    def _power(self, rng: np.random.Generator, tokens: int) -> np.ndarray:
        """Draws as the tables' collectors did: loads of a power law, scaled to the rows and capped."""
        E, k, _ = self.shape
        a = float(self.law.params.get("exponent", 1.01))
        low, high = (0.01, 2.0) if tokens * k <= E else (1.0, 0.8 * tokens)
        u = rng.random((64, E))
        loads = ((high ** (1 - a) - low ** (1 - a)) * u + low ** (1 - a)) ** (1 / (1 - a))
        counts = np.minimum(np.rint(loads * (tokens * k / loads.sum(axis=1, keepdims=True))), tokens)
        # What rounding adds is taken from the least, what it takes is given to the most loaded.
        order = np.argsort(np.argsort(-counts, axis=1, kind="stable"), axis=1, kind="stable")
        missing = tokens * k - counts.sum(axis=1, keepdims=True)
        used = np.count_nonzero(counts, axis=1, keepdims=True)
        return counts + (order < missing) - ((order < used) & (order >= used + missing))
