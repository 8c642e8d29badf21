"""Random paged batches with plans made token by token, and plain attention in float64 to compare with."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from moejax.ops.kv_segments import ChunkPlan, DecodePlan, Segment, Segments
from moejax.ops.paged_attention import AttentionPlan, tile_rows
from moejax.quantization.kv import dequantize_kv, quantize_kv, to_bits

# What a place of the cache holds that nobody has written: finite, and ruinous if it is ever attended to.
GARBAGE = 1e30


@dataclass(frozen=True)
class Spec:
    """Shapes of one compiled program. `tokens` 0: decodes only; `owners`: rows that may share a block;
    `codes`: what the cache is quantized to; `bits`: it has bfloat16 as uint16; `sinks`: each query head has
    one."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    block_size: int = 4
    segments: tuple[int, ...] = (3, 5, 8)
    rows: int = 4
    tokens: int = 24
    width: int = 8
    owners: int = 1
    window: int | None = None
    dtype: str = "float32"
    codes: str | None = None
    bits: bool = False
    sinks: bool = False

    @property
    def num_blocks(self) -> int:
        return sum(self.segments)

    @property
    def longest(self) -> int:
        return self.width * self.block_size


@dataclass
class Row:
    """A sequence of `length` tokens, of which this step computes those from `start` on: as a decode or as a
    chunk. `twins` are decodes that share its blocks but for the last."""

    length: int
    start: int
    chunk: bool
    blocks: list[int] = field(default_factory=list)
    keys: np.ndarray = field(default_factory=lambda: np.zeros(0))
    values: np.ndarray = field(default_factory=lambda: np.zeros(0))


@dataclass
class Case:
    """A batch: places of the flat batch by row, arrays, and the cache before and after."""

    spec: Spec
    rows: list[Row]
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    before: Segments
    after: Segments
    plan: AttentionPlan
    places: list[np.ndarray]


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """What `dtype` holds of x, in float64."""
    return np.asarray(jnp.asarray(x, jnp.dtype(dtype)), np.float64)


def draw_rows(spec: Spec, rng: np.random.Generator) -> list[Row | None]:
    """A row for each place (None: padding), with blocks from a random permutation of the pool."""
    free = rng.permutation(spec.num_blocks).tolist()
    budget, rows = spec.tokens, []
    kinds = ["decode", "idle"] + ["chunk", "chunk"] * (spec.tokens > 0)
    while len(rows) < spec.rows:
        kind = kinds[rng.integers(len(kinds))]
        most = min(spec.longest, len(free) * spec.block_size)
        if kind == "idle" or most < 1 or (kind == "chunk" and not budget):
            rows.append(None)
            continue
        length = int(rng.integers(1, most + 1))
        count = 1 if kind == "decode" else int(rng.integers(1, min(length, budget) + 1))
        if kind == "chunk" and rng.random() < 0.3:
            count = min(length, budget)  # from the start, where the budget allows
        budget -= count * (kind == "chunk")
        row = Row(length, length - count, kind == "chunk")
        row.blocks = [free.pop() for _ in range(-(-length // spec.block_size))]
        # The tail of its table may be blocks that its future tokens will need.
        spare = min(len(free), spec.width - len(row.blocks), int(rng.integers(0, 2)))
        row.blocks += [free.pop() for _ in range(spare)]
        rows.append(row)
        shared = (length - 1) // spec.block_size
        while kind == "decode" and len(rows) < spec.rows and free and rng.random() < 1 - 1 / spec.owners:
            if sum(r is not None and r.blocks[:1] == row.blocks[:1] for r in rows) == spec.owners:
                break
            rows.append(Row(length, length - 1, False, [*row.blocks[:shared], free.pop()]))
    return rows


def fill(spec: Spec, rows: list[Row | None], rng: np.random.Generator) -> None:
    """Keys and values `[length, K, Dh]`; rows that share a block hold the same in it."""
    held: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    shape = (spec.block_size, spec.kv_heads, spec.head_dim)
    for row in rows:
        if row is None:
            continue
        for block in row.blocks:
            if block not in held:
                draws = rng.normal(size=(2, *shape))
                held[block] = rounded(draws[0], spec.dtype), rounded(draws[1], spec.dtype)
        row.keys = np.concatenate([held[b][0] for b in row.blocks])[: row.length]
        row.values = np.concatenate([held[b][1] for b in row.blocks])[: row.length]


# Compiled, because XLA divides by a constant in another way than an operation of its own does.
_quantize = jax.jit(quantize_kv, static_argnums=1)


_dequantize = jax.jit(dequantize_kv)


def quantized(x: np.ndarray, spec: Spec) -> tuple[jax.Array, jax.Array]:
    """Codes and scales of x `[length, K, Dh]`, followed by those of zeros: one shape, compiled once."""
    padded = np.zeros((spec.num_blocks * spec.block_size, *x.shape[1:]))
    padded[: len(x)] = x
    return _quantize(jnp.asarray(padded, jnp.dtype(spec.dtype)), jnp.dtype(spec.codes))


def given_back(x: np.ndarray, spec: Spec) -> np.ndarray:
    """What the cache gives back of x `[length, K, Dh]`, in float64."""
    if spec.codes is None:
        return x
    return np.asarray(_dequantize(*quantized(x, spec)), np.float64)[: len(x)]


def quantized_segments(spec: Spec, tokens: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]) -> Segments:
    """`segments_with` in codes: 99 and a scale of garbage where nothing is written."""
    assert spec.codes is not None
    n, K, Dh, bs = spec.num_blocks, spec.kv_heads, spec.head_dim, spec.block_size
    stored = to_bits(jnp.zeros(Dh, jnp.dtype(spec.codes)))
    (held_dim,), bits = stored.shape, stored.dtype
    keys, values = np.full((n, K, held_dim, bs), 99, bits), np.full((n, K, bs, held_dim), 99, bits)
    # Places that compute nothing may attend to it; their output must be finite in float16 too.
    scales = np.full((2, n, K, bs), 10 if spec.dtype == "float16" else GARBAGE, np.float32)
    held = np.zeros((2, len(tokens), K, Dh))
    for index, pair in enumerate(tokens.values()):
        held[:, index] = pair
    codes = [quantized(x, spec) for x in held]
    (k, v), made = (np.asarray(to_bits(c)) for c, _ in codes), np.stack([scale for _, scale in codes])
    for index, (block, offset) in enumerate(tokens):
        keys[block, :, :, offset], values[block, :, offset, :] = k[index], v[index]
        scales[:, block, :, offset] = made[:, index]
    ends = np.cumsum(spec.segments)[:-1]
    parts = zip(*(np.split(x, ends) for x in (keys, values, *scales)), strict=True)
    return tuple(Segment(*map(jnp.asarray, part), codes=spec.codes) for part in parts)


def segments_with(spec: Spec, tokens: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]) -> Segments:
    """Garbage but for the keys and values at (block, offset)."""
    if spec.codes is not None:
        return quantized_segments(spec, tokens)
    n, K, Dh, bs = spec.num_blocks, spec.kv_heads, spec.head_dim, spec.block_size
    keys, values = np.full((n, K, Dh, bs), GARBAGE), np.full((n, K, bs, Dh), GARBAGE)
    for (block, offset), (k, v) in tokens.items():
        keys[block, :, :, offset], values[block, :, offset, :] = k, v
    ends = np.cumsum(spec.segments)[:-1]
    dtype = jnp.dtype(spec.dtype)
    stored = to_bits if spec.bits else lambda x: x
    return tuple(
        Segment(stored(jnp.asarray(a, dtype)), stored(jnp.asarray(b, dtype)))
        for a, b in zip(np.split(keys, ends), np.split(values, ends), strict=True)
    )


def make(spec: Spec, seed: int) -> Case:
    """A batch drawn from a seed."""
    rng = np.random.default_rng(seed)
    rows = draw_rows(spec, rng)
    fill(spec, rows, rng)
    S, T, K, Dh, size = spec.rows, spec.tokens, spec.kv_heads, spec.head_dim, spec.block_size
    q = rounded(rng.normal(size=(S + T, spec.heads, Dh)), spec.dtype)
    k, v = rounded(rng.normal(size=(2, S + T, K, Dh)), spec.dtype)
    before: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
    after: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
    places, start = [], S
    for index, row in enumerate(rows):
        if row is None:
            continue
        count = row.length - row.start
        place = np.arange(start, start + count) if row.chunk else np.array([index])
        start += count * row.chunk
        k[place], v[place] = row.keys[row.start :], row.values[row.start :]
        for position in range(row.length):
            where = row.blocks[position // size], position % size
            after[where] = row.keys[position], row.values[position]
            if position < row.start:
                before[where] = after[where]
        places.append(place)
    plan = AttentionPlan(decode_plan(spec, rows), chunk_plan(spec, rows) if T else None)
    live = [row for row in rows if row is not None]
    return Case(spec, live, q, k, v, segments_with(spec, before), segments_with(spec, after), plan, places)


def locate(spec: Spec, block: int) -> tuple[int, int]:
    """Segment and place within it."""
    for segment, size in enumerate(spec.segments):
        if block < size:
            return segment, block
        block -= size
    raise AssertionError("no such block")


def ints(values: list[int], length: int, fill_with: int = 0) -> jax.Array:
    return jnp.asarray([*values, *[fill_with] * (length - len(values))], jnp.int32)


def by_segment(spec: Spec, writes: list[tuple[int, ...]], length: int) -> tuple[list[jax.Array], jax.Array]:
    """Writes (block, …) sorted by segment: their columns, the block local to its segment, and the
    segments' ends."""
    found = sorted(((*locate(spec, block), *rest) for block, *rest in writes), key=lambda w: w[0])
    ends = [sum(w[0] <= z for w in found) for z in range(len(spec.segments))]
    columns = [ints([w[i] for w in found], length) for i in range(1, 1 + len(writes[0]) if writes else 5)]
    return columns, ints(ends, len(ends))


def decode_plan(spec: Spec, rows: list[Row | None]) -> DecodePlan:
    owner = np.full((spec.num_blocks, spec.owners), -1, np.int32)
    logical = np.zeros(spec.num_blocks, np.int32)
    writes, position = [], []
    for index, row in enumerate(rows):
        decodes = row is not None and not row.chunk
        position.append(row.start if row is not None and decodes else -1)
        if row is None or row.chunk:
            continue
        writes.append((row.blocks[row.start // spec.block_size], index, row.start % spec.block_size))
        for place, block in enumerate(row.blocks):
            owner[block, int((owner[block] >= 0).sum())] = index
            logical[block] = place
    columns, ends = by_segment(spec, writes, spec.rows)
    block, write_row, offset = columns[:3]
    return DecodePlan(
        ints(position, spec.rows), jnp.asarray(owner), jnp.asarray(logical), write_row, block, offset, ends
    )


def chunk_plan(spec: Spec, rows: list[Row | None]) -> ChunkPlan:
    tile, size = tile_rows(spec.tokens), spec.block_size
    table = np.zeros((spec.rows, spec.width), np.int32)
    tiles: list[tuple[int, ...]] = []
    runs: list[tuple[int, ...]] = []
    start = 0
    for index, row in enumerate(rows):
        if row is None or not row.chunk:
            continue
        table[index, : len(row.blocks)] = row.blocks
        for first in range(row.start, row.length, tile):
            tiles.append((start + first - row.start, index, first, min(tile, row.length - first)))
        for block in range(row.start // size, (row.length - 1) // size + 1):
            first, end = max(row.start, block * size), min(row.length, (block + 1) * size)
            runs.append((row.blocks[block], start + first - row.start, first % size, end - first))
        start += row.length - row.start
    columns, ends = by_segment(spec, runs, 2 * spec.rows + spec.tokens)
    block, run_start, offset, count = columns[:4]
    most = spec.rows + spec.tokens // tile
    return ChunkPlan(
        *(ints([t[i] for t in tiles], most) for i in range(4)),
        num_tiles=ints([len(tiles)] * 2, 2),
        table=jnp.asarray(table),
        run_start=run_start,
        run_block=block,
        run_offset=offset,
        run_count=count,
        run_ends=ends,
    )


def sinks_of(spec: Spec) -> np.ndarray | None:
    """Float32 `[H]`: far below, about as high as and far above the scores."""
    return np.linspace(-4, 6, spec.heads).astype(np.float32) if spec.sinks else None


def expected(case: Case, scale: float) -> list[np.ndarray]:
    """Each row's output `[count, H, Dh]` by plain attention over its own contiguous keys, float64."""
    spec = case.spec
    group, sinks = spec.heads // spec.kv_heads, sinks_of(spec)
    outs = []
    for row, places in zip(case.rows, case.places, strict=True):
        held_keys, held_values = given_back(row.keys, spec), given_back(row.values, spec)
        out = np.zeros((len(places), spec.heads, spec.head_dim))
        for i, place in enumerate(places):
            position = row.start + i
            least = 0 if spec.window is None else max(0, position - spec.window + 1)
            for head in range(spec.heads):
                keys = held_keys[least : position + 1, head // group]
                values = held_values[least : position + 1, head // group]
                scores = keys @ case.q[place, head] * scale
                weights = np.exp(scores - scores.max())
                sink = 0.0 if sinks is None else np.exp(sinks[head] - scores.max())
                out[i, head] = weights @ values / (weights.sum() + sink)
        outs.append(out)
    return outs
