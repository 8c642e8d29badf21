"""Reads and writes at positions of a file, past the operating system's cache where it permits that. No JAX."""

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

ALIGNED = 4096
"""Bytes that positions, lengths and buffers of unbuffered reads are multiples of."""

Bytes = NDArray[np.uint8]


def aligned(size: int) -> Bytes:
    """Returns memory that begins at a page, as unbuffered reads need it."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def write_at(file: int, data: Bytes, at: int) -> None:
    """Writes all of the data at a position. Raises `OSError`."""
    left = data.data
    while left:
        done = os.pwrite(file, left, at)
        left, at = left[done:], at + done


def read_at(file: int, into: Bytes, at: int) -> int:
    """Fills the buffer from a position on; returns how many bytes there are, fewer at the file's end.

    Raises `OSError`.
    """
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:].data], at + done)
        if not count:
            break
        done += count
    return done


def open_direct(path: str | Path, at: int = 0) -> int | None:
    """Opens a file for unbuffered reads, and tries one; None where the file system permits none."""
    if not hasattr(os, "O_DIRECT"):
        return None
    with contextlib.suppress(OSError):  # tmpfs and network file systems know no such thing
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            os.preadv(file, [aligned(ALIGNED).data], at)
        except OSError:
            os.close(file)
        else:
            return file
    return None
