"""A LoRA adapter as what is trained: factors beside frozen weights, which they are added to in each step."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from moejax.checkpoint.hf import load_pretrained
from moejax.checkpoint.peft import Factors
from moejax.core.config import ModelConfig
from moejax.engine.adapters import random_factors
from moejax.models.decoder import Decoder
from moejax.nn.param import path_name
from moejax.train.config import TrainConfig

Params = dict[str, Any]


def base_params(config: TrainConfig) -> Params | None:
    """Returns the frozen weights in float32; None where a whole model is trained.

    Raises:
        ConfigError, CheckpointError: there is no such model, or it cannot be read.
    """
    if not config.adapter.rank:
        return None
    base = load_pretrained(config.adapter.base, dtype="float32", dequantize=True)
    params: Params = nnx.to_pure_dict(nnx.state(base.model))
    return params


def first_factors(config: TrainConfig, model: ModelConfig) -> Params:
    """Returns A `[..., in, r]`, drawn with deviation in^-1/2, and B, zeros, of every matrix:
    below the model's names, as "a" and "b"."""
    drawn = random_factors(model, config.seed, config.adapter.rank, config.adapter.targets, scale=1.0)
    flat = {}
    for path, _ in nnx.to_flat_state(nnx.state(Decoder(model))):
        if (name := path_name(path)) in drawn:
            a, b = drawn[name]
            flat[*path, "a"] = jnp.asarray(a * a.shape[-2] ** -0.5)
            flat[*path, "b"] = jnp.zeros(b.shape, b.dtype)
    return unflatten_dict(flat)


def merged(base: Params, factors: Params) -> Params:
    """Returns the weights with an adapter's products added."""
    flat, parts = flatten_dict(base), flatten_dict(factors)
    for *path, half in parts:
        if half == "a":
            flat[tuple(path)] = flat[tuple(path)] + parts[*path, "a"] @ parts[*path, "b"]
    return unflatten_dict(flat)


def factors_of(params: Params) -> dict[str, Factors]:
    """Returns path of a parameter → A and B, as `moejax.checkpoint.peft.save_adapter` takes them."""
    parts = flatten_dict(params)
    return {
        path_name(path[:-1]): (np.asarray(parts[*path[:-1], "a"]), np.asarray(parts[*path[:-1], "b"]))
        for path in parts
        if path[-1] == "a"
    }
