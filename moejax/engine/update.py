"""New values in place of a running engine's weights, as after a step of training."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.core.errors import ConfigError, unknown
from moejax.engine.core import Engine, PauseMode
from moejax.engine.opening.weights import Weights
from moejax.engine.step.functions import ModelFunctions
from moejax.models.decoder import Decoder
from moejax.nn.param import ParamSpec, iter_params, specs


def update_weights(
    engines: Iterable[Engine], weights: Weights, values: Decoder | Mapping[str, Any], running: PauseMode
) -> None:
    """See `LLM.update_weights`; `engines` are all that compute with these weights.

    All is checked before anything changes. Then one parameter follows another, so that one is there twice at
    a time; where a device has no room for that, those before it are new.
    """
    if weights.tiers is not None:
        raise ConfigError("update_weights: engine.experts.resident keeps experts where they are read from")
    params = {name: param for stage in weights.stages for name, param in iter_params(stage)}
    laid_out: dict[str, ParamSpec] = {}
    if isinstance(values, Decoder):
        laid_out = specs(values)
        values = {name: param[...] for name, param in iter_params(values)}
    for name, value in values.items():
        if name not in params:
            raise ConfigError(
                f"update_weights: {unknown('parameter', name, params)}; quantized weights take no new values"
            )
        shape = laid_out[name].canonical_shape if laid_out else np.shape(value)
        if shape != (wanted := params[name].get_metadata("spec").canonical_shape):
            raise ConfigError(f"update_weights: {name} has shape {shape}, expected {wanted}")
    with ExitStack() as stack:
        engines = sorted(engines, key=id)
        drafters = [drafter for engine in engines if (drafter := getattr(engine.runner, "drafter", None))]
        users = [*weights.functions, *(drafter.functions for drafter in drafters)]  # an MTP layer shares some
        for engine in engines:
            stack.enter_context(engine.lock)
        stopped = [engine.stopped for engine in engines]
        try:
            for engine in engines:
                engine.pause(running)
            for name, value in values.items():
                _put(users, params[name], value, laid_out.get(name))
            for engine in engines:
                engine.scheduler.forget_device_state()
        finally:
            for engine, was in zip(engines, stopped, strict=True):
                if was is None:
                    engine.unpause()


def _put(users: Iterable[ModelFunctions], param: nnx.Param, value: Any, laid_out: ParamSpec | None) -> None:
    """Puts a copy in place of a parameter, which the engine may delete; `laid_out`: how, None: canonical."""
    spec, old = param.get_metadata("spec"), param[...]
    if laid_out is None or (laid_out.shape, laid_out.transposed) != (spec.shape, spec.transposed):
        value = spec.stored(jnp.asarray(value) if laid_out is None else laid_out.canonical(value))
    new = jax.device_put(value.astype(spec.dtype), old.sharding, may_alias=False)
    param.set_value(new)
    for functions in users:
        functions.leaves[:] = [new if leaf is old else leaf for leaf in functions.leaves]
