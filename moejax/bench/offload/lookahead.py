"""Experts that the next layer's router would choose by this layer's input, for tokens of a text."""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.models.decoder import Decoder, told_of
from moejax.nn.rope import rope_tables
from moejax.ops.row_sums import Residual

_AT_A_TIME = 8  # windows


def next_router(model: Decoder, tokens: np.ndarray) -> np.ndarray:
    """Returns bool `[T, S, L, E]` for int32 `[T, S]`: what is foreseen at each layer with experts while the
    one before runs; of the first one nothing. It is what `engine.experts.prefetch=next_router` fetches."""
    graph, state = nnx.split(model)
    guess = jax.jit(functools.partial(_guesses, graph))
    parts = [tokens[at : at + _AT_A_TIME] for at in range(0, len(tokens), _AT_A_TIME)]
    whole = [np.pad(part, ((0, _AT_A_TIME - len(part)), (0, 0))) for part in parts]
    ids = np.concatenate([np.asarray(guess(state, jnp.asarray(part, jnp.int32))) for part in whole])
    seen = np.zeros((*ids.shape[:3], model.config.num_experts + 1), bool)
    np.put_along_axis(seen, ids, True, axis=3)
    return seen[: len(tokens), ..., :-1]


def _guesses(graph: Any, state: Any, tokens: jax.Array) -> jax.Array:
    """Returns int32 `[B, S, L, k]`, E for none."""
    model: Decoder = nnx.merge(graph, state)
    config, layers = model.config, model.in_order()
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    rope = rope_tables(config, positions, positions[:, -1] + 1)
    x, residual = model.embed(tokens), cast(Residual, None)
    none = jnp.full((*tokens.shape, config.num_experts_per_tok), config.num_experts, jnp.int32)
    routed = [number for number, sparse in enumerate(config.moe_layers) if sparse]
    guesses = [none]
    for number, layer in enumerate(layers):
        x, residual, _ = layer.attend(x, residual, told_of(config, number, rope), positions, None)
        if number in routed[:-1]:
            later: Any = layers[routed[len(guesses)]]
            normed = later.post_attention_norm.add(x, residual)[0]
            ids = later.moe.router(normed.reshape(-1, normed.shape[-1]), None, None).ids
            guesses.append(ids.reshape(none.shape).astype(jnp.int32))
        x, residual, _ = layer.feed_forward(x, residual, None)
    return jnp.stack(guesses, axis=2)
