"""In the process that compiles steps: the answers to a `Job`, `Opened` and then a `Compiled` a bucket."""

import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from moejax.bench.program.compiler import capability, compile_into
from moejax.bench.program.dump import read_folder
from moejax.bench.program.job import Bucket, Compiled, Job, Opened
from moejax.bench.scaling.measured import step_bytes
from moejax.core.config import ModelConfig
from moejax.engine.llm import LLM
from moejax.engine.opening.resolve import find_model
from moejax.engine.pipeline.runner import PipelineRunner
from moejax.engine.step.device_runner import DeviceRunner
from moejax.engine.step.ledger import compiler_options
from moejax.engine.step.limits import StepKey
from moejax.nn.param import specs
from moejax.perf.memory import held_weights
from moejax.sharding.pipeline import split_layers
from moejax.sharding.spmd import MeshDevices
from pallas_kernels._compat import abstract_device


def answer(job: Job) -> Iterator[Opened | Compiled]:
    """Opens the engine without values in its weights; yields what it is, then its compiled steps."""
    model, parallel = find_model(job.source, job.load_format)[1], job.options["parallel"]
    stages = split_layers(model, parallel.pp, parallel.stage_layers)
    layout = replace(parallel, stage_layers=tuple(len(stage[: job.layers]) for stage in stages))
    options = {**job.options, "load_format": "dummy", "fill": False, "parallel": layout}
    with LLM(first_layers(model, stages, job.layers), **options) as llm:
        declared = {name: spec for stage in llm.stages for name, spec in specs(stage).items()}
        weights = held_weights(llm.config, declared)
        yield Opened(llm.config, weights, llm.kv_cache_dtype, llm.resolutions, stages)
        runners = llm.runner.stages if isinstance(llm.runner, PipelineRunner) else [llm.runner]
        for bucket, number in itertools.product(job.buckets, range(len(runners))):
            yield _compile(llm, runners, number, bucket, job, len(stages[number]))


def first_layers(model: ModelConfig, stages: Sequence[range], count: int | None) -> ModelConfig:
    """Returns a model of only the first layers of each stage; None: all."""
    return model.of_layers([layer for stage in stages for layer in stage[:count]])


def _compile(
    llm: LLM, runners: Sequence[DeviceRunner], number: int, bucket: Bucket, job: Job, whole: int
) -> Compiled:
    """Returns the step of a stage, of the whole model where there is one only."""
    runner, buckets, layers = runners[number], llm.runner.buckets, llm.stages[number].stage
    bucket = Bucket(buckets.rows_for(*bucket), buckets.tokens_for(bucket.tokens))
    blocks = runner.limits.segment_ends[-1]
    key = StepKey(*bucket, blocks, owners=1, mode=job.mode, record=False, prompt_logprobs=-1)
    (program,) = runner.programs(key)
    alone = SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(
        lambda x: x if x.sharding else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone), program.args()
    )
    name = bucket.program_names(len(runners))[number]
    with contextlib.ExitStack() as stack:
        if job.dumps is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = job.dumps / f"{name}_{len(layers)}_layers".replace(" ", "_")
        stack.enter_context(abstract_device(capability(job.target.description)))
        times = [time.perf_counter()]
        traced = program.build().trace(*shapes)
        times.append(time.perf_counter())
        lowered = traced.lower(lowering_platforms=("cuda",))
        times.append(time.perf_counter())
        options = compiler_options("gpu", llm.runner.ledger.overlap)
        compiled, log = compile_into(folder, lowered, options)
        times.append(time.perf_counter())
        dump = read_folder(folder, log)
    seconds = [after - before for before, after in itertools.pairwise(times)]
    memory, kinds = compiled.memory_analysis(), ("argument", "output", "alias", "temp")
    sizes = {kind: int(getattr(memory, f"{kind}_size_in_bytes")) for kind in kinds}
    phases = dict(zip(("trace", "lower", "compile"), seconds, strict=True))
    sent: dict[str, float] = {}
    if isinstance(runner.place, MeshDevices):
        sent, _ = step_bytes(llm, runner.place, layers, compiled, tokens=sum(bucket), rows=bucket.rows)
    return Compiled(name, bucket, len(layers), whole, dump, phases, sizes, sent)
