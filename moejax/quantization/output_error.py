"""Error of a layer's output due to a quantized weight: the measure that GPTQ and AWQ minimise.

With inputs X `[tokens, D]` and an error dW `[D, F]` of the weight, ‖X dW‖² = tr(dWᵀ G dW) with the Gram
matrix G = XᵀX. It is exact for the tokens that G was summed over, and no activation needs to be kept.
"""

import jax
import jax.numpy as jnp

HIGHEST = jax.lax.Precision.HIGHEST
"""Precision of products: full float32 also where a device would take TF32."""


def output_error(difference: jax.Array, gram: jax.Array) -> jax.Array:
    """Returns tr(dWᵀ G dW), the squared error of the output summed over tokens and outputs.

    Args:
        difference: `[..., D, F]`, quantized weight minus weight.
        gram: `[..., D, D]`, XᵀX, with the same leading axes.

    Returns:
        float32 `[...]`.
    """
    difference = difference.astype(jnp.float32)
    moved = jnp.matmul(gram.astype(jnp.float32), difference, precision=HIGHEST)
    return jnp.sum(moved * difference, axis=(-2, -1))
