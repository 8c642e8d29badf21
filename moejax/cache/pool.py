"""The cache blocks on the device, and a decoder's view of them. Who owns a block is not known here."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moejax.cache.segments import SegmentLayout
from moejax.core.config import ModelConfig
from moejax.nn.rope import apply_rope
from moejax.ops.attention import LatentHeads, QkNorms
from moejax.ops.kernel_attention import KernelPlan, kernel_attention
from moejax.ops.kv_segments import Segment, Segments
from moejax.ops.paged_attention import AttentionPlan, paged_attention
from moejax.perf.sizes import kv_token_bytes
from moejax.quantization.kv import bits_dtype, is_quantized
from moejax.sharding.spmd import SingleDevice

Pages = tuple[tuple[Segment, ...], ...]
"""`pages[z][l]`: segment z of layer l; for kernels there is a single segment, whose keys are not
transposed."""


def block_bytes(config: ModelConfig, block_size: int, dtype: Any, kv_split: int = 1) -> int:
    """Returns a block's bytes over all layers on one device, scales included; `kv_split` devices share the
    key/value heads."""
    return config.num_layers * block_size * kv_token_bytes(config, str(jnp.dtype(dtype)), kv_split)


class BlockPool:
    """Owns the segments. A step takes the first few, donated, and gives their successors back.

    A segment is made when a step first needs it, so an idle engine holds little; no step ever copies one.

    Args:
        dtype: of keys and values; int8 and 8-bit floats have scales beside them.
        transposed_keys: keys lie `[n, K, Dh, bs]`, as the plain attention wants them.
        place: the devices; on a mesh every data-parallel group has segments of its own, of these sizes, and K
            is what a device has of the heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        segments: SegmentLayout,
        block_size: int,
        dtype: Any,
        *,
        transposed_keys: bool = True,
        place: SingleDevice | None = None,
    ) -> None:
        self.layout = segments
        self._place = place or SingleDevice()
        self._transposed_keys = transposed_keys
        self._config, self._block_size, self._dtype = config, block_size, jnp.dtype(dtype)
        self._segments: list[tuple[Segment, ...]] = []

    def take(self, count: int) -> Pages:
        """Returns the first `count` segments; `put` must follow if they are donated."""
        while len(self._segments) < count:
            self._segments.append(self._make(self.layout.sizes[len(self._segments)], self._place.zeros))
        return tuple(self._segments[:count])

    def put(self, pages: Pages) -> None:
        self._segments[: len(pages)] = pages

    def take_segment(self, z: int) -> tuple[Segment, ...]:
        """Returns segment z of all layers; `put_segment` must follow if it is donated."""
        return self.take(z + 1)[z]

    def put_segment(self, z: int, segment: tuple[Segment, ...]) -> None:
        self._segments[z] = segment

    def blocks(self, count: int) -> tuple[Segment, ...]:
        """Returns the shapes and dtypes of `count` blocks of all layers, as a segment has them."""
        return self._make(count, self._place.struct)

    def shapes(self, count: int) -> Any:
        """Returns the shapes and dtypes of `take(count)`; makes nothing."""
        return tuple(self._make(size, self._place.struct) for size in self.layout.sizes[:count])

    def reset(self) -> None:
        """Drops all content."""
        self._segments = []

    @property
    def nbytes(self) -> int:
        """Bytes held now, scales included, over all devices; copies count once."""
        return sum(array.nbytes for array in jax.tree.leaves(self._segments))

    @property
    def capacity_bytes(self) -> int:
        """Bytes held once all segments are made, as `nbytes` counts them."""
        arrays = jax.tree.leaves(self.shapes(len(self.layout.sizes)))
        return sum(array.size * array.dtype.itemsize for array in arrays)

    def _make(self, size: int, make: Callable[..., Any]) -> tuple[Segment, ...]:
        """Makes every layer's segment of `size` blocks: arrays by `SingleDevice.zeros`, shapes by
        `SingleDevice.struct`."""
        heads = self._place.axes.kv  # mesh axes that the heads are split over
        K = self._config.num_kv_heads // self._place.axes.size(heads)
        Dh, bs = self._config.key_dim, self._block_size
        latent = self._config.latent
        keys = (size, K, Dh, bs) if self._transposed_keys else (size, K, bs, Dh)
        dtype, codes = self._dtype, None
        if is_quantized(self._dtype):
            dtype, codes = bits_dtype(self._dtype) if self._transposed_keys else self._dtype, str(self._dtype)

        def layer() -> Segment:
            def scales() -> Any:
                return None if codes is None else make((size, K, bs), jnp.dtype(jnp.float32), heads)

            if latent is not None:
                return Segment(make(keys, dtype, heads), None, scales(), None, codes, latent.kv_rank)
            values = make((size, K, bs, Dh), dtype, heads)
            return Segment(make(keys, dtype, heads), values, scales(), scales(), codes)

        return tuple(layer() for _ in range(self._config.num_layers))


class PagedCache(NamedTuple):
    """Implements `moejax.models.decoder.DecoderCache` for one step.

    `kernels` names the implementation of GPU kernels that a `KernelPlan` runs with.
    """

    pages: Pages
    plan: AttentionPlan | KernelPlan
    kernels: str = "xla"

    def layer(self, index: int) -> "PagedLayer":
        return PagedLayer(tuple(segment[index] for segment in self.pages), self.plan, self.kernels)

    def with_layers(self, layers: "list[PagedLayer]") -> "PagedCache":
        segments = range(len(self.pages))
        return self._replace(pages=tuple(tuple(layer.segments[z] for layer in layers) for z in segments))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedLayer:
    """One layer's segments, as `moejax.ops.attention.LayerCache` of a flat batch: q `[N, 1, H, Dh]`."""

    segments: Segments
    plan: AttentionPlan | KernelPlan
    kernels: str = dataclasses.field(metadata={"static": True})

    @property
    def normalizes(self) -> bool:
        return isinstance(self.plan, KernelPlan)

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
    ) -> tuple[jax.Array, "PagedLayer"]:
        """Stores and attends at the plan's positions; kernels normalise, rotate and store in one pass."""
        values = None if v is None else v[:, 0]
        if isinstance(self.plan, KernelPlan):
            (pages,), (cos, sin) = self.segments, rope
            q = q if latents is None else latents.absorb(q)
            out, pages = kernel_attention(
                q[:, 0], k[:, 0], values, (cos[:, 0], sin[:, 0]), pages, self.plan,
                norms=norms, sinks=sinks, window=window, scale=scale, implementation=self.kernels,
            )  # fmt: skip
            out = out if latents is None else latents.values(out)
            return out[:, None], dataclasses.replace(self, segments=(pages,))
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        out, segments = paged_attention(
            q[:, 0], k[:, 0], values, self.segments, self.plan,
            window=window, scale=scale, sinks=sinks, latents=latents,
        )  # fmt: skip
        return out[:, None], dataclasses.replace(self, segments=segments)
