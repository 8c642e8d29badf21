"""The benchmark runs and its numbers are numbers; how large they are is not a test's business."""

import json
import math

import pytest

from tests.bench import host_work
from tests.bench.host_work import measure_queue, measure_steps


@pytest.mark.parametrize("sequences", [1, 5])
def test_steps(sequences: int):
    work = measure_steps(sequences, steps=40)
    assert work["sequences"] == sequences
    for name in ("schedule_us", "postprocess_us", "build_us"):
        assert math.isfinite(work[name]) and work[name] > 0


def test_more_requests_than_slots(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_work, "SLOTS", 4)
    work = measure_queue(19)
    assert work["requests"] == 19 and math.isfinite(work["us_per_request"]) and work["us_per_request"] > 0


def test_the_command_prints_a_table_and_one_line_of_json(capsys: pytest.CaptureFixture[str]):
    host_work.main(["--sequences", "2", "3", "--requests", "8", "--steps", "5"])
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and "us_per_request" in err
    result = json.loads(out)
    assert [row["sequences"] for row in result["steps"]] == [2, 3]
    assert set(result["steps"][0]) == {"sequences", "schedule_us", "postprocess_us", "build_us"}
    assert [row["requests"] for row in result["queue"]] == [8]
