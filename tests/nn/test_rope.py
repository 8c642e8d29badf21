"""Rotary embedding: each kind's formula in float64, and what a rotation must do."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.config import RopeConfig
from moejax.core.errors import ConfigError
from moejax.nn.rope import apply_rope, rope_frequencies, rope_tables
from tests.numerics import UNIT_ROUNDOFF, assert_close, tolerance

EPS = UNIT_ROUNDOFF["float32"]


def with_rope(config, **fields):
    return config.replace(rope=RopeConfig(**fields), head_dim=32, max_position_embeddings=64)


def plain(theta, dim=32):
    return theta ** (-np.arange(0, dim, 2) / dim)


def test_default_and_linear(tiny_config):
    freqs, factor = rope_frequencies(with_rope(tiny_config, theta=1e6))
    np.testing.assert_allclose(freqs, plain(1e6), rtol=16 * EPS)
    assert factor == 1.0
    freqs, factor = rope_frequencies(with_rope(tiny_config, kind="linear", factor=4.0))
    np.testing.assert_allclose(freqs, plain(1e4) / 4, rtol=16 * EPS)
    assert factor == 1.0


def test_llama3(tiny_config):
    """Wavelengths under original/high stay, over original/low are divided, between are blended linearly in
    original/wavelength."""
    config = with_rope(
        tiny_config, kind="llama3", factor=8.0, original_max_position_embeddings=512, low_freq_factor=1.0,
        high_freq_factor=4.0,
    )  # fmt: skip
    freqs, factor = rope_frequencies(config)
    expected = []
    for f in plain(1e4):
        turns = 512 * f / (2 * math.pi)  # rotations within the original context
        smooth = min(max((turns - 1.0) / (4.0 - 1.0), 0.0), 1.0)
        expected.append((1 - smooth) * f / 8.0 + smooth * f)
    np.testing.assert_allclose(freqs, expected, rtol=32 * EPS)
    kept, divided = np.isclose(freqs, plain(1e4)), np.isclose(freqs, plain(1e4) / 8)
    assert kept.any() and divided.any() and not (kept | divided).all(), "all three regions are there"
    assert factor == 1.0


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn(tiny_config, truncate):
    """§3.2-3.4 of the paper: a ramp over dimensions between beta_fast and beta_slow rotations."""
    config = with_rope(
        tiny_config, kind="yarn", factor=4.0, original_max_position_embeddings=512, truncate=truncate
    )
    freqs, factor = rope_frequencies(config)

    def dimension(rotations):
        return 32 * math.log(512 / (rotations * 2 * math.pi)) / (2 * math.log(1e4))

    low, high = dimension(32), dimension(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    ramp = np.clip((np.arange(16) - low) / (high - low), 0, 1)
    np.testing.assert_allclose(freqs, plain(1e4) * (1 - ramp) + plain(1e4) / 4 * ramp, rtol=32 * EPS)
    assert 0 < ((ramp > 0) & (ramp < 1)).sum() < 16
    assert factor == pytest.approx(0.1 * math.log(4.0) + 1.0, rel=1e-12)


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({"attention_factor": 0.75}, 0.75),
        ({"mscale": 0.5, "mscale_all_dim": 2.0}, (0.05 * math.log(4) + 1) / (0.2 * math.log(4) + 1)),
        ({"mscale": 0.5}, 0.1 * math.log(4) + 1),  # both or neither
        ({"factor": 0.5}, 1.0),
    ],
)
def test_yarn_attention_factor_scales_the_tables(tiny_config, fields, expected):
    fields = {"kind": "yarn", "factor": 4.0, "original_max_position_embeddings": 512} | fields
    config = with_rope(tiny_config, **fields)
    assert rope_frequencies(config)[1] == pytest.approx(expected, rel=1e-12)
    cos, sin = rope_tables(config, jnp.arange(9, dtype=jnp.int32)[None], jnp.array([9], jnp.int32))
    np.testing.assert_allclose(cos**2 + sin**2, expected**2, rtol=16 * EPS)


def test_dynamic_grows_past_the_trained_length(tiny_config):
    config = with_rope(tiny_config, kind="dynamic", factor=2.0)
    positions = jnp.broadcast_to(jnp.arange(50, dtype=jnp.int32), (3, 50))
    lengths = [10, 64, 150]  # under, at and over max_position_embeddings
    cos, sin = rope_tables(config, positions, jnp.array(lengths, jnp.int32))
    for b, length in enumerate(lengths):
        grown = 2.0 * max(length, 64) / 64 - 1.0
        freqs = plain(1e4 * grown ** (32 / 30))
        angle = np.arange(50)[:, None] * freqs
        np.testing.assert_allclose(cos[b], np.cos(angle), atol=50 * 32 * EPS)
        np.testing.assert_allclose(sin[b], np.sin(angle), atol=50 * 32 * EPS)
    assert np.abs(cos[1] - cos[2]).max() > 0.01
    np.testing.assert_array_equal(cos[0], cos[1])


@pytest.mark.parametrize("last", [63, 8191])
def test_tables_at_far_positions(tiny_config, last):
    """The float32 angle itself is the limit: position times frequency, rounded once and once."""
    config = with_rope(tiny_config, theta=1e4)
    positions = jnp.array([[0, 1, last // 2, last]], jnp.int32)
    cos, sin = jax.jit(rope_tables, static_argnums=0)(config, positions, jnp.array([last + 1], jnp.int32))
    angle = np.asarray(positions[0], np.float64)[:, None] * plain(1e4)
    limit = (4 * last + 16) * EPS
    np.testing.assert_allclose(cos[0], np.cos(angle), rtol=0, atol=limit)
    np.testing.assert_allclose(sin[0], np.sin(angle), rtol=0, atol=limit)


def test_rotation_keeps_length_and_relative_position(tiny_config):
    """Norms stay, and q·k depends on the distance of the two positions only."""
    config = with_rope(tiny_config, theta=1e4)
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.normal(size=(1, 1, 1, 32)), jnp.float32) for _ in range(2))

    def at(x, position):
        cos, sin = rope_tables(config, jnp.array([[position]], jnp.int32), jnp.array([64], jnp.int32))
        return apply_rope(x, cos, sin)

    assert_close(jnp.linalg.norm(at(q, 41)), jnp.linalg.norm(q), tolerance(32))
    products = [float(jnp.vdot(at(q, p), at(k, p - 5))) for p in (5, 17, 40)]
    np.testing.assert_allclose(products, products[0], atol=float(tolerance(32) * 32 + 41 * 32 * EPS))
    np.testing.assert_array_equal(at(q, 0), q)
    # Dimension i turns with i + Dh/2, as in transformers, not with its neighbour.
    unit = jnp.zeros((1, 1, 1, 32)).at[..., 3].set(1.0)
    assert set(np.flatnonzero(np.asarray(at(unit, 1)).ravel())) == {3, 19}


def test_longrope_changes_with_the_length(tiny_config):
    """Divisors, and the factor on cos and sin, by whether a sequence is longer than the original length."""
    half = 16
    short, long = (tuple(np.linspace(1.0, last, half)) for last in (2.0, 8.0))
    lengths = {"factor": 4.0, "original_max_position_embeddings": 16}
    for scales, wanted in (({}, 2 * [math.sqrt(1 + math.log(4) / math.log(16))]),
                           ({"short_mscale": 1.1, "long_mscale": 1.3}, [1.1, 1.3])):  # fmt: skip
        config = with_rope(
            tiny_config, kind="longrope", theta=1e4, short_factor=short, long_factor=long, **lengths, **scales
        )
        positions = jnp.array([[3], [3]], jnp.int32)
        cos, sin = rope_tables(config, positions, jnp.array([16, 17], jnp.int32))
        for row, (divisors, scale) in enumerate(zip((short, long), wanted, strict=True)):
            angles = 3 * plain(1e4) / np.array(divisors)
            np.testing.assert_allclose(cos[row, 0], scale * np.cos(angles), rtol=0, atol=1e-6)
            np.testing.assert_allclose(sin[row, 0], scale * np.sin(angles), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"kind": "ntk"}, "longrope"),
        ({"kind": "longrope", "original_max_position_embeddings": 8}, "short_factor"),
        ({"theta": 0.0}, "rope_theta"),
        ({"kind": "linear", "factor": -1.0}, "factor"),
        ({"kind": "yarn", "factor": 2.0}, "original_max_position_embeddings"),
    ],
)
def test_bad_fields_are_named(fields, named):
    with pytest.raises(ConfigError, match=named):
        RopeConfig(**fields)
