"""`run_ab`: arms, rounds, verdicts, result, report."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moejax.bench.ab.config import AblationSection, AbSection
from moejax.bench.ab.determinism import determinism_rows
from moejax.bench.ab.eviction import eviction_rows
from moejax.bench.ab.judge import Judged, check_rounds, judge, judged_metrics, values_of
from moejax.bench.ab.measure import BatchLoad, Load, TrafficLoad, orders, run_rounds, warm_up_all
from moejax.bench.ab.mismatch import check_mismatch, mismatch_rows
from moejax.bench.ab.speculation import speculation_rows
from moejax.bench.ab.tiers import tiers_rows
from moejax.bench.ab.variants import CONTROL, Arm
from moejax.bench.backends.disaggregating import disaggregated_rows
from moejax.bench.backends.moejax import MoejaxBackend, engine_of
from moejax.bench.backends.reconfiguring import reconfigured_rows
from moejax.bench.common.agreement import token_agreement
from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.latency.cases import answer_prompts
from moejax.bench.traffic import ThroughputWorkload
from moejax.bench.workload import WorkloadConfig
from moejax.core.errors import ConfigError
from moejax.core.resolve import as_dict
from moejax.report.progress import progress
from moejax.results.compare.samples import short_case_name
from moejax.results.metrics import Metrics
from moejax.results.result import Result
from moejax.results.service import group_rows
from moejax.results.statistics import interval_fields, paired_ratio

_TABLES = (
    "verdicts", "stages", "speculation", "determinism", "mismatch", "eviction", "tiers", "reconfigured",
    "disaggregated",
)  # fmt: skip
_LOOK_EVERY = 5  # rounds between looks at the intervals' widths


def run_ab(
    arms: Sequence[Arm],
    workload: WorkloadConfig | ThroughputWorkload,
    ab: AbSection,
    run: ExperimentRun,
    ablation: AblationSection | None = None,
) -> Result:
    """Measures variants in turns and finishes `run`, whose experiment is `latency_ab`, `throughput_ab` or
    `ablation`.

    Args:
        arms: the first is the baseline; it is opened once more as the control.
        workload: what all are given.
        ablation: whose stages the variants are; the result then has them as `stages`, and its `reference`.

    Returns:
        The content of `result.json`: a row in `cases` for each variant and case, `verdicts`,
        `case_verdicts` and `control` as `moejax.results.verdict.Verdict.row` has them.

    Raises:
        ConfigError: a case longer than a variant allows, too few rounds, or nothing to judge by; before
            anything is measured.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    arms = [arms[0], _control(arms[0]), *arms[1:]]
    backends = [arm.backend for arm in arms]
    alone = [arm.backend for arm in arms if (arm.shares if arm.name == CONTROL else arm.name) in ab.alone]
    if isinstance(workload, WorkloadConfig):
        load: Load = BatchLoad(workload, backends)
    else:
        load = TrafficLoad(workload, backends, ab.tenant, alone)
    check_rounds(ab.rounds if ab.target is None else ab.max_rounds, len(arms) - 2, load.cases, ab.metrics)
    if ab.mismatch:
        check_mismatch(arms, load)
    run.start_backends([arms[0].backend], workload, seeds={"ab": ab.seed}, variant="ab")
    if isinstance(load, BatchLoad):
        answer_prompts(load.plan, [arm.backend for arm in arms], load.workload)
    warm_up_all(arms, load)
    judged = _measure(arms, load, ab)
    result = _build(run, arms, load, judged, ab, ablation)
    requests = [
        {**row, "case": _place(index, row["case"], load)}
        for index, arm in enumerate(arms)
        for row in arm.rows
    ]
    tables = {name: result[name] for name in _TABLES if result.get(name)}
    return run.finish(result, requests=requests, tables=tables)


def _control(baseline: Arm) -> Arm:
    """The baseline's second engine: of our own one with a cache and programs of its own, so that the place of
    things in memory is part of what counts as noise; a peer's is the same."""
    backend = baseline.backend
    if isinstance(backend, MoejaxBackend):
        backend = backend.beside(backend.llm.engine_config)
    return Arm(CONTROL, baseline.overrides, backend, shares=baseline.name)


def _measure(arms: Sequence[Arm], load: Load, ab: AbSection) -> Judged:
    """All rounds, and what they come to. With a target the number of rounds follows the intervals' width and
    never who is ahead, which would favour a chance lead; what is left is that intervals which look narrow by
    chance stop it a little early."""
    labels = [short_case_name(case) for case in load.cases]
    order = orders(len(arms), np.random.default_rng(ab.seed))
    most = ab.rounds if ab.target is None else ab.max_rounds
    done = 0
    with progress("measuring", total=most) as task:
        while True:
            stop = ab.rounds if not done else min(done + _LOOK_EVERY, most)
            run_rounds(arms, load, range(done, stop), order, task)
            done = stop
            chosen = judged_metrics(arms, load.cases, ab.metrics)
            if not chosen:
                raise ConfigError(
                    f"ab.metrics: no pass has values enough of {', '.join(ab.metrics) or 'any'}"
                )
            judged = judge(arms[0], arms[1], arms[2:], chosen, labels)
            if done >= most or ab.target is None or judged.half_width() <= ab.target:
                return judged
            task.describe(f"measuring, intervals ±{judged.half_width():.1%}")


def _place(arm: int, case: int, load: Load) -> int:
    """Returns the row of an arm's case in the result."""
    return arm * len(load.cases) + case


def _rows(arms: Sequence[Arm], load: Load) -> list[dict[str, Any]]:
    """Returns a row for each arm and case: the medians over rounds of each pass's metrics, and how far its
    tokens agree with the baseline's."""
    rows = []
    for index, arm in enumerate(arms):
        for case, fields in enumerate(load.cases):
            passes = [metrics for (_, c), metrics in sorted(arm.rounds.items()) if c == case]
            agreed = token_agreement(arm.tokens[case], arms[0].tokens[case])
            head = {
                "case": _place(index, case, load),
                "variant": arm.name,
                "backend": arm.backend.name,
            }
            rows.append({**head, **fields, "rounds": len(passes), **agreed, **_medians(passes)})
    return rows


def _groups(arms: Sequence[Arm], load: Load) -> list[dict[str, Any]]:
    """Returns rows of classes and tenants, of all rounds together, for each arm and case."""
    if not isinstance(load, TrafficLoad):
        return []
    return [
        {"case": _place(index, case, load), "variant": arm.name, **row}
        for index, arm in enumerate(arms)
        for case in range(len(load.cases))
        for row in group_rows(load.records[id(arm.backend), case], arm.backend.scheduling)
    ]


def _medians(passes: Sequence[Metrics]) -> Metrics:
    medians: Metrics = {}
    for name in passes[0]:
        values = [value for metrics in passes if (value := metrics[name]) is not None]
        medians[name] = float(np.median(values)) if values else None
    return medians


def _stages(
    arms: Sequence[Arm], cases: Sequence[Mapping[str, Any]], ablation: AblationSection, metrics: Sequence[str]
) -> list[dict[str, Any]]:
    """Returns a row for each stage: figures are medians over rounds, of several cases their geometric mean;
    gains are of the rounds' ratios, with intervals, a latency is the first stage's over the gain, so that the
    machine's pace is in none. Memory is the weights' and the allocated cache's."""

    def each_round(arm: Arm, metric: str) -> Any:
        return np.exp(np.log(values_of(arm, metric, len(cases) // len(arms))).mean(axis=1))

    rows: list[dict[str, Any]] = []
    stages = [arms[0], *arms[2:]]  # without the control
    for before, arm in zip([arms[0], *stages], stages, strict=False):
        mine, first = (each_round(one, "mean_e2el_ms") for one in (arm, arms[0]))
        in_all = paired_ratio(first, mine)
        memory: Any = arm.backend.memory()
        held = [memory.get(name) for name in ("model_bytes", "kv_cache_allocated_bytes")]
        same: Any = [case["equal_requests"] for case in cases if case["variant"] == arm.name]
        rows.append(
            {
                "stage": arm.name,
                "overrides": ablation.stages[arm.name],
                "latency_ms": float(np.median(first)) / in_all.estimate,
                **{name: float(np.median(each_round(arm, name))) for name in metrics},
                "equal_requests": min(same) if None not in same else None,
                "memory_gb": sum(held) / 1e9 if None not in held else None,
                **interval_fields("gain", paired_ratio(each_round(before, "mean_e2el_ms"), mine)),
                **interval_fields("cumulative_gain", in_all),
            }
        )
    return rows


def _build(
    run: ExperimentRun,
    arms: Sequence[Arm],
    load: Load,
    judged: Judged,
    ab: AbSection,
    ablation: AblationSection | None,
) -> Result:
    """Returns the result."""
    rows = _rows(arms, load)
    metrics: dict[str, Any] = {"rounds": rows[0]["rounds"], "variants": len(arms) - 1}
    for verdict in (*judged.control, *judged.verdicts):
        trial = verdict.trial
        if trial.ratio is not None:
            metrics |= interval_fields(f"ratio_{trial.metric}_{trial.run}", trial.ratio)
    ladder: dict[str, Any] = {}
    if ablation is not None:
        chosen = judged_metrics(arms, load.cases, ablation.metrics)
        ladder["stages"] = _stages(arms, rows, ablation, chosen)
        ladder["reference"] = [dataclasses.asdict(stage) for stage in ablation.reference]
        for row in ladder["stages"]:
            metrics |= {f"{name}_{row['stage']}": row[name] for name in ("gain", "cumulative_gain")}
    drafts = speculation_rows(arms, load)
    for row in drafts if len(load.cases) == 1 else ():
        speeds = {name: value for name, value in row.items() if name.startswith("speed_over_")}
        metrics |= {f"{name}_{row['variant']}": value for name, value in speeds.items()}
    determinism = determinism_rows(arms, load)
    for row in determinism:
        name = f"equal_logprobs_{row['variant']}"
        metrics[name] = min(metrics.get(name, 1.0), row["equal_logprobs"])
    engines = {arm.name: llm for arm in arms if (llm := engine_of(arm.backend))}
    ledgers = [{**row, "variant": name} for name, llm in engines.items() for row in llm.ledger.rows()]
    metrics["recompiles_after_warmup"] = sum(bool(row["after_warmup"]) for row in ledgers)
    first = engine_of(arms[0].backend)
    judged_names = {verdict.trial.metric for verdict in judged.verdicts}
    return run.result(
        metrics=metrics,
        cases=rows,
        hardware=run.hardware,
        slo=dataclasses.asdict(load.workload.slo),
        compile_ledger=ledgers,
        resolved=as_dict(first.resolutions) if first is not None else {},
        variants=[_described(arm) for arm in arms],
        verdicts=[verdict.row() for verdict in judged.verdicts],
        case_verdicts=[verdict.row() for verdict in judged.case_verdicts],
        control=[verdict.row() for verdict in judged.control],
        iterations=[
            {"case": _place(index, case, load), "variant": arm.name, "iteration": round_, **metrics_of_pass}
            for index, arm in enumerate(arms)
            for (round_, case), metrics_of_pass in sorted(arm.rounds.items())
        ],
        not_judged=[name for name in ab.metrics if name not in judged_names],
        groups=_groups(arms, load),
        speculation=drafts,
        determinism=determinism,
        mismatch=mismatch_rows(arms, load) if ab.mismatch else [],
        eviction=eviction_rows(arms, load),
        tiers=tiers_rows(arms, load),
        reconfigured=reconfigured_rows({arm.name: arm.backend for arm in arms}),
        disaggregated=disaggregated_rows({arm.name: arm.backend for arm in arms}),
        **ladder,
    )


def _described(arm: Arm) -> dict[str, Any]:
    llm = engine_of(arm.backend)
    return {
        "name": arm.name,
        "overrides": list(arm.overrides),
        "weights": f"shared with {arm.shares}" if arm.shares else "its own",
        "resolved": as_dict(llm.resolutions) if llm is not None else {},
        **arm.backend.memory(),
    }
