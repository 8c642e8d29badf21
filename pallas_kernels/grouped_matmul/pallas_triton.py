"""`grouped_matmul` as a Pallas kernel: one program a (block, f-tile), see `pallas_kernels.grouped_tiles`."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from pallas_kernels._compat import cdiv
from pallas_kernels.grouped_tiles import FEW_ROWS_GROUP, Config, candidates, grouped_product
from pallas_kernels.op import Problem


def heuristic(problem: Problem) -> Config:
    """Gets enough bytes under way for few rows a block, and keeps the tensor cores busy for many."""
    block_m, D, F = int(problem["block_m"]), int(problem["D"]), int(problem["F"])
    blocks = int(problem["P"]) // block_m
    group = FEW_ROWS_GROUP if block_m <= 32 else 8
    if problem["dtype"] == "float32":
        return Config(32 if block_m <= 64 else 16, 32, group, 4, 3)
    if block_m <= 32:
        # 128 bytes a row of weights, or 64 where that would leave multiprocessors idle.
        narrow = blocks * cdiv(F, 64) < 2 * 108
        deep = narrow and D >= 1024 and block_m == 16
        return Config(32 if narrow else 64, 256 if deep else 128, group, 4, 4)
    if block_m == 64:
        return Config(128, 64, 16, 4, 4)
    return Config(128, 64, group, 8, 4)


def space(problem: Problem) -> Iterable[Config]:
    """Tiles, warps and stages; wider tiles where there are many rows."""
    widths = (32, 64, 128) if int(problem["block_m"]) <= 32 else (64, 128, 256)
    return candidates(problem, heuristic(problem), widths, matrices=1)


def grouped_matmul_pallas(
    x: jax.Array,
    w: jax.Array,
    rows: jax.Array,
    block_expert: jax.Array,
    num_blocks: jax.Array,
    *,
    block_m: int,
    bias: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    out_dtype: Any = None,
    config: Config,
    interpret: bool | None = None,
    product: Callable[..., jax.Array] = grouped_product,
) -> jax.Array:
    """See `grouped_matmul_reference`. Undefined elements are not written. `product`: also the twin's."""
    table = (rows, block_expert, num_blocks)
    options: dict[str, Any] = {"block_m": block_m, "row_scale": row_scale, "interpret": interpret}
    options |= {} if bias is None else {"biases": (bias,)}
    return product(
        "grouped_matmul",
        x,
        (w,),
        table,
        config,
        out_dtype=x.dtype if out_dtype is None else out_dtype,
        **options,
    )
