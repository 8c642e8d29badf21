"""Results are strict JSON, and a file is whole or not there."""

import dataclasses
import enum
import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.core import files
from moejax.core.errors import OutputError
from moejax.core.files import (
    atomic_write_bytes,
    atomic_write_text,
    canonical_json,
    dump_json,
    ensure_writable,
    to_jsonable,
)


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: float
    tags: tuple[str, ...]


@pytest.mark.parametrize(
    ("value", "want"),
    [
        (math.nan, None),
        (-math.inf, None),
        (np.float32(0.5), 0.5),
        (np.float64("nan"), None),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.array(1.5), 1.5),
        (np.array([math.inf, 1.0]), [None, 1.0]),
        (jnp.bfloat16(1.5).item(), 1.5),
        ({3: (1, 2)}, {"3": [1, 2]}),
        ({"b", "a"}, ["a", "b"]),
        (Colour.RED, "red"),
        (Point(1.0, ("t",)), {"x": 1.0, "tags": ["t"]}),
        (Path("a") / "b", os.path.join("a", "b")),
        ([{"deep": [Point(math.nan, ())]}], [{"deep": [{"x": None, "tags": []}]}]),
    ],
)
def test_jsonable(value: Any, want: Any) -> None:
    got = to_jsonable(value)
    assert got == want and type(got) is type(want)
    assert json.loads(dump_json(value)) == want


@pytest.mark.parametrize("value", [object(), lambda: 1, 1j, b"a", Point])
def test_what_has_no_json_form(value: Any) -> None:
    with pytest.raises(TypeError, match="has no JSON form"):
        dump_json({"a": [value]})


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(derandomize=True, database=None)
@given(JSON)
def test_any_value_is_strict_json(value: Any) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    for text in (dump_json(value), dump_json(value, indent=2), canonical_json(value)):
        assert json.loads(text, parse_constant=refuse) == to_jsonable(value)


def test_one_canonical_text_per_value() -> None:
    assert canonical_json({"b": 1, "a": (1.0, "é")}) == '{"a":[1.0,"é"],"b":1}'
    assert canonical_json({"a": 1, "b": 2}) == canonical_json({"b": 2, "a": 1})
    assert list(json.loads(dump_json({"b": 1, "a": 2}))) == ["b", "a"]


def test_writing_makes_folders_and_replaces(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder" / "result.json"
    assert atomic_write_text(target, "é") == target
    assert target.read_bytes() == "é".encode()
    atomic_write_bytes(target, b"second")
    assert target.read_bytes() == b"second"
    assert [path.name for path in target.parent.iterdir()] == ["result.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = atomic_write_text(tmp_path / "result.json", "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(OutputError) as caught:
        atomic_write_text(target, "new")
    assert str(caught.value) == f"cannot write {target}: No space left on device"
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_nobody_sees_half_a_file(tmp_path: Path) -> None:
    """Two writers and a reader: every read is one of the two texts, whole."""
    target, texts = tmp_path / "result.json", ("a" * 50_000, "b" * 50_000)
    atomic_write_text(target, texts[0])
    writers = [
        threading.Thread(target=lambda text=text: [atomic_write_text(target, text) for _ in range(20)])
        for text in texts
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert target.read_text() in texts
    for writer in writers:
        writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    """A file where a folder should be."""
    (tmp_path / "file").touch()
    for call in (lambda p: atomic_write_text(p / "x.json", ""), ensure_writable):
        with pytest.raises(OutputError) as caught:
            call(tmp_path / "file" / "out")
        text = str(caught.value)
        assert text.startswith("cannot write ") and "Not a directory" in text and "\n" not in text


def test_ensure_writable_makes_the_folder_and_leaves_nothing_in_it(tmp_path: Path) -> None:
    folder = ensure_writable(tmp_path / "a" / "b")
    assert folder.is_dir() and list(folder.iterdir()) == []
    assert ensure_writable(folder) == folder
