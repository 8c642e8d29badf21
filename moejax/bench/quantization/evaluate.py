"""A quantized decoder beside the full-precision one, on the same windows.

Batch by batch three passes are compared: the full-precision model; the quantized one, free to route as it
does ("free"); and the quantized one with the full-precision routing forced on it, experts and weights
("replayed"). What the second loses beyond the third is the routing's doing. Logits of a window exist only
while it is compared, so memory does not grow with text or vocabulary.

Experts are compared as functions: each one's output on the full-precision activations of the tokens that
the full-precision router sends to it, so that only its own weights' error counts. What a method folds into
the norm in front is part of the function: it is applied to that norm's input.

Experts of a model with fewer have the full one's numbers. Replayed, one that is gone gives zeros.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.bench.common.held_out import Windows
from moejax.bench.quantization.metrics import Evaluation
from moejax.cache.rounded import RoundedLayer
from moejax.engine.routing.load_bias import moved
from moejax.models.decoder import Decoder, DecoderLayer, told_of
from moejax.moe.layer import RoutingTrace
from moejax.moe.replicas import Placed
from moejax.moe.router import Replay, expert_counts
from moejax.nn.rope import rope_tables
from moejax.ops.row_sums import summed
from moejax.ptq.reduce import expert_outputs


class Stream(NamedTuple):
    """The two parts `[B, T, D]` of a layer's input, which is their sum."""

    x: jax.Array
    residual: jax.Array


class Streams(NamedTuple):
    """The three passes between two layers."""

    full: Stream
    free: Stream
    replayed: Stream


def numbers_of(stand_ins: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Maps the expert that stands in for each, int `[E]`, to its number in a model with E' of them, int32
    `[E + 1]`, and those of these in the full model, `[E' + 1]`; the last is none."""
    kept = np.flatnonzero(stand_ins == np.arange(len(stand_ins)))
    fewer = np.where(stand_ins < 0, len(kept), np.searchsorted(kept, stand_ins))
    fewer, full = np.append(fewer, len(kept)), np.append(kept, len(stand_ins))
    return jnp.asarray(fewer, jnp.int32), jnp.asarray(full, jnp.int32)


class LayerStats(NamedTuple):
    """A layer's part of `Evaluation`, of one batch and without L."""

    flipped: jax.Array
    changed: jax.Array
    counts: jax.Array
    squared_error: jax.Array
    squared_norm: jax.Array


class Evaluator:
    """Compares quantized versions with one full-precision model on one text.

    Args:
        full: the model in full precision.
        batch_size: windows at a time.
    """

    def __init__(self, full: Decoder, windows: Windows, batch_size: int) -> None:
        self.full, self.windows, self.batch_size = full, windows, min(batch_size, len(windows.tokens))

    @property
    def num_batches(self) -> int:
        return -(-len(self.windows.tokens) // self.batch_size)

    def __call__(
        self,
        quantized: Decoder,
        kv_cache: str = "auto",
        advance: Callable[[], None] = lambda: None,
        by_step: bool = False,
        stand_ins: Mapping[int, np.ndarray] | None = None,
    ) -> Evaluation:
        """Goes layer by layer, so that one program serves all layers that are built alike.

        Args:
            kv_cache: dtype that keys and values are rounded to before they are attended to.
            advance: called after every batch.
            by_step: the experts of "free" see the windows' tokens at one position at a time, as a decode step
                of so many sequences does; nothing is replayed then ("replayed" is "free").
            stand_ins: by layer, where `quantized` has fewer experts, those in their places, int `[E]`.
        """
        heads = nnx.split(self.full), nnx.split(quantized)
        layers = [
            (nnx.split(full), nnx.split(other))
            for full, other in zip(self.full.in_order(), quantized.in_order(), strict=True)
        ]
        same, places = np.arange(self.full.config.num_experts), stand_ins or {}
        numbers = [numbers_of(places.get(layer, same)) for layer in range(len(layers))]
        batches: list[tuple[Any, list[LayerStats]]] = []
        for inputs, targets, scored, positions, rope in self._batches():
            embedded = [model.embed(jnp.asarray(inputs)) for model in (self.full, quantized)]
            streams = Streams(_start(embedded[0]), _start(embedded[1]), _start(embedded[1]))
            layer_stats = []
            for number, (full, other) in enumerate(layers):
                graphs, states = (full[0], other[0]), (full[1], other[1])
                told = told_of(self.full.config, number, rope)
                inputs_of = *states, streams, told, positions, scored, numbers[number]
                streams, stats = _layer(*graphs, kv_cache, by_step, *inputs_of)
                layer_stats.append(stats)
            ends = _head(heads[0][0], heads[1][0], heads[0][1], heads[1][1], streams, targets)
            batches.append(jax.device_get((ends, layer_stats)))
            advance()
        return self._sum(batches)

    def baseline(self) -> np.ndarray:
        """float64 `[W]`: losses of the full-precision model in nats, summed over each window; layer by layer
        as above."""
        head, layers = nnx.split(self.full), [nnx.split(layer) for layer in self.full.in_order()]
        sums = []
        for inputs, targets, scored, positions, rope in self._batches():
            stream = _start(self.full.embed(jnp.asarray(inputs)))
            for number, (graph, state) in enumerate(layers):
                told = told_of(self.full.config, number, rope)
                stream = _full_layer(graph, state, stream, told, positions, scored)
            nats = _losses(*head, stream, targets)
            sums.append((np.asarray(nats, np.float64) * scored).sum(axis=1))
        return np.concatenate(sums)[: len(self.windows.tokens)]

    def _batches(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, jax.Array, Any]]:
        """Yields inputs, targets, scored and positions, each `[B, T]` with the same B throughout, and the
        rotary tables of whole windows."""
        for first in range(0, len(self.windows.tokens), self.batch_size):
            part = slice(first, first + self.batch_size)
            tokens, scored = self.windows.tokens[part], self.windows.scored[part]
            missing = ((0, self.batch_size - len(tokens)), (0, 0))
            tokens, scored = np.pad(tokens, missing), np.pad(scored, missing)
            positions = jnp.broadcast_to(jnp.arange(scored.shape[1], dtype=jnp.int32), scored.shape)
            rope = rope_tables(self.full.config, positions, jnp.asarray(scored.sum(axis=1), jnp.int32))
            yield tokens[:, :-1], tokens[:, 1:], scored, positions, rope

    def _sum(self, batches: list[tuple[Any, list[LayerStats]]]) -> Evaluation:
        """Sums over the text, from each batch's output of `_head` and its layers' figures."""
        scored = self.windows.scored[:, None]
        ends = []
        for of_batches in zip(*(ends for ends, _ in batches), strict=True):
            values = np.concatenate(of_batches).astype(np.float64)[: len(scored)]
            ends.append(values * scored)
        masks = self.windows.documents.items()
        documents = {name: (ends[0] * mask[:, None]).sum(axis=2).T for name, mask in masks}
        ends = [values.sum(axis=2).T for values in ends]
        fields: dict[str, Any] = {"tokens": self.windows.num_tokens, "document_nats": documents}
        for name in LayerStats._fields:
            by_batch = np.array([[getattr(layer, name) for layer in stats] for _, stats in batches])
            if name.startswith("squared"):
                fields[name] = by_batch.astype(np.float64).sum(axis=0)
            else:  # the passes in front of the layers
                fields[name] = np.moveaxis(by_batch.astype(np.int64).sum(axis=0), 1, 0)
        return Evaluation(*ends, **fields)


def _start(x: jax.Array) -> Stream:
    """Before the first layer; a residual of zeros, so that all layers take the same."""
    return Stream(x, jnp.zeros_like(x))


@functools.partial(jax.jit, static_argnums=0)
def _full_layer(
    graph: Any, state: Any, stream: Stream, rope: Any, positions: jax.Array, scored: jax.Array
) -> Stream:
    """One layer of the full-precision model."""
    layer: DecoderLayer = nnx.merge(graph, state)
    x, residual, _, _ = layer(*stream, rope, positions, scored, None)
    return Stream(x, residual)


@functools.partial(jax.jit, static_argnums=0)
def _losses(graph: Any, state: Any, stream: Stream, targets: jax.Array) -> jax.Array:
    """Returns the losses float32 `[B, T]` from the last layer's output and targets int32 `[B, T]`."""
    model: Decoder = nnx.merge(graph, state)
    assert model.norm is not None
    pairs = (model.norm.add(*stream)[0], targets)
    return jax.lax.map(lambda row: compare_logits(model.logits(row[0])[None], row[1])[0][0], pairs)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _layer(
    full_graph: Any,
    graph: Any,
    kv_cache: str,
    by_step: bool,
    full_state: Any,
    state: Any,
    streams: Streams,
    rope: Any,
    positions: jax.Array,
    scored: jax.Array,
    numbers: tuple[jax.Array, jax.Array],
) -> tuple[Streams, LayerStats]:
    """One layer of all three passes, and what they differ in."""
    full: DecoderLayer = nnx.merge(full_graph, full_state)
    layer: DecoderLayer = nnx.merge(graph, state)
    x, attended, _ = full.attend(*streams.full, rope, positions, None)
    total = x + attended
    x, out, recorded = full.feed_forward(total, None, scored)
    replay = mine = None
    if recorded is not None:
        replay, ids = Replay(recorded.ids, recorded.weights), numbers[0][recorded.ids]
        mine = Replay(ids, jnp.where(ids < numbers[1].size - 1, recorded.weights, 0.0))
    cache = None if kv_cache == "auto" or layer.is_linear else RoundedLayer(kv_cache)
    if by_step:
        *free, trace = _by_position(layer, *layer.attend(*streams.free, rope, positions, cache)[:2], scored)
        forced, shadow = free, trace
    else:
        *free, _, trace = layer(*streams.free, rope, positions, scored, cache)
        *forced, _, shadow = layer(*streams.replayed, rope, positions, scored, cache, mine)
    outputs = Streams(Stream(x, summed(out, x)), Stream(*free), Stream(*forced))
    return outputs, _compare_layer(full, layer, replay, trace, shadow, total, scored, numbers)


def _by_position(
    layer: DecoderLayer, x: jax.Array, attended: jax.Array, scored: jax.Array
) -> tuple[jax.Array, jax.Array, RoutingTrace | None]:
    """Runs the second half of a layer on x and attended `[B, T, D]`, scored `[B, T]`, for one of the T after
    the other; biases that follow the load begin anew."""
    graph, state = nnx.split(layer)

    def step(bias: jax.Array | None, inputs: Any) -> Any:
        column: DecoderLayer = nnx.merge(graph, state)
        router = None if column.moe is None else column.moe.router
        if router is not None and router.load_bias is not None:
            router.load_bias = Placed(bias)
        x, residual, valid = (part[:, None] for part in inputs)
        x, out, trace = column.feed_forward(x, residual, valid)
        if bias is not None:
            assert trace is not None and router is not None
            bias = moved(bias, trace.counts, router.policy.rate)
        return bias, (x[:, 0], summed(out, x)[:, 0], trace)

    biased = layer.moe is not None and layer.moe.router.load_bias is not None
    start = jnp.zeros(layer.moe.num_experts) if biased and layer.moe is not None else None
    columns = jax.tree.map(lambda part: jnp.moveaxis(part, 1, 0), (x, attended, scored))
    x, out, trace = jax.lax.scan(step, start, columns)[1]
    if trace is not None:
        tokens = [jnp.moveaxis(part[:, :, 0], 0, 1) for part in trace[:3]]
        trace = RoutingTrace(*tokens, *(part.sum(axis=0) for part in trace[3:]))
    return jnp.moveaxis(x, 0, 1), jnp.moveaxis(out, 0, 1), trace


@functools.partial(jax.jit, static_argnums=(0, 1))
def _head(
    full_graph: Any, graph: Any, full_state: Any, state: Any, streams: Streams, targets: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """targets int32 `[B, T]` → nats `[B, 3, T]`, KL and agreement `[B, 2, T]`."""
    full: Decoder = nnx.merge(full_graph, full_state)
    model: Decoder = nnx.merge(graph, state)

    def one_window(row: tuple[Streams, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = []
        for side, stream in zip((full, model, model), row[0], strict=True):
            assert side.norm is not None
            logits.append(side.logits(side.norm.add(*stream)[0]))
        return compare_logits(jnp.stack(logits), row[1])

    return jax.lax.map(one_window, (streams, targets))


def compare_logits(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """float32 `[1 + n, T, V]`, full precision first, and targets int32 `[T]` → nats `[1 + n, T]`, KL of each
    other from the first `[n, T]`, and whether its likeliest token is the same, bool `[n, T]`."""
    logs = jax.nn.log_softmax(logits, axis=-1)
    nats = -jnp.take_along_axis(logs, targets[None, :, None], axis=-1)[..., 0]
    kl = jnp.sum(jnp.exp(logs[:1]) * (logs[:1] - logs[1:]), axis=-1)
    best = jnp.argmax(logits, axis=-1)
    return nats, kl, best[1:] == best[:1]


def routing_changes(base: jax.Array, other: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Counts for two choices int32 `[N, k]` and `[N, k']` (E is no expert) the tokens whose sets of experts
    differ, and the assignments of `other` to an expert that is not in `base`, as int32 scalars."""
    new = (other < num_experts) & ~jnp.any(other[:, :, None] == base[:, None, :], axis=2)
    gone = (base < num_experts) & ~jnp.any(base[:, :, None] == other[:, None, :], axis=2)
    flipped = jnp.any(new, axis=1) | jnp.any(gone, axis=1)
    return jnp.sum(flipped, dtype=jnp.int32), jnp.sum(new, dtype=jnp.int32)


def _compare_layer(
    full: DecoderLayer,
    layer: DecoderLayer,
    replay: Replay | None,
    trace: RoutingTrace | None,
    shadow: RoutingTrace | None,
    sums: jax.Array,
    scored: jax.Array,
    numbers: tuple[jax.Array, jax.Array],
) -> LayerStats:
    """Args: sums `[B, T, D]`, what full precision's second norm takes."""
    E = full.attention.config.num_experts
    if replay is None or trace is None or shadow is None:
        none = jnp.zeros(2, jnp.int32)
        return LayerStats(none, none, jnp.zeros((2, E), jnp.int32), jnp.zeros(E), jnp.zeros(E))
    k = replay.ids.shape[-1]
    base = replay.ids.reshape(-1, k)
    mine = numbers[0][base]
    free, wished, same = (numbers[1][ids] for ids in (trace.ids, jax.lax.top_k(shadow.logits, k)[1], mine))
    wished = jnp.where(scored[..., None], wished, E)
    pairs = [routing_changes(same, ids.reshape(-1, ids.shape[-1]), E) for ids in (free, wished)]
    flipped, changed = (jnp.stack(part) for part in zip(*pairs, strict=True))
    counts = jnp.stack([expert_counts(ids, E) for ids in (replay.ids, free)])
    flat = sums.reshape(-1, sums.shape[-1])
    assert full.moe is not None and layer.moe is not None
    rows = full.post_attention_norm(flat), layer.post_attention_norm(flat)
    right = expert_outputs(full.moe, rows[0], base).astype(jnp.float32)
    ours = expert_outputs(layer.moe, rows[1], mine).astype(jnp.float32)

    def by_expert(values: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(jnp.sum(jnp.square(values), axis=-1), base.reshape(-1), E + 1)[:E]

    return LayerStats(flipped, changed, counts, by_expert(ours - right), by_expert(right))
