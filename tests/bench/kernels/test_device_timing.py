"""Chains of calls: how many there are, on what inputs, and what a call's time is."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.bench.kernels.device_timing import MAX_CALLS, Chain, Timed, chain_length, measure, tree_bytes


def inputs(count):
    return [{"x": jnp.full((4,), float(i))} for i in range(count)]


def test_each_call_has_its_own_input():
    chain = Chain(lambda kw: kw["x"] * 10, inputs(3))
    assert chain.calls == 3
    (one,), many = chain._one(chain.inputs), chain._many(chain.inputs)
    assert one.tolist() == [0.0] * 4
    assert [out[0].item() for out in many] == [0, 10, 20]
    with pytest.raises(ValueError, match="at least two calls"):
        Chain(lambda kw: kw["x"], inputs(1))


def test_what_is_updated_in_place_is_carried_on():
    sets = [{"x": jnp.zeros(3), "step": jnp.full((), float(i))} for i in range(6)]
    chain = Chain(lambda kw: (kw["x"] + 1, kw["step"]), sets, {"x": 0})
    ((x, step),) = chain._many(chain.inputs)
    assert x.tolist() == [6.0] * 3 and step == 5


def test_no_call_of_a_chain_is_optimised_away():
    """A product each, on inputs of their own; equal inputs would be one product."""
    rng = np.random.default_rng(0)
    sets = [{"x": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)} for _ in range(7)]
    chain = Chain(lambda kw: kw["x"] @ kw["x"], sets)
    assert len(re.findall(r"= f32\[8,8\]\S* dot\(", chain._many.as_text())) == 7


def test_longer_work_takes_longer():
    """The difference of two chains is the time of a call: 8 times the flops, some times the microseconds."""
    sizes = {"small": 128, "large": 512}
    rng = np.random.default_rng(0)
    chains = {
        name: Chain(
            lambda kw: kw["x"] @ kw["x"],
            [{"x": jnp.asarray(rng.normal(size=(n, n)), jnp.float32)} for _ in range(8)],
        )
        for name, n in sizes.items()
    }
    timed = measure(chains, 7)
    assert {name: len(t.samples) for name, t in timed.items()} == {"small": 7, "large": 7}
    assert timed["large"].median_us > timed["small"].median_us > 0


def test_summary_of_samples():
    timed = Timed((10.0, 12.0, 11.0, 50.0, 9.0), calls=4)
    assert timed.median_us == 11.0
    assert 0 < timed.spread < 5


@pytest.mark.parametrize(
    "expected,size,want",
    [(1.0, 8, MAX_CALLS), (4000.0, 8, 2), (1000.0, 8, 4), (1.0, 4 << 30, 6), (1.0, 1 << 40, 2)],
)
def test_length_of_a_chain(expected, size, want):
    assert chain_length(expected, size) == want


def test_bytes_of_a_tree():
    tree = {"a": jnp.zeros((3, 4), jnp.bfloat16), "b": [jax.ShapeDtypeStruct((5,), "int8")]}
    assert tree_bytes(tree) == 29
