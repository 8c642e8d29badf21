"""Backends side by side: the same requests' times as ratios, and whether they gave the same tokens. No
JAX."""

import statistics
from collections.abc import Sequence
from typing import Any

from moejax.results.metrics import Metrics
from moejax.results.statistics import interval_fields, paired_ratio


def against_first(measured: Sequence[Metrics], first: Sequence[Metrics]) -> dict[str, float | None]:
    """A backend's figures over the first one's, both of the same iterations in turns, each with its metrics.

    `ttft_ratio`, `tpot_ratio` and `e2el_ratio` are of times: 2 is twice as long as the first. `output_ratio`
    is of output tokens/s: 2 is twice as fast. Each is the median of the iterations' ratios, with a bootstrap
    interval as `_low` and `_high`; None where there is nothing to divide. `added_tpot_ms` is the median
    of the differences of the time per output token.
    """
    row: dict[str, float | None] = {}
    for name in ("ttft", "tpot", "e2el", "output"):
        key = "output_throughput" if name == "output" else f"mean_{name}_ms"
        pairs = [(one[key], other[key]) for one, other in zip(measured, first, strict=True)]
        known = [pair for pair in pairs if all(pair)]
        row |= interval_fields(f"{name}_ratio", paired_ratio(*zip(*known, strict=True)) if known else None)
    tpot = [(one["mean_tpot_ms"], other["mean_tpot_ms"]) for one, other in zip(measured, first, strict=True)]
    added = [one - other for one, other in tpot if one is not None and other is not None]
    return row | {"added_tpot_ms": statistics.median(added) if added else None}


def blank_unknown(row: dict[str, Any], *, itl_known: bool) -> dict[str, Any]:
    """A row without the inter-token latencies, and tokens a step, of a backend whose tokens' instants are
    partly made up."""
    if itl_known:
        return row
    unknown = ("_itl_ms", "itl_samples", "tokens_per_step")
    return {key: None if key.endswith(unknown) else row[key] for key in row}
