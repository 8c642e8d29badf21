"""mode=static: registers, spills, shared memory and instructions of every kernel, without a GPU.

select → compile in subprocesses → compare with the committed reports → table, result.json, tracker; an error
at the end if the gate does not hold, after everything has been written.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import jax

from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.kernels.config import TARGETS, KernelSelection
from moejax.bench.kernels.select import Selected, select
from moejax.core.checked import Among, check
from moejax.core.errors import ConfigError, MoejaxError, unknown
from moejax.core.files import atomic_write_text, cache_root, dump_json, ensure_writable
from moejax.core.hardware import KNOWN
from moejax.report.progress import progress
from moejax.results.result import Result, build_result
from pallas_kernels.static import Row, failures, report_op
from pallas_kernels.static.compiler import Compiler

DEVICE = {"sm_80": "a100_80gb", "sm_90": "h100"}
"""The device whose peaks bound a target's kernels."""


class KernelGateError(MoejaxError, RuntimeError):
    """The static gate does not hold; the results have been written."""


def run_static(config: KernelSelection, run: ExperimentRun) -> Result:
    """Runs mode=static and finishes `run`; `cases` has a row per kernel, spec and target.

    Raises:
        ConfigError: an unknown name, or the Triton wheel is missing.
        KernelGateError: a default configuration fails the gate or has grown against the committed report.
    """
    selected = select(config.ops, config.implementations, config.specs)
    baselines = Path(config.baseline_dir)
    if config.update_baseline:
        ensure_writable(baselines)
    run.start(variant="static")
    rows, about = compile_all(selected, config)
    grown = compare_with_baseline(rows, about, baselines)
    wrong = failures(rows)
    result = run.result(**_content(rows, about, wrong, grown))
    run.finish(result, tables={"kernel_table": result["cases"]})  # "kernels" is a metric: their number
    if config.update_baseline:
        write_baseline(rows, about, baselines)
    if wrong or (grown and not config.update_baseline):
        first = (wrong + grown)[0]
        raise KernelGateError(f"the static gate failed in {len(wrong) + len(grown)} places; first: {first}")
    return result


def _content(
    rows: Sequence[Row], about: Mapping[str, str], wrong: Sequence[str], grown: Sequence[str]
) -> dict[str, Any]:
    """Returns the keys of a static report's result."""
    cases = [case(row) for row in rows]
    metrics = static_metrics(rows, wrong, grown)
    return {"metrics": metrics, "cases": cases, "compiler": about, "failures": wrong, "grown": grown}


def compile_all(selected: Sequence[Selected], config: KernelSelection) -> tuple[list[Row], dict[str, str]]:
    """Rows of everything selected, and the versions that made them.

    Raises:
        ConfigError: the Triton wheel is missing.
    """
    rows: list[Row] = []
    with open_compiler(config) as compiler, progress("compiling kernels", total=len(selected)) as task:
        for item in selected:
            task.describe(f"compiling {item.op.name}")
            rows += report_op(item.op, compiler, targets=config.targets, select=item.wanted)
            task.advance()
    return rows, {"jax": jax.__version__, "triton": compiler.version}


def open_compiler(config: KernelSelection) -> Compiler:
    """Returns the compiler with its workers and its folder of compiled results.

    Raises:
        ConfigError: the Triton wheel is missing.
    """
    try:
        return Compiler(config.workers, cache_folder(config.cache_dir))
    except ModuleNotFoundError as error:
        raise ConfigError(f"mode={config.mode} compiles kernels: {error}") from error


def cache_folder(asked: str | None) -> Path | None:
    """Returns where compiled results are kept: None for nowhere."""
    if asked == "none":
        return None
    return Path(asked) if asked else cache_root() / "kernels"


def roofline_us(row: Row) -> float | None:
    """Least microseconds that the spec's bytes and operations allow on the target's device."""
    hardware = KNOWN[DEVICE[row.target]]
    peak = hardware.flops.get(row.unit)
    if peak is None or hardware.bandwidth is None:
        return None
    return 1e6 * max(row.bytes / hardware.bandwidth, row.flops / peak)


def case(row: Row) -> dict[str, Any]:
    """A row of the result."""
    return {
        **asdict(row),
        "config": json.dumps(row.config),
        "grid": "x".join(map(str, row.grid)),
        "roofline_us": roofline_us(row),
        "roofline_device": DEVICE[row.target],
    }


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("op", "implementation", "spec", "target", "kernel"))


_GROWTH = ("registers", "spill_stores", "spill_loads", "shared")


def compare_with_baseline(rows: Iterable[Row], about: Mapping[str, str], folder: Path) -> list[str]:
    """Lines for kernels that take more than the committed report says, made with the same versions.

    Another JAX or Triton gives other figures: then there is nothing to compare with.
    """
    grown = []
    baselines: dict[str, dict[tuple[str, ...], Any]] = {}
    for row in rows:
        if row.op not in baselines:
            baselines[row.op] = _read_baseline(folder / f"{row.op}.json", about)
        before = baselines[row.op].get(_key(asdict(row)))
        if before is None or row.error:
            continue
        for name in _GROWTH:
            if getattr(row, name) > before[name]:
                where = f"{row.op} {row.implementation} {row.spec} {row.target} {row.kernel}"
                grown.append(f"{where}: {name} grew from {before[name]} to {getattr(row, name)}")
    return grown


def _read_baseline(path: Path, about: Mapping[str, str]) -> dict[tuple[str, ...], Any]:
    if not path.exists():
        return {}
    content = json.loads(path.read_text())
    if any(content[name] != about[name] for name in ("jax", "triton")):
        return {}
    return {_key(row): row for row in content["rows"]}


def write_baseline(rows: Iterable[Row], about: Mapping[str, str], folder: Path) -> None:
    """Writes `<op>.json` for each operation of the rows."""
    by_op: dict[str, list[Row]] = {}
    for row in rows:
        by_op.setdefault(row.op, []).append(row)
    for op, op_rows in by_op.items():
        lines = ",\n".join(dump_json(asdict(row)) for row in op_rows)
        head = "".join(f'"{name}": "{value}",\n' for name, value in about.items())
        atomic_write_text(folder / f"{op}.json", "{" + head + '"rows": [\n' + lines + "\n]}\n")


def static_metrics(rows: Sequence[Row], wrong: Sequence[str], grown: Sequence[str]) -> dict[str, Any]:
    """Extremes, by target."""
    metrics: dict[str, Any] = {"kernels": len(rows), "failures": len(wrong), "grown": len(grown)}
    for target in dict.fromkeys(row.target for row in rows):
        sound = [row for row in rows if row.target == target and not row.error]
        if sound:
            metrics |= {
                f"{target}_max_registers": max(row.registers for row in sound),
                f"{target}_max_shared": max(row.shared for row in sound),
                f"{target}_max_spill": max(row.spill_stores + row.spill_loads for row in sound),
                f"{target}_min_occupancy": min(row.occupancy for row in sound),
            }
    return metrics


def committed_report(
    ops: str | Sequence[str] = (),
    specs: str | Sequence[str] = (),
    targets: str | Sequence[str] = TARGETS,
    folder: str | Path | None = None,
) -> Result:
    """Returns the committed reports of `python -m experiments.kernels mode=static` as its result. Nothing is
    compiled.

    Args:
        ops: operations by name; none takes all.
        specs: parts of specs' names, of which one must occur; none takes all.
        targets: "sm_80" is the A100, "sm_90" the H100.
        folder: of the reports; None: `results/static` of this checkout.

    Raises:
        ConfigError: there are no reports, a file is none, or a name occurs in none of them.
    """
    ops, specs, targets = ([part] if isinstance(part, str) else part for part in (ops, specs, targets))
    where = Path(folder) if folder else Path(__file__).resolve().parents[3] / "results" / "static"
    files = {file.stem: file for file in sorted(where.glob("*.json"))}
    if not files:
        raise ConfigError(
            f"no static report in {where}; make static writes them in a checkout of the repository"
        )
    for op in ops:
        if op not in files:
            raise ConfigError(unknown("operation", op, files))
    rows, about = [], {}
    for file in [files[op] for op in ops or files]:
        try:
            content = json.loads(file.read_text())
            about = {name: content[name] for name in ("jax", "triton")}
            rows += [Row(**row) for row in content["rows"]]
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{file} is no static report of kernels: {error}") from error
    for target in targets:
        check("targets", target, Annotated[str, Among(TARGETS)])
    rows = [row for row in rows if row.target in targets]
    rows = [row for row in rows if not specs or any(part in row.spec for part in specs)]
    if not rows:
        raise ConfigError(f"no spec of {', '.join(ops or files)} has a name with {' or '.join(specs)}")
    content = _content(rows, about, failures(rows), [])
    return build_result("kernels", config={"mode": "static"}, provenance={}, **content)
