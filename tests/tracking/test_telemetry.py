"""Telemetry: what is summed, what is missing and why, and that it neither invents figures nor hurts a run."""

import json
import logging
import threading
import time
from pathlib import Path

import pytest

from moejax.core.errors import ConfigError
from moejax.tracking.probes import GpuProbe, HostProbe, RaplProbe, Sample, open_gpus
from moejax.tracking.telemetry import Telemetry, TelemetryConfig
from tests.tracking.fake_nvml import (
    NEVER,
    Clock,
    FakeGpu,
    FakeNvml,
    NVMLError,
    NVMLError_NotSupported,
    on_gpus,
)


class Script:
    """A probe that reads what it is given."""

    def __init__(self, clock: Clock) -> None:
        self.notes: list[str] = []
        self.gauges: dict[str, float | None] = {}
        self.counters: dict[str, float | None] = {}
        self.clock = clock

    def read(self) -> Sample:
        return Sample(dict(self.gauges), dict(self.counters))


def test_only_what_lies_within_parts_counts_and_each_part_by_itself() -> None:
    clock = Clock()
    script = Script(clock)
    telemetry = Telemetry(NEVER, probes=[script], clock=clock)
    cpu = 0.0
    for key, seconds, rss, busy in (("a", 2.0, 100.0, 1.0), ("b", 1.0, 400.0, 0.5), ("a", 2.0, 100.0, 2.0)):
        script.gauges["process_rss_bytes"], script.counters["cpu_s"] = rss, cpu
        script.counters["machine_cpu_s"] = 3 * cpu
        with telemetry.part(key):
            clock.now += seconds
            cpu += busy
            script.counters.update(cpu_s=cpu, machine_cpu_s=3 * cpu)
        clock.now += 1000.0  # compiling, drawing: none of it is measured
        cpu += 500.0
    whole = telemetry.summary(output_tokens=10)
    assert whole["mean_process_rss_bytes"] == pytest.approx((4 * 100 + 400) / 5)
    assert whole["max_process_rss_bytes"] == 400
    assert whole["mean_cpu_percent"] == pytest.approx(100 * 3.5 / 5)
    assert whole["mean_other_cpu_percent"] == pytest.approx(200 * 3.5 / 5)
    assert telemetry.summary("a")["mean_cpu_percent"] == pytest.approx(100 * 3 / 4)
    assert telemetry.summary("b")["mean_process_rss_bytes"] == pytest.approx(400)
    assert telemetry.summary("a", "b") == pytest.approx(telemetry.summary(), nan_ok=False)
    assert telemetry.summary("nothing")["mean_cpu_percent"] is None
    report = telemetry.report()
    assert report["seconds"] == pytest.approx(5) and report["energy_source"] is None
    assert whole["energy_j"] is None and whole["energy_per_output_token_j"] is None
    assert report["notes"] == ["no energy: no CPU in use reported it all of the time"]


def test_gpus_add_up_and_energy_is_the_counters() -> None:
    telemetry, _, clock = on_gpus(FakeGpu(watts=100), FakeGpu(watts=300, slowdowns=0x4 | 0x1, temperature=80))
    with telemetry.part():
        clock.now += 4.0
    found = telemetry.summary(output_tokens=160)
    assert found["energy_j"] == pytest.approx(1600, abs=0.01)
    assert found["energy_per_output_token_j"] == pytest.approx(10, abs=1e-3)
    assert (found["gpu0_mean_power_w"], found["gpu1_mean_power_w"]) == (100, 300)
    assert found["mean_gpu_power_w"] == 400 and found["mean_gpu_utilization_percent"] == 90
    assert found["max_gpu_temperature_c"] == 80 and found["max_gpu_memory_bytes"] == 10 << 30
    assert found["gpu_slowdown_percent"] == 100
    report = telemetry.report()
    assert report["energy_source"] == "nvml_counter" and report["notes"] == []
    first, second = report["devices"]
    assert second["slowdowns"] == ["power cap"] and first["slowdowns"] == []  # "GPU idle" is none
    assert second["name"] == "NVIDIA A100-SXM4-80GB" and second["energy_j"] == pytest.approx(1200, abs=0.01)
    json.dumps(report, allow_nan=False)


def test_without_a_counter_power_is_integrated_by_trapezoids() -> None:
    missing = {"energy": NVMLError_NotSupported("Not Supported")}
    gpu = FakeGpu(watts=100, fails=missing)
    telemetry, nvml, clock = on_gpus(gpu, FakeGpu(watts=50))
    with telemetry.part():
        clock.now += 2.0
        gpu.watts = 300
        telemetry._sample()
        nvml.settle()
        clock.now += 1.0
    # 2 s from 100 to 300 W and 1 s at 300 W; the other GPU has its counter.
    assert telemetry.summary()["energy_j"] == pytest.approx(400 + 300 + 150, abs=0.01)
    report = telemetry.report()
    assert report["energy_source"] == "nvml_power"
    assert [device["energy_source"] for device in report["devices"]] == ["nvml_power", "nvml_counter"]
    assert report["notes"] == ["gpu0: energy_j cannot be read: Not Supported"]


def test_a_counter_that_falls_is_not_taken_for_energy() -> None:
    """A driver that is loaded anew begins again at 0; the stretch is bridged by the power."""
    gpu = FakeGpu(watts=200)
    telemetry, _, clock = on_gpus(gpu)
    with telemetry.part():
        clock.now += 1.0
        gpu.energy_offset_j = 0.0
        telemetry._sample()
        clock.now += 1.0
    assert telemetry.summary()["energy_j"] == pytest.approx(400, abs=0.1)
    assert telemetry.report()["energy_source"] == "nvml_power"


def test_an_error_in_the_middle_leaves_no_part_of_an_energy(caplog: pytest.LogCaptureFixture) -> None:
    gpu = FakeGpu(watts=200)
    telemetry, _, clock = on_gpus(gpu, FakeGpu(watts=100))
    with caplog.at_level(logging.INFO), telemetry.part():
        clock.now += 1.0
        for name in ("energy", "power"):
            gpu.fails[name] = NVMLError("GPU is lost")
        for _ in range(5):
            telemetry._sample()
            clock.now += 1.0
        gpu.fails.clear()
    found = telemetry.summary(output_tokens=10)
    assert found["energy_j"] is None and found["energy_per_output_token_j"] is None
    assert found["gpu1_mean_power_w"] == 100 and found["gpu0_mean_power_w"] is None
    report = telemetry.report()
    assert report["devices"][1]["energy_j"] == pytest.approx(600, abs=0.1)
    assert report["devices"][0]["energy_j"] is None and report["energy_source"] is None
    assert [line for line in report["notes"] if "GPU is lost" in line and "gpu0: energy_j" in line]
    said = [record.message for record in caplog.records if "gpu0: energy_j" in record.message]
    assert len(said) == 1  # once, not at each sample


def test_no_nvml_is_one_line_and_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    with caplog.at_level(logging.WARNING):
        telemetry = Telemetry(NEVER, gpus=[0])
        with telemetry.part():
            pass
    lines = [record.message for record in caplog.records]
    assert lines == ["GPU telemetry needs the package nvidia-ml-py: pip install nvidia-ml-py"]
    assert telemetry.report()["notes"] == lines
    found = telemetry.summary(output_tokens=5)
    assert found["energy_j"] is None and found["mean_process_rss_bytes"] > 0


@pytest.mark.parametrize(
    ("visible", "ordinals", "opened"),
    [
        (None, [0, 1], ["index 0", "index 1"]),
        ("1,0", [0, 1], ["index 1", "index 0"]),
        ("GPU-aa-1, GPU-bb-0", [0], ["GPU-aa-1"]),
    ],
)
def test_cuda_s_numbers_become_nvml_s(visible, ordinals, opened) -> None:
    nvml = FakeNvml([FakeGpu(), FakeGpu()], Clock())
    probe, reason = open_gpus(ordinals, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}, nvml)
    assert isinstance(probe, GpuProbe) and reason is None and len(probe.names) == len(ordinals)
    assert nvml.opened == opened


def test_a_device_that_cannot_be_opened_is_a_reason() -> None:
    nvml = FakeNvml([FakeGpu()], Clock())
    assert open_gpus([3], {}, nvml) == (
        None,
        "GPU telemetry: device 3 (3) cannot be opened: Invalid Argument",
    )
    probe, reason = open_gpus([1], {"CUDA_VISIBLE_DEVICES": "0"}, nvml)
    assert probe is None and "CUDA_VISIBLE_DEVICES=0 names no device 1" in str(reason)


def rapl(root: Path, name: str, kind: str, energy: int, limit: int = 1_000_000) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "name").write_text(kind + "\n")
    (folder / "max_energy_range_uj").write_text(f"{limit}\n")
    (folder / "energy_uj").write_text(f"{energy}\n")
    return folder / "energy_uj"


def test_cpu_energy_adds_packages_wraps_and_leaves_their_parts_out(tmp_path: Path) -> None:
    first = rapl(tmp_path, "intel-rapl:0", "package-0", 900_000)
    rapl(tmp_path, "intel-rapl:0:0", "core", 5)
    rapl(tmp_path, "intel-rapl:1", "package-1", 100_000)
    rapl(tmp_path, "intel-rapl:2", "psys", 7)
    probe, clock = RaplProbe(tmp_path), Clock()
    assert probe and probe.notes == []
    telemetry = Telemetry(NEVER, probes=[probe], clock=clock)
    with telemetry.part():
        clock.now += 2.0
        first.write_text("300000\n")  # 0.4 J on, past the end of the counter's range
    found = telemetry.summary(output_tokens=4)
    assert found["energy_j"] == pytest.approx(0.4) and found["energy_per_output_token_j"] == pytest.approx(
        0.1
    )
    assert telemetry.report()["energy_source"] == "rapl"


def test_cpu_energy_that_cannot_be_read_is_none_with_the_reason(tmp_path: Path) -> None:
    rapl(tmp_path, "intel-rapl:0", "package-0", 1)
    rapl(tmp_path, "intel-rapl:1", "package-1", 1).unlink()
    probe = RaplProbe(tmp_path)
    assert not probe and "cannot read" in probe.notes[0] and "intel-rapl:1/energy_uj" in probe.notes[0]
    assert not RaplProbe(tmp_path / "nothing")


def test_other_processes_devices_make_energy_unknown() -> None:
    clock = Clock()
    nvml = FakeNvml([FakeGpu()], clock)
    probe, _ = open_gpus([0], {}, nvml)
    assert probe is not None
    telemetry = Telemetry(NEVER, gpus=[0], incomplete="2 processes took part", probes=[probe], clock=clock)
    with telemetry.part():
        clock.now += 1.0
    assert telemetry.summary(output_tokens=1)["energy_j"] is None
    assert telemetry.report()["notes"] == ["no energy: 2 processes took part"]


def test_the_thread_samples_this_process_while_a_part_is_open_and_ends_with_it() -> None:
    telemetry = Telemetry(TelemetryConfig(interval_s=0.02))
    before = threading.active_count()
    with telemetry.part():
        assert threading.active_count() == before + 1
        end = time.perf_counter() + 0.3
        while time.perf_counter() < end:
            sum(range(1000))
    assert threading.active_count() == before
    found, report = telemetry.summary(), telemetry.report()
    assert found["mean_process_rss_bytes"] > 1e6 and found["mean_cpu_percent"] > 0
    assert report["samples"] >= 3
    series = report["series"]
    assert len({len(column) for column in series.values()}) == 1 and len(series["time_s"]) >= 2
    assert series["time_s"] == sorted(series["time_s"])
    assert {"process_rss_bytes", "cpu_percent", "machine_memory_bytes"} <= series.keys()


def test_a_long_series_stays_short_and_keeps_its_mean() -> None:
    clock = Clock()
    script = Script(clock)
    telemetry = Telemetry(TelemetryConfig(interval_s=1.0, max_points=8), probes=[script], clock=clock)
    telemetry._thread = threading.Thread()  # a part is open, without a thread that samples by itself
    script.gauges["process_rss_bytes"] = 0.0
    telemetry._last, telemetry._origin = (clock.now, script.read()), clock.now
    for i in range(1, 1001):
        clock.now += 1.0
        script.gauges["process_rss_bytes"] = float(i)
        telemetry._sample()
    series = telemetry.series()
    assert 4 <= len(series["time_s"]) <= 8
    assert series["time_s"][-1] <= 1000 and len(telemetry._points) <= 16
    assert telemetry.summary()["mean_process_rss_bytes"] == pytest.approx(500)
    middle = [value for value in series["process_rss_bytes"] if value is not None]
    assert middle == sorted(middle)


@pytest.mark.parametrize("broken", [[2], range(2, 100), range(1, 100)])
def test_a_probe_that_breaks_stops_sampling_and_not_the_measurement(
    broken, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(HostProbe):
        calls = 0

        def read(self) -> Sample:
            self.calls += 1
            if self.calls in broken:
                raise RuntimeError("boom")
            return super().read()

    telemetry = Telemetry(TelemetryConfig(interval_s=0.02), probes=[Broken()])
    with telemetry.part():
        time.sleep(0.1)
        done = True
    assert done and "sampling stopped: RuntimeError: boom" in telemetry.report()["notes"]


def test_switched_off_it_does_nothing_at_all() -> None:
    telemetry = Telemetry(TelemetryConfig(enabled=False), gpus=[0])
    before = threading.active_count()
    with telemetry.part("a"):
        assert threading.active_count() == before
    assert telemetry.summary(output_tokens=3) == {} and telemetry.report() == {"enabled": False}


def test_parts_do_not_nest() -> None:
    telemetry = Telemetry(NEVER)
    with telemetry.part(), pytest.raises(RuntimeError, match="open already"), telemetry.part("inner"):
        pass
    with telemetry.part():  # and the refused one has left it as it was
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"interval_s": 0}, "telemetry.interval_s must be 0.02 to 3600 seconds .*, got 0$"),
        ({"interval_s": float("nan")}, "telemetry.interval_s must be"),
        ({"interval_s": -1.0}, "telemetry.enabled=false switches sampling off"),
        ({"max_points": 1}, "telemetry.max_points must be an integer of at least 2"),
    ],
)
def test_wrong_configuration_is_one_clear_line(changes, message) -> None:
    with pytest.raises(ConfigError, match=message):
        TelemetryConfig(**changes)
