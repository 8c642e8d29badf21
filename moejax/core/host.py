"""Which of the machine's processors a run may use, and how much of its memory is left."""

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from moejax.core.checked import Checked, NonNegativeInt
from moejax.core.errors import ConfigError

_NODES = Path("/sys/devices/system/node")
_given: frozenset[int] | None = None  # this process's, before its first run
_chosen: frozenset[int] | None = None  # what that run took


def usable_cpus() -> list[int]:
    """Returns the numbers of the processors that this process may run on."""
    affinity = getattr(os, "sched_getaffinity", None)
    return sorted(affinity(0)) if affinity else list(range(os.cpu_count() or 1))


def parse_cpus(key: str, text: str) -> frozenset[int]:
    """Returns the processors that a list such as "0-3,8" names, as Linux writes it.

    Raises:
        ConfigError: it is none.
    """
    chosen: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip())
        span = match and range(int(match[1]), int(match[2] or match[1]) + 1)
        if not span:
            raise ConfigError(f"{key}={text}: expected processors as 0-3 or 0,2 or [0,2]")
        chosen |= set(span)
    return frozenset(chosen)


def format_cpus(cpus: Iterable[int]) -> str:
    """Returns processors as `parse_cpus` reads them, in runs: "0-3,8"."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(f"{low}" if low == high else f"{low}-{high}" for low, high in runs)


@dataclass(frozen=True)
class HostConfig(Checked, section="host"):
    """Where on the host a run's threads may be, those of other backends' processes included.

    Attributes:
        cpus: processors, as "0-3,8", one number or a list; None: those that the process was given.
        numa: all processors of this memory node; pages lie where the thread that touches them first runs.
    """

    cpus: str | int | list[int] | None = None
    numa: NonNegativeInt | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.cpus is not None and self.numa is not None:
            raise ConfigError("host.cpus and host.numa both choose processors: give one of them")
        if self.cpus is not None:
            listed = self.cpus if isinstance(self.cpus, list) else [self.cpus]
            chosen = parse_cpus("host.cpus", ",".join(str(item) for item in listed))
            object.__setattr__(self, "cpus", format_cpus(chosen))

    def pin(self) -> None:
        """Keeps this process and what it starts to the chosen processors; before JAX starts its threads.

        Raises:
            ConfigError: the machine or this process has not got them, or the system cannot pin, or an earlier
                run of this process took others.
        """
        global _given, _chosen
        _given = _given or frozenset(usable_cpus())
        chosen = self.chosen()
        if _chosen not in (None, chosen):
            raise ConfigError(
                f"host: JAX's threads are on processors {format_cpus(_chosen or ())} already, "
                f"not on {format_cpus(chosen)}; sweep over processors with hydra/launcher=joblib"
            )
        _chosen = chosen
        if chosen != set(usable_cpus()):
            os.sched_setaffinity(0, chosen)

    def chosen(self) -> frozenset[int]:
        """Returns the processors that a run would have; raises as `pin`, but for what earlier runs took."""
        usable = _given or frozenset(usable_cpus())
        if self.cpus is None and self.numa is None:
            return usable
        key, value = ("host.numa", self.numa) if self.cpus is None else ("host.cpus", self.cpus)
        if not hasattr(os, "sched_setaffinity"):
            raise ConfigError(f"{key}={value}: this system cannot pin a process to processors")
        chosen = parse_cpus(key, str(self.cpus)) if self.numa is None else self._of_node(self.numa)
        if missing := chosen - usable:
            raise ConfigError(
                f"{key}={value}: processor {format_cpus(missing)} is not among this process's "
                f"({format_cpus(usable)})"
            )
        return chosen

    @staticmethod
    def _of_node(node: int) -> frozenset[int]:
        path = _NODES / f"node{node}" / "cpulist"
        try:
            return parse_cpus("host.numa", path.read_text())
        except (OSError, ConfigError):
            known = ", ".join(sorted(entry.name for entry in _NODES.glob("node[0-9]*"))) or "none is told of"
            raise ConfigError(f"host.numa={node}: no such memory node here ({known})") from None


def host_memory(root: str | os.PathLike[str] = "/") -> float:
    """Returns the bytes of memory that this process may still take: what the machine has available, or what
    its control groups (of either version, found below `root`) leave, if that is less."""
    return min(float(psutil.virtual_memory().available), *_left_in_groups(Path(root)), math.inf)


def _left_in_groups(root: Path) -> Iterator[float]:
    groups = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    for _, controllers, path in groups:
        limit, used = ("limit_in_bytes", "usage_in_bytes") if controllers else ("max", "current")
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        place = top / path.strip("/")
        for folder in (place, *place.parents) if controllers in ("", "memory") else ():
            sizes = [_text(folder / f"memory.{name}").strip() for name in (limit, used)]
            if folder.is_relative_to(top) and all(size.isdecimal() for size in sizes):
                # Files that were read lately count as used, and are given up when memory is wanted.
                files = re.findall(r"^(?:total_)?inactive_file (\d+)", _text(folder / "memory.stat"), re.M)
                yield max(float(sizes[0]) - float(sizes[1]) + max(map(float, files), default=0.0), 0.0)


def _text(path: Path) -> str:
    """Returns a file's text; nothing where it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
