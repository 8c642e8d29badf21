"""The work list of decode attention: every key is some part's, and there are no more parts than places."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.work_list import LEAST_KEYS, decoded_keys, make_work_list, most_splits


@pytest.mark.parametrize("splits", [1, 2, 27, 128])
def test_parts(rng, splits):
    """Lengths of all sizes, some 0: parts in order, of at most a `splits`th of all keys or of few."""
    for longest in (1, 500, 40_000):
        S = 8
        keys = rng.integers(0, longest + 1, S).astype(np.int32)
        found = make_work_list(keys, splits)
        assert found.dtype == np.int32 and found.shape == (2 * S + splits,)
        np.testing.assert_array_equal(make_work_list(jnp.asarray(keys), splits, jnp), found)
        first, sequence = found[: S + 1], found[S + 1 :]
        parts = np.diff(first)
        assert first[0] == 0 and first[-1] <= S - 1 + splits and parts.max() <= splits
        assert ((parts > 0) == (keys > 0)).all()
        np.testing.assert_array_equal(sequence[: first[-1]], np.repeat(np.arange(S), parts))
        # What is left over is no part of the last sequence.
        assert (np.arange(S - 1 + splits) - first[sequence] >= parts[sequence])[first[-1] :].all()
        largest = -(-keys[keys > 0] // parts[keys > 0])
        assert (largest <= max(LEAST_KEYS, keys.sum() / splits + LEAST_KEYS)).all()


def test_few_queries():
    """Sequences with more queries than fit are not decoded, nor many with a few, which fill the device."""
    q_lens, kv_lens = np.array([0, 1, 4, 9, 1, 8]), np.array([9, 0, 30, 40, 7, 16])
    assert decoded_keys(q_lens, kv_lens, 4, 20).tolist() == [0, 0, 20, 0, 7, 16]
    assert decoded_keys(q_lens, kv_lens, 64, 20).tolist() == [0, 0, 0, 0, 7, 0]


def test_nothing_to_decode():
    assert make_work_list(np.zeros(3, np.int32), 5).tolist() == [0] * 4 + [2] * 7


@pytest.mark.parametrize(
    "sequences,kv_heads,context,splits",
    [
        (1, 4, 40_960, 54),
        (1, 4, 500, 7),
        (8, 4, 40_960, 47),
        (64, 4, 40_960, 128),
        (64, 8, 4096, 1),
        (64, 8, 32_768, 81),
        (1, 1, 40_960, 128),
        (4, 2, 48, 1),
        (1, 256, 40_960, 1),
    ],
)
def test_most_splits(sequences, kv_heads, context, splits):
    assert most_splits(sequences, kv_heads, context) == splits
