"""Timing of JAX callables to the end of their device work, peak memory, and the bytes of weights.

A call returns before the device is done, so each measurement ends in `block_until_ready`. Warm-up calls,
the first of which compiles, are timed apart and never enter a median.
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from flax import nnx

from moejax.nn.quantized import weight_size
from moejax.results.statistics import Interval, paired_ratio


@dataclass(frozen=True)
class Timing:
    """Measured calls of one variant.

    Attributes:
        seconds: of each call.
        first_call_s: seconds of the first call, which traces and compiles.
        ratio: time over the first variant's; below 1 is faster.
    """

    seconds: tuple[float, ...]
    first_call_s: float
    ratio: Interval

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def min_s(self) -> float:
        return min(self.seconds)


def timed(fn: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Calls `fn(*args)`, waits for its arrays and returns (seconds, result)."""
    start = time.perf_counter()
    result = jax.block_until_ready(fn(*args))
    return time.perf_counter() - start, result


def interleave(
    variants: Mapping[str, Callable[[], Any]],
    *,
    warmup: int = 2,
    repeats: int = 10,
) -> dict[str, Timing]:
    """Times several callables in turns, so that a machine's drift falls on all alike.

    Args:
        variants: name → callable without arguments; ratios divide by the first one's time. What it returns
            is waited for and then dropped. A callable that donates its arguments must keep the returned ones
            itself.
        warmup: calls of each before measuring, at least 1.
        repeats: measured rounds; every other round goes through the variants backwards, so that none
            always runs behind the same neighbour.

    Raises:
        ValueError: no variants, or counts below 1.
    """
    names = list(variants)
    if not names or warmup < 1 or repeats < 1:
        raise ValueError(f"need variants, warmup >= 1 and repeats >= 1; got {names}, {warmup}, {repeats}")
    first = {}
    for name in names:
        # The result of `timed` is dropped at once: two variants' outputs need not fit in memory together.
        first[name] = timed(variants[name])[0]
        for _ in range(warmup - 1):
            timed(variants[name])
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(repeats):
        for name in names if round_ % 2 == 0 else reversed(names):
            seconds[name].append(timed(variants[name])[0])
    return {
        name: Timing(tuple(times), first[name], paired_ratio(times, seconds[names[0]]))
        for name, times in seconds.items()
    }


def weight_metrics(stages: Iterable[nnx.Module]) -> dict[str, float]:
    """`model_bytes` of a model as held, all devices' parts counted once, and `bits_per_parameter`."""
    sizes = [weight_size(stage) for stage in stages]
    model_bytes, numbers = (sum(size[i] for size in sizes) for i in range(2))
    return {"model_bytes": model_bytes, "bits_per_parameter": 8 * model_bytes / numbers}


def peak_memory(devices: list[jax.Device] | None = None) -> dict[str, int | None]:
    """Most memory in use so far, in bytes.

    `process_peak_bytes` is the process's peak resident set; `device_peak_bytes` is the largest device's peak
    where the backend counts it (GPU and TPU do), else None, as on CPU, whose arrays are in the resident set.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    host = usage if sys.platform == "darwin" else usage * 1024
    peaks = []
    for device in jax.local_devices() if devices is None else devices:
        stats = device.memory_stats()
        if stats and "peak_bytes_in_use" in stats:
            peaks.append(int(stats["peak_bytes_in_use"]))
    return {"process_peak_bytes": int(host), "device_peak_bytes": max(peaks) if peaks else None}
