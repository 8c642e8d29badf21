"""Table, plots and comparison of throughput results: what is shown is what the result says."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure
from rich.console import Console

from moejax.bench.common.timeline import bin_steps, step_metrics
from moejax.engine.requests.api import RequestMetrics
from moejax.engine.stats import StepRecord
from moejax.report import tables, throughput_plots
from moejax.report.experiments import save_plots
from moejax.report.tables import share, three_digits
from moejax.results.compare import compare
from moejax.results.metric_names import lower_is_better
from moejax.results.metrics import RequestRecord, Slo, case_row
from moejax.results.result import build_result, write_result

PROVENANCE = {
    "git": {"commit": "0123456789" * 4, "dirty": True},
    "device": {"platform": "gpu", "kind": "NVIDIA A100-SXM4-80GB", "count": 8},
}
SLO = Slo(ttft_ms=250.0, e2el_ms=1000.0)


def step(time: float, **fields: int) -> StepRecord:
    values = dict(
        prefill_tokens=0, decode_tokens=4, padded_tokens=8, sequences=4, running=4, waiting=2, used_blocks=8,
        num_blocks=10, stored_tokens=90, preempted=0,
    )  # fmt: skip
    return StepRecord(time, 0.1, **{**values, **fields})


STEPS = [
    step(0.1, prefill_tokens=20, padded_tokens=32),
    step(0.2, preempted=2),
    step(0.9, waiting=0),  # idle from 0.2 to 0.8
    step(1.0, waiting=0, running=1),
]


def build(
    modes: tuple[str, ...] = ("continuous", "static"), requests: int = 6, scale: float = 1.0, failed: int = 0
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A result whose second mode takes twice as long, and its rows; `failed` requests of each are lost."""
    cases, rows, timeline = [], [], []
    for case, name in enumerate(modes):
        records = []
        for i in range(requests):
            times = [scale * (case + 1) * (0.1 * (i + 1) + 0.02 * token) for token in range(5)]
            lost = i < failed
            metrics = RequestMetrics(0.0, [] if lost else times)
            reason = "error" if lost else "length"
            records.append(RequestRecord(f"{case}-{i}", case, 16, len(metrics.token_times), metrics, reason))
        fields = {
            "case": case, "batching": name, "request_rate": "inf", "num_requests": requests,
            "max_num_seqs": 4, "batch_size": 4, "prompt_len": 16, "output_len": 5,
        }  # fmt: skip
        seconds = max((r.metrics.token_times[-1] for r in records if r.completed), default=0.0)
        row = case_row(fields, records, seconds, SLO) | step_metrics(STEPS, 16)
        row |= {"failed": failed, "aborted": 0, "failed_steps": 0, "first_error": "out of luck"}
        cases.append(row)
        for record in records:
            done = record.completed
            rows.append({
                "case": case, "iteration": 0, "arrival_s": 0.0, "queue_ms": 50.0 if done else None,
                "ttft_ms": record.metrics.ttft * 1e3 if done else None,
                "tpot_ms": record.metrics.tpot * 1e3 if done else None,
                "e2el_ms": record.metrics.e2e * 1e3 if done else None,
                "itl_ms": [gap * 1e3 for gap in record.metrics.itl],
            })  # fmt: skip
        timeline.append({"case": case, "batching": name, **bin_steps(STEPS, 0.0)})
    result = build_result(
        "throughput", metrics={k: v for k, v in cases[0].items() if isinstance(v, (int, float))}, cases=cases,
        config={"model": {"name": "tiny"}}, provenance=PROVENANCE, timeline=timeline,
        slo={"ttft_ms": SLO.ttft_ms, "tpot_ms": None, "e2el_ms": SLO.e2el_ms},
    )  # fmt: skip
    return result, rows


def printed(result: dict[str, Any], width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    tables.print_throughput(result, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


# --- table --------------------------------------------------------------------------------------------------


def test_table_fits_80_columns_with_objectives_and_slow_requests() -> None:
    text = printed(build(scale=0.2, requests=2000)[0])
    assert "…" not in text and max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for word in (
        "tiny",
        "8x NVIDIA A100-SXM4-80GB",
        "2,000 requests all at once",
        "good",
        "continuous",
        "good: requests with TTFT ≤ 250 ms, E2E ≤ 1000 ms",
        "p99",
    ):
        assert word in text, text


def test_much_padding_names_the_keys_to_change() -> None:
    result = build()[0]
    result["cases"][0]["padding_waste"], result["cases"][1]["padding_waste"] = 0.86, 0.49
    lines = [line for line in printed(result, 200).splitlines() if "padding;" in line]
    (line,) = lines
    assert line.startswith("continuous: 86 % of the computed tokens are padding; finer engine.token_buckets")


def test_modes_stand_beside_each_other_with_their_ratio() -> None:
    lines = [line.split() for line in printed(build()[0]).splitlines()]
    rows = {line[0]: line[1:] for line in lines if line and line[0] in ("continuous", "static", "ratio")}
    assert rows["continuous"][:2] == ["350", "600"] and rows["static"][:2] == ["700", "1,200"]
    assert rows["ratio"][:2] == ["0.50", "0.50"] and "2.00" in rows["ratio"]
    text = printed(build()[0])
    assert text.splitlines()[4].split()[:5] == ["batching", "p50", "max", "p50", "max"]
    assert "values a row: TTFT 6, TPOT 6, ITL 24; max: of under 100, which have no p99" in text
    one = printed(build(modes=("continuous",))[0])
    assert "ratio" not in one and "static" not in one


@pytest.mark.parametrize(("rate", "text"), [(8.0, "at 8/s"), (None, "from a trace"), ("inf", "all at once")])
def test_the_title_says_how_requests_came(rate: Any, text: str) -> None:
    result, _ = build()
    result["cases"][0]["request_rate"] = rate
    assert f"6 requests {text}, at most 4 running" in printed(result)


def test_what_failed_is_said_and_nothing_else() -> None:
    text = printed(build(failed=2)[0])
    assert "continuous: 2 failed of 6 requests; first error: out of luck" in text
    assert "failed" not in printed(build()[0])


# --- plots --------------------------------------------------------------------------------------------------


def drawn(figure: Figure | None) -> Figure:
    """The figure, once it has really been rendered."""
    assert figure is not None
    figure.savefig(io.BytesIO(), format="png")
    return figure


def test_every_plot_is_a_png_and_is_listed(tmp_path: Path) -> None:
    result, rows = build(failed=1)
    paths = save_plots(result, tmp_path, requests=rows)
    assert [path.name for path in paths] == [
        "latency.png", "load.png", "cache.png", "tokens.png", "requests.png"
    ]  # fmt: skip
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


def test_without_data_nothing_is_drawn(tmp_path: Path) -> None:
    empty = build_result("throughput", metrics={}, config={}, provenance={}, timeline=[])
    assert save_plots(empty, tmp_path / "none", requests=[]) == []
    assert not (tmp_path / "none").exists()
    result, rows = build(modes=("continuous",), failed=6)
    result["timeline"] = [{"batching": "continuous", "num_blocks": None, "bin_s": None, "time_s": []}]
    paths = save_plots(result, tmp_path, requests=rows)
    assert [path.name for path in paths] == ["requests.png"]


def test_distributions_have_the_samples_their_percentiles_and_the_objectives() -> None:
    result, rows = build()
    axis = drawn(throughput_plots.latency_distributions(result, rows)).axes[0]
    curve, points = axis.lines[0].get_xydata(), axis.lines[1].get_xydata()
    np.testing.assert_allclose(curve[:, 0], [100, 200, 300, 400, 500, 600])
    np.testing.assert_allclose(curve[:, 1], np.arange(1, 7) / 6)
    case = result["cases"][0]
    np.testing.assert_allclose(points, [[case["median_ttft_ms"], 0.5]])
    many, requests = build(requests=120)
    points = drawn(throughput_plots.latency_distributions(many, requests)).axes[0].lines[1].get_xydata()
    case = many["cases"][0]
    np.testing.assert_allclose(points, [[case["median_ttft_ms"], 0.5], [case["p99_ttft_ms"], 0.99]])
    assert axis.lines[-1].get_xdata()[0] == SLO.ttft_ms
    tpot = drawn(throughput_plots.latency_distributions(result, rows)).axes[1]
    assert len(tpot.lines) == 4  # two modes, no objective


def test_idle_time_is_a_break_in_the_curve() -> None:
    axis = drawn(throughput_plots.load_over_time(build()[0])).axes[0]
    x, y = axis.lines[0].get_xdata(), axis.lines[0].get_ydata()
    gap = x[np.isnan(y)]
    assert gap == pytest.approx([0.2])
    assert np.nanmax(y) == 4 and y[-1] == 1


def test_tokens_plot_conserves_tokens() -> None:
    result, _ = build()
    axis = drawn(throughput_plots.tokens_over_time(result)).axes[0]
    totals = []
    for patch in axis.patches:
        values, edges, baseline = patch.get_data()
        totals.append(float(((values - baseline) * np.diff(edges)).sum()))
    assert totals == pytest.approx([16.0, 20.0, 56.0 - 36.0])


def test_preemptions_are_marked_where_they_were() -> None:
    axis = drawn(throughput_plots.cache_over_time(build()[0])).axes[0]
    marks = {line.get_label(): line.get_xdata() for line in axis.lines}
    assert marks["continuous: 2 preemptions"] == pytest.approx([0.2])
    assert max(axis.lines[0].get_ydata()[:3]) == pytest.approx(0.8)


def test_many_requests_are_thinned_out_evenly() -> None:
    result, rows = build(modes=("continuous",), requests=1000, failed=1)
    axis = drawn(throughput_plots.request_spans(result, rows)).axes[0]
    waiting, first, further = ([path.get_extents() for path in bars.get_paths()] for bars in axis.collections)
    assert len(waiting) == len(first) == len(further) == 399  # and the cross of the failed one
    assert waiting[0].width == pytest.approx(0.05)
    ends = [bar.x1 for bar in further]
    assert ends == sorted(ends) and ends[-1] == pytest.approx(rows[-1]["e2el_ms"] / 1e3)


# --- comparison ---------------------------------------------------------------------------------------------


def test_throughput_results_compare(tmp_path: Path) -> None:
    paths = [
        write_result(build(scale=scale)[0], tmp_path / name) for scale, name in ((1.0, "fast"), (2.0, "slow"))
    ]
    rows = {row.name: row for row in compare(paths).metrics}
    assert rows["output_throughput"].ratios[1] == pytest.approx(0.5)
    assert lower_is_better("output_throughput") is False
    for name in ("padding_waste", "preemptions", "failed", "median_ttft_ms"):
        assert name in rows and lower_is_better(name) is True
    assert "mean_batch_size" in rows and lower_is_better("mean_batch_size") is None


def test_a_small_share_is_in_per_cent_too() -> None:
    assert share(0.00415) == "0.4"
    assert share(0.5375) == "54"
    assert three_digits(0.00415) == "0.0042"
