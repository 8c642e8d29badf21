"""Blocks in the host's memory and in a file below: what was put is got, or lost; budgets and places hold."""

import errno
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.cache import store as module
from moejax.cache.store import BlockFile, BlockStore
from moejax.core.errors import OutputError
from tests.examples import examples

SHAPES = [((2, 3, 4), np.float32), ((2, 5), np.int8), ((2, 700), np.uint16)]
BYTES = sum(int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in SHAPES)


def block(number: int) -> list[np.ndarray]:
    """The arrays of one block, `[1, …]`."""
    rng = np.random.default_rng(number)
    return [
        np.frombuffer(rng.bytes(int(np.prod(s)) * np.dtype(d).itemsize), d).reshape(1, *s) for s, d in SHAPES
    ]


def same(got: list[np.ndarray], index: int, number: int) -> bool:
    return all(a[index].tobytes() == b.tobytes() for a, b in zip(got, block(number), strict=True))


def below(folder: Path, slots: int, rows: int, **options: Any) -> BlockStore:
    return BlockStore(slots, rows, BlockFile(folder, slots - rows, **options))


def failing(number: int) -> Any:
    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


@settings(max_examples=examples(120), deadline=None)
@given(st.data())
def test_what_was_put_is_got_or_known_to_be_lost(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Random budgets, saves and loads, with the disk full, read errors, and bytes that change or are cut."""
    slots = data.draw(st.integers(2, 12))
    rows = data.draw(st.integers(1, slots - 1))
    store = below(tmp_path_factory.mktemp("blocks"), slots, rows)
    holds, number = dict[int, int](), 0
    file = store.file
    assert file is not None
    some = st.lists(st.integers(0, slots - 1), min_size=1, max_size=slots, unique=True)
    kinds = ["put", "put", "put", "copy", "load", "load", "flip", "cut", "full", "unreadable"]
    with pytest.MonkeyPatch.context() as patched:
        for _ in range(data.draw(st.integers(1, 24))):
            kind = data.draw(st.sampled_from(kinds))
            chosen = data.draw(some)
            if kind in ("put", "copy"):
                blocks = [block(number + i) for i in range(len(chosen))]
                together = [np.concatenate(each) for each in zip(*blocks, strict=True)]
                if kind == "put":
                    store.put(chosen, [np.concatenate([x, x[:1]]) for x in together])  # padded
                else:
                    for i, slot in enumerate(chosen):
                        store.copy(together, i, slot)
                holds |= {slot: number + i for i, slot in enumerate(chosen)}
                number += len(chosen)
            elif kind == "load":
                asked = [slot for slot in chosen if slot in holds]
                store.begin()
                lost = store.lost(asked, wait=True)
                assert lost is not None
                for slot in lost:
                    del holds[slot]
                asked = [slot for slot in asked if slot not in lost]
                if store.lost(asked, wait=False) != set() or not asked:
                    continue
                if data.draw(st.booleans()):  # what the step saves before it loads
                    free = [s for s in range(slots) if s not in asked][:rows]
                    if free:
                        blocks = [block(number + i) for i in range(len(free))]
                        store.put(free, [np.concatenate(each) for each in zip(*blocks, strict=True)])
                        holds |= {slot: number + i for i, slot in enumerate(free)}
                        number += len(free)
                got = store.get([*asked, asked[0]])
                assert all(same(got, i, holds[slot]) for i, slot in enumerate(asked)), "not what was put"
            elif kind in ("flip", "cut") and file._file >= 0:
                size = os.fstat(file._file).st_size
                at = data.draw(st.integers(0, max(0, size - 1)))
                if kind == "cut":
                    os.truncate(file._file, at)
                elif size:
                    os.lseek(file._file, at, os.SEEK_SET)
                    byte = os.read(file._file, 1)
                    os.lseek(file._file, at, os.SEEK_SET)
                    os.write(file._file, bytes([byte[0] ^ 4]))
            elif kind == "full":
                patched.setattr(module.os, "pwrite", failing(errno.ENOSPC))
            elif kind == "unreadable":
                patched.setattr(module.os, "pread", failing(errno.EIO))
            store.settle()
            store.check_integrity()
            assert store.nbytes <= rows * BYTES
            size = 0 if file._file < 0 else os.fstat(file._file).st_size
            assert size <= (slots - rows) * BYTES
        assert not list(file.folder.iterdir()) if file.folder.exists() else True  # it has no name
        store.reset()


def test_reads_go_on_while_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = below(tmp_path, 8, 2)
    for number in range(8):
        store.put([number], block(number))
    store.settle()
    store.begin()  # until then it is there in any case
    read, gate = os.pread, threading.Event()
    monkeypatch.setattr(module.os, "pread", lambda *given: (gate.wait(), read(*given))[1])
    assert store.lost([0, 1, 7], wait=False) is None and store.load_s(0) == 0
    assert store.on_disk(0) and not store.on_disk(7)
    gate.set()
    assert store.lost([0, 1, 7], wait=True) == set() and store.load_s(2) > 0
    assert store.load_s(0) == 0  # it was read
    got = store.get([0, 1])
    assert same(got, 0, 0) and same(got, 1, 1)
    assert store.stats() | {"store_host_bytes": 0} == {
        "store_host_blocks": 2, "store_host_bytes": 0, "store_disk_written": 8, "store_disk_read": 2,
        "store_disk_lost": 0, "store_disk_refused": 0, "store_disk_blocks": 6,
    }  # fmt: skip
    for _ in range(2):
        store.doubt()
    assert store.load_s(0) == 0
    store.reset()


def test_another_content_of_a_slot_is_never_taken_for_what_is_being_read(tmp_path: Path) -> None:
    store = below(tmp_path, 4, 1)
    for slot in range(3):
        store.put([slot], block(slot))
    store.settle()
    store.begin()
    store.lost([0], wait=False)
    store.put([0], block(9))
    store.put([3], block(3))
    store.settle()
    store.begin()
    assert store.lost([0], wait=True) == set()
    assert same(store.get([0]), 0, 9)
    store.reset()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"^engine\.tiers\.disk_dir: cannot write .*file"):
        BlockFile(tmp_path / "file" / "blocks", 3).open()
