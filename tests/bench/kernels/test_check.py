"""Which results count as right: the distance, the limits, and what of a result is compared."""

import importlib
import math

import jax.numpy as jnp
import numpy as np
import pytest

from moejax.bench.kernels.baselines import restriction
from moejax.bench.kernels.check import check, largest_error
from pallas_kernels.op import Cost, Spec
from pallas_kernels.registry import OPS, load_op


def spec_of(**arrays):
    return Spec("toy", lambda key: arrays, {}, {}, Cost(1.0, 1.0))


SPEC = spec_of(x=jnp.zeros((4, 64)))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_infinitely_wrong(bad):
    """`max(0.0, nan)` is 0.0: a NaN must not pass for a perfect result."""
    want = jnp.ones((4, 64), jnp.bfloat16)
    assert check(want.at[1, 2].set(bad), want, SPEC) == (math.inf, "wrong result: not finite")
    assert check((want, want.at[0, 0].set(bad)), (want, want), SPEC).error == math.inf
    codes = jnp.ones(8, jnp.float8_e5m2)
    assert check(codes.at[0].set(bad), codes, SPEC).error == math.inf


def test_rounding_passes_and_a_wrong_row_does_not():
    rng = np.random.default_rng(0)
    exact = jnp.asarray(rng.normal(size=(64, 64)), jnp.float32)
    want = exact.astype(jnp.bfloat16)
    noise = jnp.asarray(rng.uniform(-1, 1, size=(64, 64)) * 2.0**-9, jnp.float32)
    rounded_twice = (exact * (1 + noise)).astype(jnp.bfloat16)
    error, fault = check(rounded_twice, want, SPEC)
    assert 0 < error < 2.0**-7 and fault is None
    error, fault = check(want.at[3].set(want[4]), want, SPEC)
    assert fault == f"wrong result: relative error {error:.1e}, at most 7.8e-03 by rounding"
    assert check(want[:3], want, SPEC).fault.startswith("wrong result: shapes [[3, 64]], expected [[64, 64]]")


def test_limits():
    sums = 8 * 2.0**-24 * math.sqrt(64)
    assert largest_error("bfloat16", 64) == 2.0**-7 + sums
    assert largest_error("float32", 64) == 2.0**-22 + sums
    assert largest_error("int32", 64) == 0
    assert largest_error("int8", 64) == largest_error("float8_e4m3fn", 64) == 2.0**-12


def test_integers_are_exact_but_for_ties():
    want = jnp.arange(4096, dtype=jnp.int32)
    one_off = want.at[7].set(8)
    error, fault = check(one_off, want, SPEC, "moe_permute")
    assert error == 2.0**-12 and fault is not None
    assert check(one_off, want, SPEC, "topk_router").fault is None
    assert check(want.at[:8].add(1), want, SPEC, "topk_router").fault is not None


def test_eight_bit_codes_are_compared_by_the_share_that_differs():
    want = jnp.ones(2**13, jnp.int8)
    assert check(want.at[0].set(2), want, SPEC).fault is None
    assert check(want.at[:3].set(2), want, SPEC).error == 3 / 2**13
    assert check(want.at[:3].set(2), want, SPEC).fault is not None


@pytest.mark.parametrize("name", OPS)
def test_contracts_that_leave_something_undefined_are_restricted(name):
    api = getattr(importlib.import_module(f"pallas_kernels.{name}"), name)
    text = (api.__doc__ or "") + (load_op(name).reference.__doc__ or "")
    whole = restriction("another")
    if "undefined" in text:
        assert restriction(name) is not whole


def test_padding_of_quantized_swiglu_is_not_compared():
    arrays = {
        "x": jnp.ones((3, 4)),
        "rows": jnp.array([1, 0, 2, 3, 0, 0], jnp.int32),
        "block_expert": jnp.array([0, 2, 2], jnp.int32),
        "num_blocks": jnp.array([2], jnp.int32),
    }
    got = restriction("quantized_grouped_swiglu")(jnp.full((6, 5), jnp.nan), arrays)
    assert jnp.isnan(got).any(axis=1).tolist() == [True, True, True, False, False, False]


def test_written_slots_are_compared_apart_from_the_pool():
    """A wrong row of one token in a large pool, and a write to a slot that is nobody's."""
    N, K, bs, Dh = 256, 1, 16, 8
    empty = jnp.zeros((N, K, bs, Dh), jnp.int8)
    arrays = {"k_pages": empty, "v_pages": empty, "slot_mapping": jnp.array([5, -1], jnp.int32)}
    restrict = restriction("rope_kv_write")
    pool = empty.at[0, :, 5].set(3)
    right = (jnp.ones((2, 1, Dh)), pool, pool, None, None)

    def fault(pages):
        got = restrict((right[0], pages, pool, None, None), arrays)
        return check(got, restrict(right, arrays), SPEC).fault

    assert fault(pool) is None
    # Of the whole pool this is a share of 2^-12, within the limit.
    assert fault(pool.at[0, :, 5].set(4)) is not None
    assert fault(pool.at[255, :, 15].set(1)) is not None
    _, written, others, *_ = restrict(right, arrays)
    assert written.tolist() == [[[3] * Dh], [[0] * Dh]]  # nothing of the token that is padding
    assert others == 0
