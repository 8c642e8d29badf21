"""Sums over the stretches between telemetry's samples, and the figures made of them. No JAX here."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from moejax.tracking.probes import Reading, Sample, slowdown_names


@dataclass
class Totals:
    """Sums over the stretches between two samples.

    Attributes:
        seconds, samples: the stretches' length together and their number.
        sums: a gauge's integral, or what a counter grew by. A GPU's `gpu{i}_energy_j` is by its counter or
            else by its power; its `gpu{i}_slowdowns` are the seconds below the clock that was asked for.
        known: the seconds in which each of them could be read.
        peaks: a gauge's largest value.
        by_power: the GPUs whose energy is by their power.
        slowdowns: GPU → bits of the reasons.
    """

    seconds: float = 0.0
    samples: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    known: dict[str, float] = field(default_factory=dict)
    peaks: dict[str, float] = field(default_factory=dict)
    by_power: set[str] = field(default_factory=set)
    slowdowns: Counter[str] = field(default_factory=Counter)

    def add(self, seconds: float, before: Sample, after: Sample) -> None:
        """Adds a stretch of `seconds` between two samples."""
        self.seconds += seconds
        self.samples += 1
        for name, end in after.gauges.items():
            start = before.gauges.get(name)
            if name.endswith("_slowdowns"):
                if end is not None:
                    bits = int(start or 0) | int(end)
                    self._grow(name, seconds if slowdown_names(bits) else 0.0, seconds)
                    self.slowdowns[name.removesuffix("_slowdowns")] |= bits
            elif start is not None and end is not None:
                self._grow(name, 0.5 * (start + end) * seconds, seconds)
                self.peaks[name] = max(self.peaks.get(name, start), start, end)
        for name, end in after.counters.items():
            start = before.counters.get(name)
            # A counter that fell was set back, by a driver that was loaded anew.
            grown = None if start is None or end is None or end < start else end - start
            if grown is None and name.startswith("gpu"):
                grown = self._energy_by_power(name.removesuffix("_energy_j"), seconds, before, after)
            if grown is not None:
                self._grow(name, grown, seconds)

    def _energy_by_power(self, gpu: str, seconds: float, before: Sample, after: Sample) -> float | None:
        start, end = (sample.gauges.get(f"{gpu}_power_w") for sample in (before, after))
        if start is None or end is None:
            return None
        self.by_power.add(gpu)
        return 0.5 * (start + end) * seconds

    def _grow(self, name: str, by: float, seconds: float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + by
        self.known[name] = self.known.get(name, 0.0) + seconds

    def mean(self, name: str) -> float | None:
        """Returns a gauge's mean, or a counter's growth a second."""
        seconds = self.known.get(name, 0.0)
        return self.sums[name] / seconds if seconds > 0 else None

    def whole(self, name: str) -> float | None:
        """A sum that covers all of the time, else None: part of an energy would pass for all of it."""
        if self.seconds <= 0 or not math.isclose(self.known.get(name, 0.0), self.seconds, rel_tol=1e-6):
            return None
        return self.sums[name]

    def gpu_energy(self, gpus: int) -> float | None:
        """Joules of GPUs 0 to `gpus` - 1 together."""
        joules = [self.whole(f"gpu{index}_energy_j") for index in range(gpus)]
        known = [value for value in joules if value is not None]
        return sum(known) if known and len(known) == gpus else None


Point = tuple[float, Totals]
"""A stretch of the time series: when it ended, and its sums."""


def merged(parts: Iterable[Totals]) -> Totals:
    """The sums of several."""
    whole = Totals()
    for part in parts:
        whole.seconds += part.seconds
        whole.samples += part.samples
        for name, amount in part.sums.items():
            whole._grow(name, amount, part.known[name])
        for gauge, value in part.peaks.items():
            whole.peaks[gauge] = max(whole.peaks.get(gauge, value), value)
        for gpu, bits in part.slowdowns.items():
            whole.slowdowns[gpu] |= bits
        whole.by_power |= part.by_power
    return whole


def summarize(totals: Totals, gpus: int, energy: float | None, output_tokens: int | None) -> Reading:
    process, machine = totals.mean("cpu_s"), totals.mean("machine_cpu_s")
    others = None if process is None or machine is None else machine - process
    figures: Reading = {
        "mean_process_rss_bytes": totals.mean("process_rss_bytes"),
        "max_process_rss_bytes": totals.peaks.get("process_rss_bytes"),
        "mean_cpu_percent": None if process is None else 100 * process,
        # The machine's counter ticks coarsely, so the difference can come out below nothing.
        "mean_other_cpu_percent": None if others is None else max(0.0, 100 * others),
        "energy_j": energy,
        "energy_per_output_token_j": energy / output_tokens if energy is not None and output_tokens else None,
    }
    return figures | _gpu_summary(totals, [f"gpu{index}" for index in range(gpus)]) if gpus else figures


def _gpu_summary(totals: Totals, gpus: list[str]) -> Reading:
    """All GPUs together: power as a sum, clock and utilisation as means, memory, temperature and slowdowns of
    the worst; and each one's power."""

    def known(values: list[float | None]) -> list[float]:
        return [value for value in values if value is not None]

    powers = [totals.mean(f"{gpu}_power_w") for gpu in gpus]
    figures: Reading = {"mean_gpu_power_w": sum(known(powers)) if None not in powers else None}
    for gauge in ("utilization_percent", "sm_clock_mhz"):
        values = known([totals.mean(f"{gpu}_{gauge}") for gpu in gpus])
        figures[f"mean_gpu_{gauge}"] = sum(values) / len(values) if values else None
    for gauge in ("temperature_c", "memory_bytes"):
        values = known([totals.peaks.get(f"{gpu}_{gauge}") for gpu in gpus])
        figures[f"max_gpu_{gauge}"] = max(values, default=None)
    figures["gpu_slowdown_percent"] = max(known([_slow_percent(totals, gpu) for gpu in gpus]), default=None)
    return figures | {f"{gpu}_mean_power_w": power for gpu, power in zip(gpus, powers, strict=True)}


def _slow_percent(totals: Totals, gpu: str) -> float | None:
    share = totals.mean(f"{gpu}_slowdowns")
    return None if share is None else 100 * share


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
        "slowdowns": slowdown_names(totals.slowdowns[gpu]),
        "energy_j": totals.whole(f"{gpu}_energy_j"),
        "energy_source": "nvml_power" if gpu in totals.by_power else "nvml_counter",
    }


def window_point(totals: Totals) -> Reading:
    """A window's means, with counters as rates: `cpu_percent`, `machine_cpu_percent`, `cpu_power_w`."""
    point: Reading = {name: totals.mean(name) for name in totals.peaks}
    for counter, name, scale in (
        ("cpu_s", "cpu_percent", 100.0), ("machine_cpu_s", "machine_cpu_percent", 100.0),
        ("cpu_energy_j", "cpu_power_w", 1.0),
    ):  # fmt: skip
        rate = totals.mean(counter)
        if rate is not None:
            point[name] = scale * rate
    return point


def halve(points: list[Point]) -> list[Point]:
    """Every two neighbours as one, at the second's time; a last one without a neighbour stays."""
    pairs = [(points[i], points[i + 1]) for i in range(0, len(points) - 1, 2)]
    joined = [(end, merged([first, second])) for (_, first), (end, second) in pairs]
    return joined + points[2 * len(pairs) :]
