"""Opens the model that an experiment's configuration names."""

import functools
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from experiments.launch.schema import (
    GenerateConfig,
    InferenceSections,
    LatencyConfig,
    ModelSections,
    ProfileConfig,
    QuantizationConfig,
    ServingSections,
    StressConfig,
    ThroughputConfig,
)
from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import MoejaxBackend
from moejax.bench.backends.registry import open_backends as open_section
from moejax.bench.experiment_run import DRY_RUN
from moejax.bench.traffic import plan_requests
from moejax.bench.workload import latency_cases
from moejax.core.errors import ConfigError
from moejax.core.quant import QuantConfig
from moejax.engine.llm import LLM
from moejax.engine.opening.resolve import find_model
from moejax.engine.requests.tokenizer import Tokenizer
from moejax.report.progress import progress


def open_llm(config: InferenceSections) -> LLM:
    """Opens the model on the configured mesh, with a progress bar; raises what `LLM` raises."""
    with progress("opening the model", total=1) as task:
        return _open(config, config.quant, parallel=config.parallel, on_progress=task.to)


def check_lengths(config: ModelSections) -> None:
    """Refuses what is longer than the model allows before its weights are read.

    Raises:
        ConfigError: a request, or a window of text, is too long, or there is no such model.
    """
    directory, model = find_model(config.model.source, config.model.load_format)
    limit, key = config.engine.max_model_len or model.max_position_embeddings, "workload.prompt_len"
    tokenizer = Tokenizer.load(directory) if directory is not None else None
    longest = 0
    if isinstance(config, LatencyConfig):
        longest = max(case.total_len for case in latency_cases(config.workload))
    elif isinstance(config, ThroughputConfig):
        encode = None if tokenizer is None else tokenizer.encode
        plan = plan_requests(config.workload, model.vocab_size, encode=encode)
        longest = max(request.total_len for request in plan)
    elif isinstance(config, ProfileConfig):
        longest = config.workload.case.total_len
    elif isinstance(config, StressConfig):
        longest, key = config.stress.probe_tokens + 1, "stress.probe_tokens"
    elif isinstance(config, QuantizationConfig):
        longest, key = config.quantization.seq_len + 1, "quantization.seq_len"
    elif isinstance(config, GenerateConfig) and tokenizer is not None:
        longest, key = max(len(tokenizer.encode(text)) for text in config.prompts) + 1, "prompts"
    if longest > limit:
        limited = "engine.max_model_len" if config.engine.max_model_len else "the model's longest sequence"
        raise ConfigError(f"{longest} tokens exceed the limit of {limit} ({limited}); lower {key}")


def open_backends(config: ServingSections, log_dir: Path) -> AbstractContextManager[list[Backend]]:
    """Opens the backends of the section `backend`, the first one first.

    Raises what `check_lengths`, `open_section` and `LLM` raise.
    """
    if DRY_RUN.get() is not None:
        return nullcontext([MoejaxBackend(open_llm(config))])  # in a dry run peers are not started
    if any(options.kind == "moejax" for _, options in config.backend.chosen()):
        check_lengths(config)
    return open_section(
        config.backend,
        functools.partial(open_llm, config),
        model=config.model.source,
        load_format=config.model.load_format,
        max_num_seqs=config.engine.max_num_seqs,
        log_dir=log_dir,
    )


def open_quantized(config: QuantizationConfig, quant: QuantConfig | None) -> LLM:
    """Opens the model with these methods, or with none; raises what `LLM` raises."""
    return _open(config, quant)


def _open(config: ModelSections, quant: QuantConfig | None, **more: Any) -> LLM:
    check_lengths(config)
    model, planned = config.model, DRY_RUN.get()
    llm = LLM(
        model.source,
        dtype=model.dtype,
        engine=config.engine,
        quant=quant,
        seed=config.seed,
        load_format=model.load_format,
        fill=planned is None,
        **more,
    )
    if planned is not None:
        planned.append(llm)
    return llm
