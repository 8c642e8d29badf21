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
from moejax.engine.group_scheduler import GroupScheduler
from moejax.engine.policy import make_policy
from moejax.engine.scheduler import Scheduler
from moejax.engine.static_scheduler import StaticScheduler
from moejax.models.registry import config_from_hf

CPU_CACHE_BYTES = 2e9
DEVICE_CACHE_SHARE = 0.8


def longest_sequence(engine: EngineConfig, config: ModelConfig) -> int:
    """The limit on prompt and output together."""
    asked, own = engine.max_model_len, config.max_position_embeddings
    if asked is not None and asked > own and config.rope.kind != "dynamic":
        raise ConfigError(f"engine.max_model_len={asked} exceeds the model's max_position_embeddings {own}")
    return asked or own


def unsupported_by_kernels(config: ModelConfig, engine: EngineConfig) -> str | None:
    """What of a model, or of the cache's shape, the GPU kernels do not take; None if they take it all."""
    size = engine.block_size
    if size < 8 or size & (size - 1):
        return f"engine.block_size={size} (a power of two, at least 8)"
    if config.head_dim % 8 or config.head_dim > 256:
        return f"head_dim={config.head_dim} (a multiple of 8, at most 256)"
    if config.num_experts > 512 or config.num_experts_per_tok > 16:
        chosen = f"{config.num_experts_per_tok} of {config.num_experts} experts"
        return f"{chosen} a token (at most 16 of 512)"
    return None


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


def cache_blocks(
    engine: EngineConfig, config: ModelConfig, max_model_len: int, parallel: ParallelConfig
) -> Resolution:
    """Blocks of the key/value cache (of each data-parallel group), with the reason.

    Raises:
        ConfigError: the memory allowed does not hold one block.
    """
    split = parallel.kv_split(config.num_kv_heads)
    key, size = "engine.num_blocks", block_bytes(config, engine.block_size, config.dtype, split)
    if engine.num_blocks is not None:
        return Resolution(key, str(engine.num_blocks), f"asked for; {engine.num_blocks * size / 1e6:.0f} MB")
    wanted = engine.max_num_seqs * -(-max_model_len // engine.block_size)
    memory, why = _cache_memory(engine, parallel.num_devices)
    fitting = int(memory // size)
    if fitting < 1:
        raise ConfigError(
            f"engine.kv_cache_memory_gb: {memory / 1e9:.3g} GB ({why}) do not hold one block of "
            f"{engine.block_size} tokens, {size / 1e9:.3g} GB; raise it or lower engine.block_size"
        )
    if wanted <= fitting:
        reason = f"{engine.max_num_seqs} sequences of {max_model_len} tokens; {wanted * size / 1e6:.0f} MB"
        return Resolution(key, str(wanted), reason)
    return Resolution(key, str(fitting), f"{memory / 1e9:.3g} GB: {why}")


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
    return directory, load_config(directory)


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
