"""Routing of the tokens whose keys and values are in the cache: who finds these computed finds it, too.

It belongs to a place of a block as they do: it is copied with the block, to the host's store and back, and is
gone once the place is written anew. No JAX here.
"""

from typing import Any

import numpy as np

from moejax.engine.scheduling.plan import StepPlan


def places_of(part: StepPlan, block_size: int) -> list[np.ndarray]:
    """Returns where a group's part of a plan writes, `block · block_size + offset`, int64: of each decoding
    row; of each chunk, before its own tokens those that it found. Tables go on changing after the launch."""
    active = len(part.decodes) - part.idle
    rows = [(s, p, p + 1) for s, p in zip(part.decodes[:active], part.positions, strict=False)]
    rows += [(c.sequence, c.start - c.found, c.start + c.count) for c in part.chunks]
    every = ((np.asarray(s.blocks, np.int64), np.arange(first, end)) for s, first, end in rows)
    return [blocks[at // block_size] * block_size + at % block_size for blocks, at in every]


class CachedRouting:
    """Ids and weights `[L, k]` of every place of a data-parallel group's cache, and of the blocks in the
    host's store. Memory is committed as it is written."""

    def __init__(self, num_blocks: int, block_size: int, each: tuple[int, int], id_dtype: Any) -> None:
        self.block_size = block_size
        shape = (num_blocks * block_size, *each)
        self.rows = np.empty(shape, id_dtype), np.empty(shape, np.float32)
        self._stored: dict[int, list[np.ndarray]] = {}

    def move(self, plan: StepPlan) -> None:
        """Does with the routing what a step does with blocks before it computes."""
        blocks = [rows.reshape(-1, self.block_size, *rows.shape[1:]) for rows in self.rows]
        for block, slot in plan.saves:
            self._stored[slot] = [each[block].copy() for each in blocks]
        for slot, block in plan.loads:
            for each, stored in zip(blocks, self._stored[slot], strict=True):
                each[block] = stored
        for source, destination in plan.copies:
            for each in blocks:
                each[destination] = each[source]

    def write(self, places: np.ndarray, *new: np.ndarray) -> None:
        """Puts ids and weights `[n, L, k]` at n places."""
        for rows, values in zip(self.rows, new, strict=True):
            rows[places] = values
