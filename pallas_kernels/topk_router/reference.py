"""The contract of `topk_router`.

Softmax, top-k, renormalisation: Mixtral (arXiv 2401.04088), Qwen3-MoE, OLMoE. Sigmoid scores, a bias for the
choice alone and a choice among groups first: DeepSeek-V3 (arXiv 2412.19437, §2.1.2).
"""

import jax
import jax.numpy as jnp

from pallas_kernels.dtypes import wide_type

SMALLEST_SUM = 1e-20
"""Added to the sum that weights are divided by, as DeepSeek-V3 does: scores that all underflow give zeros."""


def topk_router_reference(
    logits: jax.Array,
    *,
    k: int,
    scoring: str = "softmax",
    bias: jax.Array | None = None,
    num_groups: int | None = None,
    top_groups: int | None = None,
    group_score: str = "max",
    renormalize: bool = False,
    norm_min: float = 0.0,
    scale: float = 1.0,
    valid: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the k experts of the highest scores, in falling order, and their weights.

    Args:
        logits: `[T, E]`, or parts `[S, T, E]` to be added up in order, floating; computed in float32 (float64
            if logits are).
        scoring: "softmax" over all E, or "sigmoid" of each.
        bias: `[E]`, added to the scores for the choice only; weights come from the scores without it.
        num_groups, top_groups: the experts are `num_groups` runs of E / num_groups; only the `top_groups` of
            them are chosen from that score highest.
        group_score: a group's score is its highest biased score, "max", or the sum of its "top2".
        renormalize: divide the k weights by their sum + 1e-20, or by `norm_min` where that is more.
        scale: factor on the weights.
        valid: bool `[T]`; a row that is not chooses no expert: ids E, weights 0. None: all are.

    Returns:
        ids int32 `[T, k]`, distinct in a valid row, and weights float32 (float64) `[T, k]`. Equal scores: the
        lower id (group) first. Without a bias the choice is by the logits themselves, of which the scores are
        increasing functions: scores that round to the same number still choose the larger logit.

        A NaN score (a NaN logit, or under softmax a row with a NaN or +inf) counts as -inf for the choice, so
        that ids are always in range and distinct, and stays NaN as a weight.
    """
    wide = logits.reshape(-1, *logits.shape[-2:]).sum(0, dtype=wide_type(logits.dtype))
    T, E = wide.shape
    scores = jax.nn.softmax(wide, axis=-1) if scoring == "softmax" else jax.nn.sigmoid(wide)
    keys = wide if bias is None else scores + bias.astype(wide.dtype)[None, :]
    keys = jnp.where(jnp.isnan(keys), -jnp.inf, keys)
    order = jnp.argsort(-keys, axis=-1, stable=True).astype(jnp.int32)
    if num_groups is not None and top_groups is not None:
        grouped = keys.reshape(T, num_groups, E // num_groups)
        best = grouped.max(-1)
        if group_score == "top2":
            # Logits do not add up to what scores do.
            sums = keys if bias is not None else jnp.where(jnp.isnan(scores), -jnp.inf, scores)
            best = jnp.sort(sums.reshape(grouped.shape), axis=-1)[..., -2:].sum(-1)
        best = jnp.where(jnp.isnan(best), -jnp.inf, best)
        groups = jnp.argsort(-best, axis=-1, stable=True)[:, :top_groups]
        group_of = order // (E // num_groups)
        outside = ~jnp.any(group_of[:, :, None] == groups[:, None, :], axis=-1)
        # A stable sort by "outside" keeps the order of those inside.
        order = jnp.take_along_axis(order, jnp.argsort(outside, axis=-1, stable=True), axis=-1)
    ids = order[:, :k]
    weights = jnp.take_along_axis(scores, ids, axis=-1)
    if renormalize:
        total = jnp.sum(weights, axis=-1, keepdims=True) + SMALLEST_SUM
        weights = weights / jnp.maximum(total, jnp.asarray(norm_min, wide.dtype))
    weights = weights * jnp.asarray(scale, wide.dtype)
    if valid is None:
        return ids, weights
    return jnp.where(valid[:, None], ids, E), jnp.where(valid[:, None], weights, jnp.zeros((), wide.dtype))
