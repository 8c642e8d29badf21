"""`run_stress`: warm-up, rounds of all phases with the checks between, the result."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.memory import peak_memory, weight_metrics
from moejax.bench.stress.checks import Prober, Snapshot, idle_faults, leak_faults, snapshot
from moejax.bench.stress.config import StressSection
from moejax.bench.stress.phases import RUN, Counts, Load, greedy
from moejax.core.errors import ConfigError, MoejaxError
from moejax.engine.llm import LLM
from moejax.report.progress import progress
from moejax.results.result import Result

_COUNTS = ("requests", "done", "aborted", "left", "failed", "unfinished", "tokens")


class StressError(MoejaxError, RuntimeError):
    """A check of a stress run did not hold."""


@dataclass
class PhaseLog:
    """A phase over all rounds."""

    name: str
    counts: Counts = field(default_factory=Counts)
    seconds: float = 0.0
    preemptions: int = 0
    max_running: int = 0
    max_waiting: int = 0
    cache_use_peak: float = 0.0
    drift: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def row(self, case: int) -> dict[str, Any]:
        row = asdict(self)
        phase, counts, drift = (row.pop(name) for name in ("name", "counts", "drift"))
        faults = list(dict.fromkeys([*self.faults, *counts.pop("errors")]))
        return {
            "case": case,
            "phase": phase,
            **counts,
            **row,
            "output_throughput": self.counts.tokens / self.seconds if self.seconds else None,
            "probe_tpot_ratio": max(drift),
            "passed": not faults,
            "faults": faults,
        }


def run_stress(llm: LLM, section: StressSection, run: ExperimentRun) -> Result:
    """Runs the experiment and finishes `run`.

    Returns:
        The content of `result.json`: `cases` has a row per phase, `rounds` the snapshots, `faults` what does
        not belong to a phase. `check_stress` raises where something did not hold.

    Raises:
        ConfigError: the engine is too short for the probes; checked before anything runs.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    if section.probe_tokens + 1 > llm.max_model_len:
        raise ConfigError(
            f"stress.probe_tokens {section.probe_tokens} leave no room for a prompt within "
            f"engine.max_model_len {llm.max_model_len}"
        )
    run.start(seeds={"engine": llm.seed, "stress": section.seed}, checkpoint=llm.model_dir, engine=llm)
    with progress("compiling and warming up"):
        llm.warmup(max_total_len=llm.max_model_len, sampling_params=[greedy(1)])
        prober = Prober(llm, section)
    logs = [PhaseLog(phase) for phase in section.phases]
    snapshots = _rounds(prober, logs)
    grown, faults = leak_faults(snapshots, section)
    if recompiles := len(llm.ledger.recompiles):
        faults.append(f"{recompiles} steps were compiled after the warm-up")
    rows = [log.row(case) for case, log in enumerate(logs)]
    metrics = {key: sum(row[key] for row in rows) for key in (*_COUNTS, "preemptions")}
    metrics |= grown | peak_memory() | weight_metrics(llm.stages)
    metrics |= {
        "failed_checks": sum(not row["passed"] for row in rows) + len(faults),
        "probe_tpot_ms": prober.before.tpot_ms,
        "max_drift": max(row["probe_tpot_ratio"] for row in rows),
        "compile_seconds": llm.ledger.seconds,
        "recompiles_after_warmup": recompiles,
    }
    result = run.result(
        metrics=metrics,
        cases=rows,
        engine=llm,
        hardware=run.hardware,
        rounds=snapshots,
        probes={log.name: log.drift for log in logs},
        faults=faults,
    )
    return run.finish(result)


def check_stress(result: Mapping[str, Any]) -> None:
    """Raises `StressError` with the first fault where there is any."""
    faults = [f"{row['phase']}: {fault}" for row in result["cases"] for fault in row["faults"]]
    faults += result["faults"]
    if faults:
        more = f" (and {len(faults) - 1} more in result.json)" if len(faults) > 1 else ""
        raise StressError(f"stress: {faults[0]}{more}")


def _rounds(prober: Prober, logs: Sequence[PhaseLog]) -> list[Snapshot]:
    section, snapshots = prober.section, []
    with progress("stress", total=section.rounds * len(logs)) as task:
        for number in range(section.rounds):
            for place, log in enumerate(logs):
                task.describe(f"round {number + 1}: {log.name}")
                _phase(prober, log, np.random.default_rng([section.seed, number, place]))
                task.advance()
            snapshots.append(snapshot(prober.llm))
    return snapshots


def _phase(prober: Prober, log: PhaseLog, rng: np.random.Generator) -> None:
    """A phase, and the checks after it."""
    llm = prober.llm
    llm.reset_stats()
    start = time.perf_counter()
    RUN[log.name](Load(llm, prober.section, rng, log.counts))
    log.seconds += time.perf_counter() - start
    stats = llm.stats()
    log.preemptions += stats["preemptions"]
    log.max_running = max(log.max_running, stats["max_running"])
    log.max_waiting = max(log.max_waiting, stats["max_waiting"])
    log.cache_use_peak = max(log.cache_use_peak, stats["max_used_blocks"] / stats["num_blocks"])
    log.faults += idle_faults(llm)
    if log.counts.unfinished:
        log.faults.append(f"{log.counts.unfinished} requests did not end")
    after, faults = prober.check()
    log.drift.append(prober.drift(after))
    log.faults += faults
