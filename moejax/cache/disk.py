"""Cache blocks in a file, below those in the host's memory. No JAX here."""

import os
import tempfile
import time
import weakref
import zlib
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from moejax.core.errors import OutputError, os_errors

Bytes = NDArray[np.uint8]


class Place(NamedTuple):
    """Where a block is in the file, and its checksum."""

    number: int
    crc: int


class BlockFile:
    """At most `places` blocks, in a temporary file without a name: whatever becomes of the process, nothing of
    it stays on the disk.

    A block that cannot be read, or whose checksum is another one, is lost. After a write that failed no more
    are taken. Reads go on in `queue_depth` threads; all else is the caller's.

    Attributes:
        where: slot → its place.
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
        self.where: dict[int, Place] = {}
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
            self.where[slot] = Place(self._free.pop(), zlib.crc32(record.data))
        self.counts["refused" if self.refuses else "written"] += 1

    def read(self, slot: int, size: int) -> "Future[tuple[Bytes | None, float]]":
        """Returns the promise of a slot's block, None where it is lost, and of the time when it was read."""
        return self._readers.submit(self._read, self.where[slot], size)

    def _read(self, place: Place, size: int) -> tuple[Bytes | None, float]:
        try:
            data = os.pread(self._file, size, place.number * size)
        except OSError:
            data = b""
        whole = len(data) == size and zlib.crc32(data) == place.crc
        return np.frombuffer(data, np.uint8) if whole else None, time.perf_counter()

    def forget(self, slot: int) -> None:
        """Frees the place of a slot, if it has one."""
        if (place := self.where.pop(slot, None)) is not None:
            self._free.append(place.number)
