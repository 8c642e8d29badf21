"""Runs plans on the device: builds the batch, finds its bucket's compiled step, owns the device state."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from moejax.cache.pool import BlockPool, Pages
from moejax.core.config import EngineConfig
from moejax.engine.routing.replay import RoutingReplay
from moejax.engine.scheduling.plan import Plan
from moejax.engine.step.batch import layout
from moejax.engine.step.bucket_runner import BucketRunner, Rows, is_sampled
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


class Launched(NamedTuple):
    """A step under way, and the device's promise."""

    key: StepKey
    batch: Rows
    output: PagedOutput


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

    `last` is int32, each slot's newest token.
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
    ) -> None:
        self.place = place or SingleDevice()
        self.functions = functions
        model = functions.config
        super().__init__(model, config, cache, ledger, kernels, replay, place=self.place)
        self.pool = BlockPool(
            model,
            self.buckets.segments,
            cache.block_size,
            jnp.dtype(cache.dtype),
            transposed_keys=not self._one_segment,
            slots=config.max_num_seqs,
            place=self.place,
        )
        self.reset()

    @property
    def pools(self) -> list[BlockPool]:
        """The blocks of its cache."""
        return [self.pool]

    def reset(self) -> None:
        self.pool.reset()
        self.last = self.place.zeros((self.limits.slots + 1,), jnp.int32)
        self._seen: jax.Array | None = None

    def launch(self, plan: Plan) -> Launched:
        """Builds the batch and starts the step.

        Raises:
            CompileError: the step is not compiled, and may not be any more (`engine.strict_compile`).
        """
        if any(part.copies for part in plan.groups):
            self._copy([part.copies for part in plan.groups])
        key, buffer = self.builder.build(plan)
        return Launched(key, Rows.of(plan, key), self._run(key, buffer))

    def _run(self, key: StepKey, buffer: np.ndarray) -> PagedOutput:
        step = self.program(key)
        pages = self.pool.take(self.limits.segment_ends.index(key.blocks) + 1)
        given = DeviceState(pages, self.pool.take_states(), self.last, self._seen_of(key))
        state, output = self.place.ready(step(self.functions.leaves, given, self.place.put(buffer)))
        self.pool.put(state.pages)
        self.pool.states = state.states
        self.last = state.last
        if key.mode.penalty:
            self._seen = state.seen
        return output

    def ready(self, handle: Launched) -> bool:
        return is_sampled(handle.output)

    def collect(self, handle: Launched) -> StepResult:
        """Reads a step's result; this is where the host waits for the device."""
        key, output = handle.key, handle.output
        result = self._result(key, handle.batch, output)
        self._add_counts("prefill" if key.tokens else "decode", handle.batch, output)
        if self.capture is not None:
            self.capture.next_step()
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

    def _program(self, key: StepKey) -> Program:
        """Returns the step of a bucket, to be compiled."""

        def build() -> jax.stages.Wrapped:
            def step(leaves: Any, state: DeviceState, buffer: jax.Array) -> Any:
                limits, place = self.limits, self.place
                return self.functions.step(leaves, state, buffer, key=key, limits=limits, place=place)

            return self.place.compiled(step, self._shapes(key), donate=1, output=True)

        return Program("step", key, build, lambda: self._shapes(key))

    def _shapes(self, key: StepKey) -> tuple[Any, DeviceState, Any]:
        """Returns the shapes of a step's weights, state and buffer."""
        slots, struct = self.limits.slots + 1, self.place.struct
        pages = self.pool.shapes(self.limits.segment_ends.index(key.blocks) + 1)
        vocab_size = self.functions.config.vocab_size
        seen = struct((slots, vocab_size), jnp.int32) if key.mode.penalty else None
        states = self.pool.make_states(struct)
        state = DeviceState(cast(Any, pages), states, struct((slots,), jnp.int32), seen)
        return self._leaves(), state, struct((layout(key, self.limits)[1],), jnp.int32)

    def _leaves(self) -> Any:
        """Returns the weights' shapes, on a mesh with where they are."""
        leaves = self.functions.leaves
        if isinstance(self.place, MeshDevices):
            return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in leaves]
        return shapes_of(leaves)

    def _copier(self, segments: int) -> Any:
        """Returns the compiled program that copies blocks within the first `segments` segments."""
        most = self.limits.slots

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
            return self.pool.shapes(segments), self.place.struct((2 * most + 1,), jnp.int32)

        return self.ledger.get("copy", CopyKey(self.limits.segment_ends[segments - 1]), build, shapes)

    def _copy(self, copies: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Copies each group's blocks before the step that writes into the copies. At most one a slot."""
        most = self.limits.slots
        pairs = np.zeros((len(copies), 2 * most + 1), np.int32)
        for row, mine in zip(pairs, copies, strict=True):
            row[: 2 * most].reshape(2, most)[:, : len(mine)] = np.asarray(mine, np.int32).reshape(-1, 2).T
            row[2 * most] = len(mine)
        segments = self.buckets.segments_for(int(pairs[:, : 2 * most].max()) + 1)
        copier = self._copier(segments)
        self.pool.put(copier(self.pool.take(segments), self.place.put(pairs.reshape(-1))))
