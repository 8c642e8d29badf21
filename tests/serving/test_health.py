"""Faults put into an engine, its devices and its peers, and what the monitor says of each."""

import threading
import time
from types import SimpleNamespace

import pytest

from moejax.engine.llm import LLM
from moejax.serving import health as health_module
from moejax.serving.health import Health, HealthMonitor
from moejax.tracking.probes import open_gpus
from tests.engine.tiny import small_config
from tests.serving.stub import request, serve, stub
from tests.tracking.fake_nvml import Clock, FakeGpu, FakeNvml


class Watched:
    """A monitor that looks when it is told to, on a clock of its own."""

    def __init__(self, llm, **options) -> None:
        self.now = 0.0
        options = {"period_s": 3600.0, "probes": (), **options}
        self.monitor = HealthMonitor(llm, clock=lambda: self.now, **options)

    def after(self, seconds: float) -> Health:
        self.now += seconds
        return self.monitor.check()


@pytest.fixture
def watched(request):
    made: list[Watched] = []

    def make(llm, **options) -> Watched:
        made.append(Watched(llm, **options))
        return made[-1]

    yield make
    for each in made:
        each.monitor.close()


def test_an_engine_that_works_or_idles_is_healthy(watched) -> None:
    llm = stub()
    seen = watched(llm, stall_s=60.0)
    assert seen.after(1e4) == Health()
    llm.engine.add([request(llm, [1, 2, 3], 30)])
    for _ in range(10):
        llm.engine.step()
        assert seen.after(50.0) == Health()
    serve(llm)
    assert seen.after(1e4) == Health() and seen.monitor.health() == Health()


@pytest.mark.parametrize("begun", [False, True], ids=["queued", "in flight"])
def test_a_stall(begun: bool, watched) -> None:
    llm = stub()
    llm.engine.add([request(llm, [1, 2, 3], 30)])
    if begun:
        llm.engine.step()
    seen = watched(llm, stall_s=60.0)
    assert seen.after(59.0) == Health()
    found = seen.after(2.0)
    held = "1 running, 0 waiting" if begun else "0 running, 1 waiting"
    assert found == Health("unhealthy", (f"no step for 61 s with {held}",))
    llm.engine.step()
    llm.engine.step()
    assert seen.after(5.0) == Health()


def test_a_step_that_hangs_holds_the_engines_lock_and_is_seen(watched) -> None:
    llm, go_on, inside = stub(), threading.Event(), threading.Event()
    collect = llm.clock.collect

    def hang(handle):
        inside.set()
        assert go_on.wait(30)
        return collect(handle)

    llm.clock.collect = hang
    llm.engine.add([request(llm, [1, 2, 3], 2)])
    thread = threading.Thread(target=serve, args=(llm,))
    thread.start()
    assert inside.wait(30)
    try:
        seen = watched(llm, stall_s=10.0)
        assert seen.after(11.0).state == "unhealthy"
    finally:
        go_on.set()
        thread.join()
    assert seen.after(1.0) == Health()


def test_failed_steps(watched) -> None:
    llm = stub(fail_at=frozenset({3, 4}), overlap=False)
    seen = watched(llm)
    llm.engine.add([request(llm, [1, 2, 3], 30)])
    for _ in range(3):
        llm.engine.step()
    assert seen.after(1.0) == Health()
    llm.engine.step()  # fails
    found = seen.after(1.0)
    assert found == Health("unhealthy", ("1 steps have failed, the last 0 s ago",))
    llm.engine.add([request(llm, [1, 2, 3], 30)])
    llm.engine.step()  # fails, too
    llm.engine.add([request(llm, [1, 2, 3], 30)])
    llm.engine.step()
    assert seen.after(1.0) == Health("degraded", ("2 steps have failed, the last 0 s ago",))
    serve(llm)
    assert watched(llm).after(1.0) == Health()  # what was before it counts for nothing
    assert seen.after(61.0) == Health()


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf")])
def test_nan_logits(logprob: float, watched) -> None:
    llm = stub()
    seen = watched(llm)
    llm.clock.logprob = -1.5
    llm.engine.add([request(llm, [1, 2, 3], 3)])
    serve(llm)
    assert seen.after(1.0) == Health()
    llm.clock.logprob = logprob
    llm.engine.add([request(llm, [1, 2, 3], 3)])
    serve(llm)
    assert seen.after(1.0) == Health("unhealthy", ("3 tokens without a finite log-probability",))
    assert seen.after(61.0) == Health()


def test_paused_and_closed(watched) -> None:
    llm = stub()
    seen = watched(llm, stall_s=10.0)
    llm.engine.add([request(llm, [1, 2, 3], 30)])
    llm.engine.pause("keep")
    found = seen.after(100.0)
    assert found.state == "degraded" and "paused" in found.reasons[0]
    llm.engine.unpause()
    assert seen.after(1.0) == Health()
    closed = LLM(small_config(), load_format="dummy")
    with_one = watched(closed)
    assert with_one.after(1.0) == Health()
    closed.close()
    found = with_one.after(1.0)
    assert found.state == "unhealthy" and "closed" in found.reasons[0]


def test_devices(watched, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    probe, _ = open_gpus([0], {}, FakeNvml([gpu], Clock()))
    assert probe is not None
    seen = watched(stub(), probes=(probe,))
    assert seen.after(1.0) == Health()
    gpu.temperature, gpu.slowdowns = 91, 0x40
    assert seen.after(1.0) == Health("degraded", ("gpu0 is at 91 °C", "gpu0 is slowed: hardware thermal"))
    gpu.temperature, gpu.slowdowns = 50, 0
    full = SimpleNamespace(id=3, memory_stats=lambda: {"bytes_in_use": 99, "bytes_limit": 100})
    monkeypatch.setattr(health_module.jax, "local_devices", lambda: [full])
    assert seen.after(1.0) == Health("degraded", ("device 3: over 98% of its memory is in use",))
    monkeypatch.setattr(health_module.jax, "local_devices", lambda: [])
    monkeypatch.setattr(health_module, "host_memory", lambda: 5e8)
    assert seen.after(1.0) == Health("degraded", ("under 1 GB of the host's memory is left",))


def test_peers(watched) -> None:
    peers = {"prefill": True, "other": True}

    def broken() -> bool:
        raise ConnectionError("reset by peer")

    llm = stub()
    seen = watched(llm, peers={name: lambda name=name: peers[name] for name in peers})
    assert seen.after(1.0) == Health()
    peers["prefill"] = False
    assert seen.after(1.0) == Health("degraded", ("peer prefill is gone",))
    peers["other"] = False
    assert seen.after(1.0) == Health("unhealthy", ("peer prefill is gone", "peer other is gone"))
    peers["other"] = True
    assert seen.after(1.0).state == "degraded"
    assert watched(llm, peers={"x": broken}).after(1.0) == Health("unhealthy", ("peer x: reset by peer",))


def test_a_device_that_does_not_answer_is_told(watched) -> None:
    seen = watched(stub(), period_s=5.0)
    seen.now += 17.0  # the thread that looks hangs in a device's driver
    found = seen.monitor.health()
    assert found == Health("unhealthy", ("no look for 17 s: a device or a peer does not answer",))


def test_the_thread_looks_by_itself_and_ends() -> None:
    llm = stub(fail_at=frozenset({0}))
    monitor = HealthMonitor(llm, period_s=0.01, probes=())
    assert monitor.health() == Health()
    llm.engine.add([request(llm, [1, 2, 3], 3)])
    serve(llm)
    until = time.monotonic() + 30
    while monitor.health() == Health() and time.monotonic() < until:
        time.sleep(0.01)
    assert monitor.health().state == "unhealthy"
    monitor.close()
    assert "moejax-health" not in {thread.name for thread in threading.enumerate()}
