"""The variants that take turns in an A/B run, and their measurements."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from moejax.bench.backends.base import Backend
from moejax.results.metrics import Metrics

CONTROL = "control"
"""Name of the baseline's second engine, against which the first one is measured like any variant."""


@dataclass
class Arm:
    """A variant, opened, with what was measured of it.

    Attributes:
        name: as in `ab.variants`, or `control`.
        overrides: what it adds to the command line.
        backend: its engine.
        shares: the variant whose weights it uses; None has its own.
        rows: rows of requests.jsonl without their place in the result's cases.
        rounds: (round, case) → flat metrics of that pass.
        tokens: case → output token ids of the first round's requests.
    """

    name: str
    overrides: Sequence[str]
    backend: Backend
    shares: str | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    rounds: dict[tuple[int, int], Metrics] = field(default_factory=dict)
    tokens: dict[int, list[list[int]]] = field(default_factory=dict)
