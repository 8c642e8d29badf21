"""Fills a model from a checkpoint's tensors: on one device, or on each only what its sharding puts there.

It goes parameter by parameter. The parts of one that this process holds are read into host buffers, each
distinct slice once, and are on their devices before the next parameter's are read, so that at no time there
are two copies of the model.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from moejax.checkpoint.maps.rules import apply_transform, source_index
from moejax.checkpoint.plan import Faults, LoadPlan, Source
from moejax.checkpoint.tensors import TensorFiles
from moejax.core.errors import ConfigError
from moejax.models.decoder import Decoder
from moejax.nn.param import ExpertOf, OnValue, ParamSpec, Skip, assign, iter_params, slots_of

Spans = tuple[tuple[int, int], ...]


class Block(NamedTuple):
    """A part of a parameter, as stored by the model.

    Attributes:
        spans: start and stop along each dimension, padding left out.
        devices: those that hold it; none for a parameter without a sharding, of which it is the whole.
        values: what they hold.
        unpadded: the part of `values` that `spans` names, a view; the rest are zeros.
    """

    spans: Spans
    devices: tuple[jax.Device, ...]
    values: np.ndarray
    unpadded: np.ndarray


def fill_model(
    model: Decoder,
    files: TensorFiles,
    plan: LoadPlan,
    *,
    shardings: Mapping[str, Sharding] | None,
    expert_of: ExpertOf | None,
    source: str,
    store: OnValue = assign,
    faults: Faults | None = None,
    skip: Skip = lambda name: False,
) -> None:
    """Gives every parameter that the plan names its values, all shards of this process.

    Args:
        faults: what is wrong with others, to be listed with the rest.
        store: takes each value when it is on its devices, before the next is read.
        skip: parameters that are not read.

    Raises:
        CheckpointError: NaN, infinities or, for float16, values beyond its range; all tensors are named in
            which this process read some.
        ConfigError: `expert_of` does not fit the model.
    """
    faults = faults or Faults()
    for name, param in iter_params(model):
        if name not in plan or skip(name):
            continue
        spec = param.get_metadata("spec")
        slots = expert_slots(name, spec, expert_of, model.config.num_experts)
        sharding = None if shardings is None else shardings[name]
        # No name for the blocks, so that they do not outlive the array that is made of them.
        value = to_array(spec, sharding, read_blocks(files, plan[name], spec, sharding, faults, slots=slots))
        if not faults.by_kind:  # the rest is still looked at, so that the error names every such tensor
            store(name, param, jax.block_until_ready(value))
        del value  # may be gone by now, if `store` has made something smaller of it
    faults.check(source)


def expert_slots(name: str, spec: ParamSpec, expert_of: ExpertOf | None, num_experts: int) -> Sequence[int]:
    """Returns the expert in each slot of a parameter's expert axis.

    Raises:
        ConfigError: the model has more slots than experts and nobody said what is in them, or it lacks some.
    """
    if "expert" not in spec.axes:
        return ()
    slots = slots_of(name, spec, expert_of)
    if slots is None:
        slots = tuple(range(spec.shape[0]))
    if len(set(slots)) != num_experts:
        raise ConfigError(
            f"{name}: {len(slots)} slots for {len(set(slots))} experts, and the model has {num_experts}; "
            "expert_of must say which expert each slot holds"
        )
    return slots


def read_blocks(
    files: TensorFiles,
    sources: Mapping[int | None, Source],
    spec: ParamSpec,
    sharding: Sharding | None,
    faults: Faults,
    *,
    slots: Sequence[int] = (),
) -> list[Block]:
    """Returns the distinct parts of a parameter that this process's devices hold, in its dtype.

    Args:
        sources: expert (or None) → where it is stored.
        sharding: where the parameter lies; None makes one block of the whole.
        faults: tensors with values that are no weights are added.
        slots: the expert in each slot of the expert axis.
    """
    blocks = empty_blocks(spec, sharding)
    reads: dict[tuple[Source, Spans], list[np.ndarray]] = {}
    for expert, spans, out in expert_parts(blocks, slots if None not in sources else ()):
        if not out.size:
            continue
        if spec.transposed:
            spans, out = (*spans[:-2], spans[-1], spans[-2]), out.swapaxes(-1, -2)
        reads.setdefault((sources[expert], spans), []).append(out)
    for (source, spans), outs in reads.items():
        shape = spec.canonical_shape if source.expert is None else spec.canonical_shape[1:]
        index = tuple(slice(start, stop) for start, stop in spans)
        value = files.read(source.key, source_index(source.transform, index, shape, source.expert))
        if usable(source.key, value, spec.dtype, faults):
            part = apply_transform(source.transform, value)
            for out in outs:
                out[...] = part
    return blocks


def expert_parts(
    blocks: Iterable[Block], slots: Sequence[int]
) -> Iterator[tuple[int | None, Spans, np.ndarray]]:
    """Yields each expert's spans of its matrix and their place in a block; without slots whole blocks."""
    for block in blocks:
        if not slots:
            yield None, block.spans, block.unpadded
            continue
        first, stop = block.spans[0]
        for slot in range(first, stop):
            yield slots[slot], block.spans[1:], block.unpadded[slot - first]


def empty_blocks(spec: ParamSpec, sharding: Sharding | None) -> list[Block]:
    """Returns the distinct parts of a parameter that this process holds, unfilled but for padding."""
    blocks = []
    for spans, holders in _spans(spec, sharding).items():
        values = aligned_empty(tuple(stop - start for start, stop in spans), spec.dtype)
        if spec.padding:
            values[...] = 0
        true = tuple(
            (min(start, n), min(stop, n)) for (start, stop), n in zip(spans, spec.true_shape, strict=True)
        )
        unpadded = values[tuple(slice(stop - start) for start, stop in true)]
        blocks.append(Block(true, tuple(holders), values, unpadded))
    return blocks


def _spans(spec: ParamSpec, sharding: Sharding | None) -> dict[Spans, list[jax.Device]]:
    """Returns the distinct parts with the devices that hold each."""
    if sharding is None:
        return {tuple((0, size) for size in spec.shape): []}
    devices_of: dict[Spans, list[jax.Device]] = {}
    for device, index in sharding.devices_indices_map(spec.shape).items():
        if device in sharding.addressable_devices:
            assert index is not None
            spans = tuple(part.indices(size)[:2] for part, size in zip(index, spec.shape, strict=True))
            devices_of.setdefault(spans, []).append(device)
    return devices_of


def to_array(spec: ParamSpec, sharding: Sharding | None, blocks: Iterable[Block]) -> jax.Array:
    """Returns the parameter, of blocks that are filled."""
    if sharding is None:
        (block,) = blocks
        return jax.device_put(block.values, may_alias=True)
    kind = sharding.memory_kind
    # On CPU the devices that hold the same part share its host buffer, which is never written again.
    shards = [
        jax.device_put(block.values, SingleDeviceSharding(device, memory_kind=kind), may_alias=True)
        for block in blocks
        for device in block.devices
    ]
    return jax.make_array_from_single_device_arrays(spec.shape, sharding, shards, dtype=spec.dtype)


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Returns an uninitialised array that starts at a multiple of 64 bytes.

    On CPU, JAX takes such an array over without a copy.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.empty(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype).reshape(shape)


def usable(key: str, value: np.ndarray, dtype: Any, faults: Faults) -> bool:
    """Returns whether values can be weights of a dtype; adds what speaks against it to `faults`."""
    if not np.isfinite(value).all():
        faults.add("with NaN or infinite values", key)
        return False
    if np.dtype(dtype) == np.float16 and np.abs(value).max(initial=0) > np.finfo(np.float16).max:
        faults.add("with values too large for float16 (load as bfloat16 or float32)", key)
        return False
    return True
