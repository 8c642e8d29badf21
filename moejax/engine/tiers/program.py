"""The compiled step in parts, between which the host sees to the experts that the next part needs.

The first part ends with the first router, every further one begins with the experts of the router before and
ends with the next router, the last ends with the sampled tokens. Parts of equal layers are one program:
weights are arguments, and so is the table from experts to slots.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.cache.pool import PagedCache, Pages, States
from moejax.engine.step.batch import unpack
from moejax.engine.step.limits import Limits, StepKey
from moejax.engine.step.program import (
    DeviceState,
    PagedFunctions,
    PagedOutput,
    decoded_tokens,
    finish,
    flat_tokens,
    separate_rows,
)
from moejax.engine.tiers.experts import split_layer
from moejax.models.decoder import Decoder, DecoderLayer, told_of
from moejax.moe.router import Replay
from moejax.nn.rope import rope_tables
from moejax.ops.paged_attention import Evicted
from moejax.ops.row_sums import Residual
from moejax.sharding.spmd import SingleDevice


class Carried(NamedTuple):
    """What a part hands the next one.

    Attributes:
        x, residual: `[S + T, 1, D]`, whose sum the layer's second half takes.
        ids, weights: int32 and float32 `[S + T, k]` of its router; ids E for none. The host reads both.
        rows: `[S + T, D]`, what the experts take, for those that the host computes; it gives what these put
            out in the same place. None: it computes none.
        guess: int32 `[S + T, k]`, what the next layer's router makes of this layer's input; None: not asked.
    """

    x: jax.Array
    residual: Residual
    ids: jax.Array
    weights: jax.Array
    rows: Any
    guess: jax.Array | None


class SplitLayer(NamedTuple):
    """A layer's structure, that of its experts' arrays, and all other arrays."""

    graph: Any
    experts: Any
    rest: Any
    leaves: list[jax.Array]

    @classmethod
    def of(cls, layer: nnx.Module) -> "SplitLayer":
        graph, experts, rest = split_layer(layer)
        leaves, treedef = jax.tree.flatten(rest)
        return cls(graph, jax.tree.structure(experts), treedef, leaves)

    def merge(self, leaves: Sequence[Any], slots: Sequence[Any]) -> Any:
        """Returns the layer again, inside a trace; its experts are those that have slots."""
        experts = jax.tree.unflatten(self.experts, slots if self.experts.num_leaves else ())
        return nnx.merge(self.graph, experts, jax.tree.unflatten(self.rest, leaves))

    @property
    def alike(self) -> Any:
        """Equal for layers that trace alike."""
        return self.graph, self.rest, tuple((leaf.shape, leaf.dtype) for leaf in self.leaves)


class Part(NamedTuple):
    """Layers by their place: whose experts the part begins with, which it runs whole, whose router it ends
    with, and whose router guesses; None: there is none."""

    finishes: int | None
    whole: range
    routes: int | None
    foresees: int | None

    @property
    def attends(self) -> list[int]:
        """Layers whose keys and values it writes."""
        return [*self.whole, *([] if self.routes is None else [self.routes])]

    @property
    def layers(self) -> list[int]:
        """Layers whose weights it reads, in a fixed order; one may be there twice."""
        ends = [self.finishes, *self.whole, self.routes, self.foresees]
        return [layer for layer in ends if layer is not None]


class PartFunctions(PagedFunctions):
    """A model split into its layers' leaves and the parts of a step."""

    def __init__(self, model: Decoder, *, foresees: bool, on_host: bool) -> None:
        super().__init__(model)
        self.on_host = on_host
        layers, model.layers = model.in_order(), nnx.List([])
        self.head, model.layers = SplitLayer.of(model), nnx.List(layers)
        self.layers = [SplitLayer.of(layer) for layer in layers]
        routed = [i for i, layer in enumerate(layers) if layer.moe is not None]
        ends, self.parts = [None, *routed, None], list[Part]()
        for at, (before, end) in enumerate(pairwise(ends)):
            first = 0 if before is None else before + 1
            whole = range(first, len(layers) if end is None else end)
            after = ends[at + 2] if foresees and end is not None else None
            self.parts.append(Part(before, whole, end, after))
        alike = [self._alike(part) for part in self.parts]
        self.program_of = [alike.index(mine) for mine in alike]  # the first part of the same program

    def _alike(self, part: Part) -> Any:
        """Returns what parts have in common that one program can compute."""
        config = self.config
        layers = [self.layers[i].alike for i in part.layers]
        of_layer = [(config.sliding_windows[i], config.paged_layers[i] or i) for i in part.attends]
        shape = part.finishes is None, len(part.whole), part.routes is None, part.foresees is None
        return shape, layers, of_layer

    def leaves_of(self, part: Part) -> list[Any]:
        """Returns the weights that a part takes, experts excepted."""
        ends = part.finishes is None or part.routes is None
        return [self.head.leaves if ends else [], *(self.layers[i].leaves for i in part.layers)]

    def run(
        self,
        leaves: Sequence[Any],
        state: DeviceState,
        slots: Sequence[jax.Array],
        buffer: jax.Array,
        carried: Carried | None,
        table: jax.Array,
        turn: jax.Array,
        *,
        part: Part,
        key: StepKey,
        limits: Limits,
        place: SingleDevice,
    ) -> tuple[DeviceState, Carried | PagedOutput]:
        """Computes a part of `PagedFunctions.step`; what is carried is a device's part, its group's.

        Args:
            leaves: of `leaves_of`.
            state: pages and states of the layers that it attends in; `last` in the first part and the last.
            slots: the experts that are resident, `[slots, ...]`.
            carried: of the part before.
            table: int32 `[E + 1]`, slots of the experts of `part.finishes`.
            turn: int32, that of `part.routes` among the layers with experts.
        """
        batch = unpack(buffer, key, limits)
        head: Any = self.head.merge(leaves[0], ()) if leaves[0] else None
        merged = iter(
            self.layers[i].merge(mine, slots) for i, mine in zip(part.layers, leaves[1:], strict=True)
        )
        positions = batch.position
        if batch.chunk_position is not None:
            positions = jnp.concatenate([positions, batch.chunk_position])
        valid, positions = (positions >= 0)[:, None], jnp.maximum(positions, 0)[:, None]
        assert batch.rope_len is not None
        rope = rope_tables(self.config, positions, batch.rope_len)
        kinds = tuple(self.config.cache_kinds(limits.window)[i] for i in part.attends)
        policy = limits.kv_policy
        cache = PagedCache(
            state.pages, state.states, batch.slot, batch.seen_as, batch.attention, batch.window, kinds,
            limits.kernels, Evicted(policy.span, 0, policy if policy.by_head else None),
        )  # fmt: skip
        residual: Residual = None
        if part.finishes is None:
            x = head.embed(flat_tokens(batch, decoded_tokens(batch, state.last)))[:, None]
        else:
            assert carried is not None
            layer = self._next(merged, key)
            assert layer.moe is not None
            if layer.moe.replicas is not None:  # on a mesh; the table has said which slot
                cast(Any, layer.moe).replicas = lambda slots: slots
            beside = None if carried.rows is None else carried.rows[:, None]
            chosen = Replay(table[carried.ids][:, None], carried.weights[:, None], beside)
            with jax.named_scope("layer"):
                x, residual, _ = layer.feed_forward(carried.x, carried.residual, None, chosen)
        parts: list[Any] = []
        for at, number in enumerate(part.whole):
            told = told_of(self.config, number, rope)
            inputs = x, residual, told, positions, valid, cache.layer(at)
            with jax.named_scope("layer"):
                x, residual, done, _ = next(merged).run(*inputs)
            parts.append(done)
        if part.routes is None:
            assert head.norm is not None
            pages, states = self._written(cache, parts)
            x = head.norm.add(x, residual)[0]
            token = decoded_tokens(batch, state.last)
            state, *told = finish(head, x, batch, token, state, key)
            sampled, prompt = place.gather_groups(told)
            return state._replace(pages=pages, states=states), PagedOutput(sampled, None, None, prompt)
        layer = next(merged)
        with jax.named_scope("layer"):
            told = told_of(self.config, part.routes, rope)
            x, residual, done = layer.attend(x, residual, told, positions, cache.layer(len(part.whole)))
            replay = batch.replay and jax.tree.map(lambda x: x[:, turn], batch.replay)
            routing, rows = _routed(layer, x, residual, valid, replay)
            later = None if part.foresees is None else next(merged)
            guess = None if later is None else _routed(later, x, residual, valid, None)[0].ids
        pages, states = self._written(cache, [*parts, done])
        held = rows if self.on_host else None
        carried = Carried(x, residual, routing.ids, routing.weights, held, guess)
        return state._replace(pages=pages, states=states), carried

    def _next(self, merged: Any, key: StepKey) -> DecoderLayer:
        layer = next(merged)
        if key.tiled:
            separate_rows([layer], key.rows)
        return layer

    def _written(self, cache: PagedCache, parts: list[Any]) -> tuple[Pages, States]:
        done = cache.with_layers(parts)
        return done.pages, done.states


def _routed(
    layer: DecoderLayer, x: jax.Array, residual: Residual, valid: jax.Array, replay: Replay | None
) -> Any:
    """Returns a layer's routing `[N, k]` of what its second half takes, that of `replay` where given, and
    this `[N, D]`."""
    assert layer.moe is not None
    normed, _ = layer.post_attention_norm.add(x, residual)
    return layer.moe.router(normed[:, 0], valid[:, 0], replay), normed[:, 0]


def counted(
    ids: Sequence[np.ndarray], layers: Sequence[int], num_layers: int, num_experts: int
) -> np.ndarray:
    """Returns int32 `[L, E]`: assignments of each expert, of ids `[N, k]` of the layers that have any."""
    counts = np.zeros((num_layers, num_experts), np.int32)
    for number, mine in zip(layers, ids, strict=True):
        counts[number] = np.bincount(mine.reshape(-1), minlength=num_experts + 1)[:num_experts]
    return counts
