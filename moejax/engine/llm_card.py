"""The card that a notebook shows of an `LLM`."""

from typing import TYPE_CHECKING

import jax

from moejax.core import html
from moejax.core.words import byte_words
from moejax.nn.quantized import weight_size

if TYPE_CHECKING:
    from moejax.engine.llm import LLM


def engine_card(llm: "LLM") -> str:
    """Writes HTML: model, devices, cache, what "auto" became and why, what was compiled."""
    config, stats = llm.config, llm.stats()
    num_bytes, numbers = _sizes(llm)
    device, count = jax.devices()[0], llm.parallel_config.num_devices
    experts = f"{config.num_experts} experts (top-{config.num_experts_per_tok})"
    sparse = f"{sum(config.moe_layers)} of them with {experts}" if any(config.moe_layers) else "no experts"
    about = {
        "model": f"{config.family}, {config.num_layers} layers, {sparse}",
        "weights": f"{numbers:,} parameters, {byte_words(num_bytes)},"
        f" {8 * num_bytes / numbers:.3g} bits each",
        "devices": f"{count} × {device.device_kind}",
        "cache": f"{stats['num_blocks']:,} blocks of {stats['block_size']} tokens,"
        f" {stats['used_blocks']:,} in use; {byte_words(stats['kv_cache_capacity_bytes'])} in"
        f" {stats['cache_dtype']}, {byte_words(stats['kv_cache_allocated_bytes'])} of it allocated",
        "limits": f"{llm.max_model_len:,} tokens a sequence, {llm.engine_config.max_num_seqs} sequences at"
        f" once, {llm.engine_config.batching} batching",
        "compiled": f"{stats['compiles']} programs in {llm.ledger.seconds:.1f} s",
    }
    chosen = [[item.key, item.value, item.reason] for item in llm.resolutions]
    table = html.table(("choice", "value", "reason"), chosen, right=()) if chosen else ""
    return html.card(f"LLM {_name(llm)}", html.facts(about), table)


def engine_line(llm: "LLM") -> str:
    """Writes one line for a terminal."""
    num_bytes, numbers = _sizes(llm)
    return (
        f"<LLM {_name(llm)}: {numbers:,} parameters, {byte_words(num_bytes)},"
        f" {llm.parallel_config.num_devices} × {jax.devices()[0].device_kind}>"
    )


def _name(llm: "LLM") -> str:
    return llm.model_dir.name if llm.model_dir is not None else llm.config.family


def _sizes(llm: "LLM") -> tuple[int, int]:
    """Counts the bytes held, and the parameters that they stand for."""
    sizes = [weight_size(stage) for stage in llm.stages]
    return sum(num_bytes for num_bytes, _ in sizes), sum(numbers for _, numbers in sizes)
