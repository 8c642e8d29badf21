"""Routing policies beside the model's own choice: predictions on held-out text, experts visited, decode time.

Text and time are those of one batch: the experts of a layer see the windows' tokens a position at a time, as
many as there are sequences in the decode steps that are timed.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moejax.bench.common.held_out import read_windows
from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.quantization.evaluate import Evaluator
from moejax.bench.quantization.metrics import Evaluation, WindowBootstrap
from moejax.bench.quantization.rows import loss_fields, routing_fields, split_fields
from moejax.bench.quantization.speed import SpeedMeter
from moejax.bench.routing_policies.config import PolicyPreset, RoutingPoliciesSection
from moejax.core.errors import ConfigError
from moejax.engine.llm import LLM
from moejax.report.progress import progress
from moejax.results.pareto import pareto
from moejax.results.result import Result

OWN = "top_k"
"""The name of the model's own choice."""

_OF_THE_REPLAY = ("replayed", "routing_delta", "routing_inside", "router_flips_replayed")


def run_policies(
    open_model: Callable[[PolicyPreset | None], LLM],
    section: RoutingPoliciesSection,
    run: ExperimentRun,
    *,
    seed: int = 0,
) -> Result:
    """Runs the experiment and finishes `run`; `cases` has the model's own choice and a row per policy.

    Args:
        open_model: the model under a policy; None: under its own.
        seed: of windows and resamples.

    Raises:
        ConfigError: the model has no experts; no text, or no tokenizer; a policy that the engine refuses.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    full, speed = open_model(None), section.speed
    if not any(full.config.moe_layers):
        raise ConfigError(f"routing_policies: {run.model} has no experts to choose among")
    windows = read_windows(section, full.model_dir, full.tokenizer, full.max_model_len, seed)
    run.record(seeds={"seed": seed}, checkpoint=full.model_dir, workload=windows.fingerprint)
    run.track()
    evaluator = Evaluator(full.model, windows, speed.batch_size)
    boot = WindowBootstrap(
        windows.scored.sum(axis=1), resamples=section.resamples, confidence=section.confidence, seed=seed
    )
    chosen = section.chosen
    rows: list[dict[str, Any]] = [{"name": OWN, "method": OWN}]
    with progress(OWN, total=1 + len(chosen) * (1 + evaluator.num_batches)) as task:
        base = evaluator.baseline()
        meter = SpeedMeter(full, windows, speed)
        task.advance()
        for name, preset in chosen.items():
            task.describe(name)
            llm = open_model(preset)
            sums = evaluator(llm.model, advance=task.advance, by_step=True)
            row: dict[str, Any] = {"name": name, "method": preset.method}
            row |= loss_fields(boot, sums.nats[1], base, windows.bytes_per_token) | split_fields(boot, sums)
            row |= routing_fields(sums, full.config.moe_layers, None) | _load_fields(
                sums, sums.counts[1], full
            )
            row |= (meter(llm) if speed.iterations else {}) | _decode_fields(meter, llm)
            rows.append({key: value for key, value in row.items() if not key.startswith(_OF_THE_REPLAY)})
            llm.close()
            task.advance()
    perplexity = float(np.exp(boot.means(base)[0]))
    own = {"perplexity": perplexity, "kl": 0.0, "router_flips": 0.0, "top1_agreement": 1.0}
    rows[0] |= (
        own | _load_fields(sums, sums.counts[0], full) | meter.full_rate() | _decode_fields(meter, full)
    )
    if speed.iterations:
        rows[0]["decode_ratio"] = 1.0
    for row in rows:
        if run.hardware is not None and "decode_tokens_per_s" in row:
            row |= meter.bound(row, run.hardware)
    mark_pareto(rows)
    full.close()
    text = {"source": windows.source, "tokens": windows.num_tokens, "windows": len(windows.tokens)}
    text |= {"resamples": section.resamples, "confidence": section.confidence}
    names = ("perplexity_loss_percent", "kl", "router_flips", "mean_experts_hit", "decode_ratio")
    metrics = {
        f"{name}_{row['name']}": row[name] for row in rows[1:] for name in names if row.get(name) is not None
    }
    return run.finish(run.result(metrics=metrics, cases=rows, text=text, hardware=run.hardware))


def _load_fields(sums: Evaluation, counts: np.ndarray, llm: LLM) -> dict[str, float]:
    """Row fields of the assignments `[L, E]` that ran on the text."""
    ran = counts[np.array(llm.config.moe_layers)].astype(np.float64)
    mean = ran.mean(axis=1)
    per_token = ran.sum(axis=1).mean() / sums.tokens
    return {"experts_per_token": float(per_token), "max_over_mean": float((ran.max(axis=1) / mean).mean())}


def _decode_fields(meter: SpeedMeter, llm: LLM) -> dict[str, Any]:
    """Row fields of the experts that decode steps visit, and what these steps cost."""
    visits = meter.visited(llm)
    overflow, made = llm.routing.overflow, sum(int(part.sum()) for part in llm.routing.counts.values())
    asked = made + overflow["dropped"]
    shares = {f"{kind}_share": count / asked for kind, count in overflow.items() if count}
    mean = float(visits[0][np.array(llm.config.moe_layers)].mean())
    return {"mean_experts_hit": mean, **shares, **meter.cost(llm, visits)}


def mark_pareto(rows: list[dict[str, Any]]) -> None:
    """Sets in each row whether no other has less KL at no less speed (`pareto_time`), or at no more experts
    visited (`pareto_experts`)."""
    kl = [row["kl"] for row in rows]
    costs: Mapping[str, list[float]] = {
        "time": [-row.get("decode_ratio", 1.0) for row in rows],
        "experts": [row["mean_experts_hit"] for row in rows],
    }
    for name, values in costs.items():
        best = pareto(values, kl)
        for i, row in enumerate(rows):
            row[f"pareto_{name}"] = i in best
