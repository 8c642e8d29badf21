"""How many experts a step hits and how many rows the fullest device computes, by a routing law. NumPy only.

Time of a layer's experts is decided by the experts that are visited and by the device with the most to do,
not by the number of tokens alone. Both are means over draws of a law's trace or of a captured one, at
tokens of powers of two, and straight lines over the logarithm of the tokens between.
"""

import copy
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from moejax.core.errors import ConfigError, unknown
from moejax.moe.eplb import Ints, count, part_loads
from moejax.moe.placement import Placement
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

    @property
    def layers(self) -> int:
        """Layers of which each has popular experts of its own; 0: experts are drawn anew for each number of
        tokens, so that none is popular for longer."""
        if self.kind == "capture":
            assert self.capture is not None
            return len(self.capture.layers)
        return 0 if self.kind in ("even", "power") else _LAYERS

    def loads(
        self, num_experts: int, top_k: int, ranks: int, seed: int = 0, *, redundant: int = 0
    ) -> "Loads":
        """Returns the loads of a layer of so many experts, dealt out to `ranks` devices in order, and then
        `redundant` copies of the first."""
        slots = Placement.contiguous(1, num_experts, ranks, redundant=redundant).physical_to_logical
        return Loads(self, num_experts, top_k, ranks, seed, slots)


class Loads:
    """A law's loads of one layer by the number of tokens that come together.

    Args:
        slots: int32 `[1, P]`, or `[law.layers, P]`: the expert of each place, those of a rank one after
            another. A copy of an expert computes an equal part of its rows.
    """

    def __init__(
        self, law: RoutingLaw, num_experts: int, top_k: int, ranks: int, seed: int, slots: Ints
    ) -> None:
        self.law, self.shape, self.seed = law, (num_experts, top_k, ranks), seed
        self.slots = slots
        self.order: Ints = np.arange(num_experts)
        self.draws = functools.lru_cache(maxsize=64)(self._draws)
        self._points: dict[int, Load] = {}

    def under(self, slots: Ints, order: Ints) -> "Loads":
        """Returns the same draws' loads with other places, and expert `order[i]`'s rows for expert i's."""
        other = copy.copy(self)
        other.slots, other.order, other._points = slots, order, {}
        return other

    def overflow(self, tokens: int, room: int) -> float:
        """Returns the share of a step's assignments that find no room where each expert takes `room`."""
        if self.law.kind == "even":
            return max(0.0, 1.0 - room * self.shape[0] / (tokens * self.shape[1]))
        low = 1 << int(math.log2(tokens))
        ends = []
        for drawn in (low, 2 * low):
            counts = self.draws(drawn)
            # The same room in even shares, which is no whole number of rows there.
            ends.append(float((counts - room * drawn / tokens).clip(0).sum() / counts.sum()))
        return ends[0] + (tokens / low - 1) * (ends[1] - ends[0])

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
            ranks = self.shape[2]
            counts = self.draws(tokens)[:, self.order]
            slots = np.tile(self.slots, (len(counts) // len(self.slots), 1))
            rows = part_loads(counts, slots, ranks)
            visited = np.minimum(1.0, np.take_along_axis(counts / count(slots, counts.shape[1]), slots, 1))
            hits = visited.reshape(len(slots), ranks, -1).sum(axis=2)
            # Who waits for the fullest does so where memory decides, and where arithmetic does.
            self._points[tokens] = Load(float(hits.max(axis=1).mean()), float(rows.max(axis=1).mean()))
        return self._points[tokens]

    def _draws(self, tokens: int) -> np.ndarray:
        """Returns rows of each expert, `[steps * layers, E]`: a step's layers one after another."""
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
