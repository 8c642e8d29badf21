"""The process that compiles: a pickled `Job` on stdin; `Opened`, then a `Compiled` a bucket on stdout."""

import dataclasses
import itertools
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from moejax.bench.program.compiler import OPTIONS, use_target
from moejax.bench.program.dump import read_folder
from moejax.bench.program.job import Bucket, Compiled, Job, Opened, cache_blocks
from moejax.core.config import ModelConfig
from moejax.core.errors import MoejaxError
from moejax.engine.llm import LLM
from moejax.engine.opening.resolve import find_model
from moejax.engine.step.limits import StepKey
from moejax.engine.step.sampler import SamplerMode
from moejax.nn.param import specs
from moejax.perf.memory import held_weights

_MODES = {
    "greedy": SamplerMode(), "sampled": SamplerMode(greedy=False),
    "filters": SamplerMode(greedy=False, filters=True),
}  # fmt: skip


def main() -> None:
    """Compiles a job's buckets one after another."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a compiler prints must not mix with the answers
    job: Job = pickle.load(sys.stdin.buffer)
    try:
        use_target(job.folder, job.description, job.parallel.num_devices)
        with jax.default_device(jax.devices("cpu")[0]):  # for the few arrays that an engine makes
            for item in answer(job):
                pickle.dump(item, answers)
                answers.flush()
    except MoejaxError as error:
        pickle.dump(error, answers)
    answers.close()


def answer(job: Job) -> Iterator[Opened | Compiled]:
    """Opens the engine without values in its weights; yields what it is, then its compiled steps."""
    llm = open_engine(job)
    declared = {name: spec for stage in llm.stages for name, spec in specs(stage).items()}
    yield Opened(llm.config, held_weights(llm.config, declared), llm.kv_cache_dtype, llm.resolutions)
    for bucket in job.buckets:
        yield _compile(llm, bucket, job)


def open_engine(job: Job) -> LLM:
    """Returns the engine of the model's first layers."""
    _, model = find_model(job.source, job.load_format)
    engine = dataclasses.replace(job.engine, compile_cache=False, platform="gpu")
    if engine.num_blocks is None and engine.kv_cache_memory_gb is None:
        engine = dataclasses.replace(engine, num_blocks=cache_blocks(engine, job.context_len))
    return LLM(
        first_layers(model, job.layers), dtype=job.dtype, parallel=job.parallel, engine=engine,
        quant=job.quant, seed=job.seed, load_format="dummy", fill=False,
    )  # fmt: skip


def first_layers(model: ModelConfig, count: int | None) -> ModelConfig:
    """Returns a model of only the first layers; None: all."""
    if count is None or count >= model.num_layers:
        return model
    kept: dict[str, Any] = {"num_layers": count}
    for field in ("moe_layers", "sliding_windows"):
        kept[field] = tuple(getattr(model, field)[:count])
    return model.replace(**kept)


def _compile(llm: LLM, bucket: Bucket, job: Job) -> Compiled:
    runner, buckets = llm.runner, llm.runner.buckets
    rows, tokens = buckets.rows_for(bucket.rows, bucket.tokens), buckets.tokens_for(bucket.tokens)
    key = StepKey(rows, tokens, runner.limits.segment_ends[-1], 1, _MODES[job.sampler], False, False)
    (program,) = runner.programs(key)
    alone = SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(
        lambda x: x if x.sharding else jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=alone), program.args()
    )
    with _folder(job, rows, tokens, llm.config.num_layers) as folder:
        said = os.lseek(2, 0, os.SEEK_CUR)
        times = [time.perf_counter()]
        traced = program.build().trace(*shapes)
        times.append(time.perf_counter())
        lowered = traced.lower(lowering_platforms=("cuda",))
        times.append(time.perf_counter())
        compiled = lowered.compile({**OPTIONS, "xla_dump_to": str(folder)})
        times.append(time.perf_counter())
        log = os.pread(2, os.lseek(2, 0, os.SEEK_CUR) - said, said).decode(errors="replace")
        dump = read_folder(folder, log)
    seconds = [after - before for before, after in itertools.pairwise(times)]
    memory = compiled.memory_analysis()
    kinds = ("argument", "output", "alias", "temp")
    sizes = {kind: int(getattr(memory, f"{kind}_size_in_bytes")) for kind in kinds}
    return Compiled(
        Bucket(rows, tokens), llm.config.num_layers, dump,
        dict(zip(("trace", "lower", "compile"), seconds, strict=True)), sizes,
    )  # fmt: skip


@contextmanager
def _folder(job: Job, rows: int, tokens: int, layers: int) -> Iterator[Path]:
    """Yields an empty folder for a bucket's dump."""
    if job.dumps is not None:
        folder = job.dumps / f"rows{rows}_tokens{tokens}_layers{layers}"
        folder.mkdir(parents=True)
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


if __name__ == "__main__":
    main()
