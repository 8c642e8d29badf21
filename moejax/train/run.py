"""A whole training run as an experiment: train, export, and say what came of it in `result.json`."""

import dataclasses
import sys
import time
from pathlib import Path
from typing import Any

from moejax.core.files import to_jsonable
from moejax.report.figure import save_figures
from moejax.report.plots import expert_load, training_curve
from moejax.report.tables import metrics_table, print_lines, stderr_console
from moejax.results.result import build_result, write_result
from moejax.tracking.base import TrackerConfig
from moejax.tracking.factory import make_tracker
from moejax.tracking.jsonl import load_metrics
from moejax.tracking.naming import run_info
from moejax.tracking.provenance import collect, hash_directory
from moejax.train.config import TrainConfig
from moejax.train.evaluate import load_shares
from moejax.train.export import Exported, check_export_dir, export
from moejax.train.loop import TrainResult, define_metrics, train


def run(config: TrainConfig, tracking: TrackerConfig, output_dir: Path, *, command: str) -> Exported:
    """Trains, exports to `config.export_dir` and writes `output_dir/result.json`.

    Args:
        command: what the user typed, for the model card.

    Raises:
        MoejaxError: see `train` and `export`; places are checked before any work.
    """
    target = Path(config.export_dir) if config.export_dir else output_dir / "model"
    check_export_dir(target)
    resolved = to_jsonable(dataclasses.asdict(config))
    provenance = collect(resolved, seeds={"seed": config.seed})
    info = run_info("train", output_dir, resolved, provenance, variant=output_dir.name)
    began = time.perf_counter()
    with make_tracker(tracking, info) as tracker:
        define_metrics(tracker)
        result = train(config, tracker)
        exported = export(config, result, target, command)
        metrics = {
            **result.metrics,
            **_exported_metrics(exported),
            "wall_seconds": time.perf_counter() - began,
        }
        tracker.summary(metrics)
        outcome = _result(config, resolved, result, exported, metrics)
        file = write_result(outcome, output_dir)
        plots = _plots(outcome, output_dir)
        for plot in plots:
            tracker.image(plot.stem, plot)
        tracker.artifact("result", "result", [file, *plots])
        hints = tracker.hints()
    _print(exported, metrics, [file, *plots], hints)
    return exported


def _exported_metrics(exported: Exported) -> dict[str, float]:
    shares = load_shares(exported.held_out.counts)
    return {
        "exported_held_out_perplexity": exported.held_out.perplexity,
        "exported_bytes": exported.num_bytes,
        "exported_min_expert_share": float(shares.min()),
        "exported_max_expert_share": float(shares.max()),
    }


def _result(
    config: TrainConfig,
    resolved: dict[str, Any],
    result: TrainResult,
    exported: Exported,
    metrics: dict[str, Any],
) -> dict[str, Any]:
    provenance = collect(
        resolved,
        seeds={"seed": config.seed},
        checkpoint_hash=hash_directory(exported.directory),
        workload=result.text.fingerprint,
    )
    routing = {"counts": exported.held_out.counts, "text": "held_out.txt"}
    return build_result(
        "train",
        metrics=metrics,
        config=resolved,
        provenance=provenance,
        routing=routing,
        resumed_from=result.resumed_from,
    )


def _plots(outcome: dict[str, Any], output_dir: Path) -> list[Path]:
    """Draws `training.png` (this start's part of the run) and `expert_load.png`, where there is data."""
    figures = {
        "training": training_curve(load_metrics(output_dir), outcome),
        "expert_load": expert_load(outcome),
    }
    return save_figures(figures, output_dir)


def _print(exported: Exported, metrics: dict[str, Any], files: list[Path], hints: list[str]) -> None:
    """Prints the outcome on stderr; the one machine-readable line, the model's folder, on stdout."""
    shown = {
        "held-out perplexity, exported weights": metrics["exported_held_out_perplexity"],
        "least expert share": metrics["exported_min_expert_share"],
        "largest expert share": metrics["exported_max_expert_share"],
        "training steps, s": metrics["train_seconds"],
        "model, MB": exported.num_bytes / 1e6,
    }
    console = stderr_console()
    console.print(metrics_table(shown, "trained"))
    print_lines(console, (*map(str, files), *hints))
    sys.stdout.write(f"{exported.directory}\n")
