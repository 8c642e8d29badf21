"""What an `LLM` needs before it can run: the model's files, limits, memory. Raises one-line errors."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from moejax.cache.allocator import BlockAllocator
from moejax.cache.pool import block_bytes
from moejax.checkpoint.hf import load_config, read_json, resolve_model_dir
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import CheckpointError, ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.core.resolve import Resolution
from moejax.engine.scheduling.groups import GroupScheduler
from moejax.engine.scheduling.policy import make_policy
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.static import StaticScheduler
from moejax.models.registry import config_from_hf
from moejax.ops.dispatch import KERNELS_NEED
from moejax.perf.cost import KV_CODE_BYTES, kv_head_bytes

CPU_CACHE_BYTES = 2e9
DEVICE_CACHE_SHARE = 0.8


def longest_sequence(engine: EngineConfig, config: ModelConfig) -> int:
    """The limit on prompt and output together."""
    asked, own = engine.max_model_len, config.max_position_embeddings
    if asked is not None and asked > own and config.rope.kind != "dynamic":
        raise ConfigError(f"engine.max_model_len={asked} exceeds the model's max_position_embeddings {own}")
    return asked or own


def unsupported_by_kernels(
    config: ModelConfig, engine: EngineConfig, capability: str | None = None
) -> str | None:
    """What of a model, of the cache's shape, or of the device the GPU kernels do not take; None if they take
    it all.

    Args:
        capability: of the GPU, "8.0"; None where it is not known.
    """
    if capability is not None and tuple(map(int, capability.split("."))) < KERNELS_NEED:
        return f"a GPU of compute capability {capability} (at least {'.'.join(map(str, KERNELS_NEED))})"
    size = engine.block_size
    if size < 8 or size & (size - 1):
        return f"engine.block_size={size} (a power of two, at least 8)"
    if config.head_dim % 8 or config.head_dim > 256:
        return f"head_dim={config.head_dim} (a multiple of 8, at most 256)"
    if config.num_experts > 512 or config.num_experts_per_tok > 16:
        chosen = f"{config.num_experts_per_tok} of {config.num_experts} experts"
        return f"{chosen} a token (at most 16 of 512)"
    return None


def compute_capability(platform: str) -> str | None:
    """Of the GPUs, "8.0"; None elsewhere, or where JAX does not say."""
    if platform != "gpu":
        return None
    return str(getattr(jax.local_devices()[0], "compute_capability", "")) or None


def make_scheduler(engine: EngineConfig, num_blocks: int, groups: int) -> Scheduler | GroupScheduler:
    """A scheduler, or one for each data-parallel group, with that many blocks each."""
    kind = StaticScheduler if engine.batching == "static" else Scheduler
    made = [
        kind(
            BlockAllocator(num_blocks, engine.block_size),
            engine.max_num_seqs,
            engine.max_num_batched_tokens,
            make_policy(engine.policy),
        )
        for _ in range(groups)
    ]
    return made[0] if groups == 1 else GroupScheduler(made)


def cache_dtype(asked: str, config: ModelConfig) -> Resolution:
    """The dtype of the key/value cache, with the reason. The choice is checked by `QuantConfig`."""
    key, plain = "quant.kv_cache", kv_head_bytes(config.head_dim, config.dtype)
    if asked == "auto":
        return Resolution(key, config.dtype, "the model's dtype")
    held = kv_head_bytes(config.head_dim, asked)
    why = f"asked for; {held} bytes a token and head, scale included, instead of {plain} in {config.dtype}"
    return Resolution(key, asked, why)


def cache_blocks(
    engine: EngineConfig,
    config: ModelConfig,
    max_model_len: int,
    parallel: ParallelConfig,
    kv_dtype: str | None = None,
    kernels: str = "xla",
) -> Resolution:
    """Blocks of the key/value cache (of each data-parallel group), with the reason.

    Args:
        kv_dtype: of the cache; None: the model's.
        kernels: implementation of the GPU kernels, "xla" for none.

    Raises:
        ConfigError: the memory allowed does not hold one block; more blocks are asked for than kernels take.
    """
    split = parallel.kv_split(config.num_kv_heads)
    key, size = "engine.num_blocks", block_bytes(config, engine.block_size, kv_dtype or config.dtype, split)
    # Codes of a block of one layer, where there are kernels that must index them.
    codes = 0
    if kernels != "xla" and kv_dtype in KV_CODE_BYTES:
        codes = config.num_kv_heads // split * engine.block_size * config.head_dim
    if engine.num_blocks is not None:
        if not _kernels_take(engine.num_blocks * codes):
            raise ConfigError(
                f"engine.num_blocks={engine.num_blocks}: the GPU kernels take a cache in {kv_dtype} of at "
                f"most {2**31 // codes} or more than {2**32 // codes} such blocks; lower it, or use "
                "engine.kernels=xla"
            )
        return Resolution(key, str(engine.num_blocks), f"asked for; {engine.num_blocks * size / 1e6:.0f} MB")
    wanted = engine.max_num_seqs * -(-max_model_len // engine.block_size)
    memory, why = _cache_memory(engine, parallel.num_devices)
    fitting = int(memory // size)
    if fitting < 1:
        raise ConfigError(
            f"engine.kv_cache_memory_gb: {memory / 1e9:.3g} GB ({why}) do not hold one block of "
            f"{engine.block_size} tokens, {size / 1e9:.3g} GB; raise it or lower engine.block_size"
        )
    if not _kernels_take(min(wanted, fitting) * codes):
        return Resolution(
            key, str(2**31 // codes), f"the most that the GPU kernels take of a cache in {kv_dtype}"
        )
    if wanted <= fitting:
        reason = f"{engine.max_num_seqs} sequences of {max_model_len} tokens; {wanted * size / 1e6:.0f} MB"
        return Resolution(key, str(wanted), reason)
    return Resolution(key, str(fitting), f"{memory / 1e9:.3g} GB: {why}")


def _kernels_take(codes: int) -> bool:
    """Whether Pallas can index a layer's codes, of one byte each: it counts in 32 signed bits up to 4 GiB and
    in 64 above (`pallas_kernels.kv.check_pool_size`)."""
    return codes <= 2**31 or codes > 2**32


def _cache_memory(engine: EngineConfig, devices: int) -> tuple[float, str]:
    """Bytes on each device, and why so many."""
    if engine.kv_cache_memory_gb is not None:
        return engine.kv_cache_memory_gb * 1e9, "engine.kv_cache_memory_gb"
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        free = stats["bytes_limit"] - stats.get("bytes_in_use", 0)
        return DEVICE_CACHE_SHARE * free, f"{DEVICE_CACHE_SHARE:.0%} of the device's free memory"
    why = "the default without device memory statistics"
    # Virtual devices share one memory.
    return CPU_CACHE_BYTES / devices, why if devices == 1 else f"{why}, over {devices} devices"


def given(name: str, value: Any, kind: Any) -> Any:
    """`value`, or `kind`'s defaults for None.

    Raises:
        ConfigError: it is something else, a dictionary for example.
    """
    if value is not None and not isinstance(value, kind):
        raise ConfigError(f"{name} must be a {kind.__name__}, got {value!r}")
    return kind() if value is None else value


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
    if load_format == "dummy" and read_json(directory / "config.json").get("quantization_config"):
        raise ConfigError(
            f"{directory}: load_format='dummy' makes no quantized weights, and config.json has a "
            "quantization_config; remove it and say quant=, or load the weights"
        )
    return directory, config


def eos_token_ids(config: ModelConfig, directory: Path | None) -> tuple[int, ...]:
    """The configuration's end-of-sequence tokens and those that `generation_config.json` adds."""
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


def cache_root() -> Path:
    """Where what can be made again is kept: `$MOEJAX_CACHE_DIR` or `moejax` in the user's cache folder."""
    base = os.environ.get("MOEJAX_CACHE_DIR")
    return Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "moejax"


def default_cache_dir() -> str:
    """Where compiled programs are kept, below `cache_root`."""
    # XLA's CPU programs depend on the host's instruction set; JAX's key covers versions and options.
    return str(cache_root() / "xla" / f"{jax.__version__}-{jax.default_backend()}")
