"""A layer's blocks of keys and values on the device, what a step reads and writes of them, and the writing.

Where the cache is quantized a segment has scales beside the codes, one for each token and head, and whatever
moves keys and values moves them too.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.quantization.kv import codes_in_byte, quantize_kv, to_bits


class DecodePlan(NamedTuple):
    """S rows that decode at most one token each, and the N blocks that are read.

    Attributes:
        position: int32 `[S]`; -1 for a row that does not decode.
        owner: int32 `[N, R]`, rows that a block belongs to; -1 for none.
        logical: int32 `[N]`, a block's place in its sequence. None, as `owner`, where rows attend as chunks.
        write_row, write_block, write_offset: int32 `[S]`, by segment: the row whose key and value go into
            `offset` of the segment's `block`.
        write_ends: int32 `[Z]`: writes [write_ends[z - 1], write_ends[z]) are segment z's.
    """

    position: jax.Array
    owner: jax.Array | None
    logical: jax.Array | None
    write_row: jax.Array
    write_block: jax.Array
    write_offset: jax.Array
    write_ends: jax.Array


class ChunkPlan(NamedTuple):
    """T tokens of several sequences' chunks, one after another.

    Attributes:
        tile_start, tile_row, tile_position, tile_count: int32: a tile's first token among the T, its row of
            `table`, its first position and its tokens; rising by start. Without counts each has one token,
            and computes the same whatever else is there.
        num_tiles: int32 `[2]`: tiles before the first number are parts of chunks, those from it to the second
            are whole chunks, which attend to latents in the plain form.
        table: int32 `[S, M]`, block tables.
        run_start, run_block, run_offset, run_count: int32, by segment: tokens from `start` go into the
            segment's `block` from `offset` on.
        run_ends: int32 `[Z]`, as `write_ends`.
        last_query: int32 `[S, M]`, the last position whose query sees a block; None: all see all.
        weigh_from: int32 `[S]`, the first position whose query tells what blocks it attends to.
        end_row, end_token, end_position: int32 `[S]`, of prompts that end here and are cut down
            (`moejax.ops.kv_by_head`): row of `table`, the last token among the T, tokens; 0 tokens for none.
    """

    tile_start: jax.Array
    tile_row: jax.Array
    tile_position: jax.Array
    tile_count: jax.Array | None
    num_tiles: jax.Array
    table: jax.Array
    run_start: jax.Array
    run_block: jax.Array
    run_offset: jax.Array
    run_count: jax.Array
    run_ends: jax.Array
    last_query: jax.Array | None = None
    weigh_from: jax.Array | None = None
    end_row: jax.Array | None = None
    end_token: jax.Array | None = None
    end_position: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """n blocks of bs tokens; a pytree of two arrays, or of four where they are quantized.

    Attributes:
        keys: `[n, K, Dh, bs]`; for kernels `[n, K, bs, Dh]`.
        values: `[n, K, bs, Dh]`; None where they are the last numbers of the keys (`latent`).
        key_scale, value_scale: float32 `[n, K, bs]`, what the codes of a token and head are multiplied by
            (`moejax.quantization.kv`); None where keys and values are stored as they are.
        codes: name of the codes' dtype. 8-bit floats lie here as uint8 (`moejax.quantization.kv.to_bits`),
            for kernels as what they are; of int4 two lie in a byte, so that Dh is half as large in arrays.
            None: keys and values as they are, bfloat16 on a CPU as uint16.
        latent: how many of a key's numbers are its value.
    """

    keys: jax.Array
    values: jax.Array | None
    key_scale: jax.Array | None = None
    value_scale: jax.Array | None = None
    codes: str | None = dataclasses.field(default=None, metadata={"static": True})
    latent: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        return self.keys.shape[0]

    @property
    def block_size(self) -> int:
        """Tokens of a block; not asked of latents for kernels."""
        return self.keys.shape[3] if self.values is None else self.values.shape[2]

    @property
    def value_dim(self) -> int:
        """Numbers of a value."""
        return self.latent or self.keys.shape[-2] * (codes_in_byte(self.codes) if self.codes else 1)

    @property
    def rows(self) -> jax.Array:
        """Values `[..., K, bs, Dv]`."""
        if self.values is not None:
            return self.values
        assert self.latent is not None
        return jnp.swapaxes(self.keys[..., -self.latent :, :], -1, -2)

    @property
    def row_scale(self) -> jax.Array | None:
        """Scales of values, `[..., K, bs]`."""
        return self.key_scale if self.values is None else self.value_scale

    @property
    def quantized(self) -> bool:
        return self.codes is not None


Segments = tuple[Segment, ...]

_TOKEN_AXIS = (3, 2, 2, 2)
"""The axis of a segment's arrays (keys transposed) along which a block's tokens lie."""


def each_array(function: Callable[..., jax.Array], *segments: Segment) -> Segment:
    """Computes `function(token axis, an array of each segment)` for each of the arrays that they have."""
    leaves = zip(*(jax.tree.leaves(segment) for segment in segments), strict=True)
    results = [function(axis, *arrays) for axis, arrays in zip(_TOKEN_AXIS, leaves, strict=False)]
    return jax.tree.unflatten(jax.tree.structure(segments[0]), results)


def _as_stored(segment: Segment, k: jax.Array, v: jax.Array | None) -> Segment:
    """Converts k and v `[N, K, Dh]` to a segment's dtype, or as codes with scales `[N, K]`."""

    def stored(x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        if segment.codes is None:
            bits = segment.keys.dtype == jnp.uint16
            return to_bits(x.astype(jnp.bfloat16)) if bits else x.astype(segment.keys.dtype), None
        codes, scale = quantize_kv(x, jnp.dtype(segment.codes))
        return to_bits(codes), scale

    keys, key_scale = stored(k)
    values, value_scale = (None, None) if v is None else stored(v)
    return Segment(keys, values, key_scale, value_scale, segment.codes, segment.latent)


@jax.named_scope("kv_write")
def write_rows(segments: Segments, k: jax.Array, v: jax.Array | None, plan: DecodePlan) -> Segments:
    """Stores single tokens, k and v `[S, K, Dh]`."""
    tokens = _as_stored(segments[0], k, v)

    def body(i: jax.Array, segment: Segment) -> Segment:
        row, block, offset = plan.write_row[i], plan.write_block[i], plan.write_offset[i]

        def put(axis: int, pool: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.expand_dims(jax.lax.dynamic_slice_in_dim(new, row, 1), axis)
            start = [offset if i == axis else block if i == 0 else 0 for i in range(pool.ndim)]
            return jax.lax.dynamic_update_slice(pool, new, start)

        return each_array(put, segment, tokens)

    return _each_segment(segments, plan.write_ends, body)


@jax.named_scope("kv_write")
def write_runs(segments: Segments, k: jax.Array, v: jax.Array | None, plan: ChunkPlan) -> Segments:
    """Stores the chunks' tokens, k and v `[T, K, Dh]`, a block at a time."""
    size = segments[0].block_size
    # A slice of a block's length that starts at `start - offset` puts every token at its own offset.
    tokens = jax.tree.map(
        lambda x: jnp.pad(x, ((size, size), *[(0, 0)] * (x.ndim - 1))), _as_stored(segments[0], k, v)
    )
    offsets = jnp.arange(size, dtype=jnp.int32)

    def body(i: jax.Array, segment: Segment) -> Segment:
        block, offset = plan.run_block[i], plan.run_offset[i]
        first = plan.run_start[i] - offset + size
        mine = (offsets >= offset) & (offsets < offset + plan.run_count[i])

        def put(axis: int, pool: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.moveaxis(jax.lax.dynamic_slice_in_dim(new, first, size), 0, axis - 1)
            old = jax.lax.dynamic_index_in_dim(pool, block, keepdims=False)
            here = jnp.expand_dims(mine, [other for other in range(old.ndim) if other != axis - 1])
            return jax.lax.dynamic_update_index_in_dim(pool, jnp.where(here, new, old), block, 0)

        return each_array(put, segment, tokens)

    return _each_segment(segments, plan.run_ends, body)


def _each_segment(
    segments: Segments, ends: jax.Array, body: Callable[[jax.Array, Segment], Segment]
) -> Segments:
    """Runs `body(i, segment)` for each segment's own writes."""
    written, start = [], jnp.zeros((), jnp.int32)
    for z, segment in enumerate(segments):
        written.append(jax.lax.fori_loop(start, ends[z], body, segment))
        start = ends[z]
    return tuple(written)


def load_blocks(segments: Segments, blocks: jax.Array) -> Segment:
    """Returns P blocks, copied out of their segments and joined: keys `[K, Dh, P·bs]`, values `[K, P·bs,
    Dh]`, scales `[K, P·bs]`."""
    ends = [a + segment.num_blocks for a, segment in zip(segment_starts(segments), segments, strict=True)]

    def one(block: jax.Array) -> Segment:
        def from_segment(z: int) -> Callable[[], Segment]:
            def read() -> Segment:
                local = block - segment_starts(segments)[z]
                return jax.tree.map(
                    lambda x: jax.lax.dynamic_index_in_dim(x, local, keepdims=False), segments[z]
                )

            return read

        if len(segments) == 1:
            return from_segment(0)()
        segment = sum((block >= end).astype(jnp.int32) for end in ends[:-1])
        return jax.lax.switch(segment, [from_segment(z) for z in range(len(segments))])

    copies = [one(blocks[i]) for i in range(blocks.shape[0])]
    return each_array(lambda axis, *parts: jnp.concatenate(parts, axis=axis - 1), *copies)


def segment_starts(segments: Segments) -> list[int]:
    """Returns the first block of each segment."""
    starts, total = [], 0
    for segment in segments:
        starts.append(total)
        total += segment.num_blocks
    return starts


def copy_blocks(segments: Segments, source: jax.Array, destination: jax.Array, count: jax.Array) -> Segments:
    """Copies blocks one after another, source and destination int32 `[C]`, the first `count` of them."""

    def body(i: jax.Array, segments: Segments) -> Segments:
        return put_block(segments, destination[i], load_blocks(segments, source[i][None]))

    return jax.lax.fori_loop(0, count, body, segments)


def put_block(segments: Segments, destination: jax.Array, block: Segment) -> Segments:
    """Writes one block, as `load_blocks` returns it, to where it goes among the segments."""
    written = []
    for start, segment in zip(segment_starts(segments), segments, strict=True):
        local = destination - start
        inside = (local >= 0) & (local < segment.num_blocks)
        at = jnp.where(inside, local, 0)

        def put(pool: jax.Array, new: jax.Array, inside: jax.Array = inside, at: jax.Array = at) -> jax.Array:
            old = jax.lax.dynamic_index_in_dim(pool, at, keepdims=False)
            return jax.lax.dynamic_update_index_in_dim(pool, jnp.where(inside, new, old), at, 0)

        written.append(jax.tree.map(put, segment, block))
    return tuple(written)
