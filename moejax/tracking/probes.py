"""Reads what telemetry samples: this process and the machine, GPUs through NVML, the CPU's energy by RAPL.

A probe has `read() -> Sample`: gauges (values at this instant) and counters (values that only grow, whose
differences count). It never raises: what cannot be read is None, with the reason once in `notes`. No JAX
here.
"""

import importlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import psutil

from moejax.tracking.machine import read_text

logger = logging.getLogger(__name__)

Reading = dict[str, float | None]

POWERCAP = Path("/sys/class/powercap")

# Bits of nvmlDeviceGetCurrentClocksEventReasons (NVML API reference, nvmlClocksEventReasons). An idle GPU's
# clock, a chosen one and the display's are no slowdown.
SLOWDOWNS: dict[int, str] = {
    0x004: "power cap",
    0x008: "hardware slowdown",
    0x020: "software thermal",
    0x040: "hardware thermal",
    0x080: "power brake",
}


@dataclass(frozen=True)
class Sample:
    """Holds a probe's readings of one instant; None where it could not. Counters are in seconds or joules."""

    gauges: Reading = field(default_factory=dict)
    counters: Reading = field(default_factory=dict)


class Probe(Protocol):
    notes: list[str]

    def read(self) -> Sample: ...


class HostProbe:
    """Resident memory (`process_rss_bytes`), memory in use on the machine (`machine_memory_bytes`), and as
    counters the CPU seconds of this process (`cpu_s`, by its own clock) and of all together (`machine_cpu_s`,
    which ticks in hundredths)."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._process = psutil.Process()

    def read(self) -> Sample:
        try:
            rss: float | None = self._process.memory_info().rss
            memory = psutil.virtual_memory()
            times = psutil.cpu_times()
        except (psutil.Error, OSError) as error:
            _note(self.notes, f"host: {error}")
            return Sample({}, {"cpu_s": time.process_time()})
        # Guests' time is within user's already. Idle and waiting for a disk are no use of the CPU.
        idle = times.idle + getattr(times, "iowait", 0.0)
        busy = sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        return Sample(
            {"process_rss_bytes": rss, "machine_memory_bytes": memory.total - memory.available},
            {"cpu_s": time.process_time(), "machine_cpu_s": busy},
        )


class RaplProbe:
    """Energy of the CPU packages (`cpu_energy_j`, Linux's powercap), all processes' together.

    Most systems let only root read it; AMD's counters are there under the same name.
    """

    def __init__(self, root: Path = POWERCAP) -> None:
        self.notes: list[str] = []
        self._domains: list[_RaplDomain] = []
        for folder in sorted(root.glob("*-rapl:*")):
            # intel-rapl:0 is a package; intel-rapl:0:0 is a part of it, and psys contains all of them.
            if folder.name.count(":") != 1 or not (read_text(folder / "name") or "").startswith("package"):
                continue
            try:
                self._domains.append(_RaplDomain(folder))
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else error
                _note(self.notes, f"CPU energy: cannot read {folder / 'energy_uj'}: {reason}")
        if self.notes:
            self._domains = []  # a part of the packages would pass for the whole
        elif not self._domains:
            self.notes.append(f"CPU energy: no counter of a CPU package below {root}")  # usual: not logged

    def __bool__(self) -> bool:
        return bool(self._domains)

    def read(self) -> Sample:
        try:
            return Sample(counters={"cpu_energy_j": sum(domain.joules() for domain in self._domains)})
        except (OSError, ValueError) as error:
            _note(self.notes, f"CPU energy: {error}")
            return Sample(counters={"cpu_energy_j": None})


class _RaplDomain:
    """One package's counter, which starts again from 0 after `max_energy_range_uj`."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "energy_uj"
        self._range = int((folder / "max_energy_range_uj").read_text())
        self._last = int(self._file.read_text())
        self._wraps = 0

    def joules(self) -> float:
        value = int(self._file.read_text())
        if value < self._last:
            self._wraps += 1
        self._last = value
        return (value + self._wraps * self._range) / 1e6


class GpuProbe:
    """Some of the machine's GPUs: per device i the gauges `gpu{i}_power_w`, `…_sm_clock_mhz`,
    `…_utilization_percent`, `…_memory_bytes`, `…_temperature_c`, `…_slowdowns` (the bits of `SLOWDOWNS`), and
    the counter `gpu{i}_energy_j` (Volta and newer).

    `i` counts the given handles. NVML's memory includes other processes'. On GA100 the power is of the
    instant, on other GPUs since Ampere it is the mean of the last second, so a short part's power says little
    there; the energy counter does not have that fault.
    """

    def __init__(self, nvml: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
        self.notes: list[str] = []
        self.names = tuple(names)
        self._nvml = nvml
        self._handles = list(handles)
        self._unsupported: set[tuple[int, str]] = set()
        self._gauges = _gauges(nvml)

    def read(self) -> Sample:
        gauges: Reading = {}
        counters: Reading = {}
        for index, handle in enumerate(self._handles):
            for name, get in self._gauges.items():
                gauges[f"gpu{index}_{name}"] = self._get(index, name, get, handle)
            energy = self._get(index, "energy_j", self._energy, handle)
            counters[f"gpu{index}_energy_j"] = energy
        return Sample(gauges, counters)

    def _energy(self, handle: Any) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3

    def _get(self, index: int, name: str, get: Callable[[Any], float], handle: Any) -> float | None:
        if (index, name) in self._unsupported:
            return None
        try:
            return float(get(handle))
        except Exception as error:  # NVML's, or an attribute that an old binding lacks
            kind = type(error).__name__
            if "NotSupported" in kind or "FunctionNotFound" in kind or isinstance(error, AttributeError):
                self._unsupported.add((index, name))
            _note(self.notes, f"gpu{index}: {name} cannot be read: {str(error) or kind}")
            return None


def _gauges(nvml: Any) -> dict[str, Callable[[Any], float]]:
    def reasons(handle: Any) -> float:
        read = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
        # The name before driver 535.
        return (read or nvml.nvmlDeviceGetCurrentClocksThrottleReasons)(handle)

    return {
        "power_w": lambda handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "sm_clock_mhz": lambda handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "utilization_percent": lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_bytes": lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
        "temperature_c": lambda handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "slowdowns": reasons,
    }


def open_gpus(
    ordinals: Sequence[int], environ: Mapping[str, str] | None = None, nvml: Any = None
) -> tuple[GpuProbe | None, str | None]:
    """The GPUs that CUDA counts as `ordinals`, or None with the reason why they cannot be read.

    CUDA counts the devices of CUDA_VISIBLE_DEVICES, NVML all of the machine; CUDA's default order is NVML's
    where the GPUs are all of one kind.

    Args:
        ordinals: CUDA's numbers, JAX's `Device.local_hardware_id`.
        nvml: the module `pynvml`; None imports it.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
    except ImportError:
        return None, "GPU telemetry needs the package nvidia-ml-py: pip install nvidia-ml-py"
    try:
        nvml.nvmlInit()
    except Exception as error:
        return None, f"GPU telemetry: NVML cannot be started: {error}"
    visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    chosen = [item.strip() for item in visible.split(",") if item.strip()] if visible else None
    handles, names = [], []
    for ordinal in ordinals:
        place = str(ordinal) if chosen is None else chosen[ordinal] if ordinal < len(chosen) else None
        try:
            if place is None:
                raise ValueError(f"CUDA_VISIBLE_DEVICES={visible} names no device {ordinal}")
            handle = (
                nvml.nvmlDeviceGetHandleByIndex(int(place))
                if place.isdecimal()
                else nvml.nvmlDeviceGetHandleByUUID(place)
            )
            name = nvml.nvmlDeviceGetName(handle)
        except Exception as error:
            return None, f"GPU telemetry: device {ordinal} ({place}) cannot be opened: {error}"
        handles.append(handle)
        names.append(name.decode() if isinstance(name, bytes) else str(name))
    return GpuProbe(nvml, handles, names), None


def slowdown_names(bits: int) -> list[str]:
    """The reasons for which a GPU runs below the clock that was asked for."""
    return [name for bit, name in SLOWDOWNS.items() if bits & bit]


def _note(notes: list[str], text: str) -> None:
    """Keeps and logs a reason, the first time that it is given."""
    if text not in notes:
        notes.append(text)
        logger.info("telemetry: %s", text)
