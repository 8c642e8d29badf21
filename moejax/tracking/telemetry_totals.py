"""Sums over the stretches between telemetry's samples, and the figures made of them. No JAX here."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from moejax.tracking.probes import Reading, Sample, slowdown_names

Point = tuple[float, Reading]


@dataclass
class Totals:
    """Sums over the stretches between two samples: `weighted[gauge]` is its integral over the `known[gauge]`
    seconds in which it could be read, `counted[counter]` what it grew by."""

    seconds: float = 0.0
    samples: int = 0
    weighted: dict[str, float] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=dict)
    counted_s: dict[str, float] = field(default_factory=dict)
    # GPU → joules, by its counter or else by its power, and for how many seconds by which.
    energy: dict[str, float] = field(default_factory=dict)
    energy_s: dict[str, float] = field(default_factory=dict)
    by_power: set[str] = field(default_factory=set)
    slow_s: dict[str, float] = field(default_factory=dict)
    slowdowns: dict[str, int] = field(default_factory=dict)

    def add(self, seconds: float, before: Sample, after: Sample) -> None:
        self.seconds += seconds
        self.samples += 1
        for name, end in after.gauges.items():
            start = before.gauges.get(name)
            if name.endswith("_slowdowns"):
                self._slow(name.removesuffix("_slowdowns"), seconds, start, end)
            elif start is not None and end is not None:
                _grow(self.weighted, name, 0.5 * (start + end) * seconds)
                _grow(self.known, name, seconds)
                self.peaks[name] = max(self.peaks.get(name, end), start, end)
        for name, end in after.counters.items():
            start = before.counters.get(name)
            # A counter that fell was set back, by a driver that was loaded anew.
            grown = None if start is None or end is None or end < start else end - start
            if grown is not None:
                _grow(self.counted, name, grown)
                _grow(self.counted_s, name, seconds)
            if name.startswith("gpu"):
                self._energy(name.removesuffix("_energy_j"), seconds, grown, before, after)

    def _slow(self, gpu: str, seconds: float, start: float | None, end: float | None) -> None:
        bits = int(start or 0) | int(end or 0)
        if slowdown_names(bits):
            _grow(self.slow_s, gpu, seconds)
            self.slowdowns[gpu] = self.slowdowns.get(gpu, 0) | bits
        if end is not None:
            _grow(self.known, f"{gpu}_slowdowns", seconds)

    def _energy(self, gpu: str, seconds: float, grown: float | None, before: Sample, after: Sample) -> None:
        if grown is None:
            powers = (before.gauges.get(f"{gpu}_power_w"), after.gauges.get(f"{gpu}_power_w"))
            if powers[0] is None or powers[1] is None:
                return
            grown = 0.5 * (powers[0] + powers[1]) * seconds
            self.by_power.add(gpu)
        _grow(self.energy, gpu, grown)
        _grow(self.energy_s, gpu, seconds)

    def mean(self, name: str) -> float | None:
        seconds = self.known.get(name, 0.0)
        return self.weighted[name] / seconds if seconds > 0 and name in self.weighted else None

    def rate(self, counter: str) -> float | None:
        seconds = self.counted_s.get(counter, 0.0)
        return self.counted[counter] / seconds if seconds > 0 else None

    def whole(self, sums: dict[str, float], seconds: dict[str, float], name: str) -> float | None:
        """A sum that covers all of the time, else None: part of an energy would pass for all of it."""
        if self.seconds <= 0 or not math.isclose(seconds.get(name, 0.0), self.seconds, rel_tol=1e-6):
            return None
        return sums[name]

    def gpu_energy(self, gpus: int) -> float | None:
        """Joules of GPUs 0 to `gpus` - 1 together."""
        found = [self.whole(self.energy, self.energy_s, f"gpu{index}") for index in range(gpus)]
        known = [joules for joules in found if joules is not None]
        return sum(known) if known and len(known) == gpus else None


def merged(parts: Iterable[Totals]) -> Totals:
    """The sums of several."""
    whole = Totals()
    for part in parts:
        whole.seconds += part.seconds
        whole.samples += part.samples
        for name in ("weighted", "known", "counted", "counted_s", "energy", "energy_s", "slow_s"):
            for key, value in getattr(part, name).items():
                _grow(getattr(whole, name), key, value)
        for key, value in part.peaks.items():
            whole.peaks[key] = max(whole.peaks.get(key, value), value)
        for key, bits in part.slowdowns.items():
            whole.slowdowns[key] = whole.slowdowns.get(key, 0) | bits
        whole.by_power |= part.by_power
    return whole


def _grow(sums: dict[str, float], name: str, by: float) -> None:
    sums[name] = sums.get(name, 0.0) + by


def summarize(totals: Totals, gpus: int, energy: float | None, output_tokens: int | None) -> Reading:
    own, machine = totals.rate("cpu_s"), totals.rate("machine_cpu_s")
    found: Reading = {
        "mean_host_rss_bytes": totals.mean("host_rss_bytes"),
        "max_host_rss_bytes": totals.peaks.get("host_rss_bytes"),
        "mean_cpu_percent": None if own is None else 100 * own,
        # The machine's counter ticks coarsely, so the difference can come out below nothing.
        "mean_other_cpu_percent": None if own is None or machine is None else max(0.0, 100 * (machine - own)),
        "energy_j": energy,
        "energy_per_output_token_j": energy / output_tokens if energy is not None and output_tokens else None,
    }
    if not gpus:
        return found
    return found | _gpu_summary(totals, [f"gpu{index}" for index in range(gpus)])


def _gpu_summary(totals: Totals, gpus: list[str]) -> Reading:
    """All GPUs together: power as a sum, clock and utilisation as means, memory, temperature and slowdowns of
    the worst; and each one's power."""

    def known(values: list[float | None]) -> list[float]:
        return [value for value in values if value is not None]

    powers = [totals.mean(f"{gpu}_power_w") for gpu in gpus]
    found: Reading = {"mean_gpu_power_w": sum(known(powers)) if None not in powers else None}
    for gauge in ("utilization_percent", "sm_clock_mhz"):
        values = known([totals.mean(f"{gpu}_{gauge}") for gpu in gpus])
        found[f"mean_gpu_{gauge}"] = sum(values) / len(values) if values else None
    for gauge in ("temperature_c", "memory_bytes"):
        values = known([totals.peaks.get(f"{gpu}_{gauge}") for gpu in gpus])
        found[f"max_gpu_{gauge}"] = max(values, default=None)
    found["gpu_slowdown_percent"] = max(known([_slow_percent(totals, gpu) for gpu in gpus]), default=None)
    return found | {f"{gpu}_mean_power_w": power for gpu, power in zip(gpus, powers, strict=True)}


def _slow_percent(totals: Totals, gpu: str) -> float | None:
    seconds = totals.known.get(f"{gpu}_slowdowns", 0.0)
    return 100 * totals.slow_s.get(gpu, 0.0) / seconds if seconds > 0 else None


def device_row(totals: Totals, index: int, name: str) -> dict[str, Any]:
    """A GPU's row in the result."""
    gpu = f"gpu{index}"
    return {
        "device": gpu,
        "name": name,
        "mean_power_w": totals.mean(f"{gpu}_power_w"),
        "max_power_w": totals.peaks.get(f"{gpu}_power_w"),
        "mean_sm_clock_mhz": totals.mean(f"{gpu}_sm_clock_mhz"),
        "mean_utilization_percent": totals.mean(f"{gpu}_utilization_percent"),
        "max_memory_bytes": totals.peaks.get(f"{gpu}_memory_bytes"),
        "max_temperature_c": totals.peaks.get(f"{gpu}_temperature_c"),
        "slowdown_percent": _slow_percent(totals, gpu),
        "slowdowns": slowdown_names(totals.slowdowns.get(gpu, 0)),
        "energy_j": totals.whole(totals.energy, totals.energy_s, gpu),
        "energy_source": "nvml_power" if gpu in totals.by_power else "nvml_counter",
    }


def window_point(totals: Totals) -> Reading:
    """A window's means, with counters as rates: `cpu_percent`, `machine_cpu_percent`, `cpu_power_w`."""
    point: Reading = {name: totals.mean(name) for name in totals.weighted}
    for counter, name, scale in (
        ("cpu_s", "cpu_percent", 100.0), ("machine_cpu_s", "machine_cpu_percent", 100.0),
        ("cpu_energy_j", "cpu_power_w", 1.0),
    ):  # fmt: skip
        rate = totals.rate(counter)
        if rate is not None:
            point[name] = scale * rate
    return point


def halve(points: list[Point]) -> list[Point]:
    """Every two neighbours as one, at the second's time; a last one without a neighbour stays."""
    pairs = [(points[i], points[i + 1]) for i in range(0, len(points) - 1, 2)]
    merged = [(second[0], _mean(first[1], second[1])) for first, second in pairs]
    return merged + points[2 * len(pairs) :]


def _mean(first: Reading, second: Reading) -> Reading:
    merged: Reading = {}
    for name in dict.fromkeys((*first, *second)):
        known = [v for v in (first.get(name), second.get(name)) if v is not None]
        merged[name] = sum(known) / len(known) if known else None
    return merged
