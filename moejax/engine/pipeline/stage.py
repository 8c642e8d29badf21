"""One pipeline stage on its devices: weights, pages, programs. `moejax.engine.pipeline.runner` drives it."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from moejax.engine.scheduling.plan import Plan
from moejax.engine.step.buckets import Buckets
from moejax.engine.step.device_runner import DeviceRunner
from moejax.engine.step.ledger import Program
from moejax.engine.step.limits import StepKey
from moejax.engine.step.program import Captured, DeviceState, PagedOutput
from moejax.engine.step.sampler import Sampled
from moejax.routing.capture import id_dtype
from moejax.sharding.spmd import MeshDevices


class Stage(DeviceRunner):
    """Takes the place of the whole model in a `DeviceRunner`, and microbatches from the stage before.

    Where a stage's devices are another process's, nothing happens, and its arrays have no part here. `last`
    is the last stage's own, and the first stage's copy of it.
    """

    place: MeshDevices

    @property
    def here(self) -> bool:
        """Tells whether this process has a part in it."""
        return self.place.here

    def reset(self) -> None:
        for pool in self.pools:
            pool.reset()
        self.store.reset()
        self._seen = None
        shape = (self.limits.slots + 1,)
        self.last = self.place.zeros(shape, jnp.int32) if self.here else self._absent(shape, jnp.int32)

    def run(self, key: StepKey, buffer: np.ndarray, given: jax.Array | None) -> PagedOutput:
        """Starts the stage's step on a microbatch; `given` is what the stage before gave, if there is one."""
        if not self.here:
            return self._nothing(key)
        step = self.program(key)
        state = DeviceState(self.take_pages(key), self.pool.take_states(), cast(Any, None), None)
        if self.functions.is_last:
            state = state._replace(last=self.last, seen=self._seen_of(key))
        given = self.last if self.functions.is_first else given
        state, output = step(self.functions.leaves, state, self.place.put(buffer), given)
        self.put_pages(key, state.pages)
        self.pool.states = state.states
        if self.functions.is_last:
            self.last = state.last
            if key.mode.penalty:
                self._seen = state.seen
        return output

    def copy(self, plan: Plan, buckets: Buckets) -> None:
        """Copies each group's blocks of this stage's pages, from and to the host's store too."""
        if self.here:
            self.buckets = buckets
            self.move(plan)
            self.copy_blocks(plan)

    def _program(self, key: StepKey) -> Program:
        """Returns the step of a bucket, to be compiled."""

        def build() -> jax.stages.Wrapped:
            def step(leaves: Any, state: DeviceState, buffer: jax.Array, given: jax.Array) -> Any:
                return self.functions.step(
                    leaves, state, buffer, given, key=key, limits=self.limits, place=self.place
                )

            by_group: Any = cast(Any, PagedOutput)(False, False, False, False, False, x=True)
            return self.place.compiled(step, shapes(), donate=1, output=True, by_group=by_group)

        def shapes() -> tuple[Any, ...]:
            leaves, state, buffer = self._shapes(key)
            model, given = self.functions.config, state.last
            if not self.functions.is_first:
                size = (key.rows + key.tokens, model.hidden_size)
                given = self.place.struct(size, jnp.dtype(model.dtype))
            if not self.functions.is_last:
                state = state._replace(last=cast(Any, None), seen=None)
            return leaves, state, buffer, given

        return Program("step", key, build, shapes)

    def _nothing(self, key: StepKey) -> PagedOutput:
        """Returns a stand-in for the output of a stage that is not here: shapes, and zeros for the host."""
        model, S, T = self.functions.config, self.groups * key.rows, self.groups * key.tokens

        def zeros(present: bool, *shape: int, dtype: Any = np.int32) -> Any:
            return np.zeros(shape, dtype) if present else None

        def told(rows: int, n: int) -> Sampled:
            return Sampled(
                zeros(True, rows),
                zeros(n >= 0, rows, dtype=np.float32),
                zeros(n >= 0, rows),
                zeros(n >= 0, rows, n),
                zeros(n >= 0, rows, n, dtype=np.float32),
            )

        last, n = self.functions.is_last, key.prompt_logprobs
        return PagedOutput(
            told(S, key.mode.logprobs) if last else None,
            zeros(key.record, model.num_layers, model.num_experts),
            zeros(key.record, 2),
            told(T, n) if last and n >= 0 else None,
            self._nothing_captured(S + T) if self.limits.capture else None,
            None if last else self._absent((key.rows + key.tokens, model.hidden_size), model.dtype),
        )

    def _nothing_captured(self, tokens: int) -> Any:
        model = self.functions.config
        shape = (tokens, sum(model.moe_layers), model.num_experts_per_tok)
        if not shape[1]:
            return None
        return Captured(
            cast(Any, np.zeros(shape, id_dtype(model.num_experts))), cast(Any, np.zeros(shape, np.float32))
        )

    def _absent(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Returns an array by group that has no part in this process."""
        struct = self.place.struct(shape, jnp.dtype(dtype))
        return jax.make_array_from_single_device_arrays(struct.shape, struct.sharding, [], dtype=struct.dtype)
