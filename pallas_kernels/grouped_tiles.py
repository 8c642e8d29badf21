"""Shared parts of the tiled products over groups: a program's tile, the reduction's loads, defaults.

out[block, f-tile]   one program: rows of one block, gathered from x, times a column of tiles of its
                     expert's weights, which stream through shared memory along the reduction
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels._compat import load
from pallas_kernels.op import Problem


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
        block, expert: int32 scalars.
        slots, rows: int32 `[block_m]`; made: bool, the slots that hold a row of x.
        cols: int32 `[block_n]`.
    """

    block: jax.Array
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


def read_tile(
    rows_ref: Any, block_ref: Any, block: jax.Array, f: jax.Array, *, R: int, block_m: int, block_n: int
) -> Tile:
    """Reads the tile of a program: its block's expert, slots, rows and columns."""
    slots = block * block_m + jnp.arange(block_m, dtype=jnp.int32)
    rows = load(rows_ref.at[slots])
    cols = f * block_n + jnp.arange(block_n, dtype=jnp.int32)
    return Tile(block, load(block_ref.at[block]), slots, rows, (rows >= 0) & (rows < R), cols)


def load_rows(x_ref: Any, tile: Tile, first: jax.Array, block_k: int) -> jax.Array:
    """Loads `x[rows, first : first + block_k]`, 0 in padding: masked rows are not read from memory."""
    D = x_ref.shape[1]
    k = first + jnp.arange(block_k, dtype=jnp.int32)
    mask = tile.filled[:, None]
    if D % block_k:
        mask = mask & (k < D)[None, :]
    return load(x_ref.at[tile.rows[:, None], k[None, :]], mask=mask, other=0.0)


def load_weights(w_ref: Any, tile: Tile, first: jax.Array, block_k: int) -> jax.Array:
    """Loads `w[expert, first : first + block_k, cols]`, 0 outside."""
    _, D, F = w_ref.shape
    k = first + jnp.arange(block_k, dtype=jnp.int32)
    at = w_ref.at[tile.expert, k[:, None], tile.cols[None, :]]
    mask = None
    if D % block_k:
        mask = (k < D)[:, None] & jnp.full(tile.cols.shape, True)[None, :]
    if F % tile.cols.shape[0]:
        inside = (tile.cols < F)[None, :]
        mask = inside & jnp.full(k.shape, True)[:, None] if mask is None else mask & inside
    return load(at) if mask is None else load(at, mask=mask, other=0.0)


def out_mask(tile: Tile, F: int) -> jax.Array:
    """Returns the mask of what the program writes: everything but padding."""
    mask = tile.filled[:, None] & jnp.full(tile.cols.shape, True)[None, :]
    return mask & (tile.cols < F)[None, :] if F % tile.cols.shape[0] else mask
