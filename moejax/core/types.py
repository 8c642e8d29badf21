"""The axis glossary and the array aliases that annotations use.

    B batch of sequences      T tokens of this call (per sequence)    S key length, cache slots
    D model width             F hidden width of an expert or MLP      E experts      k experts per token
    H query heads             K key/value heads                       G query heads per key/value head
    Dh head dimension         V vocabulary                            N flattened tokens, B·T

Logical axis names (`moejax.nn.param.ParamSpec.axes`), from which shardings derive:
    vocab, embed, heads, kv_heads, head_dim, mlp, expert, expert_mlp
"""

import jax
from jaxtyping import Float, Int

Tokens = Int[jax.Array, "B T"]
Positions = Int[jax.Array, "B T"]
Logits = Float[jax.Array, "B T V"]

__all__ = ["Logits", "Positions", "Tokens"]
