"""Applies an expert placement to a running engine: moves weights, rewrites the replica tables.

Steps already launched keep the arrays that they were given, weights and tables together; the next one takes
the new ones. Shapes and shardings stay, so nothing is compiled again, and every expert computes as before, so
that outputs do not change (but for the order in which devices' parts are added up).
"""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.scheduling import RebalanceConfig
from moejax.core.words import one_line
from moejax.engine.opening.resolve import ResolvedEngine
from moejax.engine.opening.weights import Weights
from moejax.engine.routing.expert_counts import LoadWindow
from moejax.engine.stats import RebalanceEvent
from moejax.engine.step.bucket_runner import BucketRunner
from moejax.models.decoder import Decoder
from moejax.moe.layer import MoELayer
from moejax.moe.placement import (
    Comparison,
    Placement,
    adjust_placement,
    balancedness,
    compare,
    plan_placement,
)
from moejax.moe.replicas import ReplicaTable, tables
from moejax.routing.analysis import loads_of
from moejax.routing.capture import RoutingCapture

logger = logging.getLogger(__name__)


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
    config, parallel = resolved.config, resolved.parallel
    if isinstance(loads, RoutingCapture):
        loads.check_fits(config, "rebalance")
        loads.require_rows("rebalance")
        loads = loads_of(loads, config.num_layers)

    def plan(sparse: np.ndarray, old: Placement) -> Placement:
        if not (balancedness(sparse, old) > factor).any():
            return old
        return plan_placement(
            sparse,
            devices=parallel.ep,
            nodes=parallel.expert_nodes,
            groups=config.router.groups_on(parallel.expert_nodes),
            redundant=parallel.redundant_experts,
            keep=old,
            min_gain=min_gain,
        )

    return _place(resolved, weights, loads, plan)


def _place(
    resolved: ResolvedEngine,
    weights: Weights,
    loads: np.ndarray,
    plan: Callable[[np.ndarray, Placement], Placement],
) -> Rebalanced:
    start = time.perf_counter()
    old = current_placement(weights.stages, resolved.parallel.ep)
    sparse = np.asarray(loads)[np.asarray(resolved.config.moe_layers)]
    new = plan(sparse, old)
    comparison = compare(old, new, sparse, bytes_per_expert=bytes_per_expert(weights.stages))
    applied = apply_placement(weights, old, new)
    return Rebalanced(comparison, time.perf_counter() - start, applied)


class Rebalancer:
    """Decides every so many steps whether experts move.

    Args:
        rebalance: moves them where that pays; where it raises, they are where they were.
        clock: seconds, of the events.
    """

    def __init__(
        self,
        config: RebalanceConfig,
        rebalance: Callable[[], Rebalanced],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.config, self.rebalance, self.clock = config, rebalance, clock
        self._steps = self._rests_until = 0

    def after_step(self) -> RebalanceEvent | None:
        """Returns what was decided after a step, None where nothing was to be. A failure is only told."""
        self._steps += 1
        if self._steps % self.config.every_steps:
            return None
        event = functools.partial(RebalanceEvent, self._steps, self.clock())
        if self._steps < self._rests_until:
            return event("cooldown")
        try:
            done = self.rebalance()
        except Exception as error:
            text = one_line(error) or type(error).__name__
            logger.warning("engine.rebalance: experts stay where they are: %s", text)
            return event(f"failed: {text}")
        if done.applied:
            self._rests_until = self._steps + self.config.cooldown_steps
        change = done.comparison
        return event(
            "moved" if done.applied else "no layer gains enough",
            float(change.before.mean()),
            float(change.after.mean()),
            change.replicated,
            change.removed,
            change.bytes_moved,
            done.seconds,
        )


def automatic(resolved: ResolvedEngine, weights: Weights, runner: BucketRunner) -> Rebalancer:
    """Returns what decides for `engine.rebalance`; from now on every step counts its load."""
    config = resolved.engine.rebalance
    track_load(runner, resolved.config, config.every_steps)
    plan = functools.partial(adjust_placement, rule=config)
    return Rebalancer(config, lambda: _place(resolved, weights, tracked(runner), plan))


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
    after = [_taker(array.sharding)(array, source) for array in before[:-2]]
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


@functools.lru_cache(maxsize=64)
def _taker(sharding: jax.sharding.Sharding) -> jax.stages.Wrapped:
    return jax.jit(lambda w, source: jnp.take(w, source, axis=0), out_shardings=sharding)
