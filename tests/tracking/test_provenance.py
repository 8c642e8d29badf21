"""Provenance is complete where it can be, None where it cannot, and stable where it must be."""

import json
import os
import subprocess
import sys

import pytest

from moejax.core.errors import CheckpointError
from moejax.tracking import provenance


def git(folder, *args):
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *identity, "-C", str(folder), *args], check=True, capture_output=True)


@pytest.fixture
def package(tmp_path):
    """A repository with one committed package."""
    folder = tmp_path / "repo" / "package"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("x = 1\n")
    git(tmp_path / "repo", "init", "-q")
    git(tmp_path / "repo", "add", ".")
    git(tmp_path / "repo", "commit", "-q", "-m", "first")
    return folder


def test_content_hash_ignores_order_and_sees_values():
    one = provenance.content_hash({"a": 1, "b": {"c": (1, 2), "d": None}})
    assert one == provenance.content_hash({"b": {"d": None, "c": [1, 2]}, "a": 1})
    assert one != provenance.content_hash({"a": 2, "b": {"c": [1, 2], "d": None}})
    assert len(one) == 64


def test_directory_hash_depends_on_names_and_contents_alone(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "a.bin").write_bytes(b"abc")
        (tmp_path / name / "b.json").write_text("{}")
    (tmp_path / "two" / ".cache").mkdir()
    (tmp_path / "two" / ".cache" / "time").write_text("now")
    os.utime(tmp_path / "two" / "b.json", (0, 0))
    first = provenance.hash_directory(tmp_path / "one")
    assert first == provenance.hash_directory(tmp_path / "two")
    (tmp_path / "two" / "b.json").rename(tmp_path / "two" / "c.json")
    assert first != provenance.hash_directory(tmp_path / "two")
    (tmp_path / "one" / "sub" / "a.bin").write_bytes(b"abd")
    assert first != provenance.hash_directory(tmp_path / "one")
    with pytest.raises(CheckpointError, match="no folder"):
        provenance.hash_directory(tmp_path / "none")


def test_git_state_follows_changes(package):
    clean = provenance.git_state(package)
    assert len(clean["commit"]) == 40 and clean["dirty"] is False and clean["diff_hash"] is None
    (package / "__init__.py").write_text("x = 2\n")
    changed = provenance.git_state(package)
    assert changed["commit"] == clean["commit"] and changed["dirty"] is True
    (package / "new.py").write_text("y = 1\n")
    added = provenance.git_state(package)["diff_hash"]
    assert added != changed["diff_hash"]
    (package / "new.py").write_text("y = 2\n")
    assert added != provenance.git_state(package)["diff_hash"]


def test_git_state_outside_a_repository_or_untracked_in_one_is_none(package, tmp_path):
    nothing = {"commit": None, "dirty": None, "diff_hash": None}
    installed = package.parent / "venv" / "moejax"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert provenance.git_state(installed) == nothing
    outside = tmp_path / "outside"
    outside.mkdir()
    assert provenance.git_state(outside) == nothing


def test_git_missing_is_no_failure(package, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.git_state(package)["commit"] is None


def test_collect_is_json_and_complete(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " ")
    monkeypatch.setenv("JAX_TEST_SETTING", "1")
    for name in ("WANDB_API_KEY", "MOEJAX_SERVER_KEY", "MOEJAX_TOKEN", "JAX_COORDINATOR_ADDRESS"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.chdir(tmp_path)
    found = provenance.collect(
        {"seed": 1},
        seeds={"engine": 1},
        checkpoint=tmp_path / "model",
        workload=[[1, 2, 3]],
        argv=[str(tmp_path / "run.py"), "a=b"],
    )
    text = json.dumps(found, allow_nan=False)
    assert "secret" not in text
    assert found["argv"] == ["run.py", "a=b"]
    here = str(provenance._PACKAGE.parent / "experiments" / "latency.py")  # run from another folder
    assert provenance.collect({}, argv=[here, "a=b"])["argv"] == ["experiments/latency.py", "a=b"]
    assert provenance.collect({}, argv=["/elsewhere/run.py"])["argv"] == ["/elsewhere/run.py"]
    assert found["config"] == {"seed": 1} and found["config_hash"] == provenance.content_hash({"seed": 1})
    assert found["versions"]["jax"] and found["versions"]["python"] == sys.version.split()[0]
    assert found["env"]["JAX_TEST_SETTING"] == "1" and "XLA_FLAGS" in found["env"]
    assert found["device"]["platform"] == "cpu" and found["device"]["count"] == 8
    assert found["cpu"]["cores"] >= 1 and found["cpu"]["memory_bytes"] > 0
    assert found["checkpoint_hash"] == provenance.hash_directory(tmp_path / "model")
    assert found["workload_hash"] == provenance.content_hash([[1, 2, 3]])
    assert found["time_utc"].endswith("+00:00")
    hostname = os.uname().nodename
    assert all(part != hostname for part in text.replace('"', " ").split())
