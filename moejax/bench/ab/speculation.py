"""What drafts give and cost: the `speculation` table of an A/B run of fixed batches. No JAX here.

A step with drafts takes `t(rows)` and gives several tokens. Beside a loop without drafts, `t(1)`, it pays
from `t(rows) / t(1)` tokens a step, hence from a share of drafts that are right: the break-even acceptance.
Times are those of whole steps, the making of drafts included; experts and bytes those of the verifying step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from moejax.bench.ab.judge import judged_metrics, values_of
from moejax.bench.ab.measure import BatchLoad, Load
from moejax.bench.ab.variants import CONTROL, Arm
from moejax.bench.backends.moejax import engine_of
from moejax.bench.common.step_cost import EngineSteps
from moejax.engine.llm import LLM
from moejax.perf.operation_costs import total
from moejax.results.metrics import by_place, compute_metrics
from moejax.results.statistics import interval_fields, paired_ratio

LOOPS = {False: "plain", True: "overlapped"}
"""Loops without drafts by `engine.overlap`."""

_TPOT = "mean_tpot_ms"


def speculation_rows(arms: Sequence[Arm], load: Load) -> list[dict[str, Any]]:
    """Returns a row for each case and each of our own engines that drafts, after those that do not, which
    they are set beside: of the plain loop, of the overlapped one, or of both. None where no engine drafts, or
    a pass had no tokens after the first."""
    if not isinstance(load, BatchLoad) or not load.hits or not judged_metrics(arms, load.cases, [_TPOT]):
        return []
    loops: dict[str, Arm] = {}
    drafting: list[Arm] = []
    for arm in arms:
        llm = engine_of(arm.backend)
        if llm is not None and llm.engine_config.speculation.most:
            drafting.append(arm)
        elif llm is not None and arm.name != CONTROL:
            loops.setdefault(LOOPS[llm.engine_config.overlap], arm)
    rows = []
    for case in range(len(load.cases)):
        without = {name: (arm, _row(arm, load, case)) for name, arm in loops.items()}
        rows += [row for _, row in without.values()]
        rows += [_over(without, arm, _row(arm, load, case), len(load.cases)) for arm in drafting]
    return rows


def _row(arm: Arm, load: BatchLoad, case: int) -> dict[str, Any]:
    """Returns what an arm's steps computed, and gave."""
    llm = engine_of(arm.backend)
    assert isinstance(llm, LLM)
    records = load.records[id(arm.backend), case]
    drafted, accepted = by_place(records, "drafted"), by_place(records, "accepted")
    each = 1 + sum(drafted) / sum(len(record.metrics.itl) for record in records)
    given = compute_metrics(records, 0.0, latencies=False)
    config, hits = llm.engine_config.speculation, load.hits[id(arm.backend), case]["decode"]
    sparse = list(llm.config.moe_layers)
    return {
        "case": case,
        "variant": arm.name,
        **load.cases[case],
        "method": config.method,
        "k": config.k if config.most else 0,
        "depth": config.depth,
        **{name: given[name] for name in ("tokens_per_step", "draft_acceptance")},
        "acceptance_by_place": [a / d for a, d in zip(accepted, drafted, strict=True)],
        "rows_per_step": each * load.cases[case]["batch_size"],
        "mean_experts_hit": float(hits[sparse].mean()) if any(sparse) else None,
        "decode_step_mbytes": total(EngineSteps(llm).decode(load.plan[case][0], hits, each)).bytes / 1e6,
    }


def _over(
    loops: Mapping[str, tuple[Arm, dict[str, Any]]], arm: Arm, row: dict[str, Any], cases: int
) -> dict[str, Any]:
    """Returns a drafting arm's row with what it is over those without drafts, of the same case."""
    drafts = row["rows_per_step"] / row["batch_size"] - 1
    for name, (loop, plain) in loops.items():
        for key, what in (("mean_experts_hit", "experts"), ("decode_step_mbytes", "bytes")):
            row[f"{what}_over_plain"] = row[key] / plain[key] if plain[key] else None
        speed = paired_ratio(*(values_of(each, _TPOT, cases)[:, row["case"]] for each in (loop, arm)))
        slower = row["tokens_per_step"] / speed.estimate
        row |= interval_fields(f"speed_over_{name}", speed)
        row[f"step_time_over_{name}"] = slower
        row[f"break_even_over_{name}"] = max(0.0, slower - 1) / drafts if drafts else None
    return row
