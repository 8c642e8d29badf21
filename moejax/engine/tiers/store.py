"""Where experts lie that wait for a slot on the device: the host's memory, or a file. No JAX here.

An expert is one record: the arrays of its weights one after another, at a multiple of `ALIGNED` bytes, so
that one read fetches it, past the operating system's cache where the file system permits that.
"""

import contextlib
import math
import mmap
import os
import threading
import uuid
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moejax.core.errors import CheckpointError, OutputError, os_errors
from moejax.core.files import canonical_json
from moejax.engine.tiers.codes import CODECS, FLOATS, Codec

ALIGNED = 4096
"""Bytes that positions, lengths and buffers of unbuffered reads are multiples of."""
_MAGIC = b"moejax experts 1\n"

Bytes = NDArray[np.uint8]


class Leaf(NamedTuple):
    """An array of one expert: its shape and dtype, where it begins in the record and how many bytes it has
    there, and the codec that these are made with; None: they are the array's own."""

    shape: tuple[int, ...]
    dtype: np.dtype
    start: int
    nbytes: int
    codec: Codec | None


class Records:
    """The layout of `count` experts of one shape.

    Args:
        codes: matrices of floating point are kept in codes, a name of `CODECS`; "none": as they are.

    Attributes:
        held: bytes of an expert on the device.
        nbytes: those of its record; `stride`, with what it is filled up to.
    """

    def __init__(
        self, count: int, leaves: Sequence[tuple[tuple[int, ...], Any]], codes: str = "none"
    ) -> None:
        self.count, self.codes, self.leaves = count, codes, list[Leaf]()
        start = self.held = 0
        for shape, dtype in leaves:
            dtype, size = np.dtype(dtype), math.prod(shape)
            coded = len(shape) > 1 and str(dtype) in FLOATS
            codec = CODECS.get(codes) if coded else None
            nbytes = size * dtype.itemsize if codec is None else codec.nbytes(size)
            self.leaves.append(Leaf(tuple(shape), dtype, start, nbytes, codec))
            start, self.held = start + nbytes, self.held + size * dtype.itemsize
        self.nbytes, self.stride = start, -(-start // ALIGNED) * ALIGNED

    def coded(self, leaf: int, value: np.ndarray) -> Bytes:
        """Returns the bytes of an array in the record."""
        codec = self.leaves[leaf].codec
        return _bytes(value) if codec is None else codec.encode(value)

    def arrays(self, record: Bytes | list[Any]) -> list[Any]:
        """Returns an expert's arrays, where they are not in codes as views of its record. What is a list has
        them already."""
        if isinstance(record, list):
            return record
        arrays = list[Any]()
        for leaf in self.leaves:
            part = record[leaf.start : leaf.start + leaf.nbytes]
            if leaf.codec is None:
                part = part.view(leaf.dtype)
            else:
                part = leaf.codec.decode(part, math.prod(leaf.shape)).astype(leaf.dtype)
            arrays.append(part.reshape(leaf.shape))
        return arrays


class HostStore:
    """All experts in the host's memory."""

    bytes_read, written = 0, False

    def __init__(self, records: Records) -> None:
        self.records = records
        self._memory: Any = np.empty((records.count, records.nbytes), np.uint8)

    def write(self, index: int, leaf: int, value: np.ndarray) -> None:
        """Puts one array of an expert into its record."""
        at = self.records.leaves[leaf]
        self._memory[index, at.start : at.start + at.nbytes] = self.records.coded(leaf, value)

    def finish(self) -> None:
        """Ends the writing."""

    def fetch(self, index: int) -> "Future[Bytes]":
        """Returns the promise of an expert's record, not to be written to."""
        found: Future[Bytes] = Future()
        found.set_result(self._memory[index])
        return found

    def close(self) -> None:
        self._memory = np.empty((0, 0), np.uint8)

    def describe(self) -> dict[str, Any]:
        """Returns what `LLM.stats` tells of it."""
        return {"experts_host_bytes": len(self._memory) * self.records.nbytes, "experts_read_bytes": 0}


class DiskStore:
    """All experts in a file, of which the last ones read stay in the host's memory as far as `limit` allows.

    The file is written under another name and renamed when it is whole. A later engine of the same weights
    finds it by their `identity`. Each array of a record has a checksum, which every read is held against.

    Args:
        limit: bytes of the host's memory.
        queue_depth: reads under way at a time.
        direct: past the operating system's cache, where that is possible (`describe` tells whether it was).

    Raises:
        OutputError: the folder cannot be written.
        CheckpointError: the file cannot be read.
    """

    def __init__(
        self,
        records: Records,
        folder: Path,
        identity: str,
        *,
        limit: float | None = None,
        queue_depth: int = 4,
        direct: bool = True,
    ) -> None:
        self.records, self.bytes_read = records, 0
        self.path = folder / f"{identity[:32]}.experts"
        self._header = (
            _MAGIC
            + canonical_json(
                {
                    "identity": identity,
                    "count": records.count,
                    "leaves": [[list(leaf.shape), str(leaf.dtype)] for leaf in records.leaves],
                    "codes": records.codes,
                }
            ).encode()
        )
        self._first = -(-(8 + len(self._header)) // ALIGNED) * ALIGNED
        self._sums = np.zeros((records.count, len(records.leaves)), np.uint32)
        self._end = self._first + records.count * records.stride
        self._wanted_direct, self.direct = direct, False
        self._most = int((limit or 0) // records.stride)
        self._kept: OrderedDict[int, Bytes] = OrderedDict()
        self._lock, self._depth = threading.Lock(), queue_depth
        self._readers: ThreadPoolExecutor | None = None
        self._partial: Path | None = None
        self._file = -1
        self.written = self._open()
        if not self.written:
            with self._writing():
                folder.mkdir(parents=True, exist_ok=True)
                self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}")
                _remove_left_over(self.path)
                self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
                os.posix_fallocate(self._file, 0, self._end + self._sums.nbytes)

    def write(self, index: int, leaf: int, value: np.ndarray) -> None:
        """Puts one array of an expert into its record."""
        data = self.records.coded(leaf, value)
        self._sums[index, leaf] = zlib.crc32(data.data)
        self._put(data, self._first + index * self.records.stride + self.records.leaves[leaf].start)

    def finish(self) -> None:
        """Ends the writing: the file is there under its name, or not at all."""
        if self.written:
            return
        assert self._partial is not None
        self._put(np.frombuffer(len(self._header).to_bytes(8, "little") + self._header, np.uint8), 0)
        self._put(_bytes(self._sums), self._end)
        with self._writing():
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1
            os.replace(self._partial, self.path)
        self._partial, self.written = None, self._open()
        assert self.written

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises as `OutputError`, and leaves nothing behind, where the body cannot write."""
        try:
            with os_errors(OutputError, f"cannot write {self.path}"):
                yield
        except BaseException:
            self.close()
            raise

    def _put(self, data: Bytes, at: int) -> None:
        left = data.data
        with self._writing():
            while left:
                done = os.pwrite(self._file, left, at)
                left, at = left[done:], at + done

    def _open(self) -> bool:
        """Opens the file to be read; False where there is none of this content."""
        try:
            file = os.open(self.path, os.O_RDONLY)
        except OSError:
            return False
        with os_errors(CheckpointError, f"cannot read {self.path}"):
            head = os.pread(file, 8 + len(self._header), 0)
            sums = os.pread(file, self._sums.nbytes, self._end)
        if head[8:] != self._header or len(sums) != self._sums.nbytes:
            os.close(file)
            return False
        self._sums = np.frombuffer(sums, np.uint32).reshape(self._sums.shape)
        self._file = file
        if self._wanted_direct and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):  # tmpfs and network file systems know no such thing
                past = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
                try:
                    os.preadv(past, [_aligned(ALIGNED).data], self._first)
                except OSError:
                    os.close(past)
                else:
                    os.close(file)
                    self._file, self.direct = past, True
        self._readers = ThreadPoolExecutor(self._depth, "moejax-experts")
        return True

    def fetch(self, index: int) -> "Future[Bytes]":
        """Returns the promise of an expert's record, not to be written to.

        It raises `CheckpointError` where the file is damaged or cannot be read.
        """
        with self._lock:
            kept = self._kept.get(index)
            if kept is not None:
                self._kept.move_to_end(index)
        if kept is not None:
            found: Future[Bytes] = Future()
            found.set_result(kept)
            return found
        assert self._readers is not None, "the file is not finished"
        return self._readers.submit(self._read, index)

    def _read(self, index: int) -> Bytes:
        records = self.records
        buffer = _aligned(records.stride)
        at, done = self._first + index * records.stride, 0
        what = f"{self.path}: record {index}"
        with os_errors(CheckpointError, f"cannot read {what}"):
            while done < records.stride:
                count = os.preadv(self._file, [buffer[done:].data], at + done)
                if not count:
                    break
                done += count
            if not self.direct:
                os.posix_fadvise(self._file, at, records.stride, os.POSIX_FADV_DONTNEED)
        record = buffer[: records.nbytes]
        parts = (record[leaf.start : leaf.start + leaf.nbytes] for leaf in records.leaves)
        if done < records.nbytes or [zlib.crc32(part.data) for part in parts] != self._sums[index].tolist():
            short = f"ends after {done} of {records.nbytes} bytes" if done < records.nbytes else "was changed"
            raise CheckpointError(f"{what} {short}; remove the file, and the next engine writes it anew")
        with self._lock:
            self.bytes_read += records.stride
            if self._most:
                while len(self._kept) >= self._most:
                    self._kept.popitem(last=False)
                self._kept[index] = record
        return record

    def close(self) -> None:
        """Ends all reading; a file that is not whole is removed."""
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)
            self._partial = None
        self._kept.clear()

    def describe(self) -> dict[str, Any]:
        """Returns what `LLM.stats` tells of it."""
        return {
            "experts_host_bytes": len(self._kept) * self.records.stride,
            "experts_read_bytes": self.bytes_read,
            "experts_direct_reads": self.direct,
        }


Store = HostStore | DiskStore


def _bytes(value: np.ndarray) -> Bytes:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _aligned(size: int) -> Bytes:
    """Returns memory that begins at a page, as unbuffered reads need it."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def _remove_left_over(path: Path) -> None:
    """Removes what processes that are gone have left of this file while they wrote it."""
    for partial in path.parent.glob(f".{path.name}.*"):
        owner = partial.name.rsplit(".", 2)[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            partial.unlink(missing_ok=True)
