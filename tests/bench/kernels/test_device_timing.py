"""Chains of calls: how many there are, on what inputs, and what a call's time is."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.bench.kernels.device_timing import MAX_CALLS, Chain, Timed, chain_length, measure, tree_bytes
from pallas_kernels.registry import load_op


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
    chain = Chain(lambda kw: (kw["x"] + 1, kw["step"] * 2), sets, {"x": 0, "absent": 2})
    *early, (x, step) = chain._many(chain.inputs)
    assert x.tolist() == [6.0] * 3 and step == 10
    # The other outputs are all made, the pool once.
    assert [[float(y) for y in out] for out in early] == [[0.0], [2.0], [4.0], [6.0], [8.0]]


@pytest.mark.parametrize("pages", [jnp.float32, jnp.int8])
def test_pools_are_handed_on_from_write_to_write(pages):
    """Each call of `rope_kv_write` stores in the last one's pools: the last has what all have written."""
    T, bs, N = 2, 4, 3

    def one(i):
        key = jax.random.key(i)
        pools = {name: jnp.zeros((N, 1, bs, 8), pages) for name in ("k_pages", "v_pages")}
        scales = {name: jnp.ones((N, 1, bs)) for name in ("k_scale", "v_scale")}
        tokens = {name: jax.random.normal(key, (T, 1, 8)) for name in "qkv"}
        angles = {name: jnp.ones((T, 4)) for name in ("cos", "sin")}
        slots = jnp.array([2 * i, 2 * i + 1], jnp.int32)
        return tokens | angles | pools | (scales if pages == jnp.int8 else {}) | {"slot_mapping": slots}

    op = load_op("rope_kv_write")
    chain = Chain(lambda kw: op.reference(**kw), [one(i) for i in range(5)], op.carries)
    *_, (_, k_pages, v_pages, k_scale, _) = chain._many(chain.inputs)
    for pool in (k_pages, v_pages):
        written = (pool != 0).any(axis=(1, 3)).reshape(-1)
        assert written.tolist() == [True] * 10 + [False] * 2
    assert (k_scale is None) == (pages != jnp.int8)
    if k_scale is not None:
        assert (k_scale[:, 0].reshape(-1) != 1).tolist() == [True] * 10 + [False] * 2


@pytest.mark.optimized
def test_no_call_of_a_chain_is_optimised_away():
    """A product each, on inputs of their own; equal inputs would be one product."""
    rng = np.random.default_rng(0)
    sets = [{"x": jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)} for _ in range(7)]
    chain = Chain(lambda kw: kw["x"] @ kw["x"], sets)
    assert len(re.findall(r"= f32\[8,8\]\S* dot\(", chain._many.as_text())) == 7


class FakeClock:
    """Seconds that pass when a program says so."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Ticking(Chain):
    """A chain whose programs take 50 µs to launch and `each` µs a call, on a clock of its own."""

    def __init__(self, clock: FakeClock, each: float, calls: int, fails: int | None = None) -> None:
        self.clock, self.each, self.left = clock, each, fails
        super().__init__(lambda kw: kw, [{}] * calls)

    def _compile(self, function, calls, carries):
        def program(inputs):
            if self.left is not None:
                self.left -= 1
                if self.left < 0:
                    raise RuntimeError("RESOURCE_EXHAUSTED:\n  out of memory")
            self.clock.now += 1e-6 * (50 + self.each * calls)

        return program


def test_longer_work_takes_longer():
    """The difference of two chains over the calls between them: launching is in neither time."""
    clock = FakeClock()
    chains = {"small": Ticking(clock, 3.0, 8), "large": Ticking(clock, 40.0, 5)}
    timed, failed = measure(chains, 7, clock)
    assert failed == {}
    assert timed["small"].samples == pytest.approx([3.0] * 7) and timed["small"].calls == 8
    assert timed["large"].samples == pytest.approx([40.0] * 7)


@pytest.mark.parametrize("fails", [0, 1, 2, 7])
def test_one_that_fails_at_run_time_leaves_the_others(fails):
    """In the warm-up or in any sample."""
    clock = FakeClock()
    chains = {"bad": Ticking(clock, 3.0, 4, fails=fails), "good": Ticking(clock, 5.0, 4)}
    timed, failed = measure(chains, 5, clock)
    assert failed == {"bad": "RuntimeError: RESOURCE_EXHAUSTED: out of memory"}
    assert list(timed) == ["good"] and timed["good"].samples == pytest.approx([5.0] * 5)


def test_a_clock_that_sees_nothing():
    clock = FakeClock()
    timed, failed = measure({"none": Ticking(clock, 0.0, 4)}, 5, clock)
    assert not timed and "4 calls took no longer than one" in failed["none"]
    assert math.isnan(Timed((0.0,) * 5, 4).spread)


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
