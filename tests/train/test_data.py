"""Batches: a pure function of (seed, sequence number); held-out targets exactly once."""

import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.train.data import Batches, held_out_batches

DOCUMENTS = [
    np.arange(start, start + length, dtype=np.int32) for start, length in ((0, 90), (90, 60), (150, 150))
]


def _batches(seed: int = 0) -> Batches:
    return Batches(DOCUMENTS, batch_size=4, seq_len=8, seed=seed)


def test_a_batch_depends_on_seed_and_place_only() -> None:
    forward = _batches()
    in_order = [forward(sequence) for sequence in range(0, 120, 4)]
    fresh = _batches()
    for i in (29, 3, 17, 0):  # other epochs, any order
        np.testing.assert_array_equal(fresh(4 * i), in_order[i])
    assert not np.array_equal(_batches(seed=1)(0), in_order[0])


def test_windows_are_text_as_it_stands_and_an_epoch_has_each_once() -> None:
    batches = _batches()
    windows = np.concatenate([batches(4 * i) for i in range(batches.windows_per_epoch // 4)])
    assert windows.shape[1] == 9 and windows.dtype == np.int32
    # Within a document tokens rise by one; a window may cross from one document into another.
    inside = np.diff(windows, axis=1) == 1
    assert inside.mean() > 0.95
    targets = windows[:, 1:].ravel()
    assert len(np.unique(targets)) == len(targets)


def test_epochs_cut_the_text_at_different_places() -> None:
    batches = _batches()
    first = batches._epoch(0)[1] % 8
    assert len({int(batches._epoch(e)[1][0] % 8) for e in range(6)}) > 1
    assert len(np.unique(first)) == 1


def test_too_little_text_is_said() -> None:
    with pytest.raises(ConfigError, match="batch_size=64"):
        Batches(DOCUMENTS, batch_size=64, seq_len=8, seed=0)


@pytest.mark.parametrize("length", [2, 8, 9, 32, 33, 34, 100])
def test_held_out_targets_come_exactly_once(length: int) -> None:
    stream = np.arange(length, dtype=np.int32)
    parts = list(held_out_batches(stream, batch_size=2, seq_len=8))
    targets = np.concatenate([tokens[:, 1:][scored] for tokens, scored in parts])
    np.testing.assert_array_equal(targets, stream[1:])
    inputs = np.concatenate([tokens[:, :-1][scored] for tokens, scored in parts])
    np.testing.assert_array_equal(inputs, stream[:-1])
    assert all(tokens.shape == (2, 9) and scored.shape == (2, 8) for tokens, scored in parts)
