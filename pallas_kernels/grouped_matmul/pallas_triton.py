"""`grouped_matmul` as a Pallas kernel: one program a (block, f-tile), see `pallas_kernels.grouped_tiles`."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import cdiv, dot, load, pallas_call, program_id, store, when
from pallas_kernels.grouped_tiles import (
    Config,
    candidates,
    load_rows,
    load_weights,
    out_mask,
    place,
    read_tile,
)
from pallas_kernels.op import Problem


def heuristic(problem: Problem) -> Config:
    """Gets enough bytes under way for few rows a block, and keeps the tensor cores busy for many."""
    block_m, D, F = int(problem["block_m"]), int(problem["D"]), int(problem["F"])
    blocks = int(problem["P"]) // block_m
    if problem["dtype"] == "float32":
        return Config(32 if block_m <= 64 else 16, 32, 1 if block_m <= 32 else 8, 4, 3)
    if block_m <= 32:
        # 128 bytes a row of weights, or 64 where that would leave multiprocessors idle.
        narrow = blocks * cdiv(F, 64) < 2 * 108
        deep = narrow and D >= 1024 and block_m == 16
        return Config(32 if narrow else 64, 256 if deep else 128, 1, 4, 4)
    if block_m == 64:
        return Config(128, 64, 16, 4, 4)
    return Config(128, 64, 8, 8, 4)


def space(problem: Problem) -> Iterable[Config]:
    """Tiles, warps and stages; wider tiles where there are many rows."""
    widths = (32, 64, 128) if int(problem["block_m"]) <= 32 else (64, 128, 256)
    return candidates(problem, heuristic(problem), widths, matrices=1)


def _kernel(*refs: Any, config: Config, block_m: int, n_tiles: int, scaled: bool) -> None:
    x_ref, w_ref, rows_ref, block_ref, num_ref = refs[:5]
    scale_ref, out_ref = refs[5] if scaled else None, refs[-1]
    R, D = x_ref.shape
    F, block_k = w_ref.shape[2], config.block_k
    pid = program_id(0)
    used = num_ref[0]

    @when(pid < used * n_tiles)
    def _() -> None:
        block, f = place(pid, used, n_tiles, config.group)
        tile = read_tile(rows_ref, block_ref, block, f, R=R, block_m=block_m, block_n=config.block_n)

        def body(i: Any, acc: jax.Array) -> jax.Array:
            x = load_rows(x_ref, tile, i * block_k, block_k)
            return acc + dot(x, load_weights(w_ref, tile, i * block_k, block_k))

        acc = jnp.zeros((block_m, config.block_n), jnp.float32)
        acc = jax.lax.fori_loop(0, cdiv(D, block_k), body, acc)
        if scale_ref is not None:
            acc = acc * load(scale_ref.at[tile.slots])[:, None]
        at = out_ref.at[tile.slots[:, None], tile.cols[None, :]]
        store(at, acc.astype(out_ref.dtype), mask=out_mask(tile, F))


def grouped_matmul_pallas(
    x: jax.Array,
    w: jax.Array,
    rows: jax.Array,
    block_expert: jax.Array,
    num_blocks: jax.Array,
    *,
    block_m: int,
    row_scale: jax.Array | None = None,
    out_dtype: Any = None,
    config: Config,
    interpret: bool | None = None,
) -> jax.Array:
    """See `grouped_matmul_reference`. Undefined elements are not written."""
    P, F = rows.shape[0], w.shape[2]
    n_tiles = cdiv(F, config.block_n)
    inputs = [x, w, rows, block_expert, num_blocks]
    if row_scale is not None:
        inputs.append(row_scale)
    kernel = functools.partial(
        _kernel, config=config, block_m=block_m, n_tiles=n_tiles, scaled=row_scale is not None
    )
    return pallas_call(
        kernel,
        name="grouped_matmul",
        grid=(P // block_m * n_tiles,),
        out_shape=jax.ShapeDtypeStruct((P, F), x.dtype if out_dtype is None else out_dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(*inputs)
