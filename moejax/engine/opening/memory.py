"""What an engine will hold on each device, before a weight is read, and what would make it fit."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from moejax.core.errors import ConfigError
from moejax.core.hardware import KNOWN, detect
from moejax.core.host import host_memory
from moejax.core.parallel import check_parallel
from moejax.core.quant import QuantConfig
from moejax.engine.adapters import adapter_specs
from moejax.engine.opening.resolve import ResolvedEngine, cache_dtype
from moejax.engine.opening.start import make_runner, plan_cache
from moejax.engine.opening.weights import Weights, load
from moejax.engine.pipeline.runner import PipelineRunner
from moejax.engine.step.ledger import CompileLedger
from moejax.engine.step.limits import CacheSpec, StepKey
from moejax.engine.step.sampler import SamplerMode
from moejax.models.decoder import Decoder
from moejax.nn.param import specs
from moejax.nn.quantized import quantized_weights, replace_weights
from moejax.perf.certificate import Certificate, Change, step_bytes
from moejax.perf.memory import Declared, device_memory, largest
from moejax.quantization.rules import resolve_rules
from moejax.sharding.pipeline import split_layers

_FORMATS = {"int8": "int8", "int4_rtn_g64": "int4_g64"}
"""Presets of `quant` that need no calibration, by falling size, and their formats."""
_TIMES = (2, 4, 8, 16, 32, 64)
"""Times more devices that a layout is looked for with."""
_MODE = SamplerMode(greedy=False, filters=True, penalty=True)


@dataclass(frozen=True)
class EngineMemory:
    """An engine's memory as far as it is known without weights.

    Attributes:
        declared: path → shape, axes and dtype of every tensor, quantized ones as they will be held.
        quantized: whether some are.
        experts_below: bytes of the experts that lie in the host's memory.
    """

    resolved: ResolvedEngine
    declared: Mapping[str, Declared]
    quantized: bool
    experts_below: float = 0.0

    @classmethod
    def of(cls, resolved: ResolvedEngine, weights: Weights) -> "EngineMemory":
        """Returns the memory of an engine with these weights, which need no values."""
        held = [each(stage) for stage in weights.stages for each in (specs, adapter_specs)]
        declared = {name: spec for part in held for name, spec in part.items()}
        quantized, below = any(list(quantized_weights(stage)) for stage in weights.stages), 0.0
        if weights.tiers is not None:
            declared, below = weights.tiers.declared(declared), weights.tiers.most_below
        return cls(resolved, declared, quantized, below)

    def certificate(
        self, limit: float | None = None, step: float | None = None, cache: CacheSpec | None = None
    ) -> Certificate:
        """Returns what a device holds, against `limit` bytes. The largest step is by formula, and the cache
        what will be made beside weights that are not there yet, unless they are given.

        Raises:
            ConfigError: see `moejax.engine.opening.start.cache_blocks`.
        """
        resolved = self.resolved
        model, parallel, engine = resolved.config, resolved.parallel, resolved.engine
        stages = split_layers(model, parallel.pp, parallel.stage_layers)
        held = device_memory(model, parallel, self.declared, num_blocks=0, block_size=1, stages=stages)
        absent = sum(stage.weights for stage in held) * parallel.num_devices // parallel.pp
        try:
            cache = cache or plan_cache(resolved, absent)[0]
        except ConfigError:  # no block beside the weights, if these are not what is too much
            if limit is None or largest(held).weights <= limit:
                raise
            cache = CacheSpec(0, engine.block_size, resolved.max_model_len, resolved.kv_cache.value)
        sizes: dict[str, Any] = cache._asdict() | {"sequences": engine.max_num_seqs + 1, "stages": stages}
        del sizes["max_model_len"]
        held = device_memory(model, parallel, self.declared, **sizes)
        # Prompts of all sequences may be fewer tokens than a step takes.
        tokens = min(engine.max_num_batched_tokens, engine.max_num_seqs * cache.max_model_len)
        rows, tokens = (-(-size // resolved.microbatches) for size in (engine.max_rows, tokens))
        formula = step_bytes(
            model, parallel, rows, tokens, blocks=cache.num_blocks, block_size=cache.block_size,
            kv_dtype=cache.dtype, quantized=self.quantized, kernels=resolved.kernels != "xla",
        )  # fmt: skip
        prefixes = resolved.prefix_cache
        stores = engine.swap_memory_gb * (engine.preemption != "recompute")
        stores += prefixes.host_memory_gb * (prefixes.enabled and prefixes.place == "host")
        beside = 4.0 * (engine.max_num_seqs + 1) * model.vocab_size
        stores = stores * 1e9 / parallel.num_devices + self.experts_below
        beside += (resolved.platform == "cpu") * stores
        if (draft := resolved.draft) is not None:
            mine = EngineMemory.of(draft, load(draft, fill=False))
            beside += mine.certificate(cache=cache._replace(window=None, window_blocks=0)).held.total
        return Certificate(largest(held), step or formula, beside, limit, step is not None)

    def compiled_step(self, weights: Weights) -> float:
        """Compiles the largest step, of weights without values, for the devices that are here, and returns
        the bytes that it needs of each beside its arguments."""
        resolved = self.resolved
        runner = make_runner(resolved, weights, plan_cache(resolved, 0)[0], CompileLedger())
        tokens = min(resolved.engine.max_num_batched_tokens, runner.limits.slots * resolved.max_model_len)
        rows, tokens = (-(-size // resolved.microbatches) for size in (runner.limits.slots, tokens))
        sizes = runner.buckets.rows_for(rows, tokens), runner.buckets.tokens_for(tokens)
        key = StepKey(*sizes, runner.limits.segment_ends[-1], 1, _MODE, False, -1)
        parts = runner.stages if isinstance(runner, PipelineRunner) else [runner]
        programs = [program for part in parts for program in part.programs(key)]
        steps: list[Any] = [CompileLedger().get(*program) for program in programs]
        return float(max(step.memory_analysis().temp_size_in_bytes for step in steps))

    def check(self, limit: float | None, weights: Weights | None, compiles: bool = False) -> Certificate:
        """Returns the certificate.

        Args:
            weights: without values, of the devices that are here; None: the step is for others.
            compiles: the step is compiled whether or not it decides.

        Raises:
            ConfigError: it does not fit; one line names the parts and the smallest changes that make it fit.
        """
        found = self.certificate(limit)
        resolved, engine = self.resolved, self.resolved.engine
        step_decides = compiles or not found.certain
        if found.total - found.step > (math.inf if limit is None else limit):
            step_decides = False
        if weights and engine.memory_check == "auto" and step_decides:
            found = self.certificate(limit, self.compiled_step(weights))
        if found.fits or engine.memory_check == "off":
            return found
        longest = -(-resolved.max_model_len // engine.block_size)
        blocks = engine.num_blocks or engine.max_num_seqs * longest
        limits = {
            "engine.max_num_seqs": (1, engine.max_num_seqs - 1),
            "engine.max_num_batched_tokens": (engine.max_num_seqs, engine.max_num_batched_tokens - 1),
            "engine.max_model_len": (engine.block_size, resolved.max_model_len - 1),
            "engine.num_blocks": (longest, blocks - 1),
        }
        weights_of: list[Change] = [{"quant": name} for name in _FORMATS if not self.quantized]
        if resolved.quant.kv_cache == "auto" and any(resolved.config.paged_layers):
            weights_of.insert(0, {"quant.kv_cache": "int8"})
        layouts: list[Change] = [
            {f"parallel.{name}": getattr(resolved.parallel, name) * times}
            for times, name in itertools.product(_TIMES, ("ep", "tp", "pp"))
            # Virtual devices of a CPU share its memory.
            if (resolved.platform != "cpu" or weights is None)
            and (name != "ep" or any(resolved.config.moe_layers))
        ]

        def fits(change: Change) -> bool:
            try:
                return self.changed(change).certificate(limit).certain
            except ConfigError:  # settings that do not go together, a cache without a block
                return False

        raise ConfigError(found.refusal(fits, limits, weights_of, layouts))

    def changed(self, change: Change) -> "EngineMemory":
        """Returns the memory with some settings changed, by their keys.

        Raises:
            ConfigError: they do not go together, or with the model.
        """
        resolved, declared, quantized = self.resolved, self.declared, self.quantized
        settings = {key.removeprefix("engine."): value for key, value in change.items() if "engine." in key}
        degrees = {
            key.removeprefix("parallel."): value for key, value in change.items() if "parallel." in key
        }
        if settings:
            resolved = resolved.variant(dataclasses.replace(resolved.engine, **settings))
        if degrees:
            parallel = dataclasses.replace(resolved.parallel, **degrees, stage_layers=None)
            check_parallel(parallel, resolved.config, parallel.num_devices)
            parts = parallel.microbatches or min(parallel.pp, resolved.engine.max_num_seqs)
            resolved = dataclasses.replace(resolved, parallel=parallel, microbatches=parts)
        if "quant.kv_cache" in change:
            kv_cache = cache_dtype(change["quant.kv_cache"], resolved.config)
            resolved = dataclasses.replace(resolved, kv_cache=kv_cache)
        if "quant" in change:
            model = Decoder(resolved.config, moe=resolved.moe)
            shapes = {name: spec.matrix_shape for name, spec in specs(model).items()}
            rules = resolve_rules(QuantConfig(method="rtn", format=_FORMATS[change["quant"]]), shapes)
            replace_weights(model, {path: chosen.format for path, chosen in rules.items()})
            declared, quantized = specs(model), True
        return EngineMemory(resolved, declared, quantized, self.experts_below)


def is_here(kind: str) -> bool:
    """Tells whether the device meant is the one that is here, see `device_limit`."""
    return kind in ("auto", detect(jax.local_devices()[0].device_kind))


def device_limit(kind: str = "auto", devices: int = 1) -> float | None:
    """Returns the bytes that a device has left for weights, cache and steps; None where it is not known.

    Args:
        kind: a known kind of device (`moejax.core.hardware.KNOWN`), whose memory counts whatever runs here;
            "auto" goes by what is here.
        devices: of the run; virtual ones share the host's memory.
    """
    here = jax.local_devices()[0]
    if not is_here(kind):
        return KNOWN[kind].memory
    stats = here.memory_stats() if here.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return float(stats["bytes_limit"] - stats.get("bytes_in_use", 0))
    return host_memory() / devices if here.platform == "cpu" else None
