"""A whole training run as an experiment: train, export, and say what came of it in `result.json`."""

import sys
import time
from pathlib import Path
from typing import Any

from moejax.bench.experiment_run import ExperimentRun
from moejax.report.tables import metrics_table, stderr_console
from moejax.routing.analysis import load_shares
from moejax.tracking.jsonl import load_metrics
from moejax.train.config import TrainConfig
from moejax.train.export import Exported, check_export_dir, export
from moejax.train.loop import train


def run_training(config: TrainConfig, run: ExperimentRun, *, command: str) -> Exported:
    """Trains, exports to `config.export_dir` and writes `result.json` into the run's folder.

    Args:
        command: what the user typed, for the model card.

    Raises:
        MoejaxError: see `train` and `export`; places are checked before any work.
    """
    target = Path(config.export_dir) if config.export_dir else run.out_dir / "model"
    seeds = {"seed": config.seed}
    run.record(seeds=seeds)
    check_export_dir(target, config.adapter.rank > 0)
    began = time.perf_counter()
    tracker = run.track(variant=run.out_dir.name)
    tracker.define_metric("train/cross_entropy", summary="min")
    tracker.define_metric("held_out/perplexity", summary="min")
    tracker.define_metric("train/tokens_per_s", summary="mean")
    result = train(config, tracker)
    exported = export(config, result, target, command)
    shares = load_shares(exported.held_out.counts)
    metrics = {
        **result.metrics,
        "exported_held_out_perplexity": exported.held_out.perplexity,
        "exported_bytes": exported.num_bytes,
        "exported_min_expert_share": float(shares.min()),
        "exported_max_expert_share": float(shares.max()),
        "wall_seconds": time.perf_counter() - began,
    }
    run.record(seeds=seeds, checkpoint=exported.directory, workload=result.text.fingerprint)
    routing = {"counts": exported.held_out.counts, "text": "held_out.txt"}
    outcome = run.result(metrics=metrics, routing=routing, resumed_from=result.resumed_from)
    _print(exported, metrics)
    run.finish(outcome, plot_data={"steps": load_metrics(run.out_dir)})
    return exported


def _print(exported: Exported, metrics: dict[str, Any]) -> None:
    """Prints the outcome on stderr and the exported folder on stdout."""
    base = metrics.get("base_held_out_perplexity")
    shown = {
        **({"held-out perplexity, base": base} if base is not None else {}),
        "held-out perplexity, exported weights": metrics["exported_held_out_perplexity"],
        "least expert share": metrics["exported_min_expert_share"],
        "largest expert share": metrics["exported_max_expert_share"],
        "training steps, s": metrics["train_seconds"],
        "exported, MB": exported.num_bytes / 1e6,
    }
    stderr_console().print(metrics_table(shown, "trained"))
    sys.stdout.write(f"{exported.directory}\n")
