"""The trace's own checks, its file, and its counts."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.routing import capture
from moejax.routing.capture import id_dtype, load_capture
from moejax.routing.generate import generate

TRACE = generate("uniform", num_experts=300, top_k=3, layers=2, requests=3, prompt_len=5, output_len=4)


def test_more_than_255_experts_take_two_bytes(tmp_path: Path) -> None:
    assert [id_dtype(n) for n in (255, 256)] == [np.uint8, np.uint16]
    assert TRACE.ids.dtype == np.uint16 and TRACE.ids.max() > 255
    again = load_capture(TRACE.save(tmp_path / "routing.npz"))
    np.testing.assert_array_equal(again.ids, TRACE.ids)


@pytest.mark.parametrize("part", [4, 1 << 14])
def test_counts_by_loops(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_COUNTED_ROWS", part)
    ids = TRACE.ids.copy()
    ids[2, 1, 0] = ids[9, 0] = 300  # none
    counts = np.zeros((2, 300), np.int64)
    for row in ids.tolist():
        for layer, chosen in enumerate(row):
            for expert in set(chosen) - {300}:
                counts[layer, expert] += 1
    np.testing.assert_array_equal(dataclasses.replace(TRACE, ids=ids).counts(), counts)
    nothing = TRACE.select(np.zeros(TRACE.num_rows, bool)).counts()
    assert nothing.shape == (2, 300) and not nothing.any()


def test_experts_that_are_none() -> None:
    for expert in (-1, 301):
        ids = TRACE.ids.astype(np.int32)
        ids[4, 1, 2] = expert
        with pytest.raises(
            ConfigError, match=rf"names expert {expert} and says that there are 300 \(0 to 299"
        ):
            dataclasses.replace(TRACE, ids=ids)


@pytest.mark.parametrize("kept", [0, 10, 2000])
def test_a_file_that_is_cut_off(kept: int, tmp_path: Path) -> None:
    path = TRACE.save(tmp_path / "routing.npz")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=r"routing\.npz is no routing trace of moejax"):
        load_capture(path)


def test_rows_that_were_found_computed(tmp_path: Path) -> None:
    cached = np.arange(TRACE.num_rows) < 6
    trace = dataclasses.replace(TRACE, cached=cached)
    again = load_capture(trace.save(tmp_path / "routing.npz"))
    np.testing.assert_array_equal(again.cached, cached)
    assert again.computed().num_rows == TRACE.num_rows - 6 and TRACE.computed() is TRACE
    np.testing.assert_array_equal(again.counts(), TRACE.select(~cached).counts())
    with pytest.raises(ConfigError, match="cached has shape"):
        dataclasses.replace(TRACE, cached=cached[1:])


def test_a_file_of_the_first_schema_is_read(tmp_path: Path) -> None:
    path = TRACE.save(tmp_path / "routing.npz")
    with np.load(path) as arrays:
        old = {name: arrays[name] for name in arrays.files if name != "cached"}
    for schema in (1, 3):
        header = {**json.loads(old["header"].tobytes()), "schema": schema}
        old["header"] = np.frombuffer(json.dumps(header).encode(), np.uint8)
        np.savez(path, **old)
        if schema == 3:
            with pytest.raises(ConfigError, match="has schema 3; this moejax reads 1 to 2"):
                load_capture(path)
        else:
            again = load_capture(path)
            np.testing.assert_array_equal(again.ids, TRACE.ids)
            assert not again.cached.any() and len(again.cached) == TRACE.num_rows
