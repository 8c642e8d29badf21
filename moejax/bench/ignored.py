"""Settings that nothing reads in the configuration at hand: they are logged and listed in `resolved`."""

import dataclasses
from collections.abc import Callable
from operator import attrgetter
from typing import Any

_SWITCHES = ("kind", "enabled", "iterations")  # which leave the rest of their section unread

# A section, names of its fields, the condition on the configuration in which nothing reads them, and why.
_RULES: tuple[tuple[str, str, Callable[[Any], Any], str], ...] = (
    ("engine", "kv_cache_memory_gb", lambda c: c.engine.num_blocks, "engine.num_blocks is given"),
    ("engine.static_batching", "*", lambda c: c.engine.batching != "static", "for batching=static"),
    ("engine", "swap_memory_gb swap_disk_gb",
        lambda c: c.engine.preemption == "recompute", "for preemption=swap or auto"),
    ("engine.prefix_cache", "*", lambda c: not c.engine.prefix_cache.enabled, "enabled is false"),
    ("engine", "autotune_budget_s", lambda c: c.engine.autotune != "measure", "for autotune=measure"),
    ("engine.adaptive_batching", "*", lambda c: not c.engine.adaptive_batching.enabled, "limits are fixed"),
    ("engine.adaptive_batching", "sizes", lambda c: c.engine.seq_buckets, "engine.seq_buckets are given"),
    ("engine.adaptive_batching", "increase decrease",
        lambda c: c.engine.adaptive_batching.method != "aimd", "for method=aimd"),
    ("engine.adaptive_batching", "forgetting",
        lambda c: c.engine.adaptive_batching.method != "fitted", "for method=fitted"),
    ("engine.speculation", "*", lambda c: c.engine.speculation.method == "none", "nothing is drafted"),
    ("engine.speculation", "max_ngram", lambda c: c.engine.speculation.method != "ngram", "for method=ngram"),
    ("engine.speculation", "min_ngram",
        lambda c: c.engine.speculation.on_device, "for method=ngram or suffix"),
    ("engine.speculation", "experts",
        lambda c: c.engine.speculation.method != "self_experts", "for method=self_experts"),
    ("engine.speculation", "layers",
        lambda c: c.engine.speculation.method != "self_layers", "for method=self_layers"),
    ("engine.speculation", "draft", lambda c: c.engine.speculation.method != "draft", "for method=draft"),
    ("engine.kv_policy", "*", lambda c: c.engine.kv_policy.method == "none", "nothing is evicted"),
    ("engine.kv_policy", "budget", lambda c: c.engine.kv_policy.method not in ("h2o", "snapkv"),
        "for method=h2o or snapkv"),
    ("engine.kv_policy", "observe pooling",
        lambda c: c.engine.kv_policy.method != "snapkv", "for method=snapkv"),
    ("engine.experts", "policy a2cr popularity popularity_steps tier miss low_bits_below prefetch task",
        lambda c: not c.engine.experts_in_tiers, "all experts are on the device"),
    ("engine.experts", "prefetch", lambda c: c.engine.experts.tier != "disk", "for tier=disk"),
    ("engine.experts", "a2cr", lambda c: "a2cr" not in c.engine.experts.policy, "for policy=a2cr"),
    ("engine.experts", "popularity popularity_steps",
        lambda c: c.engine.experts.policy != "static", "for policy=static"),
    ("engine.experts", "popularity_steps",
        lambda c: c.engine.experts.popularity, "engine.experts.popularity is given"),
    ("engine.experts", "low_bits_below", lambda c: c.engine.experts.miss != "low_bits", "for miss=low_bits"),
    ("engine.experts", "task", lambda c: c.engine.experts.miss != "score", "for miss=score"),
    ("engine.tiers", "host_gb host_memory codes",
        lambda c: not c.engine.experts_in_tiers, "all experts are on the device"),
    ("engine.tiers", "host_memory", lambda c: c.engine.experts.tier != "host", "for tier=host"),
    ("engine.tiers", "disk_dir queue_depth direct",
        lambda c: not (c.engine.experts_in_tiers and c.engine.experts.tier == "disk")
        and not (c.engine.prefix_cache.disk_gb or c.engine.swap_disk_gb), "nothing is on disk"),
    ("engine", "tile_tokens", lambda c: c.engine.deterministic == "none", "nothing is tiled"),
    ("engine", "verify_every verified_share",
        lambda c: c.engine.deterministic != "verified", "for deterministic=verified"),
    ("engine.moe", "capacity_factor overflow",
        lambda c: c.engine.moe.execution != "capacity", "for execution=capacity"),
    ("engine.moe", "grouped_matmul block_rows",
        lambda c: c.engine.moe.execution != "grouped", "for execution=grouped"),
    ("engine.moe.routing", "threshold",
        lambda c: c.engine.moe.routing.method not in ("top_p", "confidence", "ratio"),
        "for method=top_p, confidence or ratio"),
    ("engine.moe.routing", "min_experts",
        lambda c: c.engine.moe.routing.method in ("top_k", "bias"), "for methods that leave experts out"),
    ("engine.moe.routing", "rate", lambda c: c.engine.moe.routing.method != "bias", "for method=bias"),
    ("engine.rebalance", "*", lambda c: not c.engine.rebalance.every_steps, "every_steps is 0"),
    ("backend.reconfigure_to", "*", lambda c: not c.backend.reconfigure_after, "reconfigure_after is 0"),
    ("backend.disaggregate_to", "*", lambda c: c.backend.disaggregate == "none", "disaggregate is none"),
    ("parallel", "attention exchange", lambda c: c.parallel.ep == 1, "for ep above 1"),
    ("parallel", "exchange_capacity overlap_shared dispatch_microbatches",
        lambda c: c.parallel.ep == 1 or c.parallel.attention == "tensor", "no tokens are exchanged"),
    ("parallel", "microbatches", lambda c: c.parallel.pp == 1, "for pp above 1"),
    ("quant", "clip", lambda c: not c.quant.methods, "no weight is quantized"),
    ("quant", "percentile", lambda c: c.quant.clip != "percentile", "for clip=percentile"),
    ("quant", "calibration",
        lambda c: c.quant.methods | {c.quant.experts.method} <= {"none", "rtn", "magnitude"}
        and "static" not in str(c.quant),
        "nothing calibrates"),
    ("quant.experts", "*", lambda c: c.quant.experts.method == "none", "all experts stay"),
    ("quant", "damping act_order gptq_block", lambda c: "gptq" not in c.quant.methods, "for gptq"),
    ("quant", "awq_grid awq_clip", lambda c: "awq" not in c.quant.methods, "for awq"),
    ("quant", "smoothing", lambda c: "smoothquant" not in c.quant.methods, "for smoothquant"),
    ("quantization.speed", "*", lambda c: not c.quantization.speed.iterations, "nothing is timed"),
    ("sampling", "top_k top_p min_p seed", lambda c: c.sampling.greedy, "sampling is greedy"),
    ("workload", "top_k top_p min_p", lambda c: c.workload.temperature == 0, "sampling is greedy"),
    ("workload", "prompt_len",
        lambda c: c.workload.prompts_file and hasattr(c, "ramp"), "the file's prompts keep their lengths"),
    ("telemetry", "*", lambda c: not c.telemetry.enabled, "nothing is sampled"),
    ("tracker", "*", lambda c: c.tracker.kind == "none", "nothing is tracked"),
    ("tracker", "timeout_s", lambda c: c.tracker.kind != "wandb", "for an online run"),
    ("backend", "timeout_s", lambda c: c.backend.kind == "moejax" and c.backend.disaggregate == "none",
        "for a backend in another process"),
    ("backend", "peers", lambda c: not c.backend.compare_with, "backend.compare_with names none"),
    ("ab", "*", lambda c: not c.ab.variants, "there are no ab.variants"),
    ("ab", "max_rounds", lambda c: c.ab.target is None, "for ab.target"),
    ("ramp", "*", lambda c: not c.ramp.enabled, "there is no ramp"),
    ("ramp", "factor max_steps", lambda c: c.ramp.start is None, "for ramp.start"),
    ("offload", "tiers prefetch rounds output_len",
        lambda c: c.offload.mode == "replay", "for mode=measured"),
    ("offload", "batching parts link_gb_per_s compute_ms a2cr resamples",
        lambda c: c.offload.mode == "measured", "for mode=replay"),
    ("generate", "*", lambda c: c.generate.kind is None, "no trace is made"),
    ("placement.rebalance", "*", lambda c: not c.placement.rebalance.every_steps, "every_steps is 0"),
    ("placement", "redundant nodes", lambda c: c.placement.devices == 1, "placement.devices is 1"),
    ("scaling", "devices steps", lambda c: c.scaling.measure == "off", "nothing is measured"),
    ("stress", "abort_share", lambda c: "abort" not in c.stress.phases, "for the phase abort"),
    ("serve", "memory_gb wait_s", lambda c: not c.serve.models, "for serve.models"),
    ("serve", "router retries failures rest_s", lambda c: not c.serve.replicated, "for serve.replicas"),
    ("serve", "queue_ms", lambda c: not c.serve.max_replicas, "for serve.max_replicas"),
    ("bench", "*", lambda c: c.mode != "bench", "for mode=bench"),
    ("tune", "*", lambda c: c.mode != "tune", "for mode=tune"),
)  # fmt: skip


def ignored_settings(config: Any) -> dict[str, dict[str, str]]:
    """Returns key → value and reason of what an experiment's configuration sets though nothing reads it."""
    ignored: dict[str, dict[str, str]] = {}
    for path, names, unread, why in _RULES:
        try:
            section: Any = attrgetter(path)(config)
            fields = [f.name for f in dataclasses.fields(section)] if names == "*" else names.split()
            values = {name: getattr(section, name) for name in fields}
        except AttributeError:
            continue  # of another experiment
        if unread(config):
            usual = type(section)()
            for name, value in values.items():
                if value != getattr(usual, name) and name not in _SWITCHES:
                    key = f"{path}.{name}"
                    ignored.setdefault(key, {"value": str(value), "reason": f"ignored: {why}"})
    return ignored
