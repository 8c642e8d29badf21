"""The program experiment: the engine's own steps, compiled for a GPU that is not here.

open:     the whole model's engine on the target's devices, without values (a process of its own)
compile:  each bucket with two small numbers of layers, side by side
report:   rows extrapolated by layer, program.json, plots, result.json, tracker, table
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.program.compiler import (
    DEVICE_COUNTS,
    OPTIONS,
    describe,
    device_name,
    kind_of,
    plugin_folder,
)
from moejax.bench.program.config import ProgramSection
from moejax.bench.program.job import Bucket, Compiled, Job, cache_blocks, run
from moejax.bench.program.rows import detail_of, layer_counts, least_bytes, operation_rows, row_of
from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError
from moejax.core.files import atomic_write_text, dump_json
from moejax.core.hardware import KNOWN
from moejax.core.parallel import ParallelConfig
from moejax.core.quant import QuantConfig
from moejax.core.resolve import as_dict
from moejax.report.progress import progress
from moejax.results.result import Result

PROGRAM_FILE = "program.json"
NOTES = (
    "compiled without a GPU: XLA's autotuning is off, so that products of XLA's own have default tiles and"
    " split-K, and none is cuBLAS's or cuDNN's by measurement",
    "registers and spills are those of the ptxas that was found",
    "modelled: nothing was timed",
)


def run_program(
    target: str,
    model: Any,
    section: ProgramSection,
    parallel: ParallelConfig,
    engine: EngineConfig,
    quant: QuantConfig,
    seed: int,
    runner: ExperimentRun,
) -> Result:
    """Runs the experiment and finishes `runner`; `cases` has a row a bucket.

    Args:
        target: "a100", "h100", or a file with a device's description.
        model: the section `model`: source, load_format, dtype.

    Raises:
        ConfigError: no compiler is installed, an unknown target, a layout of other numbers of devices or with
            stages, buckets beyond the engine's limits, what the engine refuses on the target.
        CompileError: the compiler fails, or says what this version cannot read.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    folder, description = plugin_folder(), describe(target)
    buckets = _buckets(section, engine)
    if parallel.num_devices not in DEVICE_COUNTS or parallel.pp > 1:
        raise ConfigError(
            f"parallel: the program is compiled for {', '.join(map(str, DEVICE_COUNTS))} devices of one node,"
            f" without pipeline stages; this layout has {parallel.num_devices}, pp={parallel.pp}"
        )
    kind = kind_of(description) if runner.hardware_kind == "auto" else runner.hardware_kind
    if kind is not None and kind not in KNOWN:
        raise ConfigError(f"hardware.kind: unknown device {kind!r} (known: auto, {', '.join(KNOWN)})")
    hardware = KNOWN[kind] if kind is not None and KNOWN[kind].bandwidth is not None else None
    job = Job(
        folder, description, model.source, model.load_format, model.dtype, engine, parallel, quant, seed, (),
        section.layers, section.context_len, section.sampler,
        runner.out_dir / "dumps" if section.keep_dumps else None,
    )  # fmt: skip
    with progress("opening the model for the target", total=1) as task:
        opened, _ = run(job)
        task.advance()
    runner.start(seeds={"engine": seed})
    counts = (section.layers,) if section.layers else layer_counts(opened.config)
    jobs = [dataclasses.replace(job, buckets=buckets, layers=count) for count in counts]
    with progress("compiling", total=len(buckets) * len(jobs)) as task, ThreadPoolExecutor(len(jobs)) as pool:
        by_depth = [done for _, done in pool.map(lambda job: run(job, task.advance), jobs)]
    programs: list[Sequence[Compiled]] = list(zip(*by_depth, strict=True))
    size = re.search(r"device_memory_size:\s*(\d+)", description)
    memory = float(size[1]) if size else None
    rows = [
        row_of(compiled, opened, section, hardware, parallel.num_devices, memory)
        | {"least_bytes": least_bytes(opened, compiled[-1].bucket, section.context_len)}
        for compiled in programs
    ]
    operations = [row for one in programs for row in operation_rows(one, opened.config.num_layers)]
    details = [detail_of(one[-1]) for one in programs]
    result = runner.result(
        metrics=_metrics(rows),
        cases=rows,
        hardware=hardware,
        target={
            "name": target, "device": device_name(description), "devices": parallel.num_devices,
            "memory": memory, "options": {name: str(value) for name, value in OPTIONS.items()},
        },
        operations=operations,
        kernels=_kernels(programs),
        notes=NOTES,
        resolved=as_dict(opened.resolutions) | _cache_size(section, engine),
    )  # fmt: skip
    files = []
    with runner.parts.part(PROGRAM_FILE):
        text = dump_json({"schema": 1, "programs": details}, indent=1)
        files.append(atomic_write_text(runner.out_dir / PROGRAM_FILE, text + "\n"))
    tables = {"operations": operations, "kernels": result["kernels"]}
    return runner.finish(result, files=files, plot_data={"programs": details}, tables=tables)


def _buckets(section: ProgramSection, engine: EngineConfig) -> list[Bucket]:
    """Returns the steps that are asked for.

    Raises:
        ConfigError: one is beyond the engine's limits.
    """
    chunks = [Bucket(section.chunk_rows, tokens) for tokens in section.chunks]
    buckets = [*(Bucket(rows) for rows in section.rows), *chunks]
    for bucket in buckets:
        if bucket.rows > engine.max_num_seqs or bucket.tokens > engine.max_num_batched_tokens:
            raise ConfigError(
                f"program: the step {bucket.name} is beyond engine.max_num_seqs={engine.max_num_seqs} or"
                f" engine.max_num_batched_tokens={engine.max_num_batched_tokens}; raise them"
            )
    return buckets


def _cache_size(section: ProgramSection, engine: EngineConfig) -> dict[str, dict[str, str]]:
    """Returns why the cache has as many blocks as it has, where the configuration leaves it open."""
    if engine.num_blocks is not None or engine.kv_cache_memory_gb is not None:
        return {}
    reason = "engine.max_num_seqs sequences of program.context_len tokens"
    return {"engine.num_blocks": {"value": str(cache_blocks(engine, section.context_len)), "reason": reason}}


def _kernels(programs: Sequence[Sequence[Compiled]]) -> list[dict[str, Any]]:
    """Returns a row for each kernel of each bucket's larger program, with the launches and place of it."""
    rows = []
    for compiled in programs:
        launches = compiled[-1].dump.launches
        for kernel in compiled[-1].dump.kernels:
            mine = [launch for launch in launches if launch.kernel == kernel.name]
            first = dataclasses.asdict(mine[0])
            about = {name: first[name] for name in ("operation", "blocks", "threads", "shared")}
            moved = {name: first[name] for name in ("read_bytes", "written_bytes")}
            rows.append(
                {"bucket": compiled[-1].bucket.name, **dataclasses.asdict(kernel), **about, **moved,
                 "launches": len(mine)}
            )  # fmt: skip
    return rows


def _metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the only row's figures, or of several the worst of those that should be none."""
    worst = ("kernels_with_spills", "copies_of_pool_bytes", "f32_weight_copy_bytes", "launches_outside",
             "host_syncs", "temp_bytes", "peak_bytes", "launches_per_layer", "launches_per_step")  # fmt: skip
    found = {name: [row[name] for row in rows if row[name] is not None] for name in worst}
    return {name: max(values) if values else None for name, values in found.items()} | {
        "steps_compiled": len(rows)
    }
