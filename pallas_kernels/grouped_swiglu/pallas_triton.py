"""`grouped_swiglu` as a Pallas kernel: `grouped_matmul`'s tiles with two weights and one pass over x."""

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._compat import cdiv, dot, pallas_call, program_id, store, when
from pallas_kernels.grouped_tiles import (
    Config,
    candidates,
    load_rows,
    load_weights,
    out_mask,
    place,
    read_tile,
)
from pallas_kernels.groups import ACTIVATIONS
from pallas_kernels.op import Problem


def heuristic(problem: Problem) -> Config:
    """Gets enough bytes under way for few rows a block, and keeps the tensor cores busy for many."""
    block_m, F = int(problem["block_m"]), int(problem["F"])
    blocks = int(problem["P"]) // block_m
    if problem["dtype"] == "float32":
        return Config(32 if block_m <= 32 else 16, 32, 1 if block_m <= 32 else 8, 4, 3)
    if block_m <= 32:
        # 128 bytes a row of weights, or 64 where that would leave multiprocessors idle.
        narrow = blocks * cdiv(F, 64) < 2 * 108
        return Config(32 if narrow else 64, 128 if narrow else 64, 1, 4, 4)
    # 128 registers a thread, so that one program's epilogue hides behind another's products.
    return Config(64, 64, 16, 4, 3) if block_m == 64 else Config(64, 64, 8, 8, 3)


def space(problem: Problem) -> Iterable[Config]:
    """Tiles, warps and stages."""
    return candidates(problem, heuristic(problem), (32, 64, 128), matrices=2)


def _kernel(
    x_ref: Any,
    gate_ref: Any,
    up_ref: Any,
    rows_ref: Any,
    block_ref: Any,
    num_ref: Any,
    out_ref: Any,
    *,
    config: Config,
    block_m: int,
    n_tiles: int,
    activation: str,
) -> None:
    R, D = x_ref.shape
    F, block_k = gate_ref.shape[2], config.block_k
    pid = program_id(0)
    used = num_ref[0]

    @when(pid < used * n_tiles)
    def _() -> None:
        block, f = place(pid, used, n_tiles, config.group)
        tile = read_tile(rows_ref, block_ref, block, f, R=R, block_m=block_m, block_n=config.block_n)

        def body(i: Any, accs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            gate, up = accs
            x = load_rows(x_ref, tile, i * block_k, block_k)
            gate = gate + dot(x, load_weights(gate_ref, tile, i * block_k, block_k))
            return gate, up + dot(x, load_weights(up_ref, tile, i * block_k, block_k))

        zero = jnp.zeros((block_m, config.block_n), jnp.float32)
        gate, up = jax.lax.fori_loop(0, cdiv(D, block_k), body, (zero, zero))
        out = (ACTIVATIONS[activation](gate) * up).astype(out_ref.dtype)
        store(out_ref.at[tile.slots[:, None], tile.cols[None, :]], out, mask=out_mask(tile, F))


def grouped_swiglu_pallas(
    x: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    rows: jax.Array,
    block_expert: jax.Array,
    num_blocks: jax.Array,
    *,
    block_m: int,
    activation: str = "silu",
    config: Config,
    interpret: bool | None = None,
) -> jax.Array:
    """See `grouped_swiglu_reference`. Undefined elements are not written."""
    P, F = rows.shape[0], gate.shape[2]
    n_tiles = cdiv(F, config.block_n)
    kernel = functools.partial(
        _kernel, config=config, block_m=block_m, n_tiles=n_tiles, activation=activation
    )
    return pallas_call(
        kernel,
        name="grouped_swiglu",
        grid=(P // block_m * n_tiles,),
        out_shape=jax.ShapeDtypeStruct((P, F), x.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(x, gate, up, rows, block_expert, num_blocks)
