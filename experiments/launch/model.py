"""Opens the model that an experiment's configuration names."""

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.launch.schema import (
    InferenceSections,
    ModelSections,
    OffloadConfig,
    QuantizationConfig,
    RoutingPoliciesConfig,
    ServingSections,
)
from moejax.bench.backends.base import Backend
from moejax.bench.backends.moejax import MoejaxBackend
from moejax.bench.backends.registry import open_backends as open_section
from moejax.bench.experiment_run import DRY_RUN, DryRunEnds
from moejax.bench.routing_policies.config import PolicyPreset
from moejax.core.config import EngineConfig
from moejax.core.quant import QuantConfig
from moejax.engine.llm import LLM
from moejax.report.progress import progress


def open_llm(config: InferenceSections) -> LLM:
    """Opens the model on the configured mesh, with a progress bar; raises what `LLM` raises."""
    with progress("opening the model", total=1) as task:
        return _open(config, config.quant, parallel=config.parallel, on_progress=task.to)


def open_backends(config: ServingSections, log_dir: Path) -> AbstractContextManager[list[Backend]]:
    """Opens the backends of the section `backend`, the first one first.

    Raises what `open_section` and `LLM` raise.
    """
    if DRY_RUN.get() is not None:  # peers are not started
        if all(options.kind != "moejax" for _, options in config.backend.chosen()):
            raise DryRunEnds
        return nullcontext([MoejaxBackend(open_llm(config))])
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


def open_with_policy(config: RoutingPoliciesConfig, policy: PolicyPreset | None) -> LLM:
    """Opens the model with experts chosen by a policy, or by its own; raises what `LLM` raises."""
    engine = config.engine
    return _open(
        config, config.quant, engine if policy is None else replace(engine, moe=policy.of(engine.moe))
    )


def open_capturing(config: OffloadConfig, **experts: Any) -> LLM:
    """Opens the model so that it captures its routing, and with these fields of `engine.experts`; raises what
    `LLM` raises."""
    engine = config.engine
    return _open(
        config, None, replace(engine, capture_routing=True, experts=replace(engine.experts, **experts))
    )


def arguments(config: InferenceSections) -> dict[str, Any]:
    """Returns what `LLM` is opened with."""
    return _arguments(config, config.quant, config.engine) | {"parallel": config.parallel}


def _arguments(config: ModelSections, quant: QuantConfig | None, engine: EngineConfig) -> dict[str, Any]:
    model = config.model
    return {
        "model": model.source, "dtype": model.dtype, "engine": engine, "quant": quant, "seed": config.seed,
        "load_format": model.load_format,
    }  # fmt: skip


def _open(
    config: ModelSections, quant: QuantConfig | None, engine: EngineConfig | None = None, **more: Any
) -> LLM:
    engine, planned = engine or config.engine, DRY_RUN.get()
    if planned is not None and engine.autotune == "measure":
        engine = replace(engine, autotune="cached")
    llm = LLM(**_arguments(config, quant, engine), fill=planned is None, **more)
    if planned is not None:
        planned.append(llm.variant(llm.engine_config))  # which stays open
    return llm
