"""`run_ab`: members, rounds, verdicts, result, report."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moejax.bench.ab.config import AbSection
from moejax.bench.ab.judge import Judged, judge, judged_metrics, too_few_values
from moejax.bench.ab.measure import BatchLoad, Load, TrafficLoad, orders, run_rounds, warm_up_all
from moejax.bench.ab.variants import CONTROL, Member, Variant, token_agreement
from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import MoejaxBackend, engine_of
from moejax.bench.backends.provenance import backends_provenance, encoder
from moejax.bench.traffic import ThroughputWorkload
from moejax.bench.workload import WorkloadConfig
from moejax.core.errors import ConfigError
from moejax.core.hardware import get_hardware
from moejax.core.resolve import as_dict
from moejax.report.ab import print_ab, save_ab_plots
from moejax.report.progress import progress
from moejax.results.compare.samples import case_name
from moejax.results.metrics import Metrics
from moejax.results.result import build_result, ensure_writable, write_request_rows, write_result
from moejax.tracking.base import CompositeTracker, TrackerConfig, make_tracker
from moejax.tracking.naming import run_info

_LOOK_EVERY = 5  # rounds between looks at the intervals' widths


def run_ab(
    variants: Sequence[Variant],
    workload: WorkloadConfig | ThroughputWorkload,
    ab: AbSection,
    tracker_config: TrackerConfig,
    out_dir: Path,
    *,
    config: Mapping[str, Any],
    name: str,
    hardware_kind: str = "auto",
) -> dict[str, Any]:
    """Measures variants in turns and writes the result into `out_dir`.

    Args:
        variants: the first is the baseline; it is opened once more as the control.
        workload: what all are given.
        config: the command line's configuration, for the record; each variant has its own.
        name: the model's short name.

    Returns:
        The content of `result.json`: a row in `cases` for each variant and case, `verdicts`,
        `case_verdicts` and `control` as `moejax.results.verdict.Verdict.row` has them.

    Raises:
        ConfigError: a case longer than a variant allows, or nothing to judge by; before anything is measured.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    ensure_writable(out_dir)
    variants = [variants[0], _control(variants[0]), *variants[1:]]
    backends = [variant.backend for variant in variants]
    load = _load(workload, backends)
    provenance = backends_provenance(backends[:1], config, workload_seed=load.seed, workload=load.hash)
    provenance["seeds"]["ab"] = ab.seed
    experiment = "latency_ab" if isinstance(workload, WorkloadConfig) else "throughput_ab"
    members = [Member(variant) for variant in variants]
    info = run_info(experiment, out_dir, config, provenance, model=name, variant="ab")
    with make_tracker(tracker_config, info) as tracker:
        warm_up_all(members, load)
        judged = _measure(members, load, ab)
        rows = _rows(members, load)
        result = _build(experiment, members, load, judged, rows, config, provenance, hardware_kind)
        said = {verdict.trial.metric for verdict in judged.verdicts}
        result["not_judged"] = [name for name in ab.metrics if name not in said]
        requests = [
            {**row, "case": _place(index, row["case"], load)}
            for index, m in enumerate(members)
            for row in m.rows
        ]
        files = [write_result(result, out_dir), write_request_rows(requests, out_dir)]
        _report(result, files, tracker, out_dir)
    print_ab(result, out_dir, tracker.hints())
    return result


def _load(workload: WorkloadConfig | ThroughputWorkload, backends: Sequence[Backend]) -> Load:
    if isinstance(workload, WorkloadConfig):
        return BatchLoad(workload, backends, encoder(backends))
    return TrafficLoad(workload, backends, encoder(backends))


def _control(baseline: Variant) -> Variant:
    """The baseline's second engine: of our own one with a cache and programs of its own, so that the place of
    things in memory is part of what counts as noise; a peer's is the same."""
    backend = baseline.backend
    if isinstance(backend, MoejaxBackend):
        backend = MoejaxBackend(backend.llm.variant(backend.llm.engine_config))
    return dataclasses.replace(baseline, name=CONTROL, backend=backend, shares=baseline.name)


def _measure(members: Sequence[Member], load: Load, ab: AbSection) -> Judged:
    """All rounds, and what they come to. With a target the number of rounds follows the intervals' width and
    never who is ahead, which would favour a chance lead; what is left is that intervals which look narrow by
    chance stop it a little early."""
    labels = [case_name(_shown(case)) for case in load.cases]
    order = orders(len(members), np.random.default_rng(ab.seed))
    most = ab.rounds if ab.target is None else ab.max_rounds
    done = 0
    with progress("measuring", total=most) as task:
        while True:
            stop = ab.rounds if not done else min(done + _LOOK_EVERY, most)
            run_rounds(members, load, range(done, stop), order, task)
            done = stop
            chosen = [
                m
                for m in judged_metrics(members, load.cases, ab.metrics)
                if not too_few_values(m, load.cases)
            ]
            if not chosen:
                raise ConfigError(
                    f"ab.metrics: no pass has values enough of {', '.join(ab.metrics) or 'any'}"
                )
            judged = judge(members[0], members[1], members[2:], chosen, labels)
            if done >= most or ab.target is None or judged.half_width() <= ab.target:
                return judged
            task.describe(f"measuring, intervals ±{judged.half_width():.1%}")


def _shown(case: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that tell cases apart."""
    names = ("request_rate",) if "request_rate" in case else ("batch_size", "prompt_len", "output_len")
    return {name: case[name] for name in names if case[name] is not None}


def _place(member: int, case: int, load: Load) -> int:
    """The row of a member's case in the result."""
    return member * len(load.cases) + case


def _rows(members: Sequence[Member], load: Load) -> list[dict[str, Any]]:
    """A row a member and case: the medians over rounds of each pass's metrics, and how far its tokens agree
    with the baseline's."""
    rows = []
    for index, member in enumerate(members):
        for case, fields in enumerate(load.cases):
            passes = [metrics for (_, c), metrics in sorted(member.rounds.items()) if c == case]
            agreed = token_agreement(member.tokens[case], members[0].tokens[case])
            head = {
                "case": _place(index, case, load),
                "variant": member.name,
                "backend": member.variant.backend.name,
            }
            rows.append({**head, **fields, "rounds": len(passes), **agreed, **_medians(passes)})
    return rows


def _medians(passes: Sequence[Metrics]) -> Metrics:
    found: Metrics = {}
    for name in passes[0]:
        values = [value for metrics in passes if (value := metrics[name]) is not None]
        found[name] = float(np.median(values)) if values else None
    return found


def _build(
    experiment: str,
    members: Sequence[Member],
    load: Load,
    judged: Judged,
    rows: Sequence[Mapping[str, Any]],
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    hardware_kind: str,
) -> dict[str, Any]:
    hardware = get_hardware(hardware_kind, jax.devices()[0].device_kind)
    metrics: dict[str, Any] = {"rounds": rows[0]["rounds"], "variants": len(members) - 1}
    for verdict in (*judged.control, *judged.verdicts):
        trial, ratio = verdict.trial, verdict.trial.ratio
        if ratio is not None:
            bounds = {"": ratio.estimate, "_low": ratio.low, "_high": ratio.high}
            metrics |= {f"ratio_{trial.metric}_{trial.run}{end}": value for end, value in bounds.items()}
    engines = {member.name: llm for member in members if (llm := engine_of(member.variant.backend))}
    ledgers = [{**row, "variant": name} for name, llm in engines.items() for row in llm.ledger.rows()]
    metrics["recompiles_after_warmup"] = sum(bool(row["after_warmup"]) for row in ledgers)
    first = engine_of(members[0].variant.backend)
    return build_result(
        experiment,
        metrics=metrics,
        cases=rows,
        config=config,
        provenance=provenance,
        hardware=dataclasses.asdict(hardware) if hardware else None,
        slo=dataclasses.asdict(load.slo),
        compile_ledger=ledgers,
        resolved=as_dict(first.resolutions) if first is not None else {},
        variants=[_described(member.variant) for member in members],
        verdicts=[verdict.row() for verdict in judged.verdicts],
        case_verdicts=[verdict.row() for verdict in judged.case_verdicts],
        control=[verdict.row() for verdict in judged.control],
        iterations=[
            {"case": _place(index, case, load), "variant": member.name, "iteration": round_, **found}
            for index, member in enumerate(members)
            for (round_, case), found in sorted(member.rounds.items())
        ],
    )


def _described(variant: Variant) -> dict[str, Any]:
    llm = engine_of(variant.backend)
    return {
        "name": variant.name,
        "overrides": list(variant.overrides),
        "weights": f"shared with {variant.shares}" if variant.shares else "its own",
        "resolved": as_dict(llm.resolutions) if llm is not None else {},
        **variant.backend.memory(),
    }


def _report(
    result: Mapping[str, Any], files: Sequence[Path], tracker: CompositeTracker, out_dir: Path
) -> None:
    """Plots, and everything to the tracker."""
    plots = save_ab_plots(result, out_dir)
    rows = result["cases"]
    for index, row in enumerate(rows):
        numbers = {k: v for k, v in row.items() if isinstance(v, (int, float)) and not isinstance(v, bool)}
        tracker.log(numbers, step=index)
    tracker.summary({k: v for k, v in result["metrics"].items() if v is not None})
    for name in ("cases", "verdicts"):
        columns = list(dict.fromkeys(key for row in result[name] for key in row))
        cells = [
            [str(c) if isinstance(c := row.get(k), list) else c for k in columns] for row in result[name]
        ]
        tracker.table(name, columns, cells)
    for plot in plots:
        tracker.image(plot.stem, plot)
    tracker.artifact(f"{result['experiment']}-result", "result", files)
