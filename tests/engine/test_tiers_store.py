"""Experts on disk: written whole or not at all, found again, and every fault told in one line."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.core.errors import CheckpointError, MoejaxError, OutputError
from moejax.engine.tiers import store as module
from moejax.engine.tiers.store import ALIGNED, DiskStore, HostStore, Records
from tests.examples import examples

RECORDS = Records(6, [((3, 700), np.float32), ((5,), np.int8), ((2, 2), np.uint16)])


def values(index: int, leaf: int) -> np.ndarray:
    at = RECORDS.leaves[leaf]
    raw = np.random.default_rng([index, leaf]).bytes(at.nbytes)
    return np.frombuffer(raw, at.dtype).reshape(at.shape)


def written(folder: Path, identity: str = "a" * 40, **options: Any) -> DiskStore:
    store = DiskStore(RECORDS, folder, identity, **options)
    if not store.written:
        for index in range(RECORDS.count):
            for leaf in range(len(RECORDS.leaves)):
                store.write(index, leaf, values(index, leaf))
        store.finish()
    return store


def same(store: DiskStore | HostStore, index: int) -> bool:
    arrays = RECORDS.arrays(store.fetch(index).result())
    return all(array.tobytes() == values(index, leaf).tobytes() for leaf, array in enumerate(arrays))


@pytest.mark.parametrize("direct", [False, True])
def test_what_was_written_is_read_and_counted(tmp_path: Path, direct: bool) -> None:
    store = written(tmp_path, direct=direct)
    assert all(same(store, index) for index in (5, 0, 3, 0))
    assert store.bytes_read == 4 * RECORDS.stride and RECORDS.stride % ALIGNED == 0
    assert store.direct <= direct
    store.close()
    assert [path.suffix for path in tmp_path.iterdir()] == [".experts"]
    again = DiskStore(RECORDS, tmp_path, "a" * 40)
    assert again.written and same(again, 4)
    again.close()
    other = DiskStore(RECORDS, tmp_path, "b" * 40)
    assert not other.written  # other weights
    other.close()
    assert len(list(tmp_path.iterdir())) == 1  # nothing is left of what was not finished


def test_the_host_keeps_what_was_read_last(tmp_path: Path) -> None:
    store = written(tmp_path, limit=2 * RECORDS.stride)
    for index in (0, 1, 0, 2, 0, 1):
        assert same(store, index)
    assert store.bytes_read == 4 * RECORDS.stride  # 0, 1, 2, and 1 again
    assert store.describe()["experts_host_bytes"] == 2 * RECORDS.stride
    store.close()


def test_all_in_the_host_s_memory() -> None:
    store = HostStore(RECORDS)
    for index in range(RECORDS.count):
        for leaf in range(len(RECORDS.leaves)):
            store.write(index, leaf, values(index, leaf))
    assert all(same(store, index) for index in range(RECORDS.count))


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 2**30), st.integers(0, 5), st.sampled_from(["flip", "cut", "header"]))
def test_a_damaged_file_is_never_believed(
    tmp_path_factory: pytest.TempPathFactory, seed: int, index: int, how: str
) -> None:
    """One bit anywhere in a record, or an end too early: an error that names the file, or written anew."""
    folder = tmp_path_factory.mktemp("experts")
    store = written(folder)
    first, path, rng = store._first, store.path, np.random.default_rng(seed)
    store.close()
    data = bytearray(path.read_bytes())
    if how == "flip":
        at = first + index * RECORDS.stride + int(rng.integers(RECORDS.nbytes))
        data[at] ^= 1 << int(rng.integers(8))
    elif how == "cut":
        del data[int(rng.integers(len(data))) :]
    else:
        data[8 + int(rng.integers(60))] ^= 4
    path.write_bytes(data)
    again = DiskStore(RECORDS, folder, "a" * 40)
    if how != "flip":
        assert not again.written
        again.close()
        again = written(folder)
        assert all(same(again, each) for each in range(RECORDS.count))
    else:
        assert again.written
        with pytest.raises(CheckpointError, match=rf"experts: record {index} was changed; remove the file"):
            again.fetch(index).result()
        assert same(again, (index + 1) % RECORDS.count)
    again.close()


def test_a_file_that_is_cut_while_it_is_open(tmp_path: Path) -> None:
    store = written(tmp_path)
    os.truncate(store.path, store._first + 2 * RECORDS.stride + 100)
    assert same(store, 1)
    with pytest.raises(CheckpointError, match=r"record 2 ends after \d+ of \d+ bytes; remove the file"):
        store.fetch(2).result()
    store.close()


def _failing(number: int) -> Any:
    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize("name", ["posix_fallocate", "pwrite", "fsync", "replace"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(module.os, name, _failing(errno.ENOSPC))
    with pytest.raises(OutputError, match=r"cannot write .*: No space left on device") as caught:
        written(tmp_path)
    assert "\n" not in str(caught.value)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    assert same(written(tmp_path), 2)


def test_a_read_error_and_a_slow_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = written(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(module.os, "preadv", _failing(errno.EIO))
        with pytest.raises(CheckpointError, match=r"cannot read .*record 3: Input/output error"):
            store.fetch(3).result()
    read = os.preadv

    def slow(file: int, buffers: Any, at: int) -> int:
        time.sleep(0.02)
        return read(file, [buffers[0][:1500]] if not store.direct else buffers, at)  # and in small pieces

    monkeypatch.setattr(module.os, "preadv", slow)
    promises = [store.fetch(index) for index in range(RECORDS.count)]
    assert all(promise.result().nbytes == RECORDS.nbytes for promise in promises) and same(store, 3)
    store.close()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MoejaxError, match=r"cannot write .*Not a directory"):
        written(tmp_path / "file" / "experts")


def test_a_process_killed_while_it_writes_leaves_no_file(tmp_path: Path) -> None:
    """And what it leaves under another name is removed by the next one."""
    code = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.engine.test_tiers_store import *\n"
        "store = DiskStore(RECORDS, Path(sys.argv[1]), 'a' * 40)\n"
        "store.write(0, 0, values(0, 0))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".")
    store = written(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [store.path.name]
    assert all(same(store, index) for index in range(RECORDS.count))
    store.close()
