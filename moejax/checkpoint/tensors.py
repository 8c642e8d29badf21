"""The tensors of a checkpoint's safetensors files, read by slices. It does not know what they mean."""

import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from moejax.checkpoint.maps.rules import Index
from moejax.checkpoint.plan import Faults
from moejax.core.errors import CheckpointError

STORED_DTYPES = ("F32", "BF16", "F16")

_BYTES = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(np.uint8),
}
"""Dtypes of safetensors without a numpy type; exponents stay bytes."""

QUANTIZED_DTYPES = (*STORED_DTYPES, "I8", "U8", "I32", "I64", *_BYTES)
"""Dtypes that the tensors of quantized weights are stored in."""


class TensorFiles(AbstractContextManager["TensorFiles"]):
    """Open files, which are mapped into memory and not read but for the slices that are asked for.

    Use as a context manager.

    Args:
        accept: dtypes that are no fault.

    Attributes:
        shapes: key → shape.
        dtypes: key → dtype, as safetensors names it.
        faults: keys that two files hold, and dtypes that are not read.
        bytes_read: of all slices so far, as stored. The system may read whole pages around them.
        keys_read: tensors of which something was read.

    Raises:
        CheckpointError: a file is truncated or is no safetensors file.
    """

    def __init__(self, files: Iterable[Path], accept: Collection[str] = STORED_DTYPES) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self.faults = Faults()
        self.bytes_read = 0
        self.keys_read: set[str] = set()
        self._home: dict[str, tuple[Path, Any]] = {}
        self._accept = accept
        self._parts: Mapping[str, tuple[str, Any]] = {}
        self._starts: dict[Path, dict[str, int]] = {}
        with ExitStack() as opened:
            for path in files:
                handle = opened.enter_context(_open(path))
                for key in handle.keys():
                    self._add(key, path, handle)
            self._opened = opened.pop_all()

    def _add(self, key: str, path: Path, handle: Any) -> None:
        stored = handle.get_slice(key)
        if key in self._home:
            self.faults.add("doubly mapped", f"{key} in {self._home[key][0].name} and {path.name}")
        self.dtypes[key] = stored.get_dtype()
        self.shapes[key], self._home[key] = tuple(stored.get_shape()), (path, handle)
        self.check_dtypes((key,), self._accept)

    def check_dtypes(self, keys: Iterable[str], accept: Collection[str] = STORED_DTYPES) -> None:
        """Adds a fault for each tensor of another dtype."""
        for key in keys:
            if self.dtypes[key] not in accept:
                kind = f"of a dtype other than {', '.join(accept)}"
                self.faults.add(kind, f"{key} is {self.dtypes[key]}")

    def rename(self, parts: Mapping[str, tuple[str, Any]]) -> None:
        """Makes parts of stored tensors known under names of their own, and the stored names no longer."""
        for name, (key, index) in parts.items():
            self.dtypes[name] = self.dtypes[key]
            self.shapes[name] = np.broadcast_to(0, self.shapes[key])[index].shape
        for key in {key for key, _ in parts.values()} - parts.keys():
            del self.shapes[key]
        self._parts = parts

    def read(self, key: str, index: Index) -> np.ndarray:
        """Returns a copy of a part of a tensor, in its stored dtype.

        Raises:
            CheckpointError: it cannot be read.
        """
        key, index = self._parts.get(key, (key, index))
        path, handle = self._home[key]
        try:
            if self.dtypes[key] in _BYTES:
                value = self._octets(key, path)[index].copy()
            else:
                # Of numbers at steps the whole span: safetensors takes ten times as long to pick them.
                span = tuple(slice(p.start, p.stop) if isinstance(p, slice) else p for p in index)
                steps = (slice(None, None, p.step) for p in index if isinstance(p, slice))
                value = handle.get_slice(key)[span][(*steps, ...)]
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot read {key!r} ({error}); copy the file again") from None
        self.bytes_read += value.nbytes
        self.keys_read.add(key)
        return value

    def _octets(self, key: str, path: Path) -> np.ndarray:
        """Returns a tensor of one byte an element, mapped into memory."""
        if path not in self._starts:
            with open(path, "rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(size))
            header.pop("__metadata__", None)
            self._starts[path] = {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}
        shape = tuple(self._home[key][1].get_slice(key).get_shape())
        whole = np.memmap(path, np.uint8, "r", self._starts[path][key], shape or (1,))
        return np.asarray(whole).reshape(shape).view(_BYTES[self.dtypes[key]])

    def __exit__(self, *_: object) -> None:
        self._opened.close()


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file, truncated or corrupted ({error}); copy it again"
        ) from None
