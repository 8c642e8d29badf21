"""The bitwise e4m3 conversions against ml_dtypes."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels._compat import load, pallas_call, store
from pallas_kernels.fp8 import decode_e4m3, encode_e4m3

E4M3 = ml_dtypes.float8_e4m3fn
CODES = np.arange(256, dtype=np.uint8)


def in_kernel(function, x, dtype):
    """`function` of a whole array, inside a kernel."""

    def kernel(x_ref, out_ref):
        at = jnp.arange(x.shape[0])
        store(out_ref.at[at], function(load(x_ref.at[at])))

    call = pallas_call(
        kernel,
        name="convert",
        grid=(1,),
        out_shape=jax.ShapeDtypeStruct(x.shape, dtype),
        num_warps=4,
        num_stages=1,
    )
    return np.asarray(jax.jit(call)(x))


@pytest.mark.contract
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_decodes_every_code(dtype):
    want = CODES.view(E4M3).astype(np.float64)
    decode = functools.partial(decode_e4m3, dtype=jnp.dtype(dtype))
    inside = in_kernel(decode, jnp.asarray(CODES), jnp.dtype(dtype))
    for got in (inside, np.asarray(decode(jnp.asarray(CODES)))):
        np.testing.assert_array_equal(got.astype(np.float64), want)
        finite = np.isfinite(want)  # zeros keep their sign
        np.testing.assert_array_equal(np.signbit(got[finite].astype(np.float32)), np.signbit(want[finite]))


@pytest.mark.contract
def test_encodes_as_ml_dtypes(rng):
    """Every code, every midpoint between two codes and its neighbours, and random numbers of all sizes."""
    values = np.sort(CODES[:127].view(E4M3).astype(np.float32))
    middle = (values[1:] + values[:-1]) / 2
    near = [np.nextafter(middle, np.float32(side), dtype=np.float32) for side in (0, np.inf)]
    spread = rng.normal(size=3000) * 2.0 ** rng.integers(-14, 8, 3000)
    x = np.concatenate([values, middle, *near, spread, [1e-30, 0.0]]).astype(np.float32)
    x = np.concatenate([x, -x])
    x = np.pad(x, (0, 8192 - x.size))
    want = np.clip(x, -448, 448).astype(E4M3).view(np.uint8)
    np.testing.assert_array_equal(in_kernel(encode_e4m3, jnp.asarray(x), jnp.uint8), want)
    np.testing.assert_array_equal(encode_e4m3(jnp.asarray(x)), want)


def test_encoding_saturates_and_keeps_nan():
    x = jnp.asarray([449.0, 1e30, np.inf, -np.inf, np.nan])
    assert np.asarray(encode_e4m3(x))[:4].tolist() == [0x7E, 0x7E, 0x7E, 0xFE]
    assert np.isnan(np.asarray(decode_e4m3(encode_e4m3(x)))[4])
