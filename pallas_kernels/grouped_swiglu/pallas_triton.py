"""`grouped_swiglu` as a Pallas kernel: `grouped_matmul`'s tiles with two weights and one pass over x."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from pallas_kernels._compat import cdiv
from pallas_kernels.grouped_tiles import FEW_ROWS_GROUP, Config, candidates, grouped_product
from pallas_kernels.groups import Activation
from pallas_kernels.op import Problem


def heuristic(problem: Problem) -> Config:
    """Gets enough bytes under way for few rows a block, and keeps the tensor cores busy for many."""
    block_m, F = int(problem["block_m"]), int(problem["F"])
    blocks = int(problem["P"]) // block_m
    group = FEW_ROWS_GROUP if block_m <= 32 else 8
    if problem["dtype"] == "float32":
        return Config(32 if block_m <= 32 else 16, 32, group, 4, 3)
    if block_m <= 32:
        # 128 bytes a row of weights, or 64 where that would leave multiprocessors idle.
        narrow = blocks * cdiv(F, 64) < 2 * 108
        return Config(32 if narrow else 64, 128 if narrow else 64, group, 4, 4)
    # 128 registers a thread, so that one program's epilogue hides behind another's products.
    return Config(64, 64, 16, 4, 3) if block_m == 64 else Config(64, 64, group, 8, 3)


def space(problem: Problem) -> Iterable[Config]:
    """Tiles, warps and stages."""
    return candidates(problem, heuristic(problem), (32, 64, 128), matrices=2)


def grouped_swiglu_pallas(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    rows: jax.Array,
    block_expert: jax.Array,
    num_blocks: jax.Array,
    *,
    block_m: int,
    gate_bias: jax.Array | None = None,
    up_bias: jax.Array | None = None,
    activation: Activation = "silu",
    config: Config,
    interpret: bool | None = None,
    product: Callable[..., jax.Array] = grouped_product,
) -> jax.Array:
    """See `grouped_swiglu_reference`. Undefined elements are not written. `product`: also the twin's."""
    table = (rows, block_expert, num_blocks)
    options: dict[str, Any] = {"block_m": block_m, "activation": activation, "interpret": interpret}
    if gate_bias is not None:
        options["biases"] = (gate_bias, up_bias)
    return product("grouped_swiglu", x, (gate, up), table, config, out_dtype=x.dtype, **options)
