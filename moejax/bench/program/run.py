"""The program experiment: the engine's own steps, compiled for a GPU that is not here.

open:     the whole model's engine on the target's devices, without values (a process of its own)
compile:  each bucket with two small numbers of layers, side by side
report:   rows extrapolated by layer, program.json, plots, result.json, tracker, table
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.program.compiler import OPTIONS, describe, device_name, plugin_folder
from moejax.bench.program.config import MODES, ProgramSection
from moejax.bench.program.gate import (
    FAULTS,
    ProgramGateError,
    baseline_file,
    baseline_of,
    exceeded,
    find_baseline,
    is_comparable,
    read_baseline,
    write_baseline,
)
from moejax.bench.program.job import Bucket, Compiled, Job, compile_job
from moejax.bench.program.process import Target
from moejax.bench.program.rows import detail_of, grouped_rows, row_of, stage_counts
from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError
from moejax.core.files import atomic_write_text, dump_json, ensure_writable
from moejax.core.hardware import get_hardware
from moejax.core.resolve import as_dict
from moejax.report.progress import progress
from moejax.results.metrics import is_number
from moejax.results.result import Result

PROGRAM_FILE = "program.json"
NOTES = (
    "without a GPU XLA's autotuning is off: products of XLA's own have default tiles and split-K, and none is"
    " cuBLAS's or cuDNN's",
    "registers and spills are those of the ptxas that was found; modelled: nothing was timed",
)
_TABLES: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "operations": (("operation",), ("launches", "passed_bytes")),
    "collectives": (("kind", "operation", "read_bytes"), ("launches", "overlapped", "beside", "independent")),
}
_DEVICES = (1, 2, 4, 8)
_ZEROS = (*FAULTS, "launches_outside", "host_syncs")


def run_program(config: Any, run: ExperimentRun) -> Result:
    """Runs the experiment and finishes `run`; `cases` has a row a bucket.

    Args:
        config: `target` ("a100", "h100", or a file with a device's description) and the sections `program`,
            `model`, `parallel`, `engine`, `quant`, as `experiments.launch.schema.ProgramConfig` has them.

    Raises:
        ConfigError: no compiler is installed, an unknown target, a layout of other numbers of devices,
            steps beyond the engine's limits, what the engine refuses on the target.
        CompileError: the compiler fails, or says what this version cannot read.
        ProgramGateError: a program exceeds the gate.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    folder, description = plugin_folder(), describe(config.target)
    model, engine, section = config.model, config.engine, config.program
    device, devices = device_name(description), config.parallel.num_devices
    if devices not in _DEVICES:
        raise ConfigError(
            f"parallel: programs are compiled for {', '.join(map(str, _DEVICES))} devices; this layout has"
            f" {devices}"
        )
    hardware = get_hardware(run.hardware_kind, device)
    buckets = _buckets(section, engine)
    file = baseline_file(section.gate, run.config) if section.gate else None
    baseline = None
    if file and section.update_baseline:
        ensure_writable(file.parent)
        find_baseline(file)  # a corrupt one is said before anything is compiled
    elif file:
        names = [name for bucket in buckets for name in bucket.program_names(config.parallel.pp)]
        baseline = read_baseline(file, names)
    blocks, cache = engine.num_blocks, {}
    if blocks is None:
        blocks = engine.max_num_seqs * -(-section.context_len // engine.block_size)
        why = "engine.max_num_seqs sequences of program.context_len tokens"
        cache = {"engine.num_blocks": {"value": str(blocks), "reason": why}}
    options = {
        "dtype": model.dtype, "parallel": config.parallel, "quant": config.quant, "seed": config.seed,
        "engine": replace(engine, compile_cache=False, num_blocks=blocks),
    }  # fmt: skip
    dumps = run.out_dir.absolute() / "dumps" if section.keep_dumps else None
    job = Job(
        Target(folder, description, devices), model.source, model.load_format, options,
        MODES[section.sampler], dumps, layers=section.layers,
    )  # fmt: skip
    with progress("opening the model for the target", total=1) as task:
        opened, _ = compile_job(job)
        task.advance()
    run.start(seeds={"engine": config.seed})
    depths = (section.layers,) if section.layers else stage_counts(opened.config, opened.stages)
    jobs = [replace(job, buckets=buckets, layers=depth) for depth in depths]
    with progress("compiling", total=len(buckets) * len(jobs)) as task, ThreadPoolExecutor(len(jobs)) as pool:
        by_depth = [compiled for _, compiled in pool.map(lambda job: compile_job(job, task.advance), jobs)]
    programs: list[Sequence[Compiled]] = list(zip(*by_depth, strict=True))
    memory = int(re.findall(r"device_memory_size:\s*(\d+)", description)[0])
    rows = [row_of(one, opened, section, hardware if devices == 1 else None) for one in programs]
    for row in rows:
        row |= {"num_devices": devices, "fits": row["peak_bytes"] <= memory}
    tables = {name: [row for x in programs for row in grouped_rows(x, *of)] for name, of in _TABLES.items()}
    tables["kernels"] = kernels = [row for one in programs for row in _kernels(one[-1])]
    details = [detail_of(one[-1]) for one in programs]
    wrong = exceeded(rows, kernels, baseline) if file else []
    notes = list(NOTES)
    if baseline and not is_comparable(baseline):
        notes.append(f"{file} is jaxlib {baseline['jaxlib']}'s: only spills and copies are checked")
    result = run.result(
        metrics=_metrics(rows),
        cases=rows,
        hardware=hardware,
        target={"device": device, "devices": devices, "memory": memory, "options": OPTIONS},
        operations=tables["operations"],
        collectives=tables["collectives"],
        kernels=kernels,
        notes=notes,
        gate={"baseline": str(file) if file else None, "exceeded": wrong},
        resolved=as_dict(opened.resolutions) | cache,
    )
    files = []
    with run.parts.part(PROGRAM_FILE):
        text = dump_json({"schema": 1, "programs": details}, indent=1)
        files.append(atomic_write_text(run.out_dir / PROGRAM_FILE, text + "\n"))
    finished = run.finish(result, files=files, plot_data={"programs": details}, tables=tables)
    if wrong:
        raise ProgramGateError(f"the gate fails in {len(wrong)} places; first: {wrong[0]}")
    if file and section.update_baseline:
        write_baseline(file, baseline_of(rows, kernels))
    return finished


def _buckets(section: ProgramSection, engine: EngineConfig) -> list[Bucket]:
    """Returns the steps that are asked for.

    Raises:
        ConfigError: one is beyond the engine's limits.
    """
    chunks = [Bucket(section.chunk_rows, tokens) for tokens in section.chunks]
    buckets = [*(Bucket(rows, 0) for rows in section.rows), *chunks]
    for bucket in buckets:
        if bucket.rows > engine.max_num_seqs or bucket.tokens > engine.max_num_batched_tokens:
            raise ConfigError(
                f"program: the step {bucket.name} is beyond engine.max_num_seqs={engine.max_num_seqs} or"
                f" engine.max_num_batched_tokens={engine.max_num_batched_tokens}; raise them"
            )
    return buckets


def _kernels(compiled: Compiled) -> list[dict[str, Any]]:
    """Returns a row for each kernel: its first launch, and how many it has in the program."""
    launches = [launch for launch in compiled.dump.launches if launch.blocks]
    first = {launch.kernel: launch for launch in reversed(launches)}
    counts = Counter(launch.kernel for launch in launches)
    return [
        {"bucket": compiled.name, **asdict(first[name]), "launches": counts[name]} for name in sorted(first)
    ]


def _metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the largest of all steps of the figures that should be 0, and all figures of an only step."""
    found = {name: [row[name] for row in rows if row[name] is not None] for name in _ZEROS}
    figures = {name: value for name, value in rows[0].items() if is_number(value)} if len(rows) == 1 else {}
    return {name: max(values, default=None) for name, values in found.items()} | figures
