"""Ownership of cache blocks. Host bookkeeping only: no JAX, no keys, no values.

A sequence's block table lists its blocks in the order of its tokens: block j holds positions
[j·block_size, (j + 1)·block_size). Tables may share blocks (`fork`); a shared block is read by all and
written by none until the writer has a copy of its own (`append`).

    free heap | 4 7 8 9 …            refcount 0
    kept      | 10 11                refcount 0, remembered (`moejax.cache.prefix`); free when no other is
    used      | 0 1 2 3 5 6          refcount = number of tables that hold the block

The lowest free block is handed out first, so that blocks in use stay near the front of the pool: a step reads
the pool only up to the highest block in use (`moejax.cache.segments`).

What no query to come will see is given up in the middle of a sequence, and its place in the table is `GONE`:
behind the sliding window of layers that have blocks and tables of their own (`WindowAllocator`), or because a
policy evicts it (`moejax.engine.scheduling.eviction`).
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence

from moejax.cache.prefix import PrefixTree
from moejax.core.errors import MoejaxError

GONE = -1
"""Stands in a table for a block that was given up."""


class OutOfBlocks(MoejaxError):
    """There are fewer free blocks than asked for. Nothing was changed."""


class BlockAllocator:
    """`num_blocks` blocks of `block_size` tokens, with reference counts.

    Block tables are plain lists owned by the sequences; a method that changes one keeps the counts in step.
    `prefixes` remembers what blocks hold that no table holds any more; None: nothing is remembered. There are
    `made` blocks at a time: as many as the first of `ends`, which rise to `num_blocks`, or as a later one.
    """

    def __init__(
        self, num_blocks: int, block_size: int, prefixes: PrefixTree | None = None, ends: Sequence[int] = ()
    ) -> None:
        self.num_blocks = num_blocks
        self._ends = list(ends) or [num_blocks]
        self.made = self._ends[0]
        self.block_size = block_size
        self.prefixes = prefixes
        if prefixes is not None:
            prefixes.allocator = self
        self._kept: set[int] = set()
        self._free = list(range(self.made))  # a heap
        self._refcount = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Counts blocks that can be taken, kept ones included."""
        return len(self._free) + len(self._kept)

    @property
    def num_used(self) -> int:
        return self.made - self.num_free

    def extend(self, short: int) -> int:
        """Has the pool grow while so many blocks are short; returns how many are then."""
        while short > 0 and self.made < self.num_blocks:
            end = next(end for end in self._ends if end > self.made)
            self._free = sorted([*self._free, *range(self.made, end)])  # a heap, too
            short, self.made = short - (end - self.made), end
        return short

    def retract(self) -> int:
        """Has the pool shrink as far as nothing is used or kept; returns its blocks."""
        held = max((b for b in range(self.made) if self._refcount[b] or b in self._kept), default=0)
        self.made = next(end for end in self._ends if end > held)
        self._free = sorted(block for block in self._free if block < self.made)
        return self.made

    def refcount(self, block: int) -> int:
        """Counts the tables that hold a block; 0 for one that is gone."""
        return self._refcount[block] if block != GONE else 0

    def blocks_for(self, tokens: int) -> int:
        """Counts the blocks that hold this many tokens."""
        return -(-tokens // self.block_size)

    def grow(self, table: list[int], tokens: int) -> list[int]:
        """Lengthens `table` until it holds `tokens` tokens; returns the new blocks.

        Raises:
            OutOfBlocks: there are too few; the table is unchanged.
        """
        missing = self.blocks_for(tokens) - len(table)
        if missing > self.num_free:
            raise OutOfBlocks(f"{missing} blocks wanted, {self.num_free} of {self.num_blocks} free")
        new = [self._take() for _ in range(missing)]
        table.extend(new)
        return new

    def shrink(self, table: list[int], tokens: int) -> None:
        """Gives up the blocks of `table` beyond those that hold `tokens` tokens."""
        while len(table) > self.blocks_for(tokens):
            self._let_go(table.pop())

    def fork(self, table: Sequence[int]) -> list[int]:
        """Returns a second table that shares every block of `table`."""
        for block in _left(table):
            self.hold(block)
        return list(table)

    def hold(self, block: int) -> None:
        """Counts one more table that holds a block, which may have been kept."""
        if block in self._kept:
            assert self.prefixes is not None
            self._kept.remove(block)
            self.prefixes.hold(block)
        self._refcount[block] += 1

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
        if not self.num_free:
            raise OutOfBlocks(f"1 block wanted, 0 of {self.num_blocks} free")
        self._refcount[old] -= 1
        table[index] = self._take()
        return old, table[index]

    def release(self, table: list[int]) -> None:
        """Gives up every block of `table` and empties it."""
        for block in reversed(_left(table)):  # the leaf of a remembered path first
            self._let_go(block)
        table.clear()

    def give_up(self, table: list[int], index: int) -> None:
        """Gives up one block of `table`, unless it is gone already."""
        if table[index] != GONE:
            self._let_go(table[index])
            table[index] = GONE

    def leave_behind(self, table: list[int], start: int, window: int, sinks: int = 0) -> None:
        """Gives up the blocks that queries from `start` on do not see: beyond their last `window` positions
        and the first `sinks`."""
        index = min(first_seen(start, window, self.block_size), len(table)) - 1
        while index >= self.blocks_for(sinks) and table[index] != GONE:
            self.give_up(table, index)
            index -= 1

    def move_down(
        self, tables: Sequence[list[int]], most: int, copied: Iterable[tuple[int, int]] = ()
    ) -> list[tuple[int, int]]:
        """Moves blocks that one table alone holds to the lowest free ones, the highest first, where the pool
        is in use to more than twice its blocks in use; else nothing.

        Args:
            tables: that may be changed.
            most: blocks that are moved at a time.
            copied: (source, destination) blocks that are copied before; the destinations stay.

        Returns:
            (source, destination) blocks to copy, in this order.
        """
        stay = {destination for _, destination in copied}
        used, moves = self.made - len(self._free), list[tuple[int, int]]()
        if max((max(table, default=0) for table in tables), default=0) < 2 * used:
            return moves
        places = {
            block: (table, index)
            for table in tables
            for index, block in enumerate(table)
            if block >= used and self._refcount[block] == 1 and block not in stay
        }
        for block in sorted(places, reverse=True)[:most]:
            table, index = places[block]
            table[index] = self._take()
            self._let_go(block)
            moves.append((block, table[index]))
        return moves

    def discard(self, block: int) -> None:
        """Frees a kept block, which is remembered no more."""
        self._kept.remove(block)
        heapq.heappush(self._free, block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Checks that blocks are conserved: free, kept or used, counted once for each table that holds them.

        Raises:
            AssertionError: says which block is wrong, and how.
        """
        uses = Counter(block for table in tables for block in _left(table))
        free = set(self._free)
        if len(free) != len(self._free) or free & self._kept:
            raise AssertionError("a block is on the free list twice")
        if self.prefixes is not None and self.prefixes.check_integrity(set(uses)) != self._kept:
            raise AssertionError("the blocks that are kept are not those that are remembered")
        free |= self._kept
        for block, count in enumerate(self._refcount):
            if count != uses[block]:
                raise AssertionError(f"block {block} has refcount {count} and is in {uses[block]} tables")
            if (count == 0) != (block in free or block >= self.made):
                raise AssertionError(
                    f"block {block} has refcount {count} and is {'' if block in free else 'not '}free"
                )
        if strange := [block for block in {*uses, *free} if not 0 <= block < self.made]:
            raise AssertionError(f"blocks {strange} do not exist")
        if any(self._free[(i - 1) // 2] > block for i, block in enumerate(self._free) if i):
            raise AssertionError("the free list is not a heap: the lowest block would not be first")

    def _let_go(self, block: int) -> None:
        """Counts one table less that holds a block."""
        self._refcount[block] -= 1
        if self._refcount[block] == 0:
            if self.prefixes is not None and self.prefixes.let_go(block):
                self._kept.add(block)
            else:
                heapq.heappush(self._free, block)

    def _take(self) -> int:
        if self._free:
            block = heapq.heappop(self._free)
        else:
            assert self.prefixes is not None
            block = self.prefixes.evict()
            self._kept.remove(block)
        self._refcount[block] = 1
        return block


class WindowAllocator(BlockAllocator):
    """Blocks of layers whose queries at p see positions in (p - window, p] only.

    There are always enough of them (`window_blocks`), so that no sequence waits for one, nor gives any up.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int) -> None:
        super().__init__(num_blocks, block_size)
        self.window = window

    def slide(self, table: list[int], start: int, end: int) -> list[tuple[int, int]]:
        """Gives up what queries from `start` on do not see, and has room for positions in [start, end).

        Returns:
            The (source, destination) of a shared block that must be copied before the write, if there is one.
        """
        self.trim(table, start)
        copy = self.append(table, start)
        self.grow(table, end)
        return [copy] if copy is not None else []

    def trim(self, table: list[int], start: int) -> None:
        """Gives up the blocks that queries from `start` on do not see."""
        self.leave_behind(table, start, self.window)


def _left(table: Sequence[int]) -> list[int]:
    """Returns the blocks of a table that are not gone."""
    return [block for block in table if block != GONE]


def first_seen(position: int, window: int, block_size: int) -> int:
    """Returns the first block of a table that a query at `position` sees."""
    return max(0, position - window + 1) // block_size


def window_blocks(window: int, block_size: int, sequences: int, tokens: int, num_blocks: int) -> int:
    """Counts the blocks that suffice for the windows of so many sequences, of whose prompts a step computes
    up to `tokens` tokens: never more than the `num_blocks` that hold all of their tokens."""
    # A window starts and ends within blocks; a step writes one token more, or its prompts' tokens.
    each = -(-(window - 1) // block_size) + 2
    return min(num_blocks, sequences * each + -(-tokens // block_size))
