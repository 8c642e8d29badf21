"""Cache blocks in the host's memory. Whose they are is not known here: `moejax.cache.prefix` gives slots."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


class BlockStore:
    """`slots` blocks: of each array of each layer's segments a host array `[slots, …]`, with all heads.

    What comes is copied once it is there (`settle`), so that nobody waits for the device.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.reset()

    def reset(self) -> None:
        """Forgets all content."""
        self._arrays: list[np.ndarray] = []
        self._coming: list[tuple[list[int], list[jax.Array]]] = []

    @property
    def nbytes(self) -> int:
        """Bytes set aside; the system commits them as they are written."""
        return sum(array.nbytes for array in self._arrays)

    def put(self, slots: Sequence[int], blocks: Any) -> None:
        """Takes blocks on their way from the device: a tree of arrays `[at least len(slots), …]`."""
        leaves = jax.tree.leaves(blocks)
        self._make(leaves)
        self._coming.append((list(slots), leaves))

    def copy(self, arrays: Sequence[np.ndarray], block: int, slot: int) -> None:
        """Copies a block of arrays in the host's memory."""
        self.settle()  # what is on its way to the same slot is older
        self._make(arrays)
        for mine, array in zip(self._arrays, arrays, strict=True):
            mine[slot] = array[block]

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        """Takes all its blocks, as `get` gives them."""
        self._arrays = list(arrays)

    def _make(self, like: Sequence[Any]) -> None:
        if not self._arrays:
            self._arrays = [np.empty((self.slots, *each.shape[1:]), each.dtype) for each in like]

    def settle(self) -> None:
        """Copies what was put, waiting for it where it is not there yet."""
        for slots, leaves in self._coming:
            for array, leaf in zip(self._arrays, leaves, strict=True):
                array[slots] = np.asarray(leaf)[: len(slots)]
        self._coming = []

    def get(self, slots: Sequence[int]) -> list[np.ndarray]:
        """Returns copies of blocks, in the order of a tree's leaves."""
        self.settle()
        return [array[list(slots)] for array in self._arrays]
