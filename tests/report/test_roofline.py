"""Table and plots of a roofline: what a reader sees of a result made by hand."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from moejax.bench.common.roofline import cost_breakdown
from moejax.core.errors import ConfigError
from moejax.core.hardware import Hardware
from moejax.perf.operation_costs import OpCost
from moejax.report.experiments import save_plots
from moejax.report.roofline import print_profile, ranked, residual_figure, roofline_figure

DEVICE = {"kind": "made_up", "bandwidth": 1e9, "flops": {"float32": 1e10}, "source": "measured"}
OPS = [
    OpCost(0, "qkv_projection", "decode", flops=4e6, weight_bytes=2e6),
    OpCost(0, "kv_write", "decode", cache_bytes=1e4),
    OpCost(0, "attention", "decode", flops=1e6, cache_bytes=1e6),
    OpCost(0, "norm", "decode", activation_bytes=100),
]


def result(measured: bool = True, **changes: Any) -> dict[str, Any]:
    device = Hardware("made_up", 1e9, {"float32": 1e10}, None, None, "measured")
    spent = {"qkv_projection": 3.0, "attention": 4.5, "norm": 0.5, "kv_write": 0.01}
    phase = cost_breakdown(
        OPS, device, "float32", seconds=0.009, kinds=["h100"], measured_ms=spent if measured else None
    )
    if measured:
        for row in phase["operations"]:
            row["share"] = row["measured_ms"] / 10
        phase |= {
            "plain_ms": 9.0,
            "measured_ms": 10.0,
            "units": 4,
            "measured_units": 8,
            "steps_per_unit": 1.0,
        }
        phase |= {"launch_overhead_ms": 0.5, "host_gap_ms": 1.48, "unattributed_ms": 0.01, "inferred_ms": 0.2}
        phase |= changes
    return {"hardware": DEVICE, "roofline": [phase], "metrics": {"profiler_slowdown": 1.5}}


def printed(shown: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_profile(shown, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines()[:14])) <= 100
    return text


def test_operations_are_ranked_by_what_they_take_beyond_their_bound() -> None:
    shown = result()
    names = [row["operation"] for row in ranked(shown["roofline"][0])]
    assert names == ["attention", "qkv_projection", "norm", "kv_write"]
    text = printed(shown)
    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    #                          measured share bound limit excess GFLOP/s GB/s
    assert rows["attention"][1:] == ["4.50", "45.0", "1.00", "memory", "3.50", "0.2222", "0.2222"]
    assert rows["norm"][1:] == ["0.5000", "5.0", "0", "–", "0.5000", "–", "–"]
    assert rows["host"][1:3] == ["1.48", "14.8"]
    assert "decode step: 9.00 ms, 10.00 under the profiler; bound 3.01 ms (memory, made_up)" in text
    assert "MFU 5.6 %, MBU 33.4 %" in text
    assert "mean of 4 of 8 profiled steps" in text and "h100 0.0009" in text.replace("8.98e-04", "0.0009")
    assert "2.0 % is of instructions without a scope" in text
    assert "the profiler slows a decode step 1.50 times" in text


def test_remarks_that_a_reader_needs() -> None:
    text = printed(result(unattributed_ms=2.0, steps_per_unit=3.0))
    assert "engine.compile_cache=false compiles it anew" in text and "3 steps each" in text
    assert "excess below 0" not in text
    fast = result()
    fast["roofline"][0]["operations"][0]["excess_ms"] = -0.1
    assert "excess below 0" in printed(fast)


def test_the_roof_and_its_marks() -> None:
    """Every operation with FLOPs and bytes, at its intensity; attention reads what the step writes too."""
    (axis,) = roofline_figure(result()).axes
    marks = {
        (round(float(line.get_xdata()[0]), 3), round(float(line.get_ydata()[0]) / 1e6, 1))
        for line in axis.lines
        if line.get_marker() not in ("None", "")
    }
    whole = (round(5e6 / 3.01e6, 3), round(5e6 / 9e-3 / 1e6, 1))
    assert marks == {(2.0, 1333.3), (round(1e6 / 1.01e6, 3), 222.2), whole}
    roof = axis.lines[0]
    assert max(roof.get_ydata()) == 1e10 and min(roof.get_ydata()) == pytest.approx(
        1e9 * min(roof.get_xdata())
    )
    assert axis.get_xscale() == axis.get_yscale() == "log"
    hollow = roofline_figure(result(measured=False)).axes[0]
    assert "bound, not measured" in [text.get_text() for text in hollow.get_legend().get_texts()]


def test_a_roof_that_was_exceeded_is_not_drawn() -> None:
    """Neither the roof nor a bound; the table has the word where the share would stand."""
    shown = result(roofline_doubt="exceeded", mbu=None, mfu=None)
    (roof,) = roofline_figure(shown).axes
    assert len(roof.lines) == 1 and "left out: decode (the roof was exceeded)" in roof.get_title(loc="left")
    (axis,) = residual_figure(shown).axes
    assert [patch.get_width() for patch in axis.patches][1::2] == [0.0] * (len(axis.patches) // 2)
    assert "no bounds: the roof was exceeded" in axis.get_title()
    assert "MFU exceeded, MBU exceeded" in printed(shown)


def test_bars() -> None:
    (axis,) = residual_figure(result()).axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    assert names[:3] == ["attention", "host", "qkv_projection"] and "not attributed" in names
    widths = [patch.get_width() for patch in axis.patches]
    assert widths[:2] == [4.5, 1.0]


def test_files(tmp_path: Path) -> None:
    assert [path.name for path in save_plots(result() | {"experiment": "profile"}, tmp_path)] == [
        "roofline.png",
        "residuals.png",
    ]
    assert all(path.stat().st_size > 10_000 for path in tmp_path.iterdir())


def test_results_that_show_nothing() -> None:
    with pytest.raises(ConfigError, match="has no roofline"):
        roofline_figure({"metrics": {}})
    with pytest.raises(ConfigError, match="bandwidth and its peak for float32"):
        roofline_figure(result() | {"hardware": None})
    with pytest.raises(ConfigError, match=r"python -m experiments\.profile has"):
        residual_figure(result(measured=False))
