"""The roofline (Williams, Waterman and Patterson, 2009): the least time that bytes and FLOPs allow."""

from dataclasses import dataclass

from moejax.core.hardware import Hardware
from moejax.perf.cost import StepCost


@dataclass(frozen=True)
class Bound:
    """Least time in seconds and what sets it, "memory" or "compute"."""

    seconds: float
    limit: str


def step_bound(cost: StepCost, hardware: Hardware | None, dtype: str) -> Bound | None:
    """None where the device's bandwidth is not known. Compute counts where its peak is known."""
    if hardware is None or hardware.bandwidth is None:
        return None
    memory = cost.bytes / hardware.bandwidth
    peak = hardware.flops.get(dtype)
    compute = cost.flops / peak if peak else 0.0
    return Bound(max(memory, compute), "memory" if memory >= compute else "compute")
