"""mode=bench on a toy operation, where a CPU can time it, and what it says without a GPU."""

import jax
import jax.numpy as jnp
import pytest

from moejax.bench.kernels.baselines import _sorted_rows, variants
from moejax.bench.kernels.bench import bench_spec, run_bench
from moejax.bench.kernels.config import BenchSection, KernelSelection
from moejax.core.errors import DeviceError
from moejax.report.kernel_tables import bench_table
from moejax.report.tables import stderr_console
from moejax.tracking.base import TrackerConfig
from pallas_kernels.op import Implementation
from tests.bench.kernels.toy import ELSEWHERE, REFUSES, Config, heuristic, selected, space, toy

CEILINGS = {"copy_bandwidth": 1e9, "matmul_bfloat16": 1e12, "matmul_int8": 2e12}
CONFIG = KernelSelection(mode="bench", bench=BenchSection(repeats=3))


def wrong(x, *, factor, config, interpret=None):
    return x * (factor + 1)


def test_rows_of_a_spec(capsys):
    op = toy(refuses=REFUSES, elsewhere=ELSEWHERE, wrong=Implementation(wrong, Config, heuristic, space))
    rows = {row["implementation"]: row for row in bench_spec(selected(op), op.specs[1], CONFIG, CEILINGS)}
    assert list(rows) == ["pallas_triton", "refuses", "elsewhere", "wrong", "xla_reference"]
    good = rows["pallas_triton"]
    assert good["error"] is None and good["relative_error"] == 0 and good["median_us"] > 0
    assert good["bound_us"] == pytest.approx(1e6 * 2 * 4 * 64 * 64 / 1e9)
    assert good["bound_share"] == pytest.approx(good["bound_us"] / good["median_us"])
    assert good["bandwidth_share"] == pytest.approx(good["bound_share"])
    assert good["config_reason"].startswith("heuristic") and good["config"] == (
        '{"rows": 4, "num_warps": 1, "num_stages": 1}'
    )
    assert "not on this device" in rows["refuses"]["error"]
    assert rows["elsewhere"]["error"] == "T of at most 8"
    assert rows["wrong"]["relative_error"] == pytest.approx(1 / 3)
    assert not rows["xla_reference"]["ours"] and rows["xla_reference"]["median_us"] > 0
    stderr_console().print(bench_table("toy", list(rows.values())))
    shown = capsys.readouterr().err
    assert "not on this device" in shown and "3.3e-01" in shown


def test_without_a_gpu(tmp_path):
    with pytest.raises(DeviceError, match="JAX has only 'cpu' here; mode=static"):
        run_bench(CONFIG, TrackerConfig(kind="none"), tmp_path, whole_config={})
    assert not list(tmp_path.iterdir())


def test_rows_for_ragged_dot_are_the_slots_without_padding():
    """Blocks of 2 slots: experts 0 and 2, one slot of padding, one block past the count."""
    arrays = {
        "x": jnp.arange(3.0)[:, None] * jnp.ones((1, 4)),
        "w": jnp.ones((3, 4, 5)),
        "rows": jnp.array([1, 0, 2, 3, 0, 0], jnp.int32),
        "block_expert": jnp.array([0, 2, 2], jnp.int32),
        "num_blocks": jnp.array([2], jnp.int32),
    }
    got = _sorted_rows(arrays)
    assert got["x"][:, 0].tolist() == [1, 0, 2]
    assert got["sizes"].tolist() == [2, 0, 1]
    assert jax.lax.ragged_dot(got["x"], got["w"], got["sizes"])[:, 0].tolist() == [4, 0, 8]


def test_baselines_can_be_left_out():
    op = toy()
    names = [variant.name for variant in variants(op, op.specs[0], ["pallas_triton"], baselines=False)]
    assert names == ["pallas_triton"]
