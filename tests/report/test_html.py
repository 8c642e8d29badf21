"""report.html: one file that needs nothing else, says what the comparison says, and escapes what it gets."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax.core.errors import ConfigError, OutputError
from moejax.report import html_figures
from moejax.report.html import write_report
from moejax.results.compare import compare
from moejax.results.compare.runs import load_runs
from moejax.results.compare.samples import Cases
from moejax.results.pareto import pareto
from tests.results.simulated import CONFIG, PROVENANCE, changed, latency_run

COUNTS = np.random.default_rng(0).integers(0, 50, (4, 16)).tolist()
SERIES = {"time_s": [0.5, 1.0, 1.5], "cpu_percent": [90.0, 95.0, None], "process_rss_bytes": [1e9, 1e9, 2e9]}
VOID = {"meta", "img", "br", "link", "input", "hr"}


class Page(HTMLParser):
    """The page's elements; fails where tags do not match."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)

    @property
    def pictures(self) -> list[bytes]:
        sources = [attrs["src"] or "" for tag, attrs in self.seen if tag == "img"]
        assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
        return [base64.b64decode(source.partition(",")[2]) for source in sources]


def pair(folder: Path, **second: Any) -> list[Path]:
    more: dict[str, Any] = {"routing": {"counts": COUNTS}, "telemetry": {"series": SERIES}}
    return [
        latency_run(folder / "a", **more),
        latency_run(folder / "b", factor=0.8, seed=1, **more, **second),
    ]


def test_it_says_what_the_comparison_says(tmp_path: Path) -> None:
    paths = pair(tmp_path, config=changed(CONFIG, engine__overlap=False))
    out = write_report(paths, tmp_path / "out" / "report.html")
    page, found = Page(out.read_text()), compare(paths)
    for verdict in (*found.verdicts, *found.case_verdicts):
        assert verdict.text in page.text
    assert any("faster" in verdict.text for verdict in found.verdicts)
    for line in found.lines():
        assert line.strip() in page.text
    assert "engine.overlap" in page.text and "moejax" in page.text
    assert "commit 0000000" in page.text and "A100" in page.text
    good = sum(tag == "td" and attrs.get("class") == "good" for tag, attrs in page.seen)
    assert good == len([v for v in (*found.verdicts, *found.case_verdicts) if v.outcome == "better"])


def test_it_needs_nothing_else_and_is_small(tmp_path: Path) -> None:
    out = write_report(pair(tmp_path), tmp_path / "report.html")
    text = out.read_text()
    assert out.stat().st_size < 5_000_000
    page = Page(text)
    for tag, attrs in page.seen:
        assert tag not in ("link", "iframe", "object", "embed")
        for name in ("src", "href", "action", "srcset", "data"):
            value = attrs.get(name)
            assert value is None or value.startswith(("data:", "#")), (tag, value)
    policy = next(attrs["content"] for tag, attrs in page.seen if "Content-Security-Policy" in attrs.values())
    assert policy is not None and policy.startswith("default-src 'none'")
    assert not re.search(r"@import|url\(|https?://", re.sub(r"base64,[^\"]*", "", text))
    assert "prefers-color-scheme: dark" in text
    assert all(svg.lstrip().startswith(b"<?xml") for svg in page.pictures)
    assert {"Ratios", "Distributions", "Expert load", "Telemetry"} <= {
        attrs["alt"] for tag, attrs in page.seen if tag == "img"
    }


def test_runs_with_roofs_of_their_own_have_axes_of_their_own(tmp_path: Path) -> None:
    runs = load_runs(pair(tmp_path))
    for run, bandwidth in zip(runs, (7.2e9, 1.4e9), strict=True):
        run.result["hardware"] = {"bandwidth": bandwidth, "source": "measured", "kind": "cpu"}
        run.result["cases"][0]["roofline_percent"] = 40.0
    figure = html_figures.roof(runs)
    assert figure is not None
    assert [axis.get_title(loc="left")[:14] for axis in figure.axes] == ["roof: 7.2 GB/s", "roof: 1.4 GB/s"]
    runs[1].result["hardware"] = runs[0].result["hardware"]
    shared = html_figures.roof(runs)
    assert shared is not None and len(shared.axes) == 1 and len(shared.axes[0].patches) == 2


def test_all_that_comes_from_a_run_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script>\"'&"
    config = changed(CONFIG, model__path=evil)
    config[evil] = [evil]
    provenance = changed(PROVENANCE, git__commit=evil) | {"argv": ["run.py", evil]}
    runs = [
        latency_run(tmp_path / "<b>&'a'"),
        latency_run(tmp_path / "b", config=config, provenance=provenance),
    ]
    text = write_report(runs, tmp_path / "report.html").read_text()
    assert "alert('x')" not in text and "<b>&" not in text
    assert "alert(&#39;x&#39;)" in text
    page = Page(text)
    assert [tag for tag, _ in page.seen].count("script") == 1
    assert evil in page.text


def test_one_run_has_no_outcome_and_no_differences(tmp_path: Path) -> None:
    out = write_report([latency_run(tmp_path / "a")], tmp_path)
    assert out == tmp_path / "report.html"
    text = out.read_text()
    assert '<h2 id="outcome">' not in text and "Inputs that differ" not in text
    assert '<h2 id="metrics">' in text and "model_bytes" in text


def test_same_runs_give_the_same_bytes(tmp_path: Path) -> None:
    paths = pair(tmp_path)
    first = write_report(paths, tmp_path / "1.html").read_bytes()
    assert first == write_report(paths, tmp_path / "2.html", comparison=compare(paths)).read_bytes()


def test_mistakes_are_one_line_and_leave_nothing(tmp_path: Path) -> None:
    good = latency_run(tmp_path / "a")
    other = latency_run(tmp_path / "b")
    result = json.loads((other / "result.json").read_text()) | {"experiment": "throughput"}
    (other / "result.json").write_text(json.dumps(result))
    for paths, message in (
        ([], "at least one run folder"),
        ([tmp_path / "none"], "there is no run at"),
        ([good, other], "compare runs of one experiment"),
        ([good] * 30, "at most 24 runs"),
    ):
        with pytest.raises(ConfigError, match=message):
            write_report(paths, tmp_path / "out" / "report.html")
        assert not (tmp_path / "out" / "report.html").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        write_report([good], tmp_path / "file" / "report.html")


def test_pareto_frontier_by_hand() -> None:
    xs, ys = [1.0, 2.0, 2.0, 3.0, 4.0], [5.0, 4.0, 7.0, 7.0, 9.0]
    assert pareto(xs, [-y for y in ys]) == [0, 2, 4]
    assert pareto(xs, ys) == [0, 1]


def test_distributions_are_quantiles_of_the_shared_cases_and_small(tmp_path: Path) -> None:
    runs = load_runs([latency_run(tmp_path / n, iterations=400, seed=i) for i, n in enumerate("ab")])
    cases = [Cases(run) for run in runs]
    figure = html_figures.distributions(cases)
    assert figure is not None and len(figure.axes) == 2 * 4  # two cases, four latencies
    line = figure.axes[0].lines[0]
    values = [row["ttft_ms"] for row in cases[0].requests(0)]
    x, y = line.get_data()
    assert len(x) == 201 and x[100] == pytest.approx(np.median(values)) and y[100] == 0.5
    assert len(html_figures.svg(figure)) < 500_000
