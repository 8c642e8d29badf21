"""Results as cards: the terminal's tables as HTML."""

from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from moejax.report.cards import HtmlConsole, result_card, table_html
from moejax.results.result import Result


def latency_result(**changes: Any) -> Result:
    case = {
        "batch_size": 4,
        "prompt_len": 8,
        "output_len": 6,
        "median_ttft_ms": 1.5,
        "output_throughput": 4321.0,
    }
    content = {
        "experiment": "latency",
        "metrics": {"median_ttft_ms": 1.5},
        "cases": [case, {**case, "batch_size": 8}],
        "config": {"model": {"name": "<b>tiny</b>"}},
        "provenance": {"git": {"commit": "0123456789", "dirty": True}},
    }
    return Result({**content, **changes})


def test_a_result_shows_its_table_under_one_title() -> None:
    page = latency_result()._repr_html_()
    assert page.count("latency: &lt;b&gt;tiny&lt;/b&gt; · commit 0123456+") == 1
    assert "4,321" in page and "TTFT\np50" in page and "<b>" not in page
    assert page.count("<tr>") == 3


def test_an_experiment_without_a_table_shows_its_metrics() -> None:
    metrics = {f"metric_{i}": i for i in range(40)} | {"none": None}
    page = result_card(latency_result(experiment="other", metrics=metrics), "/runs/<a>")
    assert "metric_0" in page and "metric_39" not in page and "16 more" in page
    assert ">none<" not in page and "/runs/&lt;a&gt;" in page


def test_a_result_of_another_version_says_what_it_lacks() -> None:
    page = result_card(latency_result(experiment="throughput"))
    assert "this result lacks" in page and "median_ttft_ms" in page


def test_a_ramp_is_shown_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moejax.report.ramp.print_ramp", lambda result, console: console.print("rates"))
    assert "rates" in result_card(latency_result(experiment="throughput", ramp=[]))


def test_tables_keep_what_the_terminal_says() -> None:
    table = Table(title="[bold]title[/]", caption="below")
    table.add_column("name")
    table.add_column("n", justify="right")
    table.add_row("[red]a[/]", Text("1", style="green"), style="bold")
    table.add_row("b", "2")
    page = table_html(table)
    assert [part for part in ("title", "below", ">a<", ">1<", ">b<", ">2<") if part not in page] == []
    assert "[" not in page.replace("[interval]", "") and page.count("font-weight:600;") == 1
    assert page.count("text-align:right") == 3


def test_long_tables_are_cut_and_say_so() -> None:
    table = Table("a")
    for i in range(500):
        table.add_row(str(i))
    page = table_html(table)
    assert page.count("<tr>") < 100 and "more rows" in page


@pytest.mark.parametrize(
    ("style", "expected"), [("red", "color:#d03a2b"), ("bold yellow", "font-weight:600"), ("dim", "opacity")]
)
def test_lines_keep_their_colour(style: str, expected: str) -> None:
    console = HtmlConsole()
    console.print("[a] <line>", style=style, markup=False)
    assert expected in console.parts[0] and "[a] &lt;line&gt;" in console.parts[0]
