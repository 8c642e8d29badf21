"""Partition of the pool of cache blocks into segments. Host arithmetic only: no JAX.

XLA:CPU cannot read part of an array without copying it, so the pool is several arrays ("segments") of growing
size. A step is compiled for a number of segments and reads exactly these: 8, 16, 32, 48, 64, 96, 128, 192,
256, 512, … blocks, at most twice the highest block in use. Finer steps would cost more programs and more,
smaller products.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ENDS = (8, 16, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class SegmentLayout:
    """`sizes[z]` blocks in segment z; `ends[z]` is the number of blocks in segments 0 to z."""

    sizes: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, num_blocks: int, ends: Sequence[int] | None = None) -> "SegmentLayout":
        """Segments that together hold `num_blocks`, ending at `ends` (rising) or at `ENDS` and its
        doublings."""
        marks = list(ends or ENDS)
        while not ends and marks[-1] < num_blocks:
            marks.append(2 * marks[-1])
        marks = sorted({mark for mark in marks if mark < num_blocks} | {num_blocks})
        sizes = [b - a for a, b in zip([0, *marks], marks, strict=False)]
        return cls(tuple(sizes), tuple(marks))

    @property
    def num_blocks(self) -> int:
        return self.ends[-1]

    def segments_for(self, blocks: int) -> int:
        """Returns the number of segments that hold blocks 0 to `blocks` - 1; at least 1."""
        return int(np.searchsorted(self.ends, max(blocks, 1), side="left")) + 1

    def locate(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the segment and index within the segment of each block, int32."""
        ends = np.asarray(self.ends)
        segment = np.searchsorted(ends, blocks, side="right").astype(np.int32)
        starts = ends - np.asarray(self.sizes)
        return segment, (blocks - starts[segment]).astype(np.int32)
