"""Opens a model: decides what "auto" stands for, checks what can be checked, and only then reads weights."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax.numpy as jnp

from moejax.core.config import EngineConfig, ExpertLayout, ModelConfig
from moejax.core.parallel import ParallelConfig
from moejax.core.quant import QuantConfig
from moejax.core.resolve import Resolution, resolve_dtype, resolve_platform
from moejax.engine.opening.quantize import QuantizationPlan
from moejax.engine.opening.setup import (
    compute_capability,
    default_cache_dir,
    eos_token_ids,
    find_model,
    longest_sequence,
    unsupported_by_kernels,
)
from moejax.engine.opening.weights import build_stages, make_places
from moejax.engine.pipeline.runner import most_microbatches
from moejax.engine.pipeline.stage_steps import StageFunctions
from moejax.engine.requests.tokenizer import Tokenizer
from moejax.engine.routing.recorder import check_capture
from moejax.engine.routing.replay import RoutingReplay, open_replay
from moejax.engine.scheduling.policy import make_policy
from moejax.engine.step.ledger import enable_compile_cache
from moejax.engine.step.program import PagedFunctions
from moejax.models.decoder import Decoder
from moejax.moe.expert_parallel import choose_exchange
from moejax.nn.activation import activation
from moejax.ops.dispatch import choose_expert_layout, choose_grouped_matmul, choose_kernels
from moejax.ptq.report import QuantReport
from moejax.sharding.distributed import reserve_cpu_threads
from moejax.sharding.spmd import SingleDevice


class OpenModel(NamedTuple):
    """A model with its weights in place.

    Attributes:
        directory: where it was read from; None for a configuration with random weights.
        config: its dtype is what it computes in.
        stages, places, functions: of each pipeline stage; without a pipeline there is one.
        kernels: implementation of the GPU kernels, "xla" for none.
        resolutions: what was decided, and why.
        tokenizer: the directory's, if it has one.
        quant_report: what was quantized while the model opened; None if nothing was.
        replay: the routing trace that `engine.replay_routing` names; None if it names none.
    """

    directory: Path | None
    config: ModelConfig
    stages: list[Decoder]
    places: list[SingleDevice]
    functions: list[Any]
    kernels: str
    resolutions: list[Resolution]
    tokenizer: Tokenizer | None
    quant_report: QuantReport | None
    replay: RoutingReplay | None


def open_model(
    model: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig,
    dtype: str,
    parallel: ParallelConfig,
    engine: EngineConfig,
    quant: QuantConfig,
    seed: int,
    load_format: str,
    on_progress: Callable[[float, str], None] | None = None,
) -> OpenModel:
    """Raises what `moejax.engine.llm.LLM` raises."""
    if not parallel.is_single:
        reserve_cpu_threads()  # no help where a backend has started already
    platform = resolve_platform(engine.platform)
    if engine.compile_cache:
        enable_compile_cache(default_cache_dir())
    directory, config = find_model(model, load_format)
    activation(config.hidden_act)  # an unknown one raises here, not when the first step is compiled
    make_policy(engine.policy)
    resolved = resolve_dtype(dtype, config.dtype, platform.value)
    config = config.replace(dtype=resolved.value)
    experts = engine.moe
    unsupported = unsupported_by_kernels(config, engine, compute_capability(platform.value))
    kernels = choose_kernels(engine.kernels, platform.value, unsupported)
    # Kernels for quantized weights that were asked for by name are kernels for the experts, too.
    wanted = "pallas_triton" if quant.implementation == "pallas_triton" else kernels.value
    product = choose_grouped_matmul(experts.grouped_matmul, platform.value, experts.block_rows, wanted)
    layout = choose_expert_layout(experts.expert_layout, platform.value, product.value)
    moe = dataclasses.replace(experts, expert_layout=cast(ExpertLayout, layout.value))
    if product.value == "pallas_triton":
        moe = dataclasses.replace(moe, grouped_matmul=product.value)
    longest_sequence(engine, config)
    check_capture(engine.capture_routing, config)
    replay = open_replay(engine.replay_routing, config)
    most_microbatches(parallel, engine)
    places = make_places(parallel, config, moe)
    running = product.value if moe.execution == "grouped" else moe.execution
    quantizing = QuantizationPlan(quant, parallel, config, moe, places, platform.value, running)
    tokenizer = Tokenizer.load(directory) if directory else None
    ends = eos_token_ids(config, directory)
    quantizing.check(directory, tokenizer, ends[0] if ends else None)
    resolutions = [
        platform,
        resolved,
        kernels,
        product,
        layout,
        *_exchanges(config, parallel, engine, places[0], platform.value),
    ]
    if kernels.value != "xla" and config.qk_norm == "projection" and parallel.tensor_size > 1:
        # Not silently: the kernels were perhaps asked for by name.
        why = "it runs over a projection that is split over devices, of which a kernel sees a part"
        resolutions.append(Resolution("engine.kernels (QK norm)", "xla", why))
    source = None if load_format == "dummy" else directory
    store = quantizing.rounding.at
    stages = build_stages(config, parallel, places, moe, kernels.value, source, seed, store)
    report = quantizing.finish(stages, on_progress)
    resolutions += quantizing.resolutions(stages)
    functions: list[Any] = [PagedFunctions(stages[0])]
    if len(stages) > 1:
        functions = [StageFunctions(stage) for stage in stages]
    return OpenModel(
        directory, config, stages, places, functions, kernels.value, resolutions, tokenizer, report, replay
    )


def _exchanges(
    config: ModelConfig, parallel: ParallelConfig, engine: EngineConfig, place: SingleDevice, platform: str
) -> list[Resolution]:
    """How tokens travel to their experts in the largest steps; each smaller one decides for itself.

    Raises:
        ConfigError: what was asked for cannot run here.
    """
    if not place.axes.expert or not any(config.moe_layers):
        return []
    found = []
    for name, tokens in (
        (f"decode, {engine.max_num_seqs} rows", engine.max_num_seqs),
        (f"prefill, {engine.max_num_batched_tokens} tokens", engine.max_num_batched_tokens),
    ):
        choice = choose_exchange(
            parallel.exchange,
            tokens=tokens,
            hidden=config.hidden_size,
            itemsize=jnp.dtype(config.dtype).itemsize,
            top_k=config.num_experts_per_tok,
            axes=place.axes,
            platform=platform,
            num_local=(config.num_experts + parallel.redundant_experts) // parallel.ep,
        )
        found.append(choice._replace(key=f"parallel.exchange ({name})"))
    return found
