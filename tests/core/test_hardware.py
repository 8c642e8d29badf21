"""Peak rates of devices."""

import pytest

from moejax.core import hardware
from moejax.core.hardware import KNOWN, Hardware, measure_matmul_flops, together, with_reading


def test_several_devices_have_their_rates_together_but_virtual_ones_have_not() -> None:
    eight = together(KNOWN["a100_80gb"], 8)
    assert eight.bandwidth == 8 * 2039e9 and eight.flops["bfloat16"] == 8 * 312e12
    assert eight.memory == 8 * 80 * 2**30 and eight.link_bandwidth == 600e9
    cpu = KNOWN["cpu"]
    assert together(cpu, 8) is cpu and together(KNOWN["h100"], 1) is KNOWN["h100"]


def test_a_cpus_peaks_are_the_best_of_its_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both dtypes of CPU, and only where the CPU is the device that is measured on."""
    assert measure_matmul_flops("bfloat16", size=64) > 0
    rates, bandwidths = {"float32": 4e10, "bfloat16": 1e10}, iter((2e10, 1.5e10))
    monkeypatch.setattr(hardware, "measure_matmul_flops", lambda dtype: rates[dtype])
    monkeypatch.setattr(hardware, "measure_read_bandwidth", lambda: next(bandwidths))
    cpu = hardware.get_hardware("auto", "cpu")
    assert cpu is not None and cpu.bandwidth is None, "nothing is measured where a kind is only checked"
    before = with_reading(cpu)
    rates["float32"] = 8e10
    after = with_reading(before)
    assert (after.flops, after.bandwidth) == ({"float32": 8e10, "bfloat16": 1e10}, 2e10)
    assert [reading["bandwidth"] for reading in after.readings] == [2e10, 1.5e10]
    for kind, device in (("cpu", "NVIDIA H100 80GB HBM3"), ("h100", "cpu")):
        elsewhere = hardware.get_hardware(kind, device)
        assert elsewhere is not None and elsewhere.source == "configured"
        assert with_reading(elsewhere) is elsewhere and elsewhere.bandwidth == KNOWN[kind].bandwidth
    assert with_reading(KNOWN["h100"]) is KNOWN["h100"] and KNOWN["cpu"].flops == {}


@pytest.mark.parametrize(
    ("readings", "share", "believed"),
    [
        ((7.2e9, 6.8e9), 0.83, (0.83, None)),
        ((7.2e9, 1.4e9), 0.83, (None, "unstable")),
        ((7.2e9, 7.1e9), 1.73, (None, "exceeded")),
        ((7.2e9, 7.1e9), 1.04, (1.04, None)),
        ((), 1.73, (None, "exceeded")),
        ((), None, (None, None)),
    ],
)
def test_a_share_is_believed_of_a_roof_that_holds(readings, share, believed) -> None:
    rates = tuple({"bandwidth": value, "float32": 1e10} for value in readings)
    device = Hardware("cpu", 7.2e9, {"float32": 1e10}, None, None, "measured", readings=rates)
    assert device.believed("memory", "float32", share) == believed
    assert device.believed("compute", "float32", 0.5) == (0.5, None), "its readings agree"
