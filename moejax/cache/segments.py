"""How the pool of cache blocks is cut into slabs. Host arithmetic only: no JAX.

XLA:CPU cannot read part of an array without copying it, so the pool is several arrays ("slabs") of growing
size. A step is compiled for a number of slabs and reads exactly these: 8, 16, 32, 48, 64, 96, 128, 192, 256,
512, … blocks, at most twice the highest block in use. Finer steps would cost more programs and more, smaller
products.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ENDS = (8, 16, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True)
class SlabLayout:
    """`sizes[z]` blocks in slab z; `ends[z]` is the number of blocks in slabs 0 to z."""

    sizes: tuple[int, ...]
    ends: tuple[int, ...]

    @classmethod
    def of(cls, num_blocks: int, ends: Sequence[int] | None = None) -> "SlabLayout":
        """Slabs that together hold `num_blocks`, ending at `ends` (rising) or at `ENDS` and its doublings."""
        marks = list(ends or ENDS)
        while not ends and marks[-1] < num_blocks:
            marks.append(2 * marks[-1])
        marks = sorted({mark for mark in marks if mark < num_blocks} | {num_blocks})
        sizes = [b - a for a, b in zip([0, *marks], marks, strict=False)]
        return cls(tuple(sizes), tuple(marks))

    @property
    def num_blocks(self) -> int:
        return self.ends[-1]

    def slabs_for(self, blocks: int) -> int:
        """Number of slabs that hold blocks 0 to `blocks` - 1; at least 1."""
        return int(np.searchsorted(self.ends, max(blocks, 1), side="left")) + 1

    def locate(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Slab and index within the slab of each block, int32."""
        ends = np.asarray(self.ends)
        slab = np.searchsorted(ends, blocks, side="right").astype(np.int32)
        starts = ends - np.asarray(self.sizes)
        return slab, (blocks - starts[slab]).astype(np.int32)
