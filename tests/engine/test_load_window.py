"""The moving window of expert loads: its sums and its bounded memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.core.errors import ConfigError
from moejax.engine.routing.expert_counts import LoadWindow


@settings(max_examples=50)
@given(length=st.integers(1, 100), steps=st.lists(st.integers(0, 30), min_size=1, max_size=200))
def test_a_window_covers_its_length_in_few_parts(length: int, steps: list[int]) -> None:
    window = LoadWindow(1, 2, length)
    assert window.steps == 0 and not window.sum().any()
    for n, load in enumerate(steps, 1):
        counts = np.array([[load, 1]], np.int32)
        window.add(counts)
        counts[...] = 99  # the caller's array is its own
        np.testing.assert_array_equal(window.sum(), [[sum(steps[n - window.steps : n]), window.steps]])
        assert min(length, n) <= window.steps < length + -(-length // 32), "its length and little more"
        assert window.steps == min(length, n) or length > 32, "a short window is exact"
        assert len(window._parts) <= 33, "memory is bounded"
    window.sum()[...] = 99
    assert window.sum().dtype == np.int64 and window.sum()[0, 1] == window.steps


def test_a_window_without_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="window_steps=0 must be at least 1"):
        LoadWindow(1, 2, 0)
