"""The cache blocks on the device, and a decoder's view of them. Who owns a block is not known here."""

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.cache.segments import SegmentLayout
from moejax.core.config import CacheKind, ModelConfig
from moejax.nn.rope import apply_rope
from moejax.ops.attention import LatentHeads, QkNorms
from moejax.ops.kernel_attention import KernelPlan, kernel_attention
from moejax.ops.kv_by_head import keep_by_head
from moejax.ops.kv_segments import Segment, Segments
from moejax.ops.linear_attention import state_attention
from moejax.ops.paged_attention import ALL_KEPT, AttentionPlan, Evicted, paged_attention
from moejax.perf.sizes import kv_token_bytes
from moejax.quantization.kv import bits_dtype, codes_in_byte, is_quantized
from moejax.sharding.spmd import MeshDevices, SingleDevice

Pages = tuple[tuple[Segment | None, ...], ...]
"""`pages[z][l]`: segment z of layer l, None of one with linear attention; for kernels there is a single
segment, whose keys are not transposed."""

States = tuple[jax.Array | None, ...]
"""Float32 `[slots + 1, H, Dh, Dh]` of each layer, None of one with pages; its last place is scratch."""


def block_bytes(
    config: ModelConfig, block_size: int, dtype: Any, kv_split: int = 1, layers: int | None = None
) -> int:
    """Returns a block's bytes over so many layers on one device (None: all that have blocks), scales
    included; `kv_split` devices share the key/value heads."""
    layers = sum(config.paged_layers) if layers is None else layers
    return layers * block_size * kv_token_bytes(config, str(jnp.dtype(dtype)), kv_split)


class BlockPool:
    """Owns the segments of the layers of one kind, and with "blocks" the states of layers with linear
    attention. A step takes the first few segments and all states, donated, and gives their successors back.

    A segment is made when a step first needs it, so an idle engine holds little; no step ever copies one.

    Args:
        dtype: of keys and values; integers and 8-bit floats have scales beside them.
        transposed_keys: keys lie `[n, K, Dh, bs]`, as the plain attention wants them.
        slots: sequences that run at a time, each with a state.
        kinds: what each layer keeps (`ModelConfig.cache_kinds`), and `kind` what this pool holds of it.
        place: the devices; on a mesh every data-parallel group has segments and states of its own, of these
            sizes, and K and H are what a device has of the heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        segments: SegmentLayout,
        block_size: int,
        dtype: Any,
        *,
        transposed_keys: bool = True,
        slots: int = 0,
        kinds: Sequence[CacheKind] | None = None,
        kind: CacheKind = "blocks",
        place: SingleDevice | None = None,
    ) -> None:
        self.layout = segments
        self._place = place or SingleDevice()
        self._transposed_keys = transposed_keys
        self._config, self._block_size, self._dtype = config, block_size, jnp.dtype(dtype)
        self._slots = slots
        self._kinds, self._kind = kinds or config.cache_kinds(None), kind
        self._segments: list[tuple[Segment | None, ...]] = []
        self._memory: list[tuple[list[int], list[np.ndarray]]] = []  # where segments are
        self.host_reads = jax.default_backend() == "cpu" and not isinstance(self._place, MeshDevices)
        self.states: States | None = None

    def take(self, count: int) -> Pages:
        """Returns the first `count` segments; `put` must follow if they are donated."""
        while len(self._segments) < count:
            self._segments.append(self._make(self.layout.sizes[len(self._segments)], self._place.zeros))
            if self.host_reads:
                arrays = jax.tree.leaves(self._segments[-1])
                addresses = [array.unsafe_buffer_pointer() for array in arrays]
                self._memory.append((addresses, list(map(memory_of, arrays, addresses))))
        return tuple(self._segments[:count])

    def put(self, pages: Pages) -> None:
        self._segments[: len(pages)] = pages

    def shrink(self, count: int) -> None:
        """Drops all segments but the first `count`, with their content."""
        del self._segments[count:], self._memory[count:]

    def take_segment(self, z: int) -> tuple[Segment | None, ...]:
        """Returns segment z of all layers; `put_segment` must follow if it is donated."""
        return self.take(z + 1)[z]

    def put_segment(self, z: int, segment: tuple[Segment | None, ...]) -> None:
        self._segments[z] = segment

    def memory(self, z: int) -> list[np.ndarray] | None:
        """Returns the arrays of segment z as memory, in which the host reads (`host_reads`) what no program
        under way writes; None where a program has put the segment elsewhere.

        Programs have segments donated and give them back in place. A reference to an array, as of
        `numpy.asarray`, would have the next one copy it.
        """
        arrays, (addresses, memory) = jax.tree.leaves(self.take_segment(z)), self._memory[z]
        return memory if [array.unsafe_buffer_pointer() for array in arrays] == addresses else None

    def blocks(self, count: int) -> tuple[Segment | None, ...]:
        """Returns the shapes and dtypes of `count` blocks of all layers, as a segment has them."""
        return self._make(count, self._place.struct)

    def shapes(self, count: int) -> Any:
        """Returns the shapes and dtypes of `take(count)`; makes nothing."""
        return tuple(self._make(size, self._place.struct) for size in self.layout.sizes[:count])

    def take_states(self) -> States:
        """Returns the `states`, which must be set anew if they are donated."""
        self.states = self.states or self.make_states(self._place.zeros)
        return self.states

    def reset(self) -> None:
        """Drops all content."""
        self._segments, self._memory, self.states = [], [], None

    @property
    def nbytes(self) -> int:
        """Bytes held now, scales included, over all devices; copies count once."""
        return sum(array.nbytes for array in jax.tree.leaves((self._segments, self.states)))

    @property
    def capacity_bytes(self) -> int:
        """Bytes held once all segments are made, as `nbytes` counts them."""
        arrays = jax.tree.leaves((self.shapes(len(self.layout.sizes)), self.make_states(self._place.struct)))
        return sum(array.size * array.dtype.itemsize for array in arrays)

    def make_states(self, make: Callable[..., Any]) -> Any:
        """Makes every layer's states: arrays by `SingleDevice.zeros`, shapes by `SingleDevice.struct`."""
        heads, config = self._place.axes.tensor, self._config
        H = config.num_heads // self._place.axes.size(heads)
        shape = (self._slots + 1, H, config.head_dim, config.head_dim)
        return tuple(
            make(shape, jnp.dtype(jnp.float32), heads) if kind == "state" and self._kind == "blocks" else None
            for kind in self._kinds
        )

    def _make(self, size: int, make: Callable[..., Any]) -> tuple[Segment | None, ...]:
        """Makes every layer's segment of `size` blocks: arrays by `SingleDevice.zeros`, shapes by
        `SingleDevice.struct`."""
        heads = self._place.axes.kv  # mesh axes that the heads are split over
        K = self._config.num_kv_heads // self._place.axes.size(heads)
        Dh, bs = self._config.key_dim, self._block_size
        latent = self._config.latent
        dtype, codes = self._dtype, None
        if is_quantized(self._dtype):
            dtype, codes = bits_dtype(self._dtype) if self._transposed_keys else self._dtype, str(self._dtype)
            Dh //= codes_in_byte(codes)
        elif self._dtype == jnp.bfloat16 and self._transposed_keys and jax.default_backend() == "cpu":
            dtype = bits_dtype(dtype)

        keys = (size, K, Dh, bs) if self._transposed_keys else (size, K, bs, Dh)

        def layer() -> Segment:
            def scales() -> Any:
                return None if codes is None else make((size, K, bs), jnp.dtype(jnp.float32), heads)

            if latent is not None:
                return Segment(make(keys, dtype, heads), None, scales(), None, codes, latent.kv_rank)
            values = make((size, K, bs, Dh), dtype, heads)
            return Segment(make(keys, dtype, heads), values, scales(), scales(), codes)

        return tuple(layer() if kind == self._kind else None for kind in self._kinds)


def memory_of(array: jax.Array, address: int) -> np.ndarray:
    """Returns an array of the CPU's, at its `unsafe_buffer_pointer`, without a reference to it."""
    raw: Any = (ctypes.c_byte * array.nbytes).from_address(address)
    return np.frombuffer(raw, array.dtype).reshape(array.shape)


class PagedCache(NamedTuple):
    """Implements `moejax.models.decoder.DecoderCache` for one step.

    `pages` has the segments of all kinds. `kernels` names the implementation of GPU kernels that a
    `KernelPlan` runs with; `slot` and `copy_of` are those of `moejax.ops.linear_attention.state_attention`;
    `window` is the plan of the layers that are of this kind, and `evicted` what a policy has evicted of the
    others; `mass` is then what `paged_attention` tells of blocks, summed over layers.
    """

    pages: Pages
    states: States
    slot: jax.Array
    copy_of: jax.Array | None
    plan: AttentionPlan | KernelPlan
    window: AttentionPlan | KernelPlan | None
    kinds: tuple[CacheKind, ...]
    kernels: str = "xla"
    evicted: Evicted = ALL_KEPT
    mass: jax.Array | None = None

    def layer(self, index: int) -> "PagedLayer | StateLayer":
        if (states := self.states[index]) is not None:
            assert isinstance(self.plan, AttentionPlan)
            return StateLayer(states, self.slot, self.copy_of, self.plan)
        segments = tuple(segment for each in self.pages if (segment := each[index]) is not None)
        if self.kinds[index] == "window":
            assert self.window is not None
            return PagedLayer(segments, self.window, self.kernels)
        return PagedLayer(segments, self.plan, self.kernels, self.evicted)

    def with_layers(self, layers: "list[PagedLayer | StateLayer]") -> "PagedCache":
        updated = [iter(layer.segments if isinstance(layer, PagedLayer) else ()) for layer in layers]
        pages = tuple(
            tuple(old and next(mine) for old, mine in zip(segment, updated, strict=True))
            for segment in self.pages
        )
        states = tuple(layer.states if isinstance(layer, StateLayer) else None for layer in layers)
        told = [x.mass for x in layers if isinstance(x, PagedLayer) and x.mass is not None]
        return self._replace(pages=pages, states=states, mass=sum(told[1:], told[0]) if told else None)


class StateLayer(NamedTuple):
    """One layer's states, see `moejax.ops.linear_attention.state_attention`."""

    states: jax.Array
    slot: jax.Array
    copy_of: jax.Array | None
    plan: AttentionPlan

    def update_and_attend(
        self, q: jax.Array, k: jax.Array, v: jax.Array, rates: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, "StateLayer"]:
        """Attends q, k and v `[N, 1, H, Dh]` of a flat batch at the plan's positions."""
        out, states = state_attention(q[:, 0], k[:, 0], v[:, 0], rates, *self)
        return out[:, None], self._replace(states=states)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedLayer:
    """One layer's segments, as `moejax.ops.attention.LayerCache` of a flat batch: q `[N, 1, H, Dh]`; `mass`
    is what attention told of blocks."""

    segments: Segments
    plan: AttentionPlan | KernelPlan
    kernels: str = dataclasses.field(metadata={"static": True})
    evicted: Evicted = dataclasses.field(default=ALL_KEPT, metadata={"static": True})
    mass: jax.Array | None = None

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
        out, segments, mass = paged_attention(
            q[:, 0], k[:, 0], values, self.segments, self.plan,
            window=window, scale=scale, sinks=sinks, latents=latents, evicted=self.evicted,
        )  # fmt: skip
        policy, chunk = self.evicted.by_head, self.plan.chunk
        if policy is not None and chunk is not None:
            rows = self.plan.decode.position.shape[0]
            given: Any = {"scale": scale, "sinks": sinks, "latents": latents}
            segments = keep_by_head(q[rows:, 0], segments, chunk, policy, after=out, **given)
        return out[:, None], dataclasses.replace(self, segments=segments, mass=mass)
