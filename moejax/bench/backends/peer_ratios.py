"""Backends side by side: the same requests' times as ratios, and whether they gave the same tokens. No
JAX."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moejax.results.metrics import RequestRecord
from moejax.results.statistics import paired_ratio

Iterations = Sequence[tuple[Sequence[RequestRecord], float]]
"""Of each iteration its requests, and the seconds that they took together."""


def against_first(measured: Iterations, first: Iterations) -> dict[str, float | None]:
    """A backend's figures over the first one's, both of the same iterations in turns.

    `ttft_ratio`, `tpot_ratio` and `e2el_ratio` are of times: 2 is twice as long as the first. `output_ratio`
    is of output tokens/s: 2 is twice as fast. Each is the median of the iterations' ratios, with a bootstrap
    interval as `_low` and `_high`; None where there is nothing to divide.
    """
    found: dict[str, float | None] = {}
    for name, value in _VALUES.items():
        pairs = [
            (top, bottom)
            for (records, seconds), (base, base_seconds) in zip(measured, first, strict=True)
            if (top := value(records, seconds)) and (bottom := value(base, base_seconds))
        ]
        ratio = paired_ratio([top for top, _ in pairs], [bottom for _, bottom in pairs]) if pairs else None
        found[f"{name}_ratio"] = ratio.estimate if ratio else None
        found[f"{name}_ratio_low"] = ratio.low if ratio else None
        found[f"{name}_ratio_high"] = ratio.high if ratio else None
    return found


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _ttft(records: Sequence[RequestRecord], seconds: float) -> float | None:
    return _mean([r.metrics.ttft for r in records if r.completed])


def _tpot(records: Sequence[RequestRecord], seconds: float) -> float | None:
    return _mean([r.metrics.tpot for r in records if r.completed and r.output_len > 1])


def _e2el(records: Sequence[RequestRecord], seconds: float) -> float | None:
    return _mean([r.metrics.e2e for r in records if r.completed])


def _output(records: Sequence[RequestRecord], seconds: float) -> float | None:
    return sum(r.output_len for r in records if r.completed) / seconds if seconds > 0 else None


_VALUES = {"ttft": _ttft, "tpot": _tpot, "e2el": _e2el, "output": _output}


def blank_unknown(row: dict[str, Any], *, itl_known: bool) -> dict[str, Any]:
    """A row without the inter-token latencies of a backend whose tokens' instants are partly made up."""
    if itl_known:
        return row
    return {key: None if key.endswith("_itl_ms") else value for key, value in row.items()}
