"""What a result says of its machine."""

import pytest

from moejax.results.machine import is_share_of_roof, machine_lines, roof_line

ROOF = {"kind": "h100", "bandwidth": 3.352e12, "flops": {"float32": 6.7e13}, "source": "data sheet"}
READINGS = [{"bandwidth": 7.2e9, "float32": 1e11}, {"bandwidth": 6.9e9, "float32": 1e11}]


@pytest.mark.parametrize(
    ("roof", "says"),
    [
        (ROOF, "roof: 3,352.0 GB/s, data sheet of h100"),
        (ROOF | {"source": "configured"},
         "roof: 3,352.0 GB/s, data sheet of h100 as configured, not this run's device"),
        ({"bandwidth": 7.2e9, "source": "measured", "readings": READINGS},
         "roof: 7.2 GB/s, best of 7.2, 6.9 before and after the cases"),
        ({"bandwidth": 7.2e9, "source": "measured"}, "roof: 7.2 GB/s, measured once"),
        (None, None),
    ],
)  # fmt: skip
def test_how_a_roof_was_got(roof, says) -> None:
    assert roof_line({"hardware": roof}) == says


def test_what_stands_under_a_table() -> None:
    provenance = {"cpu": {"usable_cores": 2}}
    result = {"cases": [{"roofline_percent": None, "roofline_doubt": "exceeded"}], "hardware": ROOF}
    result |= {"metrics": {"mean_other_cpu_percent": 157.4}, "provenance": provenance}
    roof, doubt, busy = machine_lines(result)
    assert roof.startswith("roof: 3,352.0 GB/s") and doubt.startswith("above: faster than the roof")
    assert busy == "machine busy: 157 % of other CPU while it was measured"
    quiet = {"cases": [{}], "hardware": ROOF, "metrics": {"mean_other_cpu_percent": 29.0}}
    quiet["provenance"] = provenance
    assert machine_lines(quiet) == []
    moved = quiet | {"metrics": {"cache_read_spread": 1.9, "cache_read_gb_s": 14.0}}
    (pace,) = machine_lines(moved)
    assert pace.startswith("machine's pace moved 1.90 times") and "median 14.0 GB/s" in pace
    assert machine_lines(quiet | {"metrics": {"cache_read_spread": 1.2, "cache_read_gb_s": 14.0}}) == []
    choice = {
        "value": "edf 1:batched:2",
        "reason": "measured on CPU: 1.20 of the rules' speed; us: 1",
    }
    tuned = quiet | {"resolved": {"engine.autotune": choice}}
    says = "experts' products by time: edf 1:batched:2 (measured on CPU: 1.20 of the rules' speed)"
    assert machine_lines(tuned) == [says]
    assert machine_lines(quiet | {"resolved": {"engine.autotune": {"value": "rules"}}}) == []


def test_names_of_shares() -> None:
    for name in ("roofline_percent", "decode_percent_of_bound", "mbu_percent", "prefill_mfu_percent"):
        assert is_share_of_roof(name)
    assert not is_share_of_roof("mean_cpu_percent") and not is_share_of_roof("speedup_over_static")
