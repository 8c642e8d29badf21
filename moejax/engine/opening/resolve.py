"""Decides, once and before any weight is read, what an engine's configuration stands for, and checks it."""

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from moejax.checkpoint.directory import load_config, read_json, resolve_model_dir, stored_quantization
from moejax.core.config import EngineConfig, ModelConfig, PrefixCacheConfig
from moejax.core.errors import CheckpointError, ConfigError, refuse
from moejax.core.files import cache_root
from moejax.core.moe import ExpertLayout, MoeConfig
from moejax.core.parallel import ParallelConfig, check_parallel, check_rebalance
from moejax.core.quant import QuantConfig
from moejax.core.resolve import Resolution, resolve_dtype, resolve_platform
from moejax.engine.adapters import check_adapters
from moejax.engine.opening.autotune import choose_products
from moejax.engine.opening.quantize import QuantizationPlan, plan_quantization
from moejax.engine.requests.tokenizer import Tokenizer
from moejax.engine.routing.recorder import check_capture
from moejax.engine.routing.replay import RoutingReplay, open_replay
from moejax.engine.scheduling.eviction import check_kv_policy
from moejax.engine.scheduling.groups import check_cache_tiers, check_compaction
from moejax.engine.scheduling.policies import Policy, make_policy
from moejax.engine.scheduling.speculation import check_speculation
from moejax.engine.step.ledger import enable_compile_cache
from moejax.engine.tiers.experts import check_tiers
from moejax.models.mtp import mtp_config
from moejax.models.registry import config_from_hf
from moejax.moe.expert_parallel import model_exchange
from moejax.nn.activation import activation
from moejax.ops.dispatch import (
    KERNELS_NEED,
    choose_expert_layout,
    choose_grouped_matmul,
    choose_kernels,
    compute_capability,
)
from moejax.perf.sizes import kv_vector_bytes
from moejax.ptq.reduce import reduced_config
from moejax.sharding.distributed import reserve_cpu_threads
from moejax.sharding.mesh import make_mesh
from moejax.sharding.spmd import MeshDevices, SingleDevice


@dataclass(frozen=True)
class ResolvedEngine:
    """A model and how an engine runs it, with nothing left open. No weight is needed to know it.

    Attributes:
        parallel, engine, quant, seed: as asked for.
        directory: the model's; None for a configuration alone.
        source: the directory that weights are read from; None for random ones.
        config: the model's; its dtype is what it computes in.
        tokenizer: the directory's, if it has one.
        eos_token_ids: tokens that end a sample unless its parameters ignore them.
        platform: "cpu", "gpu".
        moe: how experts are executed and lie in memory.
        kernels: implementation of the GPU kernels, "xla" for none.
        experts: implementation of the expert products, or how experts are executed where it is not grouped.
        places: the devices of each pipeline stage; without a pipeline there is one.
        kv_cache: dtype that keys and values are stored in.
        quantization: what becomes of each weight.
        policy: who goes first.
        prefix_cache: as asked for, its place decided.
        window: tokens that layers with a sliding window keep, in blocks of their own; None: all.
        window_cache: why so many.
        max_model_len: tokens of the longest sequence, prompt and output together.
        microbatches: the most that a step is cut into.
        replay: the routing that steps are told; None: routers choose.
        resolutions: what was decided, and why.
        draft: the other model that drafts, or the MTP layer, if one does.
        is_mtp: whether this is a model's MTP layer, and `config` that of the layer.
    """

    parallel: ParallelConfig
    engine: EngineConfig
    quant: QuantConfig
    seed: int
    directory: Path | None
    source: Path | None
    config: ModelConfig
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    platform: str
    moe: MoeConfig
    kernels: str
    experts: str
    places: list[SingleDevice]
    kv_cache: Resolution
    quantization: QuantizationPlan
    policy: Policy
    prefix_cache: PrefixCacheConfig
    window: int | None
    window_cache: Resolution
    max_model_len: int
    microbatches: int
    replay: RoutingReplay | None
    resolutions: list[Resolution]
    draft: "ResolvedEngine | None" = None
    is_mtp: bool = False

    def variant(self, engine: EngineConfig) -> "ResolvedEngine":
        """Returns the same model with the same weights behind another engine.

        Raises:
            ConfigError: `engine` asks for another execution of the experts, which belongs to the weights, or
                for what the model does not take.
        """
        engine = given("engine", engine, EngineConfig)
        shared = ("moe", "kernels", "adapters", "experts", "tiers")
        if any(getattr(engine, name) != getattr(self.engine, name) for name in shared):
            raise ConfigError(
                "a variant shares its weights, and so engine.moe, engine.kernels, engine.adapters, "
                "engine.experts and engine.tiers; build another LLM"
            )
        limits = engine_limits(engine, self.parallel, self.config, self.kernels)
        policy = make_policy(engine, jax.process_count())
        return _with_draft(dataclasses.replace(self, engine=engine, policy=policy, **limits))


def resolve(
    model: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig,
    dtype: str = "auto",
    parallel: ParallelConfig | None = None,
    engine: EngineConfig | None = None,
    quant: QuantConfig | None = None,
    seed: int = 0,
    load_format: str = "auto",
) -> ResolvedEngine:
    """Decides and checks everything that needs no weight; takes and raises what `moejax.engine.llm.LLM` does.

    It sets JAX's folder of compiled programs, and reserves threads where the host stands for several devices.
    """
    if load_format not in ("auto", "dummy"):
        raise ConfigError(f"load_format must be 'auto' or 'dummy', got {load_format!r}")
    parallel = given("parallel", parallel, ParallelConfig)
    quant = given("quant", quant, QuantConfig)
    engine = given("engine", engine, EngineConfig)
    if not isinstance(seed, (int, np.integer)) or isinstance(seed, bool):
        raise ConfigError(f"seed must be an integer, got {seed!r}")
    if not parallel.is_single:
        reserve_cpu_threads()  # no help where a backend has started already
    platform = resolve_platform(engine.platform)
    if engine.compile_cache:
        enable_compile_cache(default_cache_dir())
    directory, config = find_model(model, load_format)
    activation(config.hidden_act)  # an unknown one raises here, not when the first step is compiled
    policy = make_policy(engine, jax.process_count())
    compute_dtype = resolve_dtype(dtype, config.dtype, platform.value)
    original = _routed(config.replace(dtype=compute_dtype.value), engine.moe.routing.max_experts)
    config = reduced_config(original, quant.experts)
    unsupported = unsupported_by_kernels(config, engine, compute_capability(platform.value))
    if quant.kv_cache == "int4":
        unsupported = "quant.kv_cache=int4 (at least 8 bits)"
    kernels = choose_kernels(engine.kernels, platform.value, unsupported)
    # Kernels for quantized weights that were asked for by name are kernels for the experts, too.
    fused = "pallas_triton" if quant.implementation == "pallas_triton" else kernels.value
    fused = "xla" if engine.adapters.experts else fused  # which do all of an expert in one
    moe = engine.moe
    product = choose_grouped_matmul(moe.grouped_matmul, platform.value, moe.block_rows, fused)
    check_adapters(engine.adapters, parallel, config, moe, product.value)
    check_tiers(engine, parallel, config, quant)
    layout = choose_expert_layout(moe.expert_layout, platform.value, product.value)
    moe = dataclasses.replace(moe, expert_layout=cast(ExpertLayout, layout.value))
    refusal = _not_tuned(engine, parallel, quant, config, platform.value, product.value, directory)
    moe, tuned = choose_products(config, moe, engine, refusal)
    if moe.expert_layout != layout.value:
        layout = layout._replace(value=moe.expert_layout, reason="see engine.autotune")
    if product.value == "pallas_triton":
        moe = dataclasses.replace(moe, grouped_matmul=product.value)
    limits = engine_limits(engine, parallel, config, kernels.value)
    remembered = limits["prefix_cache"]
    places = make_places(parallel, config, moe)
    experts = product.value if moe.execution == "grouped" else moe.execution
    tokenizer = Tokenizer.load(directory) if directory else None
    ends = eos_token_ids(config, directory)
    where = places[0].axes, platform.value, experts, directory
    quantization = plan_quantization(quant, parallel, config, original, moe, *where, tokenizer, ends)
    resolutions = [
        platform,
        compute_dtype,
        kernels,
        product,
        layout,
        tuned,
    ]
    if kernels.value != "xla" and not config.router.has_kernel:
        resolutions.append(Resolution("engine.kernels (router)", "xla", "of two levels, or a SparseMixer"))
    if remembered.enabled:
        why = "out of the steps' way" if remembered.place == "host" else "in blocks of the cache"
        why = why if engine.prefix_cache.place == "auto" else f"asked for; {why}"
        resolutions.append(Resolution("engine.prefix_cache.place", remembered.place, why))
    resolved = ResolvedEngine(
        parallel=parallel,
        engine=engine,
        quant=quant,
        seed=int(seed),
        directory=directory,
        source=None if load_format == "dummy" else directory,
        config=config,
        tokenizer=tokenizer,
        eos_token_ids=ends,
        platform=platform.value,
        moe=moe,
        kernels=kernels.value,
        experts=experts,
        places=places,
        kv_cache=cache_dtype(quant.kv_cache, config),
        quantization=quantization,
        policy=policy,
        resolutions=resolutions,
        **limits,
    )
    return _with_draft(dataclasses.replace(resolved, resolutions=[*resolutions, *layout_told(resolved)]))


def _routed(config: ModelConfig, max_experts: int | None) -> ModelConfig:
    """Returns the model with so many experts a token; None, or without experts: the same.

    Raises:
        ConfigError: it has fewer, or fewer in the groups that a token chooses from.
    """
    if max_experts is None or not any(config.moe_layers):
        return config
    try:
        return config.replace(num_experts_per_tok=max_experts)
    except ConfigError as error:
        raise ConfigError(f"engine.moe.routing.max_experts={max_experts}: {error}; give fewer") from None


def layout_told(resolved: ResolvedEngine) -> list[Resolution]:
    """Returns what the layout decides."""
    config, parallel = resolved.config, resolved.parallel
    told = _exchanges(config, parallel, resolved.engine, resolved.places[0], resolved.platform)
    if resolved.kernels != "xla" and config.qk_norm == "projection" and parallel.tensor_size > 1:
        # Not silently: the kernels were perhaps asked for by name.
        why = "it runs over a projection that is split over devices, of which a kernel sees a part"
        told.append(Resolution("engine.kernels (QK norm)", "xla", why))
    vocab, padded = config.vocab_size, parallel.padded_vocab(config.vocab_size)
    if padded > vocab:
        why = f"vocabulary {vocab} padded to {padded} for {parallel.tensor_size} devices"
        told.append(Resolution("vocab_size", str(padded), why))
    return told


def _with_draft(resolved: ResolvedEngine) -> ResolvedEngine:
    """Returns it with the model that drafts for it, if another one is to.

    Raises:
        ConfigError, CheckpointError: there is no such model, or not one whose drafts the other can verify.
    """
    engine, vocab = resolved.engine, resolved.config.vocab_size
    name, method = engine.speculation.draft, engine.speculation.method
    if method not in ("draft", "mtp"):
        return dataclasses.replace(resolved, draft=None)
    shared = ("platform", "kernels", "moe", "block_size", "compile_cache", "max_num_seqs", "autotune")
    fields = {field: getattr(engine, field) for field in (*shared, "max_num_batched_tokens")}
    alone = EngineConfig(max_model_len=resolved.max_model_len, **fields)
    quant, seed = QuantConfig(kv_cache=resolved.quant.kv_cache), resolved.seed
    form = "dummy" if resolved.source is None else "auto"
    if method == "mtp":
        config, own = mtp_config(resolved.quantization.original or resolved.config), {"replay": None}
        alike: dict[str, Any] = {"engine": alone, "quant": quant, "quantization": QuantizationPlan({}), **own}
        draft = dataclasses.replace(resolved, config=config, is_mtp=True, draft=None, window=None, **alike)
        return dataclasses.replace(resolved, draft=draft)
    assert name is not None
    try:
        draft = resolve(name, resolved.config.dtype, resolved.parallel, alone, quant, seed, form)
    except (ConfigError, CheckpointError) as error:
        raise type(error)(f"engine.speculation.draft: {error}") from error
    refusals = {
        f"a vocabulary of {draft.config.vocab_size} tokens, and the model one of {vocab}": (
            draft.config.vocab_size != vocab
        ),
        "linear attention, whose states cannot be taken back": any(draft.config.linear_layers),
    }
    for reason, holds in refusals.items():
        if holds:
            raise ConfigError(f"engine.speculation.draft={name} has {reason}; name another model")
    return dataclasses.replace(resolved, draft=draft)


def engine_limits(
    engine: EngineConfig, parallel: ParallelConfig, config: ModelConfig, kernels: str
) -> dict[str, Any]:
    """Returns the fields of `ResolvedEngine` that an engine's configuration decides for a given model.

    Raises:
        ConfigError: sequences longer than the model's; routing to capture or to replay that the model does
            not have; more microbatches than there can be rows.
    """
    longest, positions = engine.max_model_len, config.max_position_embeddings
    if longest is not None and longest > positions and config.rope.kind != "dynamic":
        raise ConfigError(
            f"engine.max_model_len={longest} exceeds the model's max_position_embeddings {positions}"
        )
    check_capture(engine.capture_routing, config)
    check_rebalance(engine.rebalance, parallel, config, jax.process_count())
    _check_preemption(engine, config)
    check_speculation(engine, parallel, config)
    _check_deterministic(engine, parallel, config)
    window = _window(engine, config, longest or positions)
    check_kv_policy(engine, parallel, config, kernels, window["window"])
    check_compaction(engine, parallel, kernels)
    replay = open_replay(engine.replay_routing, config)
    microbatches, rows = parallel.microbatches, engine.max_num_seqs
    if microbatches is not None and microbatches > rows:
        raise ConfigError(
            f"parallel.microbatches={microbatches} exceeds engine.max_num_seqs={rows}: each microbatch has "
            "at least one row"
        )
    return {
        "max_model_len": longest or positions,
        "microbatches": min(parallel.pp, rows) if microbatches is None else microbatches,
        "replay": replay,
        "prefix_cache": _prefix_cache(engine, parallel, config, kernels),
        **window,
    }


def _window(engine: EngineConfig, config: ModelConfig, longest: int) -> dict[str, Any]:
    """Decides how many tokens layers with a sliding window keep.

    Raises:
        ConfigError: it was asked for, and there is no window, or all tokens are needed.
    """
    windows = [window for window in config.sliding_windows if window is not None and window < longest]
    refusals = {
        f"no layer has a sliding window below the {longest} tokens of engine.max_model_len": not windows,
        "engine.prefix_cache.enabled=true needs all tokens of a prompt": engine.prefix_cache.enabled,
        f"engine.preemption={engine.preemption} moves all tokens": engine.preemption != "recompute",
    }
    reasons = [reason for reason, holds in refusals.items() if holds]
    if engine.window_cache == "window" and reasons:
        raise ConfigError(f"engine.window_cache=window: {reasons[0]}; use auto or full")
    if not windows or reasons or engine.window_cache == "full":
        why = (reasons or ["asked for"])[0]
        return {"window": None, "window_cache": Resolution("engine.window_cache", "full", why)}
    kinds = config.cache_kinds(max(windows))
    why = f"{kinds.count('window')} of {len(kinds)} layers keep {max(windows)} tokens of a sequence"
    return {"window": max(windows), "window_cache": Resolution("engine.window_cache", "window", why)}


def _prefix_cache(
    engine: EngineConfig, parallel: ParallelConfig, config: ModelConfig, kernels: str
) -> PrefixCacheConfig:
    """Decides where prefixes wait.

    Raises:
        ConfigError: a prefix's keys and values would depend on more than its tokens, or cannot be kept.
    """
    cache = engine.prefix_cache
    if cache.place == "auto":
        cache = dataclasses.replace(cache, place="host" if kernels == "xla" or cache.disk_gb else "device")
    refusals = {
        "engine.batching=static: it waits for whole batches": engine.batching == "static",
        f"{engine.moe.by_batch} depends on the batch": engine.moe.by_batch and any(config.moe_layers),
        "parallel.exchange_capacity: what is dropped depends on the batch": (
            parallel.exchange_capacity is not None
        ),
        f"a model with {config.rope.kind} rotary scaling: keys depend on their sequence's length": (
            config.rope.by_length
        ),
        "linear attention: a state is not kept at every token": any(config.linear_layers),
        "engine.prefix_cache.place=host with several processes: choose device": (
            cache.place == "host" and jax.process_count() > 1
        ),
    }
    refuse("engine.prefix_cache.enabled=true", cache.enabled, refusals)
    check_cache_tiers(engine, parallel, cache)
    return cache


def _check_preemption(engine: EngineConfig, config: ModelConfig) -> None:
    """Raises `ConfigError` where what is preempted cannot wait in the host's memory."""
    refusals = {
        "engine.batching=static, which preempts nothing": engine.batching == "static",
        "linear attention, whose states are no blocks": any(config.linear_layers),
        "several processes": jax.process_count() > 1,
    }
    asked = engine.preemption != "recompute"
    refuse(f"engine.preemption={engine.preemption}", asked, refusals, "; use recompute")


def _check_deterministic(engine: EngineConfig, parallel: ParallelConfig, config: ModelConfig) -> None:
    """Raises `ConfigError` where a token cannot but depend on what else is in the batch."""
    moe, speculation = engine.moe, engine.speculation
    sparse, grouped = any(config.moe_layers), moe.execution == "grouped"
    verified = engine.deterministic == "verified"
    refusals = {
        "engine.batching=static, which pads": engine.batching == "static",
        "linear attention, whose chunks are computed in one": any(config.linear_layers),
        f"{moe.by_batch} depends on the batch": sparse and moe.by_batch,
        f"engine.moe.grouped_matmul={moe.grouped_matmul}, which has all rows in one product": (
            sparse and grouped and moe.grouped_matmul in ("ragged_dot", "batched")
        ),
        "parallel.exchange_capacity: what is dropped depends on the batch": (
            parallel.exchange_capacity is not None
        ),
        f"engine.speculation.method={speculation.method}, which drafts in steps of its own": (
            speculation.on_device
        ),
        f"engine.speculation.method={speculation.method}: it drafts by itself": (
            verified and speculation.most > 0
        ),
        f"parallel.pp={parallel.pp}, whose stages take all steps in one way": verified and parallel.pp > 1,
    }
    asked = engine.deterministic != "none"
    refuse(f"engine.deterministic={engine.deterministic}", asked, refusals, "; use none")


def _not_tuned(
    engine: EngineConfig,
    parallel: ParallelConfig,
    quant: QuantConfig,
    config: ModelConfig,
    platform: str,
    product: str,
    directory: Path | None,
) -> str | None:
    """Returns why experts' products are not chosen by time, None where they can be."""
    if not any(config.moe_layers):
        return "the model has no experts"
    if platform != "cpu" or product == "pallas_triton":
        return "GPU kernels have tables of their own"
    if engine.adapters.experts:
        return "experts have slots for adapters"
    asked = engine.moe
    open_to_choice = (asked.execution, asked.grouped_matmul, asked.block_rows, asked.expert_layout)
    if open_to_choice != ("grouped", "auto", None, "auto"):
        return "engine.moe says what runs"
    if not parallel.is_single:
        return "products are timed for one device"
    if quant.methods or (directory and stored_quantization(directory)):
        return "only products of float weights are timed"
    return None


def make_places(parallel: ParallelConfig, model: ModelConfig, moe: MoeConfig) -> list[SingleDevice]:
    """Returns the devices of each pipeline stage that an engine runs on.

    Raises:
        ConfigError: the model cannot be spread so, or there are too few devices.
    """
    if parallel.is_single:
        return [SingleDevice()]
    check_parallel(parallel, model, jax.device_count())
    if moe.execution == "capacity" or moe.routing.method == "batch":
        if parallel.ep > 1 or parallel.redundant_experts:
            raise ConfigError(
                f"{moe.by_batch} depends on the whole batch, which experts on several devices do not see; "
                "use parallel.exchange_capacity to bound what is exchanged"
            )
        if parallel.pp > 1 and parallel.microbatches != 1:
            raise ConfigError(
                f"{moe.by_batch} depends on the whole batch, which microbatches cut; with "
                f"parallel.pp={parallel.pp} it needs parallel.microbatches=1"
            )
    plan = make_mesh(parallel, model.num_kv_heads, jax.devices()[parallel.first_device :])
    return [MeshDevices(mesh, plan.axes) for mesh in plan.stages]


def unsupported_by_kernels(
    config: ModelConfig, engine: EngineConfig, capability: str | None = None
) -> str | None:
    """Returns what of a model, of the cache's shape, or of the device the GPU kernels do not take, or None.

    Args:
        capability: of the GPU, "8.0"; None where it is not known.
    """
    if capability is not None and tuple(map(int, capability.split("."))) < KERNELS_NEED:
        return f"a GPU of compute capability {capability} (at least {'.'.join(map(str, KERNELS_NEED))})"
    size = engine.block_size
    if size < 8 or size & (size - 1):
        return f"engine.block_size={size} (a power of two, at least 8)"
    if not all(config.paged_layers):
        return "linear attention (softmax attention only)"
    latent = config.latent
    if latent is not None and (config.key_dim % 8 or latent.kv_rank % 8 or latent.kv_rank > 512):
        sizes = f"kv_lora_rank={latent.kv_rank} and qk_rope_head_dim={latent.rope_dim}"
        return f"latents of {sizes} (multiples of 8, the first at most 512)"
    if config.qk_norm == "rotated":
        return "norms of queries and keys after rotary embedding (before it only)"
    if latent is None and (config.head_dim % 8 or config.head_dim > 256):
        return f"head_dim={config.head_dim} (a multiple of 8, at most 256)"
    if config.num_experts > 4096 or config.num_experts_per_tok > 16:
        chosen = f"{config.num_experts_per_tok} of {config.num_experts} experts"
        return f"{chosen} a token (at most 16 of 4096)"
    return None


def cache_dtype(requested: str, config: ModelConfig) -> Resolution:
    """Decides the dtype of the key/value cache, with the reason. The choice is checked by `QuantConfig`."""
    key, plain = "quant.kv_cache", kv_vector_bytes(config.key_dim, config.dtype)
    if requested == "auto":
        if config.latent is None:
            return Resolution(key, config.dtype, "the model's dtype")
        whole = config.num_heads * (config.head_dim + config.latent.value_dim)
        why = f"the model's dtype; {config.key_dim} numbers a token and layer, not the {whole:,} of all heads"
        return Resolution(key, config.dtype, why)
    if not any(config.paged_layers):
        raise ConfigError(
            f"{key}={requested}: no layer keeps keys and values, only states in float32; use auto"
        )
    if requested == "int4" and config.latent is not None:
        raise ConfigError(f"{key}=int4 does not go with latents, whose values are a part of keys; use int8")
    coded = kv_vector_bytes(config.key_dim, requested)
    why = f"asked for; {coded} bytes a token and head, scale included, instead of {plain} in {config.dtype}"
    why += "" if all(config.paged_layers) else "; states of linear attention stay in float32"
    return Resolution(key, requested, why)


def _exchanges(
    config: ModelConfig, parallel: ParallelConfig, engine: EngineConfig, place: SingleDevice, platform: str
) -> list[Resolution]:
    """Decides how tokens travel to experts in the largest steps; each smaller one decides for itself.

    Raises:
        ConfigError: what was asked for cannot run here.
    """
    if not place.axes.expert or not any(config.moe_layers):
        return []
    exchanges = []
    for name, tokens in (
        (f"decode, {engine.max_num_seqs} rows", engine.max_num_seqs),
        (f"prefill, {engine.max_num_batched_tokens} tokens", engine.max_num_batched_tokens),
    ):
        choice = model_exchange(config, parallel, tokens, place.axes, platform)
        exchanges.append(choice._replace(key=f"parallel.exchange ({name})"))
    return exchanges


def find_model(
    model: str | os.PathLike[str] | Mapping[str, Any] | ModelConfig, load_format: str
) -> tuple[Path | None, ModelConfig]:
    if isinstance(model, (ModelConfig, Mapping)):
        if load_format != "dummy":
            raise ConfigError("a configuration without a directory has no weights; use load_format='dummy'")
        return None, model if isinstance(model, ModelConfig) else config_from_hf(dict(model))
    if not isinstance(model, (str, os.PathLike)):
        raise ConfigError(
            "model must be a shipped model's name, a directory, or a configuration with load_format='dummy', "
            f"got {model!r}"
        )
    directory = resolve_model_dir(model)
    config = load_config(directory)
    if load_format == "dummy" and (stored := stored_quantization(directory)):
        raise ConfigError(
            f"{directory}: load_format='dummy' makes no quantized weights, and {stored[1].name} has a "
            "quantization_config; remove it and say quant=, or load the weights"
        )
    return directory, config


def eos_token_ids(config: ModelConfig, directory: Path | None) -> tuple[int, ...]:
    """Returns the configuration's end-of-sequence tokens and those that `generation_config.json` adds."""
    ids = set(config.eos_token_ids)
    path = directory / "generation_config.json" if directory else None
    if path is not None and path.is_file():
        settings = read_json(path)
        if not isinstance(settings, dict):
            raise CheckpointError(f"{path}: not a JSON object")
        extra = settings.get("eos_token_id")
        more = extra if isinstance(extra, list) else [] if extra is None else [extra]
        if not all(isinstance(token, int) for token in more):
            raise CheckpointError(f"{path}: eos_token_id must be a token id or a list of them, got {extra!r}")
        ids.update(more)
    return tuple(sorted(ids))


def given(name: str, value: Any, kind: Any) -> Any:
    """Returns `value`, or `kind`'s defaults for None.

    Raises:
        ConfigError: it is something else, a dictionary for example.
    """
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} must be a {kind.__name__}, got {value!r}")
    return kind() if value is None else value


def default_cache_dir() -> str:
    """Returns the folder of compiled programs, below `cache_root`."""
    # XLA's CPU programs depend on the host's instruction set; JAX's key covers versions and options.
    return str(cache_root() / "xla" / f"{jax.__version__}-{jax.default_backend()}")
