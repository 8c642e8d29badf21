"""Folder of finished stages: a run that was killed goes on after the last whole stage.

    work_dir/run.json            fingerprint: of the weights, the configuration, the tokens
    work_dir/stage_003.npz       a stage's quantized tensors, its folded parameters and its report
    work_dir/hidden_003.bin      hidden states that come out of stage 3; the last stage's only

Each file is written under another name, synchronised to disk and renamed, and `stage_*.npz` comes last: where
it is there, the stage is done. Files are kept after the end, so that a second run of the same has nothing to
do; hidden states are not. Arrays are stored as bytes with their dtype beside them, because npz has no words
for bfloat16 and float8.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from moejax.core.errors import ConfigError
from moejax.core.files import atomic_file, atomic_write_text, dump_json, ensure_writable
from moejax.ptq.batches import HiddenStates

META = "meta"


class WorkDir:
    """Folder of one run, locked against other runs until `close`.

    Raises:
        ConfigError: it holds another run, or one is at work in it.
        OutputError: it cannot be written.
    """

    def __init__(self, folder: str, fingerprint: Mapping[str, str]) -> None:
        self.folder = ensure_writable(folder)
        self._lock = open(self.folder / "lock", "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise ConfigError(
                f"quant.calibration.work_dir: another run is at work in {folder}; wait for it or take "
                "another folder"
            ) from None
        try:
            self._check(fingerprint)
        except ConfigError:
            self._lock.close()
            raise

    def close(self) -> None:
        """Lets other runs in."""
        self._lock.close()

    def _check(self, fingerprint: Mapping[str, str]) -> None:
        path = self.folder / "run.json"
        if not path.exists():
            atomic_write_text(path, dump_json(dict(fingerprint), indent=2) + "\n")
            return
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            stored = {}
        other = [key for key, value in fingerprint.items() if stored.get(key) != value]
        if other:
            raise ConfigError(
                f"quant.calibration.work_dir: {self.folder} holds another run (different {', '.join(other)});"
                " remove it or take another folder"
            )

    def load(self, number: int) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
        """Returns a finished stage's arrays and values; None where it is not done."""
        path = self._stage(number)
        if not path.exists():
            return None
        with np.load(path) as stored:
            meta = json.loads(stored[META].tobytes().decode())
            arrays = {}
            for i, (name, (dtype, shape)) in enumerate(meta["arrays"].items()):
                arrays[name] = np.frombuffer(stored[str(i)].tobytes(), jnp.dtype(dtype)).reshape(shape)
        return arrays, meta["values"]

    def save(self, number: int, arrays: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Marks a stage as done; its hidden states must be in place already."""
        meta: dict[str, Any] = {"values": values, "arrays": {}}
        stored: dict[str, np.ndarray] = {}
        for i, (name, array) in enumerate(arrays.items()):
            host = np.ascontiguousarray(np.asarray(array))
            meta["arrays"][name] = [host.dtype.name, list(np.shape(array))]
            stored[str(i)] = host.reshape(-1).view(np.uint8)
        stored[META] = np.frombuffer(dump_json(meta).encode(), np.uint8)
        with atomic_file(self._stage(number)) as file:
            np.savez(file, **stored)  # type: ignore[arg-type]
        self.remove_hidden(before=number)

    def hidden_path(self, number: int) -> Path:
        """Returns the path that stage `number`'s output is written to; `commit_hidden` renames it."""
        return self.folder / f"hidden_{number:03d}.tmp"

    def commit_hidden(self, number: int, hidden: HiddenStates) -> None:
        """Puts a written file in place; the array that maps it stays good."""
        assert isinstance(hidden.values, np.memmap)
        hidden.values.flush()
        os.replace(self.hidden_path(number), self._hidden(number))

    def open_hidden(self, number: int, shape: tuple[int, ...], dtype: Any, batch_size: int) -> HiddenStates:
        """Opens the output of a finished stage.

        Raises:
            ConfigError: the file is gone.
        """
        path = self._hidden(number)
        if not path.exists():
            raise ConfigError(
                f"quant.calibration.work_dir: {path} is missing; remove the folder {self.folder} to start "
                "afresh"
            )
        return HiddenStates(np.memmap(path, dtype, "r", shape=shape), batch_size)

    def remove_hidden(self, before: int | None = None) -> None:
        """Removes hidden states of the stages before one, or all, which nothing reads after the last."""
        for path in self.folder.glob("hidden_*"):
            number = re.fullmatch(r"hidden_(\d+)\.(bin|tmp)", path.name)
            if number and (before is None or int(number[1]) < before):
                path.unlink(missing_ok=True)

    def _stage(self, number: int) -> Path:
        return self.folder / f"stage_{number:03d}.npz"

    def _hidden(self, number: int) -> Path:
        return self.folder / f"hidden_{number:03d}.bin"


def hash_arrays(arrays: Mapping[str, Any]) -> str:
    """Returns SHA-256 over names, dtypes, shapes and bytes, one array on the host at a time."""
    digest = hashlib.sha256()
    for name in sorted(arrays):
        host = np.ascontiguousarray(np.asarray(arrays[name]))
        digest.update(f"{name} {host.dtype.name} {host.shape}\n".encode())
        digest.update(host.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
