"""The training loss: next-token cross entropy, load balance and router z-loss.

    loss = cross_entropy + load_balance_coef · load_balance + router_z_coef · router_z

The two router losses come from the `RoutingTrace`s alone, so they work for every family and execution.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from moejax.moe.layer import RoutingTrace
from moejax.moe.router import expert_counts


class LossParts(NamedTuple):
    """float32 scalars, means over tokens and (for the router's) layers. `loss` is their weighted sum."""

    loss: jax.Array
    cross_entropy: jax.Array
    load_balance: jax.Array
    router_z: jax.Array


class RoutingCounts(NamedTuple):
    """Counts of the routers' choices in one batch, per expert layer.

    Attributes:
        chosen: int32 `[L, E]`, assignments that the router asked for.
        dropped: int32 `[L]`, those of them that found no room.
    """

    chosen: jax.Array
    dropped: jax.Array


def token_losses(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross entropy in nats of each token: logits float32 `[..., V]`, targets int32 `[...]` → `[...]`."""
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - picked


def chosen_experts(trace: RoutingTrace) -> jax.Array:
    """Returns int32 `[E]`: how often the router chose each expert, before any assignment was dropped.

    `trace.counts` would hide what overflowed, and the balance loss is there to see just that.
    """
    ids = jax.lax.top_k(trace.logits, trace.ids.shape[-1])[1]
    return expert_counts(ids, trace.logits.shape[-1])


def load_balance_loss(trace: RoutingTrace) -> jax.Array:
    """Returns E · Σ_e f_e · P_e of one layer (Switch Transformer, Fedus et al., arXiv 2101.03961, eq. 4-6).

    f_e is the share of the layer's assignments that chose expert e (so Σ f = 1 for any k), P_e the mean
    router probability; the gradient goes through P. It is 1 when all experts are equally loaded and E when
    one takes everything.

    Hugging Face's `load_balancing_loss_func` counts f per token, which gives k times this, and pools all
    layers before it multiplies, so that layers can make up for one another; here each layer must balance.
    """
    E = trace.logits.shape[-1]
    chosen = chosen_experts(trace).astype(jnp.float32)
    share = jax.lax.stop_gradient(chosen / jnp.sum(chosen))
    probability = jnp.mean(jax.nn.softmax(trace.logits, axis=-1).reshape(-1, E), axis=0)
    return E * jnp.sum(share * probability)


def router_z_loss(trace: RoutingTrace) -> jax.Array:
    """Returns the mean over tokens of (log Σ_e exp logit_e)² (ST-MoE, Zoph et al., arXiv 2202.08906, eq. 5).

    It keeps router logits small, so that rounding them does not change the choice.
    """
    return jnp.mean(jnp.square(jax.nn.logsumexp(trace.logits, axis=-1)))


def loss_parts(
    logits: jax.Array,
    targets: jax.Array,
    traces: Sequence[RoutingTrace | None],
    *,
    load_balance_coef: float,
    router_z_coef: float,
) -> tuple[LossParts, RoutingCounts]:
    """Returns the loss of a batch without padding.

    Args:
        logits: float32 `[B, T, V]`; targets: int32 `[B, T]`, the token after each position.
        traces: one per layer, None for dense layers, as `Decoder(…, return_routing=True)` gives them.
    """
    sparse = [trace for trace in traces if trace is not None]
    cross_entropy = jnp.mean(token_losses(logits, targets))
    balance = jnp.mean(jnp.stack([load_balance_loss(trace) for trace in sparse]))
    z = jnp.mean(jnp.stack([router_z_loss(trace) for trace in sparse]))
    loss = cross_entropy + load_balance_coef * balance + router_z_coef * z
    counts = RoutingCounts(
        jnp.stack([chosen_experts(trace) for trace in sparse]), jnp.stack([trace.dropped for trace in sparse])
    )
    return LossParts(loss, cross_entropy, balance, z), counts
