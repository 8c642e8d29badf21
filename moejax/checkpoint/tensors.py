"""The tensors of a checkpoint's safetensors files, read by slices. It does not know what they mean."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from moejax.checkpoint.maps.rules import Index
from moejax.checkpoint.plan import Faults
from moejax.core.errors import CheckpointError

STORED_DTYPES = ("F32", "BF16", "F16")


class TensorFiles:
    """Open files, which are mapped into memory and not read but for the slices that are asked for.

    Use as a context manager.

    Attributes:
        shapes: key → shape.
        faults: keys that two files hold, and dtypes that are not read.
        bytes_read: of all slices so far, as stored. The system may read whole pages around them.
        keys_read: tensors of which something was read.

    Raises:
        CheckpointError: a file is truncated or is no safetensors file.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.faults = Faults()
        self.bytes_read = 0
        self.keys_read: set[str] = set()
        self._home: dict[str, tuple[Path, Any]] = {}
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
        if (dtype := stored.get_dtype()) not in STORED_DTYPES:
            self.faults.add(f"of a dtype other than {', '.join(STORED_DTYPES)}", f"{key} is {dtype}")
        self.shapes[key], self._home[key] = tuple(stored.get_shape()), (path, handle)

    def read(self, key: str, index: Index) -> np.ndarray:
        """A copy of a part of a tensor, in its stored dtype.

        Raises:
            CheckpointError: it cannot be read.
        """
        path, handle = self._home[key]
        try:
            value = handle.get_slice(key)[index]
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path}: cannot read {key!r} ({error}); copy the file again") from None
        self.bytes_read += value.nbytes
        self.keys_read.add(key)
        return value

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> "TensorFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: not a readable safetensors file, truncated or corrupted ({error}); copy it again"
        ) from None
