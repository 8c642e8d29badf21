"""Metrics against values worked out by hand and by numpy, and at the edges."""

import json

import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.engine.requests.api import CompletionOutput, RequestMetrics, RequestOutput
from moejax.report.tables import histogram_lines
from moejax.results.metric_names import STATISTICS, least_samples
from moejax.results.metrics import (
    LATENCIES,
    RequestRecord,
    Slo,
    by_place,
    case_row,
    compute_metrics,
    histograms,
    record_row,
    summarize,
)


def record(arrival, times, prompt_len=4, case=0, reason="length", name="r"):
    return RequestRecord(name, case, prompt_len, len(times), RequestMetrics(arrival, list(times)), reason)


def test_metrics_worked_out_by_hand():
    records = [record(0.0, [0.1, 0.2, 0.4]), record(1.0, [1.3], prompt_len=6)]
    m = compute_metrics(records, duration_s=2.0)
    assert m["mean_ttft_ms"] == pytest.approx(200.0) and m["std_ttft_ms"] == pytest.approx(100.0)
    # The single-token request has no time per further token.
    assert m["mean_tpot_ms"] == pytest.approx(150.0) and m["max_tpot_ms"] == pytest.approx(150.0)
    assert m["median_itl_ms"] == pytest.approx(150.0) and m["max_itl_ms"] == pytest.approx(200.0)
    assert m["mean_e2el_ms"] == pytest.approx(350.0) and m["max_e2el_ms"] == pytest.approx(400.0)
    assert [m[f"{name}_samples"] for name in ("ttft", "tpot", "itl", "e2el")] == [2, 1, 2, 2]
    assert (m["completed"], m["total_input_tokens"], m["total_output_tokens"]) == (2, 10, 4)
    assert m["request_throughput"] == 1.0 and m["output_throughput"] == 2.0
    assert m["total_token_throughput"] == 7.0 and m["duration_s"] == 2.0
    assert m["request_goodput"] is None


def test_drafts_count_by_place_and_tokens_that_come_together_are_one_gap():
    first, second = record(0.0, [0.1, 0.2, 0.2, 0.2, 0.3]), record(0.0, [0.1, 0.1, 0.4])
    for place, accepted in ((0, True), (1, True), (2, False), (0, False)):
        first.metrics.verified(place, accepted)
    second.metrics.verified(0, True)
    assert (first.metrics.drafted, first.metrics.accepted) == ([2, 1, 1], [1, 1, 0])
    assert first.metrics.itl == pytest.approx([0.1, 0.1])
    records = [first, second]
    assert by_place(records, "drafted") == [3, 1, 1] and by_place(records, "accepted") == [2, 1, 0]
    m = compute_metrics(records, 1.0)
    assert m["draft_acceptance"] == 3 / 5 and m["tokens_per_step"] == 6 / 3
    assert m["max_itl_ms"] == pytest.approx(300.0) and m["itl_samples"] == 3
    assert record_row(first)["drafted"] == [2, 1, 1] and "drafted" not in record_row(record(0.0, [0.1]))
    plain = compute_metrics([record(0.0, [0.1])], 1.0)
    assert plain["draft_acceptance"] is None and plain["tokens_per_step"] is None


def test_names_are_vllms():
    names = set(compute_metrics([record(0.0, [0.1, 0.2])], 0.2))
    assert {f"{s}_{k}_ms" for s in STATISTICS for k in LATENCIES} <= names
    assert {"mean_ttft_ms", "median_tpot_ms", "p99_itl_ms", "std_e2el_ms", "request_throughput"} <= names


def test_percentiles_are_numpys():
    rng = np.random.default_rng(0)
    firsts = rng.gamma(2.0, 0.1, 100)
    m = compute_metrics([record(0.0, [t, t + 0.1]) for t in firsts], 1.0)
    for point in (90, 95, 99):
        assert m[f"p{point}_ttft_ms"] == pytest.approx(np.percentile(firsts * 1e3, point))


@pytest.mark.parametrize(("statistic", "least"), [("p90", 10), ("p95", 20), ("p99", 100), ("max", 1)])
def test_a_percentile_of_too_few_values_does_not_exist(statistic, least):
    """Of fewer it would be their largest, which has a name of its own."""
    assert least_samples(statistic) == least
    assert summarize([1.0] * least, "ttft")[f"{statistic}_ttft_ms"] == 1.0
    assert summarize([1.0] * (least - 1), "ttft")[f"{statistic}_ttft_ms"] is None


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_ms=150), 1),
        (Slo(ttft_ms=350), 2),
        (Slo(tpot_ms=100), 1),
        (Slo(ttft_ms=350, tpot_ms=100, e2el_ms=1000), 1),
        (Slo(e2el_ms=1), 0),
    ],
)
def test_goodput_counts_requests_within_every_objective(slo, good):
    records = [record(0.0, [0.1, 0.2, 0.4]), record(0.0, [0.3])]
    assert compute_metrics(records, duration_s=2.0, slo=slo)["request_goodput"] == good / 2


@pytest.mark.parametrize(
    "records", [[], [record(0.0, [], reason="abort")], [record(0.0, [0.1], reason="abort")]]
)
def test_nothing_completed_gives_nulls_and_no_nan(records):
    m = compute_metrics(records, 0.0)
    assert m["completed"] == 0 and m["mean_ttft_ms"] is None and m["request_throughput"] is None
    json.dumps(m, allow_nan=False)


def test_one_time_per_token_is_required():
    with pytest.raises(ValueError, match="1 token times for 2 output tokens"):
        RequestRecord("r", 0, 4, 2, RequestMetrics(0.0, [0.1]), "length")


def test_bad_objective_is_a_configuration_error():
    with pytest.raises(ConfigError, match=r"slo\.ttft_ms must be a positive number"):
        Slo(ttft_ms=-1)
    for value in (float("nan"), float("inf"), True, 0):
        with pytest.raises(ConfigError, match=r"slo\.tpot_ms must be a positive number"):
            Slo(tpot_ms=value)
    with pytest.raises(
        ConfigError, match=r"slo\.ttft_ms=200 allows the first token later than .*e2el_ms=100"
    ):
        Slo(ttft_ms=200, e2el_ms=100)


def test_case_row_has_the_workload_first_and_needs_all_of_it():
    row = case_row(
        {"batch_size": 1, "prompt_len": 4, "output_len": 2, "dtype": "float32"}, [record(0.0, [1, 2])], 2.0
    )
    assert list(row)[:4] == ["batch_size", "prompt_len", "output_len", "dtype"]
    with pytest.raises(ConfigError, match=r"workload\.output_len"):
        case_row({"batch_size": 1, "prompt_len": 4}, [], 0.0)


def test_record_of_an_output_counts_generated_tokens():
    """A stop string cut the text's last token off; it was generated all the same."""
    sample = CompletionOutput(0, "", [5], finish_reason="stop")
    output = RequestOutput("7", "p", [1, 2, 3], [sample], RequestMetrics(1.0, [2.0, 2.5]), True)
    made = RequestRecord.from_output(output, case=3)
    assert (made.prompt_len, made.output_len, made.case, made.finish_reason) == (3, 2, 3, "stop")
    row = record_row(made, origin=0.5)
    assert row["arrival_s"] == 0.5 and row["ttft_ms"] == 1000.0 and row["itl_ms"] == [500.0]


def test_row_of_an_aborted_request_is_null_where_undefined():
    row = record_row(record(0.0, [], reason="abort"))
    assert row["ttft_ms"] is None and row["e2el_ms"] is None and row["itl_ms"] == []


def test_histograms_hold_every_value_between_the_least_and_the_most() -> None:
    records = [record(0.0, [first, first + 0.1, first + 0.3]) for first in (0.1, 0.2, 1.1)]
    bins = histograms(records)
    assert list(bins) == ["ttft", "itl", "e2el"] and list(histograms(records, False)) == ["ttft", "e2el"]
    assert bins["ttft"]["counts"] == [1, 1, 0, 0, 0, 0, 0, 0, 0, 1] and sum(bins["itl"]["counts"]) == 6
    assert bins["ttft"]["edges_ms"] == pytest.approx(list(range(100, 1200, 100)))
    assert histograms([]) == {}
    (line, *_) = histogram_lines({"cases": [{}], "histograms": [bins]}, lambda case: "one")
    assert line == "TTFT   100.0 ▕██       █▏ 1,100 ms  one"
    assert histogram_lines({"cases": [{}] * 5, "histograms": [bins] * 5}, lambda case: "one") == []
