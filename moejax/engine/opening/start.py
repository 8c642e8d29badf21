"""Builds the engine of a resolved configuration around weights: cache, runner, scheduler, loop."""

import dataclasses
import time
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from moejax.cache.allocator import window_blocks
from moejax.cache.pool import block_bytes
from moejax.cache.store import BlockFile, BlockStore
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.files import cache_root
from moejax.core.parallel import ParallelConfig
from moejax.core.resolve import Resolution
from moejax.core.version import __version__
from moejax.core.words import byte_words
from moejax.engine.core import Engine
from moejax.engine.opening.resolve import ResolvedEngine
from moejax.engine.opening.weights import Weights, load
from moejax.engine.pipeline.runner import PipelineRunner
from moejax.engine.routing.load_bias import follow_load
from moejax.engine.routing.rebalance import automatic
from moejax.engine.scheduling.adaptive import METHODS
from moejax.engine.scheduling.groups import GroupScheduler, scheduler_of
from moejax.engine.scheduling.plan import GroupPlan, StepPlan
from moejax.engine.scheduling.policies import make_policy
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.swap import MOVED_AT_A_TIME
from moejax.engine.scheduling.utility import StepTimes
from moejax.engine.step.bucket_runner import PlannedSteps
from moejax.engine.step.device_runner import DeviceRunner
from moejax.engine.step.ledger import CompileLedger, PartLedger
from moejax.engine.step.limits import CacheSpec
from moejax.engine.step.mtp import MtpFunctions, MtpRunner
from moejax.engine.tiers.runner import TieredRunner
from moejax.models.mtp import MtpDecoder
from moejax.perf.sizes import KV_CODE_BYTES, state_bytes
from moejax.sharding.distributed import agree
from moejax.sharding.pipeline import split_layers, stage_config
from moejax.sharding.spmd import MeshDevices

CPU_CACHE_BYTES = 2e9
DEVICE_CACHE_SHARE = 0.8


class Started(NamedTuple):
    """An idle engine with an empty cache, its runner, and the number of cache blocks with the reason."""

    engine: Engine
    runner: DeviceRunner | PipelineRunner
    blocks: Resolution


def start(resolved: ResolvedEngine, weights: Weights) -> Started:
    """Builds cache, runner, scheduler and loop.

    Raises:
        ConfigError: see `cache_blocks`.
    """
    config = resolved.engine
    # What the weights of an engine that is only planned would take.
    filled = not weights.absent
    draft = load(resolved.draft, fill=filled) if resolved.draft else None
    absent = weights.absent + (draft.absent if draft else 0)
    cache, blocks = plan_cache(resolved, absent)
    parallel, shared = resolved.parallel, resolved.config.shared_expert_intermediate_size
    beside = parallel.dispatch_microbatches > 1 or (parallel.overlap_shared and shared)
    overlap = parallel.attention == "data" and parallel.ep > 1 and bool(beside)
    ledger = CompileLedger(config.strict_compile, overlap)
    runner = make_runner(resolved, weights, cache, ledger, draft)
    engine = Engine(make_scheduler(resolved, cache), runner, overlap=config.overlap)
    engine.retries, engine.agree, engine.tiers = config.retries, agree, weights.tiers
    if config.rebalance.every_steps:
        engine.rebalance = automatic(resolved, weights, runner).after_step
    if resolved.moe.routing.method == "bias":
        follow_load(resolved.moe.routing, weights, runner)
    if config.initial_blocks is not None and isinstance(runner, DeviceRunner):
        engine.shrink = runner.shrink
    engine.compilations = lambda: len(ledger.entries)
    if config.adaptive_batching.enabled:
        method = METHODS[config.adaptive_batching.method]
        engine.adapt(method(config.adaptive_batching, lambda: runner.buckets))
    if config.speculation.most and config.speculation.depth == "utility":
        most = config.max_rows
        engine.time_steps(StepTimes(lambda rows: runner.buckets.rows_for(min(rows, most))))
    if isinstance(runner, DeviceRunner) and isinstance(engine.scheduler, Scheduler) and runner.store_slots:
        engine.store = engine.scheduler.store = runner.store
    auto = "auto" in (config.preemption, resolved.prefix_cache.load) and runner.store_slots
    seconds = time_to_move(runner) if auto and not absent else 0.0
    for swap in engine.scheduler.swaps:
        swap.move_s = seconds
    if engine.store is not None:
        engine.store.block_s = seconds / MOVED_AT_A_TIME  # out and in again, an upper bound
        if engine.store.file is not None and not absent:
            engine.store.file.open()  # or no engine is
    return Started(engine, runner, blocks)


def plan_cache(resolved: ResolvedEngine, absent: int) -> tuple[CacheSpec, Resolution]:
    """Returns the cache, and the number of its blocks with the reason; `absent` and errors are those of
    `cache_blocks`."""
    engine, parallel, kv_dtype = resolved.engine, resolved.parallel, resolved.kv_cache.value
    layers = split_layers(resolved.config, parallel.pp, parallel.stage_layers)
    parts = [stage_config(resolved.config, stage) for stage in layers]
    limits = resolved.max_model_len, parallel, kv_dtype, resolved.kernels, absent
    # As many as fit into every stage; of equals the reason of the one with the most layers.
    parts.sort(key=lambda part: part.num_layers, reverse=True)
    with_each = 0
    if (draft := resolved.draft) is not None:
        split = parallel.kv_split(draft.config.num_kv_heads)
        with_each = block_bytes(draft.config, engine.block_size, draft.kv_cache.value, split)
    sizes = (
        cache_blocks(engine, part, *limits, window=resolved.window, with_each=with_each) for part in parts
    )
    blocks = min(sizes, key=lambda one: int(one.value))
    number, window = int(blocks.value), resolved.window
    own = blocks_of_window(engine, window, number)
    return CacheSpec(number, engine.block_size, resolved.max_model_len, kv_dtype, window, own), blocks


def make_runner(
    resolved: ResolvedEngine,
    weights: Weights,
    cache: CacheSpec,
    ledger: CompileLedger,
    draft: Weights | None = None,
) -> DeviceRunner | PipelineRunner:
    """Returns the runner of one stage or of several, whose captured traces say what model they are of.

    Args:
        draft: of the model that drafts (`ResolvedEngine.draft`); its runner is the returned one's `drafter`.
    """
    pairs = list(zip(weights.functions, resolved.places, strict=True))
    stages = [(functions, place) for functions, place in pairs if isinstance(place, MeshDevices)]
    common = (resolved.engine, cache, ledger, resolved.kernels, resolved.replay)
    prefixes, swapped, places = store_slots(resolved, cache)
    slots = prefixes + swapped
    runner: DeviceRunner | PipelineRunner
    if len(stages) > 1:
        runner = PipelineRunner(stages, *common, microbatches=resolved.microbatches, store_slots=slots)
    else:
        ((functions, place),) = pairs
        one: dict[str, Any] = {"place": place, "store_slots": slots}
        if weights.tiers is not None:
            runner = TieredRunner(functions, *common, **one, tiers=weights.tiers)
        else:
            runner = DeviceRunner(functions, *common, **one)
        if places:
            tiers = resolved.engine.tiers
            folder = Path(tiers.disk_dir) if tiers.disk_dir else cache_root() / "blocks"
            runner.store = BlockStore(slots, slots - places, BlockFile(folder, places, tiers.queue_depth))
        if resolved.draft is not None and draft is not None:
            kind, functions = DeviceRunner, draft.functions[0]
            if isinstance(mtp := draft.stages[0], MtpDecoder):
                mtp.share(weights.stages[0])
                kind, functions = MtpRunner, MtpFunctions(mtp)
            # Its layers with a sliding window keep all tokens: the model's may have another window, or none.
            kept = cache._replace(dtype=resolved.draft.kv_cache.value, window=None, window_blocks=0)
            kind(
                functions,
                dataclasses.replace(resolved.engine, capture_routing=False),
                kept,
                PartLedger(ledger, "draft"),
                resolved.draft.kernels,
                place=resolved.draft.places[0],
                store_slots=slots,
                leader=runner,
            )
    if runner.capture is not None:
        runner.capture.meta = {
            "model": resolved.directory.name if resolved.directory else None,
            "family": resolved.config.family,
            "dtype": resolved.config.dtype,
            # For those to add who have it: reading all weights takes time.
            "checkpoint_hash": None,
            # What an exchange of limited room drops is in the trace as if it had run.
            "exchange_capacity": resolved.parallel.exchange_capacity,
            "versions": {"moejax": __version__, "jax": jax.__version__, "numpy": np.__version__},
        }
    return runner


def planning_engine(resolved: ResolvedEngine, cache: CacheSpec, steps: PlannedSteps) -> Engine:
    """Returns an engine that schedules as one that computes would, each request at once."""
    # Its own policy keeps accounts and times of what is computed, and a quota would have the plan wait.
    config = resolved.engine
    free = dataclasses.replace(config.scheduling, tenants={}, admission="queue")
    policy = make_policy(dataclasses.replace(config, scheduling=free))
    scheduler = make_scheduler(dataclasses.replace(resolved, policy=policy), cache)
    return Engine(scheduler, steps, overlap=config.overlap)


def make_scheduler(resolved: ResolvedEngine, cache: CacheSpec) -> Scheduler | GroupScheduler:
    """Returns a scheduler, or one for each data-parallel group, each with as many blocks."""
    slots, swapped, _ = store_slots(resolved, cache)
    return scheduler_of(
        resolved.engine,
        cache.num_blocks,
        groups=resolved.places[0].groups,
        policy=resolved.policy,
        prefixes=resolved.prefix_cache,
        slots=slots,
        swapped=swapped,
        shared=resolved.kernels != "xla",
        window=(cache.window, cache.window_blocks) if cache.window else None,
    )


def store_slots(resolved: ResolvedEngine, cache: CacheSpec) -> tuple[int, int, int]:
    """Returns how many blocks of each data-parallel group the host's store has room for: of remembered
    prefixes, and of sequences that were preempted; and how many of them all are in a file.

    Raises:
        ConfigError: it has room for none.
    """
    engine, remembered = resolved.engine, resolved.prefix_cache
    size = block_bytes(resolved.config, cache.block_size, cache.dtype)

    def slots(used: bool, key: str, memory_gb: float) -> int:
        count = int(memory_gb * 1e9 // (size * resolved.places[0].groups)) if used else 0
        if used and count < 1:
            raise ConfigError(
                f"engine.{key}={memory_gb:g} does not hold one block of {cache.block_size} tokens, "
                f"{size / 1e9:.3g} GB; raise it or lower engine.block_size"
            )
        return count

    remembers, swaps = remembered.enabled and remembered.place == "host", engine.preemption != "recompute"
    kept = slots(remembers and remembered.disk_gb > 0, "prefix_cache.disk_gb", remembered.disk_gb)
    away = slots(swaps and engine.swap_disk_gb > 0, "swap_disk_gb", engine.swap_disk_gb)
    prefixes = slots(remembers, "prefix_cache.host_memory_gb", remembered.host_memory_gb)
    return prefixes + kept, slots(swaps, "swap_memory_gb", engine.swap_memory_gb) + away, kept + away


def time_to_move(runner: DeviceRunner | PipelineRunner) -> float:
    """Returns the seconds that copying `MOVED_AT_A_TIME` blocks of each data-parallel group to the host's
    store and back takes; what the cache holds is forgotten."""
    most = min(MOVED_AT_A_TIME, runner.buckets.segments.sizes[0], runner.store_slots)
    most = min(most, runner.store.rows) if isinstance(runner, DeviceRunner) else most
    pairs = [(place, place) for place in range(most)]
    plan, times = GroupPlan([StepPlan(saves=pairs, loads=pairs)] * runner.groups), [time.perf_counter()]
    for _ in range(4):  # the first compiles
        runner.save(plan)
        jax.block_until_ready([pool.take_segment(0) for pool in runner.pools])
        times.append(time.perf_counter())
    runner.reset()
    return min(after - before for before, after in pairwise(times))


def blocks_of_window(engine: EngineConfig, window: int | None, num_blocks: int) -> int:
    """Returns how many blocks layers with a sliding window have of their own; 0: none."""
    sizes = engine.block_size, engine.max_num_seqs, engine.max_num_batched_tokens, num_blocks
    return window_blocks(window + engine.most_ahead, *sizes) if window is not None else 0


def cache_blocks(
    engine: EngineConfig,
    config: ModelConfig,
    max_model_len: int,
    parallel: ParallelConfig,
    kv_dtype: str | None = None,
    kernels: str = "xla",
    absent: int = 0,
    window: int | None = None,
    with_each: int = 0,
) -> Resolution:
    """Decides the number of blocks of the key/value cache (of each data-parallel group), with the reason.

    Args:
        kv_dtype: of the cache; None: the model's.
        kernels: implementation of the GPU kernels, "xla" for none.
        absent: bytes of weights that are not on the devices yet.
        window: tokens that layers with a sliding window keep, in blocks of their own; None: all.
        with_each: bytes of a block of the model that drafts.

    Raises:
        ConfigError: the memory allowed does not hold one block; more blocks are asked for than kernels take.
    """
    split = parallel.kv_split(config.num_kv_heads)
    kinds, block = config.cache_kinds(window), (config, engine.block_size, kv_dtype or config.dtype, split)
    key, size = "engine.num_blocks", block_bytes(*block, layers=kinds.count("blocks")) + with_each
    # Codes of a block of one layer, where there are kernels that must index them.
    codes = 0
    if kernels != "xla" and kv_dtype in KV_CODE_BYTES:
        codes = config.num_kv_heads // split * engine.block_size * config.key_dim
    needed = engine.max_num_seqs * -(-max_model_len // engine.block_size)
    state = state_bytes(config, parallel.tensor_size) * kinds.count("state")
    states = state * (engine.max_num_seqs + 1)
    beside = f"; beside it {byte_words(states)} of states, {byte_words(state)} a sequence" if states else ""
    own_size = block_bytes(*block, layers=kinds.count("window"))

    def words(blocks: int) -> str:
        """Returns how much a device holds with so many blocks."""
        own = blocks_of_window(engine, window, blocks)
        windows = f" and {byte_words(own * own_size)} of windows ({own} blocks)" if own else ""
        return f"{byte_words(blocks * size)}{windows} a device{beside}"

    if engine.num_blocks is not None:
        if not _kernels_take(engine.num_blocks * codes):
            raise ConfigError(
                f"engine.num_blocks={engine.num_blocks}: the GPU kernels take a cache in {kv_dtype} of at "
                f"most {2**31 // codes} or more than {2**32 // codes} such blocks; lower it, or use "
                "engine.kernels=xla"
            )
        return Resolution(key, str(engine.num_blocks), f"asked for; {words(engine.num_blocks)}")
    memory, why = _cache_memory(engine, parallel.num_devices, absent)
    room, both = memory - states, size + own_size
    fitting = int(room // both) if both else needed * (room >= 0)
    own = blocks_of_window(engine, window, needed)
    if fitting > own > 0:  # more than the windows can use
        fitting = int((room - own * own_size) // size) if size else needed
    if fitting < 1:
        lower = "engine.max_num_seqs or engine.block_size" if states else "engine.block_size"
        raise ConfigError(
            f"engine.kv_cache_memory_gb: {memory / 1e9:.3g} GB ({why}) do not hold one block of "
            f"{engine.block_size} tokens, {both / 1e9:.3g} GB{beside}; raise it or lower {lower}"
        )
    if not _kernels_take(min(needed, fitting) * codes):
        return Resolution(
            key, str(2**31 // codes), f"the most that the GPU kernels take of a cache in {kv_dtype}"
        )
    if needed <= fitting:
        sequences = f"{engine.max_num_seqs} sequences of {max_model_len} tokens"
        return Resolution(key, str(needed), f"{sequences}; {words(needed)}")
    return Resolution(key, str(fitting), f"{memory / 1e9:.3g} GB: {why}{beside}")


def _kernels_take(codes: int) -> bool:
    """Tells whether Pallas can index a layer's codes, of one byte each: it counts in 32 signed bits up to
    4 GiB and in 64 above (`pallas_kernels.kv.check_pool_size`)."""
    return codes <= 2**31 or codes > 2**32


def _cache_memory(engine: EngineConfig, devices: int, absent: int) -> tuple[float, str]:
    """Returns the cache's bytes on each device, and why so many."""
    if engine.kv_cache_memory_gb is not None:
        return engine.kv_cache_memory_gb * 1e9, "engine.kv_cache_memory_gb"
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0) - absent / devices
        return DEVICE_CACHE_SHARE * free, f"{DEVICE_CACHE_SHARE:.0%} of the device's free memory"
    why = "the default without device memory statistics"
    # Virtual devices share one memory.
    return CPU_CACHE_BYTES / devices, why if devices == 1 else f"{why}, over {devices} devices"
