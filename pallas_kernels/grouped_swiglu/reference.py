"""The contract of `grouped_swiglu` (Shazeer, arXiv 2002.05202)."""

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import wide_type
from pallas_kernels.groups import Activation, gated


def grouped_swiglu_reference(
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
) -> jax.Array:
    """Computes `out[p] = act(x[rows[p]] @ gate[e]) · (x[rows[p]] @ up[e])`, e the expert of slot p's block.

    Biases are added to the products before the activation. Both products are accumulated in float32 (float64
    if x is) and rounded once, after their product.

    Args:
        x: `[R, D]`; gate, up: `[E, D, F]`; rows: int32 `[P]`.
        block_expert: int32 `[P / block_m]`; num_blocks: int32 `[1]`.
        gate_bias, up_bias: `[E, F]`.
        activation: see `pallas_kernels.groups.Activation`.

    Returns:
        `[P, F]` in x's dtype. What slots hold whose row is outside `[0, R)`, and those of blocks past
        `num_blocks`, is undefined (here 0).
    """
    R, wide = x.shape[0], wide_type(x.dtype)
    filled = (rows >= 0) & (rows < R)
    picked = jnp.where(filled[:, None], x[jnp.clip(rows, 0, R - 1)], 0)

    def block(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        tile, expert = args
        g, u = (
            jnp.matmul(tile, w[expert], precision="highest", preferred_element_type=wide) for w in (gate, up)
        )
        if gate_bias is not None and up_bias is not None:
            g, u = (y + b[expert][None].astype(wide) for y, b in ((g, gate_bias), (u, up_bias)))
        return gated(activation)(g, u)

    out = jax.lax.map(block, (picked.reshape(-1, block_m, x.shape[1]), block_expert))
    used = jnp.arange(len(block_expert)) < num_blocks[0]
    out = jnp.where(used[:, None, None], out, 0).reshape(len(rows), -1)
    return jnp.where(filled[:, None], out, 0).astype(x.dtype)
