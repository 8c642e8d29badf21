"""Cache blocks in the host's memory, and in a file below. Whose they are is not known here:
`moejax.cache.prefix` and `moejax.engine.scheduling.swap` give slots. No JAX here."""

import math
import os
import statistics
import tempfile
import time
import weakref
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moejax.core.errors import OutputError, os_errors

_OBSERVED = 8  # newest reads by which time is predicted

Bytes = NDArray[np.uint8]
Reading = Future[tuple[Bytes | None, float]]
"""The promise of a block, None where it is lost, and of the time when it was read."""


class BlockFile:
    """At most `places` blocks in a temporary file without a name: whatever becomes of the process, nothing
    of it stays on the disk. A block that cannot be read, or whose checksum is another one, is lost. After a
    write that failed no more are taken.

    Attributes:
        where: slot → its place, and its checksum.
        counts: blocks `written`, `read`, `lost` and `refused`.
    """

    def __init__(self, folder: Path, places: int, queue_depth: int = 4) -> None:
        self.folder, self.places, self._depth = folder, places, queue_depth
        self.counts: Counter[str] = Counter()
        self._file = -1
        self.close()

    def open(self) -> None:
        """Makes the file. Raises `OutputError` where the folder cannot be written."""
        with os_errors(OutputError, f"engine.tiers.disk_dir: cannot write {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder, buffering=0) as file:
                self._file = os.dup(file.fileno())
        self._closing = weakref.finalize(self, os.close, self._file)
        self._readers = ThreadPoolExecutor(self._depth, "moejax-blocks")

    def close(self) -> None:
        """Drops the file; the next write makes another one."""
        if self._file >= 0:
            self._readers.shutdown(cancel_futures=True)
            self._closing()
        self._file, self.refuses = -1, False
        self.where: dict[int, tuple[int, int]] = {}
        self._free = list(range(self.places))[::-1]

    def write(self, slot: int, record: Bytes) -> None:
        """Takes the block of a slot, unless the disk has no room."""
        try:
            if self._file < 0:
                self.open()
            size = record.nbytes
            self.refuses |= os.pwrite(self._file, record.data, self._free[-1] * size) < size
        except OSError:
            self.refuses = True
        if not self.refuses:
            self.where[slot] = self._free.pop(), zlib.crc32(record.data)
        self.counts["refused" if self.refuses else "written"] += 1

    def read(self, slot: int, size: int) -> Reading:
        """Starts to read a slot's block."""
        return self._readers.submit(self._read, *self.where[slot], size)

    def _read(self, place: int, crc: int, size: int) -> tuple[Bytes | None, float]:
        try:
            data = os.pread(self._file, size, place * size)
        except OSError:
            data = b""
        whole = len(data) == size and zlib.crc32(data) == crc
        return np.frombuffer(data, np.uint8) if whole else None, time.perf_counter()

    def forget(self, slot: int) -> None:
        """Frees the place of a slot, if it has one."""
        if (place := self.where.pop(slot, None)) is not None:
            self._free.append(place[0])


class BlockStore:
    """`slots` blocks, of which `rows` are in the host's memory (None: all), the others in a `file`. A row is
    a block: of each array of each layer's segments its part, with all heads, one after another.

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
        self._reading: dict[tuple[int, tuple[int, int]], Reading] = {}
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

    def fill(self, arrays: Sequence[np.ndarray]) -> None:
        """Takes all its blocks, as `get` gives them."""
        self._arrays, self._row = list(arrays), OrderedDict((slot, slot) for slot in range(self.slots))

    def _make(self, like: Sequence[Any]) -> None:
        if self._arrays:
            return
        sizes = [math.prod(each.shape[1:]) * each.dtype.itemsize for each in like]
        self._memory, start = np.empty((self.rows, sum(sizes)), np.uint8), 0
        for each, size in zip(like, sizes, strict=True):
            shape, strides = each.shape[1:], np.empty(each.shape[1:], each.dtype).strides
            self._arrays.append(
                np.ndarray((self.rows, *shape), each.dtype, self._memory.data, start, (sum(sizes), *strides))
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
                if record is None and self.file is not None and self.on_disk(slot):
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

    def load_s(self, slot: int) -> float:
        """Predicts the seconds that loading a slot's block takes; of what nobody has measured 0."""
        reads = bool(self._read_s) and not self.in_memory(slot)
        return self.block_s + (statistics.median(self._read_s) if reads else 0.0)

    def doubt(self) -> None:
        """Forgets the oldest measurement: who computes instead of loading would never measure again."""
        if self._read_s:
            self._read_s.popleft()

    def begin(self) -> None:
        """Says that another step is scheduled."""
        self._held.clear()

    def lost(self, slots: Sequence[int], wait: bool) -> set[int] | None:
        """Starts to read those of these slots that are not in memory. Returns those that are lost, once the
        next step can load all others; None until then, unless it is to `wait`."""
        file, away = self.file, {slot for slot in slots if not self.in_memory(slot)}
        if file is None:
            return set()
        before, size = self._reading, self._memory.shape[1]
        found = {(slot, file.where[slot]) for slot in away if slot in file.where}
        if not found <= before.keys():
            self._began = time.perf_counter()
        self._reading = {key: before.get(key) or file.read(key[0], size) for key in found}
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
            for name in ("written", "read", "lost", "refused"):
                told[f"store_disk_{name}"] = self.file.counts[name]
            told["store_disk_blocks"] = len(self.file.where)
        return told

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless each row and place is free or one slot's, and each slot's one."""
        where = self.file.where if self.file else {}
        places = [*self.file._free, *(place for place, _ in where.values())] if self.file else []
        if sorted([*self._free, *self._row.values()]) != list(range(self.rows)):
            raise AssertionError(f"rows {self._free} and {self._row} are not each of {self.rows} once")
        if sorted(places) != list(range(len(places))) or self._row.keys() & where.keys():
            raise AssertionError(f"places {places} are not one slot's each, and none of {self._row}")
