"""Constants of an engine's stack on a device kind, and how far off its operations' times may be."""

from collections.abc import Mapping
from typing import NamedTuple

from moejax.simulate.step import HostCosts

SPREADS: Mapping[str, Mapping[str, float]] = {
    "gemm": {"table": 0.05, "interpolated": 0.15, "nearest": 0.2, "roofline": 0.4},
    "experts": {"table": 0.05, "interpolated": 0.12, "nearest": 0.25, "roofline": 0.4},
    "attention": {"table": 0.05, "interpolated": 0.15, "nearest": 0.25, "roofline": 0.5},
    "collective": {"table": 0.05, "interpolated": 0.15, "nearest": 0.3, "roofline": 0.4},
    "small": {"roofline": 0.4},
    "host": {"roofline": 0.5},
}


class Calibration(NamedTuple):
    """Costs of the host, half of the relative width of each operation's 90 % interval by source, and where
    they come from."""

    host: HostCosts
    spreads: Mapping[str, Mapping[str, float]]
    origin: str


def load_calibration(device: str, stack: str) -> Calibration:
    """Returns what is known of a stack on a device kind."""
    return Calibration(HostCosts(), SPREADS, "default")
