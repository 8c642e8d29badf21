"""A latency result's rows: a case's metrics on a backend, with what bounds them where that is known."""

from collections.abc import Sequence
from typing import Any

from moejax.bench.backends.moejax import engine_of
from moejax.bench.backends.peer_ratios import against_first, blank_unknown
from moejax.bench.common.agreement import percent_agreed
from moejax.bench.common.roofline import percent_of_roof
from moejax.bench.common.step_cost import EngineSteps, latency_step_costs
from moejax.bench.latency.cases import CaseData
from moejax.bench.workload import WorkloadConfig
from moejax.core.hardware import Hardware
from moejax.results.metrics import case_row


def case_rows(
    data: Sequence[CaseData], workload: WorkloadConfig, hardware: Hardware | None
) -> list[dict[str, Any]]:
    """A row for each of `data`, in its order."""
    rows = [_row(item, workload, hardware, index) for index, item in enumerate(data)]
    for case in {item.case: None for item in data}:
        same = [index for index, item in enumerate(data) if item.case == case]
        _set_beside([data[index] for index in same], [rows[index] for index in same], workload)
    return rows


def _set_beside(data: Sequence[CaseData], rows: Sequence[dict[str, Any]], workload: WorkloadConfig) -> None:
    """Adds to a case's rows of further backends what they are to the first one, and whether their tokens are
    ours (or the first's, where ours was not measured)."""
    first = data[0]
    reference = next((item for item in data if engine_of(item.backend) is not None), first)
    for item, row in zip(data, rows, strict=True):
        if item is not first:
            row |= against_first(item.iterations, first.iterations)
        if item is not reference and workload.temperature == 0:
            row["tokens_agree_percent"] = percent_agreed(item.tokens, reference.tokens)


def _row(item: CaseData, workload: WorkloadConfig, hardware: Hardware | None, index: int) -> dict[str, Any]:
    fields = {
        "case": index,
        "backend": item.backend.name,
        "batch_size": item.case.batch_size,
        "prompt_len": item.case.prompt_len,
        "output_len": item.case.output_len,
    }
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
    row: dict[str, Any] = {"mean_experts_hit": float(hits[list(engine.llm.config.moe_layers)].mean())}
    cost, bound = engine.decode_bound(item.case, hits, hardware)
    row["decode_step_mbytes"] = cost.bytes / 1e6
    if bound is not None and median_tpot_ms:
        row["roofline_tpot_ms"] = bound.seconds * 1e3
        row["roofline_limit"] = bound.limit
        row |= percent_of_roof("roofline_percent", bound, median_tpot_ms / 1e3, hardware, engine.dtype)
    return row
