"""Several processes that run one JAX program (multi-controller SPMD), each with devices of its own.

Every process runs the same code on the same configuration and starts the same device programs in the same
order. Who they are comes from the environment that started them:

    JAX_COORDINATOR_ADDRESS=HOST:PORT  JAX_NUM_PROCESSES=N  JAX_PROCESS_ID=I   in each of N processes, or
    srun (SLURM_PROCID, SLURM_NTASKS, SLURM_STEP_NODELIST, …)                  one process a task

Process 0 tracks, writes and prints (`experiments`). What depends on a clock must be process 0's decision
(`agree`). A process that dies ends the others (`liveness`). MOEJAX_HEARTBEAT_SECONDS and
MOEJAX_CONNECT_SECONDS replace the bounds below. Importing this module imports no JAX.
"""

import atexit
import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeVar

from moejax.core.errors import ConfigError, DeviceError
from moejax.core.words import one_line
from moejax.sharding import _compat, liveness

HEARTBEAT_SECONDS = 30
"""A process that JAX's coordination service has not heard of for so long is dead. JAX's default is 100."""
CONNECT_SECONDS = 300
"""The longest wait at the start for all processes to have come."""
_SHUTDOWN_SECONDS = 900  # at the end, for process 0 to have written and uploaded its results
# Every collective that waits holds a thread of XLA's CPU client, which has one a core. On two cores some
# twenty un-awaited steps of four devices deadlock, with and without jax_cpu_enable_async_dispatch (which is
# for programs of one device); with so many threads 300 do not. Eight devices in one process deadlock too.
_CPU_THREADS = 64
_RECLAIM_EVERY = 256  # agreed values after which their keys are deleted

_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
_START = f"each process needs {_JAX[0]}=HOST:PORT, {_JAX[1]}=N and {_JAX[2]}=I, or a start by srun"

T = TypeVar("T")


@dataclass(frozen=True)
class LaunchEnvironment:
    """This process's place among all, as the environment gives it.

    Attributes:
        index, count: which process, of how many.
        coordinator: HOST:PORT of process 0's coordination service; None for one process, and under SLURM
            until JAX's own detection has found it.
        local_device_ids: the only GPUs that this process may see; None: all of its machine's.
    """

    index: int = 0
    count: int = 1
    coordinator: str | None = None
    local_device_ids: tuple[int, ...] | None = None

    @property
    def local_devices(self) -> int:
        """Devices of this process. Starts JAX's backend."""
        import jax

        return jax.local_device_count()


def read_environment(environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
    """Reads which process this is; by default a single one. The JAX_* variables come before SLURM's.

    Raises:
        ConfigError: variables are missing, malformed or contradict each other; it names them.
    """
    environ = os.environ if environ is None else environ
    given = {name: environ[name] for name in _JAX if environ.get(name)}
    if given.get("JAX_NUM_PROCESSES") == "1":
        if given.get("JAX_PROCESS_ID", "0") != "0":
            raise ConfigError(
                f"JAX_PROCESS_ID={given['JAX_PROCESS_ID']} and JAX_NUM_PROCESSES=1: it must be 0"
            )
        return LaunchEnvironment()  # on purpose, whatever else is said: a process by itself
    slurm = None if len(given) == len(_JAX) else _read_slurm(environ)
    if not given:
        return slurm or LaunchEnvironment()
    if slurm is None and len(given) < len(_JAX):
        missing = [name for name in _JAX if name not in given]
        raise ConfigError(f"{', '.join(given)} set without {' and '.join(missing)}: {_START}")
    slurm = slurm or LaunchEnvironment()
    count = _whole(given, "JAX_NUM_PROCESSES", 1, slurm.count)
    index = _whole(given, "JAX_PROCESS_ID", 0, slurm.index)
    for name, value, theirs, of in (
        ("JAX_NUM_PROCESSES", count, slurm.count, "SLURM_NTASKS"),
        ("JAX_PROCESS_ID", index, slurm.index, "SLURM_PROCID"),
    ):
        if len(given) < len(_JAX) and value != theirs:
            raise ConfigError(
                f"{name}={value} and {of}={theirs} contradict: set all of {', '.join(_JAX)} or none"
            )
    if index >= count:
        raise ConfigError(f"JAX_PROCESS_ID={index} and JAX_NUM_PROCESSES={count}: it must be in [0, {count})")
    if address := given.get("JAX_COORDINATOR_ADDRESS"):
        _host_port(address)
    return LaunchEnvironment(index, count, address, slurm.local_device_ids)


def _read_slurm(environ: Mapping[str, str]) -> LaunchEnvironment | None:
    """Reads this task of a SLURM step; None outside of one, and for a step of one task."""
    if not environ.get("SLURM_PROCID") or not environ.get("SLURM_NTASKS"):
        return None
    count = _whole(environ, "SLURM_NTASKS", 1)
    if count == 1:
        return None
    if missing := [name for name in _SLURM if not environ.get(name)]:
        raise ConfigError(
            f"SLURM_NTASKS={count} without {' and '.join(missing)}: start with srun, so that every task "
            "runs, or set JAX_NUM_PROCESSES=1 for a process by itself"
        )
    index = _whole(environ, "SLURM_PROCID", 0)
    if index >= count:
        raise ConfigError(f"SLURM_PROCID={index} and SLURM_NTASKS={count} contradict each other")
    nodes = _whole(environ, "SLURM_STEP_NUM_NODES", 1, 1)
    # As JAX does: a GPU a task. But a task that has its node for itself has all of its GPUs.
    local = (_whole(environ, "SLURM_LOCALID", 0),) if count > nodes else None
    return LaunchEnvironment(index, count, None, None if environ.get("JAX_LOCAL_DEVICE_IDS") else local)


class _Processes:
    """The running program's processes, seen from this one."""

    def __init__(self, info: LaunchEnvironment, connect_seconds: int, abort: liveness.AbortHandler) -> None:
        assert info.coordinator is not None
        self.info = info
        self.failure: int | None = None
        self._values = 0
        self._client = _compat.coordination_client()
        host = _host_port(info.coordinator)[0]
        peers = liveness.connect(self._client, info.index, info.count, host, connect_seconds)
        self._liveness, self._abort = liveness.Liveness(info.index, info.count, peers), abort
        abort.line = (
            f"error: process {info.index} of {info.count} was aborted: another process has died or lost its "
            "connection, or the runtime has failed; the lines above say which"
        )
        abort.code, abort.seconds = 1, liveness.GRACE_SECONDS + 1.0
        # Registered after JAX's own end, and so run before it: that one waits for all processes.
        atexit.register(self._leave)
        self._old_hook, sys.excepthook = sys.excepthook, self._on_exception

    def broadcast(self, text: str) -> str:
        """Process 0's text, for all. One round trip to the coordination service; no device takes part."""
        number = self._values
        self._values += 1
        folder = f"moejax/agreed/{number // _RECLAIM_EVERY}"
        key = f"{folder}/{number}"
        if self.info.index == 0:
            self._client.key_value_set(key, text)
        else:
            text = self._wait_for(key)
        if number % _RECLAIM_EVERY == _RECLAIM_EVERY - 1:
            # Nobody may still have to read what is deleted here.
            self._client.wait_at_barrier(f"{folder}/read", _SHUTDOWN_SECONDS * 1000)
            if self.info.index == 0:
                self._client.key_value_delete(f"{folder}/")
        return text

    def _wait_for(self, key: str) -> str:
        # However long process 0 takes: if it dies, or ends, this process is ended by `liveness`.
        while True:
            try:
                return str(self._client.blocking_key_value_get(key, 60_000))
            except RuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self.failure = self.failure or 1
        self._old_hook(kind, error, trace)

    def _leave(self) -> None:
        """Leaves the program at the interpreter's end, in order or on an error."""
        import jax

        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self._liveness.leave(self.failure or 0)
        if self.failure is not None:
            os._exit(self.failure)  # JAX's own end would wait for processes that wait for this one
        jax.distributed.shutdown()
        self._abort.remove()


# A process is in one program of JAX's at most, from `initialize` to its end; JAX keeps that as global state.
_joined: _Processes | None = None


def initialize_from_environment() -> LaunchEnvironment:
    """Joins the other processes, if the environment speaks of any; call it before anything touches a device.

    On CPU collectives go through Gloo. A second call gives the first one's answer.

    Raises:
        ConfigError: see `read_environment`, or a bound that is no whole number.
        DeviceError: the processes do not come together in time, or the coordinator's port is taken.
    """
    global _joined
    if _joined is not None:
        return _joined.info
    place = read_environment()
    if place.count == 1:
        return place
    heartbeat = _whole(os.environ, "MOEJAX_HEARTBEAT_SECONDS", 2, HEARTBEAT_SECONDS)
    connect = _whole(os.environ, "MOEJAX_CONNECT_SECONDS", 1, CONNECT_SECONDS)
    coordinator = place.coordinator or _compat.slurm_coordinator()
    apart = (
        f"process {place.index} of {place.count} cannot join the others at {coordinator} within {connect} s"
    )
    remedy = "check that all processes run, that this address is process 0's, and that its port is free"
    taken = place.index == 0 and liveness.port_fault(_host_port(coordinator)[1])
    if taken and "JAX_COORDINATOR_BIND_ADDRESS" not in os.environ:
        raise DeviceError(f"{apart}: {taken}; {remedy}")
    # JAX's client aborts when it has waited for so long.
    abort = liveness.AbortHandler(f"error: {apart}; {remedy}", 2)
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    reserve_cpu_threads()
    try:
        jax.distributed.initialize(
            coordinator_address=coordinator,
            num_processes=place.count,
            process_id=place.index,
            local_device_ids=place.local_device_ids,
            cluster_detection_method="deactivate",
            initialization_timeout=connect,
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=_SHUTDOWN_SECONDS,
        )
        _joined = _Processes(replace(place, coordinator=coordinator), connect, abort)
    except (RuntimeError, OSError, ValueError) as error:
        abort.remove()
        if "must be called before" in str(error):
            raise
        reason = one_line(error)[:300]
        raise DeviceError(f"{apart}: {reason}; {remedy}") from error
    return _joined.info


def reserve_cpu_threads() -> None:
    """Gives XLA's CPU client threads enough for collectives over several CPU devices, in one process too.

    Call it before anything touches a device. Programs for one device go without: no thread of theirs waits.
    """
    os.environ.setdefault("PJRT_NPROC", str(max(_CPU_THREADS, os.cpu_count() or 1)))


def process_count() -> int:
    """Processes that have joined."""
    return _joined.info.count if _joined else 1


def broadcast(text: str) -> str:
    """Process 0's text, in every process. All must call it equally often. With one process: nothing."""
    return _joined.broadcast(text) if _joined else text


def agree(value: int) -> int:
    """Process 0's value: for decisions that depend on a clock, which must be the same in every process.

    All must call it equally often. Costs 0.1 to 0.4 ms on one machine; nothing with one process.
    """
    return int(_joined.broadcast(str(value))) if _joined else value


def settle(tree: T) -> T:
    """Waits for arrays where several processes share CPUs: many collectives under way starve each other
    there. Elsewhere nothing is waited for."""
    if _joined:
        import jax

        if jax.default_backend() == "cpu":
            jax.block_until_ready(tree)
    return tree


def report_failure(code: int) -> None:
    """Notes that this process ends with an error: at its end it tells the others, which end too. With one
    process: nothing."""
    if _joined and _joined.failure is None:
        _joined.failure = code


def _host_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"JAX_COORDINATOR_ADDRESS={address!r} must be HOST:PORT, such as 10.0.0.1:1234")
    return host.strip("[]"), int(port)


def _whole(environ: Mapping[str, str], name: str, least: int, default: int | None = None) -> int:
    text = environ.get(name, "")
    if not text:
        assert default is not None
        return default
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name}={text!r} must be a whole number of at least {least}")
    return int(text)
