"""Cache blocks in a file, below those in the host's memory, and what a scheduler asks before it loads any. No
JAX here."""

import os
import statistics
import tempfile
import time
import weakref
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from moejax.core.direct_io import ALIGNED, Bytes, aligned, open_direct, read_at, write_at
from moejax.core.errors import OutputError, os_errors

_OBSERVED = 8  # newest reads by which time is predicted


class Place(NamedTuple):
    """Where a block is in the file, and its checksum."""

    number: int
    crc: int


class Read(NamedTuple):
    """A block that was read, None where it is lost, and when its reading ended."""

    record: Bytes | None
    ended: float


class BlockFile:
    """Blocks that left the host's memory, in a temporary file without a name: whatever becomes of the process,
    nothing of it stays on the disk.

    A block that cannot be read, or whose checksum is another one, counts as absent. After a write that failed
    no more are taken. Reads go on in threads; all else is the caller's.

    Args:
        folder: of the file; it is made if it is missing.
        places: blocks in the file at most, each a multiple of `ALIGNED` bytes.
        queue_depth: reads under way at a time.
        direct: read past the operating system's cache, where that is possible.

    Attributes:
        where: slot → its place.
        counts: blocks `written`, `read`, `lost` and `refused`.
    """

    def __init__(self, folder: Path, places: int, *, queue_depth: int = 4, direct: bool = True) -> None:
        self.folder, self.places, self._depth, self._wants_direct = folder, places, queue_depth, direct
        self.counts: Counter[str] = Counter()
        self.seconds: deque[float] = deque(maxlen=_OBSERVED)
        self._file = self._past = -1
        self._open_files: list[Any] = []
        self.close()

    def open(self) -> None:
        """Makes the file.

        Raises:
            OutputError: the folder cannot be written.
        """
        with os_errors(OutputError, f"engine.tiers.disk_dir: cannot write {self.folder}"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder, buffering=0) as file:
                self._file = os.dup(file.fileno())
        past = open_direct(f"/proc/self/fd/{self._file}") if self._wants_direct else None
        self._past = -1 if past is None else past
        self._open_files = [weakref.finalize(self, os.close, f) for f in {self._file, self._past} - {-1}]
        self._readers = ThreadPoolExecutor(self._depth, "moejax-blocks")

    def close(self) -> None:
        """Drops the file; the next write makes another one."""
        if self._file >= 0:
            self._readers.shutdown(cancel_futures=True)
        for file in self._open_files:
            file()
        self._file = self._past = -1
        self.where: dict[int, Place] = {}
        self._free = list(range(self.places))[::-1]
        self.refuses = False

    def write(self, slot: int, record: Bytes) -> None:
        """Takes the block of a slot, unless the disk has no room."""
        self.forget(slot)
        if not self.refuses:
            try:
                if self._file < 0:
                    self.open()
                write_at(self._file, record, self._free[-1] * self._stride(record.nbytes))
            except OSError:
                self.refuses = True
            else:
                self.where[slot] = Place(self._free.pop(), zlib.crc32(record.data))
        self.counts["refused" if self.refuses else "written"] += 1

    def read(self, slot: int, nbytes: int) -> "Future[Read]":
        """Returns the promise of a block that is in the file."""
        return self._readers.submit(self._read, self.where[slot], nbytes)

    def _read(self, place: Place, nbytes: int) -> Read:
        stride = self._stride(nbytes)
        buffer = aligned(stride)
        try:
            done = read_at(self._file if self._past < 0 else self._past, buffer, place.number * stride)
        except OSError:
            done = 0
        record = buffer[:nbytes]
        whole = done >= nbytes and zlib.crc32(record.data) == place.crc
        return Read(record if whole else None, time.perf_counter())

    def forget(self, slot: int) -> None:
        """Frees the place of a slot, if it has one."""
        if (place := self.where.pop(slot, None)) is not None:
            self._free.append(place.number)

    @staticmethod
    def _stride(nbytes: int) -> int:
        return -(-nbytes // ALIGNED) * ALIGNED

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless each place is free or one slot's."""
        places = sorted([*self._free, *(place.number for place in self.where.values())])
        if places != list(range(self.places)):
            raise AssertionError(f"places {places} of the file are not each of {self.places} once")


class Loader:
    """What a scheduler asks of the store (`moejax.cache.store.BlockStore`) that its slots are in: whether
    blocks can be loaded, and how long that takes.

    Args:
        store: the store, and `first`: the scheduler's first slot there.

    Attributes:
        block_s: seconds that loading a block from the host's memory takes; 0 where nobody has measured it.
    """

    def __init__(self, store: Any, first: int = 0) -> None:
        self.store, self.first, self.block_s = store, first, 0.0
        self._reading: dict[tuple[int, Place], Future[Read]] = {}
        self._began, self._wanted = 0.0, set[int]()

    def begin(self) -> None:
        """Begins a step: what the one before has not loaded is not kept for it."""
        self.store.release(self._wanted)
        self._wanted.clear()

    def on_disk(self, slot: int) -> bool:
        """Tells whether a slot's block is in the file, read or not."""
        return self.store.file is not None and self.first + slot in self.store.file.where

    @property
    def read_s(self) -> float:
        """Seconds that reading a block from the file takes, by the last reads; 0 before the first."""
        seconds = self.store.file.seconds if self.store.file is not None else ()
        return statistics.median(seconds) if seconds else 0.0

    def load_s(self, slot: int) -> float:
        """Predicts the seconds that loading a slot's block takes."""
        return self.block_s + (0.0 if self.store.in_memory(self.first + slot) else self.read_s)

    def later_s(self, blocks: int) -> float:
        """Predicts the seconds that reading so many blocks takes that are put now: nothing while there is
        room in the host's memory."""
        return blocks * self.read_s if self.store.file is not None and not self.store.has_room(blocks) else 0.0

    def doubt(self) -> None:
        """Forgets the oldest measurement: who has computed instead of loading would not measure again."""
        if self.store.file is not None and self.store.file.seconds:
            self.store.file.seconds.popleft()

    def want(self, slots: Iterable[int]) -> None:
        """Says that the step being scheduled loads these: they are not to leave for the file meanwhile."""
        if self.store.file is not None:
            self._wanted.update(self.first + slot for slot in slots)
            self.store.wanted.update(self._wanted)

    def lost(self, slots: Sequence[int], wait: bool) -> set[int] | None:
        """Starts to read those of these slots that are not in the host's memory. Returns those that are lost
        once all others are there for the next step to load; None until then, unless it is to `wait`."""
        store, file = self.store, self.store.file
        wanted = [self.first + slot for slot in slots]
        if file is None:
            return set()
        away = [slot for slot in wanted if not store.in_memory(slot)]
        found = {slot: file.where[slot] for slot in away if slot in file.where}
        before = {key: read for key, read in self._reading.items() if not read.cancelled()}
        if not any(key in before for key in found.items()):
            self._began = time.perf_counter()
        self._reading = {
            key: before[key] if key in before else file.read(key[0], store.nbytes_of_one)
            for key in found.items()
        }
        if not wait and not all(read.done() for read in self._reading.values()):
            return None
        gone = {slot for slot in away if slot not in found}
        if reads := {slot: read.result() for (slot, _), read in self._reading.items()}:
            file.seconds.append((max(read.ended for read in reads.values()) - self._began) / len(reads))
        for slot, read in reads.items():
            if read.record is None:
                file.forget(slot)
                gone.add(slot)
            else:
                store.hold(slot, read.record)
        file.counts["read"] += len(reads)
        file.counts["lost"] += len(gone)
        self.want(slots)
        self._reading = {}
        return {slot - self.first for slot in gone}
