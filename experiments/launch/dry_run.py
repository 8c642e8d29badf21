"""`--dry-run`: checks a command line as its run would, and prints what that would do.

An experiment's `main` goes up to the place from which it would measure, with engines that have no values in
their weights: it finds the mistakes that a run finds before it measures. Nothing is written and no weight is
read; of the steps the largest is compiled, for the memory that it takes (`engine.memory_check`).
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from experiments.launch.compose import Plan
from experiments.launch.model import open_llm
from experiments.launch.notebook import call_main, with_overrides
from experiments.launch.schema import GenerateConfig, ServeConfig
from moejax.bench.experiment_run import DRY_RUN, DryRunEnds
from moejax.bench.ignored import ignored_settings
from moejax.bench.run_folder import run_files, taken
from moejax.bench.traffic import ThroughputWorkload
from moejax.bench.workload import WorkloadConfig, latency_cases
from moejax.core.files import shown_path
from moejax.core.host import HostConfig
from moejax.engine.llm import LLM
from moejax.engine.opening.memory import device_limit, is_here

_SECTIONS = ("workload", "ramp", "ab", "stress", "quantization", "scaling", "program", "generate", "serve",
             "routing_policies", "offload", "dashboard")  # fmt: skip
_COMMON = ("seed", "overwrite", "verbose", "objective", "objective_case")
_ROW_BYTES, _TOKEN_BYTES, _PLOTS_BYTES = 180, 21, 5e5  # requests.jsonl; plots and result.json

Job = tuple[int, Sequence[str], Path, Any]


def print_plan(experiment: str, plan: Plan, overrides: Sequence[str], jobs: Sequence[Job]) -> None:
    """Prints on stdout what a run, or each job of a sweep, would measure, decide, need and write.

    Args:
        jobs: of a sweep those that are known: number, overrides, folder and dataclass.

    Raises:
        MoejaxError: what a run raises before it measures; or its memory does not suffice.
    """
    folder, shown = Path(plan.folder), []
    if (files := run_files(folder)) and not (plan.timed or plan.overwrite):
        raise taken(folder, files)
    if plan.sweep:
        chosen = "" if jobs else ", which a search chooses"
        print(f"a sweep of {plan.expected} jobs{chosen}, in {shown_path(folder)}")
    for number, given, place, config in jobs if plan.sweep else [(0, overrides, folder, plan.config)]:
        lines = _plan(experiment, with_overrides(config, given), place)
        head = [f"job {number}: {' '.join(given)}"] if plan.sweep else []
        print(*head, *(line for line in lines if line not in shown), sep="\n")
        shown = lines


def look_ahead(main: Callable[[Any], Any], config: Any) -> list[LLM]:
    """Goes through an experiment as far as its dry run does.

    Returns:
        Its engines, without values.

    Raises:
        MoejaxError: what a run raises before it measures.
    """
    engines: list[LLM] = []
    token = DRY_RUN.set(engines)
    logging.disable(logging.INFO)  # the run itself says it
    try:
        getattr(config, "host", HostConfig()).chosen()
        if isinstance(config, GenerateConfig):
            open_llm(config).builder.to_generate(config.prompts, config.sampling)
        elif hasattr(config, "tracker") or isinstance(config, ServeConfig):
            main(config)
    except DryRunEnds:
        pass
    finally:
        logging.disable(logging.NOTSET)
        DRY_RUN.reset(token)
    return engines


def _plan(experiment: str, config: Any, folder: Path) -> list[str]:
    engines = look_ahead(lambda config: call_main(config, experiment, folder), config)
    own = [getattr(config, name) for name in _SECTIONS if hasattr(config, name)] or [config]
    lines = [f"  {line}" for section in own if (line := _told(section))]
    lines.append(f"  writes {shown_path(folder)}, about {_bytes(config) / 1e6:.1f} MB")
    peers = [name for name, _ in config.backend.chosen()] if hasattr(config, "backend") else []
    lines += [f"  {name} is not started, and so not checked" for name in peers if name != "moejax"]
    unread = ignored_settings(config).items()
    lines += [f"  {key}={item['value']} is {item['reason']}" for key, item in unread]
    served = [f"{name}: " for name in config.serve.models] if isinstance(config, ServeConfig) else []
    for llm, name in zip(engines, served or [""], strict=False):  # of others' engines the first
        kind = config.hardware.kind
        # What the run will compile first of all; not for another device.
        memory = llm.check_memory(device_limit(kind, llm.parallel_config.num_devices), compiles=is_here(kind))
        chosen = [item for item in llm.resolutions if item.key != "memory"]
        lines += [f"  {name}{line}" for line in (memory.line(), *chosen)]
    return lines


def _told(section: Any) -> str:
    """Returns a section's settings in words, with the cases that they amount to; nothing if it is off."""
    if not getattr(section, "enabled", True) and not getattr(section, "variants", None):
        return ""
    if isinstance(section, WorkloadConfig):
        names = ", ".join(case.name for case in latency_cases(section))
        return f"measures {names}; iterations {section.iterations}; warmup {section.warmup}"
    told = {item.name: getattr(section, item.name) for item in fields(section) if item.name not in _COMMON}
    return "; ".join(f"{name} {value}" for name, value in told.items() if value not in (None, [], (), {}))


def _bytes(config: Any) -> float:
    """Estimates the bytes of a run's files: a row for each request, plots and result.json."""
    workload = getattr(config, "workload", None)
    batches: list[tuple[int, Any]] = []
    if isinstance(workload, WorkloadConfig):
        batches = [(case.batch_size, case.output_len) for case in latency_cases(workload)]
    elif isinstance(workload, ThroughputWorkload):
        batches = [(workload.num_requests or 0, getattr(workload.output_len, "high", workload.output_len))]
    rows = sum(count * (_ROW_BYTES + _TOKEN_BYTES * length) for count, length in batches)
    return _PLOTS_BYTES + rows * getattr(workload, "iterations", 1)
