"""Schedulers of data-parallel groups behind the interface of one. No JAX here.

Each group has its own blocks, slots and queue, and a step runs all of them together. A request stays in the
group that it was dealt to, the one with the fewest tokens still to compute, its own that are cached there
not counted.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from functools import partial

from moejax.cache.allocator import BlockAllocator, WindowAllocator
from moejax.cache.prefix import PrefixTree, make_prefixes
from moejax.cache.segments import SegmentLayout
from moejax.core.config import EngineConfig, PrefixCacheConfig
from moejax.core.errors import refuse
from moejax.core.parallel import ParallelConfig
from moejax.engine.scheduling.plan import GroupPlan, StepPlan, joined, of_groups
from moejax.engine.scheduling.policies import Policy
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.sequence import Sequence, State
from moejax.engine.scheduling.speculation import Speculation
from moejax.engine.scheduling.static import StaticScheduler
from moejax.engine.scheduling.swap import SwapSpace
from moejax.engine.scheduling.verification import Verification


class GroupedBlocks:
    """The groups' allocators, counted as one."""

    def __init__(self, groups: list[BlockAllocator]) -> None:
        self.groups = groups
        self.block_size = groups[0].block_size

    num_blocks: int = of_groups("num_blocks")
    num_used: int = of_groups("num_used")


class GroupScheduler:
    """Implements what `moejax.engine.core.Engine` needs of a `Scheduler`, over one for each group."""

    def __init__(self, groups: list[Scheduler]) -> None:
        self.groups = groups
        self.allocator = GroupedBlocks([group.allocator for group in groups])
        self._load = [0] * len(groups)  # tokens of unfinished sequences
        self._counted: dict[int, int] = {}

    running: list[Sequence] = of_groups("running", joined)
    num_waiting: int = of_groups("num_waiting")
    idle: bool = of_groups("idle", all)
    drafts: bool = of_groups("drafts", any)

    def check_fits(self, sequence: Sequence) -> None:
        """Raises `RequestError` for what could never run in any group."""
        self.groups[0].check_fits(sequence)

    def check_on_time(self, sequence: Sequence) -> None:
        """Raises `RequestError` for what would come too late in the group that it would be dealt to."""
        self.groups[self._least(sequence)].check_on_time(sequence)

    @property
    def policy(self) -> Policy:
        """The groups' common one."""
        return self.groups[0].policy

    def wait_s(self) -> float:
        """Returns seconds until a rate allows a request of any group to go on; 0 where none does."""
        return min((wait for group in self.groups if (wait := group.wait_s())), default=0.0)

    @property
    def prefix_caches(self) -> list[PrefixTree]:
        return joined(group.prefix_caches for group in self.groups)

    swaps: list[SwapSpace] = of_groups("swaps", joined)

    def add(self, sequence: Sequence, group: int | None = None) -> None:
        """Queues a sequence (with its forks) in a group: the one with the least to do unless it is given.

        Raises:
            RequestError: it could never run.
        """
        self.check_fits(sequence)
        self.groups[self.deal(sequence, group)].add(sequence)

    def deal(self, sequence: Sequence, group: int | None = None) -> int:
        """Counts a sequence (with its forks) as a group's, and returns that."""
        group = self._least(sequence) if group is None else group
        for each in (sequence, *sequence.forks):
            each.group = group
            self._counted[id(each)] = each.max_length
            self._load[group] += each.max_length
        return group

    def schedule(self) -> GroupPlan | None:
        """Returns all groups' next step; None if none has anything to compute now."""
        plans = [group.schedule() for group in self.groups]
        if all(plan is None for plan in plans):
            return None
        return GroupPlan([plan or StepPlan() for plan in plans])

    def postprocess(self, plan: GroupPlan, tokens: Items[int]) -> list[tuple[int, Sequence]]:
        """Does what `Scheduler.postprocess` does; rows are those of the whole plan."""
        taken, first = [], 0
        for group, part in zip(self.groups, plan.groups, strict=True):
            rows = part.sequences
            taken_here = group.postprocess(part, tokens[first : first + len(rows)])
            taken += [(first + row, sequence) for row, sequence in taken_here]
            first += len(rows)
            for sequence in rows:
                self._forget_ended(sequence)
        return taken

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence as `Scheduler.finish` does."""
        forks = list(sequence.forks)
        self.groups[sequence.group].finish(sequence)
        for each in (sequence, *forks):
            self._forget_ended(each)

    def save_only(self) -> GroupPlan | None:
        """Returns the groups' plans with nothing but blocks to be copied to the host's store, if any has."""
        plans = [group.save_only() for group in self.groups]
        return GroupPlan([plan or StepPlan() for plan in plans]) if any(plans) else None

    def stored_tokens(self) -> int:
        return sum(group.stored_tokens() for group in self.groups)

    def forget_device_state(self) -> None:
        for group in self.groups:
            group.forget_device_state()

    def check_integrity(self) -> None:
        """Raises `AssertionError` with what is wrong in any group."""
        for number, group in enumerate(self.groups):
            group.check_integrity()
            strange = [s for s in group.running if s.group != number]
            if strange:
                raise AssertionError(f"{strange[0]!r} of group {strange[0].group} runs in group {number}")

    def _least(self, sequence: Sequence) -> int:
        """Returns the group with the least to do: what it knows of the sequence need not be computed."""
        to_do = [
            load - group.match(sequence).tokens for load, group in zip(self._load, self.groups, strict=True)
        ]
        return to_do.index(min(to_do))

    def _forget_ended(self, sequence: Sequence) -> None:
        if sequence.state is State.FINISHED:
            self._load[sequence.group] -= self._counted.pop(id(sequence), 0)


def scheduler_of(
    config: EngineConfig,
    num_blocks: int,
    *,
    groups: int,
    policy: Policy,
    prefixes: PrefixCacheConfig,
    slots: int = 0,
    swapped: int = 0,
    shared: bool = True,
    window: tuple[int, int] | None = None,
) -> Scheduler | GroupScheduler:
    """Returns a scheduler, or one for each of several data-parallel groups, each with as many blocks.

    Args:
        prefixes: what is remembered of prompts, with "auto" decided.
        slots, swapped: blocks of the host's store for remembered prefixes and for preempted sequences.
        shared: sequences may read the same block.
        window: tokens and blocks of layers with a sliding window, where these have their own.
    """
    kind: Callable[..., Scheduler] = Scheduler
    if config.batching == "static":
        kind = partial(StaticScheduler, starts=config.static_batching)
    ends = SegmentLayout.of(num_blocks, config.block_buckets).ends  # that the cache grows to
    schedulers = [
        kind(
            BlockAllocator(
                num_blocks,
                config.block_size,
                make_prefixes(prefixes, config.block_size, slots, shared) if prefixes.enabled else None,
                [end for end in ends if end >= min(config.initial_blocks or num_blocks, num_blocks)],
            ),
            config.max_num_seqs,
            config.max_num_batched_tokens,
            policy,
            WindowAllocator(window[1], config.block_size, window[0]) if window else None,
            SwapSpace(config.preemption, slots, swapped),
            _speculation(config),
            config.kv_policy,
        )
        for _ in range(groups)
    ]
    for scheduler in schedulers:
        scheduler.compacts = config.compact_cache
    return schedulers[0] if len(schedulers) == 1 else GroupScheduler(schedulers)


def check_compaction(engine: EngineConfig, parallel: ParallelConfig, kernels: str) -> None:
    """Raises `ConfigError` where blocks that are in use cannot move, or the cache cannot grow, or would for
    nothing."""
    refusals = {
        "GPU kernels, which read blocks wherever they lie": kernels != "xla",
        "engine.batching=static, which ends a batch whole": engine.batching == "static",
        "several devices": not parallel.is_single,
    }
    tiled, grows = engine.deterministic == "tiles", engine.initial_blocks is not None
    refuse("engine.initial_blocks", grows, refusals | {"engine.deterministic=tiles": tiled})
    known = "engine.prefix_cache.enabled=true, which knows prefixes by their blocks"
    refuse("engine.compact_cache=true", engine.compact_cache, refusals | {known: engine.prefix_cache.enabled})


def check_cache_tiers(engine: EngineConfig, parallel: ParallelConfig, prefixes: PrefixCacheConfig) -> None:
    """Raises `ConfigError` where blocks cannot lie on disk, or nobody can tell what loading them takes; the
    place of `prefixes` is decided."""
    drafts = engine.speculation.method == "draft"
    refusals = {
        "several devices": not parallel.is_single,
        "engine.speculation.method=draft, whose model has blocks of its own": drafts,
    }
    swaps = engine.preemption != "recompute" and engine.swap_disk_gb > 0
    refuse("engine.swap_disk_gb", swaps, refusals)
    refusals["engine.prefix_cache.place=device, which keeps nothing there"] = prefixes.place == "device"
    refuse("engine.prefix_cache.disk_gb", prefixes.enabled and prefixes.disk_gb > 0, refusals)
    refuse("engine.prefix_cache.load=auto", prefixes.enabled and prefixes.load == "auto", refusals)


def _speculation(config: EngineConfig) -> Speculation | None:
    if config.deterministic == "verified":
        return Verification(config.verify_every)
    return Speculation(config.speculation) if config.speculation.most else None
