"""The roofline (Williams, Waterman and Patterson, 2009): the least time that bytes and FLOPs allow."""

from dataclasses import dataclass
from typing import Protocol

from moejax.core.hardware import Hardware


@dataclass(frozen=True)
class Bound:
    """Least time in seconds and what sets it, "memory" or "compute"."""

    seconds: float
    limit: str


class Work(Protocol):
    """FLOPs, and bytes that have to be moved for them (`moejax.perf.cost.StepCost`)."""

    @property
    def flops(self) -> float: ...
    @property
    def bytes(self) -> float: ...


def bound(flops: float, bytes_: float, peak: float, bandwidth: float) -> Bound:
    """Args in FLOPs, bytes, FLOP/s and bytes/s."""
    memory, compute = bytes_ / bandwidth, flops / peak
    return Bound(max(memory, compute), "memory" if memory >= compute else "compute")


def step_bound(cost: Work, hardware: Hardware | None, dtype: str) -> Bound | None:
    """Returns a step's bound; None without a known bandwidth. Compute counts where its peak is known."""
    if hardware is None or hardware.bandwidth is None:
        return None
    return bound(cost.flops, cost.bytes, hardware.flops.get(dtype, float("inf")), hardware.bandwidth)
