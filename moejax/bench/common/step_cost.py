"""The FLOPs and bytes of an engine's steps, by its weights as held, its cache and its limits
(`moejax.perf.operation_costs`)."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moejax.bench.common.roofline import cost_breakdown, utilisation_percent
from moejax.bench.workload import LatencyCase
from moejax.core.hardware import Hardware, together
from moejax.engine.llm import LLM
from moejax.engine.stats import StepRecord
from moejax.nn.param import specs
from moejax.perf.memory import held_weights
from moejax.perf.operation_costs import Bound, OpCost, Phase, attribute, step_bound, summed, total
from moejax.perf.steps import captured_steps, prefill
from moejax.results.metrics import RequestRecord
from moejax.routing.capture import RoutingCapture

OTHER_DEVICES = ("a100_80gb", "h100", "h200")
"""Devices whose bounds a result gives beside those of its own."""


_SUMMED_AT = 1 << 15


class EngineSteps:
    """Attributes the steps that `llm` runs to operations."""

    def __init__(self, llm: LLM) -> None:
        declared = {name: spec for stage in llm.stages for name, spec in specs(stage).items()}
        self.llm, self.dtype = llm, llm.config.dtype
        self.weights = held_weights(llm.config, declared)
        self._model: dict[str, Any] = {"kv_dtype": llm.kv_cache_dtype, "weights": self.weights}

    def decode(
        self, case: LatencyCase, hits: np.ndarray, rows: float = 1.0, assignments: np.ndarray | None = None
    ) -> list[OpCost]:
        """A mean decode step of a batch; hits and assignments `[L]`, of a mean step (None: every token's k);
        `rows` of each sequence, drafts included."""
        # Decode step j of output_len - 1 sees prompt_len + j tokens.
        context = case.prompt_len + case.output_len / 2
        new, seen = [rows] * case.batch_size, [context] * case.batch_size
        return attribute(
            self.llm.config, new_tokens=new, context=seen, phase="decode", hits=hits, logits=sum(new),
            assignments=assignments, **self._model,
        )  # fmt: skip

    def decode_bound(
        self,
        case: LatencyCase,
        hits: np.ndarray,
        hardware: Hardware | None,
        assignments: np.ndarray | None = None,
    ) -> tuple[OpCost, Bound | None]:
        """Returns the whole cost of a mean decode step of a batch, and the least time that the device allows;
        None where its rates are not known. hits and assignments `[L]`, of a mean step."""
        cost = total(self.decode(case, hits, assignments=assignments))
        return cost, step_bound(cost, hardware, self.dtype)

    def prefill(self, case: LatencyCase, hits: np.ndarray) -> list[OpCost]:
        """All steps of a batch's prompts together; hits `[L]`, of a mean step."""
        budget = self.llm.engine_config.max_num_batched_tokens
        lengths = [case.prompt_len] * case.batch_size
        return prefill(self.llm.config, lengths, budget, hits=hits, **self._model)

    def requests(self, records: Iterable[RequestRecord]) -> list[OpCost]:
        """FLOPs of requests but for cached tokens, whatever steps they ran in; bytes depend on those, and
        are 0."""
        served = [r for r in records if r.output_len]
        prompts = [(r.prompt_len - r.metrics.cached_tokens, r.prompt_len) for r in served]
        outputs = [(r.output_len - 1, r.prompt_len + r.output_len - 1) for r in served if r.output_len > 1]
        none, ops = [0.0] * self.llm.config.num_layers, []
        phases: dict[Phase, list[tuple[int, int]]] = {"prefill": prompts, "decode": outputs}
        for phase, rows in phases.items():
            if rows:
                new, seen = zip(*rows, strict=True)
                sampled = len(rows) if phase == "prefill" else sum(new)
                ops += attribute(
                    self.llm.config, new_tokens=new, context=seen, phase=phase, hits=none, logits=sampled,
                    **self._model,
                )  # fmt: skip
        return [OpCost(op.layer, op.operation, op.phase, op.flops) for op in ops]

    def traced(self, capture: RoutingCapture) -> list[OpCost]:
        """All steps of a routing trace, by layer, operation and phase."""
        waiting: list[OpCost] = []
        for _, ops in captured_steps(self.llm.config, capture, **self._model):
            waiting += ops
            if len(waiting) > _SUMMED_AT:  # a long run has millions of them
                waiting = summed(waiting)
        return summed(waiting)


def latency_step_costs(
    engine: EngineSteps,
    case: LatencyCase,
    hits: Mapping[str, np.ndarray],
    records: Sequence[RequestRecord],
    median_tpot_ms: float | None,
    hardware: Hardware | None,
) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
    """Returns a fixed batch's utilisation, for its row, and the cost breakdown of each of its phases.

    Decode goes by the median time per output token, prefill by the time until every prompt of an iteration
    has its first token, the host's part included.

    Args:
        hits: by phase, of a mean recorded step; without the phases of which none was recorded.
        records: of all iterations, `batch_size` after `batch_size`.
    """
    row: dict[str, float | None] = {}
    costs = []
    for phase, seconds, prefix in (
        ("prefill", _first_tokens(records, case.batch_size), "prefill_"),
        ("decode", median_tpot_ms / 1e3 if median_tpot_ms else None, ""),
    ):
        mean = hits.get(phase)
        if mean is None:
            continue
        ops = engine.prefill(case, mean) if phase == "prefill" else engine.decode(case, mean)
        row |= utilisation_percent(ops, seconds, hardware, engine.dtype, prefix)
        costs.append(cost_breakdown(ops, hardware, engine.dtype, seconds=seconds, kinds=OTHER_DEVICES))
    return row, costs


def traffic_step_costs(
    llm: LLM,
    records: Sequence[RequestRecord],
    steps: Sequence[StepRecord],
    hardware: Hardware | None,
    capture: RoutingCapture | None = None,
    traced: Sequence[StepRecord] = (),
) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
    """Returns `mfu_percent` and `mbu_percent` over the time in which the engine was busy, and the cost
    breakdowns of the traced prefill, decode and mixed steps, all of each kind together.

    FLOPs are those of the requests that were served, once, however often they were preempted. Bytes depend
    on the experts that each step visits: without a routing trace `mbu_percent` is None and there are no
    breakdowns.

    Args:
        hardware: one device.
        capture: the trace of the steps `traced`.
    """
    engine = EngineSteps(llm)
    if hardware is not None:
        hardware = together(hardware, llm.parallel_config.num_devices)
    busy = sum(step.seconds for step in steps)
    row = utilisation_percent(engine.requests(records), busy or None, hardware, engine.dtype)
    row["mbu_percent"] = None
    if capture is None:
        return row, []
    ops = engine.traced(capture)
    if whole := sum(step.seconds for step in traced):
        row["mbu_percent"] = utilisation_percent(ops, whole, hardware, engine.dtype)["mbu_percent"]
    seconds = dict.fromkeys(("prefill", "decode", "mixed"), 0.0)
    for step in traced:
        kind = "mixed" if step.prefill_tokens and step.decode_tokens else "decode"
        seconds[kind if step.decode_tokens else "prefill"] += step.seconds
    parts = {phase: [op for op in ops if op.phase == phase] for phase in seconds}
    return row, [
        cost_breakdown(part, hardware, engine.dtype, seconds=seconds[phase] or None, kinds=OTHER_DEVICES)
        for phase, part in parts.items()
        if part
    ]


def _first_tokens(records: Sequence[RequestRecord], batch: int) -> float | None:
    """Seconds until the last of a batch's prompts has its first token, median over the iterations."""
    groups = [records[i : i + batch] for i in range(0, len(records), batch)]
    spans = [
        max(r.metrics.token_times[0] for r in group) - min(r.metrics.arrival_time for r in group)
        for group in groups
        if group and all(r.metrics.token_times for r in group)
    ]
    return statistics.median(spans) if spans else None
