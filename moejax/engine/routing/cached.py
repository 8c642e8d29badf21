"""Routing of the tokens whose keys and values are in the cache: who finds these computed finds it, too.

As a token's keys and values it belongs to a place of a block: it is copied with the block, to the host's
store and back, and is gone once the place is written anew. No JAX here.
"""

from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import numpy as np

from moejax.engine.scheduling.plan import StepPlan


class Places(NamedTuple):
    """Where a group's part of a plan writes, `block · block_size + offset`, int64: of each decoding row; of
    each chunk, before its own tokens those that it found. Tables go on changing after the step's launch."""

    decodes: np.ndarray
    chunks: list[np.ndarray]

    @classmethod
    def of(cls, part: StepPlan, block_size: int) -> "Places":
        def places(blocks: Items[int], first: int, count: int) -> np.ndarray:
            positions = np.arange(first, first + count)
            table = np.asarray(blocks, np.int64)
            return table[positions // block_size] * block_size + positions % block_size

        active = len(part.decodes) - part.idle
        decodes = [(s.blocks, p, 1) for s, p in zip(part.decodes[:active], part.positions, strict=False)]
        chunks = [(c.sequence.blocks, c.start - c.found, c.found + c.count) for c in part.chunks]
        rows = [places(*row) for row in decodes]
        return cls(np.concatenate(rows or [np.zeros(0, np.int64)]), [places(*chunk) for chunk in chunks])


class CachedRouting:
    """Ids and weights `[L, k]` of every place of a data-parallel group's cache, and of the blocks in the
    host's store. Memory is committed as it is written."""

    def __init__(self, num_blocks: int, block_size: int, each: tuple[int, int], id_dtype: Any) -> None:
        self.block_size = block_size
        shape = (num_blocks * block_size, *each)
        self._rows = np.empty(shape, id_dtype), np.empty(shape, np.float32)
        self._stored: dict[int, list[np.ndarray]] = {}

    def move(self, plan: StepPlan) -> None:
        """Does with the routing what a step does with blocks before it computes."""
        for block, slot in plan.saves:
            self._stored[slot] = [rows[self._of(block)].copy() for rows in self._rows]
        for slot, block in plan.loads:
            for rows, stored in zip(self._rows, self._stored[slot], strict=True):
                rows[self._of(block)] = stored
        for source, destination in plan.copies:
            for rows in self._rows:
                rows[self._of(destination)] = rows[self._of(source)]

    def write(self, places: np.ndarray, ids: np.ndarray, weights: np.ndarray) -> None:
        for rows, new in zip(self._rows, (ids, weights), strict=True):
            rows[places] = new

    def read(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids, weights = self._rows
        return ids[places], weights[places]

    def _of(self, block: int) -> slice:
        return slice(block * self.block_size, (block + 1) * self.block_size)
