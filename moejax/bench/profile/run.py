"""The profile experiment: where a step's time goes, held against the least that each operation needs.

capture:   warm-up, expert hits, generations without and with `jax.profiler` (out_dir/trace)
attribute: every nanosecond of the traced steps to an operation, the host or the launching
report:    profile.json, result.json, plots, tracker, table
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import jax
import numpy as np

from moejax.bench.common.roofline import cost_breakdown
from moejax.bench.common.step_cost import EngineSteps
from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.profile.attribute import HOST, LAUNCH, UNKNOWN, PhaseTimes, attribute_trace
from moejax.bench.profile.capture import ProfiledRun, capture, check
from moejax.bench.profile.config import ProfileSection, ProfileWorkload
from moejax.bench.profile.trace import TraceError, read_trace
from moejax.core.errors import ConfigError
from moejax.core.files import atomic_write_text, dump_json
from moejax.core.hardware import Hardware
from moejax.engine.llm import LLM
from moejax.perf.operation_costs import OpCost, bounds
from moejax.results.result import Result

PROFILE_FILE = "profile.json"
REST = (LAUNCH, HOST, UNKNOWN)
_TRACKED = (
    "operation", "measured_ms", "bound_ms", "excess_ms", "share", "limit", "flops", "weight_bytes",
    "cache_bytes", "activation_bytes",
)  # fmt: skip


def run_profile(llm: LLM, workload: ProfileWorkload, section: ProfileSection, run: ExperimentRun) -> Result:
    """Runs the experiment and finishes `run`.

    Call `moejax.bench.profile.capture.name_compiled_programs` before `llm` is made.

    Returns:
        The content of `result.json`.

    Raises:
        ConfigError: an unknown device or one without known peaks, too long a workload, several devices;
            before anything runs.
        TraceError: the profiler gave nothing to read.
        OutputError, TrackingError: the results cannot be written or tracked.
    """
    check(llm, workload)
    _hardware(run, llm.config.dtype)
    run.start(
        seeds={"engine": llm.seed, "workload": workload.seed},
        checkpoint=llm.model_dir,
        workload=workload.as_latency().hash,
    )
    profiled = capture(llm, workload, run.out_dir / "trace")
    run.read_peaks()
    hardware = _hardware(run, llm.config.dtype)
    times = attribute_trace(read_trace(profiled.file), profiled.programs)
    phases = [
        _phase(phase, times[phase], profiled, ops, hardware, llm, section)
        for phase, ops in attribution(llm, workload, profiled.hits).items()
        if times[phase].units
    ]
    rows = [_row(phase, workload) for phase in phases]
    result = run.result(
        metrics=_metrics(rows, profiled, llm),
        cases=rows,
        engine=llm,
        hardware=hardware,
        roofline=[{k: v for k, v in phase.items() if k != "instructions"} for phase in phases],
    )
    detail = {"schema": 1, "trace": str(profiled.file.relative_to(run.out_dir)), "phases": phases}
    files = []
    with run.parts.part(PROFILE_FILE):
        files.append(atomic_write_text(run.out_dir / PROFILE_FILE, dump_json(detail, indent=2) + "\n"))
    operations = [
        {"phase": phase["phase"], **{name: row.get(name) for name in _TRACKED}}
        for phase in result["roofline"]
        for row in phase["operations"]
    ]
    return run.finish(result, files=files, tables={"operations": operations})


def attribution(
    llm: LLM, workload: ProfileWorkload, hits: Mapping[str, np.ndarray]
) -> dict[str, list[OpCost]]:
    """Returns the costs of the prompts' steps together, and of a mean decode step."""
    steps = EngineSteps(llm)
    return {
        "prefill": steps.prefill(workload.case, hits["prefill"]),
        "decode": steps.decode(workload.case, hits["decode"]),
    }


def _hardware(run: ExperimentRun, dtype: str) -> Hardware:
    """Raises ConfigError: a device that is not known, or without a peak for that dtype."""
    hardware, device = run.hardware, jax.devices()[0].device_kind
    if hardware is None:
        raise ConfigError(
            f"hardware.kind=auto does not know the device {device!r}, and without its peaks nothing bounds"
            " the operations; name the kind that it is most like, such as hardware=h100"
        )
    bounds([], hardware, dtype)  # raises where a peak is not known
    return hardware


def _phase(
    phase: str,
    times: PhaseTimes,
    profiled: ProfiledRun,
    ops: Sequence[OpCost],
    hardware: Hardware,
    llm: LLM,
    section: ProfileSection,
) -> dict[str, Any]:
    """Returns one phase's costs: of a mean decode step, or of all steps that one batch's prompts take."""
    dtype = llm.config.dtype
    prefilled = statistics.median(profiled.prefill_seconds)
    plain = prefilled if phase == "prefill" else _decode_seconds(profiled.plain)
    to_ms = 1 / times.units / 1e6
    measured = {name: spent * to_ms for name, spent in times.by_operation().items()}
    costs = cost_breakdown(
        ops, hardware, dtype, seconds=plain, kinds=section.compare,
        measured_ms={name: spent for name, spent in measured.items() if name not in REST},
    )  # fmt: skip
    costs["operations"] += _unforeseen(measured, costs["operations"])
    wall = times.wall * to_ms
    for row in costs["operations"]:
        row["share"] = row["measured_ms"] / wall
    ranked = sorted(times.instructions.items(), key=lambda item: -item[1])[: section.top]
    lines = {(p.key, name): line for p in profiled.programs for name, line in p.instructions.items()}
    return costs | {
        "units": times.units,
        "measured_units": times.measured,
        "steps_per_unit": times.steps / times.units,
        "measured_ms": wall,
        "plain_ms": plain * 1e3,
        **{f"{name}_ms": measured.get(name, 0.0) for name in REST},
        "inferred_ms": times.inferred * to_ms,
        "layers_ms": {str(layer): spent * to_ms for layer, spent in times.by_layer().items()},
        "instructions": [
            {
                "instruction": key[1],
                "opcode": lines[key].opcode if key in lines else None,
                "op_name": lines[key].op_name if key in lines else None,
                **times.places[key]._asdict(),
                "executions": times.executions[key] / times.units,
                "ms": spent * to_ms,
            }
            for key, spent in ranked
        ],
    }


def _unforeseen(measured: Mapping[str, float], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows for operations that took time and are in no cost breakdown, such as unpacking the inputs."""
    known = {row["operation"] for row in rows}
    return [
        {
            "operation": name, "flops": 0.0, "weight_bytes": 0.0, "cache_bytes": 0.0, "activation_bytes": 0.0,
            "intensity": None, "bound_ms": 0.0, "limit": None, "measured_ms": spent, "excess_ms": spent,
        }
        for name, spent in measured.items()
        if name not in known and name not in REST
    ]  # fmt: skip


def _decode_seconds(records: Sequence[Any]) -> float:
    """Median time of the steps that only decode."""
    seconds = [record.seconds for record in records if not record.prefill_tokens]
    if not seconds:
        raise TraceError("no decode step was measured; raise workload.output_len")
    return statistics.median(seconds)


def _row(phase: Mapping[str, Any], workload: ProfileWorkload) -> dict[str, Any]:
    """A phase's row in `cases`."""
    kept = (
        "phase", "units", "measured_units", "measured_ms", "plain_ms", "bound_ms", "in_turn_ms", "limit",
        "roofline_doubt",
    )  # fmt: skip
    shares = {f"{name}_percent": 100 * phase[f"{name}_ms"] / phase["measured_ms"] for name in REST}
    return {
        **asdict(workload.case),
        **{name: phase[name] for name in kept},
        **{f"{row['operation']}_ms": row["measured_ms"] for row in phase["operations"]},
        "mfu_percent": _percent(phase["mfu"]),
        "mbu_percent": _percent(phase["mbu"]),
        "roofline_percent": None if phase["roofline_doubt"] else 100 * phase["bound_ms"] / phase["plain_ms"],
        **shares,
    }


def _percent(part: float | None) -> float | None:
    return None if part is None else 100 * part


def _metrics(rows: Sequence[Mapping[str, Any]], profiled: ProfiledRun, llm: LLM) -> dict[str, Any]:
    """Returns the rows' figures: decode's by their plain names, prefill's after `prefill_`."""
    metrics: dict[str, Any] = {}
    for row in rows:
        prefix = "prefill_" if row["phase"] == "prefill" else ""
        metrics[f"{prefix}step_ms"] = row["plain_ms"]
        metrics[f"{prefix}profiled_step_ms"] = row["measured_ms"]
        metrics[f"{prefix}bound_ms"] = row["bound_ms"]
        metrics |= {f"{prefix}{name}": value for name, value in row.items() if name.endswith("_percent")}
    held: Counter[str] = Counter()
    for (_, operation), size in EngineSteps(llm).weights.items():
        of_all = llm.config.num_experts if operation.startswith("experts_") else 1
        held[f"{operation}_held_bytes"] += round(size * of_all)
    metrics |= held
    metrics["profiler_slowdown"] = _decode_seconds(profiled.traced) / _decode_seconds(profiled.plain)
    metrics["compile_seconds"] = llm.ledger.seconds
    metrics["recompiles_after_warmup"] = len(llm.ledger.recompiles)
    return metrics
