"""The router: which experts a token visits and how much each counts."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.moe import RoutingPolicy
from moejax.moe.replicas import Placed
from moejax.nn.lora import Lora
from moejax.nn.param import ParamSpec, declare
from moejax.nn.quantized import QuantizedWeight, Weight, matmul_of
from moejax.ops.row_sums import split_product

_MANY, _CHUNK = 4096, 64
"""Experts from which on the best are sought by chunks, and the experts of a chunk."""


class Routing(NamedTuple):
    """A layer's choice for N tokens.

    Attributes:
        ids: int32 `[N, k]`, experts in order of falling probability. `E` marks an assignment that is not
            made: a padding token's, one dropped for lack of capacity, or left out by a `RoutingPolicy`.
        weights: float32 `[N, k]`; 0 where no assignment is made.
        logits: float32 `[N, E]`.
    """

    ids: jax.Array
    weights: jax.Array
    logits: jax.Array


class Replay(NamedTuple):
    """A recorded choice that a layer is to make again, whatever its router says.

    Attributes:
        ids: int32 `[B, T, k]`; E where no expert is to run.
        weights: float32 `[B, T, k]`; None: those that the layer's own router gives to these experts.
        beside: `[B, T, D]`, the weighted outputs of experts that ran elsewhere, to be added; None: none did.
    """

    ids: jax.Array
    weights: jax.Array | None = None
    beside: jax.Array | None = None


class Router(nnx.Module):
    """Scores over all experts, then the k best, weights renormalised and scaled where the model says so.

    Softmax and no groups is what Mixtral, Qwen-MoE and OLMoE share; Mixtral's "softmax over the top k" equals
    renormalising. `RouterConfig` has the others. `kernels` names the implementation of a GPU kernel for all
    but the product, "xla" for none; there is none of two levels and of SparseMixer, and none for policies
    that choose other experts than the model's k.
    """

    def __init__(
        self, config: ModelConfig, dtype: Any, kernels: str = "xla", policy: RoutingPolicy | None = None
    ) -> None:
        D, E, scale = config.hidden_size, config.num_experts, config.initializer_range
        self.kernel: Weight = declare(ParamSpec((D, E), ("embed", None), dtype, "normal", scale))
        gate = ParamSpec((D, config.router.groups), ("embed", None), dtype, "normal", scale)
        self.group_kernel = declare(gate) if config.router.group_gate else None
        self.bias = declare(ParamSpec((E,), (None,), dtype, "zeros")) if config.router.bias else None
        bias = ParamSpec((E,), (None,), jnp.dtype("float32"), "zeros")
        self.correction_bias = declare(bias) if config.router.correction_bias else None
        self.lora: Lora | None = nnx.data(None)
        self.num_experts = E
        self.config, self.policy = config.router, policy or RoutingPolicy()
        self.top_k = self.policy.max_experts or config.num_experts_per_tok
        self.normalize = config.norm_topk_prob
        self.kernels = kernels if config.router.has_kernel and not self.policy.by_batch else "xla"
        biased, spec = self.policy.method == "bias", ParamSpec((E,), (None,), jnp.dtype("float32"))
        self.load_bias = Placed(jnp.zeros(E), spec=spec) if biased else None

    @jax.named_scope("router")
    def __call__(self, x: jax.Array, valid: jax.Array | None = None, replay: Replay | None = None) -> Routing:
        """Routes x `[N, D]`, valid bool `[N]` (False for padding), with `replay`'s ids `[N, k]` where
        given; its logits are the router's own in any case."""
        if self.group_kernel is not None:
            parts = self._two_levels(x, self.group_kernel, everywhere=replay is not None)[None]
        elif self.kernels == "xla" or isinstance(self.kernel, QuantizedWeight):
            parts = matmul_of(x, self.kernel, out_dtype=jnp.float32)[None]
        else:
            parts = split_product(x, self.kernel[...])
        if self.lora is not None:
            parts = parts.at[0].add(self.lora(x).astype(parts.dtype))
        if self.bias is not None:
            parts = parts.at[0].add(self.bias[...].astype(parts.dtype)[None])
        # In the kernel's order, so that a trace has the logits that it chose by.
        logits = sum(parts[1:], parts[0])
        if replay is None and self.kernels != "xla":
            ids, weights = self._kernel(parts, valid)
            if self.policy.method == "top_k":
                return Routing(ids, weights, logits)
            ids, weights = self._by_policy(logits, ids, valid)
        elif replay is None:
            ids, weights = self._choose(logits)
            if self.policy.method != "top_k":
                ids, weights = self._by_policy(logits, ids, valid)
        else:
            ids, given = replay.ids, replay.weights
            weights = self.weights_of(logits, ids) if given is None else given
        if valid is not None:
            ids = jnp.where(valid[:, None], ids, self.num_experts)
            weights = jnp.where(valid[:, None], weights, 0.0)
        return Routing(ids.astype(jnp.int32), weights, logits)

    def _two_levels(self, x: jax.Array, gate: nnx.Param, *, everywhere: bool) -> jax.Array:
        """Maps x `[N, D]` to log probabilities `[N, E]`: of a group by its gate, of its experts within it.

        They are -inf outside of the best groups, unless wanted `everywhere`. For few tokens only their
        groups' part of the kernel is read.
        """
        (N, D), G = x.shape, self.config.groups
        groups = jax.nn.log_softmax(matmul_of(x, gate, out_dtype=jnp.float32))
        best, chosen = jax.lax.top_k(groups, G if everywhere else self.config.top_groups)
        # Their parts lie apart: to read more than a quarter of them takes longer than to read all (on a CPU).
        if 4 * chosen.size <= G and not isinstance(self.kernel, QuantizedWeight):
            kernel = self.kernel[...].reshape(D, G, -1)[:, chosen]
            within = jnp.einsum("nd,dngs->ngs", x, kernel, preferred_element_type=jnp.float32)
        else:
            within = matmul_of(x, self.kernel, out_dtype=jnp.float32).reshape(N, G, -1)
            within = jnp.take_along_axis(within, chosen[:, :, None], axis=1)
        joint = best[:, :, None] + jax.nn.log_softmax(within)
        whole = jnp.full((N, G, joint.shape[-1]), -jnp.inf, joint.dtype)
        return whole.at[jnp.arange(N)[:, None], chosen].set(joint).reshape(N, -1)

    def _choose(self, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Maps logits `[N, E]` to ids and weights `[N, k]`."""
        if self.config.scores == "sparsemixer":
            _, ids = jax.lax.top_k(logits, self.top_k)
            return ids, self._mixed(logits, ids)
        scores = self._scores(logits)
        if self.correction_bias is None and (self.config.groups == 1 or self.group_kernel is not None):
            weights, ids = top_k(scores, self.top_k)
        else:
            _, ids = top_k(self._eligible(scores), self.top_k)
            weights = jnp.take_along_axis(scores, ids, axis=-1)
        return ids, self._weights(weights)

    def _by_policy(
        self, logits: jax.Array, ids: jax.Array, valid: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the ids and weights `[N, k]` that `policy` makes of the model's own ids, E for none."""
        policy, E = self.policy, self.num_experts
        scores = self._scores(logits)
        first = jnp.arange(ids.shape[1]) < policy.min_experts
        if policy.by_batch:
            wanted = logits if self.config.scores == "sparsemixer" else self._eligible(scores)
            if self.load_bias is not None:
                wanted = wanted + self.load_bias[...][None]
            else:
                real = first[None] if valid is None else first[None] & valid[:, None]
                hit = expert_counts(jnp.where(real, ids, E), E) > 0
                wanted = jnp.where(hit[None], wanted, -jnp.inf)
            # Two levels leave experts out by their logits.
            best, ids = top_k(jnp.where(logits > -jnp.inf, wanted, -jnp.inf), ids.shape[1])
            ids = jnp.where(best > -jnp.inf, ids, E)
        else:
            mine = jnp.take_along_axis(scores, jnp.minimum(ids, E - 1), axis=1)
            share, best = mine / jnp.sum(scores, axis=1, keepdims=True), mine.max(axis=1, keepdims=True)
            kept = {
                "top_p": jnp.cumsum(share, axis=1) - share < policy.threshold,
                "confidence": share.max(axis=1, keepdims=True) < policy.threshold,
                "ratio": mine >= policy.threshold * best,
            }
            ids = jnp.where(first[None] | kept[policy.method], ids, E)
        return ids, self.weights_of(logits, ids)

    def _scores(self, logits: jax.Array) -> jax.Array:
        """Maps logits `[N, E]` to scores between 0 and 1."""
        if self.group_kernel is not None:
            return jnp.exp(logits)
        return jax.nn.sigmoid(logits) if self.config.scores == "sigmoid" else jax.nn.softmax(logits, axis=-1)

    def _eligible(self, scores: jax.Array) -> jax.Array:
        """Maps scores `[N, E]` to those that experts are chosen by: -inf outside of the best groups."""
        config = self.config
        if self.correction_bias is not None:
            scores = scores + self.correction_bias[...][None]
        if config.groups == 1 or config.group_gate:
            return scores
        grouped = scores.reshape(scores.shape[0], config.groups, -1)
        best, _ = jax.lax.top_k(grouped, 1 if config.group_score == "max" else 2)
        _, chosen = jax.lax.top_k(best.sum(axis=-1), config.top_groups)
        inside = jax.nn.one_hot(chosen, config.groups, dtype=jnp.bool).any(axis=1)
        return jnp.where(inside[:, :, None], grouped, -jnp.inf).reshape(scores.shape)

    def _weights(self, scores: jax.Array) -> jax.Array:
        """Maps the chosen experts' scores `[N, k]` to their weights."""
        if self.normalize:
            # As DeepSeek-V3 does it, and the kernel: sigmoids that are all zero give zeros.
            total = jnp.sum(scores, axis=-1, keepdims=True) + 1e-20
            scores = scores / jnp.maximum(total, self.config.norm_min)
        return scores if self.config.scaling == 1.0 else scores * self.config.scaling

    def _kernel(self, parts: jax.Array, valid: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Maps parts of logits `[S, N, E]` to ids and weights `[N, k]`, none where a row is not valid."""
        from pallas_kernels.topk_router import topk_router

        c = self.config
        options: dict[str, Any] = {"renormalize": self.normalize, "norm_min": c.norm_min, "scale": c.scaling}
        if c.groups > 1:
            groups = {"num_groups": c.groups, "top_groups": c.top_groups, "group_score": c.group_score}
            options |= groups
        if self.correction_bias is not None:
            options["bias"] = self.correction_bias[...]
        options |= {"scoring": c.scores, "implementation": self.kernels}
        return topk_router(parts, k=self.top_k, valid=valid, **options)

    def _mixed(self, logits: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns the weights `[N, k]` of choices in turn: each one's share of a softmax over the experts not
        chosen before it whose logits `[N, E]` come close to the best of them."""
        left, weights = logits, []
        for place in range(ids.shape[1]):
            mine = jax.nn.one_hot(ids[:, place], self.num_experts, dtype=jnp.bool)
            best = jnp.max(left, axis=-1, keepdims=True)
            far = (best - logits) / jnp.maximum(jnp.abs(logits), best) > 2 * self.config.tolerance
            shares = jax.nn.softmax(jnp.where(far, -jnp.inf, left), axis=-1)
            weights.append(jnp.sum(jnp.where(mine, shares, 0.0), axis=-1))
            left = jnp.where(mine, -jnp.inf, left)
        return jnp.stack(weights, axis=1)

    def ranking(self, logits: jax.Array) -> jax.Array:
        """Maps logits `[N, E]` to int32 `[N, E]`: every expert, in the order that they are chosen in."""
        return jax.lax.top_k(self._eligible(self._scores(logits)), self.num_experts)[1].astype(jnp.int32)

    def weights_of(self, logits: jax.Array, ids: jax.Array) -> jax.Array:
        """Returns the weights `[N, k]` of experts `ids`, 0 for E, which is none."""
        if self.config.scores == "sparsemixer":
            return self._mixed(logits, ids)
        E = self.num_experts
        scores = jnp.take_along_axis(self._scores(logits), jnp.minimum(ids, E - 1), axis=-1)
        return self._weights(jnp.where(ids < E, scores, 0.0))


def top_k(scores: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Returns the k highest of scores `[N, E]`, falling, and their ids int32, both `[N, k]`; of equal ones
    the lower id first.

    Of many experts only the k chunks with the highest maxima are searched: they hold the k highest.
    """
    N, E = scores.shape
    if E < _MANY or E % _CHUNK or k > E // _CHUNK:
        return jax.lax.top_k(scores, k)
    chunks = scores.reshape(N, -1, _CHUNK)
    best = jnp.sort(jax.lax.top_k(chunks.max(axis=-1), k)[1], axis=-1)
    found, at = jax.lax.top_k(jnp.take_along_axis(chunks, best[:, :, None], axis=1).reshape(N, -1), k)
    return found, jnp.take_along_axis(best, at // _CHUNK, axis=-1) * _CHUNK + at % _CHUNK


def check_replay(name: str, replay: Replay, tokens: tuple[int, ...], top_k: int, num_experts: int) -> Replay:
    """Returns `replay` as int32 and float32 arrays.

    What values it holds can be looked at only outside of `jit`; the rest is checked in any case.

    Args:
        name: of the layer, for the message.
        tokens: `(B, T)` of the call.

    Raises:
        ConfigError: its shape or dtype is not the call's, an id is no expert's, or a token has one twice.
    """
    ids, weights = replay.ids, replay.weights
    shape = (*tokens, top_k)
    for part, array, kind in (("ids", ids, jnp.integer), ("weights", weights, jnp.floating)):
        if array is None:
            continue
        if tuple(array.shape) != shape:
            raise ConfigError(
                f"routing: {name}: {part} of shape {tuple(array.shape)} for a call that needs {shape},"
                " [batch, tokens, num_experts_per_tok]; replay what was recorded for these tokens"
            )
        if not jnp.issubdtype(array.dtype, kind):
            raise ConfigError(f"routing: {name}: {part} cannot be {array.dtype}")
    if not isinstance(ids, jax.core.Tracer):
        ordered = np.sort(np.asarray(ids), axis=-1)
        if ordered.size and (ordered.min() < 0 or ordered.max() > num_experts):
            raise ConfigError(
                f"routing: {name}: ids from {ordered.min()} to {ordered.max()}, and the model has"
                f" {num_experts} experts (0 to {num_experts - 1}; {num_experts} for none)"
            )
        if ((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] < num_experts)).any():
            raise ConfigError(f"routing: {name}: a token has the same expert twice")
    return Replay(
        jnp.asarray(ids).astype(jnp.int32),
        None if weights is None else jnp.asarray(weights).astype(jnp.float32),
    )


def expert_counts(ids: jax.Array, num_experts: int) -> jax.Array:
    """Returns int32 `[E]`: assignments per expert; ids equal to E (none) are not counted."""
    return jnp.zeros(num_experts + 1, jnp.int32).at[ids.reshape(-1)].add(1)[:num_experts]
