"""The floating-point types of operands, and the type that a reference computes in."""

from typing import Any

import jax.numpy as jnp

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32)
"""Operands that every kernel of floating-point arrays takes."""


def wide_type(*dtypes: Any) -> Any:
    """Returns float64 if any type is, else float32. (`jnp.promote_types` refuses under strict promotion.)"""
    return jnp.float64 if any(jnp.dtype(dtype) == jnp.float64 for dtype in dtypes) else jnp.float32
