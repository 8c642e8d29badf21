"""Peak rates of the devices that results are held against.

Sources: NVIDIA's data sheets of A100 (SXM), H100 (SXM) and H200; dense rates without sparsity. Networks are
those of NVIDIA's DGX machines, from their user guides: an InfiniBand adapter for each of the eight GPUs,
ConnectX-6 HDR at 200 Gb/s in DGX A100, ConnectX-7 NDR at 400 Gb/s in DGX H100 and H200. A CPU has no data
sheet that would fit a shared machine, so its read bandwidth and its FLOP/s are measured beside the work
(`with_reading`): others' use of the machine moves a reading, so the best of several is the peak.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moejax.core.errors import ConfigError, unknown

EXCEEDED = 1.05
"""Share of a peak from which on work exceeds it: the peak is then too low to be one."""

UNSTABLE = 0.2
"""Share of a peak's best reading; one with a reading further below it is not stable."""


@dataclass(frozen=True)
class Hardware:
    """One device. Rates in FLOP/s and bytes/s, memory in bytes; None where not known.

    `link_bandwidth` is NVLink's with both directions counted, as data sheets do: half of it can be sent.
    `network_bandwidth` is what one device can send to other nodes, in one direction.
    `source` says where bandwidth and FLOP/s come from: "data sheet", "measured", or "configured" where they
    are another device's than the one that runs. `readings` are what was measured, time by time: the bandwidth
    and each dtype's FLOP/s by name.
    """

    kind: str
    bandwidth: float | None
    flops: dict[str, float]
    memory: float | None
    link_bandwidth: float | None
    source: str
    network_bandwidth: float | None = None
    readings: tuple[dict[str, float], ...] = ()

    def believed(self, limit: str, dtype: str, share: float | None) -> tuple[float | None, str | None]:
        """Returns a share of the "memory" or the "compute" peak (None where that is not known) if it can be
        true, else None and why: the peak is "unstable" or was "exceeded", see `UNSTABLE` and `EXCEEDED`."""
        if share is None:
            return None, None
        values = [reading["bandwidth" if limit == "memory" else dtype] for reading in self.readings]
        if values and min(values) < (1 - UNSTABLE) * max(values):
            return None, "unstable"
        return (share, None) if share <= EXCEEDED else (None, "exceeded")


_GB, _GIB = 1e9, 2**30

_H100 = Hardware(
    "h100",
    3352 * _GB,
    {"float32": 67e12, "bfloat16": 989e12, "float16": 989e12, "int8": 1979e12, "float8": 1979e12},
    80 * _GIB,
    900 * _GB,
    "data sheet",
    50 * _GB,
)


def _pcie(
    kind: str, rate: float, flops: dict[str, float], memory: float, source: str = "data sheet"
) -> Hardware:
    return Hardware(kind, rate * _GB, flops, memory * _GB, 64 * _GB, source, 12.5 * _GB)


KNOWN: dict[str, Hardware] = {
    "a100_80gb": Hardware(
        "a100_80gb",
        2039 * _GB,
        {"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12, "int8": 624e12},
        80 * _GIB,
        600 * _GB,
        "data sheet",
        25 * _GB,
    ),
    "h100": _H100,
    # The same chip with more and faster memory.
    "h200": replace(_H100, kind="h200", bandwidth=4800 * _GB, memory=141 * _GIB),
    "cpu": Hardware("cpu", None, {}, None, None, "measured"),
    # Further kinds to simulate, from the makers' data sheets; of PCIe cards without NVLink what PCIe 4.0 x16
    # carries, both directions. Of T10 there is no data sheet: a TU102 board's listing.
    "l4": _pcie("l4", 300, {"bfloat16": 121e12, "int8": 242e12, "float8": 242e12}, 24),
    "l40s": _pcie("l40s", 864, {"bfloat16": 362e12, "int8": 733e12, "float8": 733e12}, 48),
    "t10": _pcie("t10", 320, {"float16": 65e12, "int8": 130e12}, 16, "board listing"),
    # Server edition, dense rates; the simulator's tables are of it.
    "rtxpro6000": _pcie("rtxpro6000", 1597, {"bfloat16": 504e12, "float8": 1007e12}, 96),
    "b200": Hardware(
        "b200",
        8000 * _GB,
        {"bfloat16": 2250e12, "float16": 2250e12, "int8": 4500e12, "float8": 4500e12},
        180 * _GB,
        1800 * _GB,
        "data sheet",
        50 * _GB,
    ),
    "mi300x": Hardware(
        "mi300x",
        5300 * _GB,
        {"bfloat16": 1307e12, "float16": 1307e12, "int8": 2615e12, "float8": 2615e12},
        192 * _GB,
        896 * _GB,
        "data sheet",
        50 * _GB,
    ),
    **{
        kind: Hardware(
            kind, rate * _GB, {"bfloat16": flops, "int8": codes}, memory * _GB, link * _GB, "data sheet"
        )
        for kind, rate, flops, codes, memory, link in (
            ("tpu_v5e", 819, 197e12, 394e12, 16, 200),
            ("tpu_v5p", 2765, 459e12, 918e12, 95, 600),
            ("tpu_v6e", 1640, 918e12, 1836e12, 32, 448),
        )
    },
}


def detect(device_kind: str) -> str | None:
    """Returns a known kind for JAX's `device_kind` text, or None."""
    text = device_kind.lower()
    for mark, kind in (("a100", "a100_80gb"), ("h100", "h100"), ("h200", "h200"), ("cpu", "cpu")):
        if mark in text:
            return kind
    return None


def get_hardware(kind: str, device_kind: str) -> Hardware | None:
    """Returns the device to hold results against; what is measured of it is left to `with_reading`.

    Args:
        kind: a known kind, or "auto" to go by `device_kind` (None where that is not known).

    Raises:
        ConfigError: an unknown kind.
    """
    if kind == "auto":
        detected = detect(device_kind)
        if detected is None:
            return None
        kind = detected
    if kind not in KNOWN:
        raise ConfigError(f"hardware.kind: {unknown('device', kind, (*KNOWN, 'auto'))}")
    return KNOWN[kind] if detect(device_kind) == kind else replace(KNOWN[kind], source="configured")


def with_reading(hardware: Hardware) -> Hardware:
    """Returns the device with peaks that are the best of its readings and a further one; as it is where they
    are not measured."""
    if hardware.source != "measured":
        return hardware
    reading = {dtype: measure_matmul_flops(dtype) for dtype in ("float32", "bfloat16")}
    readings = (*hardware.readings, {"bandwidth": measure_read_bandwidth(), **reading})
    best = {name: max(one[name] for one in readings) for name in readings[0]}
    return replace(hardware, bandwidth=best.pop("bandwidth"), flops=best, readings=readings)


def together(hardware: Hardware, devices: int) -> Hardware:
    """Returns several devices as one, to bound their joint work. Virtual CPU devices share one machine's."""
    if devices == 1 or hardware.kind == "cpu":
        return hardware

    def times(value: float | None) -> float | None:
        return None if value is None else devices * value

    flops = {dtype: devices * peak for dtype, peak in hardware.flops.items()}
    return replace(hardware, bandwidth=times(hardware.bandwidth), flops=flops, memory=times(hardware.memory))


def first_processor(root: str | os.PathLike[str] = "/") -> dict[str, str]:
    """Returns the first processor's fields in /proc/cpuinfo; none where there is no such file."""
    try:
        text = (Path(root) / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in text.strip().partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def processor_family() -> str | None:
    """Returns family and model of the processor, such as "26.2": virtual machines give the same name to
    processors that have little in common. None where they are not told."""
    told = first_processor()
    return f"{told['cpu family']}.{told.get('model')}" if "cpu family" in told else None


def measure_read_bandwidth(size_bytes: int = 1 << 28) -> float:
    """Returns the bytes per second that this machine's cores together read from memory.

    By XLA's own reduction over an array much larger than the caches.
    """
    import jax.numpy as jnp

    data = jnp.asarray(np.ones(size_bytes // 4, np.float32)).reshape(-1, 4096)
    return size_bytes / _best_seconds(lambda x: jnp.max(x, axis=1), data)


def measure_matmul_flops(dtype: str = "float32", size: int = 1024) -> float:
    """Returns the FLOPs per second of XLA's own product of two `[size, size]` matrices on all cores.

    A measured peak is what one large product reaches, which a program's products do not exceed by much.
    """
    import jax.numpy as jnp

    square = jnp.asarray(np.ones((size, size), np.float32)).astype(dtype)
    return 2 * size**3 / _best_seconds(jnp.matmul, square, square)


def _best_seconds(function: Callable[..., Any], *arrays: Any) -> float:
    """Returns the least time of the compiled function on these arrays, of five calls after a first."""
    import jax

    compiled = jax.jit(function).lower(*arrays).compile()
    jax.block_until_ready(compiled(*arrays))
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        seconds.append(time.perf_counter() - start)
    return min(seconds)
