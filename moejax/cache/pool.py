"""The cache blocks on the device, and a decoder's view of them. Who owns a block is not known here."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.cache.slabs import SlabLayout
from moejax.core.config import ModelConfig
from moejax.ops.paged_attention import AttentionPlan, Slabs, paged_attention

Pages = tuple[tuple[tuple[jax.Array, jax.Array], ...], ...]
"""`pages[z][l]`: slab z of layer l, keys `[n, K, Dh, bs]` and values `[n, K, bs, Dh]`."""


def block_bytes(config: ModelConfig, block_size: int, dtype: Any) -> int:
    """Bytes of one block over all layers."""
    per_token = 2 * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize
    return config.num_layers * block_size * per_token


class BlockPool:
    """Owns the slabs. A step takes the first few, donated, and gives their successors back.

    A slab is made when a step first needs it, so an idle engine holds little; no step ever copies one.
    """

    def __init__(self, config: ModelConfig, slabs: SlabLayout, block_size: int, dtype: Any) -> None:
        self.layout = slabs
        self._config, self._block_size, self._dtype = config, block_size, dtype
        self._slabs: list[tuple[tuple[jax.Array, jax.Array], ...]] = []

    def take(self, count: int) -> Pages:
        """The first `count` slabs; `put` must follow if they are donated."""
        while len(self._slabs) < count:
            self._slabs.append(self._make(self.layout.sizes[len(self._slabs)]))
        return tuple(self._slabs[:count])

    def put(self, pages: Pages) -> None:
        self._slabs[: len(pages)] = pages

    def shapes(self, count: int) -> Any:
        """What `take(count)` returns, as shapes and dtypes; makes nothing."""
        return tuple(
            tuple(
                tuple(jax.ShapeDtypeStruct(shape, self._dtype) for shape in self._shapes(size))
                for _ in range(self._config.num_layers)
            )
            for size in self.layout.sizes[:count]
        )

    def reset(self) -> None:
        """Drops all content."""
        self._slabs = []

    @property
    def nbytes(self) -> int:
        """Bytes held now."""
        return sum(array.nbytes for array in jax.tree.leaves(self._slabs))

    def _shapes(self, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        K, Dh, bs = self._config.num_kv_heads, self._config.head_dim, self._block_size
        return (size, K, Dh, bs), (size, K, bs, Dh)

    def _make(self, size: int) -> tuple[tuple[jax.Array, jax.Array], ...]:
        k, v = self._shapes(size)
        return tuple(
            (jnp.zeros(k, self._dtype), jnp.zeros(v, self._dtype)) for _ in range(self._config.num_layers)
        )


class PagedCache(NamedTuple):
    """Implements `moejax.models.decoder.DecoderCache` for one step."""

    pages: Pages
    plan: AttentionPlan

    def layer(self, index: int) -> "PagedLayer":
        return PagedLayer(tuple(slab[index] for slab in self.pages), self.plan)

    def with_layers(self, layers: "list[PagedLayer]") -> "PagedCache":
        slabs = range(len(self.pages))
        return self._replace(pages=tuple(tuple(layer.slabs[z] for layer in layers) for z in slabs))


class PagedLayer(NamedTuple):
    """One layer's part. Implements `moejax.ops.attention.LayerCache` for a flat batch: q `[N, 1, H, Dh]`."""

    slabs: Slabs
    plan: AttentionPlan

    def update_and_attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        positions: jax.Array,
        *,
        window: int | None,
        scale: float,
    ) -> tuple[jax.Array, "PagedLayer"]:
        """The positions are the plan's own."""
        out, slabs = paged_attention(
            q[:, 0], k[:, 0], v[:, 0], self.slabs, self.plan, window=window, scale=scale
        )
        return out[:, None], PagedLayer(slabs, self.plan)
