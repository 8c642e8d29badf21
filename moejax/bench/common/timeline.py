"""Reduces the engine's steps to means over a run, and to columns over time for plots. No JAX here."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moejax.engine.stats import StepRecord

MAX_POINTS = 2000

# How the steps that fall into one bin become one value. A maximum stands beside a mean wherever a short peak
# matters: a mean alone would hide it, a sample would find it only by luck.
_SUMS = ("seconds", "prefill_tokens", "decode_tokens", "padded_tokens", "preempted")
_MEANS = ("sequences", "running", "waiting", "used_blocks", "stored_tokens")
_MAXIMA = ("running", "waiting", "used_blocks")


def step_metrics(steps: Sequence[StepRecord], block_size: int | None) -> dict[str, float | int | None]:
    """Metrics of a run's steps, in the order they ran (the glossary's "Engine steps and cache"); None where
    nothing was measured. Means over busy time weigh each step by its seconds. Of an engine whose cache is not
    told (`num_blocks` 0) the cache's are None."""
    names: tuple[str, ...] = (
        "steps", "mean_batch_size", "mean_running", "max_running", "max_waiting", "cache_use_mean",
        "cache_use_peak", "cache_use_saturated", "cache_fill", "padding_waste", "preemptions",
    )  # fmt: skip
    if not steps:
        return {**dict.fromkeys(names), "steps": 0, "preemptions": 0}
    c = _columns(steps)
    weights = _weights(c["seconds"])
    told = bool(c["num_blocks"].all())
    use = c["used_blocks"] / np.where(c["num_blocks"] > 0, c["num_blocks"], 1)
    saturated = c["left_waiting"] > 0
    room = float(np.dot(c["used_blocks"] * (block_size or 0), weights))
    computed = c["padded_tokens"].sum()
    real = c["prefill_tokens"].sum() + c["decode_tokens"].sum()
    values = (
        len(steps),
        float(c["sequences"].mean()),
        float(np.dot(c["running"], weights)),
        int(c["running"].max()),
        int(c["waiting"].max()),
        float(np.dot(use, weights)) if told else None,
        float(use.max()) if told else None,
        float(np.average(use[saturated], weights=_weights(c["seconds"][saturated])))
        if told and saturated.any()
        else None,
        float(np.dot(c["stored_tokens"], weights)) / room if room else None,
        float(1.0 - real / computed) if computed else 0.0,
        int(c["preempted"].sum()),
    )
    return dict(zip(names, values, strict=True))


def bin_steps(steps: Sequence[StepRecord], origin: float, max_points: int = MAX_POINTS) -> dict[str, Any]:
    """Columns over time, at most `max_points` rows; a row a step while there are no more steps than that.

    More are gathered in bins of equal length in time, empty ones left out. A step belongs to the instant
    when its tokens were there.

    Returns:
        `time_s`, seconds from `origin` to the end of the bin's last step; `steps` in the bin; the sums
        `seconds prefill_tokens decode_tokens padded_tokens preempted`; the means over the bin's busy time
        `sequences_mean running_mean waiting_mean used_blocks_mean stored_tokens_mean`; the maxima
        `running_max waiting_max used_blocks_max`, of adaptive batching also `most_running_max
        most_prefill_max`. Beside the columns `num_blocks`, and `bin_s`, a bin's length in seconds (None where
        rows are steps); where any was taken, `rebalance`: decisions (`RebalanceEvent`, times from `origin`).

    Raises:
        ValueError: `max_points` is below 1.
    """
    if max_points < 1:
        raise ValueError(f"max_points must be at least 1, got {max_points}")
    if not steps:
        return {"num_blocks": None, "bin_s": None, "time_s": [], "steps": []}
    c = _columns(sorted(steps, key=lambda step: step.time))
    times = c["time"] - origin
    low, span = min(0.0, float(times[0])), 0.0
    bin_s = None
    bins = np.arange(len(times))
    if len(times) > max_points:
        span = float(times[-1]) - low
        bin_s = span / max_points
        # The last step ends at the last bin's edge and belongs into it.
        bins = np.minimum(((times - low) / bin_s).astype(int), max_points - 1) if bin_s else bins * 0
    starts = np.flatnonzero(np.diff(bins, prepend=-1))
    counts = np.diff(starts, append=len(times))
    columns: dict[str, Any] = {"time_s": times[starts + counts - 1].tolist(), "steps": counts.tolist()}
    for name in _SUMS:
        columns[name] = np.add.reduceat(c[name], starts).tolist()
    weights, groups = c["seconds"], np.repeat(np.arange(len(starts)), counts)
    totals = np.add.reduceat(weights, starts)
    # Steps that took no time at all (a fake clock) count alike.
    shares = np.where(
        totals[groups] > 0, weights / np.where(totals > 0, totals, 1)[groups], 1 / counts[groups]
    )
    for name in _MEANS:
        columns[f"{name}_mean"] = np.add.reduceat(c[name] * shares, starts).tolist()
    adaptive = ("most_running", "most_prefill") if c["most_running"].any() else ()
    for name in (*_MAXIMA, *adaptive):
        columns[f"{name}_max"] = np.maximum.reduceat(c[name], starts).tolist()
    events = [step.rebalance for step in steps if step.rebalance is not None]
    if events:
        columns["rebalance"] = [{**asdict(event), "time": event.time - origin} for event in events]
    return {"num_blocks": steps[0].num_blocks, "bin_s": bin_s, **columns}


def _columns(steps: Sequence[StepRecord]) -> dict[str, NDArray[np.float64]]:
    names = [name for name in StepRecord.__slots__ if name != "rebalance"]
    return {name: np.array([getattr(step, name) for step in steps], dtype=np.float64) for name in names}


def _weights(seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Shares of the time that add up to 1; equal ones if no time passed."""
    total = seconds.sum()
    return seconds / total if total > 0 else np.full(seconds.size, 1.0 / max(1, seconds.size))
