"""Opens the model that an experiment's configuration names."""

import functools
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from experiments.launch.schema import InferenceSections, LatencyConfig, QuantizationConfig, ThroughputConfig
from moejax.bench.backends.base import Backend
from moejax.bench.backends.registry import open_backends as open_section
from moejax.core.quant import QuantConfig
from moejax.engine.llm import LLM
from moejax.report.progress import progress


def open_llm(config: InferenceSections) -> LLM:
    """Raises what `LLM` raises."""
    model = config.model
    source: Any = model.path if model.path is not None else model.hf_config
    with progress("opening the model", total=1) as task:
        return LLM(
            source,
            dtype=model.dtype,
            parallel=config.parallel,
            engine=config.engine,
            quant=config.quant,
            seed=config.seed,
            load_format=model.load_format,
            on_progress=task.to,
        )


def open_backends(
    config: LatencyConfig | ThroughputConfig, log_dir: Path
) -> AbstractContextManager[list[Backend]]:
    """Those of the section `backend`, the first one first. Raises what `open_section` and `LLM` raise."""
    model = config.model
    return open_section(
        config.backend,
        functools.partial(open_llm, config),
        model=model.path if model.path is not None else model.hf_config,
        load_format=model.load_format,
        max_num_seqs=config.engine.max_num_seqs,
        log_dir=log_dir,
    )


def open_quantized(config: QuantizationConfig, quant: QuantConfig | None) -> LLM:
    """With these methods, or None of them. Raises what `LLM` raises."""
    model = config.model
    return LLM(
        model.path if model.path is not None else model.hf_config or {},
        dtype=model.dtype,
        engine=config.engine,
        quant=quant,
        seed=config.seed,
        load_format=model.load_format,
    )
