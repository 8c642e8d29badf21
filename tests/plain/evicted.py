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
    for query in range(begin + 1, end):
        if policy.method == "snapkv" and query > begin + 1:
            break
        held = [b for b in range(query // size + 1) if last[b] >= query]
        first = 0 if policy.method == "h2o" else max(0, begin - policy.observe)
        mass = {b: sum(told[q].get(b, 0) for q in range(first, query - 1)) for b in held}
        may_go = [b for b in held if b * size >= policy.sinks and (b + 1) * size - 1 <= query - policy.recent]
        for block in sorted(may_go, key=lambda b: (mass[b], b))[: max(0, len(held) - policy.budget // size)]:
            last[block] = query - 1
    return last


class MaskedLayer(NamedTuple):
    """Implements `moejax.ops.attention.LayerCache` for one whole sequence.

    Attributes:
        mask: bool `[T, T]`, the keys that each query sees besides what its layer's window says.
        mass: float32 `[T, T]`, the attention of each query to each key, mean over heads.
    """

    mask: jax.Array
    mass: jax.Array | None = None

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
        seen &= self.mask if window is None else True
        weights = jnp.where(seen[None], jnp.exp(jnp.einsum("thd,shd->hts", q, k) * scale), 0.0)
        total = weights.sum(axis=-1, keepdims=True)
        weights /= total if sinks is None else total + jnp.exp(sinks)[:, None, None]
        out = jnp.einsum("hts,shd->thd", weights, v)[None]
        out = out if latents is None else latents.values(out)
        return out, MaskedLayer(self.mask, weights.mean(axis=0))


class MaskedCache(NamedTuple):
    """Implements `moejax.models.decoder.DecoderCache`: the same mask for all layers."""

    mask: jax.Array
    layers: tuple[MaskedLayer, ...] = ()

    def layer(self, index: int) -> MaskedLayer:
        return MaskedLayer(self.mask)

    def with_layers(self, layers: list[MaskedLayer]) -> "MaskedCache":
        return MaskedCache(self.mask, tuple(layers))


class Masked:
    """Whole sequences, padded to `length`, over all keys with a mask: the twin of an engine that evicts."""

    def __init__(self, model: Decoder, policy: KvPolicyConfig, size: int, length: int) -> None:
        graph, self._state = nnx.split(model)
        self.policy, self.size, self.length = policy, size, length
        full = [i for i, window in enumerate(model.config.sliding_windows) if window is None]

        def run(state: Any, tokens: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
            decoder = nnx.merge(graph, state)
            positions = jnp.arange(length, dtype=jnp.int32)[None]
            x, cache, _ = decoder.run(decoder.embed(tokens), positions, cache=MaskedCache(mask))
            mass = jnp.stack([cache.layers[i].mass for i in full]).mean(axis=0)
            return jax.nn.log_softmax(decoder.logits(x[0]), axis=-1), mass

        self._run = jax.jit(run)

    def mask(self, last: Sequence[int]) -> np.ndarray:
        """bool `[T, T]`: what queries see of keys, whose blocks are seen up to their `last` query."""
        query, key = np.arange(self.length)[:, None], np.arange(self.length)[None]
        if self.policy.method == "window":
            return (key < self.policy.sinks) | (key > query - self.policy.recent)
        blocks = np.full(-(-self.length // self.size), FOREVER)
        blocks[: len(last)] = last
        return query <= np.repeat(blocks, self.size)[None, : self.length]

    def __call__(self, tokens: list[int], begin: int) -> tuple[np.ndarray, list[int]]:
        """Returns float32 `[T, V]`, log-probabilities after each token, and the last query of each block.
        What a query tells depends on no later decision, so that these are found one after another."""
        padded = np.zeros((1, self.length), np.int32)
        padded[0, : len(tokens)] = tokens
        last: list[int] = []
        while True:
            logprobs, mass = self._run(self._state, padded, self.mask(last))
            by_block = np.add.reduceat(np.asarray(mass), range(0, self.length, self.size), axis=1)
            told = [dict(enumerate(row)) for row in by_block]
            found = last if not self.policy.weighs else last_queries(
                self.policy, self.size, begin, told, len(tokens) - 1
            )  # fmt: skip
            if found == last:
                return np.asarray(logprobs)[: len(tokens)], last
            last = found
