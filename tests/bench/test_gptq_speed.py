"""The benchmark of GPTQ's core runs and reports, without qwix."""

import json

import pytest

from tests.bench import gptq_speed

SMALL = ["--experts", "2", "--inputs", "32", "--outputs", "8", "--tokens", "64", "--repeats", "1"]


def test_reports_both_orders(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(gptq_speed, "qwix_core", lambda *_: None)
    gptq_speed.main([*SMALL, "--format", "int4_g16"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert [row["name"] for row in found["rows"]] == ["moejax, by place", "moejax, act order"]
    assert all(row["output_error"] < 1 and row["median_s"] > 0 for row in found["rows"])
    assert "ratio" not in found and found["format"] == "int4_g16"
    assert "qwix is not installed" in err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--format", "fp8"], "is not one that both have"),
        (["--format", "int4_g24"], "groups of 24 do not divide its 32 inputs"),
        (["--repeats", "0"], "--repeats: must be at least 1, got 0"),
    ],
)
def test_bad_options_end_in_one_line(
    options: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        gptq_speed.main([*SMALL, *options])
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err
