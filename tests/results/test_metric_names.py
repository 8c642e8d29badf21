"""One name, one quantity: the glossary, what is made of it, and that it knows every name."""

import re
import runpy
from collections import Counter
from pathlib import Path

import pytest

from moejax.bench.kernels.static import committed_report
from moejax.report import quantization, ramp, routing_tables, stress, tables
from moejax.results.metric_names import GLOSSARY, column_head, find_metric, short_name, unit_of
from tests.glossary import unknown_names

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_made_of_the_glossary() -> None:
    made = runpy.run_path(str(DOCS / "make_metrics.py"))["page"]()
    assert (DOCS / "metrics.md").read_text(encoding="utf-8") == made, "run python docs/make_metrics.py"
    assert made.startswith("<!-- Made of moejax/assets/metrics.toml by `python docs/make_metrics.py`")


def test_an_entry_has_a_scope_and_one_meaning() -> None:
    scopes = {"run", "case", "case or run", "process", "device", "machine", "operation", "change"}
    assert {metric.of for metric in GLOSSARY} == scopes
    assert all(metric.unit and metric.means for metric in GLOSSARY)
    assert {metric.better for metric in GLOSSARY} == {None, "less", "more"}
    twice = [
        means for means, count in Counter(m.means for m in GLOSSARY if m.unit == "bytes").items() if count > 1
    ]
    assert twice == []
    patterns = [(metric, re.compile(metric.name)) for metric in GLOSSARY if "{" not in metric.name]
    for metric in GLOSSARY:
        fits = [other.name for other, pattern in patterns if pattern.fullmatch(metric.name)]
        assert fits in ([metric.name], []), "two entries are of one name"


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("p99_itl_ms", "{statistic}_itl_ms"),
        ("tpot_ratio_low", "tpot_ratio"),
        ("kl_int8_rtn", "kl"),
        ("ratio_median_ttft_ms_control_high", r"ratio_\w+"),
        ("decode_comm_bytes_exchange", r"(prefill|decode)_comm_bytes_\w+"),
    ],
)
def test_a_name_is_found_by_its_pattern_interval_or_label(name: str, entry: str) -> None:
    metric = find_metric(name, ["int8_rtn"])
    assert metric is not None and metric.name == entry


def test_unknown_names_are_found() -> None:
    cases = [{"name": "int8", "median_tpt_ms": 1.0}]
    result = {
        "metrics": {"weight_byte": 1, "kl_int8": 0.1, "kl_int4": 0.1, "median_ttft_ms": 1.0},
        "cases": cases,
    }
    assert unknown_names(result) == ["weight_byte", "kl_int4", "median_tpt_ms"]
    assert unknown_names(committed_report(ops="rms_norm")) == []


def test_tables_take_headings_and_units_from_it() -> None:
    assert column_head("median_ttft_ms") == "TTFT\np50" and short_name("p99_itl_ms") == "ITL p99 (ms)"
    assert short_name("nonsense") == "nonsense" and unit_of("nonsense") == ""
    after = tables.metric_columns("p95_ttft_ms", "p99_ttft_ms", "cache_use_peak", "model_bytes")
    assert [column.title for column in after] == ["TTFT\np95", "\np99", "cache\n%", "model\nMB"]
    assert [column.text({column.key: 0.25}) for column in after[2:]] == ["25", "2.50e-07"]
    for columns in (
        quantization._LOSSES,
        quantization._ROUTING,
        ramp._COLUMNS,
        routing_tables._SKEW,
        stress._COLUMNS,
    ):
        assert all(find_metric(column.key) for column in columns if isinstance(column.key, str))
