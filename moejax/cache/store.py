"""Cache blocks in the host's memory, and in a file below. Whose they are is not known here:
`moejax.cache.prefix` and `moejax.engine.scheduling.swap` give slots. No JAX here."""

import math
import statistics
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from moejax.cache.disk import BlockFile, Bytes, Place
from moejax.core.errors import OutputError

_OBSERVED = 8  # newest reads by which time is predicted


class BlockStore:
    """`slots` blocks, of which `rows` are in the host's memory (None: all), the others in a `file`. A row is a
    block: of each array of each layer's segments its part, with all heads, one after another.

    What comes is copied once it is there (`settle`), so that nobody waits for the device. The block that was
    put or loaded the longest ago leaves its row for the file, and gets one again when it is loaded. What was
    read, and what leaves a row, is held until the next step is scheduled, so that a step can load what there
    was when it was scheduled.

    Attributes:
        block_s: seconds that loading a block from memory takes; 0 where nobody has measured it.
    """

    def __init__(self, slots: int, rows: int | None = None, file: BlockFile | None = None) -> None:
        self.slots, self.rows, self.file = slots, slots if rows is None else rows, file
        self.block_s, self._read_s = 0.0, deque[float](maxlen=_OBSERVED)
        self.reset()

    def reset(self) -> None:
        """Forgets all content."""
        self._memory: Bytes = np.empty((0, 0), np.uint8)
        self._arrays: list[np.ndarray] = []
        self._coming: list[tuple[list[int], list[Any]]] = []
        self._row: OrderedDict[int, int] = OrderedDict()  # of each slot; the one used last at the end
        self._free = list(range(self.rows))[::-1]
        self._held: dict[int, Bytes] = {}
        self._reading: dict[tuple[int, Place], Future[tuple[Bytes | None, float]]] = {}
        if self.file is not None:
            self.file.close()

    @property
    def nbytes(self) -> int:
        """Bytes of memory set aside; the system commits them as they are written."""
        return self._memory.nbytes

    def put(self, slots: Sequence[int], leaves: Sequence[Any]) -> None:
        """Takes blocks on their way from the device: arrays `[at least len(slots), …]`."""
        self._make(leaves)
        self._coming.append((list(slots), list(leaves)))

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
        sizes = [math.prod(each.shape[1:]) * each.dtype.itemsize for each in like]
        self._memory, start = np.empty((self.rows, sum(sizes)), np.uint8), 0
        for each, size in zip(like, sizes, strict=True):
            shape, strides = each.shape[1:], np.empty(each.shape[1:], each.dtype).strides
            self._arrays.append(
                np.ndarray(
                    (self.rows, *shape), each.dtype, self._memory.data, start, (sum(sizes), *strides)
                )
            )
            start += size

    def settle(self) -> None:
        """Copies what was put, waiting for it where it is not there yet."""
        coming, self._coming = self._coming, []
        for slots, leaves in coming:
            there = [np.asarray(leaf) for leaf in leaves]
            for at in range(0, len(slots), self.rows):  # no more at a time than have a row
                rows = [self._row_for(slot) for slot in slots[at : at + self.rows]]
                for array, leaf in zip(self._arrays, there, strict=True):
                    array[rows] = leaf[at : at + len(rows)]

    def get(self, slots: Sequence[int]) -> list[np.ndarray]:
        """Returns copies of blocks, in the order of a tree's leaves. Raises `OutputError` if one is lost."""
        self.settle()
        if len(set(slots)) > self.rows:
            each = {slot: self.get([slot]) for slot in dict.fromkeys(slots)}
            return [np.concatenate(parts) for parts in zip(*(each[slot] for slot in slots), strict=True)]
        for slot in slots:
            if slot not in self._row:
                record = self._held.get(slot)
                if record is None and self.file is not None and slot in self.file.where:
                    record = self.file.read(slot, self._memory.shape[1]).result()[0]
                if record is None:
                    raise OutputError(f"block {slot} of the cache is lost")
                self._memory[self._row_for(slot)] = record
            self._row.move_to_end(slot)
        rows = [self._row[slot] for slot in slots]
        return [array[rows] for array in self._arrays]

    def _row_for(self, slot: int) -> int:
        """Returns the row of a slot, another's if none is free; what it has elsewhere no longer counts."""
        self._held.pop(slot, None)
        if self.file is not None:
            self.file.forget(slot)
        if slot not in self._row:
            if not self._free:
                assert self.file is not None
                oldest, row = self._row.popitem(last=False)
                self._held[oldest] = self._memory[row].copy()
                self.file.write(oldest, self._held[oldest])
                self._free.append(row)
            self._row[slot] = self._free.pop()
        self._row.move_to_end(slot)
        return self._row[slot]

    # -- what a scheduler asks -----------------------------------------------------------------------------

    def in_memory(self, slot: int) -> bool:
        """Tells whether a slot's block can be loaded without reading the file."""
        return slot in self._row or slot in self._held or any(slot in slots for slots, _ in self._coming)

    def on_disk(self, slot: int) -> bool:
        """Tells whether a slot's block is in the file, read or not."""
        return self.file is not None and slot in self.file.where

    @property
    def _each_s(self) -> float:
        """Seconds that reading a block takes, by the last reads; 0 before the first."""
        return statistics.median(self._read_s) if self._read_s else 0.0

    def load_s(self, slot: int) -> float:
        """Predicts the seconds that loading a slot's block takes."""
        return self.block_s + (0.0 if self.in_memory(slot) else self._each_s)

    def read_s(self, blocks: int) -> float:
        """Predicts the seconds that reading so many blocks takes that are put now: none while rows are free."""
        return 0.0 if blocks <= len(self._free) else blocks * self._each_s

    def doubt(self) -> None:
        """Forgets the oldest measurement: who computes instead of loading would never measure again."""
        if self._read_s:
            self._read_s.popleft()

    def begin(self) -> None:
        """Says that another step is scheduled."""
        self._held.clear()

    def lost(self, slots: Sequence[int], wait: bool) -> set[int] | None:
        """Starts to read those of these slots that are not in memory. Returns those that are lost once the next
        step can load all others; None until then, unless it is to `wait`."""
        file, away = self.file, {slot for slot in slots if not self.in_memory(slot)}
        if file is None:
            return set()
        before, size = {key: read for key, read in self._reading.items() if not read.cancelled()}, self._memory
        found = {(slot, file.where[slot]) for slot in away if slot in file.where}
        if found.isdisjoint(before):
            self._began = time.perf_counter()
        self._reading = {
            key: before[key] if key in before else file.read(key[0], size.shape[1]) for key in found
        }
        if not wait and not all(read.done() for read in self._reading.values()):
            return None
        reads = {slot: read.result() for (slot, _), read in self._reading.items()}
        if reads:
            self._read_s.append((max(ended for _, ended in reads.values()) - self._began) / len(reads))
        self._held |= {slot: record for slot, (record, _) in reads.items() if record is not None}
        gone = {slot for slot in away if slot not in self._held}
        for slot in gone:
            file.forget(slot)
        file.counts["read"] += len(reads)
        file.counts["lost"] += len(gone)
        self._reading = {}
        return gone

    def stats(self) -> dict[str, Any]:
        """Returns what `LLM.stats` tells of it."""
        told = {"store_host_blocks": len(self._row), "store_host_bytes": self.nbytes}
        if self.file is not None:
            names = ("written", "read", "lost", "refused")
            told |= {f"store_disk_{name}": self.file.counts[name] for name in names}
            told["store_disk_blocks"] = len(self.file.where)
        return told

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless each row and place is free or one slot's, and each slot's one."""
        where = {slot: place.number for slot, place in self.file.where.items()} if self.file else {}
        places = [*self.file._free, *where.values()] if self.file else []
        if sorted([*self._free, *self._row.values()]) != list(range(self.rows)):
            raise AssertionError(f"rows {self._free} and {self._row} are not each of {self.rows} once")
        if sorted(places) != list(range(len(places))) or self._row.keys() & where.keys():
            raise AssertionError(f"places {places} are not one slot's each, and none of {self._row}")
