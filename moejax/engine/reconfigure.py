"""Another layout under a running engine, without losing a request.

    beside    plan, check memory, copy the weights, warm up; the old engine goes on meanwhile
    collect   from here on under the engine's lock: the step in flight is read
    save      blocks of those that run → the host's memory, where they have all heads and layers
    weights   copied anew if they have changed since
    load      blocks → the new cache; all sequences → the new scheduler; the old arrays are freed
    step      the first one

The old engine is as it was until `load` is done, and goes on if anything fails.
"""

import dataclasses
import itertools
import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Sharding, SingleDeviceSharding

from moejax.cache.store import BlockStore
from moejax.core.errors import ConfigError, RequestError, refuse, unknown
from moejax.core.parallel import ParallelConfig
from moejax.engine.adapters import check_adapters
from moejax.engine.core import CLOSED
from moejax.engine.opening.memory import EngineMemory, device_limit
from moejax.engine.opening.quantize import QuantizationPlan
from moejax.engine.opening.resolve import ResolvedEngine, engine_limits, given, layout_told, make_places
from moejax.engine.opening.start import Started, start
from moejax.engine.opening.weights import Weights, load
from moejax.engine.pipeline.runner import PipelineRunner
from moejax.engine.routing.load_bias import follow_load
from moejax.engine.scheduling.carry import find_places, hand_over, waiting
from moejax.engine.scheduling.sequence import Sequence
from moejax.engine.step.device_runner import DeviceRunner
from moejax.moe.replicas import Placed, ReplicaTable, held_experts
from moejax.nn.lora import AdapterArray
from moejax.nn.param import ParamSpec, path_name
from moejax.nn.quantized import quantized_weights
from moejax.quantization.rules import Chosen

KvMove = Literal["move", "recompute"]
AnyRunner = DeviceRunner | PipelineRunner


@dataclass(frozen=True)
class Reconfigured:
    """The effect of a change of layout.

    Attributes:
        warmup_s: seconds of all that was done beside the old engine.
        collect_s, save_s, weights_s, load_s, first_step_s: seconds that requests waited, by part; see above.
        moved_weight_bytes: of weights, what devices have now and had not, by the two layouts' shardings.
        moved_cache_bytes: of blocks that went through the host's memory.
        moved, recomputed, queued: samples that went on with their blocks, are computed anew, were queued.
        forgotten_blocks: of the prefix cache.
    """

    warmup_s: float
    collect_s: float
    save_s: float
    weights_s: float
    load_s: float
    first_step_s: float
    moved_weight_bytes: int
    moved_cache_bytes: int
    moved: int
    recomputed: int
    queued: int
    forgotten_blocks: int

    @property
    def pause_s(self) -> float:
        """Seconds without a token."""
        return self.collect_s + self.save_s + self.weights_s + self.load_s + self.first_step_s


def reconfigure(llm: Any, parallel: ParallelConfig | None, kv: KvMove) -> Reconfigured:
    """See `LLM.reconfigure`; `llm` is one."""
    at = [time.perf_counter()]
    engine, old, weights = llm.engine, llm.runner, llm._weights
    with engine.lock:
        _check(llm, kv)
    resolved = _laid_out(llm._resolved, parallel)
    formats = {
        path: Chosen("", held.format) for stage in llm.stages for path, held in quantized_weights(stage)
    }
    # No file is read: each weight is quantized as it is now.
    by_shape = dataclasses.replace(resolved, source=None, quantization=QuantizationPlan(formats))
    planned = load(by_shape, fill=False)
    planned.resolutions[:2] = weights.resolutions[:2]  # method and formats, with their reasons
    memory = EngineMemory.of(resolved, planned)
    memory.check(device_limit(devices=resolved.parallel.num_devices), planned)
    copied, weight_bytes = _copy(weights, planned)
    # Programs over several devices must start in one order on each: never beside the engine's.
    with engine.lock if resolved.engine.preemption == "auto" else nullcontext():
        started = start(resolved, planned)
    fresh, new = started.engine.scheduler, started.runner
    for laid_out, runner in ((llm._resolved, old), (resolved, new)):  # layouts that come back are compiled
        key = laid_out.parallel, runner.cache, runner.limits
        runner.ledger.share(llm._ledgers.setdefault(key, runner.ledger))
    new.builder.record_all, new.builder.replay = old.builder.record_all, old.builder.replay
    _warm(old, new, engine.lock)
    with engine.lock:
        _check(llm, kv)
        if llm.runner is not old or llm._weights is not weights:
            raise RequestError("reconfigure: another call has changed this engine meanwhile; call it again")
        at.append(time.perf_counter())
        stopped, scheduler = engine.stopped, engine.scheduler
        try:
            if stopped is None:
                engine.pause("keep")
            running, queued = len(scheduler.running), waiting(scheduler)
            places = find_places(scheduler, fresh, lambda s: kv == "move" and _stays(resolved, s))
            at.append(time.perf_counter())
            moves = [move for place in places for move in place.moves(scheduler.allocator.block_size)]
            groups, blocks, new_groups, new_blocks = np.array(moves, np.int64).reshape(-1, 4).T
            saved = _read(old, groups, blocks)
            at.append(time.perf_counter())
            if any(variable.get_value() is not value for variable, value in copied):
                copied, weight_bytes = _copy(weights, planned)
            at.append(time.perf_counter())
            _write(new, new_groups, new_blocks, saved)
            forgotten = sum(cache.num_kept for cache in scheduler.prefix_caches)
            hand_over(scheduler, fresh, places)
            _take_over(llm, resolved, planned, started, memory)
        finally:
            if stopped is None:
                engine.unpause()
        at.append(time.perf_counter())
        if stopped is None and not engine.scheduler.idle:
            overlap, engine.overlap = engine.overlap, False  # so that it is read, too
            try:
                engine.step()
            finally:
                engine.overlap = overlap
        at.append(time.perf_counter())
    told: list[Any] = [after - before for before, after in itertools.pairwise(at)]
    told += [weight_bytes, sum(array.nbytes for array in saved), len(places), running - len(places)]
    told += [len(queued), forgotten]
    return Reconfigured(*told)


def _check(llm: Any, kv: str) -> None:
    """Raises what keeps an engine from changing its layout now."""
    if llm.engine.stopped == CLOSED or llm.engine._turning:
        within = "reconfigure: not from within a step; call it between two"
        raise RequestError(within if llm.engine._turning else CLOSED)
    if kv not in get_args(KvMove):
        raise ConfigError(f"reconfigure: {unknown('kv', kv, get_args(KvMove))}")
    engine, weights = llm.engine_config, llm._weights
    refusals = {
        "several processes": jax.process_count() > 1,
        "engine.batching=static, whose batches end whole": engine.batching == "static",
        "engine.experts.resident": weights.tiers is not None,
        "engine.initial_blocks, by which the cache grows": engine.initial_blocks is not None,
        f"engine.speculation.method={engine.speculation.method}": llm._resolved.draft is not None,
        "an engine without weights (fill=False)": weights.absent,
        "engine.adapters.slots that variants share": engine.adapters.slots and len(weights.users) > 1,
    }
    refuse("reconfigure", True, refusals, "; open another LLM")


def _stays(resolved: ResolvedEngine, sequence: Sequence) -> bool:
    """Tells whether blocks are all that a running sequence needs to go on: they hold neither what penalties
    have seen nor states, nor windows' blocks."""
    evicts = resolved.engine.kv_policy.method != "none" or resolved.window is not None
    return not (evicts or sequence.mode.penalty or any(resolved.config.linear_layers))


def _laid_out(resolved: ResolvedEngine, parallel: ParallelConfig | None) -> ResolvedEngine:
    """Returns the same model and settings over other devices; raises `ConfigError` where they do not fit."""
    parallel, engine, config = given("parallel", parallel, ParallelConfig), resolved.engine, resolved.config
    check_adapters(engine.adapters, parallel, config, resolved.moe, resolved.experts)
    known = dataclasses.replace(engine, replay_routing=None)
    limits = engine_limits(known, parallel, config, resolved.kernels) | {"replay": resolved.replay}
    places, told = make_places(parallel, config, resolved.moe), layout_told(resolved)
    new = dataclasses.replace(resolved, parallel=parallel, places=places, **limits)
    kept = [one for one in resolved.resolutions if one not in told]
    return dataclasses.replace(new, resolutions=[*kept, *layout_told(new)])


def _warm(old: AnyRunner, new: AnyRunner, lock: Any) -> None:
    """Compiles what the old runner was warmed up for, or else the steps that it has had, and what copies
    blocks from one to the other."""
    if old.warmed is not None:
        new.warmup(**old.warmed, lock=lock)
    else:
        new.count_always(old.builder.counting)
        had = [key for key, _ in old.ledger.programs("step") if key.blocks in new.limits.segment_ends]
        new.compile_ahead(had)
    warmed_up, old.ledger.warmed_up = old.ledger.warmed_up, False  # it is no defect
    try:
        for runner in (old, new):
            for z in range(len(runner.buckets.segments.sizes)):
                runner._mover(z, saving=runner is old)
    finally:
        old.ledger.warmed_up = warmed_up


def _take_over(
    llm: Any, resolved: ResolvedEngine, planned: Weights, started: Started, memory: EngineMemory
) -> None:
    """Has the loop go on with another engine's parts, so that who waits for it waits still, and frees the old
    one's memory."""
    engine, old, new, weights = llm.engine, llm.runner, started.runner, llm._weights
    for name in ("scheduler", "runner", "rebalance", "compilations", "adaptive", "times", "store"):
        setattr(engine, name, getattr(started.engine, name))
    new.routing = old.routing
    if resolved.moe.routing.method == "bias":
        follow_load(resolved.moe.routing, planned, new)
    if old.capture is not None and new.capture is not None:
        old.capture.follow(new.capture)
        new.capture = old.capture
    new.ledger.entries[:0] = old.ledger.entries
    new.ledger.seconds += old.ledger.seconds
    new.ledger.warmed_up = old.ledger.warmed_up
    planned.adapters.succeed(weights.adapters, planned.functions)
    llm.builder.laid_out(resolved, planned.adapters)
    for pool in old.pools:
        pool.reset()
    weights.release(llm)
    llm._weights, llm._planned = planned, memory
    llm._take(resolved, Started(engine, new, started.blocks))


# -- blocks ----------------------------------------------------------------------------------------------


def stages_of(runner: AnyRunner) -> list[DeviceRunner]:
    """Returns the parts of a runner that have blocks, in the order of their layers."""
    return [*runner.stages] if isinstance(runner, PipelineRunner) else [runner]


def _read(runner: AnyRunner, groups: np.ndarray, blocks: np.ndarray) -> list[np.ndarray]:
    """Returns n blocks, an array `[n, …]` for each array of each layer's segments."""
    found: list[np.ndarray] = []
    for part in stages_of(runner) if len(blocks) else ():
        store = BlockStore(len(blocks))
        part.transport(True, store, groups, blocks, np.arange(len(blocks)))
        found += store.get(range(len(blocks)))
    return found


def _write(runner: AnyRunner, groups: np.ndarray, blocks: np.ndarray, arrays: list[np.ndarray]) -> None:
    """Puts what `_read` has given into other blocks, each layer's where it is now."""
    rest = iter(arrays)
    for part in stages_of(runner) if arrays else ():
        store = BlockStore(len(blocks))
        store.fill(list(itertools.islice(rest, len(jax.tree.leaves(part.pool.blocks(1))))))
        part.transport(False, store, groups, blocks, np.arange(len(blocks)))
    jax.block_until_ready([pool.take_segment(0) for pool in runner.pools if arrays])


# -- weights ---------------------------------------------------------------------------------------------


class Laid(NamedTuple):
    """How a tensor lies: its declaration, the expert in each slot if it is of experts, its devices."""

    spec: ParamSpec
    slots: tuple[int, ...]
    sharding: Sharding

    def places(self) -> dict[jax.Device, list[np.ndarray]]:
        """Returns each device's part: of each axis the indices without padding, experts by their numbers."""
        parts = {}
        for device, index in self.sharding.devices_indices_map(self.spec.shape).items():
            axes = [np.arange(size)[mine] for size, mine in zip(self.spec.true_shape, index, strict=True)]
            parts[device] = [np.asarray(self.slots)[axes[0]], *axes[1:]] if self.slots else axes
        return parts


def bytes_moved(was: list[Laid], now: Laid) -> int:
    """Returns the bytes that devices lack of what they are to have of a tensor, of which there are copies."""
    had, lacking = [laid.places() for laid in was], 0
    for device, axes in now.places().items():
        here = [parts[device] for parts in had if device in parts]
        shared = (math.prod(np.isin(a, b).sum() for a, b in zip(axes, part, strict=True)) for part in here)
        lacking += math.prod(map(len, axes)) - max(shared, default=0)
    return int(lacking) * jnp.dtype(now.spec.dtype).itemsize


def _tensors(weights: Weights) -> dict[str, list[tuple[nnx.Variable, Laid]]]:
    """Returns, by path, all that has values of its own; tied embeddings are on two stages. Tables of experts'
    places follow from the layout."""
    found: dict[str, list[tuple[nnx.Variable, Laid]]] = {}
    for stage in weights.stages:
        nodes, held = list(nnx.iter_graph(stage)), held_experts(stage) or {}
        tables = [id(x) for _, n in nodes if isinstance(n, ReplicaTable) for x in (n.physical, n.count)]
        for path, node in nodes:
            if isinstance(node, nnx.Param | AdapterArray | Placed) and id(node) not in tables:
                name, spec = path_name(path), node.get_metadata("spec")
                experts = range(spec.shape[0]) if spec.axes[:1] == ("expert",) else ()
                slots = next((ids for of, ids in held.items() if experts and name.startswith(of)), experts)
                where = node.get_value().sharding or SingleDeviceSharding(jax.devices()[0])
                found.setdefault(name, []).append((node, Laid(spec, tuple(slots), where)))
    return found


def _copy(old: Weights, new: Weights) -> tuple[list[tuple[nnx.Variable, jax.Array]], int]:
    """Gives weights of another layout the values of those that there are.

    Returns:
        What was copied, and `Reconfigured.moved_weight_bytes`.
    """
    here, moved = _tensors(old), 0
    copied = [(variable, variable.get_value()) for every in here.values() for variable, _ in every]
    for name, targets in _tensors(new).items():
        variable, laid = here[name][0]
        whole = laid.spec.without_padding(np.asarray(variable.get_value()))
        for target, to in targets:
            host = whole[[laid.slots.index(expert) for expert in to.slots]] if to.slots else whole
            if host.shape != to.spec.true_shape:
                raise ConfigError(f"reconfigure: {name} would have another form there; open another LLM")
            # Memory of its own: either may be deleted.
            value = np.zeros(to.spec.shape, host.dtype)
            value[tuple(map(slice, host.shape))] = host
            target.set_value(jax.device_put(value, to.sharding))
            moved += bytes_moved([laid for _, laid in here[name]], to)
    for functions, stage in zip(new.functions, new.stages, strict=True):
        functions.leaves[:] = jax.tree.leaves(nnx.split(stage)[1])
    return copied, moved
