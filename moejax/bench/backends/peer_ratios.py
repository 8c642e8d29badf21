"""Backends side by side: the same requests' times as ratios, and whether they gave the same tokens. No
JAX."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from moejax.results.metrics import RequestRecord
from moejax.results.statistics import interval_fields, paired_ratio

Iterations = Sequence[tuple[Sequence[RequestRecord], float]]
"""Each iteration's requests, and the seconds that they took together."""


def against_first(measured: Iterations, first: Iterations) -> dict[str, float | None]:
    """A backend's figures over the first one's, both of the same iterations in turns.

    `ttft_ratio`, `tpot_ratio` and `e2el_ratio` are of times: 2 is twice as long as the first. `output_ratio`
    is of output tokens/s: 2 is twice as fast. Each is the median of the iterations' ratios, with a bootstrap
    interval as `_low` and `_high`; None where there is nothing to divide.
    """
    pairs = [(_values(*one), _values(*other)) for one, other in zip(measured, first, strict=True)]
    row: dict[str, float | None] = {}
    for name in ("ttft", "tpot", "e2el", "output"):
        known = [(one[name], other[name]) for one, other in pairs if one[name] and other[name]]
        ratio = paired_ratio(*zip(*known, strict=True)) if known else None
        row |= interval_fields(f"{name}_ratio", ratio)
    return row


def _values(records: Sequence[RequestRecord], seconds: float) -> dict[str, float | None]:
    """Returns the mean latencies in seconds of an iteration's completed requests, and their tokens/s."""
    done = [record for record in records if record.completed]
    latencies = {
        "ttft": [record.metrics.ttft for record in done],
        "tpot": [record.metrics.tpot for record in done if record.output_len > 1],
        "e2el": [record.metrics.e2e for record in done],
    }
    means = {name: float(np.mean(values)) if values else None for name, values in latencies.items()}
    return {**means, "output": sum(record.output_len for record in done) / seconds if seconds > 0 else None}


def blank_unknown(row: dict[str, Any], *, itl_known: bool) -> dict[str, Any]:
    """A row without the inter-token latencies of a backend whose tokens' instants are partly made up."""
    if itl_known:
        return row
    return {key: None if key.endswith(("_itl_ms", "itl_samples")) else row[key] for key in row}
