"""Timing waits for the device, keeps warm-up apart and takes turns."""

import time

import jax
import jax.numpy as jnp
import pytest

from moejax.bench.timing import interleave, peak_memory, timed


def test_compiling_is_in_the_first_call_only():
    step = jax.jit(lambda x: jnp.tanh(x @ x).sum())
    x = jnp.ones((64, 64), jnp.float32)
    timing = interleave({"step": lambda: step(x)}, repeats=5)["step"]
    assert len(timing.seconds) == 5 and timing.first_call_s > timing.median_s >= timing.min_s > 0


def test_device_work_is_waited_for():
    """A callback of 50 ms inside the computation: a timer that does not wait would not see it."""

    def slow(x):
        time.sleep(0.05)
        return x

    step = jax.jit(lambda x: jax.pure_callback(slow, jax.ShapeDtypeStruct((), jnp.float32), x) + 1.0)
    x = jnp.zeros((), jnp.float32)
    timed(step, x)
    seconds, result = timed(step, x)
    assert seconds >= 0.05 and float(result) == 1.0


def test_variants_take_turns_and_ratios_refer_to_the_baseline():
    order = []

    def variant(name, seconds):
        def call():
            order.append(name)
            time.sleep(seconds)

        return call

    found = interleave({"fast": variant("fast", 0.002), "slow": variant("slow", 0.008)}, warmup=2, repeats=4)
    assert order[:4] == ["fast", "fast", "slow", "slow"]
    assert order[4:] == ["fast", "slow", "slow", "fast"] * 2
    assert found["fast"].ratio.estimate == 1.0 and found["slow"].ratio.estimate > 1.5
    slow = found["slow"].ratio
    assert slow.low <= slow.estimate <= slow.high


def test_wrong_use_is_an_error():
    with pytest.raises(ValueError, match="need variants"):
        interleave({})
    with pytest.raises(ValueError, match="warmup >= 1"):
        interleave({"a": lambda: None}, warmup=0)


def test_peak_memory_never_falls_and_is_in_bytes():
    before = peak_memory()
    assert before["process_peak_bytes"] > 10 * 2**20
    assert before["device_peak_bytes"] is None  # the CPU backend does not count
    assert peak_memory()["process_peak_bytes"] >= before["process_peak_bytes"]


class CountingDevice:
    def memory_stats(self):
        return {"peak_bytes_in_use": 7}


def test_device_peak_is_the_largest_devices():
    assert peak_memory([CountingDevice(), CountingDevice()])["device_peak_bytes"] == 7
