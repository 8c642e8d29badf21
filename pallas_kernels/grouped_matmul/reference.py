"""The contract of `grouped_matmul`."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import wide_type


def grouped_matmul_reference(
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
) -> jax.Array:
    """Computes `out[p] = row_scale[p] · (x[rows[p]] @ w[e] + bias[e])`, e the expert of slot p's block.

    Accumulated and scaled in float32 (float64 if x is), rounded once. See `pallas_kernels.groups` for slots.

    Args:
        x: `[R, D]`; w: `[E, D, F]`; rows: int32 `[P]`; bias: `[E, F]`; row_scale: float32 `[P]`.
        block_expert: int32 `[P / block_m]`; num_blocks: int32 `[1]`.
        out_dtype: None: x's.

    Returns:
        `[P, F]`. What slots hold whose row is outside `[0, R)`, and those of blocks past `num_blocks`, is
        undefined (here 0).
    """
    R, wide = x.shape[0], wide_type(x.dtype)
    filled = (rows >= 0) & (rows < R)
    picked = jnp.where(filled[:, None], x[jnp.clip(rows, 0, R - 1)], 0)

    def block(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        tile, expert = args
        y = jnp.matmul(tile, w[expert], precision="highest", preferred_element_type=wide)
        return y if bias is None else y + bias[expert][None].astype(wide)

    out = jax.lax.map(block, (picked.reshape(-1, block_m, x.shape[1]), block_expert))
    used = jnp.arange(len(block_expert)) < num_blocks[0]
    out = jnp.where(used[:, None, None], out, 0).reshape(len(rows), -1)
    if row_scale is not None:
        out = out * row_scale[:, None].astype(wide)
    return jnp.where(filled[:, None], out, 0).astype(x.dtype if out_dtype is None else out_dtype)
