"""Telemetry of the devices that a measurement uses, the cost of what they made, and both in the result."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from moejax.core.files import to_jsonable
from moejax.core.price import Price
from moejax.tracking.telemetry import Telemetry, TelemetryConfig

# What a case's row gets of its telemetry; all of it is in `result["telemetry"]["cases"]`.
_IN_ROWS = ("energy_per_output_token_j", "mean_gpu_power_w", "gpu_slowdown_percent")


def open_telemetry(config: TelemetryConfig | None, num_devices: int) -> Telemetry:
    """Opens the telemetry of this process and machine, and of the first `num_devices` devices that JAX
    counts, which is how meshes are laid out. None switches it off."""
    used = jax.devices()[:num_devices]
    mine = [device for device in used if device.process_index == jax.process_index()]
    gpus = [device.local_hardware_id for device in mine if device.platform == "gpu"]
    incomplete = None
    if jax.process_count() > 1:
        incomplete = f"{jax.process_count()} processes took part, and each reads its own devices only"
    return Telemetry(config or TelemetryConfig(enabled=False), gpus=gpus, incomplete=incomplete)


class Meter:
    """Reads telemetry beside a measurement, case by case, and puts it into the result.

    Args:
        config: of the sampling; None: none.
        price: of a device; None: no cost.
        num_devices: that the measurement uses. Virtual CPU devices are one machine, and paid for once.
    """

    def __init__(
        self, config: TelemetryConfig | None = None, price: Price | None = None, num_devices: int = 1
    ) -> None:
        self.telemetry = open_telemetry(config, num_devices)
        self._price = price
        self._probe = np.zeros(2**20, np.float32)
        self._pace: dict[int, list[float]] = defaultdict(list)
        self._devices = 1 if jax.devices()[0].platform == "cpu" else num_devices

    @contextmanager
    def part(self, case: int) -> Iterator[None]:
        """Around what is measured of a case, and nothing else. On a CPU the machine's pace is read before and
        after: neighbours on shared cores and caches move it, and with it every time, by half."""
        self._read_pace(case)
        with self.telemetry.part(case):
            yield
        self._read_pace(case)

    def _read_pace(self, case: int) -> None:
        if self.telemetry.config.enabled and jax.devices()[0].platform == "cpu":
            start = time.perf_counter()
            self._probe.max()
            self._pace[case].append(self._probe.nbytes / (time.perf_counter() - start) / 1e9)

    def add_to(self, result: dict[str, Any], cases: Sequence[int] | None = None) -> None:
        """Telemetry and cost into the flat metrics, the cases' rows and `result["telemetry"]`.

        Args:
            result: as built, before it is written.
            cases: those that its flat metrics are of; None: all.
        """
        rows = result["cases"]
        chosen = range(len(rows)) if cases is None else cases
        metrics = result["metrics"]
        tokens = metrics.get("total_output_tokens")
        elsewhere = _elsewhere(result.get("backends") or ())
        flat = _without_devices(
            self.telemetry.summary(*chosen, output_tokens=tokens),
            any(rows[index].get("backend") in elsewhere for index in chosen),
        )
        readings = [pace for index in chosen for pace in self._pace[index]]
        metrics |= flat | self._cost(metrics) | _pace(readings)
        # The system's own record of a process's peak lags behind what is sampled.
        largest = flat.get("max_process_rss_bytes") or 0
        for row in (metrics, *(b for b in result.get("backends") or () if b.get("kind") == "moejax")):
            if row.get("process_peak_bytes") is not None:
                row["process_peak_bytes"] = max(row["process_peak_bytes"], int(largest))
        table = []
        for index, row in enumerate(rows):
            figures = _without_devices(
                self.telemetry.summary(index, output_tokens=row.get("total_output_tokens")),
                row.get("backend") in elsewhere,
            )
            table.append({"case": index, **figures})
            row |= {name: figures[name] for name in _IN_ROWS if figures.get(name) is not None}
            row |= self._cost(row) | _pace(self._pace[index])
        result["telemetry"] = to_jsonable({**self.telemetry.report(), "cases": table})

    def _cost(self, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        if self._price is None:
            return {}
        rates = (metrics.get("output_throughput"), metrics.get("total_token_throughput"))
        return self._price.metrics(self._devices, *rates)


def _pace(readings: Sequence[float]) -> dict[str, float]:
    """Returns the median of reads of a cache, and how far the middle eight tenths of them lie apart."""
    if not readings:
        return {}
    low, median, high = np.percentile(readings, (10, 50, 90))
    return {"cache_read_gb_s": float(median), "cache_read_spread": float(high / low)}


def _elsewhere(backends: Sequence[Mapping[str, Any]]) -> set[Any]:
    """Names of those whose work is not on the devices that are read: a server, and a peer on the GPU while
    JAX has the CPU or the other way round."""
    on_cpu = jax.devices()[0].platform == "cpu"
    return {
        backend.get("name")
        for backend in backends
        if backend.get("kind") == "openai_endpoint"
        or (backend.get("kind") != "moejax" and (backend.get("device") == "cpu") != on_cpu)
    }


def _without_devices(figures: Mapping[str, Any], elsewhere: bool) -> dict[str, Any]:
    """Energy and the GPUs' figures are None for work that was done elsewhere."""
    return {k: None if elsewhere and ("energy" in k or "gpu" in k) else v for k, v in figures.items()}
