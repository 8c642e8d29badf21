"""Runs a script in several processes that form one JAX program on CPU devices.

    outputs = run_processes(Path("tests/sharding/two_process_sum.py"), count=2, devices=4)

The script calls `moejax.sharding.distributed.initialize_from_environment()` first.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Running:
    """A process under way, with its output in files, so that no pipe fills up."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    @property
    def stdout(self) -> str:
        return self.out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self.err.read_text(errors="replace")

    def wait_for(self, text: str, timeout: float) -> None:
        """Until stdout has `text`."""
        until = time.monotonic() + timeout
        while text not in self.stdout:
            if self.process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"no {text!r} in time:\n{self.stdout}\n{self.stderr[-4000:]}")
            time.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def environment(index: int, count: int, devices: int, port: int) -> dict[str, str]:
    """What one process is started with: this test's own environment, and its place among the others."""
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
        "MOEJAX_CONNECT_SECONDS": "120",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
    }


@contextlib.contextmanager
def started(
    argv: Sequence[str],
    *,
    count: int = 2,
    devices: int = 4,
    env: Mapping[str, str] | None = None,
    env_of: Sequence[Mapping[str, str]] = (),
    cwd: Path | None = None,
) -> Iterator[list[Running]]:
    """`python ARGV` in `count` processes; whatever of them is left at the end is killed.

    Args:
        env: added to every process's environment; env_of: to each one's.
    """
    port = free_port()
    running: list[Running] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for index in range(count):
                out, err = Path(folder, f"out{index}"), Path(folder, f"err{index}")
                own = env_of[index] if env_of else {}
                with out.open("wb") as stdout, err.open("wb") as stderr:
                    process = subprocess.Popen(
                        [sys.executable, *argv],
                        stdin=subprocess.DEVNULL,
                        stdout=stdout,
                        stderr=stderr,
                        cwd=cwd,
                        env={**environment(index, count, devices, port), **(env or {}), **own},
                        start_new_session=True,
                    )
                running.append(Running(process, out, err))
            yield running
        finally:
            for item in running:
                if item.process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(item.process.pid, signal.SIGKILL)
                item.process.wait()


def wait_all(running: Sequence[Running], timeout: float) -> list[int]:
    """Exit codes.

    Raises:
        AssertionError: not all have ended in time; with what they said.
    """
    until = time.monotonic() + timeout
    try:
        return [item.process.wait(max(0.1, until - time.monotonic())) for item in running]
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not all processes ended within {timeout} s:\n{_said(running)}") from None


def run_processes(
    script: Path | str,
    count: int = 2,
    devices: int = 4,
    *,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    timeout: float = 180.0,
) -> list[str]:
    """What each process wrote to stdout.

    Raises:
        AssertionError: one of them failed, or they did not end in time; with what all of them said.
    """
    with started([str(script), *args], count=count, devices=devices, env=env) as running:
        codes = wait_all(running, timeout)
        if any(codes):
            raise AssertionError(f"exit codes {codes}:\n{_said(running)}")
        return [item.stdout for item in running]


def _said(running: Sequence[Running]) -> str:
    return "\n".join(
        f"--- process {index}\n{item.stdout[-2000:]}\n{item.stderr[-6000:]}"
        for index, item in enumerate(running)
    )
