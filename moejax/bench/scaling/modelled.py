"""A layout's memory, communication and modelled step times. Nothing is run, no device is needed."""

import math
from dataclasses import replace
from typing import Any

from moejax.bench.scaling.config import ScalingSection
from moejax.cache.allocator import window_blocks
from moejax.core.config import ModelConfig
from moejax.core.hardware import Hardware
from moejax.core.parallel import ParallelConfig, check_parallel
from moejax.models.decoder import Decoder
from moejax.moe.exchange_cost import exchange_cost
from moejax.moe.expert_parallel import model_exchange
from moejax.nn.param import specs
from moejax.perf.comm import Exchange
from moejax.perf.memory import device_memory, largest
from moejax.perf.scaling import Phase, model_step
from moejax.sharding.mesh import make_axes
from moejax.sharding.pipeline import split_layers


def layout_row(
    model: ModelConfig,
    parallel: ParallelConfig,
    hardware: Hardware,
    section: ScalingSection,
    block_size: int,
    imbalance: float = 1.0,
) -> dict[str, Any]:
    """Returns a layout's row on a device kind; times in milliseconds, bytes of one device. `imbalance` is
    `model_step`'s.

    Raises:
        ConfigError: the model cannot be spread so.
    """
    check_parallel(parallel, model, parallel.num_devices)
    groups = parallel.data_groups
    sequences = math.ceil(section.batch_size / groups)
    blocks = sequences * math.ceil((section.context_len + 1) / block_size)
    windows = [window for window in model.sliding_windows if window and window < section.context_len]
    window = max(windows, default=None)
    stages = device_memory(
        model,
        parallel,
        specs(Decoder(model)),
        num_blocks=blocks,
        block_size=block_size,
        sequences=sequences + 1,
        window=window,
        window_blocks=window_blocks(window, block_size, sequences, 0, blocks) if window else 0,
        stages=split_layers(model, parallel.pp, parallel.stage_layers),
    )
    memory = largest(stages)
    row: dict[str, Any] = {
        "devices": parallel.num_devices,
        "data_groups": groups,
        "device_weight_bytes": memory.weights,
        "device_expert_weight_bytes": memory.expert_weights,
        "device_cache_bytes": memory.cache,
        "device_memory_bytes": memory.total,
        "fits": None if hardware.memory is None else memory.total <= hardware.memory,
    }
    prompts = math.ceil(section.num_prompts / groups)
    phases = [
        Phase("decode", sequences, sequences, section.context_len, sequences),
        Phase("prefill", prompts * section.prompt_len, prompts, section.prompt_len / 2, prompts),
    ]
    for phase in phases:
        microbatches = min(parallel.microbatches or parallel.pp, phase.tokens)
        exchange, why = exchange_of(model, parallel, math.ceil(phase.tokens / microbatches))
        of_step = phase, exchange
        step = model_step(
            model, parallel, hardware, stages, *of_step, microbatches=microbatches, imbalance=imbalance
        )
        name = phase.name
        if name == "decode" and model.latent is not None and parallel.tensor_size > 1:
            even = [replace(stage, cache=stage.cache // parallel.tensor_size) for stage in stages]
            split = model_step(
                model, parallel, hardware, even, *of_step, microbatches=microbatches, split_latents=True
            )
            row |= {"split_latents_memory_bytes": largest(even).total}
            row |= {"split_latents_decode_ms": split.seconds * 1e3}
        row |= {
            f"{name}_ms": step.seconds * 1e3,
            f"{name}_memory_ms": step.memory * 1e3,
            f"{name}_compute_ms": step.compute * 1e3,
            f"{name}_link_ms": step.transfer * 1e3,
            f"{name}_link_latency_ms": step.latency * 1e3,
            f"{name}_bubble": step.bubble,
            f"{name}_exchange": exchange.method,
            f"{name}_exchange_reason": why,
            f"{name}_comm_bytes": sum(step.comm_bytes.values()),
        }
        row |= {f"{name}_comm_bytes_{role}": sent for role, sent in step.comm_bytes.items() if sent}
    seconds = row["decode_ms"] / 1e3
    row["tokens_per_s"] = section.batch_size / seconds
    row["tokens_per_s_device"] = section.batch_size / seconds / parallel.num_devices
    return row


def exchange_of(
    model: ModelConfig, parallel: ParallelConfig, tokens: int, platform: str = "gpu"
) -> tuple[Exchange, str]:
    """Returns the exchange of a step of `tokens` tokens a device, with an even routing, and why this one."""
    if parallel.attention != "data" or parallel.ep == 1:
        return Exchange(), "all expert ranks see all tokens"
    chosen = model_exchange(model, parallel, tokens, make_axes(parallel, model.num_kv_heads), platform)
    return exchange_cost(chosen.value, model, parallel, tokens), chosen.reason
