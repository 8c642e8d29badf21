"""The plain twin of `moejax.engine.scheduling.eviction`: what the definition says, in loops, and a whole
forward pass over all keys with the mask that follows from it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.core.scheduling import KvPolicyConfig
from moejax.engine.scheduling.eviction import FOREVER
from moejax.models.decoder import Decoder
from moejax.nn.rope import apply_rope
from moejax.ops.attention import LatentHeads, visible


def last_queries(
    policy: KvPolicyConfig, size: int, begin: int, told: Sequence[Mapping[int, float]], end: int
) -> list[int]:
    """Returns the last query that sees each block of `size` tokens, of a sequence with `begin` tokens of
    prompt whose queries before `end` were computed and `told` how much each block got."""
    last = [FOREVER] * (end // size + 1)
    if policy.method == "snapkv":
        may_go, stay = between(policy, size, begin)
        for block in may_go[stay:]:
            last[block] = begin - 1
        return last
    for query in range(begin + 1, end):
        held = [b for b in range(query // size + 1) if last[b] >= query]
        mass = {b: sum(told[q].get(b, 0) for q in range(query - 1)) for b in held}
        may_go = [b for b in held if b * size >= policy.sinks and (b + 1) * size - 1 <= query - policy.recent]
        for block in sorted(may_go, key=lambda b: (mass[b], b))[: max(0, len(held) - policy.budget // size)]:
            last[block] = query - 1
    return last


def between(policy: KvPolicyConfig, size: int, begin: int) -> tuple[list[int], int]:
    """Returns a prompt's blocks between sinks and recent tokens, and how many of them "snapkv" keeps."""
    held = range(begin // size + 1)
    may_go = [b for b in held if b * size >= policy.sinks and (b + 1) * size - 1 <= begin - policy.recent]
    return may_go, len(may_go) - max(0, len(held) - policy.budget // size)


def chosen(policy: KvPolicyConfig, size: int, begin: int, weights: np.ndarray) -> tuple[list[int], list[int]]:
    """Returns the keys that a head of "snapkv" may choose among, and those that it keeps, by the weights
    `[…, T, T]` that its query heads gave."""
    blocks, stay = between(policy, size, begin)
    may_go = [block * size + i for block in blocks for i in range(size)]
    votes = weights[..., max(0, begin - policy.observe) : begin, :].reshape(-1, weights.shape[-1]).sum(axis=0)
    pool = range(-(policy.pooling // 2), (policy.pooling - 1) // 2 + 1)
    most = {key: max(votes[key + step] for step in pool if key + step in may_go) for key in may_go}
    return may_go, sorted(may_go, key=lambda key: (-most[key], key))[: stay * size]


class MaskedLayer(NamedTuple):
    """Implements `moejax.ops.attention.LayerCache` for one whole sequence.

    Attributes:
        mask: bool `[H, T, T]`, the keys that each query sees besides what its layer's window says.
        weights: float32 `[H, T, T]`, the attention of each query to each key.
    """

    mask: jax.Array
    weights: jax.Array | None = None

    @property
    def normalizes(self) -> bool:
        return False

    def update_and_attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        rope: Any,
        positions: jax.Array,
        *,
        window: int | None,
        scale: float,
        norms: Any = None,
        sinks: jax.Array | None = None,
        latents: LatentHeads | None = None,
    ) -> tuple[jax.Array, "MaskedLayer"]:
        if latents is not None:
            q = latents.absorb(q)
        q, k = apply_rope(q, *rope)[0], apply_rope(k, *rope)[0]
        v = k[..., 2 * rope[0].shape[-1] :] if v is None else v[0]
        H, K = q.shape[1], k.shape[1]
        k, v = (jnp.repeat(x, H // K, axis=1) for x in (k, v))
        seen = visible(positions, positions[0], window)[0]
        seen = seen[None] & (self.mask if window is None else True)
        weights = jnp.where(seen, jnp.exp(jnp.einsum("thd,shd->hts", q, k) * scale), 0.0)
        total = weights.sum(axis=-1, keepdims=True)
        weights /= total if sinks is None else total + jnp.exp(sinks)[:, None, None]
        out = jnp.einsum("hts,shd->thd", weights, v)[None]
        out = out if latents is None else latents.values(out)
        return out, MaskedLayer(self.mask, weights)


class MaskedCache(NamedTuple):
    """Implements `moejax.models.decoder.DecoderCache`, mask bool `[L, H, T, T]`."""

    mask: jax.Array
    layers: tuple[MaskedLayer, ...] = ()

    def layer(self, index: int) -> MaskedLayer:
        return MaskedLayer(self.mask[index])

    def with_layers(self, layers: list[MaskedLayer]) -> "MaskedCache":
        return MaskedCache(self.mask, tuple(layers))


class Masked:
    """Whole sequences, padded to `length`, over all keys with a mask: the twin of an engine that evicts."""

    def __init__(self, model: Decoder, policy: KvPolicyConfig, size: int, length: int) -> None:
        graph, self._state = nnx.split(model)
        self.policy, self.size, self.length = policy, size, length
        config = model.config
        self.full = [i for i, window in enumerate(config.sliding_windows) if window is None]
        self.heads, self.key_heads = config.num_heads, 1 if config.latent else config.num_kv_heads

        def run(state: Any, tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
            decoder = nnx.merge(graph, state)
            positions = jnp.arange(length, dtype=jnp.int32)[None]
            x, cache, _ = decoder.run(decoder.embed(tokens), positions, cache=MaskedCache(mask))
            weights = jnp.stack([layer.weights for layer in cache.layers])
            return jax.nn.log_softmax(decoder.logits(x[0]), axis=-1), weights

        self._run = jax.jit(run)
        self.num_layers = config.num_layers

    def mask(self, last: Sequence[int], begin: int, weights: np.ndarray | None) -> np.ndarray:
        """bool `[L, H, T, T]`: what queries see of keys, whose blocks are seen up to their `last` query, or
        under "snapkv" which each head keeps by its `weights`."""
        query, key = np.arange(self.length)[:, None], np.arange(self.length)[None]
        if self.policy.method == "window":
            seen = (key < self.policy.sinks) | (key > query - self.policy.recent)
        else:
            blocks = np.full(-(-self.length // self.size), FOREVER)
            blocks[: len(last)] = last
            seen = query <= np.repeat(blocks, self.size)[None, : self.length]
        seen = np.tile(seen, (self.num_layers, self.heads, 1, 1))
        if self.policy.method == "snapkv":
            seen[:] = True
            for layer in self.full if weights is not None and FOREVER != min(last) else ():
                for heads in np.split(np.arange(self.heads), self.key_heads):
                    may_go, keeps = chosen(self.policy, self.size, begin, weights[layer, heads])
                    for gone in set(may_go) - set(keeps):
                        seen[layer, heads, begin:, gone] = False
        return seen

    def __call__(self, tokens: list[int], begin: int) -> tuple[np.ndarray, list[int]]:
        """Returns float32 `[T, V]`, log-probabilities after each token, and the last query of each block.
        What a query tells depends on no later decision, so that these are found one after another."""
        padded = np.zeros((1, self.length), np.int32)
        padded[0, : len(tokens)] = tokens
        last: list[int] = []
        mask = self.mask(last, begin, None)
        while True:
            logprobs, given = self._run(self._state, padded, mask)
            weights = np.asarray(given)
            if self.policy.method != "window":
                mass = weights[self.full].mean(axis=(0, 1))
                by_block = np.add.reduceat(mass, range(0, self.length, self.size), axis=1)
                told = [dict(enumerate(row)) for row in by_block]
                last = last_queries(self.policy, self.size, begin, told, len(tokens) - 1)
            found = self.mask(last, begin, weights)
            if np.array_equal(found, mask):
                return np.asarray(logprobs)[: len(tokens)], last
            mask = found
