"""mode=static: registers, spills, shared memory and instructions of every kernel, without a GPU.

select → compile in a process a target → compare with the committed reports → table, result.json, tracker; an
error at the end if the gate does not hold, after everything has been written.
"""

import functools
import importlib.util
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.kernels.config import KernelSelection
from moejax.bench.kernels.occupancy import TARGETS
from moejax.bench.kernels.row import Row, failures
from moejax.bench.kernels.select import Selected, select
from moejax.bench.kernels.worker import Asked
from moejax.bench.program.compiler import describe, plugin_folder
from moejax.bench.program.process import Target, ask
from moejax.core.checked import Among, check
from moejax.core.errors import CompileError, ConfigError, MoejaxError, unknown
from moejax.core.files import atomic_write_text, dump_json, ensure_writable
from moejax.core.hardware import KNOWN
from moejax.core.words import cut, one_line
from moejax.report.progress import progress
from moejax.results.result import Result, build_result
from pallas_kernels.registry import load_op


class KernelGateError(MoejaxError, RuntimeError):
    """The static gate does not hold; the results have been written."""


def run_static(config: KernelSelection, run: ExperimentRun) -> Result:
    """Runs mode=static and finishes `run`; `cases` has a row per kernel, spec and target.

    Raises:
        ConfigError: an unknown name, no compiler is installed, or a committed report is none.
        KernelGateError: a default configuration fails the gate or has grown against the committed report.
    """
    selected = select(config.ops, config.implementations, config.specs)
    check_compilers(selected)
    asked = [one for item in selected for one in questions(item, config.targets)]
    baselines, ops = Path(config.baseline_dir), [item.op.name for item in selected]
    before = {} if config.update_baseline else read_baselines(baselines, ops)
    if config.update_baseline:
        ensure_writable(baselines)
    run.start(variant="static")
    rows = list(itertools.chain(*compile_all(asked, config.workers)))
    grown, notes = compare_with_baseline(rows, before)
    wrong = failures(rows)
    result = run.result(**_content(rows, wrong, grown, notes))
    run.finish(result, tables={"kernel_table": result["cases"]})  # "kernels" is a metric: their number
    if config.update_baseline:
        write_baseline(rows, baselines)
    if wrong or grown:
        first = (wrong + grown)[0]
        raise KernelGateError(f"the static gate failed in {len(wrong) + len(grown)} places; first: {first}")
    return result


def questions(item: Selected, targets: Iterable[str]) -> list[Asked]:
    """Returns what there is to compile of an operation with its default configurations."""
    return [
        Asked(functools.partial(load_op, item.op.name), name, spec.name, target)
        for name in item.implementations
        for spec in item.specs
        if item.op.implementations[name].supports(spec.problem) is None
        for target in targets
    ]


def check_compilers(selected: Iterable[Selected]) -> None:
    """Checks that what compiles these is there.

    Raises:
        ConfigError: XLA's GPU compiler is not installed, or the Triton wheel, which compiles `@triton.jit`
            twins.
    """
    twins = any(item.op.implementations[name].sources for item in selected for name in item.implementations)
    if twins and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "@triton.jit kernels are compiled by the Triton wheel: pip install 'moejax[static]' (Linux), or"
            " leave them out by implementations=[pallas_triton]"
        )
    plugin_folder()


def compile_all(asked: Sequence[Asked], workers: int) -> list[list[Row]]:
    """Returns the rows of each, compiled in so many processes side by side, at least one for each target. A
    compiler that dies gives a row with an error.

    Raises:
        ConfigError: XLA's GPU compiler is not installed.
        CompileError: a process dies before it begins.
    """
    folder, rows = plugin_folder(), dict[int, list[Row]]()
    targets = {one.target for one in asked}
    each = max(1, workers // len(targets))
    shares = [
        [i for i, one in enumerate(asked) if one.target == target][start::each]
        for target in sorted(targets) for start in range(each)
    ]  # fmt: skip
    with progress("compiling kernels", total=len(asked)) as task, ThreadPoolExecutor(workers) as pool:

        def compile_share(left: list[int]) -> None:
            while left:
                target = TARGETS[asked[left[0]].target].device
                devices, began = Target(folder, describe(target)), False
                try:
                    for answer in ask("moejax.bench.kernels.worker", devices, [asked[i] for i in left]):
                        if began:
                            rows[left.pop(0)] = answer
                            task.advance()
                        began = True
                except CompileError as error:
                    if not began:
                        raise
                    died = asked[place := left.pop(0)]
                    name, said = died.load().name, cut(one_line(error), 400)
                    rows[place] = [Row(name, died.implementation, died.spec, died.target, error=said)]

        list(pool.map(compile_share, shares))
    return [rows[i] for i in range(len(asked))]


def _content(
    rows: Sequence[Row], wrong: Sequence[str], grown: Sequence[str], notes: Sequence[str]
) -> dict[str, Any]:
    """Returns the keys of a static report's result."""
    return {
        "metrics": static_metrics(rows, wrong, grown), "cases": [case(row) for row in rows],
        "failures": wrong, "grown": grown, "notes": notes,
    }  # fmt: skip


def roofline_us(row: Row) -> float | None:
    """Least microseconds that the spec's bytes and operations allow on the target's device."""
    hardware = KNOWN[TARGETS[row.target].hardware]
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
        "roofline_device": TARGETS[row.target].hardware,
    }


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(row[name] for name in ("op", "implementation", "spec", "target", "kernel"))


_GROWTH = ("registers", "spill_stores", "spill_loads", "shared")


def compare_with_baseline(
    rows: Iterable[Row], before: Mapping[tuple[str, ...], Mapping[str, Any]]
) -> tuple[list[str], list[str]]:
    """Returns a line for each figure above the one before, of rows by the same compiler, and a line if some
    are by another: its figures are others, and then there is nothing to compare with."""
    grown, others = [], Counter[str]()
    for row in rows:
        old = before.get(_key(asdict(row)))
        if old is None or row.error:
            continue
        if old["compiler"] != row.compiler:
            others[old["compiler"]] += 1
            continue
        for name in _GROWTH:
            if (value := getattr(row, name)) is not None and value > old[name]:
                grown.append(f"{row.where}: {name} grew from {old[name]} to {value}")
    by = ", ".join(f"{count} by {compiler}" for compiler, count in others.items())
    notes = [f"committed figures are by another compiler, so only faults are checked: {by}"] if others else []
    return grown, notes


def read_baselines(folder: Path, ops: Iterable[str]) -> dict[tuple[str, ...], dict[str, Any]]:
    """Returns the committed rows of operations by what they are of; of an operation without a file there are
    none.

    Raises:
        ConfigError: a file is no static report.
    """
    files = [file for op in ops if (file := folder / f"{op}.json").exists()]
    return {_key(row): row for row in map(asdict, itertools.chain(*map(_read, files)))}


def _read(file: Path) -> list[Row]:
    try:
        return [Row(**row) for row in json.loads(file.read_text())["rows"]]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{file} is no static report of kernels: {one_line(error)}; update_baseline=true writes it"
        ) from error


def write_baseline(rows: Iterable[Row], folder: Path) -> None:
    """Writes `<op>.json` for each operation of the rows."""
    by_op: dict[str, list[Row]] = {}
    for row in rows:
        by_op.setdefault(row.op, []).append(row)
    for op, op_rows in by_op.items():
        lines = ",\n".join(dump_json(asdict(row)) for row in op_rows)
        atomic_write_text(folder / f"{op}.json", '{"rows": [\n' + lines + "\n]}\n")


def static_metrics(rows: Sequence[Row], wrong: Sequence[str], grown: Sequence[str]) -> dict[str, Any]:
    """Extremes, by target."""
    metrics: dict[str, Any] = {"kernels": len(rows), "failures": len(wrong), "grown": len(grown)}
    for target in dict.fromkeys(row.target for row in rows):
        sound = [row for row in rows if row.target == target and not row.error]
        if sound:
            metrics |= {
                f"{target}_max_registers": max(row.registers or 0 for row in sound),
                f"{target}_max_shared": max(row.shared for row in sound),
                f"{target}_max_spill": max(row.spill_stores + row.spill_loads for row in sound),
                f"{target}_min_occupancy": min(row.occupancy for row in sound),
            }
    return metrics


def committed_report(
    ops: str | Sequence[str] = (),
    specs: str | Sequence[str] = (),
    targets: str | Sequence[str] = tuple(TARGETS),
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
    rows = list(itertools.chain(*map(_read, [files[op] for op in ops or files])))
    for target in targets:
        check("targets", target, Annotated[str, Among(TARGETS)])
    rows = [row for row in rows if row.target in targets]
    rows = [row for row in rows if not specs or any(part in row.spec for part in specs)]
    if not rows:
        raise ConfigError(f"no spec of {', '.join(ops or files)} has a name with {' or '.join(specs)}")
    content = _content(rows, failures(rows), [], [])
    return build_result("kernels", config={"mode": "static"}, provenance={}, **content)
