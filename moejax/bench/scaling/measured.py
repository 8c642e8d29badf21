"""Layouts run on virtual CPU devices: decode steps timed, and the bytes of the compiled program read."""

import dataclasses
import statistics
from typing import Any

import jax
import numpy as np

from moejax.bench.scaling.config import ScalingSection
from moejax.bench.scaling.modelled import exchange_of
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.engine.llm import LLM
from moejax.engine.requests.api import SamplingParams
from moejax.engine.stats import StepRecord
from moejax.engine.step.device_runner import DeviceRunner
from moejax.engine.step.limits import StepKey
from moejax.engine.step.sampler import SamplerMode
from moejax.perf.comm import step_comm
from moejax.sharding.hlo import Difference, bytes_on_wire, collectives, compare, taken
from moejax.sharding.spmd import MeshDevices


def fitting(parallel: ParallelConfig, devices: int) -> ParallelConfig:
    """The layout itself, or with its experts over fewer devices, still on several nodes, so that it fits.

    Raises:
        ConfigError: no such part of it fits.
    """
    if parallel.num_devices <= devices:
        return parallel
    others = parallel.num_devices // parallel.ep
    ep, nodes = devices // others, min(parallel.nodes, 2)
    if ep < 1 or (nodes > 1 and ep < 2):
        raise ConfigError(f"{parallel.num_devices} devices, of which {devices} are here, in no smaller form")
    return dataclasses.replace(parallel, ep=ep, nodes=nodes)


def measure_layout(
    source: Any,
    model: ModelConfig,
    layout: ParallelConfig,
    section: ScalingSection,
    load_format: Any,
    seed: int,
) -> dict[str, Any]:
    """Median milliseconds of a decode step on CPU devices, and whether its bytes are those of the formulas.

    Args:
        source: what `LLM` opens.

    Raises:
        ConfigError: the layout, or a smaller form of it, does not fit the model or the devices.
    """
    parallel = fitting(layout, section.devices)
    groups = parallel.data_groups
    rows = -(-section.batch_size // groups)
    engine = EngineConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=max(rows, 64),
        max_model_len=section.steps + 8,
        seq_buckets=[rows],
    )
    with LLM(
        source, dtype="float32", parallel=parallel, engine=engine, seed=seed, load_format=load_format
    ) as llm:
        prompts = np.random.default_rng(seed).integers(0, model.vocab_size, (section.batch_size, 4)).tolist()
        params = SamplingParams(max_tokens=section.steps, temperature=0.0, ignore_eos=True)
        llm.generate(prompts, dataclasses.replace(params, max_tokens=4))
        seconds: list[float] = []

        def see(record: StepRecord) -> None:
            if not record.prefill_tokens and record.decode_tokens == section.batch_size:
                seconds.append(record.seconds)

        llm.engine.on_step = see
        llm.generate(prompts, params)
        return {
            "measured_devices": parallel.num_devices,
            "cpu_decode_ms": statistics.median(seconds) * 1e3 if seconds else None,
            **_bytes(llm, parallel, rows),
        }


def _bytes(llm: LLM, parallel: ParallelConfig, rows: int) -> dict[str, Any]:
    """Returns the bytes that a device sends in a decode step of the compiled program, and whether the
    formulas agree.

    A pipeline's stages are not read here; tests/sharding holds them against the formulas.
    """
    runner = llm.runner
    if not isinstance(runner, DeviceRunner) or not isinstance(runner.place, MeshDevices):
        return {"program_comm_bytes": None if parallel.pp > 1 else 0.0, "formulas_agree": None}
    key = StepKey(rows, 0, runner.limits.segment_ends[0], 1, SamplerMode(), False, -1)
    layers = range(llm.config.num_layers)
    sent, differences = step_bytes(llm, runner.place, layers, runner.program(key), tokens=rows, rows=rows)
    return {"program_comm_bytes": sent["program_comm_bytes"], "formulas_agree": not differences}


def step_bytes(
    llm: LLM, place: MeshDevices, layers: range, program: Any, *, tokens: int, rows: int
) -> tuple[dict[str, float], list[Difference]]:
    """Returns bytes of a device in a compiled step of these layers: what it sends, operands of collectives in
    the program and by formula, what goes to the next stage; and where program and formula differ."""
    model, parallel = llm.config, llm.parallel_config
    exchange, _ = exchange_of(model, parallel, tokens, platform=jax.default_backend())
    # Of the sizes that an exchange chooses among, the first is for an even routing.
    ran = taken(collectives(program, place.mesh), lambda branch: 0)
    every = step_comm(model, parallel, tokens=tokens, rows=rows, exchange=exchange, layers=layers)
    terms = [term for term in every if term.role != "pipeline"]
    sent = {
        "program_comm_bytes": sum((c.executions or 0) * bytes_on_wire(c) for c in ran),
        "collective_bytes": sum((c.executions or 0) * c.operand_bytes for c in ran),
        "collective_formula_bytes": sum(term.count * term.operand_bytes for term in terms),
        "stage_bytes": sum(term.operand_bytes for term in every if term.role == "pipeline"),
    }
    return sent, compare(terms, ran, place.axes)
