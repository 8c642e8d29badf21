"""Peak rates of devices."""

from moejax.core.hardware import KNOWN, together


def test_several_devices_have_their_rates_together_but_virtual_ones_have_not() -> None:
    eight = together(KNOWN["a100_80gb"], 8)
    assert eight.bandwidth == 8 * 2039e9 and eight.flops["bfloat16"] == 8 * 312e12
    assert eight.memory == 8 * 80 * 2**30 and eight.link_bandwidth == 600e9
    cpu = KNOWN["cpu"]
    assert together(cpu, 8) is cpu and together(KNOWN["h100"], 1) is KNOWN["h100"]
