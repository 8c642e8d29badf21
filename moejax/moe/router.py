"""The router: which experts a token visits and how much each counts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.nn.param import ParamSpec, declare


class Routing(NamedTuple):
    """A layer's choice for N tokens.

    Attributes:
        ids: int32 `[N, k]`, experts in order of falling probability. `E` marks an assignment that is not
            made: a padding token's, or one dropped for lack of capacity.
        weights: float32 `[N, k]`; 0 where no assignment is made.
        logits: float32 `[N, E]`.
    """

    ids: jax.Array
    weights: jax.Array
    logits: jax.Array


class Router(nnx.Module):
    """Softmax over all experts, then the k likeliest, renormalised where the model says so.

    The order Mixtral, Qwen-MoE and OLMoE share; Mixtral's "softmax over the top k" equals renormalising.
    `kernels` names the implementation of a GPU kernel for all but the product, "xla" for none.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        normalize: bool,
        dtype: Any,
        scale: float,
        kernels: str = "xla",
    ) -> None:
        self.kernel = declare(ParamSpec((dim, num_experts), ("embed", None), dtype, "normal", scale))
        self.num_experts = num_experts
        self.top_k = top_k
        self.normalize = normalize
        self.kernels = kernels

    def __call__(self, x: jax.Array, valid: jax.Array | None = None) -> Routing:
        """x `[N, D]`, valid bool `[N]` (False for padding) → Routing."""
        logits = jnp.matmul(x, self.kernel[...], preferred_element_type=jnp.float32)
        ids, weights = self._choose(logits)
        if valid is not None:
            ids = jnp.where(valid[:, None], ids, self.num_experts)
            weights = jnp.where(valid[:, None], weights, 0.0)
        return Routing(ids.astype(jnp.int32), weights, logits)

    def _choose(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """logits `[N, E]` → ids and weights `[N, k]`."""
        if self.kernels != "xla":
            from pallas_kernels.topk_router import topk_router

            how: dict[str, Any] = {"renormalize": self.normalize, "implementation": self.kernels}
            return topk_router(logits, k=self.top_k, **how)
        weights, ids = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), self.top_k)
        if self.normalize:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return ids, weights


def expert_counts(ids: jax.Array, num_experts: int) -> jax.Array:
    """int32 `[E]`: assignments per expert; ids equal to E (none) are not counted."""
    return jnp.zeros(num_experts + 1, jnp.int32).at[ids.reshape(-1)].add(1)[:num_experts]
