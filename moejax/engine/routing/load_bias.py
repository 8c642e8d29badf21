"""An online bias against load: what routers add to experts' scores follows what the steps have counted.

The host moves it when a step's counts are collected. Steps launched by then keep the biases that they were
given; the next one takes the new ones, as with `moejax.engine.routing.rebalance`.
"""

from typing import Any

import jax
import numpy as np

from moejax.core.moe import RoutingPolicy
from moejax.engine.opening.weights import Weights
from moejax.engine.step.bucket_runner import BucketRunner


def moved(bias: Any, counts: Any, rate: float) -> Any:
    """Returns biases float32 `[..., E]` after a step of `counts` assignments, int `[..., E]`: `rate` more for
    experts below their layer's mean, less for those above it. NumPy's or JAX's arrays."""
    counts = counts.astype(bias.dtype)
    mean = counts.mean(axis=-1, keepdims=True)
    away = (counts < mean).astype(bias.dtype) - (counts > mean).astype(bias.dtype)
    return bias + rate * away


def follow_load(policy: RoutingPolicy, weights: Weights, runner: BucketRunner) -> None:
    """Has every step count its assignments, and moves the routers' biases by them."""
    layers = {}
    for functions, stage in zip(weights.functions, weights.stages, strict=True):
        places = {id(leaf): place for place, leaf in enumerate(functions.leaves)}
        for number, layer in zip(stage.stage, stage.in_order(), strict=True):
            if layer.moe is not None:
                bias = layer.moe.router.load_bias
                assert bias is not None, "the routers have this policy"
                layers[number] = bias, functions.leaves, places[id(bias[...])]
    values = {number: np.asarray(bias[...]) for number, (bias, *_) in layers.items()}

    def step(counts: np.ndarray) -> None:
        for number in layers:
            values[number] = moved(values[number], counts[number], policy.rate)
        placed = jax.device_put(values, {number: bias[...].sharding for number, (bias, *_) in layers.items()})
        for number, (bias, leaves, place) in layers.items():
            bias.set_value(placed[number])
            leaves[place] = placed[number]

    runner.routing.listener = step
    runner.builder.record_all = True
