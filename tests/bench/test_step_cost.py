"""Cost breakdowns of an engine's steps: against the attribution of the steps themselves, and by hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moejax.bench.common import step_cost
from moejax.bench.common.roofline import cost_breakdown, utilisation_percent
from moejax.bench.common.step_cost import (
    EngineSteps,
    latency_step_costs,
    traffic_step_costs,
)
from moejax.bench.workload import LatencyCase
from moejax.core.config import EngineConfig
from moejax.core.hardware import Hardware
from moejax.core.parallel import ParallelConfig
from moejax.engine.requests.api import RequestMetrics
from moejax.engine.stats import StepRecord
from moejax.models.decoder import Decoder
from moejax.perf.operation_costs import OpCost, attribute, total
from moejax.perf.steps import captured_steps
from moejax.results.metrics import RequestRecord
from tests.perf.models import small_model
from tests.perf.test_steps import capture

CONFIG = small_model()
DEVICE = Hardware("made_up", 1e9, {"float32": 1e9}, None, None, "measured")


def engine(**changes: Any) -> Any:
    """As much of an `LLM` as a cost breakdown looks at; the model has shapes and no weights."""
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8}
    return SimpleNamespace(
        stages=[Decoder(CONFIG)],
        config=CONFIG,
        kv_cache_dtype="float32",
        engine_config=EngineConfig(**(limits | changes)),
        parallel_config=ParallelConfig(),
    )


def record(prompt: int, tokens: list[float], arrival: float = 0.0) -> RequestRecord:
    return RequestRecord("r", 0, prompt, len(tokens), RequestMetrics(arrival, list(tokens)), "length")


def step(seconds: float) -> StepRecord:
    return StepRecord(0.0, seconds, 0, 1, 1, 1, 1, 0, 1, 8, 1, 0)


def test_requests_cost_what_their_steps_cost() -> None:
    """A prompt in two parts, then three decodes: the FLOPs of the whole at once."""
    steps = [
        attribute(CONFIG, new_tokens=[n], context=[c], phase="mixed", hits=[0] * 3, logits=sampled)
        for n, c, sampled in [(8, 8, 0), (3, 11, 1), (1, 12, 1), (1, 13, 1), (1, 14, 1)]
    ]
    found = total(EngineSteps(engine()).requests([record(11, [1.0, 2.0, 3.0, 4.0])]))
    assert found.flops == pytest.approx(sum(total(ops).flops for ops in steps))
    assert found.bytes == found.activation_bytes == 0
    assert EngineSteps(engine()).requests([record(5, [])]) == []


def test_a_fixed_batch() -> None:
    """Decode by the time per output token, prefill by the median of the iterations' last first token."""
    llm, case = engine(), LatencyCase(2, 10, 5)
    hits = {"decode": np.array([4.0, 0.0, 3.0]), "prefill": np.array([9.0, 0.0, 8.0])}
    records = [
        *(record(10, [first, first + 1], arrival=1.0) for first in (1.5, 1.25)),
        *(record(10, [first, first + 1], arrival=1.0) for first in (1.75, 1.25)),
        *(record(10, [first, first + 1], arrival=1.0) for first in (5.0, 1.25)),
    ]
    row, (prefill, decode) = latency_step_costs(EngineSteps(llm), case, hits, records, 20.0, DEVICE)
    assert (prefill["phase"], decode["phase"]) == ("prefill", "decode")
    assert (prefill["seconds"], decode["seconds"]) == (0.75, 0.02)
    ops = EngineSteps(llm).decode(case, hits["decode"])
    assert row["mfu_percent"] == pytest.approx(100 * total(ops).flops / 0.02 / 1e9)
    assert row["mbu_percent"] == pytest.approx(100 * decode["mbu"])
    assert row["prefill_mfu_percent"] == pytest.approx(100 * prefill["flops"] / 0.75 / 1e9)
    # 20 tokens, 8 a step: three steps read the weights three times.
    assert prefill["weight_bytes"] > 2.9 * 4 * CONFIG.hidden_size * CONFIG.num_experts
    assert {"a100_80gb", "h100", "h200"} == set(decode["devices"])
    nothing, costs = latency_step_costs(EngineSteps(llm), case, {}, records, 20.0, DEVICE)
    assert (nothing, costs) == ({}, [])
    unknown, _ = latency_step_costs(EngineSteps(llm), case, hits, records, 20.0, None)
    assert set(unknown) == set(row) and not any(unknown.values())


def test_traffic() -> None:
    """FLOPs of what was served over the busy time; bytes only where the steps' own experts are known."""
    llm, records = engine(), [record(6, [1.0, 2.0])]
    steps = [step(0.25), step(0.75)]
    flops = total(EngineSteps(llm).requests(records)).flops
    row, costs = traffic_step_costs(llm, records, steps, DEVICE)
    assert row == {"mfu_percent": pytest.approx(100 * flops / 1e9), "mbu_percent": None}
    assert costs == []
    trace = capture()
    moved = total(EngineSteps(llm).traced(trace)).bytes
    row, _ = traffic_step_costs(llm, records, steps, DEVICE, trace, steps[:1])
    assert row["mbu_percent"] == pytest.approx(100 * moved / 0.25 / 1e9)
    row, _ = traffic_step_costs(llm, records, [], DEVICE)
    assert row == {"mfu_percent": None, "mbu_percent": None}


@pytest.mark.parametrize("most", [1, 1 << 15])
def test_a_captured_run_by_kinds_of_steps(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind's time is that of its own steps, and its sums those of its own in the trace."""
    monkeypatch.setattr(step_cost, "_SUMMED_AT", most)
    records = [
        StepRecord(0.0, seconds, prefill, decode, 4, 2, 2, 0, 1, 8, 1, 0)
        for seconds, prefill, decode in [(0.5, 3, 0), (0.25, 2, 1), (0.125, 0, 2)]
    ]
    _, costs = traffic_step_costs(engine(), [], records, DEVICE, capture(), records)
    found = {row["phase"]: row for row in costs}
    assert {phase: row["seconds"] for phase, row in found.items()} == {
        "prefill": 0.5, "mixed": 0.25, "decode": 0.125,
    }  # fmt: skip
    steps = [op for _, ops in captured_steps(CONFIG, capture()) for op in ops]
    assert sum(row["flops"] for row in found.values()) == total(steps).flops
    assert found["decode"]["mfu"] == pytest.approx(found["decode"]["flops"] / 0.125 / 1e9)


def test_a_cost_breakdown_by_hand() -> None:
    ops = [
        OpCost(0, "qkv_projection", "decode", flops=2e6, weight_bytes=1e6),
        OpCost(1, "qkv_projection", "decode", flops=2e6, weight_bytes=1e6),
        OpCost(0, "attention", "decode", flops=1e6, cache_bytes=3e6, activation_bytes=5),
    ]
    found = cost_breakdown(ops, DEVICE, "float32", seconds=0.01, measured_ms={"attention": 4.0})
    assert [row["operation"] for row in found["operations"]] == ["qkv_projection", "attention"]
    projection, attention = found["operations"]
    assert (projection["bound_ms"], projection["limit"], projection["intensity"]) == (4.0, "compute", 2.0)
    assert (attention["bound_ms"], attention["limit"], attention["excess_ms"]) == (3.0, "memory", 1.0)
    assert (projection["measured_ms"], projection["excess_ms"]) == (0.0, -4.0)
    assert (found["bound_ms"], found["limit"], found["in_turn_ms"]) == (5.0, "memory", 7.0)
    assert (found["mfu"], found["mbu"]) == (0.5, 0.5) and found["devices"] == {}
    for device in (None, Hardware("made_up", None, {}, None, None, "measured")):
        plain = cost_breakdown(ops, device, "float32", seconds=0.01)
        assert plain["bound_ms"] is plain["mfu"] is plain["operations"][0]["bound_ms"] is None
        assert plain["flops"] == found["flops"] and "measured_ms" not in plain["operations"][0]
    assert utilisation_percent(ops, None, DEVICE, "float32", "prefill_") == {
        "prefill_mfu_percent": None,
        "prefill_mbu_percent": None,
    }
