"""The static model: what it sees of a configuration, and when it may replace the heuristic's."""

import pytest

from moejax.bench.kernels.model import MARGIN, choose, predict_us, repeated_products
from moejax.bench.kernels.row import Row


def row(config, *, kernel="grouped_matmul", warps=4, mma=32, grid=1024, bps=2, flops=1e9, moved=1e6, **more):
    """A kernel with matrix products, bound by arithmetic."""
    values = {"products": int(mma > 0), "mma_sync": mma, "cp_async": 8, "shared": 32768} | more
    return Row(
        "op", "pallas_triton", "spec", "sm_80", kernel, config, "explicit", "jaxlib", (grid,), warps, flops,
        moved, "bfloat16", blocks_per_sm=bps, **values,
    )  # fmt: skip


def tile(n, k=64):
    return {"block_n": n, "block_k": k, "group": 1}


def test_repeated_products_show_in_the_instructions():
    """As Triton 3.9 compiles grouped_swiglu of 32 rows for sm_80: each of 4 warps makes as many products for
    a tile of 32 columns as for one of 64, and each of 8 no fewer."""
    reports = [
        [row(tile(64), warps=4, mma=32)],
        [row(tile(32), warps=4, mma=32)],
        [row(tile(32), warps=8, mma=32)],
        [row(tile(64, 128), warps=4, mma=64)],
    ]
    found = [repeats["grouped_matmul", 0] for repeats in repeated_products(reports)]
    assert found == [1, 2, 4, 1]


def test_kernels_of_one_configuration_have_their_own_tiles():
    """In attention over pages the chunk's rows say nothing of the decode kernel."""
    decode = {"decode_tile": 64, "rows": 64, "tile": 32}
    chunk = {**decode, "rows": 128, "tile": 64}
    reports = [
        [
            row(c, kernel="paged_decode", mma=32),
            row(c, kernel="paged_chunk", mma=mma),
            row(c, kernel="r", mma=0),
        ]
        for c, mma in ((decode, 16), (chunk, 128))
    ]
    first, second = repeated_products(reports)
    assert first == {("paged_decode", 0): 1, ("paged_chunk", 1): 1}
    assert second == {("paged_decode", 0): 1, ("paged_chunk", 1): 2}


def test_modes_are_kernels_of_their_own():
    reports = [
        [row({**tile(64), "mode": "fused"}, mma=64)],
        [row({**tile(64), "mode": "separate"}, mma=32), row({**tile(64), "mode": "separate"}, mma=32)],
    ]
    assert [set(found.values()) for found in repeated_products(reports)] == [{1.0}, {1.0}]


def test_repeated_products_take_their_time():
    rows = [row(tile(32))]
    alone = predict_us(rows)
    assert predict_us(rows, {("grouped_matmul", 0): 4.0}) == pytest.approx(4 * alone)
    fed = [row(tile(32), moved=1e9)]  # bound by memory: what warps repeat hides behind the loads
    assert predict_us(fed, {("grouped_matmul", 0): 2.0}) == predict_us(fed)


def test_a_reduction_beside_products_does_not_carry_the_cost():
    """Its one warp could not keep the bandwidth busy with the spec's bytes; nor does it read them."""
    main = row(tile(64), moved=1e9)
    reduction = row(tile(64), kernel="reduce", warps=1, mma=0, grid=32, moved=1e9, cp_async=0, shared=0)
    assert predict_us([main, reduction]) == predict_us([main])
    assert predict_us([reduction]) > predict_us([main])


def test_few_warps_with_many_accumulators_keep_the_tensor_cores_busy():
    """64 × 128 by 4 warps, 2 blocks: 16 accumulators a warp. With one or two they would have to wait."""
    many, few = (row(tile(128), mma=mma, grid=108 * 12) for mma in (64, 4))
    assert predict_us([few]) == pytest.approx(2 * predict_us([many]))
    # More warps than that do not help, as a whole wave of blocks shows.
    waves = [row(tile(128), mma=64, bps=bps, grid=108 * 12) for bps in (2, 3, 4)]
    assert predict_us(waves[:1]) == pytest.approx(predict_us(waves[2:]))


def test_a_last_wave_costs_what_it_does():
    """217 blocks on 216 places. Memory: the last block draws what one multiprocessor can; no whole wave.
    Arithmetic: its products take as long as on one multiprocessor, which is half of a wave of two."""

    def both(flops, moved):
        """Of this much a block."""
        return [
            predict_us(
                [row(tile(64), mma=64, warps=8, grid=n, shared=10**5, flops=flops * n, moved=moved * n)]
            )
            for n in (216, 217)
        ]

    full, more = both(1.0, 1e7)
    assert more - full == pytest.approx(1e6 * 1e7 / (64 * 1.41e9))
    full, more = both(1e9, 1.0)
    assert more == pytest.approx(1.5 * full)


@pytest.mark.parametrize(
    "predicted,heuristic,want",
    [
        ([10.0, 9.0, 8.9], 0, 0),  # 1.12: within what the model does not know
        ([10.0, 10 / MARGIN, 12.0], 0, 1),
        ([10.0, 5.0], 1, 1),
        ([10.0, 9.9], None, 1),
    ],
)
def test_the_heuristic_stays_unless_the_model_gains_enough(predicted, heuristic, want):
    best, reason = choose(predicted, heuristic)
    assert best == want
    kept = heuristic is not None and best == heuristic
    assert reason.startswith("the heuristic's: " if kept else "the model's best: ")
