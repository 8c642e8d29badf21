"""The committed static report, read back."""

from pathlib import Path

import pytest

from moejax.bench.kernels.static import committed_report
from moejax.core.errors import ConfigError


def test_the_report_is_a_result_of_all_kernels() -> None:
    report = committed_report()
    assert report["experiment"] == "kernels" and report["failures"] == []
    assert {case["target"] for case in report["cases"]} == {"sm_80", "sm_90"}
    assert report["metrics"]["kernels"] == len(report["cases"]) > 500
    assert all(case["roofline_us"] > 0 for case in report["cases"])


def test_a_part_of_it() -> None:
    report = committed_report(["grouped_swiglu"], ["mixtral_8x7b/decode_1/"], ["sm_80"])
    assert {(c["op"], c["spec"], c["target"]) for c in report["cases"]} == {
        ("grouped_swiglu", "mixtral_8x7b/decode_1/balanced", "sm_80")
    }
    assert "sm_90\nreg" not in report._repr_html_() and "decode_1/balanced" in report._repr_html_()


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'grouped_swiglu'"):
        committed_report("grouped_swigl")
    with pytest.raises(ConfigError, match="sm_70"):
        committed_report(targets=["sm_70"])
    with pytest.raises(ConfigError, match="no spec of rms_norm has a name with nosuch"):
        committed_report(["rms_norm"], ["nosuch"])
    with pytest.raises(ConfigError, match="no static report in"):
        committed_report(folder=tmp_path)
    (tmp_path / "rms_norm.json").write_text('{"rows": [{"op": "x"}]}')
    with pytest.raises(ConfigError, match=r"rms_norm\.json is no static report"):
        committed_report(folder=tmp_path)
