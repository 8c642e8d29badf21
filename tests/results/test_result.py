"""Results are whole, strict JSON, and refuse what is not a result."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from moejax.core.errors import ConfigError, OutputError
from moejax.core.files import atomic_write_bytes, canonical_json, ensure_writable, to_jsonable
from moejax.engine.requests.api import RequestMetrics
from moejax.results.metrics import RequestRecord
from moejax.results.result import (
    SCHEMA,
    build_result,
    load_requests,
    load_result,
    print_ending,
    request_rows,
    write_request_rows,
    write_result,
)


@dataclass(frozen=True)
class Point:
    x: int
    path: Path


def make(**changes):
    parts = dict(
        metrics={"mean_ttft_ms": 1.5}, config={"seed": 0}, provenance={"git": None}, cases=[{"batch_size": 1}]
    )
    return build_result("latency", **{**parts, **changes})


def test_result_survives_a_round_trip(tmp_path):
    result = make(
        metrics={"mean_ttft_ms": np.float32(1.5), "energy_j": float("nan"), "max_goodput": np.inf},
        routing={"counts": np.arange(4).reshape(2, 2)},
        compile_ledger=[{"what": "decode", "seconds": 0.5}],
    )
    path = write_result(result, tmp_path / "new" / "folder")
    assert path.name == "result.json" and load_result(path) == load_result(path.parent) == result
    assert result["schema"] == SCHEMA
    assert result["metrics"] == {"mean_ttft_ms": 1.5, "energy_j": None, "max_goodput": None}
    assert result["routing"]["counts"] == [[0, 1], [2, 3]]
    assert set(result) == {
        "schema", "experiment", "metrics", "cases", "config", "provenance", "compile_ledger", "routing"
    }  # fmt: skip
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()


def test_the_last_line_is_short_json_that_begins_with_what_counts(tmp_path, capsys):
    metrics = {f"figure_number_{i}": i / 3 for i in range(40)} | {"none": None, "median_ttft_ms": 2 / 3}
    print_ending("latency", tmp_path, metrics | {"bad": float("nan")})
    where, line = capsys.readouterr().out.splitlines()
    assert where == f"results: {tmp_path}" and 270 < len(line) <= 300
    told = json.loads(line)
    assert list(told)[:3] == ["experiment", "median_ttft_ms", "figure_number_0"]
    assert told["median_ttft_ms"] == 0.666667 and None not in told.values()


def test_metrics_must_be_flat():
    with pytest.raises(ValueError, match="metrics must be flat; 'itl' holds a list"):
        make(metrics={"itl": [1]})


def test_requests_are_counted_from_the_first_arrival(tmp_path):
    records = [
        RequestRecord("b\u2028", 0, 4, 2, RequestMetrics(11.0, [11.5, 12.0]), "length"),
        RequestRecord("a", 0, 4, 1, RequestMetrics(10.0, [10.5]), "stop"),
    ]
    rows = load_requests(write_request_rows(request_rows(records), tmp_path))
    assert rows == load_requests(tmp_path)
    assert [row["arrival_s"] for row in rows] == [1.0, 0.0]
    assert [row["tpot_ms"] for row in rows] == [500.0, None]
    assert rows[0]["request_id"] == "b\u2028"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ('{"schema": 99}', "has schema 99; this moejax reads schema 1"),
        ('{"schema": "1"}', "'schema' must be of type int, not str"),
        ('{"schema": 1, "experiment": "x"}', "has no 'metrics'"),
        ('{"schema": 1, "experiment": "x", "metrics": []}', "'metrics' must be of type dict, not list"),
    ],
)
def test_what_is_no_result_is_refused_by_name(tmp_path, text, message):
    file = tmp_path / "result.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_result(tmp_path)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_result_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no result at"):
        load_result(tmp_path)


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = write_result(make(), tmp_path)
    before = path.read_text()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OutputError, match=r"cannot write .*result\.json: No space left on device"):
        write_result(make(metrics={}), tmp_path)
    assert path.read_text() == before and [p.name for p in tmp_path.iterdir()] == ["result.json"]


def test_unwritable_folder_is_found_before_any_work(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write to the output folder .*file"):
        ensure_writable(tmp_path / "file")
    assert list(ensure_writable(tmp_path / "new").iterdir()) == []


def test_files_get_the_users_permissions(tmp_path):
    plain = tmp_path / "plain"
    plain.write_bytes(b"")
    assert atomic_write_bytes(tmp_path / "atomic", b"x").stat().st_mode == plain.stat().st_mode


def test_jsonable_covers_what_configs_and_results_hold():
    value = {1: Point(2, Path("a/b")), "s": {"b", "a"}, "t": (np.bool_(True), np.int8(3), None)}
    assert to_jsonable(value) == {"1": {"x": 2, "path": "a/b"}, "s": ["a", "b"], "t": [True, 3, None]}
    assert json.loads(canonical_json(value))["s"] == ["a", "b"]
    with pytest.raises(TypeError, match="object has no JSON form"):
        to_jsonable(object())
