"""A repository of models: folders NAME/VERSION, of which one is in production. No JAX here.

    models/tiny/1/…, 2/…      a checkpoint each, as it was added, with `.manifest.json`: hash, source, code
    models/tiny/production    a link to one of them, so `model.path=models/tiny/production` opens that one
    models/tiny/history.json  versions in the order in which they came into production

The hash is the one that a run's provenance has of its checkpoint (`hash_directory`, which passes over hidden
files). Every change is a rename: a reader, and what a killed process leaves, has the old state or the
new one.
"""

import json
import os
import re
import shutil
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moejax.core.errors import CheckpointError, ConfigError, OutputError, os_errors, unknown
from moejax.core.files import atomic_write_text, dump_json, shown_path, whole_folder
from moejax.tracking.provenance import git_state, hash_directory, versions

MANIFEST, PRODUCTION, _HISTORY = ".manifest.json", "production", "history.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Version:
    """A model that was added.

    Attributes:
        stage: `production`; `archived`: it was in production; `staging`: it has never been.
        hash: sha256 of its files, see `hash_directory`.
        bytes: of its files.
        added: time in UTC, ISO 8601.
        provenance: folder that it was copied from, commit of the code then, and versions of libraries.
    """

    name: str
    version: int
    stage: str
    hash: str
    bytes: int
    added: str
    provenance: dict[str, Any]


class Repository:
    """Models below a folder, which is made when the first is added."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)

    def folder(self, name: str, version: int) -> Path:
        """Returns where a version's checkpoint is."""
        return self.root / name / str(version)

    def add(self, name: str, source: str | os.PathLike[str], *, again: bool = False) -> Version:
        """Copies a checkpoint's folder in as the next version, in stage `staging`; with `again` returns the
        version that has the same files, where there is one.

        Raises:
            ConfigError: a name that cannot be one, or a version that has the same files.
            CheckpointError: no checkpoint, or it changed while it was copied.
            OutputError: it cannot be written; nothing is left behind but a number that is passed over.
        """
        if not _NAME.fullmatch(name) or name == PRODUCTION:
            raise ConfigError(f"name={name!r}: wanted are letters, digits and . _ - (at most 100)")
        folder = Path(source)
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} is no checkpoint: it has no config.json")
        digest = hash_directory(folder)
        for known in self.versions(name) if (self.root / name).is_dir() else ():
            if known.hash == digest and again:
                return known
            if known.hash == digest:
                raise ConfigError(f"{folder} is version {known.version} of {name} already")
        with os_errors(OutputError, f"cannot write below {self.root}"):
            target = self._reserve(name)
            try:
                with whole_folder(target) as new:
                    shutil.copytree(
                        folder, new, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"), symlinks=False
                    )
                    if hash_directory(new) != digest:
                        raise CheckpointError(f"{folder} changed while it was copied; add it again")
                    size = sum(file.stat().st_size for file in new.rglob("*") if file.is_file())
                    where = {"source": shown_path(folder), **git_state(), "versions": versions()}
                    manifest: dict[str, Any] = {
                        "name": name, "version": int(target.name), "hash": digest, "bytes": size,
                        "added": datetime.now(UTC).isoformat(timespec="seconds"), "provenance": where,
                    }  # fmt: skip
                    (new / MANIFEST).write_text(dump_json(manifest, indent=1) + "\n", encoding="utf-8")
            except BaseException:
                shutil.rmtree(target, ignore_errors=True)
                raise
        return Version(stage="staging", **manifest)

    def versions(self, name: str | None = None) -> list[Version]:
        """Returns all versions, or a model's, oldest first.

        Raises:
            ConfigError: none of that name.
            CheckpointError: a manifest or the history is damaged.
        """
        names = sorted(path.name for path in self.root.glob("*") if path.is_dir())
        if name is not None and name not in names:
            raise ConfigError(f"{self.root}: {unknown('model', name[:100], names)}")
        found = []
        for each in names if name is None else [name]:
            production, history = self.production(each), self._history(each)
            folders = [path.parent for path in (self.root / each).glob(f"[0-9]*/{MANIFEST}")]
            for folder in sorted(folders, key=lambda path: int(path.name)):
                number = int(folder.name)
                stage = "archived" if number in history else "staging"
                stage = PRODUCTION if number == production else stage
                found.append(Version(stage=stage, **read_manifest(folder)))
        return found

    def production(self, name: str) -> int | None:
        """Returns the version in production, if there is one."""
        link = self.root / name / PRODUCTION
        target = os.readlink(link) if link.is_symlink() else None
        return int(target) if target and target.isdecimal() else None

    def promote(self, name: str, version: int, *, again: bool = False) -> Version:
        """Puts a version into production once its files are what they were; with `again` it may be there.

        Raises:
            ConfigError: there is none, or it is in production.
            CheckpointError: its files are not those of its manifest.
            OutputError: the folder cannot be written.
        """
        found = {each.version: each for each in self.versions(name)}
        if version not in found:
            raise ConfigError(f"{name}: {unknown('version', str(version), map(str, found))}")
        current, history = self.production(name), self._history(name)
        if current == version and again:
            return found[version]
        if current == version:
            raise ConfigError(f"{name}: version {version} is in production already")
        check_files(self.folder(name, version))
        # Whatever a rollback left behind the current one is no longer ahead of it.
        kept = history[: _last(history, current) + 1] if current in history else []
        atomic_write_text(self.root / name / _HISTORY, dump_json([*kept, version]) + "\n")
        self._link(name, version)
        return Version(**{**asdict(found[version]), "stage": PRODUCTION})

    def rollback(self, name: str) -> Version:
        """Puts the version into production that was there before; raises as `promote`."""
        found = {each.version: each for each in self.versions(name)}
        current, history = self.production(name), self._history(name)
        at = _last(history, current) if current in history else 0
        if at == 0:
            raise ConfigError(f"{name}: no version was in production before {current or 'now'}")
        version = history[at - 1]
        check_files(self.folder(name, version))
        self._link(name, version)
        return Version(**{**asdict(found[version]), "stage": PRODUCTION})

    def _reserve(self, name: str) -> Path:
        """Makes the next version's empty folder, which no other process then takes."""
        (self.root / name).mkdir(parents=True, exist_ok=True)
        while True:
            taken = [int(path.name) for path in (self.root / name).glob("[0-9]*") if path.name.isdecimal()]
            target = self.folder(name, max(taken, default=0) + 1)
            try:
                target.mkdir()
                return target
            except FileExistsError:
                continue

    def _history(self, name: str) -> list[int]:
        path = self.root / name / _HISTORY
        try:
            history = json.loads(path.read_bytes())
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read ({error})") from None
        if not isinstance(history, list) or not all(isinstance(each, int) for each in history):
            raise CheckpointError(f"{path} is no list of versions")
        return history

    def _link(self, name: str, version: int) -> None:
        link = self.root / name / PRODUCTION
        temporary = link.with_name(f".{uuid.uuid4().hex[:12]}.tmp")
        with os_errors(OutputError, f"cannot write {link}"):
            os.symlink(str(version), temporary)
            os.replace(temporary, link)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns a version's manifest; raises `CheckpointError` where it is damaged."""
    try:
        read = json.loads((folder / MANIFEST).read_bytes())
        Version(stage="", **read)
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / MANIFEST} is damaged ({error})") from None
    return dict(read)


def check_files(folder: str | os.PathLike[str]) -> None:
    """Compares a version's files with its manifest, which a folder outside a repository does not have.

    Raises:
        CheckpointError: they differ.
    """
    folder = Path(folder)
    if (folder / MANIFEST).is_file() and hash_directory(folder) != read_manifest(folder)["hash"]:
        raise CheckpointError(f"{folder}: the files are not those of {MANIFEST}; add the checkpoint again")


def _last(history: list[int], version: int | None) -> int:
    return max(place for place, each in enumerate(history) if each == version)
