"""What an engine's steps do, by its weights as held, its cache and its limits (`moejax.perf.attribution`)."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moejax.bench.common.roofline import account, utilisation_percent
from moejax.bench.workload import LatencyCase
from moejax.core.hardware import Hardware, together
from moejax.engine.llm import LLM
from moejax.engine.stats import StepRecord
from moejax.nn.param import specs
from moejax.perf.attribution import OpCost, attribute, summed
from moejax.perf.memory import held_weights
from moejax.perf.steps import captured_steps, prefill
from moejax.results.metrics import RequestRecord
from moejax.routing.capture import RoutingCapture

OTHER_DEVICES = ("a100_80gb", "h100", "h200")
"""Devices whose bounds a result gives beside those of its own."""


_SUMMED_AT = 1 << 15


class EngineAccount:
    """Attribution of what `llm` runs."""

    def __init__(self, llm: LLM) -> None:
        declared = {name: spec for stage in llm.stages for name, spec in specs(stage).items()}
        self.llm, self.dtype = llm, llm.config.dtype
        self._how: dict[str, Any] = {
            "kv_dtype": llm.kv_cache_dtype,
            "held": held_weights(llm.config, declared),
        }

    def decode(self, case: LatencyCase, hits: np.ndarray) -> list[OpCost]:
        """A mean decode step of a batch; hits `[L]`, of a mean step."""
        # Decode step j of output_len - 1 sees prompt_len + j tokens.
        context = case.prompt_len + case.output_len / 2
        ones, seen = [1] * case.batch_size, [context] * case.batch_size
        return attribute(
            self.llm.config, new_tokens=ones, context=seen, phase="decode", hits=hits, **self._how
        )

    def prefill(self, case: LatencyCase, hits: np.ndarray) -> list[OpCost]:
        """All steps of a batch's prompts together; hits `[L]`, of a mean step."""
        budget = self.llm.engine_config.max_num_batched_tokens
        lengths = [case.prompt_len] * case.batch_size
        return prefill(self.llm.config, lengths, budget, hits=hits, **self._how)

    def requests(self, records: Iterable[RequestRecord]) -> list[OpCost]:
        """FLOPs of whole requests, whatever steps they ran in; bytes depend on those, and are 0."""
        lengths = [(r.prompt_len + max(0, r.output_len - 1), r.output_len) for r in records if r.output_len]
        if not lengths:
            return []
        tokens, sampled = zip(*lengths, strict=True)
        none = [0.0] * self.llm.config.num_layers
        rows = {"new_tokens": tokens, "context": tokens, "logits": sum(sampled)}
        ops = attribute(self.llm.config, **rows, phase="mixed", hits=none, **self._how)
        return [OpCost(op.layer, op.operation, op.phase, op.flops) for op in ops]

    def captured(self, capture: RoutingCapture) -> list[OpCost]:
        """All steps of a routing trace, by layer, operation and phase."""
        waiting: list[OpCost] = []
        for _, ops in captured_steps(self.llm.config, capture, **self._how):
            waiting += ops
            if len(waiting) > _SUMMED_AT:  # a long run has millions of them
                waiting = summed(waiting)
        return summed(waiting)


def latency_account(
    llm: LLM,
    case: LatencyCase,
    hits: Mapping[str, np.ndarray | None],
    records: Sequence[RequestRecord],
    median_tpot_ms: float | None,
    hardware: Hardware | None,
) -> tuple[dict[str, float | None], list[dict[str, Any]]]:
    """Of a fixed batch: utilisation for its row, and its phases' accounts.

    Decode goes by the median time per output token, prefill by the time until every prompt of an iteration
    has its first token, the host's part included.

    Args:
        hits: by phase, of a mean recorded step; None where none was recorded.
        records: of all iterations, `batch_size` after `batch_size`.
    """
    found = EngineAccount(llm)
    row: dict[str, float | None] = {}
    accounts = []
    for phase, seconds, prefix in (
        ("prefill", _first_tokens(records, case.batch_size), "prefill_"),
        ("decode", median_tpot_ms / 1e3 if median_tpot_ms else None, ""),
    ):
        mean = hits.get(phase)
        if mean is None:
            continue
        ops = found.prefill(case, mean) if phase == "prefill" else found.decode(case, mean)
        row |= utilisation_percent(ops, seconds, hardware, found.dtype, prefix)
        accounts.append(account(ops, hardware, found.dtype, seconds=seconds, kinds=OTHER_DEVICES))
    return row, accounts


def traffic_utilisation(
    llm: LLM,
    records: Sequence[RequestRecord],
    steps: Sequence[StepRecord],
    hardware: Hardware | None,
    capture: RoutingCapture | None = None,
    captured: Sequence[StepRecord] = (),
) -> dict[str, float | None]:
    """`mfu_percent` and `mbu_percent` over the time in which the engine was busy.

    FLOPs are those of the requests that were served, once, however often they were preempted. Bytes depend
    on the experts that each step visits: without a routing trace `mbu_percent` is None.

    Args:
        hardware: one device.
        capture: the trace of the steps `captured`.
    """
    busy = sum(step.seconds for step in steps)
    if hardware is not None:
        hardware = together(hardware, llm.parallel_config.num_devices)
    found = EngineAccount(llm)
    row = utilisation_percent(found.requests(records), busy or None, hardware, found.dtype)
    row["mbu_percent"] = None
    if capture is not None and (seconds := sum(step.seconds for step in captured)):
        ops = found.captured(capture)
        row["mbu_percent"] = utilisation_percent(ops, seconds, hardware, found.dtype)["mbu_percent"]
    return row


def traffic_accounts(
    llm: LLM, capture: RoutingCapture, captured: Sequence[StepRecord], hardware: Hardware | None
) -> list[dict[str, Any]]:
    """Accounts of a run's prefill, decode and mixed steps, all of each kind together.

    Args:
        capture: the routing trace of the steps `captured`.
        hardware: one device.
    """
    found = EngineAccount(llm)
    if hardware is not None:
        hardware = together(hardware, llm.parallel_config.num_devices)
    seconds = dict.fromkeys(("prefill", "decode", "mixed"), 0.0)
    for step in captured:
        kind = "mixed" if step.prefill_tokens and step.decode_tokens else "decode"
        seconds[kind if step.decode_tokens else "prefill"] += step.seconds
    ops = found.captured(capture)
    parts = {phase: [op for op in ops if op.phase == phase] for phase in seconds}
    return [
        account(part, hardware, found.dtype, seconds=seconds[phase] or None, kinds=OTHER_DEVICES)
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
