"""2:4 sparse weights: their masks beside loops, what is packed beside the dense weight with zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.core.quant import QuantConfig
from moejax.ops.quantized_matmul import matmul
from moejax.ptq.methods import quantize
from moejax.quantization.arithmetic import dequantize, only_kept, two_of_four, with_zeros
from moejax.quantization.calibration import of_rows
from moejax.quantization.formats import parse_format
from moejax.quantization.rtn import round_to_nearest
from moejax.quantization.rules import Chosen, resolve_rules


def masked(w: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    """`[D, F]` with zeros for the two of every four inputs of an output that score least."""
    D, F = w.shape
    result = np.zeros_like(w)
    for output in range(F):
        for first in range(0, D, 4):
            inputs = range(first, first + 4)
            score = {i: abs(w[i, output]) * (1 if importance is None else importance[i]) for i in inputs}
            for i in sorted(inputs, key=lambda i: -score[i])[:2]:
                result[i, output] = w[i, output]
    return result


def drawn(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("name", ["float32_2of4", "bf16_2of4", "float16_2of4"])
def test_what_is_packed_is_the_masked_weight_to_the_bit_and_multiplies_so(name):
    w = drawn(3, 24, 10)
    w[0, :8] = 1.0  # all alike: the first two stay
    q = round_to_nearest(jnp.asarray(w), parse_format(name))
    stored = jnp.dtype(parse_format(name).numbers)
    want = np.stack([masked(one) for one in w]).astype(stored).astype(np.float32)
    np.testing.assert_array_equal(dequantize(q), want)
    assert q.shape == w.shape and q.nbytes == 3 * 24 * 10 * (stored.itemsize / 2 + 0.125) + 3 * 4
    one = jax.tree.map(lambda a: a[1], q)
    x = jnp.asarray(drawn(5, 24))
    np.testing.assert_array_equal(matmul(x, one, "dequantize"), jnp.matmul(x, want[1]))
    np.testing.assert_allclose(matmul(x, one), jnp.matmul(x, want[1]), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(dequantize(one.outputs(2, 4)), want[1][:, 2:6])


def test_codes_of_eight_bits_are_rounded_as_those_of_the_masked_weight():
    w = jnp.asarray(drawn(16, 6))
    q, plain = (round_to_nearest(a, parse_format(f)) for a, f in
                ((w, "int8_2of4"), (jnp.asarray(masked(np.asarray(w))), "int8")))  # fmt: skip
    np.testing.assert_array_equal(dequantize(q), dequantize(plain))


def test_places_are_two_bits_each_and_come_back():
    codes = jnp.asarray(drawn(7, 32, seed=3))
    kept = two_of_four(jnp.abs(codes))
    assert kept.shape == (7, 4) and kept.dtype == jnp.uint8
    values = only_kept(codes, kept)
    whole = np.asarray(with_zeros(values, kept))
    np.testing.assert_array_equal(whole.T, masked(np.asarray(codes).T))
    np.testing.assert_array_equal(only_kept(jnp.asarray(whole), kept), values)


def test_wanda_keeps_by_weight_times_the_norm_of_the_input():
    w, x = drawn(16, 6), drawn(40, 16, seed=1) * np.geomspace(0.05, 20, 16, dtype=np.float32)
    stats = of_rows(jnp.asarray(x), jnp.ones(40, bool))
    chosen = Chosen("wanda", parse_format("float32_2of4"))
    done = quantize("q_proj", jnp.asarray(w), chosen, QuantConfig(), stats)
    want = masked(w, np.linalg.norm(x, axis=0))
    np.testing.assert_array_equal(dequantize(done.tensor), want)
    assert (want != masked(w)).any()
    plain = quantize("q_proj", jnp.asarray(w), Chosen("magnitude", chosen.format), QuantConfig(), stats)
    assert done.output_error < plain.output_error and done.weight_error > plain.weight_error


@pytest.mark.parametrize(
    ("method", "fmt", "said"),
    [
        ("rtn", "bf16_2of4", "magnitude and wanda, .*, got rtn with bfloat16_2of4; change"),
        ("wanda", "int8", "got wanda with int8; change"),
        ("magnitude", "int4_2of4", "2of4 is for floats and symmetric 8-bit codes"),
        ("magnitude", "int8_asym_2of4", "2of4 is for floats and symmetric 8-bit codes"),
        ("magnitude", "bfloat16", "bfloat16 is for 2:4 weights alone, bfloat16_2of4"),
        ("wanda", "bf16_2of4", "q_proj.kernel: 2of4 needs a multiple of 8 inputs"),
    ],
)
def test_what_does_not_go_together_is_refused(method, fmt, said):
    with pytest.raises(ConfigError, match=said) as error:
        resolve_rules(QuantConfig(method=method, format=fmt), {"layers.0.attention.q_proj.kernel": (12, 8)})
    assert "\n" not in str(error.value)


def test_the_format_is_that_of_sparse_methods_where_none_is_named():
    assert QuantConfig(method="wanda").format == QuantConfig(method="magnitude").format == "bf16_2of4"
