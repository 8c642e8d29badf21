"""Bytes of expert parallelism under a trace, against loops over single tokens."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from moejax.bench.scaling.config import ScalingSection
from moejax.bench.scaling.routed import _turns, _wire, routed_row
from moejax.bench.scaling.run import run_scaling
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.moe.exchange_cost import exchange_cost, exchange_hops
from moejax.moe.exchange_size import capacity_buckets
from moejax.perf.comm import step_comm
from moejax.report.scaling import print_scaling
from moejax.routing.capture import RoutingCapture
from moejax.routing.generate import generate
from tests.bench.runs import run_into
from tests.engine.mesh_models import BASE

MODEL = BASE.replace(
    num_experts=16, num_experts_per_tok=3, num_layers=2, moe_layers=(True, True), sliding_windows=(None, None)
)

ROW = MODEL.hidden_size * 4
THERE, BACK = ROW + 8 * 3, ROW


def made(kind: str = "zipf", requests: int = 12, **params: Any) -> RoutingCapture:
    return generate(
        kind, num_experts=16, top_k=3, layers=2, requests=requests, prompt_len=5, output_len=6, **params
    )


def by_loops(trace: RoutingCapture, parallel: ParallelConfig) -> dict[str, np.ndarray]:
    """phase → [steps, layers, ranks] bytes, each token for itself, in one hop or two."""
    R, local = parallel.ep, parallel.ep // parallel.expert_nodes
    physical = [e % 16 for e in range(16 + parallel.redundant_experts)]
    held = len(physical) // R
    found: dict[str, list[np.ndarray]] = {"prefill": [], "decode": []}
    for step in np.unique(trace.step):
        sent = np.zeros((2, R))
        seen = dict.fromkeys(range(R), 0)
        for row in np.flatnonzero(trace.step == step):
            home = int(trace.request[row]) % R
            place, seen[home] = seen[home], seen[home] + 1
            for layer in range(2):
                ranks = set()
                for expert in trace.ids[row, layer].tolist():
                    copies = [slot for slot, e in enumerate(physical) if e == expert]
                    ranks.add(copies[place % len(copies)] // held)
                if parallel.expert_nodes == 1:
                    steps = [(home, rank) for rank in ranks]
                else:
                    gates = {node * local + home % local for node in {rank // local for rank in ranks}}
                    steps = [(home, gate) for gate in gates]
                    steps += [(rank // local * local + home % local, rank) for rank in ranks]
                for source, target in steps:
                    if source != target:
                        sent[layer, source] += THERE
                        sent[layer, target] += BACK
        found["prefill" if trace.prefill[trace.step == step].any() else "decode"].append(sent)
    return {phase: np.array(rows) for phase, rows in found.items()}


@pytest.mark.parametrize(
    ("parallel", "method"),
    [
        (ParallelConfig(ep=4, attention="data"), "all_to_all"),
        (ParallelConfig(ep=4, attention="data", redundant_experts=4), "ragged"),
        (ParallelConfig(ep=8, nodes=2, attention="data"), "hierarchical"),
    ],
    ids=["one_hop", "replicas", "two_hops"],
)
def test_bytes_by_loops(parallel: ParallelConfig, method: str) -> None:
    trace = made(exponent=1.3)
    row = routed_row(trace, MODEL, parallel, {"prefill": method, "decode": method})
    for phase, sent in by_loops(trace, parallel).items():
        mean, most = sent.mean(2).sum(1).mean(), sent.max(2).sum(1).mean()
        assert row[f"routed_{phase}_bytes_mean"] == pytest.approx(mean, rel=1e-12)
        assert row[f"routed_{phase}_bytes_max"] == pytest.approx(most, rel=1e-12)
        assert row[f"routed_{phase}_imbalance"] == pytest.approx(most / mean, rel=1e-12)
        assert row[f"routed_{phase}_wire_bytes"] >= mean * (1 - 1e-9)


def test_an_even_routing_sends_what_the_formula_says() -> None:
    parallel = ParallelConfig(ep=8, attention="data")
    trace = made("uniform", requests=256)
    row = routed_row(trace, MODEL, parallel, {"prefill": "all_to_all", "decode": "all_to_all"})
    for phase in ("prefill", "decode"):
        assert row[f"routed_{phase}_bytes_mean"] == pytest.approx(row[f"routed_{phase}_bytes_even"], rel=0.02)
    skewed = routed_row(
        made(exponent=1.5, requests=256), MODEL, parallel, dict.fromkeys(("prefill", "decode"), "all_to_all")
    )
    assert skewed["routed_decode_imbalance"] > 1.3 > 1.15 > row["routed_decode_imbalance"]
    assert skewed["routed_prefill_wire_bytes"] > skewed["routed_prefill_wire_bytes_even"]


@pytest.mark.parametrize("method", ["allgather", "all_to_all", "hierarchical"])
def test_wire_bytes_are_those_of_the_cost_model(method: str) -> None:
    parallel = ParallelConfig(ep=8, nodes=2, attention="data")
    even, hops = exchange_cost(method, MODEL, parallel, 200), exchange_hops(method, MODEL, parallel)
    buckets = capacity_buckets(200, MODEL.num_experts_per_tok, hops)
    for bucket, need in ((0, (1, 1)), (-1, (10**6, 10**6))):
        exchange = dataclasses.replace(even, capacities=buckets[bucket]) if even.capacities else even
        terms = step_comm(MODEL, parallel, tokens=200, rows=1, exchange=exchange, layers=[0])
        want = sum(t.total_bytes for t in terms if t.operation in ("dispatch", "combine"))
        assert _wire(method, MODEL, parallel, 200, need if method == "hierarchical" else need[:1])[1] == want


def test_load_by_hand_where_all_ranks_see_all_tokens() -> None:
    trace = made(exponent=1.3)
    row = routed_row(trace, MODEL, ParallelConfig(ep=4), dict.fromkeys(("prefill", "decode"), "none"))
    decode = trace.phase("decode")
    steps = [decode.select(decode.step == s).counts().reshape(2, 4, 4).sum(2) for s in np.unique(decode.step)]
    most, mean = (np.array([f(s, axis=1) for s in steps]).sum() for f in (np.max, np.mean))
    assert row == {
        "routed_prefill_load_imbalance": pytest.approx(row["routed_prefill_load_imbalance"]),
        "routed_decode_load_imbalance": pytest.approx(most / mean, rel=1e-12),
    }
    assert routed_row(trace, MODEL, ParallelConfig(tp=4), {}) == {}


def test_replicas_are_picked_as_the_layer_picks_them() -> None:
    import jax.numpy as jnp

    from moejax.moe.replicas import ReplicaTable

    rng = np.random.default_rng(0)
    ids = rng.permuted(np.tile(np.arange(16), (40, 1)), axis=1)[:, :3]
    want = np.asarray(ReplicaTable(16, 4)(jnp.asarray(ids, jnp.int32)))
    copies = np.bincount(np.arange(20) % 16, minlength=16)
    mine = ids + 16 * (np.arange(40)[:, None] % copies[ids])
    np.testing.assert_array_equal(mine, want)
    np.testing.assert_array_equal(_turns(np.array([3, 1, 3, 3, 1])), [0, 0, 1, 2, 1])


def test_the_experiment_prints_and_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(requests=4).save(tmp_path / "routing.npz")
    section = ScalingSection(
        layouts=["single", "dp_attention_ep8", "ep8"], measure="off", routing=str(tmp_path)
    )
    model = MODEL.replace(num_heads=8, num_kv_heads=8)
    result = _run(model, section, tmp_path / "run")
    assert result["routing_trace"]["requests"] == 4 and (tmp_path / "run" / "routing.png").exists()
    alone, data, tensor = result["cases"]
    assert "routed_decode_load_imbalance" not in alone
    assert (
        data["routed_idle_groups"] == 4 and data["routed_decode_bytes_max"] > data["routed_decode_bytes_mean"]
    )
    assert tensor["routed_decode_load_imbalance"] >= 1 and "routed_decode_bytes_mean" not in tensor
    print_scaling(result, Console(stderr=True, width=100))
    shown = capsys.readouterr().err
    assert "4 of its groups get none of the trace's 4 requests" in shown and "Under the routing of" in shown


def _run(model: ModelConfig, section: ScalingSection, out: Path) -> dict[str, Any]:
    with run_into(out, "scaling", {"scaling": dataclasses.asdict(section)}) as run:
        return run_scaling(model, section, run, load_format="dummy")


def test_a_trace_that_does_not_fit_is_named(tmp_path: Path) -> None:
    path = made().save(tmp_path / "routing.npz")
    with pytest.raises(ConfigError, match=r"scaling\.routing=.*it has 16 experts and the model has 8"):
        _run(MODEL.replace(num_experts=8), ScalingSection(routing=str(path)), tmp_path / "run")
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())
    with pytest.raises(ConfigError, match=r"scaling\.routing=nothing: there is no such file or folder"):
        ScalingSection(routing="nothing")
    empty = made()
    empty.select(np.zeros(empty.num_rows, bool)).save(path)
    with pytest.raises(ConfigError, match="the trace has no rows"):
        _run(MODEL, ScalingSection(routing=str(path)), tmp_path / "run")
