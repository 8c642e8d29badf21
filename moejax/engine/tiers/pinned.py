"""Page-locked memory of the host, from which a GPU copies by itself while the host goes on."""

import os
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from moejax.core.errors import ConfigError
from moejax.core.resolve import Resolution
from moejax.core.tiers import TiersConfig
from moejax.core.words import byte_words
from moejax.engine.tiers.store import HostStore, Records

_KIND, _LIMIT = "pinned_host", "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"


class PinnedStore(HostStore):
    """All experts, or layers, as arrays in the `pinned_host` memory of JAX's first device. A copy of them to
    the device is launched as a program is."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self._memory = [[None] * len(records.leaves) for _ in range(records.count)]
        self._where = SingleDeviceSharding(jax.devices()[0], memory_kind=_KIND)

    def write(self, index: int, leaf: int, value: np.ndarray) -> None:
        """Puts one array of an expert into its place."""
        self._memory[index][leaf] = jax.device_put(value, self._where, may_alias=False)


def to_device(arrays: list[Any]) -> list[jax.Array]:
    """Starts to copy a record's arrays to JAX's first device."""
    return jax.device_put(arrays, SingleDeviceSharding(jax.devices()[0]))


def choose_host_memory(tiers: TiersConfig, nbytes: float, several: bool) -> Resolution:
    """Returns which memory of the host `nbytes` of records lie in.

    Args:
        several: the engine is on several devices.

    Raises:
        ConfigError: "pinned" was asked for, and there is none, or too little.
    """
    key, device = "engine.tiers.host_memory", jax.devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    limit = float(os.environ.get(_LIMIT, 64)) * 2**30 if device.platform == "gpu" else nbytes
    refusals = {
        "pinned arrays are one device's": several,
        f"what engine.tiers.codes={tiers.codes} has decoded is not pinned": tiers.codes != "none",
        f"the device has {', '.join(kinds)}, no {_KIND}": _KIND not in kinds,
        f"XLA pins {byte_words(limit)}, not {byte_words(nbytes)}; raise {_LIMIT}": nbytes > limit,
    }
    why = next((why for why, so in refusals.items() if so), None)
    if tiers.host_memory == "pinned" and why:
        raise ConfigError(f"{key}=pinned: {why}; take pageable, or auto")
    if tiers.host_memory != "auto":
        return Resolution(key, tiers.host_memory, "asked for")
    if device.platform == "cpu":
        why = "a CPU's device memory is the host's"
    return Resolution(key, "pageable" if why else "pinned", why or "the GPU copies while the host goes on")
