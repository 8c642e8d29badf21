"""An NVML of our own: GPUs whose power, clocks and energy follow a clock that the test moves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

from moejax.tracking.probes import Probe, open_gpus
from moejax.tracking.telemetry import Telemetry, TelemetryConfig

NEVER = TelemetryConfig(interval_s=3600.0)
"""Only the samples at a part's ends are taken by themselves; a test asks for the others."""


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


class NVMLError(Exception):
    pass


class NVMLError_NotSupported(NVMLError):
    pass


@dataclass
class FakeGpu:
    """`watts` draws energy as time passes; `fails` maps a function's name to what it raises."""

    watts: float = 100.0
    name: str = "NVIDIA A100-SXM4-80GB"
    clock_mhz: int = 1410
    utilization: int = 90
    used: int = 10 << 30
    temperature: int = 60
    slowdowns: int = 0
    energy_offset_j: float = 5000.0
    fails: dict[str, Exception] = field(default_factory=dict)


class FakeNvml:
    """The functions of `pynvml` that telemetry calls."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, gpus: list[FakeGpu], clock: Callable[[], float]) -> None:
        self.gpus, self.clock = gpus, clock
        self.started = 0
        self.opened: list[str] = []
        self._then = clock()
        self._joules = [0.0] * len(gpus)

    def settle(self) -> None:
        """Adds the energy drawn since the last call, at each GPU's present power."""
        now = self.clock()
        for index, gpu in enumerate(self.gpus):
            self._joules[index] += gpu.watts * (now - self._then)
        self._then = now

    def nvmlInit(self) -> None:
        self.started += 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        self.opened.append(f"index {index}")
        if index >= len(self.gpus):
            raise NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        self.opened.append(uuid)
        return int(uuid.rpartition("-")[2])

    def _gpu(self, handle: int, function: str) -> FakeGpu:
        gpu = self.gpus[handle]
        if function in gpu.fails:
            raise gpu.fails[function]
        return gpu

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self._gpu(handle, "name").name

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return round(1e3 * self._gpu(handle, "power").watts)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:
        gpu = self._gpu(handle, "energy")
        self.settle()
        return round(1e3 * (gpu.energy_offset_j + self._joules[handle]))

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return self._gpu(handle, "clock").clock_mhz

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(gpu=self._gpu(handle, "utilization").utilization)

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(used=self._gpu(handle, "memory").used)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return self._gpu(handle, "temperature").temperature

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:
        return self._gpu(handle, "slowdowns").slowdowns


def on_gpus(
    *gpus: FakeGpu, beside: Sequence[Probe] = (), config: TelemetryConfig = NEVER
) -> tuple[Telemetry, FakeNvml, Clock]:
    clock = Clock()
    nvml = FakeNvml(list(gpus), clock)
    probe, reason = open_gpus(range(len(gpus)), {}, nvml)
    assert probe is not None and reason is None
    telemetry = Telemetry(config, gpus=range(len(gpus)), probes=[probe, *beside], clock=clock)
    return telemetry, nvml, clock
