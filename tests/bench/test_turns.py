"""The benchmarks' calls wait for the device, keep warm-up apart and take turns."""

import time

import jax
import jax.numpy as jnp
import pytest

from tests.bench.turns import Call, timed_rows


def test_compiling_is_in_the_first_call_only():
    step = jax.jit(lambda x: jnp.tanh(x @ x).sum())
    x = jnp.ones((64, 64), jnp.float32)
    ((row,), _) = timed_rows({"step": lambda: step(x)}, 5, "ratio")
    assert row["first_call_s"] > row["median_s"] >= row["min_s"] > 0


def test_device_work_is_waited_for():
    """A callback of 50 ms inside the computation: a timer that does not wait would not see it."""

    def slow(x):
        time.sleep(0.05)
        return x

    step = jax.jit(lambda x: jax.pure_callback(slow, jax.ShapeDtypeStruct((), jnp.float32), x) + 1.0)
    x = jnp.zeros((), jnp.float32)
    call = Call(lambda: step(x))
    call.warm_up()
    assert call.sample() >= 0.05e6


def test_variants_take_turns_and_ratios_refer_to_the_baseline():
    order = []

    def variant(name, seconds):
        def call():
            order.append(name)
            time.sleep(seconds)

        return call

    rows, ratios = timed_rows({"fast": variant("fast", 0.002), "slow": variant("slow", 0.008)}, 4, "ratio")
    assert order[:4] == ["fast", "fast", "slow", "slow"]
    assert order[4:] == ["fast", "slow", "slow", "fast"] * 2
    assert rows[0]["ratio"] == ratios["fast"].estimate == 1.0 and ratios["slow"].estimate > 1.5
    slow = ratios["slow"]
    assert slow.low <= slow.estimate <= slow.high


def test_what_fails_is_an_error():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        timed_rows({"a": lambda: 1 / 0}, 1, "ratio")
