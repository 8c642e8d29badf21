"""Applies an expert placement to a running engine: moves weights, rewrites the replica tables.

Steps already launched keep the arrays that they were given, weights and tables together; the next one takes
the new ones. Shapes and shardings stay, so nothing is compiled again, and every expert computes as before, so
that outputs do not change (but for the order in which devices' parts are added up).
"""

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.engine.opening.resolve import ResolvedEngine
from moejax.engine.opening.weights import Weights
from moejax.engine.routing.automatic import Rebalancer
from moejax.engine.routing.expert_counts import LoadWindow
from moejax.engine.step.bucket_runner import BucketRunner
from moejax.models.decoder import Decoder
from moejax.moe.layer import MoELayer
from moejax.moe.placement import Comparison, Placement, balancedness, compare, plan_placement
from moejax.moe.replicas import ReplicaTable, tables
from moejax.routing.analysis import loads_of
from moejax.routing.capture import RoutingCapture


@dataclass(frozen=True)
class Rebalanced:
    """The effect of a change of placement.

    Attributes:
        comparison: balance on the loads before and after, weights and bytes moved.
        seconds: that it took, moving included.
        applied: whether weights were moved; not where nothing is gained.
    """

    comparison: Comparison
    seconds: float
    applied: bool


def track_load(runner: BucketRunner, config: ModelConfig, window_steps: int) -> LoadWindow:
    """Has every step record its routing, and sums the latest ones."""
    window = LoadWindow(config.num_layers, config.num_experts, window_steps)
    runner.routing.window = window
    runner.builder.record_all = True
    return window


def tracked(runner: BucketRunner) -> np.ndarray:
    """Returns `[L, E]` assignments that `track_load` has counted.

    Raises:
        ConfigError: there are none.
    """
    window = runner.routing.window
    if window is None or not window.sum().any():
        raise ConfigError("rebalance: no load has been counted; call track_load and run some requests first")
    return window.sum()


def expert_layers(stages: Sequence[Decoder]) -> list[tuple[MoELayer, ReplicaTable]]:
    """Returns the layers with experts, which are on several devices.

    Raises:
        ConfigError: they are on one.
    """
    layers = []
    for layer in (layer for stage in stages for layer in stage.in_order()):
        if layer.moe is not None and layer.moe.replicas is not None:
            layers.append((layer.moe, layer.moe.replicas))
    if not layers:
        raise ConfigError("rebalance: experts are on one device (parallel.ep=1); there is nothing to balance")
    return layers


def current_placement(stages: Sequence[Decoder], devices: int) -> Placement:
    """Returns the placement on the devices now, of the layers with experts."""
    layers = expert_layers(stages)
    experts = np.stack([replicas.expert_of() for _, replicas in layers])
    return Placement(experts, layers[0][1].num_experts, devices)


def bytes_per_expert(stages: Sequence[Decoder]) -> int:
    """Returns the bytes of one expert of one layer."""
    moe, replicas = expert_layers(stages)[0]
    return sum(array[...].nbytes for array in moe.experts.arrays()) // replicas.num_physical


def rebalance(
    resolved: ResolvedEngine,
    weights: Weights,
    loads: np.ndarray | RoutingCapture,
    min_gain: float,
    factor: float,
) -> Rebalanced:
    """Plans a placement for `loads` `[L, E]` (all layers), or for a trace's, and applies it; see
    `LLM.rebalance`.

    Raises:
        ConfigError: the experts are on one device, `factor` is below 1, or the trace does not fit the model
            or has no rows.
    """
    if not factor >= 1.0:
        raise ConfigError(f"rebalance: factor={factor}: load is relative to the mean, so it is at least 1")
    start = time.perf_counter()
    config, parallel, stages = resolved.config, resolved.parallel, weights.stages
    old = current_placement(stages, parallel.ep)
    if isinstance(loads, RoutingCapture):
        loads.check_fits(config, "rebalance")
        loads.require_rows("rebalance")
        loads = loads_of(loads, config.num_layers)
    sparse = np.asarray(loads)[np.asarray(config.moe_layers)]
    if not (balancedness(sparse, old) > factor).any():
        return Rebalanced(compare(old, old, sparse), time.perf_counter() - start, applied=False)
    new = plan_placement(
        sparse,
        devices=parallel.ep,
        nodes=parallel.expert_nodes,
        groups=config.router.groups_on(parallel.expert_nodes),
        redundant=parallel.redundant_experts,
        keep=old,
        min_gain=min_gain,
    )
    comparison = compare(old, new, sparse, bytes_per_expert=bytes_per_expert(stages))
    applied = apply_placement(weights, old, new)
    return Rebalanced(comparison, time.perf_counter() - start, applied)


def automatic(resolved: ResolvedEngine, weights: Weights, runner: BucketRunner) -> Rebalancer:
    """Returns what decides for `engine.rebalance`; from now on every step counts its load."""
    config, stages, devices = resolved.engine.rebalance, weights.stages, resolved.parallel.ep
    window = track_load(runner, resolved.config, config.window_steps or config.every_steps)
    for moe, replicas in expert_layers(stages)[:1]:
        for array in moe.experts.arrays() if isinstance(weights.functions[0].leaves[0], jax.Array) else ():
            # Compiled here, not while requests wait for the first move.
            jax.block_until_ready(_taken(array[...], np.arange(replicas.num_physical, dtype=np.int32)))
    return Rebalancer(
        config,
        window,
        np.asarray(resolved.config.moe_layers),
        placement=lambda: current_placement(stages, devices),
        move=lambda old, new: apply_placement(weights, old, new),
        bytes_per_expert=bytes_per_expert(stages),
    )


def apply_placement(weights: Weights, old: Placement, new: Placement) -> bool:
    """Moves the experts' weights from where `old` has them to where `new` does, both of the layers with
    experts, in order. Returns whether any had to move.

    Layer by layer, so that one layer's experts are there twice at a time. Where one cannot be moved, those
    before it are moved back.
    """
    layers = expert_layers(weights.stages)
    places = zip(layers, old.physical_to_logical, new.physical_to_logical, strict=True)
    changed = [each for each in places if not np.array_equal(*each[1:])]
    for number, (layer, was, now) in enumerate(changed):
        try:
            _move(weights, *layer, was, now, new.slots_per_device)
        except BaseException:
            for before, there, here in changed[:number]:
                _move(weights, *before, here, there, new.slots_per_device)
            raise
    return bool(changed)


def _move(
    weights: Weights,
    moe: MoELayer,
    replicas: ReplicaTable,
    was: np.ndarray,
    now: np.ndarray,
    slots_per_device: int,
) -> None:
    """Moves one layer's experts: weights and tables together, or neither."""
    source = sources(was, now, slots_per_device)
    variables = [*moe.experts.arrays(), replicas.physical, replicas.count]
    before = [variable[...] for variable in variables]
    after = [_taken(array, source) for array in before[:-2]]
    for array, table in zip(before[-2:], tables(now, replicas.num_experts), strict=True):
        after.append(jax.device_put(table, array.sharding))
    jax.block_until_ready(after)
    replaced = {id(array): value for array, value in zip(before, after, strict=True)}
    for variable, value in zip(variables, after, strict=True):
        variable.set_value(value)
    for functions in weights.functions:
        functions.leaves[:] = [replaced.pop(id(leaf), leaf) for leaf in functions.leaves]
    assert not replaced, "the steps' leaves are the module's arrays"


def sources(was: np.ndarray, now: np.ndarray, slots_per_device: int) -> np.ndarray:
    """Returns the slot, int32 `[P]`, that each new slot's expert comes from: of its own device if there."""
    taken_from = np.zeros(len(now), np.int32)
    for slot, expert in enumerate(now):
        holders = np.flatnonzero(was == expert)
        near = holders[holders // slots_per_device == slot // slots_per_device]
        # Far ones are spread over the replicas, so that not all read from one device.
        taken_from[slot] = near[0] if len(near) else holders[slot % len(holders)]
    return taken_from


def _taken(array: jax.Array, source: np.ndarray) -> jax.Array:
    return _taker(array.sharding)(array, source)


@functools.lru_cache(maxsize=64)
def _taker(sharding: jax.sharding.Sharding) -> jax.stages.Wrapped:
    return jax.jit(lambda w, source: jnp.take(w, source, axis=0), out_shardings=sharding)
