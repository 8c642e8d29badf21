"""The kernel behind every quantized product: blocks of rows of x with one matrix, or with two (SwiGLU).

A program makes a tile `[block_m, block_n]` of the output, of one block and one part of the reduction. With
the reduction split, parts go out in float32 and are summed afterwards: a decode step of few experts has too
few tiles to keep all of a GPU's memory busy.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import both, cdiv, load, pallas_call, program_id, should_interpret, store, when
from pallas_kernels.grouped_tiles import FEW_ROWS_GROUP, place
from pallas_kernels.groups import Activation, gated
from pallas_kernels.qformats import QuantizedTensor
from pallas_kernels.quantized_grouped_matmul.tiles import Weight, reduce_tiles


@dataclass(frozen=True)
class Tile:
    """Sizes of a program's work: powers of two; `split_k` parts of the reduction."""

    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int


def _kernel(
    *args: Any,
    names: tuple[str, ...],
    tile: Tile,
    matrices: Sequence[QuantizedTensor],
    activation: Activation | None,
    ptx: bool,
) -> None:
    refs = dict(zip(names, args, strict=True))
    x_ref, out_ref = refs["x"], refs["out"]
    R, D = x_ref.shape
    F = matrices[0].shape[-1]
    bm, bn = tile.block_m, tile.block_n
    total, n_tiles = cdiv(D, tile.block_k), cdiv(F, bn)
    grouped = "rows" in refs
    # Interpretation knows program_id outside of conditionals only.
    pid, part = program_id(0), program_id(1) if tile.split_k > 1 else 0
    group, used = FEW_ROWS_GROUP if bm <= 32 else 8, cdiv(R, bm)
    if grouped:
        used = refs["num_blocks"][0]
    else:
        group = min(group, used)

    def work() -> None:
        block, n = place(pid, used, n_tiles, group)
        slots = block * bm + jnp.arange(bm)
        rows = load(refs["rows"].at[slots]) if grouped else slots
        lead = (load(refs["block_expert"].at[block]),) if grouped else ()
        valid = (rows >= 0) & (rows < R) if grouped or R % bm else None

        def x_tile(k: Any, count: int) -> jax.Array:
            at = k + jnp.arange(count)
            rows_mask = None if valid is None else valid[:, None]
            mask = both(rows_mask, (at < D)[None, :] if D % tile.block_k else None)
            return load(x_ref.at[rows[:, None], at[None, :]], mask=mask, other=0)

        tile_at = (lead, n * bn, bn, tile.block_k, D, F, ptx)
        weights = [
            Weight(w.format, refs[f"values{i}"], refs[f"scales{i}"], refs.get(f"zeros{i}"), *tile_at)
            for i, w in enumerate(matrices)
        ]
        first, steps = 0, total
        if tile.split_k > 1:
            per = cdiv(total, tile.split_k)
            first = part * per
            steps = jnp.clip(total - first, 0, per)
        sums = reduce_tiles(x_tile, weights, first, steps, bm, x_ref.dtype)
        if "x_scale" in refs:
            x_scale = load(refs["x_scale"].at[rows], mask=valid, other=0.0)
            sums = tuple(s * x_scale[:, None] for s in sums)
        out, inside = weights[0].outputs()
        if "bias0" in refs:
            ref = lambda i: refs[f"bias{i}"].at[(*lead, out)]  # noqa: E731
            added = [load(ref(i), mask=inside, other=0.0).astype(jnp.float32) for i in range(len(sums))]
            if tile.split_k > 1:  # the first part has it
                added = [jnp.where(part == 0, bias, 0.0) for bias in added]
            sums = tuple(s + bias[None, :] for s, bias in zip(sums, added, strict=True))
        rows_mask = (slots < R)[:, None] if not grouped and R % bm else None
        mask = both(None if inside is None else inside[None, :], rows_mask)
        if tile.split_k > 1:
            for i, s in enumerate(sums):
                at = (i, part, slots[:, None], out[None, :])
                store(out_ref.at[at], s, mask=mask)
            return
        result = sums[0] if activation is None else gated(activation)(*sums)
        if "row_scale" in refs:
            result = result * load(refs["row_scale"].at[slots]).astype(jnp.float32)[:, None]
        store(out_ref.at[slots[:, None], out[None, :]], result.astype(out_ref.dtype), mask=mask)

    if grouped:
        when(pid < used * n_tiles)(work)
    else:
        work()


def product(
    name: str,
    x: jax.Array,
    matrices: Sequence[QuantizedTensor],
    tile: Tile,
    *,
    table: tuple[jax.Array, jax.Array, jax.Array] | None = None,
    biases: Sequence[jax.Array | None] = (),
    row_scale: jax.Array | None = None,
    x_scale: jax.Array | None = None,
    activation: Activation | None = None,
    out_dtype: Any,
    interpret: bool | None,
) -> jax.Array:
    """Returns `[P, F]` with a table, `[R, F]` without.

    Args:
        x: `[R, D]`, int8 with x_scale float32 `[R]` for `w8a8`.
        matrices: one; or gate and up, with `activation`.
        table: rows, block_expert and num_blocks; see `pallas_kernels.groups`.
        biases: `[E, F]` of each matrix, or none of any.
    """
    F = matrices[0].shape[-1]
    count = len(x) if table is None else len(table[0])
    given = dict(zip(("rows", "block_expert", "num_blocks"), table or (), strict=False)) | {"x": x}
    for i, w in enumerate(matrices):
        given |= {f"values{i}": w.values, f"scales{i}": w.scales}
        if w.zeros is not None:
            given[f"zeros{i}"] = w.zeros
    given |= {f"bias{i}": bias for i, bias in enumerate(biases) if bias is not None}
    if x_scale is not None:
        given["x_scale"] = x_scale
    split = tile.split_k > 1
    if row_scale is not None and not split:
        given["row_scale"] = row_scale
    programs = cdiv(F, tile.block_n) * cdiv(count, tile.block_m)
    shape = (len(matrices), tile.split_k, count, F) if split else (count, F)
    kernel = functools.partial(
        _kernel,
        names=(*given, "out"),
        tile=tile,
        matrices=matrices,
        activation=activation,
        ptx=not should_interpret(interpret),
    )
    out = pallas_call(
        kernel,
        name=f"{name}_{matrices[0].format.name}",
        grid=(programs, tile.split_k) if split else (programs,),
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32 if split else out_dtype),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        interpret=interpret,
    )(*given.values())
    return _join(out, row_scale, activation, out_dtype) if split else out


def _join(
    parts: jax.Array, row_scale: jax.Array | None, activation: Activation | None, out_dtype: Any
) -> jax.Array:
    """Returns the parts of a split reduction, in their order."""
    sums = parts.sum(axis=1)
    result = sums[0] if activation is None else gated(activation)(*sums)
    if row_scale is not None:
        result = result * row_scale.astype(jnp.float32)[:, None]
    return result.astype(out_dtype)
