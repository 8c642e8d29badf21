"""Tables, plots, progress and comparison: what is shown is what the result says."""

import io
from typing import ClassVar

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich.console import Console

from moejax.engine.requests.api import RequestMetrics
from moejax.report import plots, tables
from moejax.report.experiments import save_plots
from moejax.report.progress import progress
from moejax.report.style import run_title
from moejax.results.metrics import RequestRecord, case_row, compute_metrics
from moejax.results.result import build_result, load_requests, request_rows, write_request_rows

PROVENANCE = {
    "time_utc": "2026-01-01T00:00:00+00:00",
    "git": {"commit": "0123456789" * 4, "dirty": True, "diff_hash": "x"},
    "device": {"platform": "gpu", "kind": "NVIDIA A100-SXM4-80GB", "count": 8},
}


def build(shapes=((1, 8, 6), (4, 8, 6)), step=0.01, config=None, routing=None):
    """A latency result with one repeat per case, and its records."""
    records, cases = [], []
    for index, (batch, prompt, output) in enumerate(shapes):
        times = [0.05 + step * batch * i for i in range(output)]
        mine = [
            RequestRecord(f"{index}-{i}", index, prompt, output, RequestMetrics(0.0, list(times)), "length")
            for i in range(batch)
        ]
        cases.append(
            case_row({"batch_size": batch, "prompt_len": prompt, "output_len": output}, mine, times[-1])
        )
        records += mine
    config = config or {"model": {"name": "tiny"}, "seed": 0}
    metrics = compute_metrics(records, max(record.metrics.token_times[-1] for record in records))
    result = build_result(
        "latency", metrics=metrics, cases=cases, config=config, provenance=PROVENANCE, routing=routing
    )
    return result, records


def text_of(*renderables, width=80) -> str:
    console = Console(file=io.StringIO(), width=width)
    for renderable in renderables:
        console.print(renderable)
    return console.file.getvalue()


def test_latency_table_fits_80_columns_and_names_model_device_and_commit():
    text = text_of(tables.latency_table(build(shapes=((1, 128, 64), (16, 4096, 64)), step=0.02)[0]))
    assert "…" not in text and max(len(line.rstrip()) for line in text.splitlines()) <= 80
    for word in ("tiny", "8x NVIDIA A100-SXM4-80GB", "0123456+", "TTFT", "4,096", "50.00"):
        assert word in text, text


def test_a_roof_that_is_none_is_a_word_in_the_table():
    """Of a roof that was exceeded or unstable: no bare percentage, and the table still fits 80 columns."""
    result, _ = build(shapes=((1, 128, 64), (16, 128, 64)), step=0.001)
    result["cases"][0] |= {"roofline_percent": None, "roofline_doubt": "exceeded"}
    result["cases"][1] |= {"roofline_percent": None, "roofline_doubt": "unstable"}
    text = text_of(tables.latency_table(result))
    assert "above" in text and "moved" in text and "…" not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 80


def test_columns_without_values_are_left_out():
    text = text_of(tables.latency_table(build(shapes=((1, 8, 1),))[0]))
    assert "TTFT" in text and "TPOT" not in text and "ITL" not in text


@pytest.mark.parametrize(
    ("value", "cell"),
    [(None, "–"), (1234567, "1,234,567"), (0.0, "0"), (0.01234, "0.0123"), (3e-5, "3.00e-05"),
     (12.346, "12.35"), (123.46, "123.5"), (12345.6, "12,346"), (True, "True"), ("x", "x")],
)  # fmt: skip
def test_numbers_are_readable(value, cell):
    assert tables.number(value) == cell


def test_other_tables():
    assert "1,000" in text_of(tables.metrics_table({"completed": 1000}))
    text = text_of(
        tables.rows_table([{"what": "decode", "seconds": 1.5}, {"what": "prefill", "why": "new"}], "ledger")
    )
    assert all(word in text for word in ("ledger", "decode", "1.50", "new", "–"))


def test_every_plot_with_data_is_a_png_and_is_listed(tmp_path):
    counts = np.arange(32).reshape(2, 16)
    result, records = build(routing={"counts": counts})
    paths = save_plots(result, tmp_path, requests=request_rows(records))
    assert [p.name for p in paths] == ["latency.png", "itl.png", "throughput.png", "expert_load.png"]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(p.name for p in paths)


def test_plots_without_data_are_not_drawn(tmp_path):
    result, records = build(shapes=((1, 8, 1),))
    paths = save_plots(result, tmp_path, requests=request_rows(records))
    assert [p.name for p in paths] == ["latency.png"]
    empty = build_result("latency", metrics={}, config={}, provenance={})
    assert save_plots(empty, tmp_path / "empty", requests=[]) == []
    assert not (tmp_path / "empty").exists()


def test_plots_draw_the_same_from_rows_read_back(tmp_path):
    result, records = build()
    rows = load_requests(write_request_rows(request_rows(records), tmp_path))
    figures = [plots.inter_token_latency(result, source) for source in (request_rows(records), rows)]
    lines = [f.axes[0].lines[1].get_xydata() for f in figures]
    np.testing.assert_allclose(lines[0], lines[1])
    np.testing.assert_allclose(lines[0][:, 1], 40.0)


def test_bars_are_the_cases_percentiles():
    result, _ = build()
    axis = plots.latency_percentiles(result).axes[1]
    heights = [bar.get_height() for bar in axis.patches]
    expected = [case[f"{s}_tpot_ms"] for s in ("median", "max") for case in result["cases"]]
    np.testing.assert_allclose(heights, expected)
    many, _ = build(shapes=((100, 8, 6), (128, 8, 6)))
    axis = plots.latency_percentiles(many).axes[1]
    expected = [case[f"{s}_tpot_ms"] for s in ("median", "p90", "p99") for case in many["cases"]]
    np.testing.assert_allclose([bar.get_height() for bar in axis.patches], expected)


@pytest.mark.parametrize(
    ("result", "title"),
    [
        ({"experiment": "scaling", "hardware": {"kind": "a100_80gb"}}, "modelled a100_80gb"),
        ({"experiment": "scaling", "hardware": {"kind": "h100"}, "cases": [{"cpu_decode_ms": 3.0}]},
         "modelled h100, CPU: 8x NVIDIA A100-SXM4-80GB"),
        ({"config": {"engine": {"replay_routing": "runs/a"}}},
         "8x NVIDIA A100-SXM4-80GB · replayed routing"),
    ],
)  # fmt: skip
def test_what_was_not_simply_measured_says_so_in_titles(result, title):
    git = {"commit": "0" * 40}
    assert run_title(result | {"provenance": PROVENANCE | {"git": git}}) == f"{title} · commit 0000000"


def test_many_cases_and_outputs_of_unequal_length():
    shapes = [(b, p, n) for b in (1, 2, 4) for p, n in ((8, 6), (16, 3), (32, 1))]
    result, records = build(shapes=shapes)
    for figure in (
        plots.latency_percentiles(result),
        plots.inter_token_latency(result, request_rows(records)),
    ):
        figure.savefig(io.BytesIO(), format="png")
        renderer = FigureCanvasAgg(figure).get_renderer()
        labels = [text for axis in figure.axes for text in (axis.title, axis.xaxis.label, axis.yaxis.label)]
        for box in [label.get_window_extent(renderer) for label in labels if label.get_text()]:
            assert min(box.extents) >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height


def test_expert_load_is_relative_to_an_even_share_and_blank_for_dense_layers():
    counts = [[0, 0, 0, 0], [4, 2, 1, 1]]
    figure = plots.expert_load(build(routing={"counts": counts})[0])
    load = np.ma.filled(figure.axes[0].images[0].get_array(), np.nan)
    assert np.isnan(load[0]).all()
    np.testing.assert_allclose(load[1], [2.0, 1.0, 0.5, 0.5])
    assert plots.expert_load(build(routing={"counts": [[0, 0]]})[0]) is None


def test_training_curve_keeps_the_last_value_of_a_step():
    loss, held_out = "train/cross_entropy", "held_out/loss"
    rows = [{"step": s, loss: 5.0 - s, "train/learning_rate": 1e-3} for s in (0, 1, 2)]
    rows += [{"step": 1, loss: 3.5}, {"step": 2, loss: 2.5}, {"step": 2, held_out: 2.8}]
    figure = plots.training_curve({}, rows)
    np.testing.assert_allclose(figure.axes[0].lines[0].get_ydata(), [5.0, 3.5, 2.5])
    np.testing.assert_allclose(figure.axes[0].lines[1].get_ydata(), [2.8])
    assert plots.training_curve({}, [{"step": 1}]) is None


def test_progress_logs_a_line_each_ten_seconds_without_a_terminal(monkeypatch):
    clock = iter([0.0, 4.0, 12.0, 15.0, 31.0])
    monkeypatch.setattr("moejax.report.progress.time.monotonic", lambda: next(clock))
    console = Console(file=io.StringIO())
    with progress("[working]", total=4, console=console) as task:
        task.advance()
        task.advance()
        task.describe("still working")
        task.advance()
    assert console.file.getvalue() == "[working] 50 %, 12 s\nstill working 75 %, 31 s\n"


def test_progress_shows_a_line_in_a_cell(monkeypatch):
    class Line:
        shown: ClassVar[list[str]] = []

        def display(self, data, raw):
            self.shown.append(data["text/plain"])

        update = display

    clock = iter([0.0, 5.0, 5.5, 9.0])
    monkeypatch.setattr("moejax.report.progress.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("moejax.report.progress._cell_line", Line)
    with progress("measuring", total=4) as task:
        task.advance()  # at 5 s
        task.advance()  # half a second later: not shown
        task.describe("almost")
    assert Line.shown == ["measuring", "measuring 25 %, 5 s", "almost 50 %, 9 s", ""]


def test_progress_shows_a_bar_on_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with progress("[working]", total=3, console=console) as task:
        task.advance(3)
    assert "[working]" in console.file.getvalue() and "3/3" in console.file.getvalue()
