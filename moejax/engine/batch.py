"""From a plan to the arrays of one step: built on the host as one buffer, taken apart on the device.

One int32 buffer a step is one transfer; fields that are not integers travel as their bits. The flat batch has
a place for every row's decoded token and then the chunks:

    flat index   0 1 … S-1 | S … S+T-1
                 decodes   | chunk tokens of all sequences, one after another
"""

import functools
import math
from collections.abc import Sequence as Items
from itertools import accumulate, chain
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.engine.buckets import Buckets
from moejax.engine.request import SamplingParams
from moejax.engine.sampler import SamplerMode, SamplingArrays, common_mode, sampling_values
from moejax.engine.scheduler import StepPlan
from moejax.engine.sequence import Sequence
from moejax.ops.paged_attention import AttentionPlan, ChunkPlan, DecodePlan, tile_rows


class StepKey(NamedTuple):
    """Shape bucket and options of a compiled step.

    Attributes:
        rows, tokens: S and T above; tokens = 0 computes no chunk.
        blocks: cache blocks read, a number of whole slabs.
        owners: sequences that may share a block.
        mode: what the sampler must do.
        record: whether expert counts are returned.
        score: whether the chunks' log-probabilities are returned.
    """

    rows: int
    tokens: int
    blocks: int
    owners: int
    mode: SamplerMode
    record: bool
    score: bool


class Batch(NamedTuple):
    """One step's arrays on the device; S rows, T chunk tokens.

    Attributes:
        slot: int32 `[S]`, place of each row in the per-sequence state; the one past the last for padding.
        token: int32 `[S]`, what a row decodes; -1: what its slot sampled last.
        position: int32 `[S]`, where; -1 for a row that does not decode.
        logit: int32 `[S]`, flat index that a row samples from.
        step: int32 `[S]`, tokens that it has generated before.
        sample: int32 `[S]`, 1 for a row that samples.
        rope_len: int32 `[S + T]`, sequence length that each token's rotary base is for.
        chunk_token, chunk_position: int32 `[T]`; position -1 for padding.
        attention: which blocks to write and read.
        sampling: the rows' parameters, None for a greedy step without penalties.
        chunk_row: int32 `[T]`, row of each chunk token; with `fresh` `[S]` (1: a row has seen nothing before
            this step) and `seen_as` `[S]` (the row that has seen what it has, a fork's parent); only with
            penalties.
        target: int32 `[T]`, next prompt token of each chunk token; only with scores.
    """

    slot: jax.Array
    token: jax.Array
    position: jax.Array
    logit: jax.Array
    step: jax.Array
    sample: jax.Array
    rope_len: jax.Array
    chunk_token: jax.Array | None
    chunk_position: jax.Array | None
    attention: AttentionPlan
    sampling: SamplingArrays | None
    chunk_row: jax.Array | None
    fresh: jax.Array | None
    seen_as: jax.Array | None
    target: jax.Array | None


class Limits(NamedTuple):
    """What no step changes: slots, tokens in a block, most blocks of one sequence, ends of the slabs."""

    slots: int
    block_size: int
    table_width: int
    slab_ends: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def layout(key: StepKey, limits: Limits) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """Field → (offset, shape) in the buffer, and the buffer's length."""
    S, T, N, R = key.rows, key.tokens, key.blocks, key.owners
    Z = limits.slab_ends.index(N) + 1
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("slot", "token", "position", "logit", "step", "sample", "write_row", "write_block", "write_offset"),
        (S,),
    )
    shapes |= {"write_ends": (Z,), "owner": (N, R), "logical": (N,), "rope_len": (S + T,)}
    if T:
        tiles, runs = max_tiles(S, T), max_runs(S, T, limits.block_size)
        shapes |= dict.fromkeys(("chunk_token", "chunk_position"), (T,))
        shapes |= dict.fromkeys(("tile_start", "tile_row", "tile_position", "tile_count"), (tiles,))
        shapes |= dict.fromkeys(("run_start", "run_block", "run_offset", "run_count"), (runs,))
        shapes |= {"run_ends": (Z,), "num_tiles": (1,), "table": (S, min(limits.table_width, N))}
    if not key.mode.greedy or key.mode.penalty:
        shapes |= dict.fromkeys(SamplingArrays._fields, (S,))
    if key.mode.penalty:
        shapes |= {"fresh": (S,), "seen_as": (S,)}
        if T:
            shapes["chunk_row"] = (T,)
    if key.score:
        shapes["target"] = (T,)
    fields, offset = {}, 0
    for name, shape in shapes.items():
        fields[name] = (offset, shape)
        offset += math.prod(shape)
    return fields, offset


def max_tiles(rows: int, tokens: int) -> int:
    """Most tiles that T tokens of at most S sequences fall into: each may leave one part empty."""
    return tokens // tile_rows(tokens) + min(rows, tokens)


def max_runs(rows: int, tokens: int, block_size: int) -> int:
    """Most blocks that T tokens of at most S sequences touch: each may start and end within one."""
    return min(tokens, tokens // block_size + 2 * min(rows, tokens))


def unpack(buffer: jax.Array, key: StepKey, limits: Limits) -> Batch:
    """The step's arrays, inside a trace."""
    fields, _ = layout(key, limits)

    def take(name: str) -> jax.Array:
        offset, shape = fields[name]
        return jax.lax.slice(buffer, (offset,), (offset + math.prod(shape),)).reshape(shape)

    def maybe(name: str) -> jax.Array | None:
        return take(name) if name in fields else None

    decode = DecodePlan(*(take(name) for name in _DECODE))
    chunk = ChunkPlan(*(take(name) for name in _CHUNK)) if key.tokens else None
    sampling = None
    if "seed" in fields:
        sampling = SamplingArrays(
            *(
                jax.lax.bitcast_convert_type(take(name), _SAMPLING_DTYPES[name])
                for name in SamplingArrays._fields
            )
        )
    return Batch(
        slot=take("slot"),
        token=take("token"),
        position=take("position"),
        logit=take("logit"),
        step=take("step"),
        sample=take("sample"),
        rope_len=take("rope_len"),
        chunk_token=maybe("chunk_token"),
        chunk_position=maybe("chunk_position"),
        attention=AttentionPlan(decode, chunk),
        sampling=sampling,
        chunk_row=maybe("chunk_row"),
        fresh=maybe("fresh"),
        seen_as=maybe("seen_as"),
        target=maybe("target"),
    )


_DECODE = ("position", "owner", "logical", "write_row", "write_block", "write_offset", "write_ends")
_CHUNK = (
    "tile_start", "tile_row", "tile_position", "tile_count", "num_tiles", "table",
    "run_start", "run_block", "run_offset", "run_count", "run_ends",
)  # fmt: skip
_SAMPLING_DTYPES = {
    "temperature": jnp.float32, "top_k": jnp.int32, "top_p": jnp.float32, "min_p": jnp.float32,
    "repetition_penalty": jnp.float32, "seed": jnp.uint32,
}  # fmt: skip


class BatchBuilder:
    """Builds the buffer of each plan. Keeps nothing between steps.

    Args:
        buckets: what shapes are padded to.
        limits: see `Limits`.

    `warm_modes` are the sampler modes that warm-up has compiled. A batch runs in the first of them that does
    all it needs, in its own least mode where there is none.
    """

    def __init__(self, buckets: Buckets, limits: Limits) -> None:
        self.buckets = buckets
        self.limits = limits
        self.warm_modes: list[SamplerMode] = []

    def build(self, plan: StepPlan) -> tuple[StepKey, np.ndarray]:
        """The bucket and the int32 buffer of a plan."""
        rows = plan.sequences
        decodes, D = plan.decodes, len(plan.decodes)
        counts = [len(s.blocks) for s in decodes]
        held = np.fromiter(chain.from_iterable([s.blocks for s in decodes]), np.int64, sum(counts))
        highest = int(held.max()) if D else 0
        highest = max([highest, *(max(chunk.sequence.blocks) for chunk in plan.chunks)])
        shared = int(np.bincount(held).max()) if D else 1
        slabs = self.buckets.slabs_for(highest + 1)
        tokens = plan.chunk_tokens
        wanted = max(tokens, plan.min_tokens) if tokens else 0
        key = StepKey(
            rows=self.buckets.rows_for(len(rows)),
            tokens=self.buckets.tokens_for(wanted),
            blocks=self.buckets.slabs.ends[slabs - 1],
            owners=1 << (shared - 1).bit_length(),
            mode=self._mode([sequence for _, sequence in plan.sampling_rows()], rows),
            record=any(s.record for s in rows),
            score=any(chunk.sequence.score for chunk in plan.chunks),
        )
        fields, length = layout(key, self.limits)
        buffer = np.zeros(length, np.int32)
        views = {
            name: buffer[offset : offset + math.prod(shape)].reshape(shape)
            for name, (offset, shape) in fields.items()
        }
        self._rows(views, plan, rows)
        if D:
            self._decodes(views, plan, held, counts, key.owners)
        else:
            views["owner"][...] = -1
        if tokens:
            self._chunks(views, plan, key)
        if "seed" in views:
            _fill_sampling(views, rows)
        if key.mode.penalty:
            _fill_penalty(views, plan)
        return key, buffer

    def empty(self, key: StepKey) -> np.ndarray:
        """A buffer that computes nothing and writes nothing, to rehearse a step."""
        fields, length = layout(key, self.limits)
        buffer = np.zeros(length, np.int32)
        blank = {"slot": self.limits.slots, "position": -1, "owner": -1, "chunk_position": -1}
        for name, value in blank.items():
            if name in fields:
                offset, shape = fields[name]
                buffer[offset : offset + math.prod(shape)] = value
        return buffer

    def _mode(self, sampling: Items[Sequence], rows: Items[Sequence]) -> SamplerMode:
        """The least mode that serves every sequence that samples, or a compiled one that does."""
        modes: set[SamplerMode] = {s.mode for s in sampling}
        least = common_mode(modes)
        # A part of a prompt samples nothing, but its tokens have been seen.
        if any(s.mode.penalty for s in rows):
            least = least._replace(penalty=True)
        return next((mode for mode in self.warm_modes if common_mode({mode, least}) == mode), least)

    def _rows(self, views: dict[str, np.ndarray], plan: StepPlan, rows: list[Sequence]) -> None:
        D, n, S = len(plan.decodes), len(rows), len(views["slot"])
        views["slot"][:n] = [s.slot for s in rows]
        views["slot"][n:] = self.limits.slots
        views["token"][:D] = [
            s.tokens[p] if p < len(s.tokens) else -1
            for s, p in zip(plan.decodes, plan.positions, strict=True)
        ]
        views["position"][:D] = plan.positions
        views["position"][D:] = -1
        views["rope_len"][:D] = [
            max(s.prompt_len, p + 1) for s, p in zip(plan.decodes, plan.positions, strict=True)
        ]
        # What a row has generated before: its pending token is the one that this step samples.
        views["step"][:n] = [s.generated - 1 for s in rows]
        views["logit"][:D] = range(D)
        views["sample"][:D] = 1
        row, end = D, S
        for chunk, forks in zip(plan.chunks, plan.forks, strict=True):
            end += chunk.count
            after = row + 1 + len(forks)
            views["logit"][row:after] = end - 1
            views["sample"][row:after] = chunk.last and not chunk.sequence.score
            row = after

    def _decodes(
        self,
        views: dict[str, np.ndarray],
        plan: StepPlan,
        held: np.ndarray,
        counts: list[int],
        owners: int,
    ) -> None:
        """Where each row writes, and who owns each block that is read."""
        D, size = len(plan.decodes), self.limits.block_size
        positions = np.asarray(plan.positions)
        starts = np.fromiter(accumulate(counts, initial=0), np.int64, D + 1)
        W = D - plan.idle  # rows that have ended are computed as padding and store nothing
        slab, local = self.buckets.slabs.locate(held[starts[:W] + positions[:W] // size])
        order = np.argsort(slab, kind="stable")
        views["write_row"][:W] = order
        views["write_block"][:W] = local[order]
        views["write_offset"][:W] = (positions[:W] % size)[order]
        views["write_ends"][:] = np.searchsorted(
            slab[order], np.arange(len(views["write_ends"])), side="right"
        )
        row_of = np.repeat(np.arange(D), counts)
        owner, logical = views["owner"], views["logical"]
        owner[...] = -1
        logical[held] = np.arange(len(held)) - starts[row_of]
        if owners == 1:
            owner[held, 0] = row_of
            return
        by_block = np.argsort(held, kind="stable")
        sorted_blocks = held[by_block]
        rank = np.arange(len(held)) - np.searchsorted(sorted_blocks, sorted_blocks, side="left")
        owner[sorted_blocks, rank] = row_of[by_block]

    def _chunks(self, views: dict[str, np.ndarray], plan: StepPlan, key: StepKey) -> None:
        """Tokens, tiles (parts of one chunk to attend) and runs (parts of one block to write)."""
        size, tile, S = self.limits.block_size, tile_rows(key.tokens), key.rows
        table, rope = views["table"], views["rope_len"]
        views["chunk_position"][:] = -1
        if "chunk_row" in views:
            views["chunk_row"][:] = S  # nobody has seen the tokens of padding
        tiles: list[tuple[int, int, int, int]] = []
        runs: list[tuple[int, int, int, int]] = []
        start, row = 0, len(plan.decodes)
        for chunk, forks in zip(plan.chunks, plan.forks, strict=True):
            sequence, first, end = chunk.sequence, chunk.start, chunk.start + chunk.count
            views["chunk_token"][start : start + chunk.count] = sequence.tokens[first:end]
            positions = np.arange(first, end)
            views["chunk_position"][start : start + chunk.count] = positions
            rope[S + start : S + start + chunk.count] = np.maximum(positions + 1, sequence.prompt_len)
            table[row, : len(sequence.blocks)] = sequence.blocks
            tiles += [
                (start + i, row, first + i, min(tile, chunk.count - i)) for i in range(0, chunk.count, tile)
            ]
            position = first
            while position < end:
                count = min(size - position % size, end - position)
                runs.append(
                    (sequence.blocks[position // size], start + position - first, position % size, count)
                )
                position += count
            if key.score:
                targets = sequence.tokens[first + 1 : end + 1]
                views["target"][start : start + len(targets)] = targets
            if "chunk_row" in views:
                views["chunk_row"][start : start + chunk.count] = row
            start, row = start + chunk.count, row + 1 + len(forks)
        # Static batching's padding is computed like a token, though it has no place in the cache.
        views["chunk_position"][start : plan.min_tokens] = 0
        views["num_tiles"][0] = len(tiles)
        for name, column in zip(_CHUNK[:4], np.asarray(tiles, np.int32).T, strict=True):
            views[name][: len(tiles)] = column
        block, *columns = np.asarray(runs, np.int64).T
        slab, local = self.buckets.slabs.locate(block)
        order = np.argsort(slab, kind="stable")
        for name, column in zip(
            ("run_start", "run_block", "run_offset", "run_count"),
            (columns[0], local, columns[1], columns[2]),
            strict=True,
        ):
            views[name][: len(runs)] = column[order]
        views["run_ends"][:] = np.searchsorted(slab[order], np.arange(len(views["run_ends"])), side="right")


def _fill_sampling(views: dict[str, np.ndarray], rows: list[Sequence]) -> None:
    """The rows' parameters; padding rows are greedy."""
    padding = len(views["slot"]) - len(rows)
    params = [s.params for s in rows] + [_GREEDY] * padding
    values = sampling_values(params, [s.seed for s in rows] + [0] * padding)
    for name, value in values.items():
        views[name][:] = value.view(np.int32)


def _fill_penalty(views: dict[str, np.ndarray], plan: StepPlan) -> None:
    """What each row has seen: its slot's set, its parent's, or nothing yet."""
    views["seen_as"][:] = np.arange(len(views["seen_as"]))
    row = len(plan.decodes)
    for chunk, forks in zip(plan.chunks, plan.forks, strict=True):
        views["fresh"][row] = chunk.start == 0
        views["seen_as"][row + 1 : row + 1 + len(forks)] = row
        row += 1 + len(forks)


_GREEDY = SamplingParams(temperature=0.0)
