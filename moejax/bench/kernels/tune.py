"""mode=tune: searches each spec's space of configurations and keeps the winners in the user's tables.

space (spread over `tune.max_configs`) → static report, which drops what does not compile or spills
→ timed on the device if the result is right → table.
"""

import importlib.metadata
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax

from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.kernels.baselines import configured
from moejax.bench.kernels.bench import require_gpu, try_variants
from moejax.bench.kernels.config import KernelSelection
from moejax.bench.kernels.row import Row, failures
from moejax.bench.kernels.select import Selected, select
from moejax.bench.kernels.static import check_compilers, compile_all, questions
from moejax.bench.kernels.worker import Asked
from moejax.core.errors import ConfigError
from moejax.report.progress import progress
from moejax.results.result import Result
from pallas_kernels.op import Implementation, Op, Spec
from pallas_kernels.tuned import Entry, add_entries, device_key, measured_tables

logger = logging.getLogger(__name__)

_TARGET = {"a100": "sm_80", "h100": "sm_90", "h200": "sm_90"}
Report = list[tuple[Any, list[Row]]]
"""Configurations of a spec, each with its rows."""


def run_tune(config: KernelSelection, run: ExperimentRun) -> Result:
    """Runs mode=tune and finishes `run`; `cases` has a row per spec with its winner.

    Raises:
        DeviceError: JAX has no CUDA device.
        ConfigError: an unknown name, an untunable device, or no compiler is installed.
    """
    selected = select(config.ops, config.implementations, config.specs)
    require_gpu("tune")
    device = device_key()
    if device not in _TARGET:
        raise ConfigError(f"mode=tune knows {', '.join(_TARGET)}, and this is {device!r}")
    data = Path(config.tune.data_dir) if config.tune.data_dir else measured_tables()
    rows: list[dict[str, Any]] = []
    check_compilers(selected)
    run.start(variant="tune")
    reports = _reports(selected, config, _TARGET[device])
    with progress("tuning", total=len(reports)) as task:
        for item in selected:
            entries = []
            specs = {spec.name: spec for spec in item.specs}
            for (op, name, spec), report in reports.items():
                if op != item.op.name:
                    continue
                task.describe(f"tuning {op} {name} {spec}")
                winner = tune_spec(item.op, name, specs[spec], report, config, device)
                task.advance()
                if winner is not None:
                    entry, row = winner
                    entries.append(entry)
                    rows.append(row)
            add_entries(
                data,
                device,
                item.op.name,
                entries,
                jax=jax.__version__,
                jaxlib=importlib.metadata.version("jaxlib"),
                date=run.provenance["time_utc"][:10],
                commit=(run.provenance.get("git") or {}).get("commit"),
            )
    metrics = {"specs": len(rows), "compiled": sum(map(len, reports.values()))}
    result = run.result(metrics=metrics, cases=rows)
    return run.finish(result, tables={"kernel_table": result["cases"]})


def tune_spec(
    op: Op,
    name: str,
    spec: Spec,
    reports: Report,
    config: KernelSelection,
    device: str,
) -> tuple[Entry, dict[str, Any]] | None:
    """The winner for one spec and a row about it, by the static reports on its configurations; None if none
    is right."""
    kind = op.implementations[name]
    sound = [
        (c, rows)
        for c, rows in reports
        if rows and not failures(rows) and all(row.blocks_per_sm for row in rows)
    ]
    if not sound:
        logger.warning("%s %s %s: none of %d configurations is sound", op.name, name, spec.name, len(reports))
        return None
    heuristic = next((i for i, (c, _) in enumerate(sound) if c == kind.heuristic(spec.problem)), None)
    micros = _time(op, name, spec, [c for c, _ in sound], config.bench.repeats)
    best = min(range(len(sound)), key=lambda i: micros[i])
    if math.isinf(micros[best]):
        logger.warning("%s %s %s: no configuration runs and is right", op.name, name, spec.name)
        return None
    entry = Entry(name, dict(spec.problem), asdict(sound[best][0]), micros[best])
    row = {
        "op": op.name,
        "implementation": name,
        "spec": spec.name,
        "device": device,
        "tried": len(reports),
        "sound": len(sound),
        "config": entry.config,
        "is_heuristic": best == heuristic,
        "us": micros[best],
        "heuristic_us": None if heuristic is None else micros[heuristic],
    }
    return entry, row


def candidates(kind: Implementation, spec: Spec, most: int) -> list[Any]:
    """The heuristic's configuration and others, evenly from the space."""
    first = kind.heuristic(spec.problem)
    others = [c for c in kind.space(spec.problem) if c != first]
    step = max(1.0, len(others) / max(most - 1, 1))
    return [first, *(others[int(i * step)] for i in range(min(most - 1, len(others))))]


def _reports(
    selected: Sequence[Selected], config: KernelSelection, target: str
) -> dict[tuple[str, str, str], Report]:
    """Returns the static reports on what is tried, by the names of operation, implementation and spec."""
    tried, reports = list[tuple[tuple[str, str, str], Asked]](), dict[tuple[str, str, str], Report]()
    for item in selected:
        specs = {spec.name: spec for spec in item.specs}
        for one in questions(item, [target]):
            kind, spec = item.op.implementations[one.implementation], specs[one.spec]
            for choice in candidates(kind, spec, config.tune.max_configs):
                key = item.op.name, one.implementation, one.spec
                tried.append((key, one._replace(config=choice)))
    rows = compile_all([one for _, one in tried], config.workers)
    for (key, one), compiled in zip(tried, rows, strict=True):
        reports.setdefault(key, []).append((one.config, compiled))
    return reports


def _time(op: Op, name: str, spec: Spec, configs: Sequence[Any], repeats: int) -> list[float]:
    """Median microseconds of each configuration, in turn; infinite where it does not run or is wrong."""
    chosen = [configured(op, spec, name, config, label=str(i)) for i, config in enumerate(configs)]
    micros = []
    for config, (timed, facts) in zip(configs, try_variants(op, spec, chosen, repeats), strict=True):
        micros.append(timed.median_us if timed is not None else math.inf)
        if timed is None:
            logger.warning("%s %s %s dropped: %s", op.name, spec.name, asdict(config), facts["error"])
    return micros
