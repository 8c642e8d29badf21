"""The plain twin of a quantized cache: keys and values are rounded as it would store them, and not kept."""

from typing import NamedTuple

import jax

from moejax.nn.rope import apply_rope
from moejax.ops.attention import LatentHeads, QkNorms, attention
from moejax.quantization.kv import round_trip


class RoundedLayer(NamedTuple):
    """Implements `moejax.ops.attention.LayerCache` for calls that hold each sequence whole, from position 0.

    `kv_cache` names the dtype that keys and values go through before they are attended to.
    """

    kv_cache: str

    @property
    def normalizes(self) -> bool:
        return False

    def update_and_attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array | None,
        rope: tuple[jax.Array, jax.Array],
        positions: jax.Array,
        *,
        window: int | None,
        scale: float,
        norms: QkNorms | None = None,
        sinks: jax.Array | None = None,
        latents: LatentHeads | None = None,
    ) -> tuple[jax.Array, "RoundedLayer"]:
        """Attends each sequence to its own rounded keys and values."""
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        k = round_trip(k, self.kv_cache)
        v = k[..., 2 * rope[0].shape[-1] :] if v is None else round_trip(v, self.kv_cache)
        keys, values = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        q = q if latents is None else latents.absorb(q)
        out = attention(q, keys, values, positions, window=window, scale=scale, sinks=sinks)
        return out if latents is None else latents.values(out), self
