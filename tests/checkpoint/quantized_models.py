"""Models with random codes and scales in any format."""

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from moejax.core.config import ModelConfig
from moejax.models.decoder import Decoder
from moejax.nn.param import iter_params
from moejax.nn.quantized import QuantizedWeight, quantized_weights, replace_weights
from moejax.quantization.arithmetic import dequantize
from moejax.quantization.formats import parse_format
from tests.decoding import random_model


def matrices(model: Decoder) -> list[str]:
    """Paths of attention's, experts' and dense layers' weights."""
    kept = ("lm_head", "router", "shared_gate", "embedding")
    params = {name: param.get_metadata("spec") for name, param in iter_params(model)}
    return [
        n for n, spec in params.items() if len(spec.matrix_shape) > 1 and not any(part in n for part in kept)
    ]


def quantized_model(config: ModelConfig, formats: str | Mapping[str, str], seed: int = 0) -> Decoder:
    """Args:
    formats: of all `matrices`, or of those whose paths contain a key; the rest stay as they are.
    """
    model = random_model(config, seed=seed)
    by_part = {"": formats} if isinstance(formats, str) else formats
    chosen = {}
    for path in matrices(model):
        name = next((name for part, name in by_part.items() if part in path), None)
        if name is not None:
            chosen[path] = parse_format(name)
    rng = np.random.default_rng(seed)
    for weight in replace_weights(model, chosen).values():
        fill(weight, rng)
    return model


def fill(weight: QuantizedWeight, rng: np.random.Generator) -> None:
    """Any codes but NaN; scales around 0.02, or exponents of such numbers."""
    for name in ("values", "scales", "zeros", "tensor_scale", "group_index", "input_scale", "kept"):
        param = getattr(weight, name)
        if param is None:
            continue
        spec = param.get_metadata("spec")
        dtype = jnp.dtype(spec.dtype)
        if name == "group_index":
            D, group = spec.shape[-1], weight.format.group
            value = np.broadcast_to(rng.permutation(np.arange(D) // group), spec.shape)
        elif name == "tensor_scale":  # a reciprocal, as compressed-tensors stores it
            value = np.float32(1) / rng.uniform(1000, 9000, spec.shape).astype(np.float32)
        elif name == "scales" and dtype == np.uint8:
            value = rng.integers(115, 125, spec.shape)
        elif name in ("scales", "input_scale"):
            value = rng.uniform(0.5, 1.5, spec.shape) * (100 if dtype.itemsize == 1 else 0.02)
        elif name == "zeros" and weight.format.numbers == "int4":
            value = rng.integers(0, 16, spec.shape)
        elif dtype == np.uint8:
            value = rng.integers(0, 256, spec.shape)
        elif dtype == np.int8:
            value = rng.integers(-128, 128, spec.shape)
        else:  # float8
            value = rng.normal(size=spec.shape) * 50
        param.set_value(jnp.asarray(np.asarray(value).astype(dtype)))


def same_arrays(one: Decoder, other: Decoder) -> None:
    """The same formats, and the same bits everywhere."""
    formats = [{path: w.format for path, w in quantized_weights(model)} for model in (one, other)]
    assert formats[0] == formats[1]
    values = dict(iter_params(other))
    assert [path for path, _ in iter_params(one)] == list(values)
    for path, param in iter_params(one):
        mine, wanted = np.asarray(param[...]), np.asarray(values[path][...])
        assert mine.dtype == wanted.dtype and mine.shape == wanted.shape, path
        np.testing.assert_array_equal(bits(mine), bits(wanted), err_msg=path)


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def assert_same_values(quantized: Decoder, plain: Decoder, name: str) -> None:
    """The same float32 values everywhere, and quantized weights in the named format where they should be."""
    expected = dict(iter_params(plain))
    weights = dict(quantized_weights(quantized))
    assert weights.keys() == set(matrices(plain))
    for path, weight in weights.items():
        assert weight.format.name == name, path
        np.testing.assert_array_equal(dequantize(weight.tensor()), expected[path][...], err_msg=path)
    for path, param in iter_params(quantized):
        if path in expected:
            np.testing.assert_array_equal(param[...], expected[path][...], err_msg=path)


def same_weights(one: Decoder, other: Decoder) -> None:
    values = dict(iter_params(other))
    assert [path for path, _ in iter_params(one)] == list(values)
    for path, param in iter_params(one):
        assert param[...].dtype == values[path][...].dtype
        np.testing.assert_array_equal(param[...], values[path][...], err_msg=path)
