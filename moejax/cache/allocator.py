"""Ownership of cache blocks. Host bookkeeping only: no JAX, no keys, no values.

A sequence's block table lists its blocks in the order of its tokens: block j holds positions
[j·block_size, (j + 1)·block_size). Tables may share blocks (`fork`); a shared block is read by all and
written by none until the writer has a copy of its own (`append`).

    free heap | 4 7 8 9 …            refcount 0
    used      | 0 1 2 3 5 6          refcount = number of tables that hold the block

The lowest free block is handed out first, so that blocks in use stay near the front of the pool: a step reads
the pool only up to the highest block in use (`moejax.cache.segments`).
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from moejax.core.errors import MoejaxError


class OutOfBlocks(MoejaxError):
    """There are fewer free blocks than asked for. Nothing was changed."""


class BlockAllocator:
    """`num_blocks` blocks of `block_size` tokens, with reference counts.

    Block tables are plain lists owned by the sequences; a method that changes one keeps the counts in step.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks))  # a heap
        self._refcount = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def refcount(self, block: int) -> int:
        return self._refcount[block]

    def blocks_for(self, tokens: int) -> int:
        """Counts the blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def grow(self, table: list[int], tokens: int) -> list[int]:
        """Lengthens `table` until it holds `tokens` tokens; returns the new blocks.

        Raises:
            OutOfBlocks: there are too few; the table is unchanged.
        """
        missing = self.blocks_for(tokens) - len(table)
        if missing > len(self._free):
            raise OutOfBlocks(f"{missing} blocks wanted, {len(self._free)} of {self.num_blocks} free")
        new = [self._take() for _ in range(missing)]
        table.extend(new)
        return new

    def fork(self, table: Sequence[int]) -> list[int]:
        """Returns a second table that shares every block of `table`."""
        for block in table:
            self._refcount[block] += 1
        return list(table)

    def append(self, table: list[int], position: int) -> tuple[int, int] | None:
        """Makes the block of `position` writable for the table's owner alone, adding it if it is new.

        Returns:
            (source, destination) where a shared block must be copied before the write, else None.

        Raises:
            OutOfBlocks: a block was needed; nothing was changed.
        """
        index = position // self.block_size
        if index == len(table):
            self.grow(table, position + 1)
            return None
        old = table[index]
        if self._refcount[old] == 1:
            return None
        if not self._free:
            raise OutOfBlocks(f"1 block wanted, 0 of {self.num_blocks} free")
        self._refcount[old] -= 1
        table[index] = self._take()
        return old, table[index]

    def release(self, table: list[int]) -> None:
        """Gives up every block of `table` and empties it."""
        for block in table:
            self._refcount[block] -= 1
            if self._refcount[block] == 0:
                heapq.heappush(self._free, block)
        table.clear()

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Checks that blocks are conserved: free or used, counted once for each table that holds them.

        Raises:
            AssertionError: says which block is wrong, and how.
        """
        uses = Counter(block for table in tables for block in table)
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a block is on the free list twice")
        for block, count in enumerate(self._refcount):
            if count != uses[block]:
                raise AssertionError(f"block {block} has refcount {count} and is in {uses[block]} tables")
            if (count == 0) != (block in free):
                raise AssertionError(
                    f"block {block} has refcount {count} and is {'' if block in free else 'not '}free"
                )
        if strange := [block for block in {*uses, *free} if not 0 <= block < self.num_blocks]:
            raise AssertionError(f"blocks {strange} do not exist")
        if any(self._free[(i - 1) // 2] > block for i, block in enumerate(self._free) if i):
            raise AssertionError("the free list is not a heap: the lowest block would not be first")

    def _take(self) -> int:
        block = heapq.heappop(self._free)
        self._refcount[block] = 1
        return block
