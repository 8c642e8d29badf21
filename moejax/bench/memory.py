"""Peak memory, and the bytes of weights."""

import resource
import sys
from collections.abc import Iterable

import jax
from flax import nnx

from moejax.nn.quantized import weight_size


def weight_metrics(stages: Iterable[nnx.Module]) -> dict[str, float]:
    """`model_bytes` of a model as held, all devices' parts counted once, and `bits_per_parameter`."""
    sizes = [weight_size(stage) for stage in stages]
    model_bytes, numbers = (sum(size[i] for size in sizes) for i in range(2))
    return {"model_bytes": model_bytes, "bits_per_parameter": 8 * model_bytes / numbers}


def peak_memory(devices: list[jax.Device] | None = None) -> dict[str, int | None]:
    """Most memory in use so far, in bytes.

    `process_peak_bytes` is the process's peak resident set; `device_peak_bytes` is the largest device's peak
    where the backend counts it (GPU and TPU do), else None, as on CPU, whose arrays are in the resident set.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    host = usage if sys.platform == "darwin" else usage * 1024
    peaks = []
    for device in jax.local_devices() if devices is None else devices:
        stats = device.memory_stats()
        if stats and "peak_bytes_in_use" in stats:
            peaks.append(int(stats["peak_bytes_in_use"]))
    return {"process_peak_bytes": int(host), "device_peak_bytes": max(peaks) if peaks else None}
