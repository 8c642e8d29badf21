"""A model as weight leaves and pure functions of them, and what compiled steps compute beside the model.

Weights go in as a flat list of leaves: splitting the module once and calling with leaves costs 0.1 ms a
step where `nnx.jit` costs 6 (docs/log.md).
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.engine.step.sampler import Sampled, with_logprobs
from moejax.models.decoder import Decoder
from moejax.moe.layer import RoutingTrace

# Logits of at most this many elements exist at a time while scoring: 2^24 floats are 64 MB.
MAX_LOGIT_ELEMENTS = 1 << 24


class ModelFunctions:
    """A model split into weight leaves; the engines' steps are methods of its subclasses."""

    def __init__(self, model: Decoder) -> None:
        self.graphdef, state = nnx.split(model)
        self.leaves, self.treedef = jax.tree.flatten(state)
        self.config = model.config

    def merge(self, leaves: Sequence[jax.Array]) -> Decoder:
        """Returns the module again, inside a trace."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))


def routing_counts(traces: tuple[RoutingTrace | None, ...], num_experts: int) -> tuple[jax.Array, jax.Array]:
    """Assignments int32 `[L, E]`, a dense layer's row being 0, and int32 `[2]`: dropped, rerouted."""
    sparse = [trace for trace in traces if trace is not None]
    zero, none = jnp.zeros((), jnp.int32), jnp.zeros(num_experts, jnp.int32)
    overflow = jnp.stack([sum((t.dropped for t in sparse), zero), sum((t.rerouted for t in sparse), zero)])
    return jnp.stack([none if trace is None else trace.counts for trace in traces]), overflow


@jax.named_scope("sampling")
def token_logprobs(model: Decoder, x: jax.Array, targets: jax.Array, likeliest: int = 0) -> Sampled:
    """Maps x `[N, D]`, targets int32 `[N]` to what there is to tell of the targets and the `likeliest` tokens
    in their places, in parts so that `[N, V]` never exists whole."""
    N = x.shape[0]
    part = max(1, min(N, MAX_LOGIT_ELEMENTS // model.config.vocab_size))
    parts = -(-N // part)
    x = jnp.pad(x, ((0, parts * part - N), (0, 0))).reshape(parts, part, -1)
    targets = jnp.pad(targets, (0, parts * part - N)).reshape(parts, part)

    def one(args: tuple[jax.Array, jax.Array]) -> Sampled:
        return with_logprobs(model.logits(args[0]), args[1], likeliest)

    every = jax.lax.map(one, (x, targets))
    return jax.tree.map(lambda a: a.reshape(parts * part, *a.shape[2:])[:N], every)


def shapes_of(tree: Any) -> Any:
    """Returns the same tree with shapes and dtypes only."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)
