"""Checkpoints by Orbax, pytrees with JSON beside each: of a training run, or one tree on its own. The only
module that imports Orbax.

Orbax writes a checkpoint under a temporary name and renames it when it is complete, so a killed run leaves
whole checkpoints only. What is in the pytree is the caller's business.
"""

import logging
import math
import os
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from orbax.checkpoint import v1

from moejax.core.errors import CheckpointError, ConfigError, OutputError
from moejax.core.files import ensure_writable

logger = logging.getLogger(__name__)

CHUNK_BYTES = 2**25
"""Largest piece that an array is stored in. Orbax would store whole shards, and who restores any part of one
reads all of it: a model saved by one device would be read in full by each of many processes."""

IN_FLIGHT_BYTES = 2**33
"""Host memory of one process for what is on its way between disk and devices, unless one array needs more."""


class Checkpoints:
    """The newest `keep` checkpoints of one run in a folder that no other process writes.

    Use as a context manager. Leftovers of a killed save are removed at the start.

    Raises:
        OutputError: the folder cannot be written.
        ConfigError: the folder holds something else.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int) -> None:
        self.directory = ensure_writable(directory).resolve()
        # A checkpoint's folder is its step; one being written has more behind a dot. Hidden files may stay.
        names = [path.name for path in self.directory.iterdir()]
        strange = sorted(name for name in names if not (name[0] == "." or name.split(".", 1)[0].isdigit()))
        if strange:
            raise ConfigError(
                f"checkpoint_dir {Path(directory)} holds {strange[0]!r}, which is no checkpoint;"
                " choose an empty folder"
            )
        training = v1.training
        self._checkpointer = training.Checkpointer(
            self.directory,
            # Every `save` is wanted; the caller decides when.
            save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=training.preservation_policies.LatestN(keep),
            cleanup_tmp_directories=True,
        )

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, rising."""
        return [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint."""
        return self.steps[-1] if self.steps else None

    def save(self, step: int, tree: Any, metadata: dict[str, Any]) -> None:
        """Writes a checkpoint and deletes those beyond the newest `keep`. Returns when it is on disk.

        Args:
            tree: a pytree of arrays.
            metadata: JSON.

        Raises:
            OutputError: it cannot be written, for example because the disk is full.
        """
        try:
            self._checkpointer.save(step, tree, custom_metadata=metadata)
        except OSError as error:
            raise OutputError(
                f"{self.directory}: cannot write the checkpoint of step {step}: {error}"
            ) from error

    def metadata(self, step: int) -> dict[str, Any]:
        """The JSON that was saved with a step.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        try:
            return dict(self._checkpointer.metadata(step).custom_metadata or {})
        except Exception as error:
            raise self._damaged(step, error) from error

    def load(self, step: int, like: Any) -> Any:
        """The pytree of a step, with the structure, shapes, dtypes and devices of `like` (which is not read).

        Raises:
            CheckpointError: the checkpoint is damaged or holds another tree.
        """
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=getattr(x, "sharding", None)), like
        )
        try:
            return self._checkpointer.load(step, abstract)
        except Exception as error:
            raise self._damaged(step, error) from error

    def delete_all(self) -> None:
        """Removes every checkpoint, for a fresh start in the same folder."""
        for step in self.steps:
            self._checkpointer.delete(step)

    def close(self) -> None:
        self._checkpointer.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.directory / str(step)}: not a readable checkpoint ({_first_line(error)});"
            " delete that folder to go on from the one before it, or start afresh with resume=false"
        )


def save_tree(
    tree: Any, directory: str | os.PathLike[str], metadata: dict[str, Any], *, overwrite: bool
) -> None:
    """Writes one pytree of arrays, each process its shards. All processes must call it.

    Raises:
        OutputError: it cannot be written, or is there already and `overwrite` is not set.
    """
    path = Path(directory).resolve()
    if path.exists() and not overwrite:
        raise OutputError(f"{path}: there already; choose another folder, or overwrite=True")
    context = _context(tree)
    context.array.saving.scoped_storage_options_creator = _chunks
    try:
        with context:
            v1.save(path, tree, custom_metadata=metadata, overwrite=overwrite)
    except (OSError, ValueError) as error:  # TensorStore's own are ValueErrors
        raise OutputError(f"{path}: cannot write the checkpoint ({_first_line(error)})") from error


def describe_tree(directory: str | os.PathLike[str]) -> tuple[Any, dict[str, Any]]:
    """The pytree that `save_tree` wrote, with a shape and a dtype for each array, and its JSON.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = Path(directory).resolve()
    if not path.is_dir():
        raise CheckpointError(f"{path}: not found")
    try:
        found = v1.metadata(path)
        tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), found.metadata)
        return tree, dict(found.custom_metadata or {})
    except Exception as error:
        raise CheckpointError(f"{path}: not a readable checkpoint ({_first_line(error)})") from error


def load_tree(directory: str | os.PathLike[str], like: Any) -> Any:
    """The arrays of `save_tree`, each where and in the dtype that its `jax.ShapeDtypeStruct` in `like` says.

    Each process reads the chunks that its devices need. All processes must call it.

    Raises:
        CheckpointError: it is damaged or holds another tree.
    """
    path = Path(directory).resolve()
    try:
        with _context(like):
            return v1.load(path, like)
    except Exception as error:
        raise CheckpointError(f"{path}: not a readable checkpoint ({_first_line(error)})") from error


def _chunks(path: Any, leaf: Any) -> Any:
    """Stacks are cut into their matrices, since it is the experts that other meshes deal out otherwise."""
    del path
    options = v1.options.ArrayOptions.Saving.StorageOptions
    return options(chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if leaf.ndim > 2 else None)


def _context(tree: Any) -> v1.Context:
    sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)]
    limit = max(IN_FLIGHT_BYTES, 2 * max(sizes, default=0) + 1)
    context = v1.Context()
    context.memory.read_concurrent_bytes = limit
    context.memory.write_concurrent_bytes = limit
    context.memory.transfer_concurrent_bytes = limit
    return context


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
