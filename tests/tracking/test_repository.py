"""A repository of models: stages, what is refused, and what killed processes and damaged files leave."""

import json
import os
import threading
from pathlib import Path

import pytest

from moejax.core.errors import CheckpointError, ConfigError, OutputError
from moejax.tracking.provenance import hash_directory
from moejax.tracking.repository import MANIFEST, Repository, check_files


def checkpoint(folder: Path, weights: str) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "model.safetensors").write_text(weights)
    (folder / ".cache").write_text("left out")
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """`tiny` with versions 1 to 3, all in stage staging."""
    made = Repository(tmp_path / "models")
    for number in (1, 2, 3):
        made.add("tiny", checkpoint(tmp_path / f"source{number}", f"weights {number}"))
    return made


def stages(repository: Repository) -> list[str]:
    return [version.stage for version in repository.versions("tiny")]


def in_production(repository: Repository) -> str:
    """What a reader of the link sees."""
    return (repository.root / "tiny" / "production" / "sub" / "model.safetensors").read_text()


def test_a_version_is_a_copy_with_its_hash_and_source(repository: Repository, tmp_path: Path) -> None:
    two = repository.versions()[1]
    folder = repository.folder("tiny", 2)
    assert (two.name, two.version, two.stage, two.bytes) == ("tiny", 2, "staging", 11)
    assert two.hash == hash_directory(tmp_path / "source2") == hash_directory(folder)
    assert two.provenance["source"].endswith("source2") and two.provenance["versions"]["python"]
    assert not (folder / ".cache").exists()
    (tmp_path / "source2" / "config.json").write_text("changed afterwards")
    check_files(folder)
    check_files(tmp_path)  # no version: nothing to compare with


def test_promote_and_roll_back(repository: Repository) -> None:
    assert repository.promote("tiny", 1).stage == "production" and in_production(repository) == "weights 1"
    repository.promote("tiny", 2)
    repository.promote("tiny", 3)
    assert stages(repository) == ["archived", "archived", "production"]
    assert repository.rollback("tiny").version == 2 and in_production(repository) == "weights 2"
    assert repository.rollback("tiny").version == 1
    with pytest.raises(ConfigError, match="no version was in production before 1"):
        repository.rollback("tiny")
    repository.promote("tiny", 3)  # after a rollback what is behind is 1, not 2
    assert stages(repository) == ["archived", "staging", "production"]
    assert repository.rollback("tiny").version == 1


def test_mistakes(repository: Repository, tmp_path: Path) -> None:
    repository.promote("tiny", 1)
    for error, message, act in [
        (ConfigError, "version 1 is in production already", lambda: repository.promote("tiny", 1)),
        (ConfigError, r"unknown version '9' \(known: 1, 2, 3\)", lambda: repository.promote("tiny", 9)),
        (ConfigError, "unknown model 'tny'; did you mean 'tiny'", lambda: repository.rollback("tny")),
        (ConfigError, "unknown model '../x'", lambda: repository.versions("../x")),
        (ConfigError, "letters, digits", lambda: repository.add("../x", tmp_path / "source1")),
        (ConfigError, "is version 1 of tiny already", lambda: repository.add("tiny", tmp_path / "source1")),
        (CheckpointError, "has no config.json", lambda: repository.add("tiny", tmp_path)),
    ]:
        with pytest.raises(error, match=message):
            act()
    assert stages(repository) == ["production", "staging", "staging"]


def test_damaged_files_do_not_come_into_production(repository: Repository) -> None:
    repository.promote("tiny", 1)
    (repository.folder("tiny", 2) / "sub" / "model.safetensors").write_text("weights ?")
    with pytest.raises(CheckpointError, match="the files are not those of"):
        repository.promote("tiny", 2)
    assert in_production(repository) == "weights 1"
    manifest = repository.folder("tiny", 3) / MANIFEST
    manifest.write_text(json.dumps({"name": "tiny"}))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        repository.versions()
    manifest.unlink()  # as a process leaves it that is killed while it copies
    assert stages(repository) == ["production", "staging"]
    assert repository.add("tiny", repository.root.parent / "source3").version == 4


def test_a_process_killed_between_two_writes_leaves_the_old_state(repository, monkeypatch) -> None:
    repository.promote("tiny", 1)
    repository.promote("tiny", 2)

    def killed(*_) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "symlink", killed)
        with pytest.raises(KeyboardInterrupt):
            repository.promote("tiny", 3)
    assert in_production(repository) == "weights 2" and repository.rollback("tiny").version == 1
    repository.promote("tiny", 3)
    assert repository.rollback("tiny").version == 1


def test_adding_that_fails_or_meets_another_leaves_nothing(repository, tmp_path, monkeypatch) -> None:
    source = checkpoint(tmp_path / "source4", "weights 4")
    before = sorted(repository.root.rglob("*"))

    def full(*_, **__) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("shutil.copytree", full)
        with pytest.raises(OutputError, match="No space left on device"):
            repository.add("tiny", source)
    assert sorted(repository.root.rglob("*")) == before
    sources = [checkpoint(tmp_path / f"many{i}", f"many {i}") for i in range(8)]
    threads = [threading.Thread(target=repository.add, args=("tiny", each)) for each in sources]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = repository.versions("tiny")
    assert [each.version for each in found] == list(range(1, 12))
    assert len({each.hash for each in found}) == 11
