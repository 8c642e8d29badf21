"""Checkpoints of a training run by Orbax, a pytree with JSON beside each. The only module that imports Orbax.

Orbax writes a checkpoint under a temporary name and renames it when it is complete, so a killed run leaves
whole checkpoints only. What is in the pytree is the caller's business.
"""

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1

from moejax.core.errors import CheckpointError, ConfigError, OutputError
from moejax.core.files import ensure_writable
from moejax.core.words import first_line


class Checkpoints(AbstractContextManager["Checkpoints"]):
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
        """Returns the JSON that was saved with a step.

        Raises:
            CheckpointError: the checkpoint is damaged.
        """
        try:
            return dict(self._checkpointer.metadata(step).custom_metadata or {})
        except Exception as error:
            raise self._damaged(step, error) from error

    def load(self, step: int, like: Any) -> Any:
        """Reads the pytree of a step, with structure, shapes, dtypes and devices of `like` (itself unread).

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

    def __exit__(self, *_: object) -> None:
        self._checkpointer.close()

    def _damaged(self, step: int, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.directory / str(step)}: not a readable checkpoint ({first_line(error)});"
            " delete that folder to go on from the one before it, or start afresh with resume=false"
        )
