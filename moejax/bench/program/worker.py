"""In the process that compiles steps: the answers to a `Job`, `Opened` and then a `Compiled` a bucket."""

import contextlib
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.sharding import SingleDeviceSharding

from moejax.bench.program.compiler import capability, compile_into
from moejax.bench.program.dump import read_folder
from moejax.bench.program.job import Bucket, Compiled, Job, Opened
from moejax.core.config import ModelConfig
from moejax.engine.llm import LLM
from moejax.engine.opening.resolve import find_model
from moejax.engine.step.ledger import compiler_options
from moejax.engine.step.limits import StepKey
from moejax.nn.param import specs
from moejax.perf.memory import held_weights
from pallas_kernels._compat import abstract_device


def answer(job: Job) -> Iterator[Opened | Compiled]:
    """Opens the engine without values in its weights; yields what it is, then its compiled steps."""
    model = first_layers(find_model(job.source, job.load_format)[1], job.layers)
    llm = LLM(model, load_format="dummy", fill=False, **job.options)
    declared = {name: spec for stage in llm.stages for name, spec in specs(stage).items()}
    yield Opened(llm.config, held_weights(llm.config, declared), llm.kv_cache_dtype, llm.resolutions)
    for bucket in job.buckets:
        yield _compile(llm, bucket, job)


def first_layers(model: ModelConfig, count: int | None) -> ModelConfig:
    """Returns a model of only the first layers; None: all."""
    kept = {name: getattr(model, name)[:count] for name in ("moe_layers", "sliding_windows")}
    return model.replace(num_layers=len(kept["moe_layers"]), **kept)


def _compile(llm: LLM, bucket: Bucket, job: Job) -> Compiled:
    runner, buckets, layers = llm.runner, llm.runner.buckets, llm.config.num_layers
    bucket = Bucket(buckets.rows_for(*bucket), buckets.tokens_for(bucket.tokens))
    blocks = runner.limits.segment_ends[-1]
    key = StepKey(*bucket, blocks, owners=1, mode=job.mode, record=False, prompt_logprobs=-1)
    (program,) = runner.programs(key)
    alone = SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(
        lambda x: x if x.sharding else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone), program.args()
    )
    with contextlib.ExitStack() as stack:
        if job.dumps is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = job.dumps / f"{bucket.name}_{layers}_layers"
        stack.enter_context(abstract_device(capability(job.target.description)))
        times = [time.perf_counter()]
        traced = program.build().trace(*shapes)
        times.append(time.perf_counter())
        lowered = traced.lower(lowering_platforms=("cuda",))
        times.append(time.perf_counter())
        compiled, log = compile_into(folder, lowered, compiler_options("gpu"))
        times.append(time.perf_counter())
        dump = read_folder(folder, log)
    seconds = [after - before for before, after in itertools.pairwise(times)]
    memory, kinds = compiled.memory_analysis(), ("argument", "output", "alias", "temp")
    sizes = {kind: int(getattr(memory, f"{kind}_size_in_bytes")) for kind in kinds}
    phases = dict(zip(("trace", "lower", "compile"), seconds, strict=True))
    return Compiled(bucket, layers, dump, phases, sizes)
