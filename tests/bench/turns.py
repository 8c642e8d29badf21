"""Single calls in the library's turns, for the benchmarks of single parts that are called as they are."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from moejax.bench.kernels.device_timing import Clock, measure
from moejax.results.statistics import Interval, paired_ratio


class Call:
    """A call to the end of its device work; the first one, which traces and compiles, is timed apart."""

    calls = 1

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.first_s = 0.0

    def warm_up(self) -> None:
        self.first_s = self.sample() / 1e6
        self.sample()

    def sample(self, clock: Clock = time.perf_counter) -> float:
        start = clock()
        jax.block_until_ready(self._call())
        return (clock() - start) * 1e6


def timed_rows(
    variants: Mapping[str, Callable[[], Any]], repeats: int, ratio: str
) -> tuple[list[dict[str, Any]], dict[str, Interval]]:
    """Returns a row of each variant (name, median_s, min_s, first_call_s, and under `ratio` its time over the
    first one's), and those ratios with their intervals. Raises `RuntimeError` where one fails."""
    calls = {name: Call(call) for name, call in variants.items()}
    timed, failed = measure(calls, repeats)
    if failed:
        raise RuntimeError(failed)
    base = next(iter(timed.values())).samples
    ratios = {name: paired_ratio(figures.samples, base) for name, figures in timed.items()}
    rows = [
        {"name": name, "median_s": figures.median_us / 1e6, "min_s": min(figures.samples) / 1e6,
         "first_call_s": calls[name].first_s, ratio: ratios[name].estimate}
        for name, figures in timed.items()
    ]  # fmt: skip
    return rows, ratios
