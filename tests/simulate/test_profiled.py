"""The device that was profiled, and the published run on it."""

import pytest

from moejax.bench.simulate.trace import LAWS, published, rows
from moejax.simulate.kernels import ExpertShape, HeadShape
from moejax.simulate.profiled import ProfiledKernels
from moejax.simulate.tables import FOLDER, rows_of

HEADS, EXPERTS = HeadShape(32, 4, 128), ExpertShape(2048, 768, 64)


def test_cells_of_the_tables_come_back() -> None:
    kernels = ProfiledKernels()
    for row in rows_of(FOLDER / "rtxpro6000_moe_hits.csv"):
        tokens, hits, us = (float(row[name]) for name in ("tokens", "activated_experts", "us"))
        assert kernels.experts(EXPERTS, hits, 8 * tokens).seconds == pytest.approx(1e-6 * us)
    for place, row in enumerate(rows_of(FOLDER / "rtxpro6000_attention_mixed.csv.gz")):
        if place % 97 == 0:
            chunk, past, decodes, context, us = map(float, row.values())
            chunks = [(int(chunk), int(chunk + past))] if chunk else []
            (found,) = kernels.attention(HEADS, decodes, context, chunks)
            assert found.seconds == pytest.approx(1e-6 * us)


def test_between_cells_a_time_is_between_theirs_and_beyond_them_longer() -> None:
    kernels = ProfiledKernels()
    low, middle, high = (kernels.experts(EXPERTS, hits, 512).seconds for hits in (32, 48, 64))
    assert middle == pytest.approx((low + high) / 2)
    assert kernels.experts(EXPERTS, 64, 8 * 4096).seconds > kernels.experts(EXPERTS, 64, 8 * 2048).seconds
    (longest,) = kernels.attention(HEADS, 64, 16384, [])
    (beyond,) = kernels.attention(HEADS, 64, 32768, [])
    assert 1.5 < beyond.seconds / longest.seconds < 2.5


def test_a_product_has_what_follows_it_and_other_shapes_are_bounds() -> None:
    kernels = ProfiledKernels()
    assert kernels.gemm(64, 5120, 2048).seconds == pytest.approx((12.17 + 2.203 + 2.613 + 2.539) * 1e-6)
    assert kernels.gemm(64, 5120, 2048).source == "interpolated"
    assert kernels.gemm(64, 4096, 2048).source == "roofline"
    assert kernels.gemm(0, 5120, 2048).seconds == 0
    assert kernels.experts(ExpertShape(4096, 768, 8), 8, 64).source == "nearest"
    assert {one.source for one in kernels.attention(HeadShape(8, 8, 64), 4, 100, [(16, 16)])} == {"roofline"}
    assert kernels.collective("all-gather", 16e6, 2, 1).seconds == pytest.approx(1e-3 + 20e-6)
    assert kernels.collective("all-gather", 16e6, 1, 1).seconds == 0


def test_the_published_run_is_what_it_is_told_to_be() -> None:
    """Means as LLMServingSim's own summary of that run has them."""
    records = published()
    assert len(records) == 300
    assert sum(one.metrics.ttft for one in records) / 300 == pytest.approx(1.086, abs=1e-4)
    assert sum(one.metrics.e2e for one in records) / 300 == pytest.approx(32.3446, abs=1e-4)


@pytest.mark.slow
def test_the_published_run_is_met() -> None:
    """By the simulator's own law of routing; means within 2 %, TTFT's within 13 %."""
    found = {row["metric"]: row["error"] for row in rows() if row["routing"] == str(LAWS[0])}
    assert abs(found["mean_tpot_ms"]) < 0.02 and abs(found["mean_e2el_ms"]) < 0.02
    assert abs(found["p99_tpot_ms"]) < 0.05 and abs(found["p99_e2el_ms"]) < 0.05
    assert abs(found["mean_ttft_ms"]) < 0.13
