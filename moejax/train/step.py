"""One optimiser step and one evaluation step as compiled functions over pure state.

The model is split once into its graph and a nested dictionary of arrays; steps take and return the latter.
Training runs the experts by `capacity` (its gradients are batched products; `grouped` has a loop of dynamic
length, which has none), evaluation by `grouped`, which drops nothing.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from moejax.checkpoint.directory import load_config, resolve_model_dir
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.models.decoder import Decoder
from moejax.models.registry import config_from_hf
from moejax.train.adapter import Params, first_factors, merged
from moejax.train.config import TrainConfig
from moejax.train.loss import LossParts, RoutingCounts, loss_parts, token_losses
from moejax.train.optimizer import make_optimizer
from moejax.train.tokenizer import END_OF_TEXT, SPECIAL_TOKENS


class TrainState(NamedTuple):
    """State that a run needs to go on; the checkpoints hold exactly this.

    Attributes:
        params: nested dictionary of float32 arrays: a model's, or an adapter's (`moejax.train.adapter`).
        opt_state: optax's state over the same tree.
        step: int32 scalar, optimiser steps done.
        sequence: int32 scalar, the first sequence of the data order not yet trained on.
        rng: uint32 key data from which every step derives its own randomness.
    """

    params: Params
    opt_state: Any
    step: jax.Array
    sequence: jax.Array
    rng: jax.Array


class StepMetrics(NamedTuple):
    """One step's figures. `grad_norm` is taken before clipping."""

    parts: LossParts
    routing: RoutingCounts
    grad_norm: jax.Array


class EvalSums(NamedTuple):
    """Sums over a batch: `nats` float32 and `tokens` int32 scalars, `counts` int32 `[L, E]`."""

    nats: jax.Array
    tokens: jax.Array
    counts: jax.Array


def model_config(config: TrainConfig) -> ModelConfig:
    """Returns the configuration of the decoder to train: a Qwen3-MoE without dense layers, float32; of an
    adapter that of its base.

    Raises:
        ConfigError, CheckpointError: there is no such base, or sequences are longer than it allows.
    """
    if config.adapter.rank:
        base = load_config(resolve_model_dir(config.adapter.base)).replace(dtype="float32")
        if config.seq_len > base.max_position_embeddings:
            raise ConfigError(
                f"seq_len {config.seq_len} exceeds the {base.max_position_embeddings} of adapter.base"
            )
        if not any(base.moe_layers):
            raise ConfigError(
                f"adapter.base={config.adapter.base} has no experts, whose load training reports"
            )
        return base
    end = SPECIAL_TOKENS.index(END_OF_TEXT)
    fields = {
        **dataclasses.asdict(config.model),
        "model_type": "qwen3_moe",
        "vocab_size": config.vocab_size,
        # Read by dense layers only, and there are none.
        "intermediate_size": config.model.moe_intermediate_size * config.model.num_experts_per_tok,
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end),
    }
    return config_from_hf(fields, "model")


def init_state(config: TrainConfig) -> TrainState:
    """Returns a fresh run's state. Weights depend on `config.seed` and their names only."""
    model = model_config(config)
    if config.adapter.rank:
        params = first_factors(config, model)
    else:
        params = nnx.to_pure_dict(nnx.state(Decoder(model, seed=config.seed)))
    rng = jax.random.key_data(jax.random.key(config.seed))
    # Two zeros, not one twice: the state is donated, and a buffer can be given away only once.
    step, sequence = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return TrainState(params, make_optimizer(config).init(params), step, sequence, rng)


def add_noise(tokens: jax.Array, share: float, vocab_size: int, key: jax.Array) -> jax.Array:
    """Replaces about `share` of the tokens int32 `[B, T]` by others, uniform over the vocabulary.

    A regulariser for text that is seen many times ("data noising", Xie et al., arXiv 1703.02573). Only inputs
    are replaced, never targets, and never by a special token.
    """
    where, what = jax.random.split(key)
    random = jax.random.randint(what, tokens.shape, len(SPECIAL_TOKENS), vocab_size, tokens.dtype)
    return jnp.where(jax.random.uniform(where, tokens.shape) < share, random, tokens)


def make_train_step(config: TrainConfig) -> Any:
    """Returns a compiled `(state, batch, base) -> (state, metrics)`; the state that goes in is donated.

    batch is int32 `[B, T + 1]`: inputs are `[:, :-1]`, targets `[:, 1:]`; base an adapter's frozen weights.
    """
    model = model_config(config)
    moe = MoeConfig(execution="capacity", capacity_factor=config.capacity_factor)
    graph = nnx.graphdef(Decoder(model, moe=moe))
    optimizer = make_optimizer(config)

    def loss(params: Params, batch: jax.Array, key: jax.Array, base: Params | None) -> tuple[jax.Array, Any]:
        inputs = batch[:, :-1]
        if config.token_noise:
            inputs = add_noise(inputs, config.token_noise, model.vocab_size, key)
        whole = params if base is None else merged(base, params)
        logits, traces = nnx.merge(graph, whole)(inputs, return_routing=True)
        parts, routing = loss_parts(
            logits,
            batch[:, 1:],
            traces,
            load_balance_coef=config.load_balance_coef,
            router_z_coef=config.router_z_coef,
        )
        return parts.loss, (parts, routing)

    def step(
        state: TrainState, batch: jax.Array, base: Params | None = None
    ) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.step)
        gradients, (parts, routing) = jax.grad(loss, has_aux=True)(state.params, batch, key, base)
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts
            updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        new = TrainState(params, opt_state, state.step + 1, state.sequence + batch.shape[0], state.rng)
        return new, StepMetrics(parts, routing, optax.tree.norm(gradients))

    return jax.jit(step, donate_argnums=0)


def make_eval_step(config: ModelConfig) -> Callable[[Params, Any, Any], EvalSums]:
    """Returns a compiled `(params, tokens [B, T + 1], scored bool [B, T]) -> EvalSums`, dropless.

    Positions that are not scored are padding and visit no expert.
    """
    graph = nnx.graphdef(Decoder(config, moe=MoeConfig(execution="grouped")))

    def step(params: Params, tokens: jax.Array, scored: jax.Array) -> EvalSums:
        logits, traces = nnx.merge(graph, params)(tokens[:, :-1], valid=scored, return_routing=True)
        nats = token_losses(logits, tokens[:, 1:])
        counts = jnp.stack([trace.counts for trace in traces if trace is not None])
        return EvalSums(jnp.sum(jnp.where(scored, nats, 0.0)), jnp.sum(scored, dtype=jnp.int32), counts)

    return jax.jit(step)
