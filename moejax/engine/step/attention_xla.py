"""Tells `ops.paged_attention` of a step: blocks by owner for decodes, tiles and runs for chunks.

One of the two plans a batch can carry, see `batch.metadata_of`; the other is `attention_kernels`.
"""

from collections.abc import Callable
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np

from moejax.cache.allocator import GONE
from moejax.engine.scheduling.eviction import FOREVER
from moejax.engine.scheduling.plan import StepPlan
from moejax.engine.step.limits import Limits, StepKey
from moejax.engine.step.tables import BlockTables
from moejax.ops.kv_segments import ChunkPlan, DecodePlan
from moejax.ops.paged_attention import AttentionPlan, has_plain_chunks, tile_rows
from moejax.perf.sizes import takes_plain_form

BLANK = {"owner": -1}
"""Values other than 0 of a plan that attends to nothing."""

_DECODE = ("position", "owner", "logical", "write_row", "write_block", "write_offset", "write_ends")
_TILES = ("tile_start", "tile_row", "tile_position", "tile_count")
_RUNS = ("run_start", "run_block", "run_offset", "run_count")
_ENDS = ("end_row", "end_token", "end_position")
_CHUNK = (*_TILES, "num_tiles", "table", *_RUNS, "run_ends")


def shapes(key: StepKey, limits: Limits) -> dict[str, tuple[int, ...]]:
    """Fields of the buffer; `position` is the batch's own."""
    S, T, N, R = key.rows, key.tokens, key.blocks, key.owners
    Z = limits.segment_ends.index(N) + 1
    fields: dict[str, tuple[int, ...]] = dict.fromkeys(("write_row", "write_block", "write_offset"), (S,))
    fields |= {"write_ends": (Z,)}
    if key.tiled:
        return fields | {"table": (S, limits.table_width), "tile_row": (S,)}
    fields |= {"owner": (N, R), "logical": (N,)}
    if T:
        tiles, runs = max_tiles(S, T), max_runs(S, T, limits.block_size)
        fields |= dict.fromkeys(_TILES, (tiles,)) | dict.fromkeys(_RUNS, (runs,))
        fields |= {"run_ends": (Z,), "num_tiles": (2,), "table": (S, limits.table_width)}
        fields |= dict.fromkeys(_of_policy(limits), (S,))
        if "last_query" in fields:
            fields["last_query"] = (S, limits.table_width)
    return fields


def _of_policy(limits: Limits) -> tuple[str, ...]:
    """Returns the names of what only a policy's chunks have."""
    policy = limits.kv_policy
    return ("last_query", "weigh_from") * policy.weighs + ("last_query", *_ENDS) * policy.by_head


def max_tiles(rows: int, tokens: int) -> int:
    """Counts most tiles that T tokens of at most S sequences fall into: each may leave one part empty."""
    return tokens // tile_rows(tokens) + min(rows, tokens)


def max_runs(rows: int, tokens: int, block_size: int) -> int:
    """Counts most blocks that T tokens of at most S sequences touch: each may start and end within one."""
    return min(tokens, tokens // block_size + 2 * min(rows, tokens))


def unpack(take: Callable[[str], jax.Array], key: StepKey, limits: Limits) -> AttentionPlan:
    """Returns the plan's arrays, inside a trace."""
    if key.tiled:
        return _tile(take, key.rows)
    decode = DecodePlan(*map(take, _DECODE))
    if not key.tokens:
        return AttentionPlan(decode, None)
    of_policy = {name: take(name) for name in _of_policy(limits)}
    return AttentionPlan(decode, ChunkPlan(*map(take, _CHUNK), **of_policy))


def _tile(take: Callable[[str], jax.Array], S: int) -> AttentionPlan:
    """Returns the plan of a tile, whose tokens are stored as decodes' are and attend as chunks of one."""
    position, each = take("position"), jnp.arange(S, dtype=jnp.int32)
    num_tiles = jnp.sum(position >= 0, dtype=jnp.int32)[None]
    chunk = ChunkPlan(each, take("tile_row"), position, None, num_tiles, take("table"), *[each] * 5)
    writes = (take(name) for name in _DECODE if name.startswith("write"))
    return AttentionPlan(DecodePlan(position, None, None, *writes), chunk)


def fill(
    views: dict[str, np.ndarray], plan: StepPlan, key: StepKey, limits: Limits, tables: BlockTables
) -> None:
    """Writes the plan's fields."""
    if key.tiled:
        _fill_tile(views, plan, limits.block_size, tables)
    elif plan.decodes:
        _decodes(views, plan, limits.block_size, tables, key.owners)
    else:
        views["owner"][...] = -1
    if plan.chunk_tokens and not key.tiled:
        _chunks(views, plan, key.tokens, limits, tables)


def _decodes(
    views: dict[str, np.ndarray], plan: StepPlan, size: int, tables: BlockTables, owners: int
) -> None:
    """Fills in where each row writes, and who owns each block that is read."""
    D, block_ids, counts = len(plan.decodes), tables.flat, tables.counts
    positions = np.asarray(plan.positions)
    starts = np.fromiter(accumulate(counts, initial=0), np.int64, D + 1)
    W = D - plan.idle  # rows that have ended are computed as padding and store nothing
    first_of = starts[:-1] - tables.firsts  # where each row's table would begin
    segment, local = tables.segments.locate(block_ids[first_of[:W] + positions[:W] // size])
    order = np.argsort(segment, kind="stable")
    views["write_row"][:W] = order
    views["write_block"][:W] = local[order]
    views["write_offset"][:W] = (positions[:W] % size)[order]
    views["write_ends"][:] = np.searchsorted(
        segment[order], np.arange(len(views["write_ends"])), side="right"
    )
    row_of = np.repeat(np.arange(D), counts)
    owner, logical = views["owner"], views["logical"]
    owner[...] = -1
    places = np.arange(len(block_ids)) - first_of[row_of]
    if tables.ids is not block_ids:
        there = block_ids != GONE
        block_ids, row_of, places = block_ids[there], row_of[there], places[there]
    logical[block_ids] = places
    if owners == 1:
        owner[block_ids, 0] = row_of
        return
    by_block = np.argsort(block_ids, kind="stable")
    sorted_blocks = block_ids[by_block]
    rank = np.arange(len(block_ids)) - np.searchsorted(sorted_blocks, sorted_blocks, side="left")
    owner[sorted_blocks, rank] = row_of[by_block]


def _fill_tile(views: dict[str, np.ndarray], plan: StepPlan, size: int, tables: BlockTables) -> None:
    """Fills in each token's block table, and where it is written."""
    rows, table_of, row_of = plan.placed(), views["table"], views["tile_row"]
    blocks = np.zeros(len(rows), np.int64)
    for i, (row, sequence, position) in enumerate(rows):
        table = tables.of(sequence)
        table_of[row, : len(table)] = np.maximum(table, 0)  # of what a window has left behind, any
        row_of[i], blocks[i] = row, table[position // size]
    segment, local = tables.segments.locate(blocks)
    order = np.argsort(segment, kind="stable")
    views["write_row"][: len(rows)] = order
    views["write_block"][: len(rows)] = local[order]
    views["write_offset"][: len(rows)] = [rows[i][2] % size for i in order]
    views["write_ends"][:] = np.searchsorted(
        segment[order], np.arange(len(views["write_ends"])), side="right"
    )


def _chunks(
    views: dict[str, np.ndarray], plan: StepPlan, tokens: int, limits: Limits, tables: BlockTables
) -> None:
    """Tiles (parts of one chunk to attend, or chunks in the plain form) and runs (parts of one block to
    write)."""
    table, tile, size, latent = views["table"], tile_rows(tokens), limits.block_size, limits.latent
    evicts, ended = "last_query" in views, 0
    tiles: list[tuple[int, int, int, int]] = []
    plain: list[tuple[int, int, int, int]] = []
    runs: list[tuple[int, int, int, int]] = []
    start, row = 0, len(plan.decodes)
    for chunk, forks in zip(plan.chunks, plan.forks, strict=True):
        sequence, first, end = chunk.sequence, chunk.start, chunk.start + chunk.count
        blocks = tables.of(sequence)
        table[row, : len(blocks)] = np.maximum(blocks, 0)  # of what a window has left behind, any
        if evicts:
            kept = [FOREVER] if sequence.kept is None else sequence.kept.last_query
            views["last_query"][row] = FOREVER
            views["last_query"][row, : len(kept)] = kept
        if limits.kv_policy.weighs:
            views["weigh_from"][row] = end if sequence.kept is None else chunk.weigh_from
        if chunk.ends and limits.kv_policy.by_head:
            for name, value in zip(_ENDS, (row, start + chunk.count - 1, end), strict=True):
                views[name][ended] = value
            ended += 1
        whole = latent and limits.kv_policy.method == "none" and has_plain_chunks(tokens, latent)
        if latent and whole and takes_plain_form(latent, chunk.count, end):
            plain.append((start, row, first, chunk.count))
        else:
            parts = range(0, chunk.count, tile)
            tiles += [(start + i, row, first + i, min(tile, chunk.count - i)) for i in parts]
        position = first
        while position < end:
            count = min(size - position % size, end - position)
            runs.append((blocks[position // size], start + position - first, position % size, count))
            position += count
        start, row = start + chunk.count, row + 1 + len(forks)
    views["num_tiles"][:] = len(tiles), len(tiles + plain)
    for name, column in zip(_TILES, np.asarray(tiles + plain, np.int32).T, strict=True):
        views[name][: len(column)] = column
    block, *columns = np.asarray(runs, np.int64).T
    segment, local = tables.segments.locate(block)
    order = np.argsort(segment, kind="stable")
    for name, column in zip(_RUNS, (columns[0], local, columns[1], columns[2]), strict=True):
        views[name][: len(runs)] = column[order]
    views["run_ends"][:] = np.searchsorted(segment[order], np.arange(len(views["run_ends"])), side="right")
