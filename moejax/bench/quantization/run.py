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

import jax
import numpy as np

from moejax.bench.common.telemetry import open_telemetry
from moejax.bench.quantization.config import QuantizationSection
from moejax.bench.quantization.evaluate import Evaluator
from moejax.bench.quantization.method import Bench, MethodResult, full_row, measure_method, speed_fields
from moejax.bench.quantization.metrics import WindowBootstrap
from moejax.bench.quantization.rows import FULL, against_rtn, compare_methods, mark_pareto
from moejax.bench.quantization.sizes import model_sizes
from moejax.bench.quantization.speed import SpeedMeter
from moejax.bench.quantization.text import Windows, read_windows
from moejax.core.errors import ConfigError, MoejaxError
from moejax.core.files import atomic_write_text, dump_json, to_jsonable
from moejax.core.hardware import get_hardware
from moejax.core.quant import QuantConfig
from moejax.engine.llm import LLM
from moejax.report.progress import Task, progress
from moejax.report.quantization import print_quantization, save_quantization_plots
from moejax.report.tables import print_closing, stderr_console
from moejax.results.result import build_result, ensure_writable, write_result
from moejax.routing.analysis import loads_of
from moejax.routing.capture import load_capture
from moejax.tracking.base import CompositeTracker, TrackerConfig, make_tracker
from moejax.tracking.naming import run_info
from moejax.tracking.provenance import collect
from moejax.tracking.telemetry import Telemetry, TelemetryConfig

logger = logging.getLogger(__name__)

DETAILS_FILE = "quantization.json"

OpenModel = Callable[[QuantConfig | None], LLM]


@dataclass
class _Run:
    """What the methods share, and what has come of them so far."""

    section: QuantizationSection
    tracking: TrackerConfig
    out_dir: Path
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    name: str
    hardware: Any
    bench: Bench
    rows: list[dict[str, Any]] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)
    nats: dict[str, np.ndarray] = field(default_factory=dict)
    telemetry: Telemetry = field(default_factory=lambda: Telemetry(TelemetryConfig(enabled=False)))

    @property
    def group(self) -> str:
        return self.tracking.group or f"quantization-{self.name}-{self.out_dir.resolve().name}"

    def tracker(
        self, method: str, job_type: str, folder: Path, config: Mapping[str, Any]
    ) -> CompositeTracker:
        info = run_info(
            "quantization", folder, config, self.provenance, model=self.name, variant=method,
            group=self.group, job_type=job_type, tags=(method,),
        )  # fmt: skip
        return make_tracker(self.tracking, info)

    def result(self) -> dict[str, Any]:
        rows = [dict(row) for row in self.rows]
        rows[0] |= speed_fields(self.bench, self.bench.full)
        boot = self.bench.boot
        against_rtn(boot, rows, self.nats)
        mark_pareto(rows)
        windows = self.bench.windows
        return build_result(
            "quantization",
            metrics=_metrics(rows) | self._machine(),
            cases=rows,
            config=self.config,
            provenance=self.provenance,
            routing={"counts": self.details.get(FULL, {}).get("expert_counts_full")},
            differences=compare_methods(boot, self.nats),
            text={
                "source": windows.source,
                "tokens": windows.num_tokens,
                "windows": len(windows.tokens),
                "fingerprint": windows.fingerprint,
                "resamples": self.section.resamples,
                "confidence": self.section.confidence,
            },
            hardware=dataclasses.asdict(self.hardware) if self.hardware else None,
            popularity={"routing_trace": self.section.routing_trace},
            wandb_group=self.group if self.tracking.kind != "none" else None,
            telemetry=self.telemetry.report(),
        )

    def _machine(self) -> dict[str, float | None]:
        """Of the time in which methods were measured; nothing here is per token."""
        found = self.telemetry.summary()
        return {name: value for name, value in found.items() if "per_output_token" not in name}

    def write(self) -> list[Path]:
        """The result so far."""
        details = dump_json(to_jsonable(self.details)) + "\n"
        return [
            write_result(self.result(), self.out_dir),
            atomic_write_text(self.out_dir / DETAILS_FILE, details),
        ]


def run_quantization(
    open_model: OpenModel,
    section: QuantizationSection,
    tracker_config: TrackerConfig,
    out_dir: Path,
    *,
    config: Mapping[str, Any],
    name: str,
    hardware_kind: str = "auto",
    seed: int = 0,
    telemetry: TelemetryConfig | None = None,
) -> dict[str, Any]:
    """Runs the experiment and writes its results into `out_dir`; `cases` has the full-precision model and a
    row per method. `check_methods` raises for the methods that failed.

    Args:
        open_model: the model, quantized as asked for; None: in full precision.
        config: the whole resolved configuration, for the record.
        name: the model's short name.
        hardware_kind: what the decode bound is of, see `moejax.core.hardware.get_hardware`.
        seed: of windows and resamples.
        telemetry: sampling of memory, CPU, power and energy while methods are measured; None: none.

    Raises:
        ConfigError: no text, no tokenizer, a trace that does not fit; raised before any method runs.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    ensure_writable(out_dir)
    full = open_model(None)
    windows = read_windows(
        section.text,
        section.seq_len,
        section.max_windows,
        model_dir=full.model_dir,
        tokenizer=full.tokenizer,
        seed=seed,
    )
    if section.seq_len + 1 > full.max_model_len:
        raise ConfigError(
            f"quantization.seq_len={section.seq_len} and one token more exceed the limit of"
            f" {full.max_model_len} tokens; shorten the windows"
        )
    loads = _trace_loads(section.routing_trace, full)
    provenance = collect(
        config, seeds={"seed": seed}, checkpoint=full.model_dir, workload=windows.fingerprint
    )
    hardware = get_hardware(hardware_kind, jax.devices()[0].device_kind)
    evaluator = Evaluator(full.model, windows, section.batch_size)
    total = 2 + len(section.methods) * (2 + evaluator.num_batches)
    with progress(FULL, total=total) as task:
        run = _prepare(
            open_model, full, windows, evaluator, section, tracker_config, out_dir, config=config,
            provenance=provenance, name=name, hardware=hardware, seed=seed, loads=loads,
        )  # fmt: skip
        run.telemetry = open_telemetry(telemetry, full.parallel_config.num_devices)
        task.advance(2)
        for method in section.methods:
            task.describe(method)
            _one_method(run, method, task)
    files = run.write()
    result = run.result()
    with run.tracker("summary", "summary", out_dir, config) as tracker:
        plots = save_quantization_plots(result, run.details, out_dir)
        _report(result, tracker, files, plots)
    console = stderr_console()
    print_quantization(result, console)
    print_closing(console, out_dir, tracker.hints())
    return result


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


def _prepare(
    open_model: OpenModel,
    full: LLM,
    windows: Windows,
    evaluator: Evaluator,
    section: QuantizationSection,
    tracking: TrackerConfig,
    out_dir: Path,
    *,
    config: Mapping[str, Any],
    provenance: Mapping[str, Any],
    name: str,
    hardware: Any,
    seed: int,
    loads: np.ndarray | None,
) -> _Run:
    """The full-precision model's row, and what the methods need of it."""
    tokens = windows.scored.sum(axis=1)
    boot = WindowBootstrap(tokens, resamples=section.resamples, confidence=section.confidence, seed=seed)
    speed = None
    if section.speed.iterations:
        size = section.speed.batch_size
        rows = windows.tokens[np.arange(size) % len(windows.tokens)]
        prompts = [[int(t) for t in row[: section.speed.prompt_len]] for row in rows]
        speed = SpeedMeter(full, prompts, section.speed)
    bench = Bench(
        open_model, full, model_sizes(full.model), windows, evaluator, boot, evaluator.baseline(), speed,
        hardware, section, loads,
    )  # fmt: skip
    run = _Run(section, tracking, out_dir, config, provenance, name, hardware, bench)
    run.nats[FULL] = bench.base_nats
    run.rows.append(full_row(bench))
    return run


def _trace_loads(path: str | None, full: LLM) -> np.ndarray | None:
    """`[L, E]` of the trace; None without one.

    Raises:
        ConfigError: it is no trace, does not fit the model, or has no rows.
    """
    if path is None:
        return None
    capture = load_capture(path)
    capture.check_fits(full.config, f"quantization.routing_trace={path}")
    if not capture.num_rows:
        raise ConfigError(
            f"quantization.routing_trace={path}: the trace has no rows; capture some steps first"
        )
    return loads_of(capture, full.config.num_layers)


def _one_method(run: _Run, method: str, task: Task) -> None:
    """Measures a method, or marks its row with the reason why not; its tracker's run ends with it."""
    quant = run.section.quant(method)
    before = 0

    def advance() -> None:
        nonlocal before
        before += 1
        task.advance()

    folder = ensure_writable(run.out_dir / "methods" / method)
    with run.tracker(
        method, "method", folder, {**run.config, "method": dataclasses.asdict(quant)}
    ) as tracker:
        try:
            with run.telemetry.part(method):
                found = measure_method(run.bench, method, quant, advance)
        except Exception as error:
            defect = not isinstance(error, MoejaxError)
            if defect:
                logger.exception("%s failed with a defect", method)
            text = f"{type(error).__name__}: {error}" if defect else str(error)
            found = MethodResult(_failed(method, quant, text, defect), {}, None)
        run.rows.append(found.row)
        run.details[method] = found.details
        if found.nats is not None:
            run.nats[method] = found.nats
        tracker.summary({k: v for k, v in found.row.items() if v is not None})
        if found.details.get("router_flips") is not None:
            _log_layers(found.details, tracker)
        if found.row["error"] is not None:
            tracker.finish(1)
    task.advance(2 + run.bench.evaluator.num_batches - before)
    run.write()


def _failed(method: str, quant: QuantConfig, error: str, defect: bool) -> dict[str, Any]:
    row = {"name": method, "method": quant.method, "format": quant.format, "kv_cache": quant.kv_cache}
    return {**row, "error": error, "defect": defect, "changes_weights": False}


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


def _report(
    result: Mapping[str, Any], tracker: CompositeTracker, files: list[Path], plots: list[Path]
) -> None:
    tracker.summary({k: v for k, v in result["metrics"].items() if v is not None})
    for name in ("cases", "differences"):
        columns = list(dict.fromkeys(key for row in result[name] for key in row))
        tracker.table(name, columns, [[row.get(key) for key in columns] for row in result[name]])
    for plot in plots:
        tracker.image(plot.stem, plot)
    tracker.artifact("quantization-result", "result", files)
