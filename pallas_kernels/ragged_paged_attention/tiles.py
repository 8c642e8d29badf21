"""Tiles of keys in both kernels: gathering pages, scores, and one step of the running softmax.

Softmax in base 2, with a running maximum (FlashAttention-2, arXiv 2307.08691).

Quantized keys and values are multiplied as float16, which holds every int8, e4m3 and e5m2 number exactly and
takes two or three integer operations to get to; bfloat16 takes more, or a conversion instruction at a quarter
of the rate. Their scales go to scores and to probabilities, so nothing is multiplied per element. What could
leave float16's range is brought into it: a query's row by a power of two, and value scales by the largest met
so far, which is carried along like the softmax's maximum. Values whose scale is less than 2^-29 of that one
lose bits, and from 2^-39 on count as zero.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._compat import both, dot, load, next_power_of_2
from pallas_kernels.kv import is_quantized

LOG2E = 1.4426950408889634
MASKED = -1.0e38
"""Score of a key that a query does not see. Finite: differences of two stay numbers."""

_QUERY_HEADROOM = 2.0**12
_WEIGHT_HEADROOM = 2.0**15
_TINY = 2.0**-100


@dataclass(frozen=True)
class Attention:
    """Static facts of a call; dimensions as in `ragged_paged_attention_reference`, the most parts of a
    context, and the most queries of a sequence that decode takes (`pallas_kernels.work_list`).

    With `latent`, the numbers at a key's end that are its value, K counts the tiles of query heads that share
    the only key, and G the heads of one.
    """

    T: int
    S: int
    H: int
    K: int
    Dh: int
    bs: int
    M: int
    q_dtype: Any
    kv_dtype: Any
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: bool
    splits: int
    queries: int
    latent: int | None = None

    @property
    def per_turn(self) -> int:
        """Queries of a sequence that one program decodes: one, or as many as with their heads fill 32 rows,
        16 where heads are wide: more would spill."""
        return min(self.queries, max(1, (32 if self.Dp <= 128 else 16) // self.G))

    @property
    def turns(self) -> int:
        """Programs for the queries of a sequence."""
        return -(-self.queries // self.per_turn)

    @property
    def needs_work_list(self) -> bool:
        """Whether decode is told what to do by the work list, not by the lengths alone."""
        return self.splits > 1 or self.queries > 1

    @property
    def G(self) -> int:
        return self.H // self.K

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """Begin and length of a key's parts, a tile each: all of it, or what is only key and then the value.
        As one tile 64 + 512 numbers would be padded to 1024."""
        return (self.value,) if self.latent is None else ((0, self.Dh - self.Dv), self.value)

    @property
    def value(self) -> tuple[int, int]:
        """Begin and length of a value, or of it in its key."""
        return self.Dh - self.Dv, self.Dv

    @property
    def Dv(self) -> int:
        """Numbers of a value."""
        return self.latent or self.Dh

    @property
    def Dp(self) -> int:
        """Dv as the tiles have it."""
        return max(16, next_power_of_2(self.Dv))

    @property
    def blocks(self) -> int:
        """Pieces that a value is cut into where many of them are held: one, of latents of 128 numbers."""
        return 1 if self.latent is None else max(1, self.Dp // 128)

    @property
    def score_factor(self) -> float:
        """Factor from products to scores: the softmax's exponent in base 2, or the soft cap's argument."""
        return self.scale * LOG2E if self.soft_cap is None else self.scale / self.soft_cap

    @property
    def quantized(self) -> bool:
        return is_quantized(self.kv_dtype)

    @property
    def product(self) -> Any:
        """Dtype of the operands of both products."""
        if self.quantized:
            return jnp.float16
        return self.kv_dtype if self.q_dtype == self.kv_dtype else jnp.float32


@dataclass(frozen=True)
class Config:
    """Tile sizes, all powers of two of at least 16.

    Attributes:
        decode_tile: keys that decode takes at a time.
        rows: queries times heads of a KV head in a chunk's tile; at least the heads.
        tile: keys that a chunk takes at a time.
        num_warps, num_stages: of the chunk kernel.
    """

    decode_tile: int
    decode_warps: int
    decode_stages: int
    rows: int
    tile: int
    num_warps: int
    num_stages: int


class Pool(NamedTuple):
    """References to the pages of all sequences."""

    k: Any
    v: Any
    table: Any
    k_scale: Any
    v_scale: Any


class Running(NamedTuple):
    """State of the softmax over the keys so far, per row.

    Attributes:
        largest: `[R]`, the largest score, base 2.
        total: `[R]`, sum of 2^(score - largest).
        acc: `[R, Dp]`, sum of values times that, over `unit`.
        unit: the largest value scale; None where values have none.
    """

    largest: jax.Array
    total: jax.Array
    acc: jax.Array
    unit: jax.Array | None


def dims(
    a: Attention, rows: jax.Array | None, part: tuple[int, int] | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """Indices along a value, or a part of a key, and the mask of a tile of these columns and of `rows` (None:
    all are in)."""
    begin, count = part or (0, a.Dv)
    dim = jnp.arange(width := max(16, next_power_of_2(count)))
    mask = both(None if rows is None else rows[:, None], (dim < count)[None, :] if width != count else None)
    return begin + dim if begin else dim, mask


def block_dims(a: Attention, rows: jax.Array, block: Any) -> tuple[jax.Array, jax.Array | None]:
    """Returns `dims` of one of a value's `blocks`."""
    if a.blocks == 1:
        return dims(a, rows)
    dim = block * (a.Dp // a.blocks) + jnp.arange(a.Dp // a.blocks)
    return dim, rows[:, None] & (dim < a.Dv)[None, :]


def start(a: Attention, rows: int) -> Running:
    """Returns the state before the first key."""
    unit = jnp.float32(_TINY) if a.quantized else None
    return Running(
        jnp.full((rows,), MASKED, jnp.float32),
        jnp.zeros((rows,), jnp.float32),
        jnp.zeros((rows, a.Dp), jnp.float32),
        unit,
    )


def load_queries(
    a: Attention, q_ref: Any, token: jax.Array, head: jax.Array, rows: jax.Array
) -> tuple[list[jax.Array], Any]:
    """Rows of q, a tile for each part of keys, as the products take them, and what their scores are to be
    multiplied by."""

    def one(part: tuple[int, int]) -> jax.Array:
        dim, mask = dims(a, rows, part)
        return load(q_ref.at[token[:, None], head[:, None], dim[None, :]], mask=mask, other=0.0)

    q = [one(part) for part in a.parts]
    if not a.quantized:
        return [x.astype(a.product) for x in q], a.score_factor
    q = [x.astype(jnp.float32) for x in q]
    largest = functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x), axis=1) for x in q])
    largest = jnp.maximum(largest, _TINY)
    exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000
    power = jax.lax.bitcast_convert_type(exponent, jnp.float32)
    factor = power * (a.score_factor / _QUERY_HEADROOM * _decode_factor(a))
    up = (_QUERY_HEADROOM / power)[:, None]
    return [(x * up).astype(jnp.float16) for x in q], factor[:, None]


def step(
    a: Attention,
    pool: Pool,
    q: Sequence[jax.Array],
    factor: Any,
    seq: jax.Array,
    head: Any,
    key: jax.Array,
    present: jax.Array | None,
    visible: jax.Array | None,
    state: Running,
) -> Running:
    """Takes in the keys at the positions `key` `[C]`.

    Args:
        q, factor: from `load_queries`.
        present: `[C]`, keys that may be read; None: all.
        visible: `[R, C]` or `[1, C]`, keys that a row sees, among those present; None: all.
    """
    slot = jax.lax.rem(key, jnp.int32(a.bs))
    page = load(pool.table.at[seq, jax.lax.div(key, jnp.int32(a.bs))], mask=present, other=0)
    head = head if a.latent is None else 0
    # One tile for both products, unless it is decoded: then it would not be loaded ahead.
    both_in_one = a.latent is not None and not a.quantized
    # Absent keys have page 0: some number that the masks discard, cheaper than a masked load.
    masks = [present if both_in_one and part == a.value else None for part in a.parts]
    k = [_load_rows(a, pool.k, page, head, slot, *one) for one in zip(masks, a.parts, strict=True)]
    scores = functools.reduce(jnp.add, [dot(x, y, trans_b=True) for x, y in zip(q, k, strict=True)]) * factor
    if a.quantized:
        scores = scores * load(pool.k_scale.at[page, head, slot])[None, :]
    if a.soft_cap is not None:
        scores = jnp.tanh(scores) * (a.soft_cap * LOG2E)
    if visible is not None:
        scores = jnp.where(visible, scores, MASKED)
    largest = jnp.maximum(state.largest, jnp.max(scores, axis=1))
    fade = jnp.exp2(state.largest - largest)
    p = jnp.exp2(scores - largest[:, None])
    total = state.total * fade + jnp.sum(p, axis=1)
    unit = None
    if state.unit is not None:
        v_scale = load(pool.v_scale.at[page, head, slot], mask=present, other=0.0)
        unit = jnp.maximum(state.unit, jnp.max(v_scale, axis=0))
        p = p * (v_scale * (_WEIGHT_HEADROOM / unit))[None, :]
        fade = fade * (state.unit / unit)
    v = k[-1] if both_in_one else _load_rows(a, pool.v, page, head, slot, present, a.value)
    acc = state.acc * fade[:, None] + dot(p.astype(a.product), v)
    return Running(largest, total, acc, unit)


def values(a: Attention, state: Running) -> jax.Array:
    """Returns `acc` in the values' own unit."""
    if state.unit is None:
        return state.acc
    return state.acc * (state.unit * (_decode_factor(a) / _WEIGHT_HEADROOM))


def with_sinks(state: Running, sinks: Sequence[Any], head: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns `total` with the rows' sinks, of query heads `head` `[R]`, where there are any."""
    if not sinks:
        return state.total
    sink = load(sinks[0].at[head], mask=rows, other=0.0).astype(jnp.float32)
    # Infinite if the sink is far above: all is its.
    return state.total + jnp.exp2(sink * LOG2E - state.largest)


def over_tiles(
    begin: jax.Array,
    end: jax.Array,
    tile: int,
    take: Callable[[jax.Array, Running], Running],
    state: Running,
    skip: tuple[jax.Array, jax.Array] | None = None,
) -> Running:
    """Applies `take(keys, state)` to tiles `begin` to `end` of `tile` keys, but those from `skip[0]` to
    `skip[1]`, which lie between them."""

    def turn(i: jax.Array, state: Running) -> Running:
        at = i if skip is None else jnp.where(i < skip[0], i, i + (skip[1] - skip[0]))
        return take(at * tile + jnp.arange(tile), state)

    last = end if skip is None else end - (skip[1] - skip[0])
    return jax.lax.fori_loop(begin, last, turn, state)


def _load_rows(
    a: Attention,
    ref: Any,
    page: jax.Array,
    head: Any,
    slot: jax.Array,
    present: jax.Array | None,
    part: tuple[int, int],
) -> jax.Array:
    """Returns a part of keys or values, a row each, as the products take them, zero where absent."""
    dim, mask = dims(a, present, part)
    at = ref.at[page[:, None], head, slot[:, None], dim[None, :]]
    x = load(at, mask=mask, other=jnp.zeros((), a.kv_dtype))
    return _decode(x) if a.quantized else x.astype(a.product)


def _decode(x: jax.Array) -> jax.Array:
    """Returns stored numbers over `_decode_factor`, in float16, exactly.

    Not `fp8.decode_e4m3`, which spends three operations on the exponent's bias: here scores and values are
    scaled anyway. Not quantized_grouped_matmul's packed PTX, which is undefined for NaN and fixes a layout of
    four neighbours a thread, where keys and values want the products' own.
    """
    if x.dtype == jnp.int8:
        # 1024 + 128 + x: an integer below 2048 is the low bits of a float16 whose exponent is that of 1024.
        bits = x.astype(jnp.int16) + jnp.int16(0x6400 + 128)
        return jax.lax.bitcast_convert_type(bits, jnp.float16) - jnp.float16(1152)
    wide = jax.lax.bitcast_convert_type(x, jnp.int8).astype(jnp.int16)
    if x.dtype == jnp.float8_e5m2:
        return jax.lax.bitcast_convert_type(wide << jnp.int16(8), jnp.float16)
    # e4m3: exponent and mantissa where float16 has them; its exponent's bias is 8 more, subnormals included.
    # The sign fills the bits above by extension; 0xBF80 keeps the topmost.
    bits = (wide << jnp.int16(7)) & jnp.int16(0xBF80 - 0x10000)
    nan = (wide & jnp.int16(0x7F)) == jnp.int16(0x7F)
    return jax.lax.bitcast_convert_type(jnp.where(nan, jnp.int16(0x7E00), bits), jnp.float16)


def _decode_factor(a: Attention) -> float:
    return 256.0 if a.kv_dtype == jnp.float8_e4m3fn else 1.0
