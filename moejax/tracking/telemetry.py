"""Samples memory, CPU, power and energy beside a measurement, in a thread of its own.

    telemetry = Telemetry(TelemetryConfig())
    for case in cases:
        with telemetry.part(case):      # only what is measured; what lies between two parts is not counted
            ...
    telemetry.summary(output_tokens=n)  # flat metrics of all parts; summary(case, …) of some
    telemetry.report()                  # for result["telemetry"], with the time series

Each part begins and ends with a sample, taken outside of what runs in it. A figure that no device reports is
None, with its reason in `report()["notes"]`. No JAX here.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from moejax.core.checked import Checked, Must, at_least
from moejax.tracking.probes import GpuProbe, HostProbe, Probe, RaplProbe, Reading, Sample, open_gpus
from moejax.tracking.telemetry_totals import (
    Point,
    Totals,
    device_row,
    halve,
    merged,
    summarize,
    window_point,
)

logger = logging.getLogger(__name__)

_LEAST_INTERVAL_S, _MOST_INTERVAL_S = 0.02, 3600.0
# A sample that hangs (a lost GPU can do that to NVML) must not hold up the run's end.
_JOIN_SECONDS = 5.0


@dataclass(frozen=True)
class TelemetryConfig(Checked, section="telemetry"):
    """Sampling of memory, CPU, power and energy while something is measured.

    Attributes:
        enabled: whether to sample at all.
        interval_s: seconds between samples; one takes some tenths of a millisecond, on a GPU a few of them.
        max_points: the most points in the time series that the result keeps; the figures are of all samples.
    """

    enabled: bool = True
    interval_s: Annotated[
        float,
        Must(
            lambda seconds: _LEAST_INTERVAL_S <= seconds <= _MOST_INTERVAL_S,
            f"{_LEAST_INTERVAL_S:g} to {_MOST_INTERVAL_S:g} seconds"
            " (telemetry.enabled=false switches sampling off)",
        ),
    ] = 0.5
    max_points: Annotated[int, at_least(2)] = 240


class Telemetry:
    """Samples in the background while a part is open. Parts follow one another; they do not nest.

    Args:
        config: what and how often.
        gpus: CUDA's numbers of the GPUs that the measurement uses (JAX's `local_hardware_id`); empty on CPU.
        incomplete: why energy cannot be whole (other processes' devices), or None.
        probes: instead of those that `config` and `gpus` ask for.
    """

    def __init__(
        self,
        config: TelemetryConfig | None = None,
        *,
        gpus: Sequence[int] = (),
        incomplete: str | None = None,
        probes: Sequence[Probe] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config = config or TelemetryConfig()
        self.notes: list[str] = []
        self._incomplete = incomplete
        self._clock = clock
        self._on_gpu = bool(gpus)
        self._probes: list[Probe] = []
        if self.config.enabled:
            self._probes = self._open(gpus) if probes is None else list(probes)
        self._totals = Totals()
        self._parts: dict[Hashable, Totals] = {}
        self._window = Totals()
        self._points: list[Point] = []
        self._stride_s = self.config.interval_s
        self._origin: float | None = None
        self._last: tuple[float, Sample] | None = None
        self._last_end: float | None = None
        self._open_part: Hashable = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def gpu_names(self) -> tuple[str, ...]:
        return next((probe.names for probe in self._probes if isinstance(probe, GpuProbe)), ())

    def _open(self, gpus: Sequence[int]) -> list[Probe]:
        probes: list[Probe] = [HostProbe()]
        rapl = RaplProbe()
        if rapl:
            probes.append(rapl)
        elif not gpus:
            self.notes += rapl.notes
        if gpus:
            gpu_probe, reason = open_gpus(gpus)
            if gpu_probe is not None:
                probes.append(gpu_probe)
            else:
                self.notes.append(str(reason))
                logger.warning("%s", reason)
        return probes

    @contextmanager
    def part(self, key: Hashable = None) -> Iterator[None]:
        """Measures what runs in the block, for the whole and for `key`; a key may come again."""
        self._begin(key)
        try:
            yield
        finally:
            self._end()

    def _begin(self, key: Hashable) -> None:
        if self._thread is not None:
            raise RuntimeError("a part of this telemetry is open already")
        if not self._probes:
            return
        self._open_part = key
        self._stop.clear()
        try:
            self._last = (self._clock(), self._read())
        except Exception as error:
            self._give_up(error)
            return
        # A daemon: a run that is broken off must not wait for it.
        self._thread = threading.Thread(target=self._loop, name="moejax-telemetry", daemon=True)
        self._origin = self._last[0] if self._origin is None else self._origin
        self._thread.start()

    def _end(self) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join(_JOIN_SECONDS)
        if self._thread.is_alive():
            self._probes = []
            self._note(f"a sample took over {_JOIN_SECONDS:g} s; sampling was given up")
        else:
            try:
                self._sample()
            except Exception as error:
                self._give_up(error)
        self._thread = None
        self._last = None

    def _loop(self) -> None:
        try:
            while not self._stop.wait(self.config.interval_s):
                self._sample()
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """A measurement must not fail over what is beside it."""
        logger.error("telemetry", exc_info=error)
        self._note(f"sampling stopped: {type(error).__name__}: {error}")

    def _note(self, text: str) -> None:
        self.notes.append(text)
        logger.warning("telemetry: %s", text)

    def _read(self) -> Sample:
        samples = [probe.read() for probe in self._probes]
        gauges = {name: value for sample in samples for name, value in sample.gauges.items()}
        return Sample(gauges, {name: value for sample in samples for name, value in sample.counters.items()})

    def _sample(self) -> None:
        assert self._last is not None and self._origin is not None
        (before, first), now, second = self._last, self._clock(), self._read()
        part = self._parts.setdefault(self._open_part, Totals())
        for totals in (self._totals, part, self._window):
            totals.add(now - before, first, second)
        self._last, self._last_end = (now, second), now
        if self._window.seconds >= 0.99 * self._stride_s:
            # The open window ends as a point; once there are too many, every two neighbours become one.
            self._points.append((now - self._origin, self._window))
            self._window = Totals()
            if len(self._points) >= 2 * self.config.max_points:
                self._points = halve(self._points)
                self._stride_s *= 2

    def summary(self, *keys: Hashable, output_tokens: int | None = None) -> Reading:
        """Flat metrics of the parts named `keys`, or without any of all; empty if telemetry is switched off.
        Energy is of the devices in use, of CPU packages whoever used them."""
        if not self.config.enabled:
            return {}
        totals = merged([self._parts[key] for key in keys if key in self._parts]) if keys else self._totals
        return summarize(totals, len(self.gpu_names), self._energy(totals), output_tokens)

    def _energy(self, totals: Totals) -> float | None:
        """Joules of the devices in use, None where not all of them or not all of the time could be read."""
        if self._incomplete is not None:
            return None
        if not self._on_gpu:
            return totals.whole("cpu_energy_j")
        return totals.gpu_energy(len(self.gpu_names))

    def series(self) -> dict[str, list[float | None]]:
        """`time_s` (from the first part's begin, at the point's end) and a column for each figure: at most
        `max_points` points, each the mean over its stretch of measured time."""
        points = list(self._points)
        if (
            self._origin is not None
            and self._last_end is not None
            and (not points or self._window.seconds > 0.5 * self._stride_s)
        ):
            points.append((self._last_end - self._origin, self._window))
        while len(points) > self.config.max_points:
            points = halve(points)
        rows = [window_point(totals) for _, totals in points]
        columns: dict[str, list[float | None]] = {"time_s": [round(end, 3) for end, _ in points]}
        for name in dict.fromkeys(name for row in rows for name in row):
            values = [row.get(name) for row in rows]
            if any(value is not None for value in values):
                # Five digits: a thousand points of them stay small in a result.
                columns[name] = [None if v is None else float(f"{v:.5g}") for v in values]
        return columns

    def report(self) -> dict[str, Any]:
        """Returns what `result["telemetry"]` keeps: how it was sampled, a row per GPU, the series, and why a
        figure is missing."""
        if not self.config.enabled:
            return {"enabled": False}
        totals = self._totals
        energy = self._energy(totals)
        source = "rapl" if not self._on_gpu else "nvml_power" if totals.by_power else "nvml_counter"
        return {
            "enabled": True,
            "interval_s": self.config.interval_s,
            "seconds": totals.seconds,
            "samples": totals.samples,
            "energy_source": source if energy is not None else None,
            "devices": [device_row(totals, index, name) for index, name in enumerate(self.gpu_names)],
            "notes": self._reasons(energy),
            "series": self.series(),
        }

    def _reasons(self, energy: float | None) -> list[str]:
        reasons = [*self.notes, *(note for probe in self._probes for note in probe.notes)]
        if energy is None:
            if self._incomplete is not None:
                reasons.append(f"no energy: {self._incomplete}")
            elif not self._totals.samples:
                reasons.append("no energy: nothing was measured")
            elif not any("energy" in reason or "GPU telemetry" in reason for reason in reasons):
                device = "GPU" if self._on_gpu else "CPU"
                reasons.append(f"no energy: no {device} in use reported it all of the time")
        return list(dict.fromkeys(reasons))
