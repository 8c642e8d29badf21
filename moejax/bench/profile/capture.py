"""Runs the engine under `jax.profiler`, and beside that without it."""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from moejax.bench.backends.moejax import MoejaxBackend, check_length
from moejax.bench.profile.config import ProfileWorkload
from moejax.bench.profile.program import Program, read_program
from moejax.bench.profile.trace import SPAN, TraceError, find_trace
from moejax.bench.workload import case_prompts
from moejax.core.errors import ConfigError
from moejax.core.files import ensure_writable
from moejax.core.words import one_line
from moejax.engine.llm import LLM
from moejax.engine.requests.api import RequestOutput
from moejax.engine.stats import StepRecord
from moejax.report.progress import progress

logger = logging.getLogger(__name__)


@dataclass
class ProfiledRun:
    """The generations of a profile, and the programs that they ran.

    Attributes:
        file: the profiler's .xplane.pb.
        programs: the compiled steps.
        hits: by phase "prefill" and "decode", float `[L]`, mean number of experts that a step visited.
        plain, traced: records of the steps without and with the profiler.
        prefill_seconds: of each generation without the profiler, from its start to the last first token.
    """

    file: Path
    programs: list[Program]
    hits: Mapping[str, np.ndarray]
    plain: list[StepRecord] = field(default_factory=list)
    traced: list[StepRecord] = field(default_factory=list)
    prefill_seconds: list[float] = field(default_factory=list)


def name_compiled_programs() -> None:
    """Has the compilation cache tell programs with other scopes apart, which it otherwise takes for the same:
    one that was compiled before a scope existed would come back without it. To be called before an `LLM` is
    made for `capture`."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)


def check(llm: LLM, workload: ProfileWorkload) -> None:
    """Raises `ConfigError` for what cannot be profiled; runs nothing."""
    case = workload.case
    check_length(MoejaxBackend(llm), "a request", case.prompt_len, case.output_len)
    if (devices := llm.parallel_config.num_devices) > 1:
        raise ConfigError(
            f"a profile is read on one device, and parallel asks for {devices}; use parallel=single"
            " (experiments.scaling models several)"
        )
    if (limit := llm.engine_config.max_num_seqs) < workload.batch_size:
        raise ConfigError(
            f"workload.batch_size {workload.batch_size} exceeds engine.max_num_seqs {limit}; raise the limit"
            f" with engine.max_num_seqs={workload.batch_size}"
        )


def capture(llm: LLM, workload: ProfileWorkload, directory: Path) -> ProfiledRun:
    """Warms up, records the routing, and measures: without the profiler and with it.

    Args:
        directory: where the profiler writes.

    Raises:
        ConfigError: see `check`.
        OutputError: `directory` cannot be written.
        TraceError: the profiler is busy, or has written nothing.
    """
    check(llm, workload)
    ensure_writable(directory)
    encode = llm.tokenizer.encode if llm.tokenizer else None
    case = workload.case
    prompts = case_prompts(workload.as_latency(), case, llm.config.vocab_size, encode=encode)
    params = workload.as_latency().batch_sampling(case)

    def generate(record: bool = False) -> list[RequestOutput]:
        return llm.generate(prompts, params, record_routing=record)

    with progress("compiling and warming up", total=workload.warmup + 1 + 2 * workload.iterations) as task:
        for _ in range(workload.warmup):
            generate()
            task.advance()
        programs = list(llm.ledger.programs("step"))
        task.describe("recording routing")
        llm.routing.reset()
        generate(record=True)
        run = ProfiledRun(Path(), [], llm.routing.mean_hits)
        task.advance()
        llm.ledger.warmed_up = True
        before = llm.engine.on_step
        try:
            task.describe("measuring")
            llm.engine.on_step = run.plain.append
            for _ in range(workload.iterations):
                outputs = generate()
                begin = min(output.metrics.arrival_time for output in outputs)
                last = max(output.metrics.token_times[0] for output in outputs)
                run.prefill_seconds.append(last - begin)
                task.advance()
            task.describe("measuring under the profiler")
            llm.engine.on_step = run.traced.append
            _start(directory)
            try:
                for _ in range(workload.iterations):
                    with jax.profiler.TraceAnnotation(SPAN):
                        generate()
                    task.advance()
            finally:
                start = time.perf_counter()
                jax.profiler.stop_trace()
                logger.debug("the profiler wrote for %.1f s", time.perf_counter() - start)
        finally:
            llm.engine.on_step = before
    run.file = find_trace(directory)
    run.programs = [read_program(str(key), bool(key.tokens), step.as_text()) for key, step in programs]
    return run


def _start(directory: Path) -> None:
    """The profiler without its own tracing of Python, whose calls would make up most of a small step."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    try:
        jax.profiler.start_trace(str(directory), profiler_options=options)
    except RuntimeError as error:
        raise TraceError(f"jax.profiler cannot start: {one_line(error)}") from error
