"""The quantization experiment: methods one after another beside one full-precision model.

text → windows; the full-precision model's losses on them → per method: quantize, compare passes, time
decoding; a row of the result, a W&B run of its own → what all have in common: intervals of every pair, Pareto
frontier, table, plots, a summary run in the same group. `result.json` is written anew after each method, so
that a run that is killed keeps what it has; a method that fails is a row with its reason.
"""

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from moejax.bench.common.held_out import read_windows
from moejax.bench.common.telemetry import open_telemetry
from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.quantization.config import QuantizationSection
from moejax.bench.quantization.evaluate import Evaluator
from moejax.bench.quantization.method import (
    Bench,
    compiling,
    full_row,
    measure_method,
    speed_fields,
)
from moejax.bench.quantization.metrics import WindowBootstrap
from moejax.bench.quantization.rows import FULL, against_rtn, compare_methods, mark_pareto
from moejax.bench.quantization.speed import SpeedMeter
from moejax.core.errors import ConfigError, MoejaxError
from moejax.core.files import atomic_write_text, dump_json, ensure_writable, to_jsonable
from moejax.core.quant import QuantConfig
from moejax.engine.llm import LLM
from moejax.report.progress import Task, progress
from moejax.results.result import Result, write_result
from moejax.routing.analysis import loads_of
from moejax.routing.source import open_trace
from moejax.tracking.base import CompositeTracker
from moejax.tracking.telemetry import Telemetry

logger = logging.getLogger(__name__)

DETAILS_FILE = "quantization.json"

OpenModel = Callable[[QuantConfig | None], LLM]


@dataclass
class _Methods:
    """The methods measured so far, and what they share.

    Attributes:
        rows: of the result's cases, the full-precision model's first.
        details: method → what is too long for a row.
        nats: method → losses `[W]` by window.
    """

    run: ExperimentRun
    bench: Bench
    telemetry: Telemetry
    rows: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    nats: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def group(self) -> str:
        """The group of the methods' runs in the tracker."""
        run = self.run
        return run.tracking.group or f"quantization-{run.model}-{run.out_dir.resolve().name}"

    def naming(self, method: str, job_type: str) -> dict[str, Any]:
        """Returns what names the tracker's run of a method, or of the summary."""
        return {"variant": method, "group": self.group, "job_type": job_type, "tags": (method,)}

    def result(self) -> Result:
        """Returns the result of the methods measured so far."""
        rows = [dict(row) for row in self.rows]
        rows[0] |= speed_fields(self.bench, self.bench.full)
        for row in rows:
            if self.bench.speed is not None and "decode_tokens_per_s" in row:
                row |= self.bench.speed.bound(row, self.run.hardware)
        boot = self.bench.boot
        against_rtn(boot, rows, self.nats)
        mark_pareto(rows)
        windows = self.bench.windows
        # Of the time in which methods were measured; nothing here is per token.
        summary = self.telemetry.summary()
        machine = {name: value for name, value in summary.items() if "per_output_token" not in name}
        return self.run.result(
            metrics=_metrics(rows) | machine,
            cases=rows,
            routing={"counts": self.details.get(FULL, {}).get("expert_counts_full")},
            differences=compare_methods(boot, self.nats),
            text={
                "source": windows.source,
                "tokens": windows.num_tokens,
                "windows": len(windows.tokens),
                "fingerprint": windows.fingerprint,
                "resamples": self.bench.section.resamples,
                "confidence": self.bench.section.confidence,
            },
            hardware=self.run.hardware,
            popularity={"routing_trace": self.bench.section.routing_trace},
            wandb_group=self.group if self.run.tracking.kind != "none" else None,
            telemetry=self.telemetry.report(),
        )

    def write(self) -> Path:
        """Writes result.json as of now and the details, whose file it returns."""
        write_result(self.result(), self.run.out_dir)
        return atomic_write_text(self.run.out_dir / DETAILS_FILE, dump_json(to_jsonable(self.details)) + "\n")


def run_quantization(
    open_model: OpenModel, section: QuantizationSection, run: ExperimentRun, *, seed: int = 0
) -> Result:
    """Runs the experiment and finishes `run`; `cases` has the full-precision model and a row per method.
    `check_methods` raises for the methods that failed.

    Args:
        open_model: the model, quantized as asked for; None: in full precision.
        seed: of windows and resamples.

    Raises:
        ConfigError: no text, no tokenizer, a trace that does not fit; raised before any method runs.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    full = open_model(None)
    windows = read_windows(
        section, full.model_dir, full.tokenizer, full.max_model_len, seed, full.eos_token_ids
    )
    loads = None
    if section.routing_trace is not None:
        capture = open_trace("quantization.routing_trace", section.routing_trace, full.config)
        loads = loads_of(capture, full.config.num_layers)
    run.record(seeds={"seed": seed}, checkpoint=full.model_dir, workload=windows.fingerprint)
    evaluator = Evaluator(full.model, windows, section.batch_size)
    total = 2 + len(section.methods) * (2 + evaluator.num_batches)
    with compiling() as compiled, progress(FULL, total=total) as task:
        boot = WindowBootstrap(
            windows.scored.sum(axis=1), resamples=section.resamples, confidence=section.confidence, seed=seed
        )
        speed = None
        if section.speed.iterations:
            speed = SpeedMeter(full, windows, section.speed)
        bench = Bench(
            open_model, full, windows, evaluator, boot, evaluator.baseline(), speed,
            section, loads,
        )  # fmt: skip
        telemetry = open_telemetry(run.telemetry, full.parallel_config.num_devices)
        methods = _Methods(run, bench, telemetry, [full_row(bench)], nats={FULL: bench.base_nats})
        task.advance(2)
        run.read_peaks()
        for method in section.methods:
            task.describe(method)
            _one_method(methods, method, task)
        run.read_peaks()
    details = methods.write()
    run.track(**methods.naming("summary", "summary"))
    result = methods.result()
    result["metrics"]["compile_seconds"] = sum(compiled)
    full.close()
    return run.finish(result, plot_data={"details": methods.details}, files=[details])


def check_methods(result: Mapping[str, Any]) -> None:
    """Raises for the methods that failed, once all else is written.

    Raises:
        ConfigError: a method failed over what was asked for.
        RuntimeError: one failed with a defect; its traceback was logged when it did.
    """
    failed = [row for row in result["cases"] if row["error"] is not None]
    if not failed:
        return
    text = "; ".join(f"{row['name']}: {row['error']}" for row in failed)
    line = f"{len(failed)} of {len(result['cases']) - 1} methods failed: {text}"
    raise RuntimeError(line) if any(row["defect"] for row in failed) else ConfigError(line)


def _one_method(methods: _Methods, method: str, task: Task) -> None:
    """Measures a method, or marks its row with the reason why not; its tracker's run ends with it."""
    run = methods.run
    quant = methods.bench.section.quant(method)
    before = 0

    def advance() -> None:
        nonlocal before
        before += 1
        task.advance()

    folder = ensure_writable(run.out_dir / "methods" / method)
    config = {**run.config, "method": dataclasses.asdict(quant)}
    with run.open_tracker(folder, config, **methods.naming(method, "method")) as tracker:
        try:
            with methods.telemetry.part(method):
                row, details, nats = measure_method(methods.bench, method, quant, advance)
            methods.nats[method] = nats
        except Exception as error:
            defect = not isinstance(error, MoejaxError)
            if defect:
                logger.exception("%s failed with a defect", method)
            text = f"{type(error).__name__}: {error}" if defect else str(error)
            kinds = {"method": quant.what, "format": quant.format, "kv_cache": quant.kv_cache}
            row = {"name": method, **kinds, "error": text, "defect": defect, "changes_weights": False}
            details = {}
        methods.rows.append(row)
        methods.details[method] = details
        tracker.summary({k: v for k, v in row.items() if v is not None})
        if details.get("router_flips") is not None:
            _log_layers(details, tracker)
        if row["error"] is not None:
            tracker.finish(1)
    task.advance(2 + methods.bench.evaluator.num_batches - before)
    methods.write()


def _log_layers(details: Mapping[str, Any], tracker: CompositeTracker) -> None:
    """A method's figures by layer, as a history over the layers."""
    names = ("router_flips", "router_flips_replayed", "assignments_changed", "load_shift")
    for name in names:
        tracker.define_metric(f"layer/{name}", step_metric="layer", summary="max")
    for layer, sparse in enumerate(details["moe_layers"]):
        if sparse:
            values = {f"layer/{name}": float(details[name][layer]) for name in names}
            tracker.log({"layer": layer, **values}, step=layer)


def _metrics(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Flat names: `<figure>_<method>`, and how many methods ran."""
    figures = (
        "perplexity", "perplexity_loss_percent", "bits_per_weight", "kl", "router_flips", "loss_vs_rtn",
        "quantize_seconds", "decode_ratio",
    )  # fmt: skip
    sound = [row for row in rows if row["error"] is None]
    metrics: dict[str, Any] = {
        "methods": len(sound) - 1,
        "failed_methods": len(rows) - len(sound),
        "full_perplexity": sound[0]["perplexity"] if sound else None,
    }
    for row in sound[1:]:
        for figure in figures:
            if row.get(figure) is not None:
                metrics[f"{figure}_{row['name']}"] = row[figure]
    return metrics
