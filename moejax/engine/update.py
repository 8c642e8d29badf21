"""New values in place of a running engine's weights, as after a step of training."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.core.errors import ConfigError, unknown
from moejax.engine.core import Engine, PauseMode
from moejax.engine.opening.weights import Weights
from moejax.models.decoder import Decoder
from moejax.nn.param import ParamSpec, iter_params


def update_weights(
    engines: Iterable[Engine], weights: Weights, values: Decoder | Mapping[str, Any], running: PauseMode
) -> None:
    """See `LLM.update_weights`; `engines` are all that compute with these weights."""
    params = {name: param for stage in weights.stages for name, param in iter_params(stage)}
    if isinstance(values, Decoder):
        values = {
            name: canonical(param[...], param.get_metadata("spec")) for name, param in iter_params(values)
        }
    for name, value in values.items():
        if name not in params:
            raise ConfigError(
                f"update_weights: {unknown('parameter', name, params)}; quantized weights take no new values"
            )
        if np.shape(value) != (wanted := params[name].get_metadata("spec").canonical_shape):
            raise ConfigError(f"update_weights: {name} has shape {np.shape(value)}, expected {wanted}")
    with ExitStack() as stack:
        engines = sorted(engines, key=id)
        for engine in engines:
            stack.enter_context(engine.lock)
        stopped = [engine.stopped for engine in engines]
        for engine in engines:
            engine.pause(running)
        places = {id(leaf): (one.leaves, i) for one in weights.functions for i, leaf in enumerate(one.leaves)}
        try:
            for name, value in values.items():
                old = params[name][...]
                leaves, place = places[id(old)]
                leaves[place] = jax.device_put(
                    _stored(value, params[name].get_metadata("spec")), old.sharding
                )
                params[name].set_value(leaves[place])
        finally:
            for engine, was in zip(engines, stopped, strict=True):
                engine.scheduler.forget_device_state()
                if was is None:
                    engine.unpause()


def canonical(stored: jax.Array, spec: ParamSpec) -> jax.Array:
    """Returns a parameter `[..., in, out]` without padding."""
    whole = stored[tuple(slice(n) for n in spec.true_shape)]
    return whole.swapaxes(-1, -2) if spec.transposed else whole


def _stored(value: Any, spec: ParamSpec) -> jax.Array:
    array = jnp.asarray(value, spec.dtype)
    array = array.swapaxes(-1, -2) if spec.transposed else array
    return jnp.pad(array, [(0, n - m) for n, m in zip(spec.shape, array.shape, strict=True)])
