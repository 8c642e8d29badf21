"""`quantized_matmul` with the grouped products' kernel: every block has the one matrix."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import next_power_of_2
from pallas_kernels.op import Problem
from pallas_kernels.qformats import Format, QuantizedTensor
from pallas_kernels.quantized_grouped_matmul.convert import dequantize_pallas
from pallas_kernels.quantized_grouped_matmul.pallas_triton import (
    activations,
    fused_tile,
    once_pays,
    out_type,
    tiles,
)
from pallas_kernels.quantized_grouped_matmul.product import Tile, product


@dataclass(frozen=True)
class Config:
    """A program's tile, parts of the reduction.

    `mode`: "fused" or "dequantize_once", see `pallas_kernels.quantized_grouped_matmul.pallas_triton`.
    """

    mode: str
    block_m: int
    block_n: int
    block_k: int
    split_k: int
    num_warps: int
    num_stages: int


def heuristic(problem: Problem) -> Config:
    """Blocks as high as the rows need, up to 64, or 128 where nothing is decoded."""
    fmt, T = Format.of(problem), int(problem["T"])
    wide = problem["dtype"] == "float32"
    most = 128 if fmt.kind == "w8a8" else 64
    block_m = 16 if wide else min(most, max(16, next_power_of_2(T)))
    D, F = int(problem["D"]), int(problem["F"])
    tile = fused_tile(fmt, block_m, -(-T // block_m), D, F, 1, wide)
    return Config(
        "dequantize_once" if once_pays(fmt, T, str(problem.get("device", ""))) else "fused", block_m, *tile
    )


def space(problem: Problem) -> Iterable[Config]:
    """Returns both modes, with tiles for two heights of blocks."""
    fmt, T, best = Format.of(problem), int(problem["T"]), heuristic(problem)
    seen = {best}
    if fmt.kind != "w8a8":
        seen |= {replace(best, mode=mode) for mode in ("fused", "dequantize_once")}
    for block_m in {best.block_m, max(16, best.block_m // 2)}:
        for tile in tiles(fmt, block_m, -(-T // block_m), int(problem["F"]), 1):
            seen.add(Config("fused", block_m, *tile))
    return sorted(seen, key=lambda c: tuple(vars(c).values()))


def quantized_matmul_pallas(
    x: jax.Array,
    w: QuantizedTensor,
    *,
    x_scale: jax.Array | None = None,
    out_dtype: Any = None,
    config: Config,
    interpret: bool | None = None,
) -> jax.Array:
    """See `quantized_matmul_reference`."""
    out = out_type(x, out_dtype)
    if config.mode == "dequantize_once":
        matrix = dequantize_pallas(w, x.dtype, interpret=interpret)
        return jnp.matmul(x, matrix, preferred_element_type=jnp.float32).astype(out)
    x, x_scale = activations(x, x_scale, w.format, interpret)
    c = config
    return product(
        "quantized_matmul",
        x,
        (w,),
        Tile(c.block_m, c.block_n, c.block_k, c.split_k, c.num_warps, c.num_stages),
        x_scale=x_scale,
        out_dtype=out,
        interpret=interpret,
    )
