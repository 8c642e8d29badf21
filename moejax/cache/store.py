"""Cache blocks in the host's memory, and in a file below. Whose they are is not known here:
`moejax.cache.prefix` and `moejax.engine.scheduling.swap` give slots."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from moejax.cache.disk import BlockFile
from moejax.core.direct_io import Bytes
from moejax.core.errors import OutputError


class BlockStore:
    """`slots` blocks: of each array of each layer's segments a host array, with all heads. One block is a row,
    its arrays one after another.

    What comes is copied once it is there (`settle`), so that nobody waits for the device. Where there are
    fewer rows than slots, the block that was put or loaded the longest ago leaves its row for the file, and
    has one again when it is loaded.

    Args:
        rows: blocks in the host's memory; None: all.
        file: where the others are.

    Attributes:
        wanted: slots that the step being scheduled will load; they stay in memory until then.
    """

    def __init__(self, slots: int, rows: int | None = None, file: BlockFile | None = None) -> None:
        self.slots, self.rows, self.file = slots, slots if rows is None else rows, file
        self.reset()

    def reset(self) -> None:
        """Forgets all content."""
        self._memory: Bytes = np.empty((0, 0), np.uint8)
        self._arrays: list[np.ndarray] = []
        self._coming: list[tuple[list[int], list[jax.Array]]] = []
        self._row: OrderedDict[int, int] = OrderedDict()  # the one used last at the end
        self._free = list(range(self.rows))[::-1]
        self._held: dict[int, Bytes] = {}
        self.wanted: set[int] = set()
        if self.file is not None:
            self.file.close()

    @property
    def nbytes(self) -> int:
        """Bytes of memory set aside; the system commits them as they are written."""
        return self._memory.nbytes

    @property
    def nbytes_of_one(self) -> int:
        """Bytes of a block."""
        return self._memory.shape[1]

    def put(self, slots: Sequence[int], blocks: Any) -> None:
        """Takes blocks on their way from the device: a tree of arrays `[at least len(slots), …]`."""
        leaves = jax.tree.leaves(blocks)
        self._make(leaves)
        self._coming.append((list(slots), leaves))

    def copy(self, arrays: Sequence[np.ndarray], block: int, slot: int) -> None:
        """Copies a block of arrays in the host's memory."""
        self.settle()  # what is on its way to the same slot is older
        self._make(arrays)
        row = self._row_for(slot)
        for mine, array in zip(self._arrays, arrays, strict=True):
            mine[row] = array[block]

    def _make(self, like: Sequence[Any]) -> None:
        if self._arrays:
            return
        starts = [0]
        for each in like:
            starts.append(starts[-1] + math.prod(each.shape[1:]) * each.dtype.itemsize)
        self._memory = np.empty((self.rows, starts[-1]), np.uint8)
        for start, each in zip(starts, like, strict=False):
            one = np.empty(each.shape[1:], each.dtype)
            shape, strides = (self.rows, *one.shape), (starts[-1], *one.strides)
            self._arrays.append(np.ndarray(shape, one.dtype, self._memory.data, start, strides))

    def settle(self) -> None:
        """Copies what was put, waiting for it where it is not there yet."""
        coming, self._coming = self._coming, []
        for slots, leaves in coming:
            there = [np.asarray(leaf) for leaf in leaves]
            for at in range(0, len(slots), self.rows):  # no more at a time than have a row
                part = slots[at : at + self.rows]
                rows = [self._row_for(slot) for slot in part]
                for array, leaf in zip(self._arrays, there, strict=True):
                    array[rows] = leaf[at : at + len(part)]

    def get(self, slots: Sequence[int]) -> list[np.ndarray]:
        """Returns copies of blocks, in the order of a tree's leaves.

        Raises:
            OutputError: one is lost.
        """
        self.settle()
        if len(set(slots)) > self.rows:
            each = {slot: self.get([slot]) for slot in dict.fromkeys(slots)}
            return [np.concatenate(parts) for parts in zip(*(each[slot] for slot in slots), strict=True)]
        for slot in slots:
            self._load(slot)
        self.wanted.difference_update(slots)
        rows = [self._row[slot] for slot in slots]
        return [array[rows] for array in self._arrays]

    def _load(self, slot: int) -> None:
        """Brings the block of a slot to a row, if it has none."""
        if slot in self._row:
            self._row.move_to_end(slot)
            return
        record = self._held.get(slot)
        if record is None and self.file is not None and slot in self.file.where:
            record = self.file.read(slot, self.nbytes_of_one).result().record
        if record is None:
            assert self.file is not None, f"slot {slot} was never put"
            raise OutputError(f"a block of the cache below {self.file.folder} is lost")
        self._memory[self._row_for(slot)] = record

    def _row_for(self, slot: int) -> int:
        """Returns the row of a slot, where what it had elsewhere no longer counts; another slot's if none is
        free."""
        self._held.pop(slot, None)
        if self.file is not None:
            self.file.forget(slot)
        if slot not in self._row:
            if not self._free:
                assert self.file is not None
                first, row = self._row.popitem(last=False)
                if first in self.wanted:
                    self._held[first] = self._memory[row].copy()
                else:
                    self.file.write(first, self._memory[row])
                self._free.append(row)
            self._row[slot] = self._free.pop()
        self._row.move_to_end(slot)
        return self._row[slot]

    # -- what a scheduler asks (`moejax.cache.disk.Loader`) ------------------------------------------------

    def in_memory(self, slot: int) -> bool:
        """Tells whether a slot's block is in the host's memory, or on its way there."""
        coming = any(slot in slots for slots, _ in self._coming)
        return slot in self._row or slot in self._held or coming

    def has_room(self, blocks: int) -> bool:
        """Tells whether so many more blocks have rows."""
        return blocks <= len(self._free)

    def hold(self, slot: int, record: Bytes) -> None:
        """Keeps what was read of a slot until the step being scheduled loads it."""
        self._held[slot] = record

    def release(self, slots: Iterable[int]) -> None:
        """Holds these no longer, if they were not loaded."""
        for slot in self.wanted.intersection(slots):
            record = self._held.pop(slot, None)
            if record is not None and self.file is not None and slot not in self.file.where:
                self.file.write(slot, record)
        self.wanted.difference_update(slots)

    def stats(self) -> dict[str, Any]:
        """Returns what `LLM.stats` tells of it."""
        told: dict[str, Any] = {"store_host_blocks": len(self._row), "store_host_bytes": self.nbytes}
        if self.file is not None:
            names = ("written", "read", "lost", "refused")
            told |= {f"store_disk_{name}": self.file.counts[name] for name in names}
            told["store_disk_blocks"] = len(self.file.where)
        return told

    def check_integrity(self) -> None:
        """Checks that rows, and places of the file, are conserved, and that each block is in one of them.

        Raises:
            AssertionError: says what is wrong.
        """
        if sorted([*self._free, *self._row.values()]) != list(range(self.rows)):
            raise AssertionError(f"rows {self._free} and {self._row} are not each of {self.rows} once")
        if self.file is not None:
            self.file.check_integrity()
            if both := self._row.keys() & self.file.where.keys():
                raise AssertionError(f"slots {both} are in memory and in the file")
