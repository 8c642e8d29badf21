"""Runs plans on a device whose memory does not hold all experts: part by part, and between two of them the
host sees to the experts that the next one needs."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from moejax.engine.step.device_runner import DeviceRunner, Launched, LaunchedTiles
from moejax.engine.step.ledger import Program
from moejax.engine.step.limits import StepKey
from moejax.engine.step.program import Captured, DeviceState, PagedOutput
from moejax.engine.step.runner import StepResult
from moejax.engine.tiers.experts import ExpertTiers
from moejax.engine.tiers.program import Carried, Part, PartFunctions, counted
from moejax.routing.capture import id_dtype
from moejax.sharding.spmd import MeshDevices


class PartKey(NamedTuple):
    """A step's bucket, and which of its programs."""

    part: int
    step: StepKey


class TieredRunner(DeviceRunner):
    """Takes the place of `DeviceRunner` where experts lie in tiers.

    `launch` waits for every router but the last part's tokens, which `collect` waits for: the loop may still
    schedule the next step meanwhile.

    Args:
        tiers: the experts.
    """

    functions: PartFunctions

    def __init__(self, *args: Any, tiers: ExpertTiers, **options: Any) -> None:
        self.tiers = tiers
        super().__init__(*args, **options)
        tiers.check_room(self.groups * self.config.max_num_batched_tokens)
        parts, leaves_of = self.functions.parts, self.functions.leaves_of
        self._parts = [(part, part.attends, leaves_of(part)) for part in parts]
        self._compiled: dict[StepKey, list[Any]] = {}
        self._nowhere = np.zeros(tiers.num_experts + 1, np.int32)

    def _run(self, key: StepKey, buffer: np.ndarray) -> PagedOutput:
        with self.tiers.lock:  # other engines of these weights have the same slots
            try:
                return self._in_parts(key, buffer)
            except BaseException:  # an interrupt, too: table and slots may differ
                self.tiers.reset()
                raise

    def collect(self, handle: Launched | LaunchedTiles) -> StepResult:
        try:
            return super().collect(handle)
        except BaseException:
            with self.tiers.lock:
                self.tiers.reset()
            raise

    def _in_parts(self, key: StepKey, buffer: np.ndarray) -> PagedOutput:
        tiers, routed = self.tiers, list[tuple[np.ndarray, np.ndarray]]()
        placed, states = self.place.put(buffer), list(self.pool.take_states())
        segments = [list(segment) for segment in self.take_pages(key)]
        carried: Carried | None = None
        table = self._nowhere
        programs = self._parts_of(key)
        tiers.step()
        for number, (part, attends, resident) in enumerate(self._parts):
            leaves = self._weights_of(part, resident)
            first, last = part.finishes is None, part.routes is None
            pages = tuple(tuple(segment[i] for i in attends) for segment in segments)
            held = self.last if first or last else cast(Any, None)
            seen = self._seen_of(key) if last else None
            given = DeviceState(pages, tuple(states[i] for i in attends), held, seen)
            ran = programs[number](leaves, given, tiers.arrays, placed, carried, table, np.int32(number))
            state, out = self.place.ready(ran)
            tiers.reader = out
            for at, layer in enumerate(attends):
                states[layer] = state.states[at]
                for segment, new in zip(segments, state.pages, strict=True):
                    segment[layer] = new[at]
            # After each part: what was donated is gone, should a later one fail.
            self.put_pages(key, tuple(map(tuple, segments)))
            self.pool.states = tuple(states)
            if first or last:
                self.last = state.last
            if tiers.streamed is not None:  # the next part's layers, while this one runs
                tiers.streamed.fetch(self._parts[(number + 1) % len(self._parts)][0].layers)
                tiers.streamed.copy()
            if last:
                break
            if carried is not None and carried.guess is not None:
                tiers.foresee(number, np.asarray(carried.guess))
            carried = out
            ids, weights = np.asarray(out.ids), np.asarray(out.weights)  # here the host waits
            routed.append((ids, weights))
            if tiers.host is not None:
                ids, beside = tiers.run_on_host(number, ids, weights, out.rows)
                carried = carried._replace(rows=beside)
            table = tiers.require(number, ids, weights)
        if key.mode.penalty:
            self._seen = state.seen
        return self._told(key, out, routed)

    def _weights_of(self, part: Part, resident: list[Any]) -> list[Any]:
        """Returns the weights that a part takes; those of its layers that come and go are there then."""
        if (streamed := self.tiers.streamed) is None:
            return resident
        streamed.fetch(part.layers)
        streamed.copy()
        layers = zip(part.layers, resident[1:], strict=True)
        return [resident[0], *(streamed.leaves(i) if i in streamed.numbers else mine for i, mine in layers)]

    def _parts_of(self, key: StepKey) -> list[Any]:
        """Returns the compiled program of each part."""
        programs = self._compiled.get(key)
        if programs is None:
            numbers = range(len(self._parts))
            programs = [self.ledger.get(*self._part_program(number, key)) for number in numbers]
            self._compiled[key] = programs
        return programs

    def _told(
        self, key: StepKey, output: PagedOutput, read: list[tuple[np.ndarray, np.ndarray]]
    ) -> PagedOutput:
        """Returns a step's output with the routing that the host has read between its parts."""
        model, told = self.functions.config, output
        ids = [mine for mine, _ in read]
        if key.record:
            none: Any = np.zeros(2, np.int32)
            counts: Any = counted(ids, self.tiers.layers, model.num_layers, model.num_experts)
            told = told._replace(counts=counts, overflow=none)
        if self.limits.capture:
            stacked: Any = np.stack(ids, axis=1).astype(id_dtype(model.num_experts))
            weights: Any = np.stack([mine for _, mine in read], axis=1)
            told = told._replace(captured=Captured(stacked, weights))
        return told

    def programs(self, key: StepKey) -> list[Program]:
        numbers = sorted(set(self.functions.program_of))
        return [self._part_program(number, key) for number in numbers]

    def _part_program(self, number: int, key: StepKey) -> Program:
        """Returns the program of a part, which other parts may have as well."""
        number = self.functions.program_of[number]
        part = self.functions.parts[number]

        def build() -> Any:
            return self._compiled_part(part, key, shapes())

        def shapes() -> tuple[Any, ...]:
            return self._part_shapes(part, key)

        return Program("step", PartKey(number, key), build, shapes)

    def _compiled_part(self, part: Part, key: StepKey, shapes: tuple[Any, ...]) -> Any:
        def run(*given: Any) -> Any:
            return self.functions.run(*given, part=part, key=key, limits=self.limits, place=self.place)

        by_group = part.routes is not None  # what is carried
        return self.place.compiled(run, shapes, donate=1, output=True, by_group=by_group)

    def _part_shapes(self, part: Part, key: StepKey) -> tuple[Any, ...]:
        _, state, buffer = self._shapes(key)
        place, functions = self.place, self.functions
        ends = part.finishes is None or part.routes is None
        mine = (
            tuple(tuple(segment[i] for i in part.attends) for segment in state.pages),
            tuple(state.states[i] for i in part.attends),
        )
        last, seen = state.last if ends else cast(Any, None), state.seen if part.routes is None else None
        carried = None
        if part.finishes is not None:
            # All parts hand on what the first one does, but that no router may be left to guess.
            first = functions.parts[0]
            given = self._part_shapes(first, key)
            _, carried = jax.eval_shape(self._compiled_part(first, key, given), *given)
            if isinstance(place, MeshDevices):
                at = place.sharding(place.axes.data or None)
                carried = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), carried)
            if functions.parts[functions.parts.index(part) - 1].foresees is None:
                carried = carried._replace(guess=None)
        return (
            self._shapes_of(functions.leaves_of(part)),
            DeviceState(*mine, last, seen),
            self._shapes_of(self.tiers.arrays),
            buffer,
            carried,
            self._equal((functions.config.num_experts + 1,)),
            self._equal(()),
        )

    def _equal(self, shape: tuple[int, ...]) -> Any:
        """Returns the shape of int32 numbers that are equal on all devices."""
        where = self.place.sharding() if isinstance(self.place, MeshDevices) else None
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=where)
