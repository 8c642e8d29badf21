"""Several processes as one JAX program: who they are, that they compute what one does, how they end."""

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from moejax.bench.driver import drive
from moejax.bench.traffic import PlannedRequest
from moejax.core.errors import ConfigError
from moejax.core.scheduling import SchedulingConfig
from moejax.engine.requests.api import CompletionOutput, RequestMetrics, RequestOutput, SamplingParams
from moejax.sharding.distributed import LaunchEnvironment, agree, broadcast, process_count, read_environment
from tests.examples import slow_but
from tests.sharding.processes import environment, free_port, run_processes, started, wait_all

pytestmark = pytest.mark.multidevice

HERE = Path(__file__).parent
COLLECTIVES = HERE / "two_process_collectives.py"
LOOP = str(HERE / "two_process_loop.py")

JAX = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[1-4]",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


# --- who they are -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, LaunchEnvironment()),
        (JAX, LaunchEnvironment(3, 4, "10.0.0.1:1234")),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "[fe80::1]:80"}, LaunchEnvironment(3, 4, "[fe80::1]:80")),
        (SLURM, LaunchEnvironment(2, 4)),
        (SLURM | {"SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1"}, LaunchEnvironment(2, 4, None, (1,))),
        (SLURM | {"SLURM_STEP_NUM_NODES": "2", "JAX_LOCAL_DEVICE_IDS": "0,1"}, LaunchEnvironment(2, 4)),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, LaunchEnvironment()),
        (without(SLURM, "SLURM_PROCID"), LaunchEnvironment()),  # the shell of an allocation
        (SLURM | JAX, LaunchEnvironment(3, 4, "10.0.0.1:1234")),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "node1:9"}, LaunchEnvironment(2, 4, "node1:9")),
        (without(SLURM, "SLURM_STEP_NODELIST") | {"JAX_NUM_PROCESSES": "1"}, LaunchEnvironment()),
        (JAX | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, LaunchEnvironment()),
    ],
)
def test_environment(environ: dict[str, str], place: LaunchEnvironment) -> None:
    assert read_environment(environ) == place


@pytest.mark.parametrize(
    ("environ", "texts"),
    [
        (without(JAX, "JAX_PROCESS_ID"), ["JAX_PROCESS_ID", "srun"]),
        (
            without(JAX, "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES"),
            ["JAX_PROCESS_ID set without JAX_COORD"],
        ),
        (JAX | {"JAX_PROCESS_ID": "4"}, ["JAX_PROCESS_ID=4", "[0, 4)"]),
        (JAX | {"JAX_PROCESS_ID": "-1"}, ["JAX_PROCESS_ID='-1'"]),
        (JAX | {"JAX_NUM_PROCESSES": "two"}, ["JAX_NUM_PROCESSES='two'"]),
        (JAX | {"JAX_NUM_PROCESSES": "1"}, ["JAX_PROCESS_ID=3 and JAX_NUM_PROCESSES=1"]),
        (JAX | {"JAX_COORDINATOR_ADDRESS": "10.0.0.1"}, ["JAX_COORDINATOR_ADDRESS='10.0.0.1'", "HOST:PORT"]),
        (SLURM | {"JAX_NUM_PROCESSES": "2"}, ["JAX_NUM_PROCESSES=2 and SLURM_NTASKS=4 contradict"]),
        (SLURM | {"JAX_PROCESS_ID": "1"}, ["JAX_PROCESS_ID=1 and SLURM_PROCID=2 contradict"]),
        (SLURM | {"SLURM_PROCID": "4"}, ["SLURM_PROCID=4 and SLURM_NTASKS=4"]),
        (without(SLURM, "SLURM_STEP_NODELIST"), ["SLURM_NTASKS=4 without SLURM_STEP_NODELIST", "srun"]),
    ],
)
def test_environment_that_cannot_be(environ: dict[str, str], texts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_environment(environ)
    for text in texts:
        assert text in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_process_agrees_with_itself() -> None:
    assert (agree(7), broadcast("text"), process_count()) == (7, "text", 1)


# --- what they compute --------------------------------------------------------------------------------------


def test_two_processes_equal_one() -> None:
    """Every collective, over two processes of four devices and eight devices of one: the same numbers."""
    two = [json.loads(out.splitlines()[-1]) for out in run_processes(COLLECTIVES, 2, 4)]
    (one,) = (json.loads(out.splitlines()[-1]) for out in run_processes(COLLECTIVES, 1, 8))
    seen = [(o["index"], o["count"], o["local_devices"], o["devices"]) for o in two]
    assert seen == [
        (0, 2, 4, 8),
        (1, 2, 4, 8),
    ]
    assert (one["count"], one["local_devices"]) == (1, 8)
    assert len(set(one["values"])) > 20  # it did mix
    assert two[0]["values"] == two[1]["values"] == one["values"]
    assert all(o["agreed"] and o["text"] == "from 0" for o in two)


@dataclass
class Recorder:
    """A server that ends every request after two steps and notes what was submitted before which step."""

    pace: float
    now: float = 0.0
    steps: int = 0
    on_step: Callable[..., None] | None = None
    submitted: list[tuple[int, int]] = field(default_factory=list)
    live: list[tuple[int, RequestOutput]] = field(default_factory=list)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def submit(self, prompt: list[int], sampling_params: object = None, *, arrival_time=None, options=None):
        sample = CompletionOutput(0, "", [])
        output = RequestOutput(str(prompt[0]), None, prompt, [sample], RequestMetrics(0.0))
        self.submitted.append((self.steps, prompt[0]))
        self.live.append((self.steps + 2, output))
        return output

    def step(self) -> bool:
        self.now += self.pace
        self.steps += 1
        busy = bool(self.live)
        self.live = [(end, output) for end, output in self.live if end > self.steps]
        return busy

    def abort(self, request_id: str) -> None:
        pass


def test_open_loop_takes_process_0s_decisions() -> None:
    """A process whose steps take longer submits before each step what process 0 did, whatever its clock."""
    plan = [PlannedRequest(0.1 * i, [i], 1) for i in range(20)]
    decisions: list[int] = []

    def run(pace: float, decide: Callable[[int], int]) -> Recorder:
        server = Recorder(pace)
        drive(server, plan, lambda *_: SamplingParams(), clock=server.clock, sleep=server.sleep, agree=decide)
        return server

    def note(value: int) -> int:
        decisions.append(value)
        return value

    first = run(0.03, note)
    replayed = iter(decisions)
    second = run(0.25, lambda _: next(replayed))
    assert second.submitted == first.submitted and next(replayed, None) is None
    assert run(0.25, lambda value: value).submitted != first.submitted


# --- how they end -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", slow_but([1], [0, 1]))
def test_a_killed_process_ends_the_other(victim: int) -> None:
    """In the middle of collectives. Measured: 0.03 to 0.07 s; heartbeats alone take their 30."""
    with started([LOOP]) as running:
        for item in running:
            item.wait_for("looping", 60)
        os.kill(running[victim].process.pid, signal.SIGKILL)
        begin = time.monotonic()
        code = running[1 - victim].process.wait(60)
        assert time.monotonic() - begin < 20  # below the heartbeats' 30
        assert code == 1
        line = (
            f"error: process {victim} of 2 has died or lost its connection; process {1 - victim} ends with it"
        )
        assert running[1 - victim].stderr.splitlines().count(line) == 1


@pytest.mark.slow
def test_an_exception_ends_the_other() -> None:
    """Process 0's, with which JAX's service ends."""
    with started([LOOP, "fail", "0"]) as running:
        assert wait_all(running, 90) == [1, 1]
        assert "ValueError: on purpose" in running[0].stderr
        expected = "error: process 0 of 2 has ended with exit code 1 (its own lines say why); process "
        assert expected in running[1].stderr


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_ends_the_other(victim: int) -> None:
    """Its connections stay open, so that only JAX's heartbeats tell; their abort is followed by our line."""
    with started([LOOP], env={"MOEJAX_HEARTBEAT_SECONDS": "6"}) as running:
        for item in running:
            item.wait_for("looping", 60)
        os.kill(running[victim].process.pid, signal.SIGSTOP)
        assert running[1 - victim].process.wait(60) != 0
        last = running[1 - victim].stderr.splitlines()[-1]
        assert last.startswith(
            f"error: process {1 - victim} of 2 was aborted: another process has died or lost"
        )


@pytest.mark.slow
def test_processes_that_do_not_come_are_not_waited_for() -> None:
    env = environment(1, 2, 4, free_port()) | {"MOEJAX_CONNECT_SECONDS": "3"}
    with started([LOOP], count=1, env=env) as (item,):
        assert item.process.wait(60) == 2
        last = item.stderr.splitlines()[-1]
        assert last.startswith("error: process 1 of 2 cannot join the others at 127.0.0.1:"), last


def test_a_taken_port_is_said() -> None:
    import socket

    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as other:
        env = environment(0, 2, 4, other.getsockname()[1])
        with started([LOOP], count=1, env=env) as (item,):
            assert item.process.wait(60) == 1
            assert "DeviceError: process 0 of 2 cannot join the others at" in item.stderr
            assert "its port is free" in item.stderr
