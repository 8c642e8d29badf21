"""Bytes that a model holds, counted on its arrays: packed codes count as the bytes they lie in."""

import math

from moejax.bench.memory import weight_metrics
from moejax.models.decoder import Decoder
from moejax.nn.param import iter_params
from moejax.nn.quantized import quantized_weights
from moejax.quantization.formats import PARTS
from moejax.quantization.rules import protected


def model_sizes(model: Decoder, full: Decoder | None = None) -> dict[str, float]:
    """Returns the row fields of a model whose parameters have values, quantized or not; bits are over the
    numbers of `full`, where that has more experts.

    Returns:
        `quantizable_bytes`: of the matrices that a method may quantize by default (attention, experts, MLPs),
        with scales, zero points and all else that stands for them; `bits_per_weight` of their numbers;
        `model_bytes`: of all arrays; `bits_per_parameter` of all tensors' numbers in full precision.
    """
    stands_for = {path: weight.stands_for for path, weight in quantized_weights(model)}
    weights = quantizable_bytes = 0
    for name, param in iter_params(model):
        owner, _, part = name.rpartition(".")
        path = owner if part in PARTS and owner in stands_for else name
        spec = stands_for.get(path) or param.get_metadata("spec")
        if len(spec.matrix_shape) >= 2 and protected(path) is None:
            # A quantized weight counts once, with its codes.
            weights += 0 if path != name and part != "values" else math.prod(spec.true_shape)
            quantizable_bytes += int(param[...].nbytes)
    sizes = {
        "bits_per_weight": 8 * quantizable_bytes / max(weights, 1),
        "quantizable_bytes": quantizable_bytes,
        **weight_metrics([model]),
    }
    if full is not None and full.config.num_experts != model.config.num_experts:
        whole = model_sizes(full)
        for bits, held in (("bits_per_weight", "quantizable_bytes"), ("bits_per_parameter", "model_bytes")):
            sizes[bits] = whole[bits] * sizes[held] / whole[held]
    return sizes
