"""Reads what `jax.profiler` has written: which HLO instruction ran when, on which thread or stream.

On CPU every instruction that XLA runs by itself (a "thunk") is an event on its thread. A loop's event is only
as long as it took to start; its body's are events of their own, perhaps on another thread. (There is a second
event, "end: NAME", for each, but a loop's may come long after what follows it has begun.) On GPU the kernels
are events on the lines "Stream …" of the device's plane; that part follows the format and has not been run.
"""

import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moejax.core.errors import MoejaxError

SPAN = "moejax.profile.generation"
"""Name of the annotation around each generation."""


class TraceError(MoejaxError, RuntimeError):
    """A profile cannot be read, or holds nothing."""


@dataclass(frozen=True, slots=True)
class Event:
    """One execution of an instruction; nanoseconds on the profiler's clock.

    Attributes:
        instruction: its name in the compiled program.
        program: the program's number in this trace.
        run: the number of the execution of the program that it belongs to.
    """

    instruction: str
    program: int
    run: int
    start: float
    end: float


@dataclass(frozen=True)
class Trace:
    """`events` by rising start, `spans` (start, end) of the generations in order."""

    events: tuple[Event, ...]
    spans: tuple[tuple[float, float], ...]


def find_trace(directory: Path) -> Path:
    """The profiler's .xplane.pb under `directory`, the newest one.

    Raises:
        TraceError: there is none.
    """
    files = sorted(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise TraceError(f"jax.profiler has left no .xplane.pb under {directory}")
    return files[-1]


def read_trace(file: Path) -> Trace:
    """Reads a trace.

    Raises:
        TraceError: it cannot be read, or has no event of a compiled program.
    """
    from jax.profiler import ProfileData

    try:
        planes = list(ProfileData.from_file(str(file)).planes)
    except (RuntimeError, ValueError, OSError) as error:
        raise TraceError(f"cannot read the profile {file}: {' '.join(str(error).split())}") from error
    devices = [plane for plane in planes if plane.name.startswith("/device:")]
    hosts = [plane for plane in planes if plane.name == "/host:CPU"]
    events = [event for plane in devices for event in _device_events(plane)]
    spans: list[tuple[float, float]] = []
    for plane in hosts:
        ran, annotated = _host_events(plane)
        spans += annotated
        events += ran
    if not events:
        raise TraceError(
            f"the profile {file} has no event of a compiled program: this backend's profiler records none"
        )
    return Trace(tuple(sorted(events, key=lambda event: (event.start, -event.end))), tuple(sorted(spans)))


def _host_events(plane: Any) -> tuple[list[Event], list[tuple[float, float]]]:
    """Returns the instructions that the CPU ran, and the annotated spans."""
    events: list[Event] = []
    spans: list[tuple[float, float]] = []
    for line in plane.lines:
        for event in line.events:
            start, end = event.start_ns, event.start_ns + event.duration_ns
            if event.name == SPAN:
                spans.append((start, end))
                continue
            stats = dict(event.stats)
            if "hlo_op" in stats:
                program, run = int(stats.get("program_id", 0)), int(stats.get("run_id", 0))
                events.append(Event(str(stats["hlo_op"]), program, run, start, end))
    return events, spans


def _device_events(plane: Any) -> Iterable[Event]:
    """Kernels that a GPU ran. A kernel has no run's number of its own: it is its module's."""
    modules: list[tuple[float, int]] = []
    kernels: list[tuple[str, Mapping[str, Any], float, float]] = []
    for line in plane.lines:
        for event in line.events:
            stats, start = dict(event.stats), event.start_ns
            if line.name == "XLA Modules":
                modules.append((start, int(stats.get("run_id", len(modules)))))
            elif line.name.startswith("Stream") and "hlo_op" in stats:
                kernels.append((str(stats["hlo_op"]), stats, start, start + event.duration_ns))
    modules.sort()
    starts = [start for start, _ in modules]
    for name, facts, start, end in kernels:
        place = bisect.bisect_right(starts, start) - 1
        run = modules[place][1] if place >= 0 else 0
        yield Event(name, int(facts.get("program_id", 0)), int(facts.get("run_id", run)), start, end)
