"""The plain key/value cache: one contiguous row of slots per sequence, slot s for position s.

It is the oracle of the paged cache. Device state is this pytree, passed in donated and returned.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from moejax.core.config import ModelConfig
from moejax.nn.rope import apply_rope
from moejax.ops.attention import LatentHeads, QkNorms, attention
from moejax.quantization.kv import round_trip

Phase = Literal["prefill", "decode"]


class ContiguousCache(NamedTuple):
    """Keys and values of all layers: each a tuple of `[B, K, S, Dh]`, one per layer; also of layers with
    linear attention, whose queries are attended to all of them as they have faded by then.

    The head axis comes before the slots so that a head's keys lie together: the two products of decode
    then read the cache in order instead of transposing it first.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    @property
    def num_slots(self) -> int:
        return self.k[0].shape[2]


def empty_cache(config: ModelConfig, batch: int, num_slots: int, dtype: Any) -> ContiguousCache:
    """Returns a zeroed cache for `batch` sequences of up to `num_slots` tokens."""
    value_dim = config.head_dim if config.latent is None else config.latent.kv_rank
    keys, values = ((batch, config.num_kv_heads, num_slots, dim) for dim in (config.key_dim, value_dim))
    every = (batch, config.num_heads, num_slots, config.head_dim)
    return ContiguousCache(
        *(
            tuple(jnp.zeros(shape, dtype) if paged else jnp.zeros(every) for paged in config.paged_layers)
            for shape in (keys, values)
        )
    )


class ContiguousView(NamedTuple):
    """The cache in one phase. Implements `moejax.models.decoder.DecoderCache`.

    `prefill` takes whole sequences from position 0, `decode` one token each. `kv_cache` names the dtype whose
    rounding keys and values go through before they are stored: the twin of a paged cache in that dtype.
    """

    cache: ContiguousCache
    phase: Phase
    kv_cache: str = "auto"

    def layer(self, index: int) -> "ContiguousLayer":
        return ContiguousLayer(self.cache.k[index], self.cache.v[index], self.phase, self.kv_cache)

    def with_layers(self, layers: "list[ContiguousLayer]") -> "ContiguousView":
        cache = ContiguousCache(tuple(part.k for part in layers), tuple(part.v for part in layers))
        return self._replace(cache=cache)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContiguousLayer:
    """One layer's keys and values. Implements `moejax.ops.attention.LayerCache`."""

    k: jax.Array
    v: jax.Array
    phase: Phase = dataclasses.field(metadata={"static": True})
    kv_cache: str = dataclasses.field(metadata={"static": True})

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
        window: int | None = None,
        scale: float | None = None,
        norms: QkNorms | None = None,
        sinks: jax.Array | None = None,
        latents: LatentHeads | None = None,
    ) -> tuple[jax.Array, "ContiguousLayer"]:
        """`prefill`: whole sequences from position 0, attended among themselves and stored.
        `decode`: one token a sequence, stored at its position, attending to its row."""
        if latents is not None:
            out, cache = self.update_and_attend(
                latents.absorb(q), k, v, rope, positions, window=window, scale=scale, norms=norms, sinks=sinks
            )
            return latents.values(out), cache
        if scale is None:
            return self._linear(q, k, v, rope, positions)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        if self.kv_cache != "auto":
            k, v = round_trip(k, self.kv_cache), None if v is None else round_trip(v, self.kv_cache)
        if v is None:
            v = k[..., 2 * rope[0].shape[-1] :]
        k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        stored = self._stored(k, v, positions)
        if self.phase == "prefill":
            return attention(q, k, v, positions, window=window, scale=scale, sinks=sinks), stored
        out = attention(q, stored.k, stored.v, positions, window=window, scale=scale, sinks=sinks)
        return out, stored

    def _linear(
        self, q: jax.Array, k: jax.Array, v: jax.Array, rates: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, "ContiguousLayer"]:
        """`moejax.ops.attention.StateCache`, each pair of tokens by itself."""
        stored = self._stored(k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3), positions)
        steps = positions[:, :, None] - jnp.arange(self.k.shape[2], dtype=jnp.int32)[None, None, :]
        fading = jnp.exp(-jnp.maximum(steps, 0)[:, None].astype(jnp.float32) * rates[None, :, None, None])
        weights = jnp.where(steps[:, None] >= 0, fading, 0.0) * jnp.einsum("bthd,bhsd->bhts", q, stored.k)
        return jnp.einsum("bhts,bhsd->bthd", weights, stored.v), stored

    def _stored(self, k: jax.Array, v: jax.Array, positions: jax.Array) -> "ContiguousLayer":
        """With k and v `[B, K, T, Dh]` where they belong."""
        if self.phase == "prefill":
            start = (0, 0, 0, 0)
            k = jax.lax.dynamic_update_slice(self.k, k.astype(self.k.dtype), start)
            v = jax.lax.dynamic_update_slice(self.v, v.astype(self.v.dtype), start)
        else:
            k, v = (_write_row(*pair, positions[:, 0]) for pair in ((self.k, k), (self.v, v)))
        return dataclasses.replace(self, k=k, v=v)


@jax.named_scope("kv_write")
def _write_row(cache: jax.Array, new: jax.Array, rows: jax.Array) -> jax.Array:
    """Writes new `[B, K, 1, Dh]` into slot rows[b] of each sequence of cache `[B, K, S, Dh]`."""
    for b in range(cache.shape[0]):
        # One in-place slice update a sequence: XLA:CPU turns a scatter into a loop over elements.
        part = jax.lax.dynamic_slice_in_dim(new, b, 1, axis=0).astype(cache.dtype)
        cache = jax.lax.dynamic_update_slice(cache, part, (b, 0, rows[b], 0))
    return cache
