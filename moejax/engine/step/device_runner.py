"""Runs plans on the device: builds the batch, finds its bucket's compiled step, owns the device state."""

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.cache.pool import BlockPool, Pages
from moejax.cache.segments import SegmentLayout
from moejax.cache.store import BlockStore
from moejax.core.config import CacheKind, EngineConfig
from moejax.engine.pipeline.microbatches import Part, tiles_of
from moejax.engine.routing.replay import RoutingReplay
from moejax.engine.scheduling.plan import Plan, draft_plans
from moejax.engine.scheduling.swap import MOVED_AT_A_TIME
from moejax.engine.step.batch import layout
from moejax.engine.step.bucket_runner import BucketRunner, Rows, is_sampled, of_groups
from moejax.engine.step.functions import shapes_of
from moejax.engine.step.ledger import CompileLedger, Program
from moejax.engine.step.limits import CacheSpec, StepKey
from moejax.engine.step.program import DeviceState, PagedFunctions, PagedOutput
from moejax.engine.step.runner import StepResult
from moejax.ops.kv_segments import copy_blocks
from moejax.sharding.spmd import MeshDevices, SingleDevice


class CopyKey(NamedTuple):
    """Shape bucket of the program that copies shared blocks: cache blocks in reach."""

    blocks: int


class MoveKey(NamedTuple):
    """Shape bucket of the programs that copy blocks to the host's store and back: the blocks of a segment."""

    blocks: int


class Launched(NamedTuple):
    """A step under way, or a tile of it, and the device's promise."""

    key: StepKey
    batch: Rows
    output: PagedOutput


class LaunchedTiles(NamedTuple):
    """A step under way in tiles."""

    tiles: list[tuple[Part, Launched]]
    rows: int
    chunk_tokens: int

    @property
    def output(self) -> PagedOutput:
        """What the last of them gives."""
        return self.tiles[-1][1].output


class DeviceRunner(BucketRunner):
    """Implements `moejax.engine.step.runner.Runner`.

    Args:
        functions: the model's leaves and step.
        config: buckets, slots, tokens in a block.
        cache: its size and dtype.
        ledger: where steps are compiled.
        kernels: implementation of the GPU kernels, "xla" for none.
        replay: the routing that steps are told; None: routers choose.
        place: the devices, one unless given. Slots, blocks and buckets are each data-parallel group's.
        store_slots: blocks of each group that the host's store has room for.
        leader: whose steps this one's cache follows, and whose drafts it makes.

    `last` and `hidden` are those of `DeviceState`, the first the leader's; `drafter` is who follows, if
    anybody does; `arrays` are its own of all layers'.
    """

    def __init__(
        self,
        functions: PagedFunctions,
        config: EngineConfig,
        cache: CacheSpec,
        ledger: CompileLedger,
        kernels: str = "xla",
        replay: RoutingReplay | None = None,
        *,
        place: SingleDevice | None = None,
        store_slots: int = 0,
        leader: "DeviceRunner | None" = None,
    ) -> None:
        self.leader = None if leader is None else weakref.proxy(leader)  # a circle would keep its weights
        self.drafter: DeviceRunner | None = None
        self._last: jax.Array
        self.hidden: jax.Array | None = None
        self.place = place or SingleDevice()
        self.functions = functions
        model = functions.config
        super().__init__(
            model, config, cache, ledger, kernels, replay, place=self.place, store_slots=store_slots
        )
        self.pool = self._make_pool("blocks", self.buckets.segments)
        self.windows, self.arrays = None, slice(None)
        if self.builder.windows is not None:
            self.windows = self._make_pool("window", self.builder.windows)
        self.store = BlockStore(store_slots * self.groups)
        self._writing: deque[set[int]] = deque()  # blocks that each step under way writes
        self.reset()
        if leader is not None:
            leader.drafter = self

    def _make_pool(self, kind: CacheKind, segments: SegmentLayout) -> BlockPool:
        """Returns the blocks of its layers of one kind."""
        cache = self.cache
        return BlockPool(
            self.functions.config,
            segments,
            cache.block_size,
            jnp.dtype(cache.dtype),
            transposed_keys=self.limits.kernels == "xla",
            slots=self.config.max_num_seqs,
            kinds=self.functions.config.cache_kinds(cache.window),
            kind=kind,
            place=self.place,
        )

    @property
    def pools(self) -> list[BlockPool]:
        """The blocks of its cache."""
        return [self.pool] if self.windows is None else [self.pool, self.windows]

    def segments(self, key: StepKey) -> list[tuple[BlockPool, int]]:
        """Returns of how many segments of each pool a step reads and writes."""
        parts = [(self.pool, self.limits.segment_ends.index(key.blocks) + 1)]
        if self.windows is not None:
            own, limits = self.limits.of_window(key)
            parts.append((self.windows, limits.segment_ends.index(own.blocks) + 1))
        return parts

    def take_pages(self, key: StepKey) -> Pages:
        """Returns a step's segments; `put_pages` must follow."""
        return tuple(chain.from_iterable(pool.take(count) for pool, count in self.segments(key)))

    def put_pages(self, key: StepKey, pages: Pages) -> None:
        """Takes back what a step has made of its segments."""
        for pool, count in self.segments(key):
            pool.put(pages[:count])
            pages = pages[count:]

    def reset(self) -> None:
        for pool in self.pools:
            pool.reset()
        self.store.reset()
        self._writing.clear()
        self.last = self.place.zeros((self.limits.places,), jnp.int32)
        self._seen: jax.Array | None = None
        if self.drafter is not None:
            self.drafter.reset()

    def shrink(self, blocks: int) -> None:
        """Frees the memory of all blocks behind the first ones, which nobody uses."""
        for runner in self._both:
            runner.pool.shrink(runner.pool.layout.segments_for(blocks))

    @property
    def last(self) -> jax.Array:
        return self._last if self.leader is None else self.leader.last

    @last.setter
    def last(self, last: jax.Array) -> None:
        (self.leader or self)._last = last

    def launch(self, plan: Plan) -> Launched | LaunchedTiles:
        """Builds the batch and starts the step.

        Raises:
            CompileError: the step is not compiled, and may not be any more (`engine.strict_compile`).
        """
        for runner in self._both:
            runner.move(plan)
            runner.copy_blocks(plan)
            if runner.store_slots and runner.pool.host_reads:
                runner._writing.append(plan.groups[0].written(self.limits.block_size))
        drafter, after = self.drafter or self, self.limits.mtp
        for drafts in draft_plans(plan, after):
            drafter._run(*drafter.builder.build(drafts))
        if after:
            launched, build = self._launched(plan), drafter.builder
            assert launched.output.sampled is not None
            given = launched.output.x, launched.output.sampled.tokens
            drafter._run(*build.build(plan, build.following(launched.key)), given)
            return launched
        if drafter is not self:
            build = drafter.builder
            drafter._run(*build.build(plan, build.following(build.key(plan))))
        if not self.limits.tile:
            return self._launched(plan)
        parts = tiles_of(plan, self.limits.tile, self.limits.verified)
        tiles = [(part, self._launched(part.plan)) for part in parts]
        return LaunchedTiles(tiles, len(plan.sequences), plan.chunk_tokens)

    def _launched(self, plan: Plan) -> Launched:
        key, buffer = self.builder.build(plan)
        return Launched(key, Rows.of(plan, key, self.capture), self._run(key, buffer))

    @property
    def _both(self) -> "list[DeviceRunner]":
        return [self] if self.drafter is None else [self, self.drafter]

    def _save(self, plan: Plan) -> None:
        for runner in self._both:
            runner.move(plan)
            runner.store.settle()
            runner.store.begin()

    def move(self, plan: Plan) -> None:
        """Copies blocks to the host's store, then others from there, and what sequences bring."""
        groups = list(enumerate(plan.groups))
        saves = [(group, *pair) for group, part in groups for pair in part.saves]
        self._move(True, self._read(saves) if saves and self.pool.host_reads else saves)
        self._move(False, [(group, block, slot) for group, part in groups for slot, block in part.loads])
        for group, blocks, arrays in ((group, *each) for group, part in groups for each in part.imports):
            if n := len(blocks):
                store = BlockStore(n)
                store.fill([array[-n:] for array in arrays[self.arrays]])
                self.transport(False, store, np.full(n, group), np.array(blocks), np.arange(n))

    def _read(self, saves: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Copies to the store what no step under way writes, meanwhile and in a fraction of the time that a
        program takes; returns the rest. Plain Python, since NumPy's calls cost more on so few."""
        writing, layout, late = set().union(*self._writing), self.pool.layout, []
        memory: dict[int, list[np.ndarray] | None] = {}
        for move in saves:
            _, block, slot = move
            z = bisect_right(layout.ends, block)
            arrays = memory[z] if z in memory else memory.setdefault(z, self.pool.memory(z))
            if block in writing or arrays is None:
                late.append(move)
            else:
                self.store.copy(arrays, block - layout.ends[z] + layout.sizes[z], slot)
        return late

    def _move(self, saving: bool, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copies blocks to the store, or from there: group, block and slot of each."""
        if moves:
            groups, blocks, slots = np.array(moves, np.int64).T
            self.transport(saving, self.store, groups, blocks, slots + groups * self.store_slots)

    def transport(
        self, saving: bool, store: BlockStore, groups: np.ndarray, blocks: np.ndarray, slots: np.ndarray
    ) -> None:
        """Copies blocks to a store, or from there: each one's group, place in it, and slot."""
        segments, local = self.pool.layout.locate(blocks)
        for z in np.unique(segments):
            size, mine = self.pool.layout.sizes[z], segments == z
            # A group's blocks follow the ones of the group before.
            index, places = (local + groups * size)[mine], slots[mine]
            most = min(MOVED_AT_A_TIME, size)
            for at in range(0, len(index), most):
                program = self._mover(int(z), saving)
                part, into = index[at : at + most], places[at : at + most].tolist()
                # Past the segment's end nothing is written, and its last block is read.
                ids = np.full(most, size * self.groups, np.int32)
                ids[: len(part)] = part
                pages = self.pool.take_segment(int(z))
                if saving:
                    store.put(into, jax.tree.leaves(program(pages, ids)))
                else:
                    padded = store.get(into + into[:1] * (most - len(into)))
                    new = jax.tree.unflatten(jax.tree.structure(pages), padded)
                    self.pool.put_segment(int(z), self.place.ready(program(pages, ids, new)))

    def _mover(self, z: int, saving: bool) -> Any:
        """Returns the compiled program that copies blocks of a segment to the store, or from there."""
        size = self.pool.layout.sizes[z]

        def build() -> jax.stages.Wrapped:
            if saving:
                return jax.jit(lambda pages, ids: jax.tree.map(lambda x: x.at[ids].get(mode="clip"), pages))

            def load(pages: Any, ids: jax.Array, new: Any) -> Any:
                return jax.tree.map(lambda x, y: x.at[ids].set(y, mode="drop"), pages, new)

            placed = None
            if isinstance(self.place, MeshDevices):
                placed = jax.tree.map(lambda x: x.sharding, self.pool.blocks(size))
            return jax.jit(load, donate_argnums=0, out_shardings=placed)

        def shapes() -> tuple[Any, ...]:
            pages, most = self.pool.blocks(size), min(MOVED_AT_A_TIME, size)
            ids = jax.ShapeDtypeStruct((most,), jnp.int32)
            new = jax.tree.map(lambda x: jax.ShapeDtypeStruct((most, *x.shape[1:]), x.dtype), pages)
            return (pages, ids) if saving else (pages, ids, new)

        return self.ledger.get("save blocks" if saving else "load blocks", MoveKey(size), build, shapes)

    def _run(self, key: StepKey, buffer: np.ndarray, *given: Any) -> PagedOutput:
        step = self.program(key)
        pages, states = self.take_pages(key), self.pool.take_states()
        state = DeviceState(pages, states, self.last, self._seen_of(key), self.hidden)
        state, output = self.place.ready(step(self.functions.leaves, state, self.place.put(buffer), *given))
        self.put_pages(key, state.pages)
        self.pool.states = state.states
        self.last, self.hidden = state.last, state.hidden
        if key.mode.penalty:
            self._seen = state.seen
        return output

    def ready(self, handle: Launched | LaunchedTiles) -> bool:
        return is_sampled(handle.output)

    def collect(self, handle: Launched | LaunchedTiles) -> StepResult:
        """Reads a step's result; this is where the host waits for the device."""
        for runner in self._both:
            if runner._writing:
                runner._writing.popleft()
            runner.store.settle()
        if self.capture is not None:
            self.capture.next_step()
        if isinstance(handle, Launched):
            return self._collect(handle, "prefill" if handle.key.tokens else "decode")
        phase = "prefill" if handle.chunk_tokens else "decode"
        results = ((part, self._collect(tile, phase)) for part, tile in handle.tiles)
        return self._merged(results, handle.rows, handle.chunk_tokens)

    def _collect(self, handle: Launched, phase: str) -> StepResult:
        key, output = handle.key, handle.output
        result = self._result(key, handle.batch, output)
        if output.decoded is not None:
            decoded = iter(of_groups(output.decoded, handle.batch.rows).tolist())
            for part in handle.batch.plan.groups:
                for row, token in zip(range(len(part.decodes)), decoded, strict=False):
                    if row in part.drafts:
                        part.drafts[row].tokens = (*part.drafts[row].tokens[:-1], token)
        self._add_counts(phase, handle.batch, output)
        self._take_routing(key, handle.batch, output)
        return result

    def _seen_of(self, key: StepKey) -> jax.Array | None:
        if not key.mode.penalty:
            return None
        if self._seen is None:
            shape = (self.limits.slots + 1, self.functions.config.vocab_size)
            self._seen = self.place.zeros(shape, jnp.int32)
        return self._seen

    def program(self, key: StepKey) -> Any:
        """Returns the compiled step of a bucket."""
        return self.ledger.get(*self._program(key))

    def programs(self, key: StepKey) -> list[Program]:
        return [self._program(key)]

    def compile_ahead(self, keys: Iterable[StepKey]) -> None:
        keys, drafter = list(keys), self.drafter
        if drafter is not None:
            drafter.compile_ahead(key if key.draft else self.builder.following(key) for key in keys)
        super().compile_ahead(key for key in keys if drafter is None or not key.draft)

    def _program(self, key: StepKey) -> Program:
        """Returns the step of a bucket, to be compiled."""

        def build() -> jax.stages.Wrapped:
            def step(leaves: Any, state: DeviceState, buffer: jax.Array, *given: Any) -> Any:
                limits, place = self.limits, self.place
                return self.functions.step(leaves, state, buffer, *given, key=key, limits=limits, place=place)

            return self.place.compiled(step, self._shapes(key), donate=1, output=True)

        return Program("step", key, build, lambda: self._shapes(key))

    def _shapes(self, key: StepKey) -> tuple[Any, ...]:
        """Returns the shapes of a step's weights, state and buffer, and of what else it is given."""
        slots, struct = self.limits.slots + 1, self.place.struct
        pages = chain.from_iterable(pool.shapes(count) for pool, count in self.segments(key))
        vocab_size = self.functions.config.vocab_size
        seen = struct((slots, vocab_size), jnp.int32) if key.mode.penalty else None
        states = self.pool.make_states(struct)
        state = DeviceState(tuple(pages), states, struct((self.limits.places,), jnp.int32), seen)
        buffer = struct((layout(key, self.limits)[1],), jnp.int32)
        return self._shapes_of(self.functions.leaves), state, buffer

    def _shapes_of(self, tree: Any) -> Any:
        """Returns weights' shapes, on a mesh with where they are."""
        if not isinstance(self.place, MeshDevices):
            return shapes_of(tree)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)

    def _copier(self, segments: int) -> Any:
        return [self._copier_of(pool, segments) for pool in self.pools]

    def _copier_of(self, pool: BlockPool, segments: int) -> Any:
        """Returns the compiled program that copies blocks within the first segments of a pool."""
        most, segments = self.limits.slots, min(segments, len(pool.layout.ends))
        blocks = pool.layout.ends[segments - 1]

        def build() -> jax.stages.Wrapped:
            def copy(pages: Pages, pairs: jax.Array) -> Pages:
                # A group's sources, destinations and, in the last place, how many of them there are.
                source, destination, count = pairs[:most], pairs[most : 2 * most], pairs[2 * most]
                layers = zip(*pages, strict=True)
                done = [
                    segments if segments[0] is None else copy_blocks(segments, source, destination, count)
                    for segments in layers
                ]
                return tuple(zip(*done, strict=True))

            return self.place.compiled(copy, shapes(), donate=0, output=False)

        def shapes() -> tuple[Any, ...]:
            return pool.shapes(segments), self.place.struct((2 * most + 1,), jnp.int32)

        name = "copy" if pool is self.pool else "copy in windows"
        return self.ledger.get(name, CopyKey(blocks), build, shapes)

    def copy_blocks(self, plan: Plan) -> None:
        """Copies shared blocks before the step that writes into the copies."""
        groups = plan.groups
        copies = [part.copies for part in groups], [part.window_copies for part in groups]
        for pool, mine in zip(self.pools, copies, strict=False):
            if any(mine):
                self._copy(pool, mine)

    def _copy(self, pool: BlockPool, copies: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Copies each group's blocks of one pool, in order."""
        most = self.limits.slots
        for at in range(0, max(map(len, copies)), most):
            pairs = np.zeros((len(copies), 2 * most + 1), np.int32)
            for row, mine in zip(pairs, copies, strict=True):
                part = np.asarray(mine[at : at + most], np.int32).reshape(-1, 2)
                row[: 2 * most].reshape(2, most)[:, : len(part)] = part.T
                row[2 * most] = len(part)
            segments = self.buckets.segments_for(int(pairs[:, : 2 * most].max()) + 1)
            copier = self._copier_of(pool, segments)
            pool.put(
                copier(pool.take(min(segments, len(pool.layout.ends))), self.place.put(pairs.reshape(-1)))
            )
