"""Policies of keeping experts resident: captured or recorded traces → hits, gap to Belady's bound, stall."""

from collections.abc import Callable
from typing import Any

import numpy as np

from moejax.bench.common.held_out import read_windows
from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.offload.config import OffloadSection
from moejax.bench.offload.lookahead import next_router
from moejax.bench.offload.measure import run_measured
from moejax.bench.quantization.metrics import WindowBootstrap
from moejax.bench.routing.rows import expert_bytes
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.report.progress import progress
from moejax.results.result import Result
from moejax.results.statistics import interval_fields
from moejax.routing import residency
from moejax.routing.capture import CAPTURE_FILE, RoutingCapture
from moejax.routing.prefetch import PREDICTORS, predict, stall
from moejax.routing.residency import Visits, replay
from moejax.routing.source import open_trace


def run_offload(
    open_model: Callable[..., LLM],
    model: ModelConfig,
    section: OffloadSection,
    run: ExperimentRun,
    *,
    seed: int,
) -> Result:
    """Runs the experiment and finishes `run`; `cases` has a row per resident share and policy (and tier and
    way to prefetch, where engines run), `predictors` one for each of them.

    Args:
        open_model: opens the model with `engine.capture_routing` and what it is given of `engine.experts`;
            not called where a trace is given.
        model: whose experts' bytes count, and which the trace has to fit.
        seed: of windows and resamples.

    Raises:
        ConfigError: no experts, no trace or text; or too few slots for what one step needs.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    if not any(model.moe_layers):
        raise ConfigError(f"offload: {run.model} has no experts to keep resident")
    if section.mode == "measured":
        return run_measured(open_model, section, run, seed=seed)
    guesses = None
    if section.trace is None:
        capture, guesses = _capture(open_model(), section, run, seed)
        files = [capture.save(run.out_dir / CAPTURE_FILE)]
    else:
        capture, files = open_trace("offload.trace", section.trace, model), []
        run.record(seeds={"seed": seed})
    if section.batching == "single":
        visits = residency.single_visits(capture)
    else:
        visits = residency.recorded_visits(capture.computed(), section.parts)
    size = expert_bytes(model)
    experts = len(capture.layers) * capture.num_experts
    capacities = [round(share * experts) for share in section.shares]
    boot = WindowBootstrap(
        visits.accesses, resamples=section.resamples, confidence=section.confidence, seed=seed
    )
    foreseen = {name: predict(name, visits) for name in PREDICTORS}
    if guesses is not None and section.batching == "single":
        foreseen["next_router"] = guesses
    policies = [*(name for name in section.chosen if name != "belady"), "belady"]
    missed, rows = {}, dict[tuple[str, int], dict[str, Any]]()
    with progress("policies", total=len(policies)) as task:
        for policy in policies:
            task.describe(policy)
            absent = replay(policy, visits, capacities, section.options)
            missed[policy] = (absent & visits.needed[:, None]).sum((2, 3, 4))
            stalls = _stall_fields(visits, absent, size, section, foreseen)
            for at, capacity in enumerate(capacities):
                rows[policy, at] = {"policy": policy, "resident_share": section.shares[at], "slots": capacity}
                rows[policy, at] |= {name: values[at] for name, values in stalls.items()}
            task.advance()
    run.track()
    for (policy, at), row in rows.items():
        misses, least = missed[policy][:, at], missed["belady"][:, at]
        row |= interval_fields("hit_rate", boot.mean(visits.accesses - misses))
        row |= interval_fields("belady_gap", boot.mean(misses - least))
        row["missed_bytes"] = float(misses.sum() * size)
    cases = [rows[policy, at] for at in range(len(capacities)) for policy in policies]
    metrics = {f"hit_rate_{row['policy']}_{100 * row['resident_share']:g}": row["hit_rate"] for row in cases}
    about: dict[str, Any] = {
        "traces": len(visits.needed),
        "accesses": int(visits.accesses.sum()),
        "expert_bytes": size,
    }
    predictors = [_predictor_row(name, foreseen[name], visits, section, seed) for name in list(foreseen)[1:]]
    about["layers"] = list(capture.layers)
    result = run.result(metrics=metrics, cases=cases, predictors=predictors, offload=about)
    return run.finish(result, files=files)


def _capture(
    llm: LLM, section: OffloadSection, run: ExperimentRun, seed: int
) -> tuple[RoutingCapture, np.ndarray | None]:
    """Routes the windows of the text, each as a prompt; what follows it is not used. Returns also what the
    next layer's router would choose (`next_router`), unless the experts are in tiers."""
    windows = read_windows(section, llm.model_dir, llm.tokenizer, llm.max_model_len, seed)
    run.record(seeds={"seed": seed}, checkpoint=llm.model_dir, workload=windows.fingerprint)
    whole = windows.tokens[windows.scored.all(axis=1), : section.seq_len]
    llm.reset_capture()
    llm.generate(whole.tolist(), SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
    capture = llm.routing_capture()
    guesses = next_router(llm.model, whole) if llm.engine.tiers is None else None
    llm.close()
    return capture, guesses


def _stall_fields(
    visits: Visits, absent: np.ndarray, size: float, section: OffloadSection, foreseen: dict[str, np.ndarray]
) -> dict[str, list[float]]:
    """Share of the time that waits for experts, for each capacity: without prefetch, and with each kind."""
    compute_s, expert_s = section.compute_ms / 1e3, size / (section.link_gb_per_s * 1e9)
    compute = visits.needed.any(3).sum() * compute_s
    fields = {}
    for name, predicted in foreseen.items():
        seconds, moved = (part.sum(0) for part in stall(visits, absent, expert_s, compute_s, predicted))
        end = "" if name == "none" else f"_{name}"
        fields[f"stall_share{end}"] = (seconds / np.maximum(seconds + compute, 1e-30)).tolist()
        fields[f"moved_bytes{end}"] = (moved * size).tolist()
    return fields


def _predictor_row(
    name: str, predicted: np.ndarray, visits: Visits, section: OffloadSection, seed: int
) -> dict[str, Any]:
    """Precision and recall with intervals over traces; the recall of each layer, None where nothing is."""
    row: dict[str, Any] = {"predictor": name}
    right = (predicted & visits.needed).sum((1, 2, 3))
    for figure, of in (("precision", predicted.sum((1, 2, 3))), ("recall", visits.accesses)):
        if of.all():
            boot = WindowBootstrap(of, resamples=section.resamples, confidence=section.confidence, seed=seed)
            row |= interval_fields(figure, boot.mean(right))
    of_layer = [part.sum((0, 1, 3)) for part in (predicted & visits.needed, visits.needed, predicted)]
    row["layer_recall"] = [float(a / b) if c and b else None for a, b, c in zip(*of_layer, strict=True)]
    return row
