"""The moving window of expert loads: its sums, its bounded memory, and who is beyond a factor."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.core.errors import ConfigError
from moejax.moe.load_window import LoadWindow, beyond


def steps_of(rng: np.random.Generator, n: int) -> list[np.ndarray]:
    return [rng.integers(0, 9, (2, 4)).astype(np.int32) for _ in range(n)]


def test_a_short_window_is_exact():
    window = LoadWindow(2, 4, window_steps=5)
    seen = steps_of(np.random.default_rng(0), 20)
    assert (window.mean() == 0).all() and not window.full
    for n, counts in enumerate(seen, 1):
        window.add(counts, tokens=7)
        latest = seen[max(0, n - 5) : n]
        np.testing.assert_array_equal(window.sum(), np.sum(latest, axis=0))
        np.testing.assert_allclose(window.mean(), np.mean(latest, axis=0))
        assert (window.steps, window.tokens) == (len(latest), 7 * len(latest))
        assert window.full == (n >= 5)
    assert window.sum().dtype == np.int64


@settings(max_examples=50, deadline=None)
@given(
    length=st.integers(1, 60),
    parts=st.integers(1, 8),
    tokens=st.lists(st.integers(0, 30), min_size=1, max_size=80),
    by_tokens=st.booleans(),
)
def test_a_long_window_is_held_in_few_parts(length, parts, tokens, by_tokens):
    kind = {"window_tokens": length} if by_tokens else {"window_steps": length}
    window = LoadWindow(1, 2, parts=parts, **kind)
    sizes = tokens if by_tokens else [1] * len(tokens)
    part = -(-length // parts)
    for n, size in enumerate(tokens, 1):
        window.add(np.array([[size, 1]]), tokens=size)
        # The counts of expert 1 say how many steps the window holds, those of expert 0 how many tokens.
        steps = int(window.sum()[0, 1])
        assert window.steps == steps and window.tokens == window.sum()[0, 0] == sum(tokens[n - steps : n])
        held = sum(sizes[n - steps : n])
        assert held >= min(length, sum(sizes[:n])), "all of the length is covered"
        assert held < length + part + max(sizes), "and little more"
        assert window.full == (held >= length)
        assert len(window._parts) <= parts + 2, "memory is bounded"


def test_reset_and_copies():
    window = LoadWindow(1, 2, window_tokens=10)
    counts = np.array([[3, 4]])
    window.add(counts, tokens=5)
    counts[...] = 99
    window.sum()[...] = 99
    np.testing.assert_array_equal(window.sum(), [[3, 4]])
    window.reset()
    assert (window.steps, window.tokens) == (0, 0) and not window.sum().any()
    window.add(np.array([[1, 0]]), tokens=1)
    np.testing.assert_array_equal(window.sum(), [[1, 0]])


def test_experts_beyond_a_factor():
    window = LoadWindow(2, 4, window_steps=3)
    window.add(np.array([[8, 4, 3, 1], [0, 0, 0, 0]]))
    result = window.experts_over(1.5)
    np.testing.assert_array_equal(result.over, [[0, 0]])
    np.testing.assert_array_equal(result.under, [[0, 3]])
    assert (result.ratio[1] == 1).all(), "nobody is beyond where nothing was counted"
    assert result and not window.experts_over(2.0, under=0.0)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: LoadWindow(1, 2), "window_steps=None or window_tokens=None"),
        (lambda: LoadWindow(1, 2, window_steps=1, window_tokens=1), "one length"),
        (lambda: LoadWindow(1, 2, window_steps=0), "window=0"),
        (lambda: LoadWindow(0, 2, window_steps=1), "num_layers=0"),
        (
            lambda: LoadWindow(1, 2, window_steps=1).add(np.zeros((2, 2), int)),
            r"\[2, 2\], expected.*\[1, 2\]",
        ),
        (lambda: LoadWindow(1, 2, window_steps=1).add(np.zeros((1, 2))), "float64"),
        (lambda: LoadWindow(1, 2, window_steps=1).add(np.array([[0, -1]])), "expert 1 has -1"),
        (lambda: LoadWindow(1, 2, window_tokens=1).add(np.array([[0, 1]])), "needs `tokens`"),
        (lambda: LoadWindow(1, 2, window_steps=1).add(np.array([[0, 1]]), tokens=-1), "tokens=-1"),
        (lambda: beyond(np.ones((1, 2)), 0.5), "factor=0.5"),
        (lambda: beyond(np.ones((1, 2)), float("nan")), "factor=nan"),
        (lambda: beyond(np.ones((1, 2)), 2.0, under=1.5), "under=1.5"),
    ],
)
def test_errors_name_the_numbers(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
