"""Two traces: loads apart, tokens that both have."""

import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.routing.difference import compare_captures, js_divergence
from moejax.routing.generate import generate
from tests.routing.traces import trace_of


def test_divergence_of_known_loads() -> None:
    np.testing.assert_allclose(
        js_divergence([[2, 2], [1, 0], [3, 1], [0, 0]], [[5, 5], [0, 9], [1, 0], [1, 1]]),
        [
            0,
            1,
            0.5 * (0.75 * np.log2(0.75 / 0.875) + 0.25 * np.log2(0.25 / 0.125) + np.log2(1 / 0.875)),
            np.nan,
        ],
        atol=1e-12,
    )


def test_tokens_are_matched_by_prompt_sample_and_position() -> None:
    first = trace_of(
        [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]], [[0, 2]]], [0, 0, 1, 1, 2], [0, 0, 1, 2, 2], [0, 1, 0, 0, 1],
        experts=8, hashes=("a", "b", "a"),
    )  # fmt: skip
    # "a" twice, another prompt before; position 1 of the first "a" is missing; the second "a" flips one.
    second = trace_of(
        [[[3, 4]], [[1, 0]], [[6, 5]], [[0, 2]], [[5, 6]]], [0, 0, 0, 1, 1], [0, 1, 2, 2, 2], [0, 0, 0, 1, 2],
        experts=8, hashes=("c", "a", "a"),
    )  # fmt: skip
    found = compare_captures(first, second)
    assert found.matched == 3
    assert found.flips == pytest.approx([1 / 3]) and found.overlap == pytest.approx([5 / 6])
    back = compare_captures(second, first)
    assert back.matched == 3 and back.flips == pytest.approx([1 / 3])
    np.testing.assert_allclose(back.divergence, found.divergence)


def test_generated_traces_are_matched_in_order_and_recomputed_tokens_once() -> None:
    shape = {"num_experts": 8, "top_k": 2, "layers": 2, "requests": 3, "prompt_len": 4, "output_len": 5}
    one, other = generate("uniform", **shape, seed=1), generate("uniform", **shape, seed=2)
    same = compare_captures(one, one)
    assert same.matched == one.num_rows and not same.flips.any() and (same.overlap == 1).all()
    assert compare_captures(one, other).flips.min() > 0.5
    again = one.select(np.r_[np.arange(one.num_rows), 3, 5])
    assert compare_captures(again, one).matched == one.num_rows


def test_traces_of_other_shapes_are_refused() -> None:
    shape = {"num_experts": 8, "top_k": 2, "layers": 2, "requests": 1, "prompt_len": 2, "output_len": 2}
    one = generate("uniform", **shape)
    for change, words in (
        ({"layers": 3}, "the first has 2 layers with experts, the second 3"),
        ({"num_experts": 9}, "first has 8 experts, the second 9"),
        ({"top_k": 1}, "2 experts per token, the second 1"),
    ):
        with pytest.raises(ConfigError, match=words):
            compare_captures(one, generate("uniform", **{**shape, **change}))
