"""The calibration set's hidden states, kept on the host and run through the model a batch at a time."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.core.errors import OutputError, os_errors


class Batch(NamedTuple):
    """Sequences `rows` of the set: x `[B, T, D]` and valid bool `[B, T]`, False in rows that fill it up."""

    rows: slice
    x: jax.Array
    valid: jax.Array


class HiddenStates:
    """Inputs of the next stage, `[S, L, D]` in the model's dtype: an array, or a file read page by page."""

    def __init__(self, values: np.ndarray, batch_size: int) -> None:
        self.values = values
        self.batch_size = min(batch_size, len(values))

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any, batch_size: int, path: Path | None) -> "HiddenStates":
        """Returns states to be filled; on disk at `path`, in memory without one.

        Raises:
            OutputError: the disk has no room for it.
        """
        if path is None:
            return cls(np.empty(shape, dtype), batch_size)
        with os_errors(OutputError, f"cannot write {path}"), open(path, "wb") as file:
            # Reserved now: a disk that fills up later would end the process without a word.
            os.posix_fallocate(file.fileno(), 0, math.prod(shape) * np.dtype(dtype).itemsize)
        return cls(np.memmap(path, dtype, "r+", shape=shape), batch_size)

    @property
    def num_tokens(self) -> int:
        return int(self.values.shape[0] * self.values.shape[1])

    def batches(self) -> Iterator[Batch]:
        """Yields all sequences in order, in batches of one shape, so that one program runs them."""
        S, T, D = self.values.shape
        for start in range(0, S, self.batch_size):
            rows = slice(start, min(start + self.batch_size, S))
            count = rows.stop - start
            x = np.zeros((self.batch_size, T, D), self.values.dtype)
            x[:count] = self.values[rows]
            valid = np.zeros((self.batch_size, T), bool)
            valid[:count] = True
            yield Batch(rows, jnp.asarray(x), jnp.asarray(valid))

    def put(self, batch: Batch, x: jax.Array) -> None:
        """Stores the stage's outputs for a batch."""
        self.values[batch.rows] = np.asarray(x)[: batch.rows.stop - batch.rows.start]
