"""mode=bench on a toy operation, where a CPU can time it, and what it says without a GPU."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from moejax.bench.kernels import bench
from moejax.bench.kernels.baselines import _sorted_rows, variants
from moejax.bench.kernels.bench import _best, bench_spec, run_bench
from moejax.bench.kernels.config import BenchSection, KernelSelection
from moejax.bench.kernels.device_timing import Chain, Timed
from moejax.core.errors import DeviceError
from moejax.core.files import dump_json
from moejax.report.kernel_tables import bench_faults, bench_table
from pallas_kernels.op import Cost, Implementation, Spec
from pallas_kernels.qformats import Format, random_quantized
from pallas_kernels.registry import load_op
from tests.bench.kernels.toy import ELSEWHERE, REFUSES, Config, heuristic, selected, space, toy
from tests.bench.runs import run_into

CEILINGS = {"copy_bandwidth": 1e9, "matmul_bfloat16": 1e12, "matmul_int8": 2e12}
CONFIG = KernelSelection(mode="bench", bench=BenchSection(repeats=3))


@pytest.fixture(autouse=True)
def short_chains(monkeypatch):
    """An interpreted kernel compiles for long, and a chain has it many times."""
    monkeypatch.setattr(bench, "chain_length", lambda expected_us, call_bytes: 2)


@pytest.fixture(autouse=True)
def steady_clock(monkeypatch):
    """Chains run, but a toy's time is lost in a busy machine's noise."""
    monkeypatch.setattr(Chain, "sample", lambda self, clock=None: (self.warm_up(), 5.0)[1])


def show(rows, capsys):
    """What the table and the lines below it say."""
    console = Console(stderr=True, width=100)
    console.print(bench_table("toy", rows))
    for line, style in bench_faults(rows):
        console.print(line, style=style, soft_wrap=True)
    return capsys.readouterr().err


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
    assert not rows["xla_reference"]["ours"] and rows["xla_reference"]["median_us"] > 0
    # A wrong result has no time: it cannot be the fastest.
    assert rows["wrong"]["relative_error"] == pytest.approx(1 / 3) and "median_us" not in rows["wrong"]
    assert rows["wrong"]["error"].startswith("wrong result: relative error 3.3e-01, at most ")
    shown = show(list(rows.values()), capsys)
    assert "wrong WRONG" in shown and "3.3e-01" in shown
    assert "refuses, toy_64: NotImplementedError: not on this device" in shown
    assert "elsewhere, toy_64: T of at most 8" in shown


def not_a_number(x, *, factor, config, interpret=None):
    return x * jnp.nan


def test_a_result_that_is_not_finite_counts_for_nothing(capsys):
    op = toy(fast=Implementation(not_a_number, Config, heuristic, space))
    rows = bench_spec(selected(op), op.specs[0], CONFIG, CEILINGS)
    bad = next(row for row in rows if row["implementation"] == "fast")
    assert bad["relative_error"] == math.inf and bad["error"] == "wrong result: not finite"
    assert "median_us" not in bad and "bound_share" not in bad
    # JSON has no infinity; a reader of the file has the error's text, of the table the word.
    stored = json.loads(dump_json(rows))
    assert next(row for row in stored if row["implementation"] == "fast")["relative_error"] is None
    for given in (rows, stored):
        line = next(line for line in show(given, capsys).splitlines() if "fast WRONG" in line)
        assert line.split()[-1] == "inf"
    # Even with a time it would not count.
    share = next(row["bound_share"] for row in rows if row["implementation"] == "pallas_triton")
    assert _best([*rows, {**bad, "bound_share": 0.99}]) == {"toy_bound_share": share}


def test_a_failure_at_run_time_is_its_own_row():
    """It is right once, when it is compared, and raises from then on: no memory, say."""
    calls = []

    def host(x):
        calls.append(1)
        if len(calls) > 1:
            raise MemoryError("no memory left")
        return np.asarray(x) * np.float32(3)

    def run(x, *, factor, config, interpret=None):
        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")

    op = toy(late=Implementation(run, Config, heuristic, space))
    rows = {row["implementation"]: row for row in bench_spec(selected(op), op.specs[0], CONFIG, CEILINGS)}
    # The host's exception itself is far down in what XLA says of it.
    assert "callback" in rows["late"]["error"] and "median_us" not in rows["late"]
    assert rows["late"]["relative_error"] == 0
    for name in ("pallas_triton", "xla_reference"):
        assert rows[name]["error"] is None and rows[name]["median_us"] > 0


def test_without_a_reference_nothing_is_timed(monkeypatch):
    def fails(x, factor):
        raise ValueError("too large")

    op = dataclasses.replace(toy(), reference=fails)
    monkeypatch.setattr(bench, "bench_inputs", lambda op, spec: [spec.make(jax.random.key(0))] * 2)
    rows = bench_spec(selected(op), op.specs[0], CONFIG, CEILINGS)
    assert len(rows) == 2
    for row in rows:
        assert "the reference, to compare with, failed: ValueError: too large" in row["error"]


QUANTIZED = ("quantized_matmul", "quantized_grouped_matmul", "quantized_grouped_swiglu")


def small_quantized(name, kind="w4a16"):
    """The operation with one spec of two experts, 64 × 32, 4 tokens."""
    op, fmt = load_op(name), Format(kind, 64 if kind == "w4a16" else 0)
    names = ("gate", "up") if name.endswith("swiglu") else ("w",)
    grouped = name != "quantized_matmul"
    lead = (2,) if grouped else ()

    def make(key):
        a, *keys = jax.random.split(key, 3)
        weights = {n: random_quantized(k, (*lead, 64, 32), fmt) for n, k in zip(names, keys, strict=False)}
        table = {
            "rows": jnp.where(jnp.arange(32) % 16 < 3, jnp.arange(32) % 4, 4).astype(jnp.int32),
            "block_expert": jnp.arange(2, dtype=jnp.int32),
            "num_blocks": jnp.array([2], jnp.int32),
        }
        return {"x": jax.random.normal(a, (4, 64), jnp.bfloat16)} | weights | (table if grouped else {})

    problem = {"P": 32, "E": 2, "block_m": 16} if grouped else {"T": 4}
    problem |= {"D": 64, "F": 32, "dtype": "bfloat16", "kind": kind, "group": fmt.group, "zeros": 0}
    problem |= {"matrices": len(names)} if grouped else {}
    problem |= {"activation": "silu"} if len(names) > 1 else {}
    static = {"block_m": 16} if grouped else {}
    spec = Spec("small/decode_4", make, static, problem, Cost(1e4, 1e4), frozenset({"decode", kind}))
    return dataclasses.replace(op, specs=(spec,))


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_operations_stand_beside_bfloat16(name, monkeypatch, capsys):
    op = small_quantized(name)
    timed = {"pallas_triton": 10.0, "xla_reference": 90.0, "bf16": 25.0}

    def fake(chains, repeats):
        return {n: Timed((timed[n],) * 4, chain.calls) for n, chain in chains.items()}, {}

    monkeypatch.setattr(bench, "measure", fake)
    rows = {row["implementation"]: row for row in bench_spec(selected(op), op.specs[0], CONFIG, CEILINGS)}
    assert {n: row["error"] for n, row in rows.items()} == dict.fromkeys(timed)
    # The same numbers, in another format.
    assert 0 < rows["bf16"]["relative_error"] < 2.0**-7 and not rows["bf16"]["ours"]
    assert rows["bf16"]["note"].startswith("weights dequantized beforehand, by ")
    assert rows["pallas_triton"]["speedup_over_bf16"] == 2.5
    assert "speedup_over_bf16" not in rows["bf16"]
    key = f"{name}_w4a16_decode_speedup_over_bf16"
    assert _best(list(rows.values()))[key] == 2.5
    shown = show(list(rows.values()), capsys)
    ours = next(line for line in shown.splitlines() if "pallas_triton" in line)
    assert "x bf16" in shown and ours.split()[-1] == "2.50"


def test_the_least_speedup_of_a_phase_counts():
    def row(spec, gain, tags, **more):
        return {"op": "q", "spec": spec, "ours": True, "error": None, "tags": tags} | {
            "speedup_over_bf16": gain,
            **more,
        }

    rows = [
        row("a", 3.0, "decode w4a16"),
        row("b", 2.0, "decode w4a16"),
        row("b", 2.6, "decode w4a16"),
        row("c", 0.9, "prefill w4a16"),
        row("d", 9.0, "prefill w4a16", error="wrong result: not finite"),
        row("e", 1.5, "decode fp8"),
    ]
    assert _best(rows) == {
        "q_w4a16_decode_speedup_over_bf16": 2.6,
        "q_w4a16_prefill_speedup_over_bf16": 0.9,
        "q_fp8_decode_speedup_over_bf16": 1.5,
    }


def test_dequantized_weights_fit_beside_the_inputs(monkeypatch):
    """Fewer of the inputs get weights of their own in bfloat16, and the row says how many."""
    op = small_quantized("quantized_matmul")
    monkeypatch.setattr(bench, "chain_length", lambda expected_us, call_bytes: 4)
    monkeypatch.setattr(bench, "MEMORY_BUDGET", 3 * 2 * 64 * 32)
    rows = {row["implementation"]: row for row in bench_spec(selected(op), op.specs[0], CONFIG, CEILINGS)}
    assert rows["bf16"]["sets"] == rows["bf16"]["calls"] == 3
    assert rows["pallas_triton"]["sets"] == rows["pallas_triton"]["calls"] > 3


def test_rounded_activations_are_not_compared_with_whole_ones():
    op = small_quantized("quantized_matmul", "w8a8")
    found = {v.name: v for v in variants(op, op.specs[0], ["pallas_triton"], baselines=True)}
    assert not found["bf16"].comparable and found["pallas_triton"].comparable


def test_without_a_gpu(tmp_path):
    with pytest.raises(DeviceError, match="JAX has only 'cpu' here; mode=static"):
        run_bench(CONFIG, run_into(tmp_path, "kernels"))
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
