"""Builds the runner of an opened model."""

from typing import Any

import jax
import numpy as np

import moejax
from moejax.core.config import EngineConfig
from moejax.core.parallel import ParallelConfig
from moejax.engine.opening.resolve import OpenModel
from moejax.engine.pipeline.runner import PipelineRunner, most_microbatches
from moejax.engine.routing.recorder import check_capture
from moejax.engine.routing.replay import RoutingReplay
from moejax.engine.step.device_runner import DeviceRunner
from moejax.engine.step.ledger import CompileLedger


def make_runner(
    opened: OpenModel,
    config: EngineConfig,
    parallel: ParallelConfig,
    num_blocks: int,
    max_model_len: int,
    ledger: CompileLedger,
    kv_dtype: str,
    replay: RoutingReplay | None,
) -> DeviceRunner | PipelineRunner:
    """For one stage, or for several; see their arguments.

    Raises:
        ConfigError: routing is to be captured, and the model has none.
    """
    check_capture(config.capture_routing, opened.config)  # a variant has not been through `open_model`
    how: Any = {
        "config": config, "num_blocks": num_blocks, "max_model_len": max_model_len, "ledger": ledger,
        "kernels": opened.kernels, "kv_dtype": kv_dtype, "replay": replay,
    }  # fmt: skip
    runner: DeviceRunner | PipelineRunner
    if len(opened.stages) == 1:
        runner = DeviceRunner(opened.functions[0], place=opened.places[0], **how)
    else:
        pairs: Any = list(zip(opened.functions, opened.places, strict=True))
        microbatches = most_microbatches(parallel, config)
        runner = PipelineRunner(pairs, microbatches=microbatches, **how)
    if runner.capture is not None:
        runner.capture.meta = _about(opened, parallel)
    return runner


def _about(opened: OpenModel, parallel: ParallelConfig) -> dict[str, Any]:
    """What a captured trace says of its model. The checkpoint's hash is for those to add who have it: reading
    all weights takes time."""
    return {
        "model": opened.directory.name if opened.directory else None,
        "family": opened.config.family,
        "dtype": opened.config.dtype,
        "checkpoint_hash": None,
        # What an exchange of limited room drops is in the trace as if it had run.
        "exchange_capacity": parallel.exchange_capacity,
        "versions": {module.__name__: module.__version__ for module in (moejax, jax, np)},
    }
