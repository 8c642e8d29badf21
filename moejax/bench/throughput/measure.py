"""Warm-up and the measured passes of a throughput experiment."""

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any

from moejax.bench.backends.moejax import MoejaxBackend, engine_of
from moejax.bench.common.compilation import shown_compilation
from moejax.bench.common.telemetry import Meter
from moejax.bench.common.trace_io import start_capture, take_capture
from moejax.bench.driver import drive
from moejax.bench.experiment_run import ExperimentRun
from moejax.bench.throughput.modes import Mode
from moejax.bench.traffic import ThroughputWorkload
from moejax.report.progress import Task, progress
from moejax.sharding.distributed import agree

# A warm-up pass is twice the engine's batch, too short to cost much, and of unequal lengths: the batch fills,
# takes in single prompts as others end, and drains, so that most programs have run once before it counts. The
# first run of a compiled program takes tens of milliseconds more than the next on CPU.
_WARMUP_TOKENS = 16
_WARMUP_BATCH = 8  # where a server does not say how many it runs at a time


def measure(modes: Sequence[Mode], workload: ThroughputWorkload, run: ExperimentRun) -> None:
    """Fills `modes`: warm-up, then the iterations.

    Raises:
        RequestError: a pass in which no request was completed.
    """
    with progress("compiling and warming up") as task:
        for mode in modes[: len(modes) // len(workload.users)]:  # the others share their backends
            task.describe(f"compiling and warming up ({mode.label})")
            with shown_compilation(engine_of(mode.backend), task):
                warm_up(mode, workload)
    total = None if workload.endless else sum(len(mode.plan) for mode in modes) * workload.iterations
    run.read_peaks()
    with progress("measuring", total=total) as task:
        for iteration in range(workload.iterations):
            for index in range(len(modes))[:: 1 if iteration % 2 == 0 else -1]:
                run_pass(modes[index], workload, index, task, run.meter)
    run.read_peaks()


def warm_up(mode: Mode, workload: ThroughputWorkload) -> None:
    """Compiles what a mode's traffic can reach, and runs the short pass."""
    # A peer has to be told its largest batch even where it is measured cold; ours would compile.
    if not workload.warmup and isinstance(mode.backend, MoejaxBackend):
        return
    mode.backend.prepare(
        max_num_seqs=mode.backend.max_num_seqs or len(mode.plan),
        max_total_len=max(request.total_len for request in mode.plan),
        params=[workload.sampling(max(request.output_len for request in mode.plan))],
    )
    count = 2 * (mode.backend.max_num_seqs or _WARMUP_BATCH) * workload.turns
    short = [
        dataclasses.replace(each, arrival_s=0.0, output_len=min(each.output_len, 1 + i % _WARMUP_TOKENS))
        for i, each in enumerate(mode.plan[:count])
    ]
    for _ in range(workload.warmup):
        drive(mode.backend, short, workload.sampling, agree=agree)


def run_pass(mode: Mode, workload: ThroughputWorkload, case: int, task: Task, meter: Meter) -> None:
    """One measured pass of the traffic through a mode."""
    task.describe(f"measuring {mode.label}")
    mode.backend.reset_stats()
    llm = engine_of(mode.backend)
    start_capture(llm)
    gc.collect()  # now, and not on the first mode's behalf in the second's time
    with meter.part(case):
        given: dict[str, Any] = {
            "workload": mode.workload,
            "case": case,
            "on_progress": task.advance,
            "agree": agree,
        }
        run = drive(mode.backend, mode.plan, workload.sampling, **given)
    if not mode.runs and case == 0:
        mode.trace = take_capture(llm, case)
    mode.failed_steps += mode.backend.stats()["failed_steps"]
    run.require_completed(mode.label)
    mode.runs.append(run)
