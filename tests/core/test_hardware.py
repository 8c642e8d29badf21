"""Peak rates of devices."""

import pytest

from moejax.core import hardware
from moejax.core.hardware import KNOWN, together


def test_several_devices_have_their_rates_together_but_virtual_ones_have_not() -> None:
    eight = together(KNOWN["a100_80gb"], 8)
    assert eight.bandwidth == 8 * 2039e9 and eight.flops["bfloat16"] == 8 * 312e12
    assert eight.memory == 8 * 80 * 2**30 and eight.link_bandwidth == 600e9
    cpu = KNOWN["cpu"]
    assert together(cpu, 8) is cpu and together(KNOWN["h100"], 1) is KNOWN["h100"]


def test_a_cpus_peaks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both dtypes of CPU, and only where the CPU is the device that is measured on."""
    assert hardware.measure_matmul_flops("bfloat16", size=64) > 0
    rates = {"float32": 4e10, "bfloat16": 1e10}
    monkeypatch.setattr(hardware, "measure_matmul_flops", rates.__getitem__)
    monkeypatch.setattr(hardware, "measure_read_bandwidth", lambda: 2e10)
    found = hardware.get_hardware("auto", "cpu")
    assert found is not None and (found.flops, found.bandwidth, found.source) == (rates, 2e10, "measured")
    elsewhere = hardware.get_hardware("cpu", "NVIDIA H100 80GB HBM3")
    assert elsewhere is not None and (elsewhere.flops, elsewhere.bandwidth) == ({}, None)
    assert hardware.KNOWN["cpu"].flops == {}
