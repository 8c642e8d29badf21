"""Bytes that a model holds, counted on its arrays: packed codes count as the bytes they lie in."""

import math
from dataclasses import dataclass

from moejax.models.decoder import Decoder
from moejax.nn.param import iter_params
from moejax.nn.quantized import quantized_weights
from moejax.quantization.formats import PARTS
from moejax.quantization.rules import protected


@dataclass(frozen=True)
class Sizes:
    """Sizes of one model, as held.

    Attributes:
        weights: numbers of the matrices that a method may quantize by default: attention, experts, MLPs.
        quantizable_bytes: their bytes, with scales, zero points and all else that stands for them.
        parameters: numbers of all tensors of the model in full precision.
        model_bytes: bytes of all arrays.
    """

    weights: int
    quantizable_bytes: int
    parameters: int
    model_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.quantizable_bytes / max(self.weights, 1)

    @property
    def bits_per_parameter(self) -> float:
        return 8 * self.model_bytes / self.parameters


def model_sizes(model: Decoder) -> Sizes:
    """Returns the sizes of a model whose parameters have values, quantized or not."""
    stands_for = {path: weight.stands_for for path, weight in quantized_weights(model)}
    weights = quantizable_bytes = parameters = total = 0
    for name, param in iter_params(model):
        owner, _, part = name.rpartition(".")
        path = owner if part in PARTS and owner in stands_for else name
        size = int(param[...].nbytes)
        spec = stands_for.get(path) or param.get_metadata("spec")
        # A quantized weight counts once, with its codes.
        numbers = 0 if path != name and part != "values" else math.prod(spec.true_shape)
        total += size
        parameters += numbers
        if len(spec.shape) >= 2 and protected(path) is None:
            weights += numbers
            quantizable_bytes += size
    return Sizes(weights, quantizable_bytes, parameters, total)
