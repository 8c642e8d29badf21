"""Applies an expert placement to a running engine: moves weights, rewrites the replica tables.

Steps already launched keep the arrays that they were given, weights and tables together; the next one takes
the new ones. Shapes and shardings stay, so nothing is compiled again, and every expert computes as before, so
that outputs do not change (but for the order in which devices' parts are added up).
"""

import dataclasses
import functools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.models.decoder import Decoder
from moejax.moe.layer import MoELayer
from moejax.moe.placement import Comparison, Placement, compare, devices_over, plan_placement
from moejax.moe.replicas import ReplicaTable, tables


@dataclass(frozen=True)
class Rebalanced:
    """What a change of placement did.

    Attributes:
        comparison: balance on the loads before and after, weights and bytes moved.
        seconds: that it took, moving included.
        applied: whether weights were moved; not where nothing is gained.
    """

    comparison: Comparison
    seconds: float
    applied: bool


def expert_layers(model: Decoder) -> Iterator[tuple[MoELayer, ReplicaTable]]:
    """The layers with experts on several devices.

    Raises:
        ConfigError: there are none.
    """
    layers: Any = model.layers
    found: list[MoELayer] = [layer.moe for layer in layers if layer.moe is not None]
    if not found or found[0].replicas is None:
        raise ConfigError("rebalance: experts are on one device (parallel.ep=1); there is nothing to balance")
    for moe in found:
        assert moe.replicas is not None
        yield moe, moe.replicas


def current_placement(model: Decoder, devices: int) -> Placement:
    """What is on the devices now, of the layers with experts."""
    layers = list(expert_layers(model))
    held = np.stack([replicas.expert_of() for _, replicas in layers])
    return Placement(held, layers[0][1].num_experts, devices)


def bytes_per_expert(model: Decoder) -> int:
    """Of one expert of one layer."""
    moe, replicas = next(expert_layers(model))
    experts = moe.experts
    matrices = (experts.gate_proj, experts.up_proj, experts.down_proj)
    return sum(matrix[...].nbytes for matrix in matrices) // replicas.num_physical


def rebalance(
    model: Decoder, parallel: ParallelConfig, loads: np.ndarray, min_gain: float, factor: float
) -> Rebalanced:
    """Plans a placement for `loads` `[L, E]` (all layers) and applies it; see `LLM.rebalance`.

    Raises:
        ConfigError: experts on one device, or a pipeline.
    """
    if parallel.pp > 1:
        raise ConfigError(f"rebalance: parallel.pp={parallel.pp}: placement is not built for pipelines")
    start = time.perf_counter()
    sparse = np.asarray(loads)[np.asarray(model.config.moe_layers)]
    old = current_placement(model, parallel.ep)
    if not devices_over(sparse, old, factor).over.size:
        comparison = compare(old, old, sparse)
        return Rebalanced(comparison, time.perf_counter() - start, applied=False)
    new = plan_placement(
        sparse,
        devices=parallel.ep,
        nodes=parallel.expert_nodes,
        redundant=parallel.redundant_experts,
        keep=old,
        min_gain=min_gain,
    )
    done = apply_placement(model, new, sparse)
    return dataclasses.replace(done, seconds=time.perf_counter() - start)


def apply_placement(model: Decoder, new: Placement, loads: np.ndarray) -> Rebalanced:
    """Moves the experts' weights to where `new` has them.

    Args:
        new: of the layers with experts, in order.
        loads: `[L, E]` of these layers, which the comparison is about.

    Raises:
        ConfigError: `new` is of other layers, experts, slots or devices.
    """
    start = time.perf_counter()
    old = current_placement(model, new.devices)
    if new.physical_to_logical.shape != old.physical_to_logical.shape:
        was, now = (list(p.physical_to_logical.shape) for p in (old, new))
        raise ConfigError(f"rebalance: the placement is of [layers, slots] {now}, the model has {was}")
    comparison = compare(old, new, loads, bytes_per_expert=bytes_per_expert(model))
    moved = []
    for number, (moe, replicas) in enumerate(expert_layers(model)):
        was, now = old.physical_to_logical[number], new.physical_to_logical[number]
        if np.array_equal(was, now):
            continue
        source = jnp.asarray(sources(was, now, new.slots_per_device))
        for matrix in (moe.experts.gate_proj, moe.experts.up_proj, moe.experts.down_proj):
            matrix.set_value(_taker(matrix[...].sharding)(matrix[...], source))
            moved.append(matrix[...])
        for table, value in zip(
            (replicas.physical, replicas.count), tables(now, new.num_experts), strict=True
        ):
            table.set_value(jax.device_put(value, table[...].sharding))
    jax.block_until_ready(moved)
    return Rebalanced(comparison, time.perf_counter() - start, bool(moved))


def sources(was: np.ndarray, now: np.ndarray, slots_per_device: int) -> np.ndarray:
    """int32 `[P]`: the slot that each new slot's expert is taken from, on its own device if it is there."""
    found = np.zeros(len(now), np.int32)
    for slot, expert in enumerate(now):
        holders = np.flatnonzero(was == expert)
        near = holders[holders // slots_per_device == slot // slots_per_device]
        # Far ones are spread over the replicas, so that not all read from one device.
        found[slot] = near[0] if len(near) else holders[slot % len(holders)]
    return found


@functools.lru_cache(maxsize=64)
def _taker(sharding: jax.sharding.Sharding) -> jax.stages.Wrapped:
    return jax.jit(lambda w, source: jnp.take(w, source, axis=0), out_shardings=sharding)
