"""A latency result's rows: a case's metrics on a backend, with what bounds them where that is known."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from moejax.bench.backends.moejax import engine_of
from moejax.bench.backends.peer_ratios import against_first, blank_unknown
from moejax.bench.common.agreement import percent_agreed
from moejax.bench.common.roofline import percent_of_roof
from moejax.bench.common.step_cost import EngineSteps, latency_step_costs
from moejax.bench.latency.cases import CaseData
from moejax.bench.workload import WorkloadConfig
from moejax.core.hardware import Hardware
from moejax.results.metrics import case_row, compute_metrics


def case_rows(
    data: Sequence[CaseData], workload: WorkloadConfig, hardware: Hardware | None
) -> list[dict[str, Any]]:
    """A row for each of `data`, in its order. A case's rows of further backends also say what they are to the
    first one, and whether their tokens are ours (or the first's, where ours was not measured)."""
    rows = [_row(item, workload, hardware, index) for index, item in enumerate(data)]
    for item, row in zip(data, rows, strict=True):
        same = [other for other in data if other.case == item.case]
        reference = next((other for other in same if engine_of(other.backend) is not None), same[0])
        if item is not same[0]:
            row |= against_first(*([compute_metrics(*one) for one in c.iterations] for c in (item, same[0])))
        if item is not reference and workload.temperature == 0:
            row["tokens_agree_percent"] = percent_agreed(item.tokens, reference.tokens)
    return rows


def _row(item: CaseData, workload: WorkloadConfig, hardware: Hardware | None, index: int) -> dict[str, Any]:
    fields = {"case": index, "backend": item.backend.name, **asdict(item.case)}
    row = case_row(fields, item.records, sum(item.durations), workload.slo)
    row = blank_unknown(row, itl_known=item.backend.itl_known)
    llm = engine_of(item.backend)
    if llm is not None and "decode" in item.hits:
        engine = EngineSteps(llm)
        row |= _bounds(engine, item, hardware, row.get("median_tpot_ms"))
        used, item.step_costs = latency_step_costs(
            engine, item.case, item.hits, item.records, row.get("median_tpot_ms"), hardware
        )
        row |= used
    return row


def _bounds(
    engine: EngineSteps, item: CaseData, hardware: Hardware | None, median_tpot_ms: float | None
) -> dict[str, Any]:
    """Returns a decode step's experts hit, bytes moved, and the least time that the device allows."""
    hits = item.hits["decode"]
    sparse = list(engine.llm.config.moe_layers)
    row: dict[str, Any] = {"mean_experts_hit": float(hits[sparse].mean())} if any(sparse) else {}
    cost, bound = engine.decode_bound(item.case, hits, hardware)
    row["decode_step_mbytes"] = cost.bytes / 1e6
    if bound is not None and median_tpot_ms:
        row["roofline_tpot_ms"] = bound.seconds * 1e3
        row["roofline_limit"] = bound.limit
        row |= percent_of_roof("roofline_percent", bound, median_tpot_ms / 1e3, hardware, engine.dtype)
    return row
