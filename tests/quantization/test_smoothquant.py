"""SmoothQuant: the paper's scales, guarded, and less error of an 8-bit product."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.quantization.arithmetic import MOST, codes_to_values, dequantize, quantize_activations
from moejax.quantization.formats import parse_format
from moejax.quantization.rtn import round_to_nearest
from moejax.quantization.smoothquant import (
    LARGEST_SCALE,
    row_maxima,
    scales_of_maxima,
    static_input_scale,
)
from tests.quantization.calibrated import calibrated


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_the_papers_scales(alpha: float) -> None:
    case = calibrated()
    x = np.abs(np.asarray(case.x)).max(1)
    w = np.abs(np.asarray(case.w)).max(2)
    found = scales_of_maxima(jnp.asarray(x), row_maxima([case.w], 1), alpha=alpha)
    np.testing.assert_allclose(found, x**alpha / w ** (1 - alpha), rtol=1e-5)
    assert found.dtype == jnp.float32
    # At 0.5 activations and weights end with the same maxima.
    if alpha == 0.5:
        np.testing.assert_allclose(x / found, w * found, rtol=1e-5)


def test_experts_and_weights_that_read_one_input_share_its_scales() -> None:
    case, other = calibrated(), calibrated((), seed=1)
    x = jnp.abs(case.x).max((0, 1))
    rows = np.maximum(np.abs(case.w).max((0, 2)), np.abs(other.w).max(1))
    np.testing.assert_array_equal(row_maxima([case.w, other.w], 0), rows)
    assert scales_of_maxima(x, jnp.asarray(rows)).shape == (64,)
    assert row_maxima([case.w], 1).shape == (3, 64)


def test_scales_are_usable_where_maxima_are_not() -> None:
    x = jnp.asarray([1.0, 0.0, 1.0, 1e30, 1e-30, jnp.inf, jnp.nan])
    w = jnp.asarray([1.0, 1.0, 0.0, 1e-30, 1e30, 1.0, 1.0])
    found = scales_of_maxima(x, w)
    np.testing.assert_allclose(found, [1, 1, 1, LARGEST_SCALE, 1 / LARGEST_SCALE, 1, 1], rtol=1e-6)


@pytest.mark.parametrize("name", ["w8a8", "w8a8_static", "float8_e4m3fn_a8"])
def test_an_8_bit_product_of_outliers_loses_less(name: str) -> None:
    """Outliers a hundred times the other inputs: smoothed, int8's output error falls to a fraction. float8
    has
    an exponent for each number and gains nothing, but loses little."""
    fmt = parse_format(name)
    case = calibrated()
    x = case.x.at[..., 5].multiply(100.0)
    exact = x @ case.w

    def error(scales: jax.Array) -> float:
        smooth = x / scales[:, None, :]
        tensor = round_to_nearest(case.w * scales[..., None], fmt)
        given = static_input_scale(jnp.abs(smooth).max(1), fmt) if fmt.activations == "static" else None
        codes, scale = quantize_activations(smooth, fmt, given)
        values = codes_to_values(codes, scale, jnp.zeros_like(scale), fmt)
        return float(jnp.sum(jnp.square(values @ dequantize(tensor) - exact)))

    scales = scales_of_maxima(jnp.abs(x).max(1), row_maxima([case.w], 1))
    # Folding changes nothing but roundings.
    np.testing.assert_allclose(
        (x / scales[:, None, :]) @ (case.w * scales[..., None]),
        exact,
        rtol=1e-4,
        atol=1e-4 * jnp.abs(exact).max(),
    )
    plain, smooth = error(jnp.ones_like(scales)), error(scales)
    assert smooth < (0.3 if fmt.numbers == "int8" else 1.5) * plain


def test_a_static_scale_makes_the_largest_input_the_largest_code() -> None:
    fmt = parse_format("w8a8_static")
    case = calibrated()
    most = jnp.abs(case.x).max(1)
    scale = static_input_scale(most, fmt)
    assert scale.shape == (3, 1)
    np.testing.assert_allclose(scale[:, 0] * MOST["int8"], most.max(1), rtol=1e-6)
    codes, _ = quantize_activations(case.x, fmt, scale)
    assert int(jnp.abs(codes.astype(jnp.int32)).max()) == 127
    np.testing.assert_array_equal(static_input_scale(jnp.zeros((2, 8)), fmt), np.ones((2, 1)))
    with pytest.raises(ConfigError, match="int8_a8 has no static activation scales"):
        static_input_scale(most, parse_format("w8a8"))
