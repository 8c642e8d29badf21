"""The block tables of a plan's sequences, as the plans of attention are made of them. Host code: no JAX."""

from itertools import chain

import numpy as np

from moejax.cache.allocator import GONE, first_seen
from moejax.cache.segments import SegmentLayout
from moejax.engine.scheduling.plan import StepPlan
from moejax.engine.scheduling.sequence import Sequence


class BlockTables:
    """Tables of the cache of all tokens, or with a `window` those of its layers.

    Attributes:
        segments: where the blocks lie.
        flat: int64, the decoding rows' tables, one after another, as far as they may be read.
        ids: int64, the blocks that they read: those of `flat` that are not gone.
        counts: the entries of `flat` of each row.
        firsts: int64, the place in its table of each row's first one.
    """

    def __init__(
        self,
        plan: StepPlan,
        segments: SegmentLayout,
        window: int | None = None,
        block_size: int = 1,
        evicts: bool = False,
    ) -> None:
        self.segments = segments
        self._window = window
        rows = plan.decodes
        if window is None:
            tables, firsts = [s.blocks for s in rows], [0] * len(rows)
        else:
            firsts = [first_seen(position, window, block_size) for position in plan.positions]
            tables = [s.window_blocks[first:] for s, first in zip(rows, firsts, strict=True)]
        self.counts = [len(table) for table in tables]
        self.flat = self.ids = np.fromiter(chain.from_iterable(tables), np.int64, sum(self.counts))
        if evicts:
            self.ids = self.flat[self.flat != GONE]
        self.firsts = np.array(firsts, np.int64)
        self._chunked = [max(self.of(chunk.sequence)) for chunk in plan.chunks]

    def of(self, sequence: Sequence) -> list[int]:
        """Returns a sequence's table."""
        return sequence.blocks if self._window is None else sequence.window_blocks

    @property
    def end(self) -> int:
        """The blocks up to the last one that the plan reads or writes."""
        return 1 + max([int(self.ids.max()) if len(self.ids) else 0, *self._chunked])
