"""The benchmark of the sampler's filters runs and reports."""

import json

import pytest

from tests.bench import sampling_filters


def test_reports_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    sampling_filters.main(["--batches", "2", "--vocabulary", "50", "--repeats", "1"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["filters"], row["name"]) for row in rows] == [
        (filters, name) for filters in ("top_k=50", "top_p=0.9", "both") for name in ("search", "sort")
    ]
    assert all(row["median_s"] > 0 for row in rows) and rows[0]["times_search"] == 1


def test_a_bad_option_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        sampling_filters.main(["--repeats", "0"])
    assert stopped.value.code == 2 and "--repeats must be at least 1" in capsys.readouterr().err
