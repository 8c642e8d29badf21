"""The kernel behind the products over groups: blocks of rows of x with one matrix, or with two (SwiGLU).

out[block, f-tile]   one program: rows of one block, gathered from x, times a column of tiles of its
                     expert's weights, which stream through shared memory along the reduction
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._compat import both, cdiv, dot, load, pallas_call, program_id, store, when
from pallas_kernels.groups import Activation, gated
from pallas_kernels.op import Problem

FEW_ROWS_GROUP = 4
"""`Config.group` for blocks of at most 32 rows: an expert with more rows than one block has is several. Taken
one after the other each would read its weights from memory anew, a wave of programs apart; side by side they
find them in L2. Where every expert has one block it costs nothing."""


@dataclass(frozen=True)
class Config:
    """`block_n` columns and `block_k` rows of each weight's tile; `group` blocks share f-tiles (`place`)."""

    block_n: int
    block_k: int
    group: int
    num_warps: int
    num_stages: int


def candidates(problem: Problem, best: Config, widths: Sequence[int], *, matrices: int) -> list[Config]:
    """Returns `best` and the tiles that fit shared memory and a thread's registers.

    Args:
        widths: values of `block_n`. matrices: weights that a program multiplies with.
    """
    block_m, seen = int(problem["block_m"]), {best}
    size = 4 if problem["dtype"] == "float32" else 2
    for block_n in widths:
        for block_k in (64, 128, 256) if block_m <= 32 else (32, 64):
            for warps in (4, 8):
                for stages in (3, 4, 5):
                    fits = size * stages * block_k * (matrices * block_n + block_m) <= 160 * 1024
                    wide = block_m * matrices * block_n <= 128 * 32 * warps  # accumulators of a thread
                    if fits and wide and size == 2:
                        seen.add(Config(block_n, block_k, best.group, warps, stages))
    return sorted(seen, key=lambda c: (c.block_n, c.block_k, c.num_warps, c.num_stages))


class Tile(NamedTuple):
    """A program's part of the output.

    Attributes:
        expert: int32 scalar.
        slots, rows: int32 `[block_m]`; filled: bool, the slots that hold a row of x.
        cols: int32 `[block_n]`.
    """

    expert: jax.Array
    slots: jax.Array
    rows: jax.Array
    filled: jax.Array
    cols: jax.Array


def place(pid: jax.Array, used: jax.Array, n_tiles: int, group: int) -> tuple[jax.Array, jax.Array]:
    """Returns (block, f-tile) of a program below `used · n_tiles`.

    Programs run roughly in order. `group` neighbouring blocks are taken together, one f-tile after the other,
    so that blocks of one expert share its weights in L2, and the group's rows of x stay there, too.
    """
    if group == 1:
        return jax.lax.div(pid, n_tiles), jax.lax.rem(pid, n_tiles)
    first = jax.lax.div(pid, group * n_tiles) * group
    within = jax.lax.rem(pid, group * n_tiles)
    height = jnp.minimum(used - first, group)
    return first + jax.lax.rem(within, height), jax.lax.div(within, height)


def _read_tile(
    rows_ref: Any, block_ref: Any, block: jax.Array, f: jax.Array, *, R: int, block_m: int, block_n: int
) -> Tile:
    """Reads the tile of a program: its block's expert, slots, rows and columns."""
    slots = block * block_m + jnp.arange(block_m, dtype=jnp.int32)
    rows = load(rows_ref.at[slots])
    cols = f * block_n + jnp.arange(block_n, dtype=jnp.int32)
    return Tile(load(block_ref.at[block]), slots, rows, (rows >= 0) & (rows < R), cols)


def _load_rows(x_ref: Any, tile: Tile, first: jax.Array, block_k: int) -> jax.Array:
    """Loads `x[rows, first : first + block_k]`, 0 in padding: masked rows are not read from memory."""
    D = x_ref.shape[1]
    k = first + jnp.arange(block_k, dtype=jnp.int32)
    mask = both(tile.filled[:, None], (k < D)[None, :] if D % block_k else None)
    return load(x_ref.at[tile.rows[:, None], k[None, :]], mask=mask, other=0.0)


def _load_weights(w_ref: Any, tile: Tile, first: jax.Array, block_k: int) -> jax.Array:
    """Loads `w[expert, first : first + block_k, cols]`, 0 outside."""
    _, D, F = w_ref.shape
    k = first + jnp.arange(block_k, dtype=jnp.int32)
    at = w_ref.at[tile.expert, k[:, None], tile.cols[None, :]]
    mask = both(
        (k < D)[:, None] if D % block_k else None,
        (tile.cols < F)[None, :] if F % tile.cols.shape[0] else None,
    )
    return load(at, mask=mask, other=0.0)


def _kernel(
    *refs: Any,
    matrices: int,
    biases: int,
    config: Config,
    block_m: int,
    n_tiles: int,
    activation: Activation | None,
) -> None:
    x_ref, weight_refs = refs[0], refs[1 : 1 + matrices]
    rows_ref, block_ref, num_ref, *others, out_ref = refs[1 + matrices :]
    bias_refs, scale_ref = others[:biases], others[biases:]
    R, D = x_ref.shape
    F, block_k = out_ref.shape[1], config.block_k
    pid = program_id(0)
    used = num_ref[0]

    @when(pid < used * n_tiles)
    def _() -> None:
        block, f = place(pid, used, n_tiles, config.group)
        tile = _read_tile(rows_ref, block_ref, block, f, R=R, block_m=block_m, block_n=config.block_n)

        def body(i: Any, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            x = _load_rows(x_ref, tile, i * block_k, block_k)
            pairs = zip(sums, weight_refs, strict=True)
            return tuple(total + dot(x, _load_weights(w, tile, i * block_k, block_k)) for total, w in pairs)

        zero = jnp.zeros((block_m, config.block_n), jnp.float32)
        sums = jax.lax.fori_loop(0, cdiv(D, block_k), body, (zero,) * matrices)
        inside = tile.cols < F if F % config.block_n else None
        if bias_refs:
            added = [load(ref.at[tile.expert, tile.cols], mask=inside, other=0.0) for ref in bias_refs]
            sums = tuple(s + b.astype(jnp.float32)[None, :] for s, b in zip(sums, added, strict=True))
        out = sums[0] if activation is None else gated(activation)(*sums)
        if scale_ref:
            out = out * load(scale_ref[0].at[tile.slots])[:, None]
        at = out_ref.at[tile.slots[:, None], tile.cols[None, :]]
        # Everything but padding.
        mask = both(tile.filled[:, None], None if inside is None else inside[None, :])
        store(at, out.astype(out_ref.dtype), mask=mask)


def grouped_product(
    name: str,
    x: jax.Array,
    matrices: Sequence[jax.Array],
    table: tuple[jax.Array, jax.Array, jax.Array],
    config: Config,
    *,
    block_m: int,
    biases: Sequence[jax.Array] = (),
    row_scale: jax.Array | None = None,
    activation: Activation | None = None,
    out_dtype: Any,
    interpret: bool | None,
) -> jax.Array:
    """Returns `[P, F]`; undefined elements are not written.

    Args:
        matrices: one; or gate and up, with `activation`.
        table: rows, block_expert and num_blocks.
        biases: `[E, F]` of each matrix, or none.
    """
    P, F = table[0].shape[0], matrices[0].shape[2]
    n_tiles = cdiv(F, config.block_n)
    static: dict[str, Any] = {"matrices": len(matrices), "biases": len(biases)}
    static |= {"config": config, "activation": activation}
    return pallas_call(
        functools.partial(_kernel, block_m=block_m, n_tiles=n_tiles, **static),
        name=name,
        grid=(P // block_m * n_tiles,),
        out_shape=jax.ShapeDtypeStruct((P, F), out_dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(x, *matrices, *table, *biases, *([] if row_scale is None else [row_scale]))
