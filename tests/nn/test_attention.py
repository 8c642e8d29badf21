"""Attention against float64 loops, in one part and in several, and through the contiguous cache."""

import functools
import math

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.nn.attention import Attention
from moejax.nn.param import initialize
from moejax.nn.rope import rope_tables
from moejax.ops import attention as attention_module
from moejax.ops.attention import attention
from tests.numerics import assert_close, tolerance
from tests.plain.contiguous_cache import ContiguousLayer

compiled = jax.jit(attention, static_argnames=("window", "scale"))


def reference(q, k, v, positions, window, scale):
    """q `[B, T, H, Dh]`, k and v `[B, K, S, Dh]`, one query at a time."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    B, T, H, _ = q.shape
    group = H // k.shape[1]
    out = np.zeros_like(q)
    for b in range(B):
        for t in range(T):
            p = int(positions[b, t])
            seen = slice(0 if window is None else max(0, p - window + 1), p + 1)
            for h in range(H):
                scores = k[b, h // group, seen] @ q[b, t, h] * scale
                weights = np.exp(scores - scores.max())
                out[b, t, h] = weights / weights.sum() @ v[b, h // group, seen]
    return out


def random_inputs(B, T, S, H, K, Dh, seed=0):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(B, T, H, Dh)).astype(np.float32)
    k, v = (rng.normal(size=(B, K, S, Dh)).astype(np.float32) for _ in range(2))
    return q, k, v


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("H, K", [(4, 4), (4, 2), (4, 1)])
def test_whole_sequences(H, K, window):
    q, k, v = random_inputs(2, 11, 11, H, K, 6)
    positions = np.broadcast_to(np.arange(11, dtype=np.int32), (2, 11))
    got = compiled(q, k, v, jnp.asarray(positions), window=window, scale=0.4)
    assert_close(got, reference(q, k, v, positions, window, 0.4), tolerance(6, 11))


@pytest.mark.parametrize("window", [None, 4])
def test_single_queries_at_their_own_positions(window):
    """Decode: each sequence stands elsewhere, and slots past it hold rubbish."""
    q, k, v = random_inputs(3, 1, 16, 4, 2, 8)
    positions = np.array([[0], [15], [7]], np.int32)
    for b, p in enumerate(positions[:, 0]):
        k[b, :, p + 1 :] = 1e30
        v[b, :, p + 1 :] = -1e30
    got = compiled(q, k, v, jnp.asarray(positions), window=window, scale=8**-0.5)
    assert_close(got, reference(q, k, v, positions, window, 8**-0.5), tolerance(8, 16))


def largest_array(jaxpr) -> int:
    """Elements of the largest intermediate anywhere in a jaxpr."""
    sizes = [math.prod(v.aval.shape) for eqn in jaxpr.eqns for v in eqn.outvars]
    inner = [
        largest_array(value.jaxpr)
        for eqn in jaxpr.eqns
        for value in eqn.params.values()
        if isinstance(value, jax.extend.core.ClosedJaxpr)
    ]
    return max(sizes + inner)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("queries", [1, 3, 5])
def test_parts_equal_the_whole(monkeypatch, queries, window):
    """A score matrix over the budget is computed for some of the 13 queries at a time, never held whole."""
    B, T, H = 2, 13, 4
    q, k, v = random_inputs(B, T, T, H, 2, 2)
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))

    def run(q, k, v):
        return attention(q, k, v, positions, window=window, scale=0.3)

    whole = jax.jit(run)(q, k, v)
    assert largest_array(jax.make_jaxpr(run)(q, k, v).jaxpr) == B * H * T * T
    monkeypatch.setattr(attention_module, "MAX_SCORE_ELEMENTS", B * H * T * queries)
    assert largest_array(jax.make_jaxpr(lambda *a: run(*a))(q, k, v).jaxpr) <= B * H * T * queries + q.size
    assert_close(jax.jit(lambda *a: run(*a))(q, k, v), whole, tolerance(2, T))


def test_large_scores_do_not_overflow():
    q, k, v = random_inputs(1, 5, 5, 2, 1, 4)
    positions = jnp.arange(5, dtype=jnp.int32)[None]
    got = compiled(q * 1e4, k * 1e4, v, positions, scale=1.0)
    assert_close(got, reference(q * 1e4, k * 1e4, v, positions, None, 1.0), tolerance(4, 5))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_keeps_its_dtype(dtype):
    q, k, v = (jnp.asarray(a, dtype) for a in random_inputs(1, 9, 9, 4, 2, 8))
    positions = jnp.arange(9, dtype=jnp.int32)[None]
    got = compiled(q, k, v, positions, scale=8**-0.5)
    assert got.dtype == jnp.dtype(dtype)
    expected = reference(*(np.asarray(a, np.float64) for a in (q, k, v)), positions, None, 8**-0.5)
    assert_close(got, expected, tolerance(8, 9, dtype=dtype))


def plain_module(config, module, x):
    """Attention block in float64: projections, norms, clip, rotation, attention, output."""
    B, T, _ = x.shape
    x = np.asarray(x, np.float64)

    def project(linear, heads):
        out = x @ np.asarray(linear.kernel[...], np.float64)
        if linear.bias is not None:
            out = out + np.asarray(linear.bias[...], np.float64)
        return out.reshape(B, T, heads, -1)

    def norm(t, scale, flat):
        shape = t.shape
        t = t.reshape(B, T, -1) if flat else t
        t = t / np.sqrt((t**2).mean(-1, keepdims=True) + config.rms_norm_eps) * np.asarray(scale, np.float64)
        return t.reshape(shape)

    q, k, v = (
        project(linear, heads)
        for linear, heads in (
            (module.q_proj, config.num_heads),
            (module.k_proj, config.num_kv_heads),
            (module.v_proj, config.num_kv_heads),
        )
    )
    if config.qk_norm != "none":
        flat = config.qk_norm == "projection"
        q, k = norm(q, module.q_norm.scale[...], flat), norm(k, module.k_norm.scale[...], flat)
    if config.clip_qkv is not None:
        q, k, v = (np.clip(t, -config.clip_qkv, config.clip_qkv) for t in (q, k, v))
    half = config.head_dim // 2
    angle = np.arange(T)[:, None] * config.rope.theta ** (-np.arange(half) / half)
    cos, sin = np.cos(angle)[None, :, None], np.sin(angle)[None, :, None]

    def rotate(t):
        first, second = t[..., :half], t[..., half:]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)

    q, k = rotate(q), rotate(k)
    positions = np.broadcast_to(np.arange(T), (B, T))
    heads_first = (t.transpose(0, 2, 1, 3) for t in (k, v))
    out = reference(q, *heads_first, positions, module.window, 1 / math.sqrt(config.head_dim))
    out = out.reshape(B, T, -1) @ np.asarray(module.o_proj.kernel[...], np.float64)
    return out if module.o_proj.bias is None else out + np.asarray(module.o_proj.bias[...], np.float64)


@pytest.mark.parametrize(
    "changes, window",
    [
        ({"qk_norm": "none", "head_dim": 12}, None),
        ({"qk_norm": "head", "qkv_bias": True, "attention_out_bias": True}, 3),
        ({"qk_norm": "projection", "clip_qkv": 0.8, "num_kv_heads": 4}, None),
        ({"qk_norm": "none", "qkv_bias": True, "num_kv_heads": 1}, 5),
    ],
)
def test_module_whole_and_through_a_cache(tiny_config, changes, window):
    """The block equals float64; prefill of 6 and 5 single tokens through a cache equal the block."""
    config = tiny_config.replace(**changes)
    module = Attention(config, window, jnp.float32)
    initialize(module, 0)
    rng = np.random.default_rng(0)
    for linear in (module.q_proj, module.k_proj, module.v_proj, module.o_proj):
        if linear.bias is not None:
            linear.bias.set_value(jnp.asarray(rng.normal(size=linear.bias[...].shape), jnp.float32))
    B, T, prompt = 2, 11, 6
    x = jnp.asarray(rng.normal(size=(B, T, config.hidden_size)), jnp.float32)
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    rope = rope_tables(config, positions, jnp.full(B, T, jnp.int32))
    whole, none = jax.jit(module)(x, rope, positions)
    assert none is None
    limit = tolerance(config.hidden_size, config.head_dim, T, config.num_heads * config.head_dim)
    assert_close(whole, plain_module(config, module, x), limit)

    shape = (B, config.num_kv_heads, T + 3, config.head_dim)
    # What a slot holds before it is written must not matter.
    k, v = jnp.full(shape, 7.0), jnp.full(shape, -7.0)

    @functools.partial(jax.jit, static_argnames="phase")
    def step(x, rope, positions, k, v, phase):
        out, layer = module(x, rope, positions, ContiguousLayer(k, v, phase, "auto"))
        return out, layer.k, layer.v

    parts = []
    for start, end, phase in [(0, prompt, "prefill"), *((t, t + 1, "decode") for t in range(prompt, T))]:
        part_rope = tuple(table[:, start:end] for table in rope)
        out, k, v = step(x[:, start:end], part_rope, positions[:, start:end], k, v, phase)
        parts.append(out)
    assert_close(jnp.concatenate(parts, axis=1), whole, limit)
