"""Says whether an engine is well: what its steps, its devices and its peers show, every few seconds."""

import functools
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax

from moejax.core.errors import RequestError
from moejax.core.host import host_memory
from moejax.core.words import one_line
from moejax.tracking.probes import Probe, RaplProbe, open_gpus, slowdown_names

State = Literal["healthy", "degraded", "unhealthy"]
STATES: tuple[State, ...] = ("healthy", "degraded", "unhealthy")
_HOT_C, _FULL, _LEAST_HOST_BYTES = 85.0, 0.98, 1e9


@dataclass(frozen=True)
class Health:
    """ "degraded" still serves, "unhealthy" should get no further requests; `reasons` say why."""

    state: State = "healthy"
    reasons: tuple[str, ...] = ()


@functools.cache
def device_probes() -> tuple[Probe, ...]:
    """Opens, once a process, what tells of energy and heat: JAX's GPUs, and the CPU's packages."""
    gpus = [device.local_hardware_id for device in jax.local_devices() if device.platform == "gpu"]
    cpu, gpu = RaplProbe(), open_gpus(gpus)[0] if gpus else None
    return (*([gpu] if gpu else []), *([cpu] if cpu else []))


class HealthMonitor:
    """Watches an `LLM` in a thread of its own, without the engine's lock, which a step that hangs holds.

    Args:
        period_s: seconds between two looks.
        stall_s: seconds without a step, while one is in flight or work is queued, from which the engine
            stalls; longer than a step takes to compile.
        memory_s: seconds for which a failed step or a NaN counts.
        peers: tells of each, by its name, whether it is there; without any of them nothing is answered.
        probes: of the devices; None: those of `device_probes`.
    """

    def __init__(
        self,
        llm: Any,
        period_s: float = 5.0,
        *,
        stall_s: float = 120.0,
        memory_s: float = 60.0,
        peers: Mapping[str, Callable[[], bool]] | None = None,
        probes: tuple[Probe, ...] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._llm, self._period_s, self._stall_s, self._memory_s = llm, period_s, stall_s, memory_s
        self._peers, self._clock = dict(peers or {}), clock
        self._probes = device_probes() if probes is None else probes
        self._seen: dict[str, tuple[Any, float]] = {}  # a count, and when it last changed
        self._looked = self._began = clock()
        self._stop = threading.Event()
        self.check()
        self._thread = threading.Thread(target=self._loop, name="moejax-health", daemon=True)
        self._thread.start()

    def health(self) -> Health:
        """Returns what the last look found; "unhealthy" where the looks themselves have stopped."""
        if (late := self._clock() - self._looked) > 3 * self._period_s + 1.0 and not self._stop.is_set():
            return Health("unhealthy", (f"no look for {late:.0f} s: a device or a peer does not answer",))
        return self._health

    def check(self) -> Health:
        """Looks now."""
        found: list[tuple[State, str]] = [*self._engine(), *self._devices()]
        lost = []
        for name, is_there in self._peers.items():
            try:
                lost += [] if is_there() else [f"peer {name} is gone"]
            except Exception as error:
                lost.append(f"peer {name}: {one_line(error)}")
        state: State = "unhealthy" if lost and len(lost) == len(self._peers) else "degraded"
        found += [(state, why) for why in lost]
        worst = max((STATES.index(state) for state, _ in found), default=0)
        self._health, self._looked = Health(STATES[worst], tuple(why for _, why in found)), self._clock()
        return self._health

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(self._period_s)

    def _loop(self) -> None:
        while not self._stop.wait(self._period_s):
            self.check()

    def _age(self, name: str, count: Any, begin: float = -math.inf) -> float:
        """Returns for how many seconds a count has stayed what it is; one seen first, from `begin` on."""
        if name not in self._seen or self._seen[name][0] != count:
            self._seen[name] = (count, self._clock() if name in self._seen else begin)
        return self._clock() - self._seen[name][1]

    def _engine(self) -> list[tuple[State, str]]:
        engine, found = getattr(self._llm, "llm", self._llm).engine, list[tuple[State, str]]()
        try:
            stats, scheduler = engine.stats, engine.scheduler
        except RequestError as closed:
            return [("unhealthy", str(closed))]
        busy = engine._turning or engine._in_flight is not None or not scheduler.idle
        taken = (stats.steps, stats.failed_steps, busy and engine.stopped is None)
        still = self._age("progress", taken, self._began)
        if engine.stopped is not None:
            found.append(("degraded", engine.stopped))
        elif busy and still >= self._stall_s:
            held = f"{len(scheduler.running)} running, {scheduler.num_waiting} waiting"
            found.append(("unhealthy", f"no step for {still:.0f} s with {held}"))
        since, worked = self._age("failed", stats.failed_steps), self._age("worked", stats.steps)
        if since < self._memory_s:
            state: State = "unhealthy" if worked > since else "degraded"
            found.append((state, f"{stats.failed_steps} steps have failed, the last {since:.0f} s ago"))
        if self._age("nan", stats.nonfinite_tokens) < self._memory_s:
            found.append(("unhealthy", f"{stats.nonfinite_tokens} tokens without a finite log-probability"))
        return found

    def _devices(self) -> list[tuple[State, str]]:
        found = []
        for name, value in [item for probe in self._probes for item in probe.read().gauges.items()]:
            gpu = name.partition("_")[0]
            if name.endswith("temperature_c") and value is not None and value >= _HOT_C:
                found.append(f"{gpu} is at {value:.0f} °C")
            if name.endswith("slowdowns") and (why := slowdown_names(int(value or 0))):
                found.append(f"{gpu} is slowed: {', '.join(why)}")
        for device in jax.local_devices():
            stats = device.memory_stats() or {}
            if stats.get("bytes_in_use", 0) > _FULL * stats.get("bytes_limit", math.inf):
                found.append(f"device {device.id}: over {_FULL:.0%} of its memory is in use")
        if host_memory() < _LEAST_HOST_BYTES:
            found.append("under 1 GB of the host's memory is left")
        return [("degraded", why) for why in found]
