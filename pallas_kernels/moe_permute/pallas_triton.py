"""`moe_permute` as Pallas kernels: counts, prefix sums and slots by comparing ids with experts, no sort.

    few assignments   one launch: each program counts all ids for itself, then places its own
    many              a launch that counts tile by tile, and one that adds the counts up and places
    many experts      so, by tiles of experts; a launch between the two adds up how many slots each tile takes

Ranks within a tile come from a cumulative sum of (assignment × expert) comparisons, so that nothing depends
on the order in which programs run. Every element of the result is written once, by one thread.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import cdiv, load, next_power_of_2, pallas_call, program_id, store, when
from pallas_kernels.groups import Permutation, padded_rows
from pallas_kernels.op import Problem

# Counting all ids in every program costs less than a second launch up to about here.
_ONE_LAUNCH = 1024
_LOOKUP = 64
# Experts that one program compares with; of more there is a program for each tile of them.
_LANES = 512


@dataclass(frozen=True)
class Config:
    """`tile` assignments a program, `sub` of them compared at once; powers of two, sub ≤ tile."""

    tile: int
    sub: int
    num_warps: int
    num_stages: int = 1


def heuristic(problem: Problem) -> Config:
    """Takes about 128 programs and 16 comparisons a thread: several arrays of them are alive at once."""
    A, E = int(problem["A"]), _lanes(int(problem["E"]))
    sub = max(8, min(64, 4096 // E))
    # Tiles of experts are programs enough, and each reads the counts of all tiles of assignments.
    tile = max(64, min(1024, next_power_of_2(cdiv(A, 32 if _tiles(int(problem["E"])) > 1 else 128))))
    return Config(tile, sub, num_warps=8 if sub * E >= 4096 else 4)


def space(problem: Problem) -> Iterable[Config]:
    """Tiles and warps."""
    best = heuristic(problem)
    seen = {best} | {
        Config(tile, sub, warps)
        for sub in (16, 32, 64)
        for tile in (64, 128, 256, 512, 1024)
        for warps in (4, 8)
        if sub * _lanes(int(problem["E"])) <= 8192
    }
    return sorted(seen, key=lambda c: (c.tile, c.sub, c.num_warps))


def _lanes(num_experts: int) -> int:
    return max(16, min(_LANES, next_power_of_2(num_experts)))


def _tiles(num_experts: int) -> int:
    return cdiv(num_experts, _LANES)


def _my_tile(num_experts: int) -> Any:
    """Returns which tile of experts a program is of, None where it is of all; not for a loop's body."""
    return program_id(1) if _tiles(num_experts) > 1 else None


def _experts(E: int, part: Any) -> jax.Array:
    """Returns int32 `[lanes]`: the experts of `_my_tile`; those from E on are none."""
    lane = jnp.arange(_lanes(E), dtype=jnp.int32)
    return lane if part is None else part * _LANES + lane


def _hits(ids_ref: Any, first: Any, sub: int, A: int, E: int, part: Any) -> tuple[jax.Array, ...]:
    """Assignments `[sub]` from `first` on, which exist, which go to no expert, and int32 `[sub, lanes]`:
    which goes where."""
    at = first + jnp.arange(sub, dtype=jnp.int32)
    ids = load(ids_ref.at[at], mask=at < A, other=E)
    ids = jnp.where((ids >= 0) & (ids < E), ids, -1)  # lanes past E are no experts
    expert = _experts(E, part)
    return at, at < A, ids < 0, (ids[:, None] == expert[None, :]).astype(jnp.int32)


def _count_kernel(ids_ref: Any, hist_ref: Any, *, tile: int, sub: int, A: int, E: int) -> None:
    me, part = program_id(0), _my_tile(E)

    def body(i: Any, total: jax.Array) -> jax.Array:
        return total + _hits(ids_ref, me * tile + i * sub, sub, A, E, part)[-1]

    total = jax.lax.fori_loop(0, tile // sub, body, jnp.zeros((sub, _lanes(E)), jnp.int32))
    expert = _experts(E, part)
    store(hist_ref.at[me, expert], jnp.sum(total, axis=0), mask=expert < E)


def _sum_kernel(hist_ref: Any, sums_ref: Any, *, block_m: int, **sizes: int) -> None:
    """Writes how many slots a tile of experts takes."""
    counts, _ = _totals(None, hist_ref, **sizes)
    used = jnp.sum((counts + (block_m - 1)) // block_m * block_m)
    store(sums_ref.at[program_id(1) + jnp.arange(1, dtype=jnp.int32)], jnp.full(1, used))


def _totals(ids_ref: Any, hist_ref: Any, *, n: int, tile: int, sub: int, A: int, E: int) -> tuple[Any, Any]:
    """Returns int32 `[lanes]` twice: assignments of each expert, and those in tiles before this program's."""
    me, part, lanes = program_id(0), _my_tile(E), _lanes(E)
    expert = _experts(E, part)

    def body(i: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, before = carry
        if hist_ref is None:
            at, *_, some = _hits(ids_ref, i * sub, sub, A, E, part)
            earlier = at < me * tile
        else:
            at = i * sub + jnp.arange(sub, dtype=jnp.int32)
            mask = (at < n)[:, None] & (expert < E)[None, :]
            some = load(hist_ref.at[at[:, None], expert[None, :]], mask=mask, other=0)
            earlier = at < me
        return total + some, before + jnp.where(earlier[:, None], some, 0)

    none = jnp.zeros((sub, lanes), jnp.int32)
    total, before = jax.lax.fori_loop(0, cdiv(A if hist_ref is None else n, sub), body, (none, none))
    return jnp.sum(total, axis=0), jnp.sum(before, axis=0)


def _place_kernel(
    *refs: Any,
    n: int,
    tile: int,
    sub: int,
    A: int,
    E: int,
    k: int,
    P: int,
    block_m: int,
    counted: bool,
    weighted: bool,
) -> None:
    ids_ref, hist_ref = (refs[0], refs[1]) if counted else (refs[0], None)
    tiles = _tiles(E)
    given = 1 + counted + (tiles > 1)
    outputs = refs[given + weighted :]
    row_ref, block_ref, num_ref, counts_ref, slot_ref, token_ref, own_ref = outputs[:7]
    me, part, lanes = program_id(0), _my_tile(E), _lanes(E)
    expert = _experts(E, part)
    counts, before = _totals(ids_ref, hist_ref, n=n, tile=tile, sub=sub, A=A, E=E)
    padded = (counts + (block_m - 1)) // block_m * block_m
    ends = jax.lax.cumsum(padded, axis=0)
    starts, used = ends - padded, jnp.sum(padded)
    worker, workers = me, n
    if part is not None:
        # Behind the slots of the tiles before this one; `own` is what this tile takes.
        each, own = jnp.arange(next_power_of_2(tiles), dtype=jnp.int32), used
        sums = load(refs[2].at[each], mask=each < tiles, other=0)
        low, used = jnp.sum(jnp.where(each < part, sums, 0)), jnp.sum(sums)
        starts, ends = starts + low, ends + low
        worker, workers = me + n * part, n * tiles

    def put(slot: jax.Array, assignment: jax.Array, mask: jax.Array) -> None:
        """Stores what these slots hold: an assignment, or A, which is padding."""
        filled = assignment < A
        store(row_ref.at[slot], assignment, mask=mask)
        store(token_ref.at[slot], assignment // k, mask=mask)
        store(own_ref.at[slot], jnp.where(filled, slot, P), mask=mask)
        if weighted:
            weight = load(refs[given].at[assignment], mask=mask & filled, other=0.0)
            store(outputs[7].at[slot], weight, mask=mask)

    def place(i: Any, base: jax.Array) -> jax.Array:
        at, exists, nowhere, hit = _hits(ids_ref, me * tile + i * sub, sub, A, E, part)
        rank = base[None, :] + jax.lax.cumsum(hit, axis=0) - 1
        local = jnp.sum(hit, axis=1) > 0
        slot = jnp.where(local, jnp.sum(hit * rank, axis=1), P)
        # What no tile has is the first one's to write.
        here = exists if part is None else exists & (local | nowhere & (part == 0))
        store(slot_ref.at[at], slot, mask=here)
        put(slot, at, exists & local)
        return base + jnp.sum(hit, axis=0)

    jax.lax.fori_loop(0, tile // sub, place, starts + before)

    # The rest is spread over the programs: padding inside the groups, slots after the last, the block table.
    def pad(i: Any, _: None) -> None:
        j = me + i * n
        padding = (j < padded - counts) & (expert < E)
        put(starts + counts + j, jnp.full(lanes, A, jnp.int32), padding)

    def empty(i: Any, _: None) -> None:
        p = used + (worker + i * workers) * 256 + jnp.arange(256, dtype=jnp.int32)
        put(p, jnp.full(256, A, jnp.int32), p < P)

    def look_up(i: Any, _: None) -> None:
        b = (me + i * n) * _LOOKUP + jnp.arange(_LOOKUP, dtype=jnp.int32)
        first = b * block_m
        # The expert of a block: how many experts end before it starts.
        done = ((first[:, None] >= ends[None, :]) & (expert < E)[None, :]).astype(jnp.int32)
        found = jnp.where(first < used, jnp.sum(done, axis=1), 0)
        mine = b < P // block_m
        if part is not None:
            found = jnp.where(first < used, found + part * _LANES, 0)
            within = (first >= low) & (first < low + own)
            mine &= within | (first >= used) & (part == 0)
        store(block_ref.at[b], found, mask=mine)

    jax.lax.fori_loop(0, cdiv(block_m, n), pad, None)
    jax.lax.fori_loop(0, cdiv(P, 256 * workers), empty, None)
    jax.lax.fori_loop(0, cdiv(P // block_m, _LOOKUP * n), look_up, None)

    @when(me == 0)
    def _() -> None:
        store(counts_ref.at[expert], counts, mask=expert < E)
        # Of several tiles the last one's programs write it.
        first = jnp.arange(1, dtype=jnp.int32)
        last = None if part is None else jnp.full(1, part == tiles - 1)
        store(num_ref.at[first], jnp.full(1, used // block_m, jnp.int32), mask=last)


def moe_permute_pallas(
    ids: jax.Array,
    *,
    num_experts: int,
    block_m: int,
    weights: jax.Array | None = None,
    config: Config,
    interpret: bool | None = None,
) -> Permutation:
    """See `moe_permute_reference`."""
    T, k = ids.shape
    A, E = T * k, num_experts
    P = padded_rows(A, E, block_m)
    flat = ids.reshape(A)
    n = cdiv(A, config.tile)
    sizes = {"tile": config.tile, "sub": config.sub, "A": A, "E": E}
    options: dict[str, Any] = {
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "interpret": interpret,
    }
    inputs = [flat]
    tiles = _tiles(E)
    grid = (n,) if tiles == 1 else (n, tiles)
    if A > _ONE_LAUNCH or tiles > 1:
        count = pallas_call(
            functools.partial(_count_kernel, **sizes),
            name="moe_permute_count",
            grid=grid,
            out_shape=jax.ShapeDtypeStruct((n, E), jnp.int32),
            **options,
        )
        inputs.append(count(flat))
    static: dict[str, Any] = {"k": k, "P": P, "block_m": block_m, "counted": len(inputs) == 2, **sizes}
    if tiles > 1:
        total = pallas_call(
            functools.partial(_sum_kernel, n=n, block_m=block_m, **sizes),
            name="moe_permute_sum",
            grid=(1, tiles),
            out_shape=jax.ShapeDtypeStruct((tiles,), jnp.int32),
            **options,
        )
        inputs.append(total(inputs[1]))
    out = [jax.ShapeDtypeStruct((m,), jnp.int32) for m in (P, P // block_m, 1, E, A, P, P)]
    if weights is not None:
        inputs.append(weights.reshape(A))
        out.append(jax.ShapeDtypeStruct((P,), weights.dtype))
    place = pallas_call(
        functools.partial(_place_kernel, n=n, weighted=weights is not None, **static),
        name="moe_permute_place",
        grid=grid,
        out_shape=out,
        **options,
    )
    rows, blocks, number, counts, slots, tokens, own, *of_slots = place(*inputs)
    return Permutation(
        rows, blocks, number, counts, slots.reshape(T, k), tokens, own, of_slots[0] if of_slots else None
    )
