"""One run of an experiment: where its results go, how they came about, and who is told.

    with ExperimentRun.open("latency", config, out_dir) as run:
        result = run_latency(backends, config.workload, run)

An experiment's body checks what it is given, calls `start`, measures, makes its `result` and hands it to
`finish`. Until `start` nothing is written, and result.json only once all of it is there.
"""

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import engine_of
from moejax.bench.common.compilation import compilation_line
from moejax.bench.common.telemetry import Meter
from moejax.bench.ignored import ignored_settings
from moejax.bench.workload import SampledWorkload
from moejax.core.files import ensure_writable
from moejax.core.hardware import Hardware, get_hardware, with_reading
from moejax.core.price import Price
from moejax.core.resolve import as_dict
from moejax.engine.llm import LLM
from moejax.report.experiments import print_result, save_plots
from moejax.report.parts import Parts
from moejax.report.tables import print_closing, stderr_console
from moejax.results.goals import Goal
from moejax.results.result import (
    REQUESTS_FILE,
    RESULT_FILE,
    Result,
    build_result,
    print_ending,
    write_request_rows,
    write_result,
)
from moejax.tracking.base import CompositeTracker, TrackerConfig
from moejax.tracking.factory import check_tracker, make_tracker
from moejax.tracking.naming import run_info
from moejax.tracking.provenance import collect
from moejax.tracking.publish import publish
from moejax.tracking.telemetry import TelemetryConfig

logger = logging.getLogger(__name__)

DRY_RUN: ContextVar[list[LLM] | None] = ContextVar("DRY_RUN", default=None)
"""Within a dry run the engines that it has opened, without values in their weights; else None."""


class DryRunEnds(Exception):
    """Raised in a dry run where a run would begin to measure."""


@dataclass
class ExperimentRun:
    """A run from its configuration to its closing lines.

    As a context it ends the tracker's run, and where there is a result prints stdout's last two lines.

    Attributes:
        experiment: its name, such as "latency".
        out_dir: the folder of all its files.
        config: the whole resolved configuration, for the record.
        tracking: the tracker that hears of it beside the JSONL file.
        model: the model's short name.
        hardware_kind: the device to hold results against, see `moejax.core.hardware.get_hardware`.
        telemetry: sampling of memory, CPU, power and energy beside what is measured; None: none.
        price: of one device, for the cost per million tokens.
        ignored: settings that nothing reads, see `moejax.bench.ignored`.
        provenance: how the results came about, once `start` or `record` was called.
        meter: telemetry and cost of the measured cases, once `start_backends` was called.
        parts: what follows the measurement.
    """

    experiment: str
    out_dir: Path
    config: Mapping[str, Any]
    tracking: TrackerConfig
    model: str | None = None
    hardware_kind: str = "auto"
    telemetry: TelemetryConfig | None = None
    price: Price | None = None
    ignored: Mapping[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict, init=False)
    meter: Meter = field(init=False)
    parts: Parts = field(default_factory=Parts, init=False)
    _tracker: CompositeTracker | None = field(default=None, init=False)
    _result: Result | None = field(default=None, init=False)
    _hardware: Hardware | None = field(default=None, init=False)

    @classmethod
    def open(cls, experiment: str, config: Any, out_dir: Path) -> "ExperimentRun":
        """Returns the run of an experiment's configuration: of its sections `tracker`, `model`, `hardware`
        and `telemetry` those that it has."""
        model, hardware = getattr(config, "model", None), getattr(config, "hardware", None)
        return cls(
            experiment,
            out_dir,
            dataclasses.asdict(config),
            config.tracker,
            model=getattr(model, "name", None),
            hardware_kind=getattr(hardware, "kind", "auto"),
            telemetry=getattr(config, "telemetry", None),
            price=getattr(hardware, "price", None),
            ignored=ignored_settings(config),
        )

    def __enter__(self) -> "ExperimentRun":
        """Raises `OutputError` where the folder cannot be written; in a dry run instead `TrackingError` where
        W&B cannot be reached."""
        if DRY_RUN.get() is None:
            ensure_writable(self.out_dir)
        else:
            check_tracker(self.tracking)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._tracker is not None:
            self._tracker.__exit__(kind, error, traceback)
        if self._result is not None:
            print_ending(self.experiment, self.out_dir, self._result["metrics"])

    @property
    def hardware(self) -> Hardware | None:
        """One device to hold results against; None where it is not known. Raises `ConfigError`: an unknown
        kind."""
        if self._hardware is None or self._hardware.bandwidth is None:
            self.read_peaks()
        return self._hardware

    def read_peaks(self) -> None:
        """Measures the peaks that no data sheet gives; to be called before and after what is held against
        them, since a machine that others use too has other peaks a minute later."""
        known = self._hardware or get_hardware(self.hardware_kind, jax.devices()[0].device_kind)
        self._hardware = None if known is None else with_reading(known)

    # -- before anything is measured ---------------------------------------------------------------------

    def start(
        self,
        *,
        seeds: Mapping[str, int] | None = None,
        checkpoint: Path | None = None,
        workload: str | None = None,
        engine: LLM | None = None,
        backends: Sequence[Mapping[str, Any]] | None = None,
        variant: str | None = None,
    ) -> None:
        """Records the provenance and starts the tracker; all that can be refused has been checked by now.

        Args:
            seeds: name → seed.
            checkpoint: the model's folder, whose content the provenance names.
            workload: the hash of what is asked for.
            engine: whose automatic choices are logged.
            backends: what each of several engines says of itself.
            variant: what tells the run from others of its group.

        Raises:
            ConfigError: an unknown kind of device.
            OutputError, TrackingError: the tracker cannot be started.
        """
        self.record(seeds=seeds, checkpoint=checkpoint, workload=workload)
        if backends is not None:
            self.provenance["backends"] = list(backends)
        for resolution in engine.resolutions if engine is not None else ():
            logger.info("%s", resolution)
        self.track(variant=variant)

    def start_backends(
        self,
        backends: Sequence[Backend],
        workload: SampledWorkload,
        *,
        seeds: Mapping[str, int] | None = None,
        variant: str | None = None,
    ) -> None:
        """Starts a run of one or several engines, the first of which the flat metrics are of.

        Args:
            workload: what all are given.
            seeds: further ones.
            variant: see `start`.
        """
        first, engine = backends[0], engine_of(backends[0])
        engine_seed = {} if first.seed is None else {"engine": first.seed}
        self.start(
            seeds={"workload": workload.seed, **engine_seed, **(seeds or {})},
            checkpoint=first.checkpoint,
            workload=workload.hash,
            engine=engine,
            backends=[backend.describe() for backend in backends],
            variant=variant,
        )
        devices = engine.parallel_config.num_devices if engine is not None else 1
        self.meter = Meter(self.telemetry, self.price, devices)

    def record(self, **sources: Any) -> None:
        """Collects the provenance only; `sources` are `seeds`, `checkpoint` and `workload` as in `start`.

        Raises:
            ConfigError: an unknown kind of device.
            DryRunEnds: this is a dry run.
        """
        get_hardware(self.hardware_kind, jax.devices()[0].device_kind)  # refused before anything runs
        if DRY_RUN.get() is not None:
            raise DryRunEnds
        self.provenance = collect(self.config, **sources)

    def track(self, **naming: Any) -> CompositeTracker:
        """Starts the tracker of a run whose provenance is recorded; arguments as in `open_tracker`."""
        self._tracker = self.open_tracker(**naming)
        return self._tracker

    def open_tracker(
        self, out_dir: Path | None = None, config: Mapping[str, Any] | None = None, **naming: Any
    ) -> CompositeTracker:
        """Returns a tracker of this run, or of a part of it that has a folder and a configuration of its own.

        Args:
            naming: what `moejax.tracking.naming.run_info` takes: variant, group, job_type, tags.
        """
        info = run_info(
            self.experiment,
            out_dir or self.out_dir,
            config or self.config,
            self.provenance,
            model=self.model,
            **naming,
        )
        return make_tracker(self.tracking, info)

    # -- afterwards --------------------------------------------------------------------------------------

    def result(
        self,
        *,
        metrics: Mapping[str, Any],
        cases: Sequence[Mapping[str, Any]] = (),
        engine: LLM | None = None,
        **extra: Any,
    ) -> Result:
        """Returns the content of result.json, see `moejax.results.result.build_result`.

        Args:
            engine: whose compile ledger and automatic choices are part of it.
            extra: further top-level keys.
        """
        if engine is not None:
            extra = {
                "compile_ledger": engine.ledger.rows(),
                "resolved": as_dict(engine.resolutions),
                "memory": engine.memory.row(),
                **extra,
            }
        if self.ignored:
            extra["resolved"] = extra.get("resolved", {}) | self.ignored
        result = build_result(
            self.experiment,
            metrics=metrics,
            cases=cases,
            config=self.config,
            provenance=self.provenance,
            **extra,
        )
        if goals := self.config.get("goals"):
            result["goals"] = [Goal(**goal).verdict(result) for goal in goals]
        return result

    def finish(
        self,
        result: Result,
        *,
        requests: Iterable[Mapping[str, Any]] | None = None,
        plot_data: Mapping[str, Any] | None = None,
        files: Sequence[Path] = (),
        timeline: Mapping[str, Any] | None = None,
        tables: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    ) -> Result:
        """Writes the files, draws the plots, tells the tracker all, ends its run and prints the tables.

        Args:
            result: from `result`.
            requests: rows of requests.jsonl, where there is one.
            plot_data: what the plots show besides the result and the requests, by parameter.
            files: further ones, written already, that belong to the result.
            timeline, tables: see `moejax.tracking.publish.publish`.

        Returns:
            `result`.

        Raises:
            OutputError: some of it cannot be written, drawn or tracked; the rest was.
        """
        tracker, part = self._tracker, self.parts.part
        assert tracker is not None, "start the run first"
        self._result, written = result, list(files)
        with part(RESULT_FILE):
            written.append(write_result(result, self.out_dir))
        rows = list(requests or ())
        if requests is not None:
            with part(REQUESTS_FILE):
                written.append(write_request_rows(rows, self.out_dir))
        plots = save_plots(result, self.out_dir, parts=self.parts, requests=rows, **(plot_data or {}))
        with part("tracking"):
            publish(
                tracker,
                result,
                requests=rows,
                plots=plots,
                files=written,
                timeline=timeline,
                tables=tables or {},
            )
        self._tracker = None  # ended here: its hints may depend on how it ended
        with part("tracking"):
            tracker.finish()
        console = stderr_console()
        with part("table"):
            print_result(result, console)
            if (seconds := result["metrics"].get("compile_seconds")) is not None:
                console.print(compilation_line(seconds), highlight=False)
        print_closing(console, tracker.hints(), result.get("compile_ledger", ()))
        self.parts.check(self.out_dir / RESULT_FILE)
        return result
